"""CAR's pixel losses. Void pixels add nothing, but count in the mean, as its authors have it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ambiseg.masks import at_least_float32
from ambiseg.methods.targets import Target
from ambiseg.overlap import full_precision

SMALLEST = 1e-7  # probability of a class in the cross-entropy
BOUND = 1e-3  # of probabilities in the KL


def calibration_ce(logits: Tensor, target: Target) -> Tensor:
    """The cross-entropy of the calibration network, the mean over images and pixels:

        −log max(softmax(logits)[y], 1e-7)

    Args:
        logits: ``[B, C, H, W]``.

    >>> calibration_ce(torch.zeros(1, 2, 1, 2), Target(torch.zeros(1, 1, 2, dtype=torch.long), None))
    tensor(0.6931)
    """
    with full_precision(logits):
        log_p = at_least_float32(logits).log_softmax(1).gather(1, target.labels[:, None])[:, 0]
        return _mean(-log_p.clamp_min(math.log(SMALLEST)), target.valid)


def calibration_kl(mean: Tensor, calibrated: Tensor, valid: Tensor | None = None) -> Tensor:
    """How far the mean of the draws is from the calibrated probabilities, the mean over images and pixels:

        Σ_c p_c log(p_c / q_c),     p, q: mean and calibrated, each within [1e-3, 1 − 1e-3]

    Args:
        mean: ``[B, C, H, W]``.
        calibrated: ``[B, C, H, W]``.
        valid: ``[B, H, W]`` bool; ``None``: all.

    >>> calibration_kl(torch.full((1, 2, 1, 1), 0.5), torch.tensor([0.25, 0.75]).view(1, 2, 1, 1))
    tensor(0.1438)
    """
    with full_precision(mean):
        p, q = (at_least_float32(x).clamp(BOUND, 1 - BOUND) for x in (mean, calibrated))
        return _mean((p * (p.log() - q.log())).sum(1), valid)


def _mean(cost: Tensor, valid: Tensor | None) -> Tensor:
    return (cost if valid is None else torch.where(valid, cost, 0)).mean()
