"""How likely a mask is, pixel by pixel. Latent-variable methods need the sum over pixels, not the mean."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ambiseg.masks import at_least_float32
from ambiseg.overlap import full_precision


def pixel_ce(logits: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
    """−log softmax(logits)[label] of every pixel, 0 where it is void, ``[B, H, W]``.

    Args:
        logits: ``[B, C, H, W]``.
        labels: ``[B, H, W]`` int64, below C.
        valid: ``[B, H, W]`` bool; ``None``: all.

    >>> import torch
    >>> pixel_ce(torch.zeros(1, 2, 1, 2), torch.zeros(1, 1, 2, dtype=torch.long), torch.tensor([[[True, False]]]))
    tensor([[[0.6931, 0.0000]]])
    """
    with full_precision(logits):
        cost = F.cross_entropy(at_least_float32(logits), labels, reduction="none")
        return cost if valid is None else cost * valid
