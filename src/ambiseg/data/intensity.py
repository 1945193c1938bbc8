"""From raw pixel values to the network's input: an explicit setting that is saved with every model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.settings import FORBID, SettingError, shown

_SAMPLE = 1 << 16  # pixels that percentiles of an image are taken from
LARGEST = 1e30  # of raw values: float32, which networks compute in, has no numbers from 3.4e38 on
_Value = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Values = Annotated[tuple[_Value, ...], Field(min_length=1, max_length=1024)]
PerChannel = _Value | _Values  # one number for all channels, or one per channel


@dataclass(frozen=True, config=FORBID)
class Intensity:
    """Clip to a window, then shift and scale:  x ↦ (min(max(x, low), high) - mean) / std.

    Nothing is taken from the image itself, so that a value means the same in every image, and a crop of an image is
    prepared as the whole image is. Where values have no unit, as in MR, ``per_image`` first measures every channel of
    an image in its own range,  x ↦ (x - p) / (q - p)  with its 0.5th and 99.5th percentile p and q; the range of a crop
    is that of the whole image, which :meth:`ranges` gives.

    >>> lung = Intensity(low=-1000, high=400, mean=-300, std=700)
    >>> lung(torch.tensor([[[[-2000., -300., 3000.]]]]))
    tensor([[[[-1.,  0.,  1.]]]])
    """

    low: _Value | None = Field(default=None, description="smaller values become this; null: no lower limit")
    high: _Value | None = Field(default=None, description="larger values become this; null: no upper limit")
    mean: PerChannel = Field(default=0.0, description="subtracted; one number for all channels, or one per channel")
    std: PerChannel = Field(default=1.0, description="divided by; one number for all channels, or one per channel")

    per_image: bool = Field(
        default=False,
        description="first measure an image in its own range: its 0.5th percentile is 0, its 99.5th is 1, for values "
        "without a unit, such as MR; low, high, mean and std are then in this unit",
    )

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise SettingError("low", f"expected low < high, found {self.low:g} and {self.high:g}")
        if not all(s > 0 for s in (self.std if isinstance(self.std, tuple) else (self.std,))):
            raise SettingError("std", f"expected std > 0, found {shown(self.std)}")

    def __call__(self, images: Tensor, ranges: Tensor | None = None) -> Tensor:
        """``[B, C, *spatial]`` of any number type -> the same shape in float32.

        Args:
            ranges: for ``per_image``, those of the whole images that these are windows of; by default their own.
        """
        images = images.float()
        if self.per_image:
            own = (self.ranges(images) if ranges is None else ranges).to(images)
            p, q = own.view(*own.shape[:2], *[1] * (images.ndim - 2), 2).unbind(-1)
            images = (images - p) / (q - p)
        if self.low is not None or self.high is not None:
            images = images.clamp(self.low, self.high)
        return (images - self._by_channel(self.mean, images)) / self._by_channel(self.std, images)

    @staticmethod
    def ranges(images: Tensor) -> Tensor:
        """``[B, C, 2]``: the 0.5th and 99.5th percentile of every channel, from a regular sample of the pixels."""
        flat = images.flatten(2)
        if torch.compiler.is_exporting():
            return _ranges_of_any_size(flat.float())
        flat = flat[:, :, :: max(1, flat.shape[2] // _SAMPLE)].float()
        p, q = torch.quantile(flat, torch.tensor([0.005, 0.995], device=flat.device), 2)
        return torch.stack([p, torch.where(q > p, q, p + 1)], 2)

    def undo(self, images: Tensor) -> Tensor:
        """Back to raw units (``per_image``: those of the image's range), for pictures; clipped values stay clipped."""
        return images * self._by_channel(self.std, images) + self._by_channel(self.mean, images)

    def _by_channel(self, value: PerChannel, images: Tensor) -> Tensor | float:
        if not isinstance(value, tuple):
            return value
        if len(value) != images.shape[1]:
            raise DataError(f"intensity: expected {images.shape[1]} values, one per channel, found {len(value)}")
        return torch.tensor(value, device=images.device).view(1, -1, *[1] * (images.ndim - 2))

    @staticmethod
    def for_dtype(dtype: np.dtype) -> Intensity:
        """Bytes to [-1, 1]; any other type unchanged, because its units are not known."""
        return Intensity(0, 255, 127.5, 127.5) if dtype == np.uint8 else Intensity()

    @staticmethod
    def fit(images: Iterable[np.ndarray], low: float | None = None, high: float | None = None) -> Intensity:
        """Mean and standard deviation of each channel over ``images [C, H, W]``, after the window.

        >>> Intensity.fit([np.array([[[0, 2]], [[5, 5]]]), np.array([[[0, 2]], [[5, 7]]])], high=6)
        Intensity(low=None, high=6.0, mean=(1.0, 5.25), std=(1.0, 0.4330127018922193), per_image=False)
        """
        count, total, square = 0, np.zeros(0), np.zeros(0)
        for image in images:
            flat = np.clip(image.reshape(len(image), -1).astype(np.float64), low, high)
            if not count:
                total, square = np.zeros(len(flat)), np.zeros(len(flat))
            elif len(flat) != len(total):
                raise ValueError(f"intensity: expected {len(total)} channels in every image, found {len(flat)}")
            count += flat.shape[1]
            total, square = total + flat.sum(1), square + (flat**2).sum(1)
        if not count:
            raise ValueError("intensity: expected at least one image to fit to, found none")
        mean = total / count
        std = np.sqrt(np.maximum(square / count - mean**2, 0))
        std[std == 0] = 1.0  # a constant channel
        return Intensity(low, high, tuple(mean.tolist()), tuple(std.tolist()))


def _ranges_of_any_size(flat: Tensor) -> Tensor:
    """:meth:`Intensity.ranges` of ``[B, C, P]`` in steps that ``torch.export`` can follow without knowing P."""
    pixels = flat.shape[2]
    step = torch.sym_max(1, pixels // _SAMPLE)
    taken = torch.arange((pixels + step - 1) // step, device=flat.device) * step
    ordered = flat.index_select(2, taken).sort(2).values
    last = ordered.shape[2] - 1
    rank = torch.tensor([0.005, 0.995], device=flat.device) * last
    below = rank.floor()
    low, high = (ordered.index_select(2, place.long()) for place in (below, (below + 1).clamp_max(last)))
    p, q = torch.lerp(low, high, rank - below).unbind(2)
    return torch.stack([p, torch.where(q > p, q, p + 1)], 2)
