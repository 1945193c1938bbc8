"""Stochastic Segmentation Networks (Monteiro et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ambiseg._util.bands import bands
from ambiseg.masks import MaskDistribution, Masks, at_least_float32
from ambiseg.methods.base import Noise, PublishedConfig
from ambiseg.methods.pixelwise import Pixelwise, PointPredictive
from ambiseg.methods.predictive import Numbers, placed_noise
from ambiseg.methods.schedules import Scheduled, check_range, final
from ambiseg.methods.targets import CLIP, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.likelihood import pixel_ce
from ambiseg.nn.lowrank import LowRankNormal, likelihood, numbers_at_once
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.places import new_seeds
from ambiseg.overlap import full_precision
from ambiseg.settings import SettingError


class SSNConfig(PublishedConfig):
    """Settings of Stochastic Segmentation Networks."""

    method: Literal["ssn"] = "ssn"
    rank: int = Field(
        default=10, ge=0, le=256, description="R, columns of the factor of the covariance; 0: pixels are independent"
    )
    samples: int = Field(default=20, ge=1, le=10_000, description="M, draws per image that the likelihood is a mean of")
    antithetic: bool = Field(
        default=False, description="half of the draws are the other half, mirrored at the mean; M is even then"
    )
    spread: Scheduled = Field(
        default=1.0,
        description="how far draws are from the mean while training, relative to predictions; 0 trains the mean alone, "
        "as {values: [0, 1], warm_up: 4} does for five epochs",
    )

    @model_validator(mode="after")
    def _fit(self) -> SSNConfig:
        if self.antithetic and self.samples % 2:
            raise SettingError("samples", f"expected an even number with antithetic draws, found {self.samples}")
        check_range("spread", self.spread, 1)
        if final(self.spread) != 1:
            raise SettingError("spread", f"expected 1 at last, as in predictions, found {final(self.spread):g}")
        return self


class SSN(Pixelwise):
    """A backbone and a pixel network that give a normal distribution over the logits of all pixels together:

        η ~ N(μ(x), P(x) P(x)ᵀ + diag D(x)),     y = argmax softmax(η),     P of R columns

    Pixels go together by P. With R = 0 they are independent, given the image.

    >>> model = SSN.build(SSNConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)
    """

    Config: ClassVar = SSNConfig
    idea = "a normal distribution of low rank over the logits of all pixels together"
    reference = (
        "Monteiro et al., Stochastic Segmentation Networks: Modelling Spatially Correlated Aleatoric Uncertainty, "
        "NeurIPS 2020"
    )
    year = 2020
    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.clip": CLIP}
    terms: ClassVar = {
        "pixel": "−log of the likelihood of the annotation, per pixel",
        "effective": "how many of the draws the likelihood rests on, 1 / Σ w² of their shares w",
    }

    def __init__(self, config: SSNConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        trunk = config.trunk(backbone)
        self.config, self.classes, self.backbone = config, classes, trunk.build_dense(in_channels)
        maps = (2 + config.rank) * classes
        self.head = PixelMLP(self.backbone.dense_channels, maps, norm=True, momentum=trunk.momentum)
        # PyTorch's start, as in the authors' code. With a wider one draws begin with marks all over the image, and the
        # likelihood, which rests on the best draw, unlearns them slowly.
        cast(nn.Linear, self.head.layers[-1]).reset_parameters()

    def normal(self, dense: Tensor) -> LowRankNormal:
        """The distribution of the logits, in float32 whatever the features ``[B, F, H, W]`` are."""
        hidden, last = self.head.hidden(dense), self.head.layers[-1]
        assert isinstance(last, nn.Linear)
        with full_precision(hidden):
            maps = F.conv2d(at_least_float32(hidden), last.weight[..., None, None], last.bias)
            return LowRankNormal.split(maps, self.classes)

    def predictive(self, dense: Tensor) -> SSNPredictive:
        return SSNPredictive(self.normal(dense))

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        spread: float | None = None,
    ) -> dict[str, Tensor]:
        """The Monte-Carlo likelihood of one annotation y per image, drawn by its weights; the mean over images of

            −log 1/M Σ_m Π_pixels softmax(η_m)[y],     η_m = μ + P ε₁ + √D ε₂

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            spread: of this step, when a schedule moves it; ``None`` takes the setting's last value.

        Returns:
            ``total``, ``pixel`` and ``effective``, scalars.
        """
        config, target = self.config, one_each(annotations, self.classes, generator)
        spread = final(config.spread) if spread is None else spread
        normal = self.normal(self.backbone(images).dense)
        if spread == 0:  # all draws are the mean
            nll = pixel_ce(normal.mean, target.labels, target.valid).sum((1, 2))
            effective = torch.full_like(nll, config.samples)
        else:
            normal = _deciding(normal).scaled(spread)
            nll, of_each = likelihood(normal, target.labels, target.valid, config.samples, config.antithetic, generator)
            effective = 1 / of_each.softmax(1).square().sum(1)
        pixels = target.labels.numel() if target.valid is None else target.valid.sum().clamp_min(1)
        total = target.mean(nll)
        return {
            "total": total,
            "pixel": (nll.detach() * target.counted).sum() / pixels,
            "effective": target.mean(effective),
        }


def _deciding(normal: LowRankNormal) -> LowRankNormal:
    """What decides the classes: of two their margin, one number a pixel instead of two."""
    return normal.margin() if normal.mean.shape[1] == 2 else normal


@dataclass(frozen=True, eq=False)
class SSNPredictive(PointPredictive):
    """A normal distribution over the logits of a batch of images.

    A draw is ε₁ of the whole image and ε₂ of every place. Two classes are decided by the margin of their logits, whose
    ε₂ is one number a pixel:

        η₁ − η₀ = (μ₁ − μ₀) + (P₁ − P₀) ε₁ + √(D₀ + D₁) ε₂

    Attributes:
        normal: of ``[B, C, H, W]``.
    """

    normal: LowRankNormal

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.normal.mean.shape[1]

    @property
    def size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.normal.mean.shape[2], self.normal.mean.shape[3]

    @cached_property
    def _deciding(self) -> LowRankNormal:
        return _deciding(self.normal)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """ε₁ and the seeds of ε₂."""
        mean = self.normal.mean
        shape = len(mean), n, max(self.normal.rank, 1)
        codes = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return Noise(codes, seeds=new_seeds(len(mean), n, generator, mean.device))

    seeded = True

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.normal.rank

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        """Where R is 0 there is no ε₁."""
        if numbers.normals is None:
            return placed_noise(numbers)
        return Noise(numbers.normals, seeds=numbers.seeds)

    def _scores(self, noise: Noise) -> Tensor:
        """Logits of every draw ``[B, N, C, H, W]``; of two classes their margin ``[B, N, 1, H, W]``."""
        normal = self._deciding
        pixels = noise.normal(0, normal.mean.shape[1], self.size).to(normal.mean.dtype)
        return normal.at(noise.codes[:, :, : normal.rank], pixels)

    def probs(self, noise: Noise) -> Tensor:
        scores = self._scores(noise)
        if self.classes > 2:
            return scores.softmax(2)
        ones = scores.sigmoid()
        return torch.cat([1 - ones, ones], 2)

    def render(self, noise: Noise) -> MaskDistribution:
        """The masks of a noise, as many at a time as fit into a cache."""
        mean, mass = self._deciding.mean, noise.mass.detach()
        labels = torch.empty(len(mean), noise.count, *self.size, dtype=label_dtype(self.classes), device=mean.device)
        marginal = torch.zeros_like(mean).flatten(1)[:, None]
        with torch.no_grad():
            for some in bands(noise.count, max(1, numbers_at_once(mean) // mean.numel())):
                scores = self._scores(noise[some])
                labels[:, some] = scores[:, :, 0] > 0 if self.classes == 2 else _greatest(scores)
                probs = scores.sigmoid_() if self.classes == 2 else scores.softmax(2)
                marginal.baddbmm_(mass[:, None, some].to(probs.dtype), probs.flatten(2))
        marginal = marginal[:, 0].view_as(mean)
        if self.classes == 2:
            marginal = torch.cat([1 - marginal, marginal], 1)
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(labels, weights, marginal=marginal)

    def point(self) -> Tensor:
        """The most likely class of the mean logits at every pixel, ``[B, H, W]``."""
        return self.normal.mean.argmax(1)


def _greatest(scores: Tensor) -> Tensor:
    """``scores.argmax(2)`` of ``[B, N, C, H, W]``, whose own loop on the CPU is slow along an axis that is not last."""
    best, labels = scores[:, :, 0].clone(), torch.zeros_like(scores[:, :, 0], dtype=label_dtype(scores.shape[2]))
    for c in range(1, scores.shape[2]):
        labels.masked_fill_(scores[:, :, c] > best, c)
        torch.maximum(best, scores[:, :, c], out=best)
    return labels
