"""PHiSeg (Baumgartner et al., MICCAI 2019): latent maps in levels, from coarse to fine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.masks import Masks, at_least_float32
from ambiseg.methods.base import Method, Noise, PublishedConfig, evaluation
from ambiseg.methods.phiseg.network import Latents, Likelihood
from ambiseg.methods.predictive import Chunked, Numbers, placed_noise
from ambiseg.methods.schedules import Scheduled, check_range, final
from ambiseg.methods.targets import CLIP, Target, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import check_images, coarser, crop
from ambiseg.nn.gaussian import Gaussian, kl
from ambiseg.nn.hierarchy import Level, walk
from ambiseg.nn.latent import LatentEncoder
from ambiseg.nn.likelihood import pixel_ce
from ambiseg.nn.places import new_seeds

FLOOR = 1e-10  # of variances in the KL, as in the authors' code
LEVELS, GAP = 5, 2  # latent levels of the paper, and how often its finest latent map is halved
_BETA = 1e6
_ON_CPU, _ELSEWHERE = 1 << 22, 1 << 27  # numbers of the largest maps that draws have in memory together


class PHiSegConfig(PublishedConfig):
    """Settings of PHiSeg."""

    method: Literal["phiseg"] = "phiseg"
    levels: int | None = Field(
        default=None,
        ge=1,
        le=10,
        description="latent levels, at the coarsest resolutions of the backbone; null: 5, or as many as leave its two "
        "finest resolutions without, at least 2",
    )
    latent: int = Field(default=2, ge=1, le=64, description="channels of the latent map of each level")
    level_weight: float = Field(
        default=4.0, gt=0, le=16, description="the KL term of a level counts this many times that of the next finer one"
    )
    beta: Scheduled = Field(
        default=1.0,
        description="β, the weight of all KL terms of an image, against the sum over pixels of its cross-entropies",
    )

    @model_validator(mode="after")
    def _bounds(self) -> PHiSegConfig:
        check_range("beta", self.beta, _BETA)
        return self

    def latent_levels(self, resolutions: int) -> int:
        """``levels``, decided for a network of so many resolutions.

        >>> [PHiSegConfig().latent_levels(resolutions) for resolutions in (2, 3, 4, 6, 7, 8)]
        [2, 2, 2, 4, 5, 5]
        """
        if self.levels is None:
            return min(LEVELS, max(resolutions - GAP, 2))
        if self.levels > resolutions:
            found = f"{self.levels} with a backbone of {resolutions} resolutions"
            raise ConfigError(f"model.levels: expected at most one per resolution, found {found}")
        return self.levels


# -- the loss ----------------------------------------------------------------------------------------------------------


def summed(scores: Sequence[Tensor]) -> list[Tensor]:
    """Σ_{k ≥ ℓ} s_k, each at the size of s_ℓ; coarser logits are repeated. The first is the prediction.

    >>> summed([torch.ones(1, 1, 2, 2), torch.full((1, 1, 1, 1), 3.0)])
    [tensor([[[[4., 4.],
              [4., 4.]]]]), tensor([[[[3.]]]])]
    """
    sums = [at_least_float32(scores[-1])]
    for score in reversed(scores[:-1]):
        sums.append(F.interpolate(sums[-1], scale_factor=2, mode="nearest") + score)
    return sums[::-1]


def sized(logits: Tensor, halved: int, size: tuple[int, int], scale: int = 1) -> Tensor:
    """Logits of an image that was shrunk ``scale`` times, padded, and halved ``halved`` times, at its own ``size``."""
    full = F.interpolate(logits, scale_factor=2**halved, mode="nearest") if halved else logits
    if scale > 1:
        full = F.interpolate(full, scale_factor=scale, mode="bilinear", align_corners=False)
    return crop(full, size)


def level_ce(scores: Sequence[Tensor], target: Target, scale: int = 1) -> Tensor:
    """CE(y, Σ_{k ≥ ℓ} s_k) of every level, summed over pixels, the mean over images, ``[L]``.

    Args:
        scores: ``[B, C, h / 2^ℓ, w / 2^ℓ]``, the finest first.
    """
    size = target.labels.shape[1], target.labels.shape[2]
    costs = [
        pixel_ce(sized(logits, level, size, scale), target.labels, target.valid).sum((1, 2))
        for level, logits in enumerate(summed(scores))
    ]
    return torch.stack([target.mean(cost) for cost in costs])


def level_kl(q: Sequence[Gaussian], p: Sequence[Gaussian], target: Target) -> Tensor:
    """KL(q_ℓ ‖ p_ℓ) of every level, summed over its places and channels, the mean over images, ``[L]``."""
    return torch.stack([target.mean(kl(ours, theirs, FLOOR)) for ours, theirs in zip(q, p, strict=True)])


def objective(ce: Tensor, apart: Tensor, level_weight: float = 4.0, beta: float = 1.0) -> dict[str, Tensor]:
    """Σ_ℓ CE_ℓ + β Σ_ℓ w^ℓ KL_ℓ  of the terms of all levels ``[L]``, the finest first; and what is logged.

    >>> terms = objective(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 0.5]))
    >>> terms["total"], terms["kl"], terms["kl_1"]
    (tensor(8.), tensor(3.), tensor(0.5000))
    """
    of_level = apart.unbind()
    fit, weighted = ce.sum(), torch.stack([level_weight**i * value for i, value in enumerate(of_level)]).sum()
    logged = {"fit": fit, "output": ce[0], "kl": weighted, **{f"kl_{i}": value for i, value in enumerate(of_level)}}
    return {"total": fit + beta * weighted, **{name: value.detach() for name, value in logged.items()}}


# -- the method --------------------------------------------------------------------------------------------------------


class PHiSeg(Method):
    """Latent maps z_ℓ at several resolutions, each drawn given the coarser one, and a network that makes masks of them:

        z_L ~ p(z_L | x),     z_ℓ ~ p(z_ℓ | z_{ℓ+1}, x),     y = softmax(Σ_ℓ s_ℓ(z_ℓ, …, z_L))

    Prior and posterior q(z_ℓ | z_{ℓ+1}, x, y) are encoders like the backbone's way down, with weights of their own.

    Args:
        config: its settings.
        backbone: widths and blocks of all networks. There is no trunk beside them.
        in_channels: of the images.
        classes: C, background included.

    >>> model = PHiSeg(PHiSegConfig(), BackboneConfig(channels=[4, 8, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)
    """

    Config: ClassVar = PHiSegConfig
    idea = "latent maps from coarse to fine, each drawn given the one above, which alone decide the mask"
    reference = "Baumgartner et al., PHiSeg: Capturing Uncertainty in Medical Image Segmentation, MICCAI 2019"
    year = 2019
    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.clip": CLIP}
    terms: ClassVar = {
        "fit": "cross-entropies of the annotation, summed over pixels and over the predictions up to each level",
        "output": "that of the prediction of all levels together",
        "kl": "how far codes that have seen the annotation are from what the image says, weighted by level; "
        "kl_0, kl_1, … are those of each level from fine to coarse, unweighted",
    }

    def __init__(self, config: PHiSegConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        backbone = config.trunk(backbone)
        channels, kind = backbone.unet_levels, backbone.kind
        levels = config.latent_levels(len(channels))
        self.config, self.classes, self.in_channels = config, classes, in_channels
        self.scale, self.gap, self.levels = backbone.scale, len(channels) - levels, levels
        encoders = [LatentEncoder.of(backbone, in_channels, masks) for masks in (0, classes)]
        self.prior, self.posterior = (Latents(e, channels, levels, config.latent, kind) for e in encoders)
        self.likelihood = Likelihood(channels, levels, config.latent, classes, kind)

    @property
    def multiple(self) -> int:
        return self.scale * self.prior.encoder.multiple

    def forward(self, images: Tensor) -> PHiSegPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution."""
        size = images.shape[2], images.shape[3]
        return PHiSegPredictive(self, self.prior(self._coarse(images)), images.shape[0], size, self.training)

    def predict(self, images: Tensor) -> PHiSegPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        beta: float | None = None,
    ) -> dict[str, Tensor]:
        """The negative evidence lower bound of one annotation y per image, drawn by its weights, with the predictions
        of coarse levels supervised as well, and one z_ℓ ~ q of every level, on which the prior is conditioned too:

            mean over images of  Σ_ℓ Σ_pixels CE(y, Σ_{k ≥ ℓ} s_k) + β Σ_ℓ w^ℓ KL(q(z_ℓ | …) ‖ p(z_ℓ | …))

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            beta: β of this step, when a schedule moves it; ``None`` takes the setting's last value.

        Returns:
            ``total``, ``fit``, ``output``, ``kl`` and ``kl_ℓ`` of every level, scalars.
        """
        target = one_each(annotations, self.classes, generator)
        images, masks = self._coarse(images), coarser(target.one_hot(self.classes, centre=0.5), self.scale)
        posterior = walk(self.posterior(images, masks), None, lambda _, q: q.sample(generator))
        prior = walk(self.prior(images), None, lambda number, _: posterior.codes[number])
        ce = level_ce(self.likelihood(posterior.codes[::-1]), target, self.scale)
        apart = level_kl(posterior.distributions[::-1], prior.distributions[::-1], target)
        beta = final(self.config.beta) if beta is None else beta
        return objective(ce, apart, self.config.level_weight, beta)

    def _coarse(self, images: Tensor) -> Tensor:
        check_images(images, self.in_channels)
        return coarser(images, self.scale)


@dataclass(frozen=True, eq=False)
class PHiSegPredictive(Chunked):
    """What PHiSeg predicts for a batch of images.

    Attributes:
        prior: the levels of the prior, the coarsest first.
        images: B.
        size: (H, W) of the images.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards;
            made in training, what is left to compute follows the model.
    """

    model: PHiSeg
    prior: list[Level]
    images: int
    size: tuple[int, int]
    training: bool

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Seeds of ε of every draw, level and place:  z = μ + σ ε."""
        B, device = self.images, self._device
        return Noise(torch.zeros(B, n, 1, device=device), seeds=new_seeds(B, n, generator, device))

    seeded = True

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        return placed_noise(numbers)

    def codes(self, noise: Noise) -> list[Tensor]:
        """z of every level, the finest first, ``[B·N, latent, h, w]``, differentiable."""
        last = self.model.levels - 1

        def choose(number: int, p: Gaussian) -> Tensor:
            level, size = last - number, (p.mean.shape[2], p.mean.shape[3])
            stride = self.model.scale * 2 ** (level + self.model.gap)
            epsilon = noise.normal(level, p.mean.shape[1], size, stride).to(p.mean.dtype)
            return p.at(epsilon).flatten(0, 1) if number == 0 else p.at(epsilon.flatten(0, 1))

        with self._mode():
            return walk(self.prior, None, choose).codes[::-1]

    def logits(self, noise: Noise) -> Tensor:
        """Logits of every draw, all at once, differentiable, ``[B, N, C, H, W]``."""
        with self._mode():
            scores = self.model.likelihood(self.codes(noise))
        return sized(summed(scores)[0], 0, self.size, self.model.scale).unflatten(0, (self.images, noise.count))

    def soft(self, noise: Noise) -> Tensor:
        return at_least_float32(self.logits(noise)).softmax(2)

    @property
    def at_once(self) -> int:
        """Draws whose maps fit into memory together."""
        pixels = self.images * self.size[0] * self.size[1] / self.model.scale**2
        room = _ON_CPU if self._device.type == "cpu" else _ELSEWHERE
        return max(1, int(room / (pixels * self.model.likelihood.peak)))

    def _mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.training else evaluation(self.model)

    @property
    def _device(self) -> torch.device:
        return self.prior[0].distribution(None).mean.device
