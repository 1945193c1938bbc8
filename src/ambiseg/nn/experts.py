"""The experts' latent Gaussians."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """K Gaussians that no image influences:  z ~ N(m_k, σ_k² I)  in L dimensions.

    Means start at the corners of {0, 1}^L for the first 2^L experts and uniformly in [0, 1]^L after that; σ at 1/8.

    Args:
        count: K, how many experts.
        latent: L, dimensions of a code.
        stochastic: ``False`` gives each expert its mean alone (the paper's ablation).
        diagonal: one σ per dimension, as in the released code, instead of one per expert.

    >>> Experts(4, latent=2).mean.tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, count: int, latent: int, stochastic: bool = True, diagonal: bool = False) -> None:
        super().__init__()
        if count < 1 or latent < 1:
            raise ValueError(f"expected at least one expert and one latent dimension, found {count} and {latent}")
        self.count, self.latent, self.stochastic = count, latent, stochastic
        mean = torch.rand(count, latent)
        for k, corner in zip(range(count), product((0.0, 1.0), repeat=latent), strict=False):
            mean[k] = torch.tensor(corner)
        self.mean = nn.Parameter(mean)
        width = latent if diagonal else 1
        self.log_sigma = nn.Parameter(torch.full((count, width), math.log(1 / 8))) if stochastic else None

    @property
    def sigma(self) -> Tensor:
        """``[K, L]``; 0 for deterministic experts."""
        if self.log_sigma is None:
            return torch.zeros_like(self.mean)
        return self.log_sigma.exp().expand_as(self.mean)

    def of(self, ids: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A latent code from each of the experts named:  ids ``[B, N] -> [B, N, L]``."""
        return self.noisy(self.mean[ids], self.sigma[ids], generator)

    def each(self, images: int, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """``samples`` codes of every expert, side by side:  ``[images, K · samples, L]``."""
        ids = torch.arange(self.count, device=self.mean.device).repeat_interleave(samples)
        return self.of(ids.expand(images, -1), generator)

    def noisy(self, mean: Tensor, sigma: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """mean + σ ε,  ε ~ N(0, I), differentiable in both."""
        if not self.stochastic:
            return mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return mean + sigma * noise
