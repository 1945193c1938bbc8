"""Normal distributions over all logits of an image, of low rank plus diagonal, and how likely a mask is under them.

No covariance matrix is ever made or factorised: draws need products with the factor alone. All of it is computed in
float32 at least.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ambiseg._util.bands import bands
from ambiseg.masks import at_least_float32
from ambiseg.overlap import full_precision

FLOOR = 1e-5  # added to variances
LOG_VARIANCE = 10.0  # log D of a network stays within ±this


class LowRankNormal(NamedTuple):
    """Logits of all pixels of an image together:

        η = μ + P ε₁ + √D ε₂,     η ~ N(μ, P Pᵀ + diag D)

    Attributes:
        mean: μ ``[B, K, H, W]``. K is the number of classes, or 1 for the margin of two.
        factor: P ``[B, R, K, H, W]``; R is 0 for logits that know nothing of each other.
        variance: D ``[B, K, H, W]``, positive.

    >>> normal = LowRankNormal.of(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), torch.ones(1, 3, 2, 4, 4))
    >>> normal.at(torch.zeros(1, 5, 3), torch.zeros(1, 5, 2, 4, 4)).shape       # 5 draws
    torch.Size([1, 5, 2, 4, 4])
    """

    mean: Tensor
    factor: Tensor
    variance: Tensor

    @classmethod
    def of(cls, mean: Tensor, log_diagonal: Tensor, factor: Tensor) -> LowRankNormal:
        """Of what a network gives:  D = exp(log_diagonal) + 1e-5, the logarithm within ±10."""
        mean, log_diagonal, factor = (at_least_float32(x) for x in (mean, log_diagonal, factor))
        return cls(mean, factor, log_diagonal.clamp(-LOG_VARIANCE, LOG_VARIANCE).exp() + FLOOR)

    @classmethod
    def split(cls, maps: Tensor, classes: int) -> LowRankNormal:
        """Of one map ``[B, (2 + R) · C, H, W]``: mean, log-diagonal and R factors, each of C channels."""
        mean, log_diagonal, factor = maps.split([classes, classes, maps.shape[1] - 2 * classes], 1)
        return cls.of(mean, log_diagonal, factor.unflatten(1, (-1, classes)))

    @property
    def rank(self) -> int:
        """R."""
        return self.factor.shape[1]

    def at(self, codes: Tensor, pixels: Tensor) -> Tensor:
        """η of given noise ``[B, N, R]`` and ``[B, N, K, H, W]``, differentiable, ``[B, N, K, H, W]``."""
        with full_precision(self.mean):
            common = torch.baddbmm(self.mean.flatten(1)[:, None], codes, self.factor.flatten(2))
            return torch.addcmul(common.view_as(pixels), self.variance.sqrt()[:, None], pixels)

    def margin(self) -> LowRankNormal:
        """η₁ − η₀ of two classes, all that decides between them; a normal distribution of the same rank, K = 1.

        >>> two = LowRankNormal.of(torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 2, 1, 1))
        >>> two.margin().variance.flatten()         # D₀ + D₁
        tensor([2.0000])
        """
        if self.mean.shape[1] != 2:
            raise ValueError(f"expected the logits of two classes, found {self.mean.shape[1]}")
        means, factors = self.mean.unbind(1), self.factor.unbind(2)  # gradients of slices would be padded with zeros
        mean, factor = means[1] - means[0], factors[1] - factors[0]
        return LowRankNormal(mean[:, None], factor[:, :, None], self.variance.sum(1, keepdim=True))

    def within(self, region: Tensor) -> LowRankNormal:
        """Certain outside of a region ``[B, H, W]``, where the logits are their mean: for images with a border or
        background of which nothing is unknown (Monteiro et al. on BraTS; 1e-5 is added once more, as there).
        """
        region = region.to(self.mean.dtype)[:, None]
        return LowRankNormal(self.mean, self.factor * region[:, None], self.variance * region + FLOOR)

    def scaled(self, spread: float) -> LowRankNormal:
        """The same with all deviations from the mean ``spread`` times as large."""
        return self if spread == 1 else LowRankNormal(self.mean, self.factor * spread, self.variance * spread**2)


class Likelihood(NamedTuple):
    """How likely the mask of each image is.

    Attributes:
        nll: ``[B]``, differentiable.
        of_each: ``[B, M]`` log p(y | η_m) of each sample, without gradient.
    """

    nll: Tensor
    of_each: Tensor


def likelihood(
    normal: LowRankNormal,
    labels: Tensor,
    valid: Tensor | None = None,
    samples: int = 20,
    mirrored: bool = False,
    generator: torch.Generator | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
    at_once: int | None = None,
) -> Likelihood:
    """The Monte-Carlo likelihood of one mask y per image, the sum over pixels inside the mean over samples:

        nll = −log 1/M Σ_m exp(Σ_pixels log softmax(η_m)[y])

    Its gradient is the mean of the samples' gradients, weighted by how well each of them explains the mask. It is
    computed with the value, for some samples of some images at a time, so that memory does not grow with M or B:
    weights are relative to the best sample so far, and what was added up is scaled down when a better one comes.

    Args:
        normal: of the logits of C classes; with K = 1 the margin of two classes, which costs half.
        labels: ``[B, H, W]`` int64, below C.
        valid: ``[B, H, W]`` bool, the pixels that count; ``None``: all.
        samples: M.
        mirrored: the second half of the samples is the first half mirrored at the mean; M is even.
        generator: of the noise.
        noise: ε₁ ``[B, M, R]`` and ε₂ ``[B, M, K, H, W]`` instead of drawn noise; M/2 of them where mirrored.
        at_once: numbers of logits that are held at a time; chosen by device when ``None``.

    >>> maps, labels = torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
    >>> normal, still = LowRankNormal(maps, maps[:, None], maps), (torch.zeros(1, 3, 1), torch.zeros(1, 3, 2, 4, 4))
    >>> likelihood(normal, labels, samples=3, noise=still).nll / 16     # log 2 a pixel
    tensor([0.6931])
    """
    if samples < 1 or (mirrored and samples % 2):
        raise ValueError(f"expected at least one sample, an even number if mirrored, found {samples}")
    mean, factor, drawn = normal.mean, normal.factor, samples // 2 if mirrored else samples
    with full_precision(mean):
        if noise is None:
            shape = len(mean), drawn, normal.rank
            codes, pixels = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype), None
        else:
            codes, pixels = noise[0], noise[1].flatten(3)
        settings = _Settings(labels.flatten(1), valid, codes, pixels, mirrored, generator, at_once)
        flat = mean.flatten(2), factor.flatten(3), normal.variance.sqrt().flatten(2)
        return Likelihood(*_Likelihood.apply(settings, torch.is_grad_enabled(), *flat))  # type: ignore[arg-type]


class _Settings(NamedTuple):
    labels: Tensor  # [B, P]
    valid: Tensor | None  # [B, H, W]
    codes: Tensor  # [B, n, R]
    pixels: Tensor | None  # [B, n, K, P]
    mirrored: bool
    generator: torch.Generator | None
    at_once: int | None

    def noise(self, images: slice, draws: slice, like: Tensor) -> Tensor:
        """ε₂ of some draws ``[b, n, K·P]``, in a tensor of its own."""
        if self.pixels is not None:
            return self.pixels[images, draws].flatten(2).to(like.dtype, copy=True)
        shape = like.shape[0], draws.stop - draws.start, like[0].numel()
        return torch.randn(shape, generator=self.generator, device=like.device, dtype=like.dtype)


def numbers_at_once(like: Tensor) -> int:
    """How many logits are held at a time: on a CPU 2 megabytes, which its cache holds, elsewhere 64."""
    return 2**19 if like.is_cpu else 2**24


class _Likelihood(torch.autograd.Function):
    """Value and gradient in one go; ``mean [B, K, P]``, ``factor [B, R, K, P]``, ``sigma [B, K, P]``."""

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, learns: bool, mean: Tensor, factor: Tensor, sigma: Tensor
    ) -> tuple[Tensor, Tensor]:
        learns = learns and any(ctx.needs_input_grad)
        drawn, both = settings.codes.shape[1], 1 + settings.mirrored
        at_once = numbers_at_once(mean) if settings.at_once is None else settings.at_once
        room = at_once // (both * mean[0].numel())  # draws of one image
        nll, of_each = mean.new_empty(len(mean)), mean.new_empty(len(mean), both, drawn)
        grads = [torch.empty_like(x) for x in (mean, factor, sigma)] if learns else []
        for images in bands(len(mean), max(1, room // drawn)):
            here = _Images(settings, images, mean[images], factor[images], sigma[images], learns)
            for draws in bands(drawn, max(1, room)):
                of_each[images, :, draws] = here.add(draws)
            nll[images] = math.log(both * drawn) - here.total.log() - here.best
            for whole, part in zip(grads, here.gradients(), strict=True):
                whole[images] = part
        ctx.save_for_backward(*grads)
        of_each = of_each.flatten(1)
        ctx.mark_non_differentiable(of_each)
        return nll, of_each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, *(x * grads[0].view(-1, *[1] * (x.ndim - 1)) for x in ctx.saved_tensors))


class _Images:
    """Some images, whose samples come in parts.

    With w_m = exp(log p(y | η_m) − best), ``total`` is Σ_m w_m, and gradients are −Σ_m w_m ∂ log p(y | η_m) / total.
    """

    def __init__(
        self, settings: _Settings, images: slice, mean: Tensor, factor: Tensor, sigma: Tensor, learns: bool
    ) -> None:
        self.settings, self.images, self.learns = settings, images, learns
        self.mean, self.factor, self.sigma = mean, factor, sigma
        self.labels = settings.labels[images]
        valid = None if settings.valid is None else settings.valid[images].flatten(1)
        self.valid = None if valid is None else valid.to(mean.dtype)[:, None]  # [b, 1, P]
        self.best = mean.new_full((len(mean),), -math.inf)
        self.total = mean.new_zeros(len(mean))
        self.sums: list[Tensor] = []  # of mean and factors [b, 1 + R, K·P], of sigma [b, 1, K·P]

    def add(self, draws: slice) -> Tensor:
        """log p(y | η) of some draws, ``[b, 2, n]`` where they are mirrored, else ``[b, 1, n]``."""
        codes = self.settings.codes[self.images, draws].to(self.mean.dtype)
        pixels, mean = self.settings.noise(self.images, draws, self.mean), self.mean.flatten(1)[:, None]
        apart = torch.addcmul(codes @ self.factor.flatten(2), self.sigma.flatten(1)[:, None], pixels)
        logits = torch.cat([mean + apart, mean - apart], 1) if self.settings.mirrored else apart.add_(mean)
        logits = logits.unflatten(2, self.mean.shape[1:])  # [b, m, K, P]
        found, slope = self._margins(logits[:, :, 0]) if logits.shape[2] == 1 else self._classes(logits)
        best = torch.maximum(self.best, found.amax(1))
        kept, weights = (self.best - best).exp(), (found - best[:, None]).exp()
        self.total, self.best = self.total * kept + weights.sum(1), best
        if slope is not None:
            self._learn(codes, pixels, weights, kept, slope.flatten(2))
        return found.unflatten(1, (1 + self.settings.mirrored, -1))

    def _margins(self, margins: Tensor) -> tuple[Tensor, Tensor | None]:
        """log p(y | margins) and its gradient of margins ``[b, m, P]``."""
        ones = self.labels[:, None].to(margins.dtype)
        each = F.logsigmoid(margins * (2 * ones - 1))
        found = (each if self.valid is None else each.mul_(self.valid)).sum(2)
        if not self.learns:
            return found, None
        slope = torch.sub(ones, margins.sigmoid_())
        return found, slope if self.valid is None else slope.mul_(self.valid)

    def _classes(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same of logits ``[b, m, K, P]``."""
        each, labels = logits.log_softmax(2), self.labels[:, None, None].expand(-1, logits.shape[1], -1, -1)
        chosen = each.gather(2, labels)[:, :, 0]
        found = (chosen if self.valid is None else chosen.mul_(self.valid)).sum(2)
        if not self.learns:
            return found, None
        slope = each.exp_().neg_().scatter_add_(2, labels, each.new_ones(()).expand(labels.shape))
        return found, slope if self.valid is None else slope.mul_(self.valid[:, None])

    def _learn(self, codes: Tensor, pixels: Tensor, weights: Tensor, kept: Tensor, slope: Tensor) -> None:
        """Add up the gradients of some draws. A mirrored one has its noise, negative."""
        n = codes.shape[1]
        if self.settings.mirrored:
            codes = torch.cat([codes, -codes], 1)
        shares = torch.cat([weights[:, None], codes.transpose(1, 2) * weights[:, None]], 1)  # [b, 1 + R, m]
        signed = slope * weights[:, :, None]
        signed = signed[:, :n].sub_(signed[:, n:]) if self.settings.mirrored else signed
        pixels = pixels.mul_(signed).sum(1, keepdim=True)
        if not self.sums:
            self.sums = [shares @ slope, pixels]
            return
        of_logits, of_pixels = (x.mul_(kept[:, None, None]) for x in self.sums)
        of_logits.baddbmm_(shares, slope)
        of_pixels.add_(pixels)

    def gradients(self) -> tuple[Tensor, ...]:
        """Of mean, factor and sigma; none where nothing is learned."""
        if not self.learns:
            return ()
        logits, pixels = (x.div_(-self.total[:, None, None]) for x in self.sums)
        return logits[:, 0].view_as(self.mean), logits[:, 1:].view_as(self.factor), pixels.view_as(self.sigma)
