"""Statements about a new patient that hold with a stated probability, whatever the model: split conformal calibration.

A model is calibrated on n patients that it was not trained on. Patients are exchangeable; the images of one, and the
readers of an image, are not independent of each other. A reading is one reader's mask of one image. With v_i the weight
of a reading in its patient (the patient's images alike, the readers of an image by their weights), the threshold of
scores s_i is

    q = inf { s :  Σ_patients 1/(n + 1) Σ_{i of the patient} v_i [s_i ≤ s]  ≥  1 − α }.

Then for a new patient, exchangeable with those n, and one reading drawn from that patient's by the same weights,

    P( s ≤ q ) ≥ 1 − α,

in finite samples and without assumptions about the model (Lee, Barber and Willett, 2023: hierarchical conformal
prediction). The probability is over calibration and new patient together. With one reading per patient it is the usual
conformal quantile. With ``per="patient"`` the score of a patient is the largest of its readings, and the statement is
about all of them at once.

Risks, such as the expected missed fraction, are controlled in the same way (Angelopoulos et al., ICLR 2024): with
losses in [0, 1] that do not grow with the level t, and L_p a patient's mean,

    t = inf { t :  (Σ_p L_p(t) + 1) / (n + 1) ≤ α }      gives      E[ L_new(t) ] ≤ α.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil
from typing import Literal, TypeAlias

import numpy as np
import torch

from ambiseg.masks import MaskDistribution
from ambiseg.overlap import pairwise_iou

Per: TypeAlias = Literal["reading", "patient"]

LEVELS = np.concatenate([[0.0], 1 / (1 + np.exp(-np.linspace(-16, 12, 561))), [1.0]])
"""Levels of the marginal among which risks are controlled: equally spaced log odds, and both ends."""

_ROUNDING = 1e-12  # of sums of weights


# -- thresholds -------------------------------------------------------------------------------------------------------


def fewest_patients(alpha: float) -> int:
    """With fewer patients a threshold is infinite, and what it says is nothing.

    >>> fewest_patients(0.1), fewest_patients(0.05)
    (9, 19)
    """
    return ceil(1 / alpha - 1 - 1e-9)


def conformal_threshold(
    scores: np.ndarray,
    patients: Sequence[Hashable],
    alpha: float,
    weights: np.ndarray | None = None,
    per: Per = "reading",
) -> float:
    """The threshold q that the score of a new reading does not exceed with probability at least 1 − α; see above.

    Args:
        scores: ``[n]``, one per reading.
        patients: whose each is.
        alpha: between 0 and 1.
        weights: ``[n]`` of the readings, which are divided by their sum in each patient; equal when ``None``. A reading
            of weight 0 does not count.
        per: ``"reading"``: one reading drawn from a new patient; ``"patient"``: all readings of the new patient.

    Returns:
        A score, or infinity with fewer patients than :func:`fewest_patients`.

    >>> conformal_threshold(np.arange(9.0), range(9), alpha=0.2)      # the 8th of 9: ⌈(9 + 1) · 0.8⌉
    7.0
    >>> conformal_threshold(np.array([1.0, 5.0, 2.0]), ["ann", "ann", "bob"], alpha=0.5)
    2.0
    >>> conformal_threshold(np.array([1.0, 5.0, 2.0]), ["ann", "ann", "bob"], alpha=0.5, per="patient")
    5.0
    """
    _check_alpha(alpha)
    values, group, share = _readings(np.asarray(scores, np.float64), patients, weights)
    if np.isnan(values).any():
        raise ValueError("scores must be numbers, found nan")
    n = int(group.max(initial=-1)) + 1
    if per == "patient":
        largest = np.full(n, -np.inf)
        np.maximum.at(largest, group, values)
        values, share = largest, np.ones(n)
    elif per != "reading":
        raise ValueError(f"per must be reading or patient, found {per!r}")
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(share[order]) / (n + 1) >= 1 - alpha - _ROUNDING
    return float(values[order[reached.argmax()]]) if reached.any() else np.inf


def controlled_level(
    losses: np.ndarray, patients: Sequence[Hashable], alpha: float, weights: np.ndarray | None = None
) -> int:
    """The number of the first level at which the expected loss of a new patient is at most α; see above.

    Args:
        losses: ``[n, T]`` in [0, 1], one row per image or reading. They do not grow with the level; 0 at the last.
        patients: whose each row is; a patient's loss is the mean of its rows.
        weights: ``[n]`` of the rows, equal when ``None``.

    >>> losses = np.array([[1.0, 0.5, 0.0], [0.2, 0.1, 0.0]])
    >>> controlled_level(np.repeat(losses, 5, 0), range(10), alpha=0.4)      # (3 + 1) / 11 at the second
    1
    """
    _check_alpha(alpha)
    losses = np.asarray(losses, np.float64)
    low, high = losses.min(initial=0.0), losses.max(initial=0.0)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"losses must be in [0, 1], found {low:g} to {high:g}")
    rows, group, share = _readings(losses, patients, weights)
    n = int(group.max(initial=-1)) + 1
    bound = ((rows * share[:, None]).sum(0) + 1) / (n + 1)
    return int((bound <= alpha + _ROUNDING).argmax()) if (bound <= alpha + _ROUNDING).any() else losses.shape[1] - 1


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, found {alpha}")


def _readings(
    values: np.ndarray, patients: Sequence[Hashable], weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Readings that count, the number of the patient of each, and its share of that patient."""
    mass = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    if len(patients) != len(values) or mass.shape != (len(values),):
        raise ValueError(f"expected a patient and a weight for each of {len(values)} readings")
    if not (mass >= 0).all():
        raise ValueError("weights must not be negative")
    counts = mass > 0
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(p, len(numbers)) for p, ok in zip(patients, counts, strict=True) if ok], int)
    values, mass = values[counts], mass[counts]
    return values, group, mass / np.bincount(group, mass)[group] if len(group) else mass


# -- an inner and an outer mask ---------------------------------------------------------------------------------------


def containment_scores(
    marginal: np.ndarray,
    readers: np.ndarray,
    valid: np.ndarray | None = None,
    slack: float = 0.0,
    spacing: Sequence[float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """How far level sets of the marginal have to be moved to hold each reader's mask, and to lie in it.

        outer(t) = {p : m(p) ≥ t}  holds Y up to d          ⇔   −min_{p ∈ Y} max_{|q − p| ≤ d} m(q)  ≤  −t
        inner(t) = {p : m(p) > t}  lies in Y up to d        ⇔   max_{p : distance to Y > d} m(p)  ≤  t

    "Up to d": no pixel of the one is farther than d from the other. d = 0 is inclusion, pixel by pixel.

    Args:
        marginal: ``[*spatial]`` probability of the class.
        readers: ``[M, *spatial]`` bool.
        valid: ``[*spatial]`` bool; other pixels count nowhere.
        slack: d, in units of ``spacing``, or pixels.
        spacing: of the pixels along each axis.

    Returns:
        The left sides for outer and inner, ``[M]`` each: a reading is covered where these are at most −t and t. A mask
        without a pixel is held by every outer mask (−1), and only an empty inner one lies in it.

    >>> marginal, readers = np.array([[0.1, 0.6, 0.9]]), np.array([[[False, True, True]]])
    >>> [scores.tolist() for scores in containment_scores(marginal, readers)]
    [[-0.6], [0.1]]
    >>> [scores.tolist() for scores in containment_scores(marginal, readers, slack=1)]
    [[-0.9], [0.0]]
    """
    if slack < 0:
        raise ValueError(f"slack must be at least 0, found {slack}")
    m = np.clip(np.asarray(marginal, np.float64), 0, 1)
    readers = np.asarray(readers, bool)
    if valid is not None:
        m, readers = np.where(valid, m, 0), readers & valid
    near, far = m, ~readers
    if slack > 0:
        from scipy import ndimage

        steps = np.ones(m.ndim) if spacing is None else np.asarray(spacing, np.float64)
        reach = [int(slack // step) for step in steps]
        offsets = np.meshgrid(
            *(np.arange(-r, r + 1) * step for r, step in zip(reach, steps, strict=True)), indexing="ij"
        )
        ball = sum(offset**2 for offset in offsets) <= slack**2 + 1e-9
        near = ndimage.maximum_filter(m, footprint=ball, mode="constant", cval=0.0)
        distances = [np.asarray(ndimage.distance_transform_edt(~mask, sampling=steps)) for mask in readers]
        empty = ~readers.reshape(len(readers), -1).any(1)  # nothing is near to them
        far = (np.stack(distances) > slack + 1e-9) | empty.reshape(-1, *[1] * m.ndim)
    if valid is not None:
        far = far & valid
    axes = tuple(range(1, m.ndim + 1))
    outer = -np.where(readers, near, 1.0).min(axes)
    return outer, np.where(far, m, 0.0).max(axes)


def missed_fractions(marginal: np.ndarray, readers: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """The part of each reader's mask that {m ≥ t} misses, at every level t, ``[M, T]``; 0 of a mask without a pixel.

    Levels are those of :data:`LEVELS` in descending order: the last, 0, misses nothing.

    >>> missed = missed_fractions(np.array([[0.2, 0.7]]), np.array([[[True, True]]]))
    >>> [float(missed[0, np.searchsorted(-LEVELS[::-1], -t)]) for t in (0.9, 0.5, 0.1)]
    [1.0, 0.5, 0.0]
    """
    inside, total = _counted(marginal, readers, valid)
    held = np.cumsum(inside[:, ::-1], 1)[:, :-1]  # pixels with m ≥ t, from the highest level down
    return np.where(total[:, None] > 0, 1 - held / np.maximum(total, 1)[:, None], 0.0)


def false_fractions(marginal: np.ndarray, readers: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """The part of {m > t} that is not in each reader's mask, at every level t of :data:`LEVELS`, ``[M, T]``; 0 where
    {m > t} is empty. It may grow with t, so that the largest at t or any higher level is given, as a risk that is to be
    controlled must not grow.

    >>> wrong = false_fractions(np.array([[0.2, 0.7]]), np.array([[[False, True]]]))
    >>> [float(wrong[0, np.searchsorted(LEVELS, t)]) for t in (0.1, 0.5, 0.9)]
    [0.5, 0.0, 0.0]
    """
    inside, _ = _counted(marginal, readers, valid, strict=True)
    everywhere, _ = _counted(marginal, np.ones_like(readers[:1]), valid, strict=True)
    marked, shown = (np.cumsum(counts[:, ::-1], 1)[:, ::-1][:, 1:] for counts in (inside, everywhere))
    wrong = np.where(shown > 0, (shown - marked) / np.maximum(shown, 1), 0.0)
    return np.maximum.accumulate(wrong[:, ::-1], 1)[:, ::-1]


def _counted(
    marginal: np.ndarray, readers: np.ndarray, valid: np.ndarray | None, strict: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of each mask between levels, ``[M, T + 1]``, and in all: bin i has LEVELS[i − 1] ≤ m < LEVELS[i], or with
    ``strict`` LEVELS[i − 1] < m ≤ LEVELS[i]."""
    m = np.clip(np.asarray(marginal, np.float64), 0, 1)
    bins = np.searchsorted(LEVELS, m.ravel(), side="left" if strict else "right")
    rows = np.asarray(readers, bool) if valid is None else np.asarray(readers, bool) & valid
    rows = rows.reshape(len(rows), -1)
    counts = np.stack([np.bincount(bins[row], minlength=len(LEVELS) + 1) for row in rows])
    return counts, rows.sum(1)


# -- measurements -----------------------------------------------------------------------------------------------------


def weighted_quantile(values: np.ndarray, weights: np.ndarray, level: float) -> float:
    """The least value that at least ``level`` of the weight does not exceed.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.5, 0.3]), 0.5)
    1.0
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) >= level * weights.sum() - _ROUNDING
    return float(values[order[reached.argmax()]])


def interval_scores(low: np.ndarray, high: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How far a reader's value lies outside of [low, high], negative inside (conformalised quantile regression).

    With the threshold q of these scores, [low − q, high + q] holds a reader's value with probability 1 − α.

    >>> interval_scores(np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([1.25, 4.0])).tolist()
    [-0.25, 2.0]
    """
    return np.maximum(low - values, values - high)


# -- strata -----------------------------------------------------------------------------------------------------------


def nearest_strata(
    masks: MaskDistribution, strata: torch.Tensor, readers: MaskDistribution, classes: Sequence[int]
) -> torch.Tensor:
    """The stratum whose draws are nearest to each reader's mask on average, by 1 − IoU: ``[B, M]``.

    Args:
        masks: N draws per image.
        strata: ``[B, N]`` which stratum each is of. Draws of one stratum count alike.
        readers: M masks per image.
    """
    iou = pairwise_iou(masks, readers, classes)
    one_hot = torch.nn.functional.one_hot(strata.to(iou.device).long()).to(iou)  # [B, N, K]
    count = one_hot.sum(1)
    mean = torch.einsum("bnk,bnm->bkm", one_hot, iou) / count.clamp_min(1)[:, :, None]
    return mean.masked_fill((count == 0)[:, :, None], -1).argmax(1)


def stratum_scores(weights: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """The weight of all strata down to the one given, the heaviest first: ``[K], [M] -> [M]``.

    >>> stratum_scores(np.array([0.2, 0.5, 0.3]), np.array([1, 2, 0])).round(6).tolist()
    [0.5, 0.8, 1.0]
    """
    order = np.argsort(-weights, kind="stable")
    down_to = np.cumsum(weights[order].astype(np.float64))
    return (down_to / down_to[-1])[np.argsort(order, kind="stable")][strata]  # all of them are 1, whatever is rounded


def stratum_set(weights: np.ndarray, threshold: float) -> list[int]:
    """The strata whose score does not exceed the threshold, heaviest first, and always the heaviest.

    >>> stratum_set(np.array([0.2, 0.5, 0.3]), 0.85)
    [1, 2]
    """
    order = np.argsort(-weights, kind="stable")
    scores = stratum_scores(weights, order)
    return [int(k) for k, score in zip(order, scores, strict=True) if score <= threshold or k == order[0]]
