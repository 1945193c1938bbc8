"""Fewer masks that say the same: any distribution of N masks as k weighted ones of least energy distance to it.

    L(w) = 2 Σ_ij u_i w_j d_ij − Σ_il u_i u_l d_il − Σ_jm w_j w_m d_jm,     d = 1 − IoU,

is the GED of the k masks to the N, in the conventions of :func:`ambiseg.metrics.ged`. With G = IoU and Σ w = 1,

    L(w) = wᵀ G w − 2 (G u)ᵀ w + uᵀ G u.

G is positive semi-definite (d is of negative type), so L is never negative and convex in w: its least value over the
simplex is found exactly. For one class that is a property of the Jaccard index: |x ∩ y| is an inner product,
1 / |x ∪ y| = Σ_t |xᶜ ∩ yᶜ|ᵗ / nᵗ⁺¹ has only powers of inner products, and entrywise products of positive semi-definite
matrices are so again (Schur). Means over classes keep it, also those over the classes that either mask has, whose
1 / |classes of x or y| is of the same form.

Which masks are kept is a choice of k among N: the search ends where it finds no exchange of a single mask that improves
it. It looks at the 32 candidates for each place whose lower bounds are least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution, Masks, as_masks, exact
from ambiseg.metrics import PROTOCOLS
from ambiseg.overlap import Absent, check_classes, occurring, pairwise_iou

_RIDGE = 1e-10  # on the diagonal of G: equal masks would make it singular
_GAIN = 1e-9  # improvements below this are rounding
_TRIED = 32  # candidates whose exact weights are computed in one step of the search
_SWEEPS = 10  # over the kept masks, for exchanges
_ROUNDS = 5  # of mean masks


@dataclass(frozen=True, eq=False)
class Compacted:
    """k weighted masks that stand for N.

    Attributes:
        masks: in descending order of weight. Where an image has fewer than k different masks, or where fewer do as
            well, it is padded with masks of weight 0.
        loss: ``[B]`` float64, the GED between the masks and those they stand for; 0: they say the same.
        chosen: ``[B, k]`` which of the N masks each is; −1 for a mean mask, and where there is none.
        nearest: ``[B, N]`` which of the k is nearest to each of the N.
    """

    masks: MaskDistribution
    loss: Tensor
    chosen: Tensor
    nearest: Tensor


def compact(
    masks: Masks,
    k: int,
    *,
    classes: Sequence[int] | None = None,
    protocol: str | None = None,
    means: bool = False,
) -> Compacted:
    """The k weighted masks that are nearest to a distribution, by energy distance.

    Masks are chosen among the N one after the other, each the one that lowers L(w) most, and then exchanged one by one
    as long as that lowers it. Weights are exact at every step: :func:`simplex_weights`.

    Args:
        masks: N weighted masks per image ``[B, N, *spatial]``. Void pixels and masks of weight 0 count nowhere.
        k: at most so many.
        classes, protocol: of the distance, see :func:`ambiseg.metrics.ged`, whose defaults they have. Two masks that
            have none of the classes are at distance 0 in every protocol.
        means: also try, in place of each kept mask, the mean of the masks that are nearest to it: at each pixel the
            class of most weight. A mean is no draw of the model, and takes its place only where that lowers L.

    >>> labels = torch.tensor([[[[1, 1, 0, 0]], [[1, 1, 0, 0]], [[1, 1, 1, 0]], [[0, 0, 0, 0]]]])
    >>> found = compact(labels, 2)
    >>> weights = found.masks.mass.double().round(decimals=3).tolist()
    >>> found.masks.labels[0, :, 0].tolist(), weights, round(found.loss.item(), 4)
    ([[1, 1, 0, 0], [0, 0, 0, 0]], [[0.708, 0.292]], 0.0382)
    >>> compact(labels, 3).loss.item() < 1e-8
    True
    """
    masks = as_masks(masks)
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    if protocol is not None and protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, found {protocol!r}")
    ids = occurring(masks) if classes is None else check_classes(classes)
    absent = PROTOCOLS[next(iter(PROTOCOLS)) if protocol is None else protocol].absent(ids)
    iou = pairwise_iou(masks, masks, ids, absent).nan_to_num(nan=1.0).cpu().numpy()  # nan: both have no class
    mass = exact(masks.mass.detach()).cpu().numpy()
    mass = mass / mass.sum(1, keepdims=True)
    size = min(k, masks.count)
    weights, chosen = np.zeros((len(masks), size)), np.full((len(masks), size), -1)
    labels, loss, nearest = [], [], []
    for b in range(len(masks)):
        medoids = choose(iou[b], mass[b], size)
        mine, least = simplex_weights(iou[b][np.ix_(medoids, medoids)], iou[b][medoids] @ mass[b])
        order = np.argsort(-mine, kind="stable")
        medoids, mine = medoids[order][mine[order] > 0], mine[order][mine[order] > 0]
        found, near = masks.labels[b, torch.from_numpy(medoids).to(masks.device)], iou[b][medoids]
        if means:
            one = masks[b]
            found, medoids, mine, near, least = _with_means(
                one, mass[b], found, medoids, mine, near, least, ids, absent
            )
        labels.append(torch.cat([found, found[:1].expand(size - len(found), *found.shape[1:])]))
        weights[b, : len(mine)] = mine
        loss.append(max(0.0, least + float(mass[b] @ iou[b] @ mass[b])))
        chosen[b, : len(medoids)] = medoids
        nearest.append(near.argmax(0))
    made = MaskDistribution(torch.stack(labels), torch.from_numpy(weights).to(masks.device).float(), masks.valid)
    return Compacted(
        made,
        torch.tensor(loss, dtype=torch.float64),
        torch.from_numpy(chosen),
        torch.from_numpy(np.stack(nearest)),
    )


def simplex_weights(gram: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights of least  f(w) = wᵀ G w − 2 tᵀ w  with w ≥ 0, Σ w = 1, and f there; G positive semi-definite.

    An active-set method: on a set of positive weights the minimum solves a linear system; a weight that would become
    negative leaves the set on the way there, and the one whose growth lowers f most enters it. f falls at every step
    and the sets are finite in number, so it ends at the minimum, where no weight's growth lowers f.

    Args:
        gram: G ``[k, k]``.
        target: t ``[k]``.

    >>> weights, least = simplex_weights(np.eye(2), np.array([0.75, 0.25]))
    >>> weights.round(6).tolist(), round(least, 6)
    ([0.75, 0.25], -0.625)
    """
    k = len(target)
    first = int(np.argmin(np.diag(gram) - 2 * target))
    gram, right = _bordered(gram), np.append(target, 1.0)
    active, weights = np.arange(k) == first, np.zeros(k)
    weights[first] = 1.0
    for _ in range(20 * k + 20):
        best, level = _on_face(gram, right, active)
        while (best[active] < 0).any():
            falling = active & (best < weights)
            step = np.full(k, np.inf)
            step[falling] = weights[falling] / (weights[falling] - best[falling])
            leaves = int(step.argmin())
            weights = np.maximum(weights + min(1.0, step[leaves]) * (best - weights), 0)
            weights[leaves], active[leaves] = 0.0, False
            best, level = _on_face(gram, right, active)
        weights = best
        slope = gram[:k, :k] @ weights - target - level
        slope[active] = 0.0
        enters = int(slope.argmin())
        if slope[enters] > -1e-11:
            break
        active[enters] = True
    weights = weights / weights.sum()
    return weights, float(weights @ gram[:k, :k] @ weights - 2 * target @ weights)


def _on_face(gram: np.ndarray, right: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, float]:
    """The minimum over weights of ``active`` that sum to 1, of either sign, and half of what Σ w = 1 costs there."""
    rows = np.append(np.flatnonzero(active), len(active))
    solved = np.linalg.solve(gram[rows[:, None], rows], right[rows])
    weights = np.zeros(len(active))
    weights[active] = solved[:-1]
    return weights, -float(solved[-1])


def _bordered(gram: np.ndarray) -> np.ndarray:
    """G with its ridge, and a row and a column of ones: the matrix of systems with Σ w = 1."""
    k = len(gram)
    full = np.ones((k + 1, k + 1))
    full[:k, :k], full[k, k] = gram, 0.0
    full[np.arange(k), np.arange(k)] += _RIDGE
    return full


def choose(iou: np.ndarray, mass: np.ndarray, k: int) -> np.ndarray:
    """Which k of N masks to keep: one after the other, then exchanges of one for another as long as L falls.

    Args:
        iou: G ``[N, N]``.
        mass: u ``[N]``, sums to 1. Masks without mass are not chosen, of equal ones one is.

    >>> choose(np.eye(3), np.array([0.5, 0.2, 0.3]), 2).tolist()
    [0, 2]
    """
    rank = np.empty(len(mass), int)
    rank[np.argsort(-mass, kind="stable")] = np.arange(len(mass))
    twins = (iou > 1 - 1e-12) & (rank < rank[:, None])  # of equal masks the one of most weight stays
    some = np.flatnonzero((mass > 0) & ~twins.any(1))
    iou, target = iou[np.ix_(some, some)], (iou @ mass)[some]
    full = _bordered(iou)
    system = full, np.column_stack([np.append(target, 1.0), -full[:, :-1]])
    kept: list[int] = []
    least = np.inf
    while len(kept) < min(k, len(some)):
        found = _best_addition(iou, target, system, kept, np.inf)
        if found is None or (kept and least - found[1] < _GAIN):
            break
        least = found[1]
        kept.append(found[0])
    # The last one is the best beside the others, as is each that was exchanged until another one is.
    place = settled = 0
    for _ in range(_SWEEPS * len(kept) if len(kept) < len(some) else 0):
        if settled >= len(kept) - 1:
            break
        found = _best_addition(iou, target, system, kept[:place] + kept[place + 1 :], least - _GAIN)
        settled += 1
        if found is not None and found[0] != kept[place]:
            kept[place], least, settled = found[0], found[1], 0
        place = (place + 1) % len(kept)
    return some[kept]


def _best_addition(
    iou: np.ndarray, target: np.ndarray, system: tuple[np.ndarray, np.ndarray], kept: list[int], below: float
) -> tuple[int, float] | None:
    """The mask that lowers f most when it joins ``kept``, and f with it; ``None`` where none comes below ``below``.

    Without w ≥ 0 the minimum of every candidate follows from one linear system for all of them: a lower bound. Where it
    breaks w ≥ 0, exact weights are computed, in the order of bounds, until one is not below the best that was found.

    Args:
        system: its matrix and its right sides, of all masks: those of some are their rows and the last one.
    """
    if not kept:
        alone = np.diag(iou) - 2 * target
        best = int(alone.argmin())
        return (best, float(alone[best])) if alone[best] < below else None
    rows = np.array([*kept, len(target)])
    base, across = system[0][rows[:, None], rows], iou[kept]
    solved = np.linalg.solve(base, system[1][rows])
    weights, level, moves, prices = solved[:-1, 0], -solved[-1, 0], solved[:-1, 1:], solved[-1, 1:]
    least = level - target[kept] @ weights  # G w = t + level
    slope = weights @ across - target - level
    curve = system[0].diagonal()[:-1] + (across * moves).sum(0) + prices
    share = -slope / np.maximum(curve, 1e-12) * (curve > 1e-12)
    bounds = least + slope * share
    bounds[kept] = np.inf
    found = None
    for best in np.argsort(bounds, kind="stable")[:_TRIED].tolist():
        if bounds[best] >= below:
            break
        exactly = float(bounds[best])
        inside = share[best] >= 0 and (weights + moves[:, best] * share[best] >= 0).all()
        if not inside:  # the lower bound is not the minimum
            together = [*kept, best]
            exactly = simplex_weights(iou[np.ix_(together, together)], target[together])[1]
        if exactly < below:
            found, below = (best, exactly), exactly
    return found


def _with_means(
    masks: MaskDistribution,
    mass: np.ndarray,
    kept: Tensor,
    chosen: np.ndarray,
    weights: np.ndarray,
    near: np.ndarray,
    least: float,
    ids: list[int],
    absent: Absent,
) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray, float]:
    """Kept masks ``[k, *spatial]`` with means in the places where they lower f, and everything that goes with them."""
    for _ in range(_ROUNDS):
        fresh = _cluster_means(masks, mass, near.argmax(0), len(kept))
        pool = torch.cat([kept, fresh])
        both = MaskDistribution(pool[None], valid=masks.valid)
        among = pairwise_iou(both, both, ids, absent)[0].nan_to_num(nan=1.0).cpu().numpy()
        to_all = pairwise_iou(both, masks, ids, absent)[0].nan_to_num(nan=1.0).cpu().numpy()
        target, places, before = to_all @ mass, np.arange(len(kept)), least
        for place in range(len(kept)):
            tried = np.where(np.arange(len(kept)) == place, place + len(kept), places)
            found, value = simplex_weights(among[np.ix_(tried, tried)], target[tried])
            if value < least - _GAIN:
                places, weights, least = tried, found, value
        if least == before:
            break
        order = np.argsort(-weights, kind="stable")
        order = order[weights[order] > 0]
        chosen = np.where(places < len(chosen), np.append(chosen, np.full(len(chosen), -1))[places], -1)[order]
        kept, near, weights = (
            pool[torch.from_numpy(places[order]).to(pool.device)],
            to_all[places[order]],
            weights[order],
        )
    return kept, chosen, weights, near, least


def _cluster_means(masks: MaskDistribution, mass: np.ndarray, cluster: np.ndarray, count: int) -> Tensor:
    """At each pixel the class of most weight among the masks of a cluster, the lower id on a tie: ``[k, *spatial]``."""
    labels, share = masks.labels[0], torch.from_numpy(mass).to(masks.device)
    made = torch.zeros(count, *masks.spatial, dtype=labels.dtype, device=labels.device)
    for c in range(count):
        mine = torch.from_numpy(np.flatnonzero(cluster == c)).to(labels.device)
        some, most = labels[mine], torch.zeros(masks.spatial, dtype=share.dtype, device=labels.device)
        for label in torch.unique(some).tolist():
            votes = ((some == label) * share[mine].view(-1, *[1] * len(masks.spatial))).sum(0)
            made[c], most = torch.where(votes > most, label, made[c]), torch.maximum(votes, most)
    return made
