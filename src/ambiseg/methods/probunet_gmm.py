"""The Probabilistic U-Net with a mixture of Gaussians as its prior (Gao et al., ICLR 2023, appendix)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ambiseg.methods.base import Noise, Stratified
from ambiseg.methods.predictive import Numbers
from ambiseg.methods.probunet import LatentPredictive, LatentUNet, LatentUNetConfig
from ambiseg.nn.gaussian import Gaussian, Mixture, MixtureHead, kl_of_draws
from ambiseg.nn.pooled import PooledHead


class ProbUNetGMMConfig(LatentUNetConfig):
    """Settings of the Probabilistic U-Net with a mixture as prior."""

    method: Literal["probunet-gmm"] = "probunet-gmm"
    components: int = Field(default=4, ge=1, le=256, description="K, Gaussians of the prior")
    prior: Literal["conditional", "free"] = Field(
        default="conditional",
        description="conditional: weights, means and scales of the Gaussians depend on the image; free: their weights "
        "alone do",
    )
    kl_samples: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="codes that the KL term of an image is estimated from; the first one is decoded",
    )


@dataclass(frozen=True, eq=False)
class MixturePredictive(LatentPredictive, Stratified):  # pyright: ignore[reportIncompatibleVariableOverride]
    """What the Probabilistic U-Net with a mixture predicts for a batch of images; its strata are the components.

    Attributes:
        prior: p(z | x), of ``[B, K, L]``.
        weights: π ``[B, K]``.
    """

    prior: Mixture
    weights: Tensor

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        """ε of a draw from each of the components named:  z = m_k + σ_k ε."""
        mean = self.prior.mean
        shape = *strata.shape, mean.shape[2]
        noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return Noise(noise, strata=strata)

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.prior.mean.shape[2]

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        assert numbers.normals is not None
        return Noise(numbers.normals, strata=numbers.strata)

    def centre_noise(self) -> Noise:
        """The mean of every component."""
        B, K, _ = self.prior.mean.shape
        strata = torch.arange(K, device=self.weights.device).expand(B, -1)
        return Noise(torch.zeros_like(self.prior.mean), self.weights.detach(), strata)

    def codes(self, noise: Noise) -> Tensor:
        if noise.strata is None:
            raise ValueError("expected noise with the component of every draw, found none")
        return self.prior.at(noise.strata, noise.codes)


class ProbUNetGMM(LatentUNet[Mixture]):
    """The Probabilistic U-Net whose prior has K modes; the posterior stays one Gaussian.

        k ~ π(x),     z ~ N(m_k, diag σ_k²),     y = f_comb(U-Net(x), z)

    m_k and σ_k depend on the image, or are parameters that all images share (``prior: free``). The divergence of a
    Gaussian from a mixture has no closed form, and is estimated from codes of the posterior:

        KL ≈ 1/S Σ_s [log q(z_s | x, y) − log Σ_k π_k(x) N(z_s; m_k, diag σ_k²)],     z_s ~ q

    No component is drawn in training, so that weights, means and scales have their exact gradients.

    >>> from ambiseg.nn.config import BackboneConfig
    >>> model = ProbUNetGMM(ProbUNetGMMConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).compact(per_stratum=2)
    MaskDistribution(1 image of 32×32, 8 masks, weighted, soft marginal)
    """

    Config: ClassVar = ProbUNetGMMConfig
    idea = "a Probabilistic U-Net whose code comes from a mixture of Gaussians, so that the prior has several modes"
    reference = (
        "Gao et al., Modeling Multimodal Aleatoric Uncertainty in Segmentation with Mixture of Stochastic Experts, "
        "ICLR 2023 (comparison with GMM-VAE); Kohl et al., A Probabilistic U-Net for Segmentation of Ambiguous "
        "Images, NeurIPS 2018"
    )
    year = 2023
    stratum = "component"

    def prior_head(self, channels: int) -> PooledHead[Mixture]:
        config = self.config
        free = config.prior == "free"
        return MixtureHead(channels, config.latent, config.components, free, config.scaled, config.pooled)

    def predictive(self, dense: Tensor, prior: Mixture, size: tuple[int, int]) -> MixturePredictive:
        return MixturePredictive(self, dense, size, self.training, prior, prior.log_weights.exp())

    def divergence(self, q: Gaussian, p: Mixture, z: Tensor, generator: torch.Generator | None) -> Tensor:
        codes, more = z[:, None], self.config.kl_samples - 1
        if more:
            shape = len(z), more, z.shape[1]
            noise = torch.randn(shape, generator=generator, device=z.device, dtype=z.dtype)
            codes = torch.cat([codes, q.at(noise)], 1)
        return kl_of_draws(q, p, codes)
