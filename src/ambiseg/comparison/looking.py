"""How well each method says which images a person must look at: AURC, and its difference to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ambiseg.comparison.scores import Entry
from ambiseg.decisions.looking import aurc, aurc_draws
from ambiseg.evaluation.looking import LOSSES, LossKey
from ambiseg.evaluation.results import Evaluation
from ambiseg.evaluation.selecting import looking_of


@dataclass(frozen=True)
class Area:
    """A mean over seeds with its 95 % interval over patients and seeds; ``None`` is what has no value."""

    mean: float
    low: float | None
    high: float | None
    spread: float | None
    count: int


class _Drawn(NamedTuple):
    """AURC of each seed ``[S]``, the same in every resample of patients ``[S, R]``, and the number of images."""

    values: np.ndarray
    draws: np.ndarray
    images: int


def areas(entries: Sequence[Entry], baseline: Entry) -> list[tuple[str, LossKey, Area, Area | None]]:
    """Name, loss, AURC and its difference to the baseline, of every method that has an order and a loss.

    Against ``readers`` the loss of an image is the same for all methods, and only their orders differ. Against ``ged``
    it is the method's own: a smaller AURC is a better order or a better method. Patients are drawn for both together,
    seeds for each alone.
    """
    found: list[tuple[str, LossKey, Area, Area | None]] = []
    patients = {case.name: case.patient for case in baseline.first.cases}
    for loss in LOSSES:
        drawn = {entry.name: _drawn(entry, loss, patients) for entry in entries}
        base = drawn[baseline.name]
        for entry in entries:
            own = drawn[entry.name]
            if own is not None:
                same = entry.name == baseline.name
                found.append((entry.name, loss, _area(own), None if base is None or same else _apart(own, base)))
    return found


def _drawn(entry: Entry, loss: LossKey, patients: dict[str, str]) -> _Drawn | None:
    columns = [_columns(one, loss, patients) for one in entry.evaluations]
    columns = [one for one in columns if one is not None]
    if len(columns) < len(entry.evaluations):
        return None
    groups = list(patients.values())
    values = np.array([aurc(score, losses) for score, losses in columns])
    draws = np.stack([aurc_draws(score, losses, groups)[:, 0] for score, losses in columns])
    images = int((~np.isnan(np.stack(columns).sum((0, 1)))).sum())
    return _Drawn(values, draws, images) if np.isfinite(values).all() else None


def _columns(found: Evaluation, loss: LossKey, patients: dict[str, str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Score and loss of each image, in the order of ``patients``."""
    looking = looking_of(found)
    if looking is None or looking.selection(loss) is None:
        return None
    rows = {}
    for case, score in zip(found.cases, looking.values, strict=True):
        value = case.annotations.get("diversity") if loss == "readers" else case.scores[looking.setting]["ged"]
        rows[case.name] = [np.nan if one is None else one for one in (score, value)]
    score, losses = np.array([rows[name] for name in patients], np.float64).T
    return score, losses


def _area(own: _Drawn) -> Area:
    return _interval(own.values.mean(), _over_seeds(own.draws, 1), _spread(own.values), own)


def _apart(own: _Drawn, base: _Drawn) -> Area:
    """Own − base: patients in the same resamples, seeds each by itself."""
    mine, theirs = _spread(own.values), _spread(base.values)
    spread = None if mine is None or theirs is None else math.hypot(mine, theirs)
    draws = _over_seeds(own.draws, 1) - _over_seeds(base.draws, 2)
    return _interval(own.values.mean() - base.values.mean(), draws, spread, own)


def _interval(mean: float, draws: np.ndarray, spread: float | None, own: _Drawn) -> Area:
    draws = draws[~np.isnan(draws)]
    if len(draws) == 0 or np.ptp(draws) == 0:
        same = float(mean) == 0.0 and len(draws) > 0
        return Area(float(mean), 0.0 if same else None, 0.0 if same else None, spread, own.images)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return Area(float(mean), low, high, spread, own.images)


def _over_seeds(draws: np.ndarray, number: int) -> np.ndarray:
    """The mean over as many seeds as there are, drawn anew in every resample: ``[S, R] -> [R]``."""
    if len(draws) == 1:
        return draws[0]
    drawn = np.random.default_rng([0, number]).integers(len(draws), size=draws.T.shape)
    return np.take_along_axis(draws.T, drawn, 1).mean(1)


def _spread(values: np.ndarray) -> float | None:
    return None if len(values) < 2 else float(values.std(ddof=1))
