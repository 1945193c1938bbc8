"""The energy score: how far weighted samples are from annotations, less how far they are from each other.

    L = 2 Σ_i u_i Σ_j v_j d(s_i, y_j) − Σ_kl π_k π_l mean d(s, s′),     s of stratum k, s′ another draw, of stratum l

It is GED without the annotations' own spread, which no prediction changes. Only pairs of different draws count, so that
its expectation is that of infinitely many samples. d is the weighted Jaccard distance of soft masks,

    d(s, t) = 1 − mean_c (Σ_p min(s[c, p], t[c, p]) + 1) / (Σ_p max(s[c, p], t[c, p]) + 1),

which is 0 for equal masks and equals :func:`ambiseg.overlap.iou_cost` against hard ones. It is of negative type, hence
the score is proper: no distribution of masks has a smaller expected score than the one that annotations come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ambiseg.masks import MaskDistribution, Masks, as_masks, at_least_float32, exact
from ambiseg.overlap import full_precision, iou_cost
from ambiseg.regions import Regions


class Energy(NamedTuple):
    """Terms of the score, one value per image ``[B]``:  total = 2 · distance − spread."""

    total: Tensor
    distance: Tensor
    spread: Tensor


def energy_score(
    logits: Tensor,
    annotations: Masks,
    weights: Tensor | None = None,
    *,
    strata: int | None = None,
    probs: bool = False,
    regions: Regions | None = None,
) -> Energy:
    """The energy score of weighted soft samples against annotations, differentiable in both samples and weights.

    Args:
        logits: ``[B, N, C, *spatial]``; probabilities when ``probs`` is set.
        annotations: M masks per image with their weights. Void pixels count nowhere.
        weights: u ``[B, N]``, rows sum to 1; equal when ``None``.
        strata: K. The samples are N / K draws from each of K strata, side by side, whose weights are sums of theirs.
            ``None``: all are independent draws from one distribution. With one draw per stratum a stratum is taken to
            be a single mask.
        regions: :func:`ambiseg.regions.partition` of the annotations, when the caller has it already.

    >>> sure = torch.tensor([[[[[9., -9.]], [[-9., 9.]]], [[[-9., -9.]], [[9., 9.]]]]])     # masks 01 and 11
    >>> readers = torch.tensor([[[[0, 1]], [[1, 1]]]])
    >>> [round(float(x), 2) for x in energy_score(sure, readers, strata=2)]
    [0.17, 0.17, 0.17]
    """
    annotations = as_masks(annotations)
    B, N = logits.shape[:2]
    if weights is None:
        weights = torch.full((B, N), 1 / N, device=logits.device, dtype=at_least_float32(logits).dtype)
    if weights.shape != (B, N):
        raise ValueError(f"weights must be {[B, N]}, one per sample, found {list(weights.shape)}")
    with full_precision(logits):
        soft = at_least_float32(logits)
        soft = soft if probs else soft.softmax(2)
        cost = iou_cost(soft, annotations, probs=True, regions=regions)
        return energy_from_costs(cost, sample_distances(soft, annotations), weights, annotations.mass, strata)


def energy_from_costs(
    cost: Tensor, distances: Tensor, weights: Tensor, annotation_weights: Tensor, strata: int | None = None
) -> Energy:
    """:func:`energy_score` from costs ``[B, N, M]`` and distances of all pairs of samples ``[B, N (N − 1) / 2]``."""
    u, v = weights.to(cost.dtype), annotation_weights.to(cost.dtype)
    distance = (u[:, :, None] * v[:, None] * cost).sum((1, 2))
    spread = (pair_weights(u, strata) * distances).sum(1)
    return Energy(2 * distance - spread, distance, spread)


def pair_weights(weights: Tensor, strata: int | None = None) -> Tensor:
    """How much each pair i < j of samples counts in the spread:  ``[B, N] -> [B, N (N − 1) / 2]``.

    Pairs of different strata count 2 u_i u_j, those of one stratum 2 π_k² / (S (S − 1)). A sample with itself does not
    count. Without strata, 2 u_i u_j is divided by 1 − Σ u², so that the weights sum to 1.

    >>> pair_weights(torch.tensor([[0.25, 0.25, 0.5, 0.]]), strata=2)[0].tolist()     # pairs 01 02 03 12 13 23
    [0.25, 0.25, 0.0, 0.25, 0.0, 0.25]
    """
    N = weights.shape[1]
    K = 1 if strata is None else strata
    if K < 1 or N % K:
        raise ValueError(f"expected the same number of samples in each of {K} strata, found {N} samples")
    S = N // K
    i, j = torch.triu_indices(N, N, 1, device=weights.device)
    pairs = 2 * weights[:, i] * weights[:, j]
    if strata is None:
        rest = 1 - (weights / weights.sum(1, keepdim=True)).square().sum(1, keepdim=True)
        return pairs / rest.clamp_min(torch.finfo(weights.dtype).eps)
    if S == 1:
        return pairs
    within = weights.view(-1, K, S).sum(2).square() * (2 / (S * (S - 1)))
    return torch.where(i // S == j // S, within[:, i // S], pairs)


def sample_distances(soft: Tensor, annotations: MaskDistribution) -> Tensor:
    """:func:`jaccard_distances` of samples ``[B, N, C, *spatial]`` in foreground classes, at valid pixels."""
    valid = None if annotations.valid is None else annotations.valid.flatten(1)
    return jaccard_distances(soft[:, :, 1:].flatten(3).transpose(1, 2), valid)


def jaccard_distances(soft: Tensor, valid: Tensor | None = None) -> Tensor:
    """Weighted Jaccard distances of all pairs i < j of N soft masks, differentiable:

        ``[B, c, N, P] -> [B, N (N − 1) / 2]``

    Args:
        soft: probabilities of c classes, over which distances are averaged.
        valid: ``[B, P]`` bool; other pixels are left out.

    >>> jaccard_distances(torch.tensor([[[[0.5, 1.0], [0.0, 0.75]]]]))        # 1 − (0.75 + 1) / (1.5 + 1)
    tensor([[0.3000]])
    """
    if valid is not None:
        soft = soft * valid[:, None, None]
    return distances_from_sums(soft.sum(3), _Apart.apply(soft))  # type: ignore[arg-type]


def distances_from_sums(area: Tensor, apart: Tensor, smooth: float = 1.0) -> Tensor:
    """:func:`jaccard_distances` from Σ_p s_i ``[B, c, N]`` and Σ_p |s_i − s_j| ``[B, c, N (N − 1) / 2]``:

    Σ_p min(s, t) = (Σ_p s + Σ_p t − Σ_p |s − t|) / 2,     Σ_p max(s, t) = (Σ_p s + Σ_p t + Σ_p |s − t|) / 2.
    """
    i, j = torch.triu_indices(area.shape[2], area.shape[2], 1, device=area.device)
    both = area[..., i] + area[..., j] + 2 * smooth
    return (2 * apart / (both + apart)).mean(1)


class _Apart(torch.autograd.Function):
    """Σ_p |s_i[p] − s_j[p]|:  ``[B, c, N, P] -> [B, c, N (N − 1) / 2]``."""

    @staticmethod
    def forward(ctx: Any, soft: Tensor) -> Tensor:
        ctx.save_for_backward(soft)
        N = soft.shape[2]
        found = exact(soft.new_zeros(*soft.shape[:2], N * (N - 1) // 2))
        for b, k in product(*map(range, soft.shape[:2])):
            add_apart(found[b, k], soft[b, k])
        return found.to(soft.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        (soft,) = ctx.saved_tensors
        grad = torch.empty_like(soft)
        for b, k in product(*map(range, soft.shape[:2])):
            grad[b, k] = apart_gradient(soft[b, k], grads[0][b, k])
        return (grad,)


# -- one class of one image: what the fused pixel head calls tile by tile ---------------------------------------------


def add_apart(total: Tensor, soft: Tensor) -> None:
    """total ``[N (N − 1) / 2]`` += Σ_p |s_i[p] − s_j[p]|  of ``soft [N, T]``."""
    for block in _blocks(soft):
        total += torch.ops.aten._pdist_forward(soft[:, block].contiguous(), 1.0)


def apart_gradient(soft: Tensor, grad: Tensor) -> Tensor:
    """Gradient ``[N, T]`` of Σ_ij grad_ij Σ_p |s_i[p] − s_j[p]|; equal values have none."""
    grad = grad.to(soft.dtype)
    # The last argument, the distances, has no effect on the gradient of this norm.
    parts = [torch.ops.aten._pdist_backward(grad, soft[:, block].contiguous(), 1.0, grad) for block in _blocks(soft)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _blocks(soft: Tensor) -> Iterator[slice]:
    """Pixels at a time: masks stay in the cache of a CPU, pairs of them in a quarter gigabyte elsewhere."""
    N, T = soft.shape
    size = max(64, 2**14 // N) if soft.is_cpu else max(1, 2**26 // (N * N))
    return (slice(start, start + size) for start in range(0, T, size))
