"""How much annotations, images and experts count in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution


def annealed(mass: Tensor, annealing: float) -> Tensor:
    """Annotation weights between uniform over those present (0) and their own (1)."""
    if annealing == 1:
        return mass
    present = (mass > 0).to(mass.dtype)
    return annealing * mass + (1 - annealing) * present / present.sum(1, keepdim=True)


def log_of(weights: Tensor) -> Tensor:
    """Of weights that may have become 0."""
    return weights.clamp_min(torch.finfo(weights.dtype).tiny).log()


def has_valid_pixels(annotations: MaskDistribution) -> Tensor:
    """Which images have a pixel that counts, ``[B]`` bool."""
    if annotations.valid is None:
        return torch.ones(len(annotations), device=annotations.device)
    return annotations.valid.flatten(1).any(1)
