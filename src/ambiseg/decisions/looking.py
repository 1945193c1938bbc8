"""When a person must look: how much two draws are expected to disagree, and what ordering images by it is worth.

    score(image) = E[1 − IoU(S, S′)],     S, S′ ~ the predicted masks

Images are left to the model in ascending order of the score, and a person looks at the rest. The risk at a coverage is
the mean loss of the images that are left to the model, such as what the readers of each really disagreed on, and AURC
is the mean risk over all coverages (Geifman et al., ICLR 2019): small where images of large loss come last. In random
order it is the mean loss; the order of the losses themselves, that of an oracle, has the smallest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ambiseg.energy import pair_weights
from ambiseg.intervals import Interval
from ambiseg.masks import MaskDistribution, Masks, as_masks, exact
from ambiseg.overlap import Absent, occurring, pairwise_iou

_RESAMPLES = 2_000
_AT_ONCE = 1 << 21  # numbers of resamples at a time
Values = Tensor | np.ndarray | Sequence[float | None]


# -- scores of images -------------------------------------------------------------------------------------------------


def expected_disagreement(
    masks: Masks, classes: Sequence[int] | None = None, absent: Absent = "agree", strata: int | None = None
) -> Tensor:
    """E[1 − IoU(S, S′)] of two independent draws, ``[B]``:  Σ_{i<j} w_ij (1 − IoU(S_i, S_j)).

    Pairs of a mask with itself are left out, so that the number does not depend on how many masks there are. 0 where
    there is one mask: use :func:`area_disagreement` for methods that predict a single soft mask.

    Args:
        masks: N masks per image, of a prediction or of readers.
        classes: over which IoU is averaged; ``None``: all foreground classes that occur.
        absent: what IoU is where neither mask has a class; see :func:`ambiseg.overlap.pairwise_iou`.
        strata: K, if the masks are N / K draws from each of K strata, side by side; see
            :func:`ambiseg.energy.pair_weights`.

    >>> expected_disagreement(torch.tensor([[[[1, 1]], [[0, 1]]]]))
    tensor([0.5000], dtype=torch.float64)
    """
    masks = as_masks(masks)
    classes = occurring(masks) if classes is None else list(classes)
    apart = 1 - exact(pairwise_iou(masks, masks, classes, absent))
    i, j = torch.triu_indices(masks.count, masks.count, 1, device=masks.device)
    weights = exact(masks.mass)
    pairs = pair_weights(weights / weights.sum(1, keepdim=True), strata)
    return _counted(torch.where(pairs > 0, pairs * apart[:, i, j], 0).sum(1), masks)


def area_disagreement(masks: Masks, classes: Sequence[int] | None = None, smooth: float = 1.0) -> Tensor:
    """1 − E[|S ∩ S′|] / E[|S ∪ S′|] of two independent draws from the marginal p, the mean over classes, ``[B]``:

        1 − (Σ_x p(x)² + smooth) / (Σ_x 2 p(x) − p(x)² + smooth)

    One pixel of smoothing makes an image in which hardly anything is marked one of agreement.

    >>> area_disagreement(torch.tensor([[[[1, 1]], [[0, 1]]]]), smooth=0)         # p = ½, 1
    tensor([0.2857], dtype=torch.float64)
    """
    masks = as_masks(masks)
    classes = occurring(masks) if classes is None else list(classes)
    count = max([*classes, masks.classes - 1]) + 1
    both, either = 0, 0
    for part in masks.bands():
        p = exact(part.marginal_probs(count)[:, classes]).flatten(2)
        both, either = both + p.square().sum(2), either + (2 * p - p.square()).sum(2)
    shared = (torch.as_tensor(both) + smooth) / (torch.as_tensor(either) + smooth)
    return _counted(1 - shared.mean(1), masks)


def _counted(values: Tensor, masks: MaskDistribution) -> Tensor:
    """nan for images without a valid pixel."""
    return values if masks.valid is None else values.masked_fill(~masks.valid.flatten(1).any(1), torch.nan)


# -- what an order is worth -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selective:
    """What it is worth to leave images to a model in ascending order of a score.

    Attributes:
        aurc: area under the risk–coverage curve, with its interval.
        excess: how much more that is than in the order of the losses themselves, with its interval.
        random: AURC in random order, the mean loss.
        oracle: AURC in the order of the losses, the least there is.
        images: how many have a score and a loss.
    """

    aurc: Interval
    excess: Interval
    random: float
    oracle: float
    images: int

    @property
    def gain(self) -> float:
        """What of the way from a random order to the best one is gone, at most 1; nan where both are the same."""
        span = self.random - self.oracle
        return (self.random - self.aurc.mean) / span if span > 0 else np.nan


def risk_coverage(score: Values, loss: Values) -> tuple[np.ndarray, np.ndarray]:
    """Coverages k / n and the mean loss of the k images of the smallest scores, for k = 1 … n.

    Images of equal scores are in any order with the same probability, and risks are expectations over these orders:
    exact, and independent of the order in which images are given. Images without a score or a loss are left out.

    >>> risk_coverage([0.1, 0.5, 0.5], [0.0, 0.2, 0.4])[1].round(3).tolist()
    [0.0, 0.15, 0.2]
    """
    score, loss = _both(score, loss)
    n = len(score)
    if not n:
        return np.zeros(0), np.zeros(0)
    place, counts, sums = _ties(score, loss)
    expected = (sums / counts)[np.sort(place)]  # of each image in the order, that of its group
    steps = np.arange(1, n + 1)
    return steps / n, np.cumsum(expected) / steps


def aurc(score: Values, loss: Values) -> float:
    """The mean of the risks of :func:`risk_coverage`; nan without images.

    >>> round(aurc([1, 2, 3], [0.0, 0.3, 0.6]), 3), round(aurc([1, 1, 1], [0.0, 0.3, 0.6]), 3)
    (0.15, 0.3)
    """
    risks = risk_coverage(score, loss)[1]
    return float(risks.mean()) if len(risks) else np.nan


def aurc_draws(
    score: Values, loss: Values, groups: Sequence[Hashable] | None = None, resamples: int = _RESAMPLES, seed: int = 0
) -> np.ndarray:
    """AURC of bootstrap resamples of whole groups (patients), ``[R, 2]``: in the order of the score, and in the best.

    The same groups, resamples and seed draw the same patients, so that draws of two scores are paired. nan where a
    resample has no image.
    """
    x, y = _numbers(score), _numbers(loss)
    names = list(range(len(x)) if groups is None else groups)
    if len(names) != len(x):
        raise ValueError(f"groups must name the group of each of {len(x)} images, found {len(names)}")
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    there = ~(np.isnan(x) | np.isnan(y))
    x, y, group = x[there], y[there], group[there]
    orders = [_Order(x, y), _Order(y, y)]
    found = [
        np.stack([order.areas(times[:, group]) for order in orders], 1)
        for times in _resampled(len(numbers), resamples, seed, max(1, len(x)))
    ]
    return np.concatenate(found)


def selective(
    score: Values,
    loss: Values,
    groups: Sequence[Hashable] | None = None,
    *,
    level: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Selective:
    """AURC and excess AURC with bootstrap intervals that draw whole patients, beside a random and the best order.

    Args:
        score: one number per image; images of small scores are left to the model first.
        loss: what goes wrong in an image that nobody looks at.
        groups: the patient of each image; every image its own when ``None``.

    >>> found = selective([0.1, 0.2, 0.3, 0.4], [0.0, 0.1, 0.3, 0.2])
    >>> round(found.aurc.mean, 4), round(found.oracle, 4), round(found.random, 4), round(found.gain, 2)
    (0.0833, 0.075, 0.15, 0.89)
    """
    x, y = _both(score, loss)
    if not len(x):
        nothing = Interval(np.nan, np.nan, np.nan, level)
        return Selective(nothing, nothing, np.nan, np.nan, 0)
    value, oracle = aurc(x, y), aurc(y, y)
    draws = aurc_draws(score, loss, groups, resamples, seed)
    single = len(set(range(len(_numbers(score))) if groups is None else groups)) < 2

    def interval(mean: float, values: np.ndarray) -> Interval:
        values = values[~np.isnan(values)]
        if single or not len(values):
            return Interval(mean, np.nan, np.nan, level)
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
        return Interval(mean, low, high, level)

    return Selective(
        interval(value, draws[:, 0]),
        interval(value - oracle, draws[:, 0] - draws[:, 1]),
        float(y.mean()),
        oracle,
        len(y),
    )


class _Order:
    """Images in ascending order of a score, those of equal scores together.

    A group of m images of mean loss l, that come after t images whose losses sum to s, adds

        Σ_{k=t+1}^{t+m} (s + (k − t) l) / k  =  (s − t l) (H(t + m) − H(t)) + m l

    to the sum of all risks, in expectation over the orders within the group; H are the harmonic numbers.
    """

    def __init__(self, score: np.ndarray, loss: np.ndarray) -> None:
        order = np.argsort(score, kind="stable")
        self.order, self.loss = order, loss[order]
        self.starts = np.flatnonzero(np.diff(score[order], prepend=np.nan) != 0)

    def areas(self, times: np.ndarray) -> np.ndarray:
        """AURC where image i is there ``times[:, i]`` times, ``[R, n] -> [R]``."""
        if not len(self.order):
            return np.full(len(times), np.nan)
        times = times[:, self.order]
        count = np.add.reduceat(times, self.starts, axis=1)
        total = np.add.reduceat(times * self.loss, self.starts, axis=1)
        ends, sums = count.cumsum(1), total.cumsum(1)
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, ends[:, -1].max() + 1))])
        before, summed = ends - count, sums - total
        mean = total / np.maximum(count, 1)
        areas = (summed - before * mean) * (harmonic[ends] - harmonic[before]) + total
        with np.errstate(invalid="ignore"):
            return areas.sum(1) / ends[:, -1]


def _resampled(groups: int, resamples: int, seed: int, images: int) -> Iterator[np.ndarray]:
    """How often each group is drawn, ``[r, G]``, some resamples at a time."""
    generator, equal = np.random.default_rng(seed), np.full(max(groups, 1), 1 / max(groups, 1))
    for start in range(0, resamples, step := max(1, _AT_ONCE // images)):
        yield generator.multinomial(groups, equal, size=min(step, resamples - start))


def _ties(score: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The group of equal scores that each image is in, in ascending order; number and sum of losses of each."""
    place = np.unique(score, return_inverse=True)[1]
    return place, np.bincount(place), np.bincount(place, loss)


def _both(score: Values, loss: Values) -> tuple[np.ndarray, np.ndarray]:
    x, y = _numbers(score), _numbers(loss)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"expected a score and a loss per image, found shapes {list(x.shape)} and {list(y.shape)}")
    there = ~(np.isnan(x) | np.isnan(y))
    return x[there], y[there]


def _numbers(values: Values) -> np.ndarray:
    """In double precision; ``None`` is nan."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double().numpy()
    return np.array([np.nan if value is None else value for value in values], np.float64)
