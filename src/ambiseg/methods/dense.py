"""Predictive distributions whose draws are made pixel by pixel of the features of the whole image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ambiseg.masks import MaskDistribution
from ambiseg.methods.predictive import Canvas, InParts, Noise, Predictive, Stratified, evaluation
from ambiseg.nn.features import Backbone
from ambiseg.nn.pixelhead import Folded, draw_masks, label_dtype
from ambiseg.nn.windows import Block, Step, Windows, dense_blocks

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


class _InParts(InParts):
    """One image whose features do not fit into memory: they are made again, and masks are drawn, part by part."""

    def __init__(
        self,
        method: nn.Module,
        first: DensePredictive,
        backbone: Backbone,
        image: Tensor,
        windows: Windows,
        step: Step | None,
    ) -> None:
        self.method, self.first, self.backbone = method, first, backbone
        self.image, self.windows, self.step = image, windows, step
        self.classes, self.size = first.classes, first.size

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return self.first.noise(n, generator)

    def probs(self, noise: Noise) -> Tensor:
        canvas = torch.empty(1, noise.count, self.classes, *self.size, device=self.image.device)
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
            for block in dense_blocks(self.backbone, self.image, self.windows, self.step):
                yield block, self.first.of_part(block.maps)


class _StrataInParts(_InParts, Stratified):
    """The same with strata."""

    first: DensePredictive

    def __init__(self, method: nn.Module, first: DensePredictive, *where: object) -> None:
        super().__init__(method, first, *where)  # type: ignore[arg-type]
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
    return kind(method, first, backbone, image, windows, step)
