"""Optimal transport between samples and annotations: couplings, and the relaxed objective that trains MoSE.

The names follow the paper's equation 6: N samples with weights u, M annotations with weights v, costs C[N, M], a plan
P[N, M] that says how much of annotation j is explained by sample i, and the capacity γ of a sample.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from ambiseg.masks import check_weights, exact

Solver: TypeAlias = Literal["greedy", "exact", "released"]
"""How :func:`couple` solves the problem when a capacity below 1 makes it one."""


class NotFiniteError(ValueError):
    """A cost is nan or infinite, as when a network or an image holds such values."""


def couple(cost: Tensor, weights: Tensor, capacity: float = 1.0, solver: Solver = "greedy") -> Tensor:
    """Move each annotation's mass onto samples at least cost:  min_P ⟨P, C⟩  s.t.  Pᵀ1 = v,  P1 ≤ capacity,  P ≥ 0.

    From ``capacity`` 1 on no sample can be full, and every solver takes the closed form "nearest sample" (paper,
    A.1). Below that:

    - ``greedy``: the paper's algorithm. Annotations, those with the nearest sample first, fill samples in the order
      of their cost. Always feasible; nearly always optimal when capacity is loose, seldom when it is tight
      (docs/transport.md says how far off).
    - ``exact``: the network simplex of POT, on the same problem with one more column of cost 0 and mass
      N·capacity − 1 that takes what the samples have left. Runs on the CPU, image by image.
    - ``released``: what the authors' code does: ``greedy`` for equal weights, columns then scaled to v. The same as
      ``greedy`` when the weights are equal; otherwise a sample may exceed its capacity.

    Args:
        cost: ``[B, N, M]``, finite.
        weights: v ``[B, M]``, rows sum to 1; 0 is an absent annotator.
        capacity: γ. At least 1/N, or the samples could not hold the annotations' mass.

    Returns:
        The plan P ``[B, N, M]``, without gradient, in the cost's dtype.

    >>> couple(torch.tensor([[[0., 1.], [1., 0.]]]), torch.tensor([[.3, .7]]))[0].diag()
    tensor([0.3000, 0.7000])
    >>> couple(torch.tensor([[[0., 1.], [2., 9.]]]), torch.tensor([[.5, .5]]), capacity=0.5)[0]
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    _check(cost, weights)
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {', '.join(get_args(Solver))}, found {solver!r}")
    N, M = cost.shape[1:]
    if not capacity * N >= 1 - 1e-6:  # `not ≥` so that nan is refused too
        raise ValueError(f"capacity must be at least 1/N = {1 / N:.4g} for {N} samples, found {capacity}")
    cost, v = cost.detach(), weights.detach()
    if capacity >= 1:
        return _nearest(cost, v)
    if solver == "exact":
        slack = max(0.0, N * capacity - 1)
        open_ended = torch.cat([cost, cost.new_zeros(len(cost), N, 1)], 2)
        rows = torch.full(cost.shape[:2], capacity, dtype=torch.float64)
        columns = torch.cat([v.double().cpu(), torch.full((len(v), 1), slack, dtype=torch.float64)], 1)
        return optimal_plan(open_ended, rows, columns)[..., :M]
    if solver == "released":
        present = (v > 0).to(v.dtype)
        readers = present.sum(1, keepdim=True)
        return _greedy(cost, present / readers, capacity) * (v * readers)[:, None].to(cost.dtype)
    return _greedy(cost, v, capacity)


def _nearest(cost: Tensor, v: Tensor) -> Tensor:
    plan = torch.zeros_like(cost)
    return plan.scatter_(1, cost.argmin(1, keepdim=True), v[:, None].to(cost.dtype))


def _greedy(cost: Tensor, v: Tensor, capacity: float) -> Tensor:
    """One step an annotation, for the whole batch at once: pour its mass over the samples sorted by cost.

    With the samples in that order, the mass that reaches sample i is what the ones before it had no room for, so a
    cumulative sum of the free room replaces the loop over samples.
    """
    dtype, v = cost.dtype, exact(v)
    turn = cost.amin(1).argsort(dim=1, stable=True)  # [B, M] annotations, nearest first
    nearest = cost.argsort(dim=1, stable=True)  # [B, N, M] samples, nearest first, for each annotation
    room = torch.full_like(exact(cost[:, :, 0]), capacity)
    plan = torch.zeros_like(exact(cost))
    for step in range(cost.shape[2]):
        j = turn[:, step : step + 1]  # [B, 1] the annotation whose turn it is in each image
        samples = nearest.gather(2, j[:, None].expand(-1, cost.shape[1], 1)).squeeze(2)
        free = room.gather(1, samples)
        before = free.cumsum(1) - free
        poured = (v.gather(1, j) - before).clamp_min(0).minimum(free)
        room = room.scatter(1, samples, free - poured)
        column = torch.zeros_like(room).scatter(1, samples, poured)
        plan = plan.scatter(2, j[:, None].expand(-1, cost.shape[1], 1), column[..., None])
    return plan.to(dtype)


def optimal_plan(cost: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Exact optimal transport with both marginals:  min_P ⟨P, C⟩  s.t.  P1 = u,  Pᵀ1 = v,  P ≥ 0.

    cost ``[B, N, M]``, u ``[B, N]``, v ``[B, M]`` with equal sums -> P ``[B, N, M]``, by POT's network simplex
    (float64, on the CPU, image by image). Rows and columns without mass are left out, so their costs may be nan.

    >>> optimal_plan(torch.tensor([[[0., 1.], [0., 5.]]]), torch.tensor([[.5, .5]]), torch.tensor([[.5, .5]]))[0]
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    import ot  # two seconds, and only the exact problems need it

    if cost.ndim != 3 or u.shape != cost.shape[:2] or v.shape != (cost.shape[0], cost.shape[2]):
        shapes = ", ".join(str(list(x.shape)) for x in (cost, u, v))
        raise ValueError(f"expected a cost [B, N, M] with marginals [B, N] and [B, M], found {shapes}")
    costs, rows, columns = (x.detach().double().cpu().numpy() for x in (cost, u, v))
    plans = np.zeros(costs.shape)
    for plan, c, a, b in zip(plans, costs, rows, columns, strict=True):
        if not (min(a.min(), b.min()) >= 0 and a.sum() > 0 and abs(a.sum() - b.sum()) <= 1e-3 * a.sum()):
            raise ValueError(
                f"marginals must be non-negative with equal sums, found sums {a.sum():.6g} and {b.sum():.6g}"
            )
        some = np.ix_(a > 0, b > 0)
        if not np.isfinite(c[some]).all():
            raise ValueError("cost must be finite wherever there is mass, found nan or infinity")
        a, b = a[a > 0], b[b > 0]
        # Both sides scaled to exactly the same sum: weights in float32 are 1e-8 apart, which the simplex minds.
        plan[some] = ot.emd(a / a.sum(), b / b.sum(), np.ascontiguousarray(c[some])) * b.sum()
    return torch.from_numpy(plans).to(cost.device, cost.dtype)


class Objective(NamedTuple):
    """Terms of the relaxed objective, one value per image ``[B]``."""

    total: Tensor
    transport: Tensor
    kl: Tensor


def relaxed_objective(
    cost: Tensor,
    plan: Tensor,
    sample_weights: Tensor,
    beta: float = 1.0,
    *,
    groups: Tensor | None = None,
    num_groups: int | None = None,
    scaling: Literal["paper", "released"] = "paper",
) -> Objective:
    """The paper's outer problem (equation 6), for a plan P that is held fixed:

        total = ⟨P, C⟩ + β · KL(o ‖ u),     o = P1,     KL(o ‖ u) = Σ_i o_i log(o_i / u_i).

    The first term trains the samples, the second teaches the gate how much mass each sample received.

    Args:
        cost: C ``[B, N, M]``, differentiable.
        plan: P ``[B, N, M]`` of :func:`couple`; no gradient flows into it.
        sample_weights: u ``[B, N]``, differentiable; π_k / S for S samples of expert k.
        beta: β.
        groups: ``[B, N]`` integer id of the group each sample belongs to. u and o are then summed over groups and
            compared at that level ("soft gradients", Algorithm 2; its means over a group have the same ratios, the
            sums keep both sides distributions).
        num_groups: ids are below this; N by default.
        scaling: ``paper`` is the formula above. ``released`` is the authors' code: the KL averaged over the N
            samples (or ``num_groups`` groups; theirs are as many as experts) instead of summed, so that its effective
            β is β/N, and log(u + 1e-8).

    >>> cost, weights = torch.tensor([[[0., 1.], [1., 0.]]]), torch.tensor([[.3, .7]])
    >>> relaxed_objective(cost, couple(cost, weights), sample_weights=torch.tensor([[.3, .7]])).total
    tensor([0.])
    """
    if cost.ndim != 3 or plan.shape != cost.shape:
        raise ValueError(f"cost and plan must both be [B, N, M], found {list(cost.shape)} and {list(plan.shape)}")
    if sample_weights.shape != cost.shape[:2]:
        raise ValueError(f"sample_weights must be {list(cost.shape[:2])}, found {list(sample_weights.shape)}")
    if scaling not in ("paper", "released"):
        raise ValueError(f"scaling must be paper or released, found {scaling!r}")
    if 0 in cost.shape:
        raise ValueError(f"cost must not be empty, found shape {list(cost.shape)}")
    if sample_weights.is_cpu:
        check_weights(sample_weights, "sample_weights")
    plan = plan.detach()
    u, o = sample_weights, plan.sum(2).to(sample_weights.dtype)
    if groups is not None:
        size = (len(u), u.shape[1] if num_groups is None else num_groups)
        if groups.shape != u.shape or groups.dtype != torch.int64:
            raise ValueError(
                f"groups must be int64 {list(u.shape)}, one id a sample, found {groups.dtype} {list(groups.shape)}"
            )
        if groups.is_cpu and not 0 <= int(groups.min()) <= int(groups.max()) < size[1]:
            raise ValueError(
                f"groups must be ids from 0 to {size[1] - 1}, found {int(groups.min())} to {int(groups.max())}"
            )
        u, o = (x.new_zeros(size).scatter_add(1, groups, x) for x in (u, o))
    transport = (plan * cost).sum((1, 2))
    if scaling == "released":
        kl = (torch.xlogy(o, o) - o * (u + 1e-8).log()).mean(1)
    else:  # the smallest positive number keeps a gate that underflowed to 0 from making the loss infinite
        kl = (torch.xlogy(o, o) - torch.xlogy(o, u.clamp_min(torch.finfo(u.dtype).tiny))).sum(1)
    return Objective(transport + beta * kl, transport, kl)


def _check(cost: Tensor, weights: Tensor) -> None:
    if cost.ndim != 3 or 0 in cost.shape:
        raise ValueError(f"cost must be [B, N, M] with nothing empty, found shape {list(cost.shape)}")
    if not cost.is_floating_point():
        raise ValueError(f"cost must be floating point, found {cost.dtype}")
    if weights.shape != (cost.shape[0], cost.shape[2]):
        expected = [cost.shape[0], cost.shape[2]]
        raise ValueError(f"weights must be [B, M] = {expected} to fit the cost, found {list(weights.shape)}")
    if cost.is_cpu:  # on an accelerator, looking at a value would wait for the device in every training step
        if not cost.isfinite().all():
            b, i, j = (~cost.isfinite()).nonzero()[0].tolist()
            value = float(cost[b, i, j].detach())
            raise NotFiniteError(f"cost must be finite, found {value} for sample {i}, annotation {j} of image {b}")
        check_weights(weights)
