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

    Args:
        values: one value per image.
        groups: the patient of each image; every image its own when ``None``.
        baseline: another method's values on the same images: the interval is then of the paired difference
            values − baseline, and the methods differ at this level where it excludes 0.

    >>> print(bootstrap([.1, .2, .3, .4], groups=["ann", "ann", "bob", "bob"], resamples=1000))
    0.2500 [0.1500, 0.3500]
    """
    x = _numbers(values)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"values must be one number an image, found shape {list(x.shape)}")
    if baseline is not None:
        y = _numbers(baseline)
        if y.shape != x.shape:
            raise ValueError(f"baseline must hold as many values, found {y.size} against {x.size}")
        x = x - y
    names = list(range(x.size) if groups is None else groups)
    if len(names) != x.size:
        raise ValueError(f"groups must name the group of each of {x.size} images, found {len(names)}")
    for i, name in enumerate(names):
        if name is None or name != name:
            raise ValueError(f"groups must name the group of each image, found {name} for image {i}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level must be in (0, 1) and resamples positive, found {level} and {resamples}")
    scored = ~np.isnan(x)
    if not scored.any():
        return Interval(np.nan, np.nan, np.nan, level)
    numbers: dict[object, int] = {}
    group = np.array([numbers.setdefault(name, len(numbers)) for name, ok in zip(names, scored, strict=True) if ok])
    sums, counts = np.bincount(group, x[scored]), np.bincount(group)
    if len(sums) < 2:
        return Interval(float(x[scored].mean()), np.nan, np.nan, level)
    rng, size = np.random.default_rng(seed), len(sums)
    means = []
    for start in range(0, resamples, step := max(1, 2**22 // size)):  # a block of draws at a time: bounded memory
        drawn = rng.integers(size, size=(min(step, resamples - start), size))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    means = np.concatenate(means)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(x[scored].mean()), float(low), float(high), level)


def _numbers(values: Tensor | np.ndarray | Sequence[float]) -> np.ndarray:
    return values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
