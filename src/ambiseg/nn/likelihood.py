"""How likely a mask is, pixel by pixel. Latent-variable methods need the sum over pixels, not the mean."""

from __future__ import annotations

import math

import torch
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

    >>> pixel_ce(torch.zeros(1, 2, 1, 2), torch.zeros(1, 1, 2, dtype=torch.long), torch.tensor([[[True, False]]]))
    tensor([[[0.6931, 0.0000]]])
    """
    with full_precision(logits):
        cost = F.cross_entropy(at_least_float32(logits), labels, reduction="none")
        return cost if valid is None else cost * valid


def hardest(cost: Tensor, share: float, uniform: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """A mask of the k = ⌊share · B·H·W⌋ pixels of a whole batch, at least one, that cost most, or that are drawn:

        the k highest of  log cost + g,     g = −log(−log u),     u ~ U(0, 1)

    are k draws without replacement with probabilities ∝ cost (Gumbel top-k). Void pixels are not chosen; where there
    are fewer than k others, these are all.

    Args:
        cost: ``[B, H, W]``, not negative.
        share: of the pixels, above 0 and at most 1.
        uniform: u, ``[B, H, W]``; ``None`` takes the pixels that cost most.
        valid: ``[B, H, W]`` bool; ``None``: all.

    Returns:
        ``[B, H, W]`` of 1 and 0, in the type of the cost.

    >>> hardest(torch.tensor([[[0.1, 3.0], [0.2, 5.0]]]), share=0.5)
    tensor([[[0., 1.],
             [0., 1.]]])
    """
    k = max(1, math.floor(share * cost.numel()))
    score = cost.detach().log()  # a cost of 0 comes last
    if uniform is not None:
        score = score - torch.log(1e-20 - torch.log(uniform + 1e-20))
    if valid is not None:
        score = score.masked_fill(~valid, -math.inf)
    chosen = score.flatten().topk(k, sorted=False).indices
    mask = torch.zeros_like(score).flatten().index_fill(0, chosen, 1).view_as(cost)
    return mask if valid is None else mask * valid
