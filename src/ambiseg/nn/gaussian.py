"""Gaussians and mixtures of them over latent codes, and the heads that predict them. Scales are bounded.

All of it is computed in float32 at least: a scale or a KL in half precision overflows.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32
from ambiseg.overlap import full_precision

LOG_SIGMA = 10.0  # log σ stays within ±this
SMALLEST = 1e-4  # σ of a softplus
FLOOR = 1e-3  # σ of a component of a mixture

Scale: TypeAlias = Literal["exp", "softplus"]
Pool: TypeAlias = Literal["before", "after", "none"]


class Gaussian(NamedTuple):
    """Independent normal distributions:  z ~ N(mean, diag σ²).

    Attributes:
        mean: ``[B, …]``, a code ``[B, L]`` or a map ``[B, L, h, w]``.
        sigma: of the same shape, positive.
    """

    mean: Tensor
    sigma: Tensor

    def at(self, noise: Tensor) -> Tensor:
        """mean + σ · noise, differentiable in both; ``noise`` may have the draws as a second axis, ``[B, N, …]``."""
        if noise.ndim == self.mean.ndim:
            return self.mean + self.sigma * noise
        return self.mean[:, None] + self.sigma[:, None] * noise

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw per image, differentiable."""
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype)
        return self.at(noise)

    def log_prob(self, z: Tensor) -> Tensor:
        """log N(z; mean, σ²), summed over all axes but the first, ``[B]``; of draws ``[B, N, …]`` it is ``[B, N]``."""
        if z.ndim == self.mean.ndim:
            return log_normal(z, self.mean, self.sigma).flatten(1).sum(1)
        return log_normal(z, self.mean[:, None], self.sigma[:, None]).flatten(2).sum(2)


def log_normal(z: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """log N(z; mean, σ²), element by element."""
    return -0.5 * ((z - mean) / sigma).square() - sigma.log() - 0.5 * math.log(2 * math.pi)


def kl(q: Gaussian, p: Gaussian, floor: float = 0.0) -> Tensor:
    """KL(q ‖ p), summed over all axes but the first, ``[B]``:

        ½ Σ [(σ_q² + (μ_p − μ_q)²) / (σ_p² + floor) + log(σ_p² + floor) − log(σ_q² + floor) − 1]

    Args:
        floor: added to variances where they are divided by or their logarithm is taken (PHiSeg's 1e-10).

    >>> one, other = Gaussian(torch.zeros(1, 2), torch.ones(1, 2)), Gaussian(torch.ones(1, 2), torch.ones(1, 2))
    >>> kl(one, other), kl(one, one)
    (tensor([1.]), tensor([0.]))
    """
    ours, theirs = q.sigma.square(), p.sigma.square() + floor
    distance = (ours + (p.mean - q.mean).square()) / theirs
    return 0.5 * (distance + theirs.log() - (ours + floor).log() - 1).flatten(1).sum(1)


class Mixture(NamedTuple):
    """A mixture of K Gaussians over codes:  Σ_k π_k N(m_k, diag σ_k²).

    Attributes:
        log_weights: ``[B, K]`` log π.
        mean: ``[B, K, L]``.
        sigma: ``[B, K, L]``.
    """

    log_weights: Tensor
    mean: Tensor
    sigma: Tensor

    def log_prob(self, z: Tensor) -> Tensor:
        """log Σ_k π_k N(z; m_k, σ_k²)  of codes ``[B, L]``, ``[B]``; of N draws ``[B, N, L]`` it is ``[B, N]``.

        >>> one = Mixture(torch.zeros(1, 1), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
        >>> one.log_prob(torch.zeros(1, 2)), Gaussian(torch.zeros(1, 2), torch.ones(1, 2)).log_prob(torch.zeros(1, 2))
        (tensor([-1.8379]), tensor([-1.8379]))
        """
        log_weights, mean, sigma = self if z.ndim == 2 else (x[:, None] for x in self)
        return torch.logsumexp(log_weights + log_normal(z[..., None, :], mean, sigma).sum(-1), -1)

    def at(self, components: Tensor, noise: Tensor) -> Tensor:
        """m_k + σ_k · noise of the components ``[B, N]`` named, differentiable; ``noise`` is ``[B, N, L]``."""
        index = components.long()[:, :, None].expand_as(noise)
        return self.mean.gather(1, index) + self.sigma.gather(1, index) * noise


def kl_of_draws(q: Gaussian, p: Gaussian | Mixture, z: Tensor) -> Tensor:
    """KL(q ‖ p) estimated from draws z ~ q, ``[B, N, L] -> [B]``, for a p that has no closed form:

        1/N Σ_n [log q(z_n) − log p(z_n)]

    Its mean over draws is the divergence; one estimate may be negative.

    >>> q, p = Gaussian(torch.zeros(1, 2), torch.ones(1, 2)), Gaussian(torch.ones(1, 2), torch.ones(1, 2))
    >>> kl_of_draws(q, p, torch.tensor([[[0.0, 0.0], [1.0, 1.0]]]))  # 1 and −1
    tensor([0.])
    """
    return (q.log_prob(z) - p.log_prob(z)).mean(1)


def positive(values: Tensor, scale: Scale) -> Tensor:
    """σ of what a network gives:  exp, of values within ±10, or softplus, of at least 1e-4."""
    if scale == "exp":
        return values.clamp(-LOG_SIGMA, LOG_SIGMA).exp()
    return F.softplus(values).clamp_min(SMALLEST)


class GaussianHead(nn.Module):
    """A 1×1 convolution that gives mean and scale of a Gaussian.

    Args:
        channels: of the maps that it reads.
        latent: L, channels of mean and of scale.
        scale: ``exp`` of a bounded logarithm, or ``softplus``.
        pool: average over the map ``before`` the convolution (Kohl et al. 2018) or ``after`` the scale is positive
            (the PHiSeg authors' version, which differs by the softplus); ``none`` gives maps.

    >>> head = GaussianHead(8, latent=6)
    >>> head(torch.randn(2, 8, 4, 4)).sigma.shape
    torch.Size([2, 6])
    """

    def __init__(self, channels: int, latent: int, scale: Scale = "exp", pool: Pool = "before") -> None:
        super().__init__()
        self.scale: Scale = scale
        self.pool: Pool = pool
        self.conv = _pointwise(channels, 2 * latent)

    def forward(self, maps: Tensor) -> Gaussian:
        """``[B, channels, h, w]`` -> Gaussian of ``[B, L]``, or ``[B, L, h, w]`` where nothing is pooled."""
        if self.pool != "none":
            return self.of(self.statistics(maps).mean((2, 3)))
        with full_precision(maps):
            return self._gaussian(at_least_float32(maps))

    @property
    def averaged(self) -> int:
        """Channels of :meth:`statistics`."""
        return self.conv.in_channels if self.pool == "before" else self.conv.out_channels

    def statistics(self, maps: Tensor) -> Tensor:
        """What is averaged over the image, ``[B, channels, h, w] -> [B, averaged, h, w]``; :meth:`of` takes the mean.

        The mean over a large image can thus be taken window by window.
        """
        with full_precision(maps):
            maps = at_least_float32(maps)
            return maps if self.pool == "before" else torch.cat(self._gaussian(maps), 1)

    def of(self, means: Tensor) -> Gaussian:
        """The Gaussian of averaged statistics ``[B, averaged]``."""
        with full_precision(means):
            if self.pool == "after":
                return Gaussian(*means.chunk(2, 1))
            mean, sigma = self._gaussian(means[:, :, None, None])
            return Gaussian(mean.flatten(1), sigma.flatten(1))

    def _gaussian(self, maps: Tensor) -> Gaussian:
        mean, scale = self.conv(maps).chunk(2, 1)
        return Gaussian(mean, positive(scale, self.scale))


class MixtureHead(nn.Module):
    """A 1×1 convolution that gives a mixture of K Gaussians, averaged over the map like :class:`GaussianHead`.

        conditional:  Σ_k π_k(x) N(m_k(x), diag σ_k(x)²)          free:  Σ_k π_k(x) N(m_k, diag σ_k²)

    Components start with σ_k of about 1 around points that are drawn from N(0, I): those of equal means would get
    equal gradients and never part. σ_k is at least :data:`FLOOR`, which is added to what the convolution gives, so that
    a scale near it can grow again.

    Args:
        channels: of the maps that it reads.
        latent: L, dimension of the code.
        components: K.
        free: means and scales are parameters, the same for all images; weights alone depend on the image.
        scale: ``exp`` of a bounded logarithm, or ``softplus``.
        pool: average over the map ``before`` the convolution, or ``after`` the scale is positive.

    >>> head = MixtureHead(8, latent=6, components=4)
    >>> [tuple(x.shape) for x in head(torch.randn(2, 8, 5, 5))]
    [(2, 4), (2, 4, 6), (2, 4, 6)]
    """

    def __init__(
        self,
        channels: int,
        latent: int,
        components: int,
        free: bool = False,
        scale: Scale = "exp",
        pool: Literal["before", "after"] = "before",
    ) -> None:
        super().__init__()
        self.components, self.latent, self.free, self.pool = components, latent, free, pool
        self.scale: Scale = scale
        numbers = components * latent
        self.conv = _pointwise(channels, components + (0 if free else 2 * numbers))
        apart, one = torch.randn(numbers), 0.0 if scale == "exp" else math.log(math.e - 1)
        if free:
            self.mean = nn.Parameter(apart.view(components, latent))
            self.raw_sigma = nn.Parameter(torch.full((components, latent), one))
        else:
            assert self.conv.bias is not None
            with torch.no_grad():
                self.conv.bias[components:] = torch.cat([apart, torch.full((numbers,), one)])

    def forward(self, maps: Tensor) -> Mixture:
        """``[B, channels, h, w]`` -> the mixture of each image."""
        return self.of(self.statistics(maps).mean((2, 3)))

    @property
    def averaged(self) -> int:
        """Channels of :meth:`statistics`."""
        return self.conv.in_channels if self.pool == "before" else self.conv.out_channels

    def statistics(self, maps: Tensor) -> Tensor:
        """What is averaged over the image, ``[B, channels, h, w] -> [B, averaged, h, w]``; :meth:`of` takes means."""
        with full_precision(maps):
            maps = at_least_float32(maps)
            return maps if self.pool == "before" else self._numbers(maps)

    def of(self, means: Tensor) -> Mixture:
        """The mixture of averaged statistics ``[B, averaged]``."""
        with full_precision(means):
            if self.pool == "before":
                means = self._numbers(means[:, :, None, None]).flatten(1)
            logits, rest = means[:, : self.components], means[:, self.components :]
            if self.free:
                mean, sigma = self.mean, FLOOR + positive(self.raw_sigma, self.scale)
                mean, sigma = (x.to(logits.dtype).expand(logits.shape[0], -1, -1) for x in (mean, sigma))
            else:
                mean, sigma = rest.unflatten(1, (2, self.components, self.latent)).unbind(1)
            return Mixture(logits.log_softmax(1), mean, sigma)

    def _numbers(self, maps: Tensor) -> Tensor:
        """Logits of the weights ``[B, K, h, w]``, and means and scales after them unless they are free."""
        numbers = self.conv(maps)
        if self.free:
            return numbers
        half = (numbers.shape[1] - self.components) // 2
        logits, mean, scale = numbers.split([self.components, half, half], 1)
        return torch.cat([logits, mean, FLOOR + positive(scale, self.scale)], 1)


def _pointwise(channels: int, out: int) -> nn.Conv2d:
    """A 1×1 convolution without activation after it."""
    conv = nn.Conv2d(channels, out, 1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
