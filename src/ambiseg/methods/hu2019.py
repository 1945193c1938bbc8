"""Supervised uncertainty quantification (Hu et al., MICCAI 2019): two kinds of uncertainty, both drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg.masks import MaskDistribution, Masks, as_masks, at_least_float32
from ambiseg.methods.base import Noise
from ambiseg.methods.dense import BAND, DensePredictive
from ambiseg.methods.predictive import Numbers
from ambiseg.methods.probunet import CodeConfig, LatentUNet
from ambiseg.methods.schedules import Scheduled, check_range, final
from ambiseg.methods.targets import CLIP
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import Gaussian, GaussianHead, kl
from ambiseg.nn.latent import LatentEncoder
from ambiseg.nn.likelihood import pixel_ce
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import as_rows, label_dtype
from ambiseg.nn.places import new_seeds
from ambiseg.nn.pooled import Pooled, PooledHead
from ambiseg.nn.variational import VariationalEnd, as_activations
from ambiseg.overlap import full_precision

_MOST = 1e6  # weight of a term
_AT_ONCE = 1 << 24  # activations of all draws that are made at a time


class HuConfig(CodeConfig):
    """Settings of supervised uncertainty quantification."""

    method: Literal["hu2019"] = "hu2019"
    beta: Scheduled = Field(
        default=1.0,
        description="β, the weight of the KL of codes, a mean over images, against cross-entropies summed over pixels "
        "and images",
    )
    beta_weights: float = Field(
        default=1.0, ge=0, le=_MOST, description="β_w, the weight of the KL of the random weights per training image"
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=_MOST,
        description="γ, the weight of the cross-entropy between the mean of masks drawn and the mean of annotations",
    )
    norm_penalty: float = Field(
        default=1e-5,
        ge=0,
        le=_MOST,
        description="the weight of Σ‖W‖, of all parameters of prior, posterior and hidden layers after z enters",
    )
    train_images: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="N, images of the training set, by which the KL of the random weights is divided; null: as many as "
        "the run trains on",
    )

    @model_validator(mode="after")
    def _bounds(self) -> HuConfig:
        check_range("beta", self.beta, _MOST)
        return self

    def trunk(self, backbone: BackboneConfig) -> BackboneConfig:
        """The backbone section, or the authors' U-Net of four levels."""
        return BackboneConfig(name="unet-light") if self.published else backbone


class Hu(LatentUNet[Gaussian]):
    """A U-Net with one Gaussian code per image and a last convolution with Gaussian weights:

        y = f_comb(relu(w * u(x)), z),     z ~ p(z | x) = N(μ(x), diag σ(x)²),     w ~ q(w) = N(m, s²)

    The code stands for how annotators differ, the weights for what the data left open. All annotations are needed at
    once, because the spread of the codes is fitted to the spread of the annotations as well:

        E = mean_pixels CE(Σ_g w_g y_g, 1/M Σ_g softmax f_comb(relu(m * u(x)), z_g)) / ln 2,     z_g ~ p(z | x)

    The last convolution is that of the U-Net's last step up, without a norm after it. Backbones that are not U-Nets get
    one more, of as many channels as they have features.

    >>> model = Hu(HuConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)
    """

    Config: ClassVar = HuConfig
    idea = (
        "a Probabilistic U-Net whose last convolution has random weights, with codes whose spread is fitted to that of "
        "all annotations"
    )
    reference = (
        "Hu et al., Supervised Uncertainty Quantification for Segmentation with Multiple Annotations, MICCAI 2019"
    )
    year = 2019
    annotations = ("all",)
    defaults: ClassVar = {"optimizer.clip": 32 * CLIP}  # a sum over the masks of a batch: 4 of each of 8 images
    terms: ClassVar = {
        "fit": "cross-entropy of an annotation, summed over pixels, of a code that has seen it",
        "kl": "how far the code that has seen an annotation is from what the image alone says",
        "spread": "cross-entropy per pixel, in bits, between the mean of masks drawn and the mean of annotations",
        "weights_kl": "how far the random weights are from a standard normal distribution",
        "norms": "the norms of the parameters of prior, posterior and the layers after the code enters",
    }
    train_images: Tensor

    def make_networks(self, backbone: BackboneConfig, in_channels: int) -> None:
        config, classes, norm = self.config, self.classes, not self.config.published
        if classes < 2:
            raise ConfigError(f"model.method: expected at least two classes with hu2019, found {classes}")
        unet = bool(backbone.levels)
        trunk = backbone.build_dense(in_channels, **({"norm": norm, "last": False} if unet else {}))
        self.backbone = VariationalEnd(trunk, trunk.head_channels, trunk.multiple if unet else 1)
        kind = backbone.kind._replace(norm=norm, bias=backbone.kind.bias or not norm)
        encoders = [LatentEncoder(in_channels, masks, backbone.unet_levels, kind) for masks in (0, classes - 1)]
        heads = [self.prior_head(encoder.out_channels) for encoder in encoders]
        self.prior, self.posterior = (Pooled(e, h, backbone.scale) for e, h in zip(encoders, heads, strict=True))
        self.head = PixelMLP(trunk.head_channels, classes - 1, config.latent, config.hidden, config.layers)
        self.register_buffer("train_images", torch.tensor(config.train_images or 0))

    def before_training(self, images: int) -> None:
        if self.config.train_images is None:
            self.train_images.fill_(images)

    def prior_head(self, channels: int) -> PooledHead[Gaussian]:
        return GaussianHead(channels, self.config.latent)

    def predictive(self, dense: Tensor, prior: Gaussian, size: tuple[int, int]) -> HuPredictive:
        return HuPredictive(self, dense, size, prior)

    def divergence(self, q: Gaussian, p: Gaussian, z: Tensor, generator: torch.Generator | None) -> Tensor:
        return kl(q, p)

    def decoded(self, rows: Tensor, codes: Tensor) -> Tensor:
        """Logits ``[B, N, C, P]`` of features ``[B, N or 1, P, F]`` and codes ``[B, N, L]``; class 0 has logit 0.

        Of two classes, what is left is the one sigmoid of the authors.
        """
        return F.pad(self.head.of_rows(rows, codes), (1, 0)).transpose(2, 3)

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        beta: float | None = None,
    ) -> dict[str, Tensor]:
        """The authors' loss, of all annotations y_g of weights w_g of the M_b annotators that image b has:

            Σ_b Σ_g c_bg Σ_pixels CE(y_bg, f_comb(relu(a_bg), z_bg)) + β mean_b Σ_g c_bg KL(q(z | x, y_g) ‖ p(z | x))
            + β_w / N KL(q(w) ‖ N(0, 1)) + γ E + ρ Σ‖W‖,     c_bg = w_bg M_b

        where z_bg ~ q(z | x, y_g), and activations a_bg of the last convolution are drawn anew for each annotation. If
        annotators count equally, c is 1. N is never less than the batch has images.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            beta: β of this step, when a schedule moves it; ``None`` takes the setting's last value.

        Returns:
            ``total`` and the terms, ``fit`` and ``kl`` per annotation.
        """
        graders = Graders.of(annotations, self.classes)
        B, M, H, W = graders.labels.shape
        activations, prior = as_activations(self.backbone(images).dense), self.prior(images)
        posterior = self.posterior(images.repeat_interleave(M, 0), graders.foreground(self.classes))
        z = posterior.sample(generator)
        with full_precision(images):
            mean, sigma = (as_rows(maps)[:, None] for maps in activations)  # [B, 1, P, F]
            shape = B, M, *mean.shape[2:]
            noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
            features = (mean + sigma * noise).relu()
            drawn = prior.at(torch.randn(B, M, z.shape[1], generator=generator, device=z.device, dtype=z.dtype))
        logits = self.decoded(features, z.unflatten(0, (B, M))).unflatten(3, (H, W))
        expected = self.decoded(mean.relu(), drawn).unflatten(3, (H, W))
        parts = Parts(
            fit=graders.ce(logits),
            kl=self.divergence(posterior, _repeated(prior, M), z, generator).unflatten(0, (B, M)),
            weights=self.backbone.layer.kl(),
            spread=spread(expected, graders),
            norms=sum_of_norms(self.prior, self.posterior, *self.head.layers[:-1]),
        )
        config = self.config
        weights = Weights(
            final(config.beta) if beta is None else beta,
            config.beta_weights / self.train_images.clamp_min(B),
            config.gamma,
            config.norm_penalty,
        )
        total = objective(parts, graders, weights)
        each = graders.share.sum().clamp_min(1)
        terms = {
            "fit": (graders.share * parts.fit).sum() / each,
            "kl": (graders.share * parts.kl).sum() / each,
            "spread": parts.spread,
            "weights_kl": parts.weights,
            "norms": parts.norms,
        }
        return {"total": total, **{name: value.detach() for name, value in terms.items()}}


# -- the loss ----------------------------------------------------------------------------------------------------------


class Graders(NamedTuple):
    """All annotations of a batch.

    Attributes:
        labels: ``[B, M, H, W]`` int64, 0 where they count nowhere.
        valid: ``[B, H, W]`` bool; ``None``: every pixel counts.
        marginal: ``[B, C, H, W]``, the weighted mean of the one-hot masks; 0 at void pixels.
        present: ``[B, M]``, 1 / M_b for each of the M_b annotators that image b has, else 0.
        share: ``[B, M]``, weight times M_b: 1 where annotators count equally, 0 for images without a valid pixel.
    """

    labels: Tensor
    valid: Tensor | None
    marginal: Tensor
    present: Tensor
    share: Tensor

    @staticmethod
    def of(annotations: Masks, classes: int) -> Graders:
        """
        >>> masks = MaskDistribution(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[0.75, 0.25, 0.0]]))
        >>> Graders.of(masks, classes=2).share
        tensor([[1.5000, 0.5000, 0.0000]])
        """
        masks: MaskDistribution = as_masks(annotations)
        there = (masks.mass > 0).to(masks.mass.dtype)
        count = there.sum(1, keepdim=True).clamp_min(1)
        share = masks.mass * count
        if masks.valid is not None:
            share = share * masks.valid.flatten(1).any(1, keepdim=True)
        return Graders(masks.class_ids(classes), masks.valid, masks.marginal_probs(classes), there / count, share)

    def foreground(self, classes: int) -> Tensor:
        """The masks as the posterior reads them, ``[B·M, C − 1, H, W]``: one-hot without class 0, 0 at void pixels."""
        return F.one_hot(self.labels.flatten(0, 1), classes)[..., 1:].movedim(-1, 1).float()

    def ce(self, logits: Tensor) -> Tensor:
        """The cross-entropy of each annotation, summed over pixels:  ``[B, M, C, H, W] -> [B, M]``."""
        B, M = self.labels.shape[:2]
        valid = None if self.valid is None else self.valid.repeat_interleave(M, 0)
        return pixel_ce(logits.flatten(0, 1), self.labels.flatten(0, 1), valid).sum((1, 2)).unflatten(0, (B, M))


class Parts(NamedTuple):
    """The terms of the loss.

    Attributes:
        fit: ``[B, M]`` cross-entropies, summed over pixels.
        kl: ``[B, M]`` of codes.
        weights: KL of the random weights.
        spread: E.
        norms: Σ‖W‖.
    """

    fit: Tensor
    kl: Tensor
    weights: Tensor
    spread: Tensor
    norms: Tensor


class Weights(NamedTuple):
    """What the terms are multiplied with: β, β_w / N, γ and ρ."""

    kl: float
    weights: float | Tensor
    spread: float
    norms: float


def objective(parts: Parts, graders: Graders, weights: Weights) -> Tensor:
    """What is minimised: cross-entropies are summed over images, and KLs of codes averaged, as the authors have it."""
    share = graders.share.to(parts.fit.dtype)
    images = (share > 0).any(1).sum().clamp_min(1)
    return (
        (share * parts.fit).sum()
        + weights.kl * (share * parts.kl).sum() / images
        + weights.weights * parts.weights
        + weights.spread * parts.spread
        + weights.norms * parts.norms
    )


def spread(logits: Tensor, graders: Graders) -> Tensor:
    """The inter-grader term E: how the mean of masks drawn fits the mean of annotations, in bits per pixel,

        E = −1/ln 2 · mean_pixels Σ_c ȳ_c log p̄_c,     p̄ = mean over annotators of softmax(logits),  ȳ = Σ_g w_g y_g

    Args:
        logits: ``[B, M, C, H, W]``, one draw for each annotator; those of absent ones are not looked at.

    >>> same = MaskDistribution(torch.tensor([[[[0]], [[1]]]]))
    >>> spread(torch.zeros(1, 2, 2, 1, 1), Graders.of(same, classes=2))  # half and half: one bit
    tensor(1.)
    """
    with full_precision(logits):
        log_p = at_least_float32(logits).log_softmax(2)
        log_p = log_p + graders.present.log()[:, :, None, None, None].to(log_p.dtype)
        cost = -(graders.marginal * log_p.logsumexp(1)).sum(1) / math.log(2)
        pixels = cost.numel() if graders.valid is None else graders.valid.sum().clamp_min(1)
        return cost.sum() / pixels


def sum_of_norms(*modules: nn.Module) -> Tensor:
    """Σ‖W‖₂ over parameters, not squared; each weight and each bias has its own norm.

    >>> layer = nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[3.0, 4.0]])), layer.bias.fill_(-1.0)
    >>> sum_of_norms(layer).item()
    6.0
    """
    return torch.stack([torch.linalg.vector_norm(p) for module in modules for p in module.parameters()]).sum()


def _repeated(gaussian: Gaussian, times: int) -> Gaussian:
    return Gaussian(*(part.repeat_interleave(times, 0) for part in gaussian))


# -- prediction --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HuPredictive(DensePredictive):
    """Mean and scale of the last convolution's activations, and a prior over codes.

    A draw is a code and one number per place and channel: networks below the last convolution run once.

    Attributes:
        dense: mean and scale, ``[B, 2 F, H, W]``.
        size: (H, W) of the images.
        prior: p(z | x), of ``[B, L]``.
    """

    model: Hu
    dense: Tensor
    size: tuple[int, int]
    prior: Gaussian

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """ε of every code, and the seeds of what is random at places."""
        mean = self.prior.mean
        shape = len(mean), n, mean.shape[1]
        codes = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return Noise(codes, seeds=new_seeds(len(mean), n, generator, mean.device))

    seeded = True

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.prior.mean.shape[1]

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        assert numbers.normals is not None
        return Noise(numbers.normals, seeds=numbers.seeds)

    def probs(self, noise: Noise) -> Tensor:
        B, F2, H, W = self.dense.shape
        some = max(1, _AT_ONCE // max(1, B * F2 * H * W))
        return torch.cat([self._probs(noise[i : i + some]) for i in range(0, noise.count, some)], 1)

    def soft(self, noise: Noise) -> Tensor:
        return self._probs(noise)

    def _probs(self, noise: Noise) -> Tensor:
        with full_precision(self.dense):
            activations = as_activations(self.dense)
            eps = noise.normal(0, activations.mean.shape[1], self.size)
            rows = activations.at(eps).relu_().flatten(3).transpose(2, 3)
            logits = self.model.decoded(rows, self.prior.at(noise.codes))
            return logits.softmax(2).unflatten(3, self.size)

    @torch.no_grad()
    def render(self, noise: Noise) -> MaskDistribution:
        """The masks of a noise, some rows of a draw at a time."""
        (B, _, H, W), C = self.dense.shape, self.classes
        labels = torch.empty(B, noise.count, H, W, dtype=label_dtype(C), device=self.dense.device)
        marginal, mass = self.dense.new_zeros(B, C, H, W), noise.mass
        rows = max(1, BAND // W)
        for y in range(0, H, rows):
            band = slice(y, y + rows)
            part, here = self.of_part(self.dense[:, :, band]), noise.at(y, 0)
            for i in range(noise.count):
                probs = part.probs(here[i : i + 1])[:, 0]
                labels[:, i, band] = probs.argmax(1).to(labels.dtype)
                marginal[:, :, band] += mass[:, i, None, None, None] * probs
        return MaskDistribution(labels, None if noise.weights is None else noise.weights.detach(), marginal=marginal)

    def of_part(self, dense: Tensor) -> HuPredictive:
        """The same for a part of the image."""
        return replace(self, dense=dense, size=(dense.shape[2], dense.shape[3]))
