"""How certain the average over images is: bootstrap intervals that draw whole patients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap confidence interval; prints as ``0.1903 [0.1810, 0.2002]``."""

    mean: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def bootstrap(
    values: Tensor | np.ndarray | Sequence[float],
    groups: Iterable[object] | None = None,
    *,
    baseline: Tensor | np.ndarray | Sequence[float] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of the mean over images, resampling whole groups (patients) with replacement.

    Images of one patient are alike, so resampling images would promise too much. nan values are left out. A single
    group says nothing about others: its interval has nan bounds.

    Several trainings of one method (seeds) are resampled as well: each resample draws patients and, independently of
    them, as many seeds as there are. An image counts if it has a value in all of them.

    Args:
        values: one value per image, ``[n]``; or those of S seeds, ``[S, n]``.
        groups: the patient of each image; every image its own when ``None``.
        baseline: another method's values on the same images: the interval is then of the paired difference
            values − baseline, and the methods differ at this level where it excludes 0. Patients are drawn for both
            together, seeds for each alone.

    >>> print(bootstrap([.1, .2, .3, .4], groups=["ann", "ann", "bob", "bob"], resamples=1000))
    0.2500 [0.1500, 0.3500]
    >>> print(bootstrap([[.1, .1], [.3, .3]], resamples=1000))  # two seeds that differ, images that do not
    0.2000 [0.1000, 0.3000]
    """
    x = _numbers(values)
    if x.ndim not in (1, 2) or x.size == 0:
        raise ValueError(f"values must be one number an image, [n] or [seeds, n], found shape {list(x.shape)}")
    x, y = np.atleast_2d(x), None
    images = x.shape[1]
    if baseline is not None:
        y = np.atleast_2d(_numbers(baseline))
        if y.ndim != 2 or y.shape[1] != images or len(y) == 0:
            raise ValueError(f"baseline must hold a value for each of {images} images, found shape {list(y.shape)}")
        if len(x) == len(y) == 1:
            x, y = x - y, None
    names = list(range(images) if groups is None else groups)
    if len(names) != images:
        raise ValueError(f"groups must name the group of each of {images} images, found {len(names)}")
    for i, name in enumerate(names):
        if name is None or name != name:
            raise ValueError(f"groups must name the group of each image, found {name} for image {i}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level must be in (0, 1) and resamples positive, found {level} and {resamples}")
    sides = [x] if y is None else [x, -y]
    scored = ~np.isnan(np.concatenate(sides).sum(0))
    if not scored.any():
        return Interval(np.nan, np.nan, np.nan, level)
    numbers: dict[object, int] = {}
    group = np.array([numbers.setdefault(name, len(numbers)) for name, ok in zip(names, scored, strict=True) if ok])
    sums = [[np.bincount(group, row[scored]) for row in side] for side in sides]
    counts = np.bincount(group)
    mean = float(sum(side[:, scored].mean(0).mean() for side in sides))
    if (size := len(counts)) < 2:
        return Interval(mean, np.nan, np.nan, level)
    patients, seeds = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    means = []
    for start in range(0, resamples, step := max(1, 2**22 // size)):  # a block of draws at a time: bounded memory
        drawn = patients.integers(size, size=(min(step, resamples - start), size))
        total = sum(_over_seeds([row[drawn].sum(1) for row in side], seeds) for side in sums)
        means.append(total / counts[drawn].sum(1))
    means = np.concatenate(means)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high), level)


def _over_seeds(sums: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """The mean over as many seeds as there are, drawn anew in every resample: S times ``[R]`` -> ``[R]``."""
    if len(sums) == 1:
        return sums[0]
    drawn = generator.integers(len(sums), size=(len(sums[0]), len(sums)))
    return np.take_along_axis(np.stack(sums, 1), drawn, 1).mean(1)


def _numbers(values: Tensor | np.ndarray | Sequence[float]) -> np.ndarray:
    return values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
