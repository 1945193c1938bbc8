"""Soft gradients (the paper's Algorithm 2): experts that say the same share one target."""

from __future__ import annotations

import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution
from ambiseg.overlap import pairwise_iou


@torch.no_grad()
def merge_alike(modes: Tensor, classes: int, threshold: float, valid: Tensor | None = None) -> Tensor:
    """Group the experts of each image whose mean outputs overlap:  IoU(s^k, s^k′) ≥ threshold.

    Merging is transitive: when k is like k′ and k′ like k″, all three are one group, in whatever order they come.

    Args:
        modes: ``[B, K, *spatial]`` the class that each expert's mean output finds most likely.
        classes: C; IoU is averaged over the foreground classes that either expert predicts. Two experts that
            both predict background only are alike.
        threshold: G₀.
        valid: ``[B, *spatial]`` bool; experts are compared where it holds.

    Returns:
        ``[B, K]``: the smallest index among the experts of the same group.

    >>> modes = torch.tensor([[[[1, 1, 1, 1]], [[1, 1, 1, 0]], [[1, 1, 0, 0]], [[0, 0, 0, 0]]]])
    >>> merge_alike(modes, classes=2, threshold=0.6)     # .75 and .67 are alike, and so all three are one group
    tensor([[0, 0, 0, 3]])
    """
    masks = MaskDistribution(modes, valid=valid)
    iou = pairwise_iou(masks, masks, range(1, classes), "skip").nan_to_num(nan=1.0)
    alike = (iou >= threshold).float()
    reach = 1
    while reach < modes.shape[1]:  # each squaring doubles the length of the chains followed
        alike = (alike @ alike).clamp_max(1)
        reach *= 2
    return alike.argmax(2)
