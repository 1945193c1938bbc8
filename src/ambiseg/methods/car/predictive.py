"""What CAR predicts for a batch of images."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution, at_least_float32
from ambiseg.methods.car.networks import Prepared, Refinement
from ambiseg.methods.predictive import Noise, Numbers, PointPredictive, evaluation, mean_of
from ambiseg.nn.features import crop
from ambiseg.nn.pixelhead import label_dtype

_PIXELS = 1 << 17  # of masks that the refinement network makes at a time; larger chunks are slower on CPUs


@dataclass(frozen=True, eq=False)
class CARPredictive(PointPredictive):
    """The calibrated probabilities, and what the refinement network computed for all draws; a draw is one code.

    Attributes:
        calibrated: ``[B, C, H, W]``, the calibration network's class probabilities: what the mean of all draws is
            trained to be, without drawing.
        refinement: the network that makes masks of codes.
        prepared: what it computed once.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards.
    """

    refinement: Refinement
    calibrated: Tensor
    prepared: Prepared
    training: bool

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.calibrated.shape[1]

    @property
    def size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.calibrated.shape[2], self.calibrated.shape[3]

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """z ~ N(0, I) of every draw."""
        shape = len(self.calibrated), n, self.refinement.latent
        return Noise(torch.randn(shape, generator=generator, device=self.calibrated.device))

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.refinement.latent

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        assert numbers.normals is not None
        return Noise(numbers.normals)

    def soft(self, noise: Noise) -> Tensor:
        return self._probs(noise.codes)

    def probs(self, noise: Noise) -> Tensor:
        if self.training:  # batch statistics are of all draws together
            return self._probs(noise.codes)
        return torch.cat([self._probs(codes) for codes in self._chunks(noise)], 1)

    def render(self, noise: Noise) -> MaskDistribution:
        mass, labels, marginal = noise.mass, [], torch.zeros((), device=self.calibrated.device)
        with torch.no_grad():
            for codes, weights in zip(self._chunks(noise), mass.split(self._at_once, 1), strict=True):
                probs = self._probs(codes)
                marginal = marginal + mean_of(probs, weights)
                labels.append(probs.argmax(2).to(label_dtype(self.classes)))
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.cat(labels, 1), weights, marginal=marginal)

    def point(self) -> Tensor:
        """The most likely class of every pixel, ``[B, H, W]``, by the calibration network."""
        return self.calibrated.argmax(1)

    @property
    def _at_once(self) -> int:
        return max(1, _PIXELS // (len(self.calibrated) * self.size[0] * self.size[1]))

    def _chunks(self, noise: Noise) -> tuple[Tensor, ...]:
        return noise.codes.split(self._at_once, 1)

    def _probs(self, codes: Tensor) -> Tensor:
        mode: AbstractContextManager[None] = nullcontext() if self.training else evaluation(self.refinement)
        with mode:
            logits = self.refinement.decode(self.prepared, codes)
        return at_least_float32(crop(logits.flatten(0, 1), self.size)).softmax(1).unflatten(0, codes.shape[:2])
