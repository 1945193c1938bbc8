"""The Probabilistic U-Net (Kohl et al., NeurIPS 2018)."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ambiseg.masks import MaskDistribution, Masks, at_least_float32
from ambiseg.methods.base import Method, Noise, Predictive, PublishedConfig, evaluation
from ambiseg.methods.dense import BAND, DensePredictive, drawn, in_parts
from ambiseg.methods.predictive import Numbers
from ambiseg.methods.schedules import Scheduled, check_range, final
from ambiseg.methods.targets import CLIP, Target, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import Gaussian, GaussianHead, Scale, kl
from ambiseg.nn.latent import LatentEncoder
from ambiseg.nn.likelihood import pixel_ce
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import Folded, as_rows, mean_softmax, pixel_logits, plain_logits
from ambiseg.nn.pooled import Beside, Pooled, PooledHead
from ambiseg.nn.windows import Step, Windows, stitched

_BETA = 1e6

Prior = TypeVar("Prior", bound=tuple)  # of a code: a Gaussian or a mixture of them


class CodeConfig(PublishedConfig):
    """Sizes of U-Nets whose last layers read one code per image."""

    latent: int = Field(default=6, ge=1, le=256, description="L, dimension of the latent code z")
    hidden: int = Field(default=32, ge=1, le=1024, description="features of each hidden layer after z enters")
    layers: int = Field(default=3, ge=1, le=16, description="hidden layers after z enters")


class LatentUNetConfig(CodeConfig):
    """Settings of the Probabilistic U-Net, whatever its prior is."""

    beta: Scheduled = Field(
        default=1.0,
        description="β, the weight of the KL term per image, against the sum over pixels of its cross-entropy",
    )
    pool: Literal["before", "after"] | None = Field(
        default=None,
        description="encoders average over the image before their last layer (Kohl et al.) or after it, when σ is "
        "positive (PHiSeg's authors); null: before, with published after",
    )
    scale: Scale | None = Field(
        default=None,
        description="σ is the exp of a logarithm within ±10 (Kohl et al.) or a softplus (PHiSeg's authors); null: exp, "
        "with published softplus",
    )

    @model_validator(mode="after")
    def _bounds(self) -> LatentUNetConfig:
        check_range("beta", self.beta, _BETA)
        return self

    @property
    def pooled(self) -> Literal["before", "after"]:
        """``pool``, decided."""
        return self.pool or ("after" if self.published else "before")

    @property
    def scaled(self) -> Scale:
        """``scale``, decided."""
        return self.scale or ("softplus" if self.published else "exp")


class ProbUNetConfig(LatentUNetConfig):
    """Settings of the Probabilistic U-Net."""

    method: Literal["probunet"] = "probunet"


class LatentUNet(Method, Generic[Prior]):
    """A U-Net whose last features meet one latent code per image, the decoder of a conditional VAE.

        p(y | x) = ∫ p(y | x, z) p(z | x) dz,     p(y | x, z) = Π_pixels softmax(f_comb(U-Net(x), z))

    Args:
        config: its settings.
        backbone: the trunk.
        in_channels: of the images.
        classes: C, background included.
    """

    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.clip": CLIP}
    terms: ClassVar = {
        "fit": "cross-entropy of the annotation, summed over pixels, of a code that has seen it",
        "kl": "how far the code that has seen the annotation is from what the image alone says",
    }

    def __init__(self, config: Any, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        self.config, self.classes = config, classes
        self.make_networks(config.trunk(backbone), in_channels)

    def make_networks(self, backbone: BackboneConfig, in_channels: int) -> None:
        """``backbone``, ``prior``, ``posterior`` and ``head``, with fresh weights."""
        config, classes = self.config, self.classes
        self.backbone = backbone.build_dense(in_channels)
        encoders = [LatentEncoder.of(backbone, in_channels, masks) for masks in (0, classes)]
        width = encoders[0].out_channels
        self.prior: Pooled[Prior] = Pooled(encoders[0], self.prior_head(width), backbone.scale)
        head = GaussianHead(width, config.latent, config.scaled, config.pooled)
        self.posterior: Pooled[Gaussian] = Pooled(encoders[1], head, backbone.scale)
        self.head = PixelMLP(
            self.backbone.dense_channels,
            classes,
            config.latent,
            config.hidden,
            config.layers,
            norm=config.published,
            momentum=backbone.momentum,
        )

    @abstractmethod
    def prior_head(self, channels: int) -> PooledHead[Prior]:
        """What makes the prior of the last map of its encoder."""

    @abstractmethod
    def predictive(self, dense: Tensor, prior: Prior, size: tuple[int, int]) -> DensePredictive:
        """The predictive distribution of features and prior."""

    @abstractmethod
    def divergence(self, q: Gaussian, p: Prior, z: Tensor, generator: torch.Generator | None) -> Tensor:
        """KL(q ‖ p) per image, ``[B]``; z is a draw of q."""

    def forward(self, images: Tensor) -> DensePredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution."""
        dense = self.backbone(images).dense
        return self.predictive(dense, self.prior(images), (images.shape[2], images.shape[3]))

    @property
    def multiple(self) -> int:
        return self._networks.multiple

    @property
    def _networks(self) -> Beside:
        return Beside(self.backbone, self.prior)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """Features by windows, stitched to one map; the prior is of what its encoder sees, averaged over all of it."""
        with evaluation(self), torch.no_grad():
            features = stitched(self._networks, image, windows, step)
            prior = self.prior.head.of(features.gate.flatten(1))
            predictive = self.predictive(features.dense, prior, (image.shape[2], image.shape[3]))
            if features.dense.numel():
                return predictive
            return in_parts(self, predictive, Beside(self.backbone, None, self.multiple), image, windows, step)

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        beta: float | None = None,
    ) -> dict[str, Tensor]:
        """The negative evidence lower bound of one annotation y per image, drawn by its weights, and one z ~ q:

            mean over images of  Σ_pixels CE(y, f_comb(U-Net(x), z)) + β KL(q(z | x, y) ‖ p(z | x))

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            beta: β of this step, when a schedule moves it; ``None`` takes the setting's last value.

        Returns:
            ``total``, ``fit`` and ``kl``, scalars.
        """
        target = one_each(annotations, self.classes, generator)
        dense, prior = self.backbone(images).dense, self.prior(images)
        posterior = self.posterior(images, target.one_hot(self.classes, centre=0.5))
        z = posterior.sample(generator)
        logits = self.head(dense, z[:, None])[:, 0]
        apart = self.divergence(posterior, prior, z, generator)
        return negative_bound(logits, target, apart, final(self.config.beta) if beta is None else beta)


def negative_bound(logits: Tensor, target: Target, divergence: Tensor, beta: float) -> dict[str, Tensor]:
    """The negative evidence lower bound, a mean over the images that have a valid pixel:

        total = mean_b [Σ_pixels CE(y_b, logits_b) + β KL_b]

    Args:
        logits: ``[B, C, H, W]`` of one code per image.
        target: one mask per image.
        divergence: ``[B]``, KL(q ‖ p) of the codes.
        beta: β. It is per image: no pixel and no image of the batch is divided by.

    Returns:
        ``total``, and detached ``fit`` and ``kl``, its two terms without β.

    >>> target = Target(torch.zeros(1, 2, 2, dtype=torch.long), None)
    >>> negative_bound(torch.zeros(1, 2, 2, 2), target, torch.tensor([0.5]), beta=2.0)
    {'total': tensor(3.7726), 'fit': tensor(2.7726), 'kl': tensor(0.5000)}
    """
    fit = target.mean(pixel_ce(logits, target.labels, target.valid).sum((1, 2)))
    apart = target.mean(divergence)
    return {"total": fit + beta * apart, "fit": fit.detach(), "kl": apart.detach()}


@dataclass(frozen=True, eq=False)
class LatentPredictive(DensePredictive):
    """Features of a batch of images and a prior over codes; a draw is a code and runs the small last network.

    Attributes:
        dense: features ``[B, F, H, W]``.
        size: (H, W) of the images.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards;
            made in training, what is left to compute follows the model.
    """

    model: LatentUNet[Any]
    dense: Tensor
    size: tuple[int, int]
    training: bool

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    @abstractmethod
    def codes(self, noise: Noise) -> Tensor:
        """z of every draw, ``[B, N, L]``, differentiable."""

    def _mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.training else evaluation(self.model)

    def logits(self, codes: Tensor) -> Tensor:
        """Logits of given codes, differentiable:  ``[B, N, L] -> [B, N, C, H, W]``."""
        if self._tiled:
            if torch.compiler.is_exporting():
                return plain_logits(self.dense, self.model.head.fold(codes))
            return pixel_logits(*self._folded(codes)).unflatten(3, self.size)
        return self.model.head(self.dense, codes)

    def probs(self, noise: Noise) -> Tensor:
        return at_least_float32(self.logits(self.codes(noise))).softmax(2)

    def render(self, noise: Noise) -> MaskDistribution:
        return drawn(*self._folded(self.codes(noise)), noise, self.size) if self._tiled else super().render(noise)

    def marginal(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Class probabilities ``[B, C, H, W]`` from ``n`` samples."""
        if not self._tiled:
            return super().marginal(n, generator)
        noise = self.noise(n, generator)
        return mean_softmax(*self._folded(self.codes(noise)), noise.mass).unflatten(2, self.size)

    def of_part(self, dense: Tensor) -> LatentPredictive:
        """The same for a part of the image."""
        return replace(self, dense=dense, size=(dense.shape[2], dense.shape[3]))

    @property
    def _tiled(self) -> bool:
        """Whether masks can be made tile by tile, or need batch statistics."""
        with self._mode():
            return self.model.head.foldable

    def _folded(self, codes: Tensor) -> tuple[Tensor, Folded]:
        rows = self._rows if self.size[0] * self.size[1] <= BAND else as_rows(self.dense)
        return rows, self.model.head.fold(codes)

    @cached_property
    def _rows(self) -> Tensor:
        """The features as the last network reads them, kept for all draws where they are small."""
        return as_rows(self.dense)


@dataclass(frozen=True, eq=False)
class ProbUNetPredictive(LatentPredictive):
    """What the Probabilistic U-Net predicts for a batch of images.

    Attributes:
        prior: p(z | x), of ``[B, L]``.
    """

    prior: Gaussian

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """ε of every draw:  z = μ + σ ε."""
        mean = self.prior.mean
        shape = len(mean), n, mean.shape[1]
        return Noise(torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype))

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.prior.mean.shape[1]

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        assert numbers.normals is not None
        return Noise(numbers.normals)

    def codes(self, noise: Noise) -> Tensor:
        return self.prior.at(noise.codes)


class ProbUNet(LatentUNet[Gaussian]):
    """A U-Net and one Gaussian code per image, which its last layers mix with the features at every pixel.

        z ~ p(z | x) = N(μ(x), diag σ(x)²),     y = f_comb(U-Net(x), z)

    The prior p and the posterior q(z | x, y) are encoders like the U-Net's way down, with weights of their own.

    >>> model = ProbUNet(ProbUNetConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)
    """

    Config: ClassVar = ProbUNetConfig
    idea = "a U-Net whose last layers read one Gaussian code per image, trained as a conditional VAE"
    reference = "Kohl et al., A Probabilistic U-Net for Segmentation of Ambiguous Images, NeurIPS 2018"
    year = 2018

    def prior_head(self, channels: int) -> PooledHead[Gaussian]:
        return GaussianHead(channels, self.config.latent, self.config.scaled, self.config.pooled)

    def predictive(self, dense: Tensor, prior: Gaussian, size: tuple[int, int]) -> ProbUNetPredictive:
        return ProbUNetPredictive(self, dense, size, self.training, prior)

    def divergence(self, q: Gaussian, p: Gaussian, z: Tensor, generator: torch.Generator | None) -> Tensor:
        return kl(q, p)
