"""The Hierarchical Probabilistic U-Net (Kohl et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg.masks import Masks, at_least_float32
from ambiseg.methods.base import Method, Noise, ParameterGroup, PublishedConfig
from ambiseg.methods.predictive import Chunked, Numbers, placed_noise
from ambiseg.methods.schedules import Scheduled, check_range, final
from ambiseg.methods.targets import CLIP, Target, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.constraint import Constraint
from ambiseg.nn.features import check_images, crop, pad_to_multiple
from ambiseg.nn.gaussian import Gaussian, kl
from ambiseg.nn.ladder import Ladder, State, climbed
from ambiseg.nn.likelihood import hardest, pixel_ce
from ambiseg.nn.places import new_seeds
from ambiseg.nn.residual import orthogonal, residual_level
from ambiseg.settings import SettingError, shown

PUBLISHED = (24, 48, 96, 192, 192, 192, 192, 192)
"""Channels of the paper's U-Net, from 128×128 down to one place."""

_LARGEST = 1e6  # of weights and bounds
_AT_ONCE = 1 << 18  # pixels of draws that the decoder runs for at a time


class HPUNetConfig(PublishedConfig):
    """Settings of the Hierarchical Probabilistic U-Net."""

    method: Literal["hpunet"] = "hpunet"
    latents: list[Annotated[int, Field(ge=1, le=256)]] = Field(
        default=[1, 1, 1, 1],
        min_length=1,
        max_length=9,
        description="channels of the code of each level, the coarsest first; a U-Net of n levels has the first n − 1",
    )
    blocks: int = Field(
        default=3, ge=1, le=16, description="residual blocks per level, of backbone.convs 3×3 convolutions each"
    )
    objective: Literal["geco", "elbo"] = Field(
        default="geco",
        description="geco: the least KL with which the cross-entropy stays below kappa; elbo: their sum",
    )
    kappa: float = Field(
        default=0.05, ge=0, le=_LARGEST, description="κ of geco, the cross-entropy per chosen pixel that is asked for"
    )
    decay: float = Field(default=0.99, ge=0, lt=1, description="of the average cross-entropy that geco looks at")
    rate: float = Field(
        default=0.01, ge=0, le=_LARGEST, description="of the gradient of geco's multiplier; Adam divides it out"
    )
    beta: Scheduled = Field(default=1.0, description="β of elbo, the weight of the KL term")
    share: float = Field(
        default=0.02, gt=0, le=1, description="of the pixels of a batch whose cross-entropy counts; 1: all"
    )
    drawn: bool = Field(
        default=True, description="these pixels are drawn by their cross-entropy; false: those where it is highest"
    )
    pinned: list[Annotated[int, Field(ge=0, le=8)]] = Field(
        default=[], max_length=9, description="levels whose code is its mean in prediction, 0 is the coarsest"
    )

    @model_validator(mode="after")
    def _bounds(self) -> HPUNetConfig:
        check_range("beta", self.beta, _LARGEST)
        if any(level >= len(self.latents) for level in self.pinned):
            expected = f"levels from 0 to {len(self.latents) - 1}, as latents has"
            raise SettingError("pinned", f"expected {expected}, found {shown(self.pinned)}")
        return self

    def trunk(self, backbone: BackboneConfig) -> BackboneConfig:
        """The backbone section, or the paper's levels."""
        return BackboneConfig(channels=list(PUBLISHED)) if self.published else backbone


class HPUNet(Method):
    """A U-Net whose way up is interleaved with codes, one map for each of its coarsest levels:

        p(y | x) = ∫ p(y | x, z) Π_l p(z_l | z_<l, x) dz,     p(z_l | z_<l, x) = N(μ_l, diag σ_l²) at every place

    The features at a level say how its code is distributed; the code is drawn and joins them on their way up. The prior
    thus is the U-Net itself. In training codes come from the posterior, a second such network that sees the annotation.

    Args:
        config: its settings.
        backbone: the levels of the U-Net.
        in_channels: of the images.
        classes: C, background included.

    >>> model = HPUNet(HPUNetConfig(), BackboneConfig(channels=[4, 8, 8]), in_channels=1, classes=2)
    >>> predictive = model.predict(torch.rand(1, 1, 32, 32))
    >>> predictive.sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)

    Masks that differ in what the finer of the two levels decides:

    >>> predictive.pinned(0).sample(8).labels.shape
    torch.Size([1, 8, 32, 32])
    """

    Config: ClassVar = HPUNetConfig
    idea = "a U-Net of residual blocks whose coarse levels draw codes, coarse to fine, with a bound on the error"
    reference = "Kohl et al., A Hierarchical Probabilistic U-Net for Modeling Multi-Scale Ambiguities, arXiv 2019"
    year = 2019
    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.clip": CLIP}
    terms: ClassVar = {
        "fit": "cross-entropy of the annotation, summed over the hard pixels, of codes that have seen it",
        "kl": "how far the codes that have seen the annotation are from what the image alone says, over all levels",
        "kl_0": "that of the coarsest level",
        "slack": "how far the average of fit is above its bound; training holds it at 0",
        "multiplier": "λ, how much the bound weighs against kl",
    }

    def __init__(self, config: HPUNetConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        self.config, self.classes, self.in_channels = config, classes, in_channels
        backbone = config.trunk(backbone)
        channels = backbone.levels
        if not channels:
            found = f"{backbone.name}, which has none"
            raise ConfigError(f"backbone.name: expected unet or unet-light, whose levels have codes, found {found}")
        self.latents = tuple(config.latents[: len(channels) - 1])
        self.scale, self._multiple = backbone.scale, backbone.multiple
        _check_levels("model.pinned: ", config.pinned, len(self.latents))
        blocks, convs = config.blocks, backbone.convs
        self.prior = Ladder(in_channels, channels, self.latents, blocks, convs)
        self.posterior = Ladder(classes + in_channels, channels, self.latents, blocks, convs, ends=True)
        widths = channels[::-1][len(self.latents) :]  # above the last code
        self.up = nn.ModuleList(residual_level(below + skip, skip, blocks, convs) for below, skip in pairwise(widths))
        self.last = nn.Conv2d(channels[0], classes, 1)
        orthogonal(self)
        self.constraint = Constraint(config.decay, config.rate) if config.objective == "geco" else None

    @property
    def multiple(self) -> int:
        return self._multiple

    def stride(self, level: int) -> int:
        """Pixels of the image per place of the code of a level."""
        return self._multiple >> level

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        undecayed = () if self.constraint is None else (self.constraint.rho,)
        return {"main": ParameterGroup(list(self.parameters()), undecayed=undecayed)}

    def forward(self, images: Tensor) -> HPUNetPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution."""
        check_images(images, self.in_channels)
        size = images.shape[2], images.shape[3]
        return HPUNetPredictive(self, self.prior(self._coarse(images)), size, frozenset(self.config.pinned))

    def predict(self, images: Tensor) -> HPUNetPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def logits(self, state: State, size: tuple[int, int]) -> Tensor:
        """The rest of the way up, from what follows the last code:  ``[B·N, …] -> [B·N, C, H, W]``."""
        for blocks in self.up:
            state = climbed(blocks, state)
        logits = self.last(state.features)
        if self.scale > 1:
            logits = F.interpolate(logits, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return crop(logits, size)

    def _coarse(self, images: Tensor) -> Tensor:
        images = pad_to_multiple(images, self._multiple)
        return images if self.scale == 1 else F.avg_pool2d(images, self.scale)

    # -- training ------------------------------------------------------------------------------------------------------

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        beta: float | None = None,
    ) -> dict[str, Tensor]:
        """The least KL within a bound on the error (GECO), of one annotation y per image and codes z ~ q(z | x, y):

            λ · (average of fit − κ n) + Σ_l KL(q(z_l | z_<l, x, y) ‖ p(z_l | z_<l, x))

            fit = mean over images of  Σ_{chosen pixels} CE(y, f(x, z)),     n = chosen pixels per image

        The pixels are ``share`` of the whole batch (:func:`ambiseg.nn.likelihood.hardest`), λ and the average those of
        :class:`ambiseg.nn.constraint.Constraint`. The prior is conditioned on the posterior's codes. With ``elbo`` the
        loss is  fit + β Σ_l KL.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            beta: β of this step, when a schedule moves it; ``None`` takes the setting's last value.

        Returns:
            ``total``, ``fit``, ``kl`` and the part of each level, ``kl_0``, …; with GECO ``slack`` and ``multiplier``.
        """
        check_images(images, self.in_channels)
        target = one_each(annotations, self.classes, generator)
        masks = target.one_hot(self.classes).to(images.dtype)
        seen = self.posterior(self._coarse(torch.cat([masks, images], 1)))
        posterior = self.posterior.walked(seen, lambda _, q: q.sample(generator))
        prior = self.prior.walked(self.prior(self._coarse(images)), lambda level, _: posterior.codes[level])
        pairs = zip(posterior.distributions, prior.distributions, strict=True)
        levels = torch.stack([target.mean(kl(q, p)) for q, p in pairs])
        logits = self.logits(prior.state, (images.shape[2], images.shape[3]))
        fit, chosen = self.fit(logits, target, generator)
        apart = levels.sum()
        terms = {"fit": fit.detach(), "kl": apart.detach()}
        terms |= {f"kl_{number}": value for number, value in enumerate(levels.detach())}
        if self.constraint is None:
            return {"total": fit + (final(self.config.beta) if beta is None else beta) * apart, **terms}
        bound = self.constraint(fit, self.config.kappa * chosen)
        return {"total": bound.term + apart, **terms, "slack": bound.slack, "multiplier": bound.multiplier}

    def fit(self, logits: Tensor, target: Target, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the chosen pixels and their number, means over the images that have a valid pixel."""
        cost = pixel_ce(logits, target.labels, target.valid)
        if self.config.share == 1:
            chosen = torch.ones_like(cost) if target.valid is None else target.valid.to(cost.dtype)
        else:
            draw = {"generator": generator, "device": cost.device, "dtype": cost.dtype}
            uniform = torch.rand(cost.shape, **draw) if self.config.drawn else None
            chosen = hardest(cost, self.config.share, uniform, target.valid)
        return target.mean((cost * chosen).sum((1, 2))), target.mean(chosen.sum((1, 2)))


# -- prediction --------------------------------------------------------------------------------------------------------


def _check_levels(where: str, levels: Sequence[int], count: int) -> None:
    if any(not 0 <= level < count for level in levels):
        raise ConfigError(f"{where}expected levels from 0 to {count - 1}, as the network has, found {shown([*levels])}")


@dataclass(frozen=True, eq=False)
class HPUNetPredictive(Chunked):
    """What the Hierarchical Probabilistic U-Net predicts for a batch of images: the way down once, the way up per draw.

    The noise of a code belongs to its places in the image, so that windows and slices agree. ``noise.codes`` is one
    number per draw and level, which multiplies σ there: 1, and 0 at pinned levels.

    Attributes:
        model: whose networks these are.
        bottom: maps of the way down.
        size: (H, W) of the images.
        levels: those whose code is its mean.
    """

    model: HPUNet
    bottom: State
    size: tuple[int, int]
    levels: frozenset[int] = frozenset()

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    def pinned(self, *levels: int) -> HPUNetPredictive:
        """The same with the codes of these levels at their means, and no others; 0 is the coarsest."""
        _check_levels("", levels, len(self.model.latents))
        return replace(self, levels=frozenset(levels))

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        device, B = self.bottom.features.device, len(self.bottom.features)
        return self.noise_of_numbers(Numbers(seeds=new_seeds(B, n, generator, device)))

    seeded = True

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        free = [float(level not in self.levels) for level in range(len(self.model.latents))]
        return placed_noise(numbers, torch.tensor(free, device=self.bottom.features.device))

    @property
    def at_once(self) -> int:
        return max(1, _AT_ONCE // (len(self.bottom.features) * self.size[0] * self.size[1]))

    def soft(self, noise: Noise) -> Tensor:
        return at_least_float32(self.logits(noise)).softmax(2)

    def logits(self, noise: Noise) -> Tensor:
        """Logits of every draw, all at once, differentiable:  ``[B, N, C, H, W]``."""
        B, drawn = self.bottom.features.shape[0], False  # whether maps are those of draws already

        def choose(level: int, p: Gaussian) -> Tensor:
            nonlocal drawn
            if level in self.levels:
                return p.mean  # of all draws alike, as long as no level before was drawn
            size = p.mean.shape[2], p.mean.shape[3]
            normal = noise.normal(level, p.mean.shape[1], size, self.model.stride(level)).to(p.mean.dtype)
            normal = normal * noise.codes[:, :, level, None, None, None].to(normal.dtype)
            first, drawn = not drawn, True
            return p.at(normal).flatten(0, 1) if first else p.at(normal.flatten(0, 1))

        state = self.model.prior.walked(self.bottom, choose).state
        logits = self.model.logits(state, self.size).unflatten(0, (B, -1))
        return logits.expand(-1, noise.count, -1, -1, -1)
