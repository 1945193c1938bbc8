"""From raw pixel values to the network's input: an explicit setting that is saved with every model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Intensity:
    """Cut to a window, then shift and scale:  x ↦ (min(max(x, low), high) - mean) / std.

    One number is for all channels, a tuple has one for each. Nothing is taken from the image itself, so that a value
    means the same in every image and a crop of an image is prepared as the whole image is.

    Args:
        low: smaller values become this; nothing cuts none.
        high: larger values become this; nothing cuts none.
        mean: is subtracted; one for all channels, or one for each.
        std: is divided by; one for all channels, or one for each.

    >>> lung = Intensity(low=-1000, high=400, mean=-300, std=700)
    >>> lung(torch.tensor([[[[-2000., -300., 3000.]]]]))
    tensor([[[[-1.,  0.,  1.]]]])
    """

    low: float | None = None
    high: float | None = None
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"intensity: expected low < high, found {self.low:g} and {self.high:g}")
        for name in ("mean", "std"):
            if isinstance(value := getattr(self, name), list):  # as JSON and YAML have it
                object.__setattr__(self, name, tuple(value))
        scales = self.std if isinstance(self.std, tuple) else (self.std,)
        if not all(s > 0 for s in scales):
            raise ValueError(f"intensity: expected std > 0, found {self.std}")

    def __call__(self, images: Tensor) -> Tensor:
        """``[B, C, *spatial]`` of any number type -> the same shape in float32."""
        images = images.float()
        if self.low is not None or self.high is not None:
            images = images.clamp(self.low, self.high)
        return (images - self._by_channel(self.mean, images)) / self._by_channel(self.std, images)

    def undo(self, images: Tensor) -> Tensor:
        """Back to raw units, for pictures; what the window cut off stays cut off."""
        return images * self._by_channel(self.std, images) + self._by_channel(self.mean, images)

    def _by_channel(self, value: float | tuple[float, ...], images: Tensor) -> Tensor | float:
        if not isinstance(value, tuple):
            return value
        if len(value) != images.shape[1]:
            raise ValueError(f"intensity: expected {images.shape[1]} values, one a channel, found {len(value)}")
        return torch.tensor(value, device=images.device).view(1, -1, *[1] * (images.ndim - 2))

    @staticmethod
    def for_dtype(dtype: np.dtype) -> Intensity:
        """Bytes to [-1, 1]; anything else is left as it is, because its units are not known."""
        return Intensity(0, 255, 127.5, 127.5) if dtype == np.uint8 else Intensity()

    @staticmethod
    def fit(images: Iterable[np.ndarray], low: float | None = None, high: float | None = None) -> Intensity:
        """Mean and standard deviation of each channel over ``images [C, H, W]``, after the window; to be saved.

        >>> Intensity.fit([np.array([[[0, 2]], [[5, 5]]]), np.array([[[0, 2]], [[5, 7]]])], high=6)
        Intensity(low=None, high=6, mean=(1.0, 5.25), std=(1.0, 0.4330127018922193))
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
        std[std == 0] = 1.0  # a channel that never changes says nothing at any scale
        return Intensity(low, high, tuple(mean.tolist()), tuple(std.tolist()))
