"""Predictive distributions whose draws are made pixel by pixel of the features of the whole image.

Large images need no blending of masks then: features are stitched from windows, and masks are drawn in parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ambiseg.masks import MaskDistribution
from ambiseg.methods.predictive import Canvas, InParts, Noise, PointPredictive, Predictive, Stratified, evaluation
from ambiseg.nn.features import Backbone
from ambiseg.nn.pixelhead import Folded, draw_masks, label_dtype
from ambiseg.nn.windows import Block, Step, Windows, dense_blocks, stitched

BAND = 1 << 18  # pixels of which masks are drawn at a time


def drawn(rows: Tensor, head: Folded, noise: Noise, size: tuple[int, int]) -> MaskDistribution:
    """The masks of a folded head with the weights of a noise and their marginal, a band of pixels at a time.

    Args:
        rows: features ``[B, P, F]``, P = H · W.
        head: with the N draws of the noise folded in.
        size: (H, W).
    """
    (B, P, _), C, device = rows.shape, head.classes, rows.device
    if P <= BAND:
        labels, marginal = draw_masks(rows, head, noise.mass)
    else:
        labels = torch.empty(B, noise.count, P, dtype=label_dtype(C), device=device)
        marginal = torch.empty(B, C, P, dtype=torch.promote_types(rows.dtype, torch.float32), device=device)
        for start in range(0, P, BAND):
            band = slice(start, start + BAND)
            labels[:, :, band], marginal[:, :, band] = draw_masks(rows[:, band], head, noise.mass)
    labels, marginal = labels.unflatten(2, size), marginal.unflatten(2, size)
    return MaskDistribution(labels, None if noise.weights is None else noise.weights.detach(), marginal=marginal)


class DensePredictive(Predictive):
    """What is drawn at a pixel depends on the features there and on what holds for the whole image."""

    @abstractmethod
    def of_part(self, dense: Tensor) -> Predictive:
        """The same for a part of the image with features ``[1, F, h, w]``."""


def bands(dense: Tensor) -> Iterator[Block]:
    """Features ``[1, F, H, W]`` of a whole image, :data:`BAND` pixels at a time."""
    rows = max(1, BAND // dense.shape[3])
    for y in range(0, dense.shape[2], rows):
        yield Block(y, 0, dense[:, :, y : y + rows])


class _InParts(InParts):
    """One large image of which masks are drawn part by part, with the noise of each place.

    Args:
        method: whose networks these are; they run in evaluation mode.
        first: what draws the noise, and knows what holds for the whole image. It needs no pixel.
        part: features ``[1, F, h, w]`` -> their distribution.
        blocks: the features of all parts; called for every rendering.
        size: (H, W) of the image.
        passes: how often networks run for a rendering.
    """

    def __init__(
        self,
        method: nn.Module,
        first: Predictive,
        part: Callable[[Tensor], Predictive],
        blocks: Callable[[], Iterator[Block]],
        size: tuple[int, int],
        passes: int,
    ) -> None:
        self.method, self.first, self.part, self.blocks = method, first, part, blocks
        self.classes, self.size, self.passes = first.classes, size, passes

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return self.first.noise(n, generator)

    def probs(self, noise: Noise) -> Tensor:
        canvas = torch.empty(1, noise.count, self.classes, *self.size, device=noise.codes.device)
        for block, part in self._parts():
            canvas[block.place] = part.probs(noise.at(block.y, block.x))
        return canvas

    def fill(self, canvas: Canvas, noises: Sequence[Noise]) -> None:
        for block, part in self._parts():
            for which, noise in enumerate(noises):
                masks = part.render(noise.at(block.y, block.x))
                assert masks.marginal is not None
                canvas.put(which, block, masks.labels, masks.marginal)

    def _parts(self) -> Iterator[tuple[Block, Predictive]]:
        with evaluation(self.method):
            for block in self.blocks():
                with torch.no_grad():
                    part = self.part(block.maps)
                yield block, part


class _PointInParts(_InParts, PointPredictive):
    """The same with one mask for all."""

    def point(self) -> Tensor:
        assert isinstance(self.first, PointPredictive)
        canvas = self.first.point().new_empty(1, *self.size)
        for block, part in self._parts():
            assert isinstance(part, PointPredictive)
            canvas[block.place] = part.point()
        return canvas


class _StrataInParts(_InParts, Stratified):
    """The same with strata."""

    def __init__(self, method: nn.Module, first: Predictive, *where: Any) -> None:
        super().__init__(method, first, *where)
        assert isinstance(first, Stratified)
        self.strata, self.weights = first, first.weights

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return Stratified.noise(self, n, generator)

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        return self.strata.noise_of(strata, generator)

    def centre_noise(self) -> Noise:
        return self.strata.reweighted(self.weights).centre_noise()


def in_parts(
    method: nn.Module, first: DensePredictive, backbone: Backbone, image: Tensor, windows: Windows, step: Step | None
) -> Predictive:
    """One image ``[1, C, H, W]`` whose features are not kept (:func:`ambiseg.nn.windows.keeps`).

    Args:
        method: whose networks these are; they run in evaluation mode.
        first: the predictive distribution without a pixel of features.
        backbone: what makes the features again, in every drawing.
    """
    kind = _StrataInParts if isinstance(first, Stratified) else _InParts
    return kind(method, first, first.of_part, partial(dense_blocks, backbone, image, windows, step), first.size, 1)


def pixel_by_pixel(
    method: nn.Module,
    predictive: Callable[[Tensor], PointPredictive],
    backbone: Backbone,
    image: Tensor,
    windows: Windows,
    step: Step | None,
) -> PointPredictive:
    """One image ``[1, C, H, W]`` of a method that knows nothing but the features of each pixel.

    Features are stitched from windows and kept, or made again for every rendering where they do not fit. What follows
    from them is computed part by part in any case.

    Args:
        method: whose networks these are; they run in evaluation mode.
        predictive: features ``[B, F, h, w]`` -> their distribution.
        backbone: what makes the features.
    """
    with evaluation(method), torch.no_grad():
        dense = stitched(backbone, image, windows, step).dense
        first = predictive(torch.zeros(1, backbone.dense_channels, 1, 1, device=dense.device))
    kept = dense.numel() > 0
    blocks = partial(bands, dense) if kept else partial(dense_blocks, backbone, image, windows, step)
    return _PointInParts(method, first, predictive, blocks, (image.shape[2], image.shape[3]), 0 if kept else 1)
