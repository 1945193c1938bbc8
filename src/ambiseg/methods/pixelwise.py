"""Methods whose prediction at a pixel is a function of the backbone's features at that pixel.

Large images need no blending of masks then: features are stitched from windows once, and masks are drawn in bands of
rows, with the noise of each place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ambiseg.methods.base import Method, evaluation
from ambiseg.methods.predictive import Canvas, InParts, Noise, Predictive
from ambiseg.nn.features import Backbone
from ambiseg.nn.windows import Block, Step, Windows, dense_blocks, stitched

_BAND = 1 << 18  # pixels of a large image of which masks are drawn at a time


class PointPredictive(Predictive):
    """A predictive distribution that has one mask for all, without drawing."""

    @abstractmethod
    def point(self) -> Tensor:
        """The mask that is predicted if it has to be one, ``[B, H, W]``."""


class Pixelwise(Method):
    """Features of the backbone, and a distribution of masks that they decide pixel by pixel."""

    backbone: Backbone

    @abstractmethod
    def predictive(self, dense: Tensor) -> PointPredictive:
        """Features ``[B, F, H, W]`` -> the distribution of masks."""

    def forward(self, images: Tensor) -> PointPredictive:
        return self.predictive(self.backbone(images).dense)

    def predict(self, images: Tensor) -> PointPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> PointPredictive:
        """Features by windows, stitched to one map, or made again for every rendering where they do not fit."""
        with evaluation(self), torch.no_grad():
            dense, size = stitched(self.backbone, image, windows, step).dense, (image.shape[2], image.shape[3])
        return _Bands(self, dense, size) if dense.numel() else _Blocks(self, dense, _Large(image, windows, step))


class _Large(NamedTuple):
    """An image whose features are not kept."""

    image: Tensor
    windows: Windows
    step: Step | None


class _Bands(InParts, PointPredictive):
    """One large image of which all features are kept, ``[1, F, H, W]``; the rest is computed band by band."""

    passes = 0

    def __init__(self, method: Pixelwise, dense: Tensor, size: tuple[int, int]) -> None:
        self.method, self.dense, self.size, self.classes = method, dense, size, method.classes

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        with evaluation(self.method), torch.no_grad():
            return self.method.predictive(self.dense[:, :, :1, :1]).noise(n, generator)

    def probs(self, noise: Noise) -> Tensor:
        canvas = self._canvas(noise.count, self.classes)
        for block, part in self._parts():
            canvas[block.place] = part.probs(noise.at(block.y, block.x))
        return canvas

    def point(self) -> Tensor:
        canvas = self._canvas().long()
        for block, part in self._parts():
            canvas[block.place] = part.point()
        return canvas

    def fill(self, canvas: Canvas, noises: Sequence[Noise]) -> None:
        for block, part in self._parts():
            for which, noise in enumerate(noises):
                drawn = part.render(noise.at(block.y, block.x))
                assert drawn.marginal is not None
                canvas.put(which, block, drawn.labels, drawn.marginal)

    def _canvas(self, *shape: int) -> Tensor:
        return torch.empty(1, *shape, *self.size, device=self.dense.device)

    def _parts(self) -> Iterator[tuple[Block, PointPredictive]]:
        for block in self._blocks():
            with evaluation(self.method), torch.no_grad():
                part = self.method.predictive(block.maps)
            yield block, part

    def _blocks(self) -> Iterator[Block]:
        rows = max(1, _BAND // self.size[1])
        for y in range(0, self.size[0], rows):
            yield Block(y, 0, self.dense[:, :, y : y + rows])


class _Blocks(_Bands):
    """One image whose features do not fit into memory: they are made again for every rendering."""

    passes = 1

    def __init__(self, method: Pixelwise, dense: Tensor, large: _Large) -> None:
        super().__init__(method, dense, (large.image.shape[2], large.image.shape[3]))
        self.large = large

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        pixel = torch.zeros(1, self.method.backbone.dense_channels, 1, 1, device=self.dense.device)
        return _Bands(self.method, pixel, (1, 1)).noise(n, generator)

    def _blocks(self) -> Iterator[Block]:
        with evaluation(self.method):
            yield from dense_blocks(self.method.backbone, *self.large)
