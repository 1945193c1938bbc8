"""Plain versions, as one would write them from the definitions: what the library is measured against."""

from __future__ import annotations

import numpy as np
import ot
import torch
import torch.nn.functional as F
from torch import Tensor


def ce_cost(logits: Tensor, annotations: Tensor) -> Tensor:
    """[B, N, C, H, W] against [B, M, H, W]: log-softmax once, then a gather for each annotation."""
    log_probs = logits.log_softmax(2)
    columns = []
    for m in range(annotations.shape[1]):
        target = annotations[:, m, None, None].expand(-1, logits.shape[1], 1, -1, -1)
        columns.append(-log_probs.gather(2, target).mean((2, 3, 4)))
    return torch.stack(columns, 2)


def iou_cost(logits: Tensor, annotations: Tensor) -> Tensor:
    """The broadcast product [B, N, M, C, H, W]."""
    samples = logits.softmax(2)[:, :, None]
    truth = F.one_hot(annotations, logits.shape[2]).movedim(-1, 2)[:, None].to(logits.dtype)
    intersection = (samples * truth).sum((4, 5))
    union = samples.sum((4, 5)) + truth.sum((4, 5)) - intersection
    return 1 - ((intersection + 1) / (union + 1))[..., 1:].mean(3)


def greedy(cost: Tensor, weights: Tensor, capacity: float) -> Tensor:
    """The paper's appendix, image by image, annotation by annotation, sample by sample."""
    plan = torch.zeros_like(cost)
    for b in range(len(cost)):
        for j in cost[b].amin(0).argsort():
            left = weights[b, j].clone()
            for i in cost[b, :, j].argsort():
                plan[b, i, j] = min(left, capacity - plan[b, i].sum())
                left -= plan[b, i, j]
                if left <= 0:
                    break
    return plan


def distances(a: Tensor, b: Tensor, classes: tuple[int, ...]) -> Tensor:
    """1 − IoU of every pair of masks of one image, one pair at a time; both empty: 0."""
    d = torch.zeros(len(a), len(b))
    for i in range(len(a)):
        for j in range(len(b)):
            ious = []
            for c in classes:
                x, y = a[i] == c, b[j] == c
                union = (x | y).sum().item()
                if union or len(classes) == 1:
                    ious.append((x & y).sum().item() / union if union else 1.0)
            d[i, j] = 1 - sum(ious) / len(ious)
    return d


def ged_and_matched_iou(samples: Tensor, annotations: Tensor, classes: tuple[int, ...] = (1,)) -> tuple[float, float]:
    """One image [N, H, W] against [M, H, W]."""
    cross = distances(samples, annotations, classes)
    ged = 2 * cross.mean() - distances(samples, samples, classes).mean()
    ged = ged - distances(annotations, annotations, classes).mean()
    n, m = cross.shape
    matched = 1 - np.asarray(ot.emd2(np.full(n, 1 / n), np.full(m, 1 / m), cross.double().numpy()))
    return ged.item(), matched.item()
