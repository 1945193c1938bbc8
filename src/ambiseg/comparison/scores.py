"""Scores of methods on the same images, and differences between them, with intervals over patients and seeds.

An :class:`Entry` is a method: the evaluations of one or several trainings of it, which differ in the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import shape_text
from ambiseg.evaluation.results import METRICS, CaseScores, Evaluation, SettingScores
from ambiseg.intervals import bootstrap
from ambiseg.methods.drawing import FORMS, per_stratum

_TOLERANCE = 1e-5  # of the readers' own diversity, which is the same number wherever it is computed


@dataclass(frozen=True)
class Entry:
    """A method of a comparison.

    Attributes:
        name: what it is called in tables.
        evaluations: one for each seed, at least one, of the same images in any order.
    """

    name: str
    evaluations: tuple[Evaluation, ...]

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ConfigError(f"{self.name}: expected at least one evaluation, found none")
        first, *others = self.evaluations
        for other in others:
            _check(first, other, first.run, other.run)
            if other.symmetries != first.symmetries:
                what = f"symmetries {first.symmetries} as {first.run}, found {other.symmetries}"
                raise ConfigError(f"{other.run}: expected {what}")
        weights = [one.weights for one in self.evaluations if one.weights]
        if len(set(weights)) < len(weights):
            raise ConfigError(f"{self.name}: expected each training once, found the same weights twice")

    @property
    def first(self) -> Evaluation:
        """The evaluation of the first seed; of all seeds where it is about the data."""
        return self.evaluations[0]


@dataclass(frozen=True)
class Aggregate:
    """A mean over images and seeds with its 95 % interval; ``None`` is what has no value.

    Attributes:
        mean, low, high: the mean over images of the mean over seeds. ``low`` and ``high`` are ``None`` for one patient.
        spread: standard deviation over seeds; ``None`` for one seed.
        seeds: number of seeds.
        count: number of images that have a value in every seed.
        masks: number of masks per image, which in compact form may differ from what was asked for.
    """

    mean: float | None
    low: float | None
    high: float | None
    spread: float | None
    seeds: int
    count: int
    masks: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does not hold 0: of a difference, that it is more than chance at this level."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def check_comparable(entries: Sequence[Entry]) -> None:
    """:class:`ConfigError` unless all entries are of the same data, part, protocol, classes, pixels and images.

    Mask files know no more of the data than what readers drew: of these the images and the readers' masks are compared.
    """
    for entry in entries[1:]:
        _check(entries[0].first, entry.first, entries[0].name, entry.name)
    names = [entry.name for entry in entries]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{double}: expected each name once, found it twice; NAME=RUN gives another")


def setting_of(evaluation: Evaluation, form: str, samples: int) -> SettingScores | None:
    """The setting with ``samples`` masks; in compact form, the number nearest to it that the method has.

    Masks of files count as standard.
    """
    if form not in FORMS:
        raise ConfigError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")
    settings = {setting.key: setting for setting in evaluation.settings}
    if form == "standard":
        return settings.get(f"standard-{samples}") or settings.get(f"files-{samples}")
    if evaluation.strata is not None:
        count = evaluation.strata.count
        return settings.get(f"compact-{count * per_stratum(samples, count)}")
    # Pooled folds do not say how many strata there are.
    near = [one for one in evaluation.settings if one.form == "compact" and 2 * abs(one.samples - samples) <= samples]
    return min(near, key=lambda one: abs(one.samples - samples), default=None)


def aggregate(entry: Entry, form: str, samples: int, metric: str) -> Aggregate | None:
    """A metric of an entry; ``None`` where it has no masks of that form and number.

    Each resample of the interval draws whole patients and, of several seeds, as many seeds as there are. The expected
    calibration error is of all pixels together (``SettingScores.ece``), averaged over seeds: its interval is that of
    the evaluation for one seed, and not known for several.

    Args:
        form: ``standard`` or ``compact``.
        samples: number of masks per image.
        metric: one of :data:`~ambiseg.evaluation.results.METRICS`.
    """
    settings = _settings(entry, form, samples, metric)
    if settings is None:
        return None
    about = {"seeds": len(settings), "masks": settings[0].samples}
    if metric == "ece":
        pooled = _pooled(settings)
        low, high = (settings[0].ece.low, settings[0].ece.high) if len(settings) == 1 else (None, None)
        return Aggregate(_mean(pooled), low, high, _spread(pooled), count=len(entry.first.cases), **about)
    names = [case.name for case in entry.first.cases]
    values = _values(entry, settings, metric, names)
    return _aggregate(values, None, [case.patient for case in entry.first.cases], **about)


def difference(
    entry: Entry, baseline: Entry, form: str, samples: int, metric: str, baseline_form: str | None = None
) -> Aggregate | None:
    """Entry − baseline of a metric, image by image; ``None`` where one of them has no masks of that form and number.

    Patients are drawn for both together; seeds for each alone, unless both are the same trainings, whose seeds stay
    paired: the difference of an entry and itself is exactly 0. ``spread`` is the standard deviation of the difference
    of two trainings; ``None`` where one of both has one seed. For the calibration error, which pools pixels, it is the
    difference of the pooled values, without an interval.

    Args:
        form, samples, metric: see :func:`aggregate`.
        baseline_form: form of the baseline's masks; ``None``: the same.
    """
    mine = _settings(entry, form, samples, metric)
    theirs = _settings(baseline, form if baseline_form is None else baseline_form, samples, metric)
    if mine is None or theirs is None:
        return None
    about = {"seeds": len(mine), "masks": mine[0].samples}
    order = _same_trainings(entry, baseline)
    if order is not None:
        theirs = [theirs[i] for i in order]
        baseline = Entry(baseline.name, tuple(baseline.evaluations[i] for i in order))
    if metric == "ece":
        x, y = _pooled(mine), _pooled(theirs)
        if order is not None:
            return Aggregate(_mean(x - y), None, None, _spread(x - y), count=len(entry.first.cases), **about)
        mean = None if np.isnan([x.mean(), y.mean()]).any() else float(x.mean() - y.mean())
        return Aggregate(mean, None, None, _joint_spread(x, y), count=len(entry.first.cases), **about)
    names = [case.name for case in entry.first.cases]
    x, y = _values(entry, mine, metric, names), _values(baseline, theirs, metric, names)
    patients = [case.patient for case in entry.first.cases]
    return _aggregate(x - y, None, patients, **about) if order is not None else _aggregate(x, y, patients, **about)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _settings(entry: Entry, form: str, samples: int, metric: str) -> list[SettingScores] | None:
    if metric not in METRICS:
        raise ConfigError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
    found = [setting_of(one, form, samples) for one in entry.evaluations]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else None


def _values(entry: Entry, settings: Sequence[SettingScores], metric: str, names: Sequence[str]) -> np.ndarray:
    """``[S, n]``, a row for each seed, in the order of ``names``; nan where there is no value."""
    rows = []
    for one, setting in zip(entry.evaluations, settings, strict=True):
        values = {case.name: case.scores[setting.key][metric] for case in one.cases}
        rows.append([math.nan if values[name] is None else values[name] for name in names])
    return np.array(rows, np.float64)


def _aggregate(x: np.ndarray, y: np.ndarray | None, patients: Sequence[str], seeds: int, masks: int) -> Aggregate:
    found = bootstrap(x, patients, baseline=y)
    scored = ~np.isnan(x if y is None else np.concatenate([x, y])).any(0)
    means = [
        side[:, scored].mean(1) if scored.any() else np.full(len(side), np.nan) for side in (x, y) if side is not None
    ]
    spread = _spread(means[0]) if y is None else _joint_spread(*means)
    mean, low, high = (None if math.isnan(value) else value for value in (found.mean, found.low, found.high))
    return Aggregate(mean, low, high, spread, seeds, int(scored.sum()), masks)


def _pooled(settings: Sequence[SettingScores]) -> np.ndarray:
    return np.array([math.nan if one.ece.mean is None else one.ece.mean for one in settings])


def _mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).any() else float(values.mean())


def _spread(values: np.ndarray) -> float | None:
    return None if len(values) < 2 or np.isnan(values).any() else float(values.std(ddof=1))


def _joint_spread(x: np.ndarray, y: np.ndarray) -> float | None:
    one, other = _spread(x), _spread(y)
    return None if one is None or other is None else math.hypot(one, other)


def _same_trainings(entry: Entry, baseline: Entry) -> list[int] | None:
    """For each evaluation of the entry, the place of the same training among those of the baseline."""
    if entry.evaluations == baseline.evaluations:
        return list(range(len(entry.evaluations)))
    mine, theirs = ([one.weights for one in each.evaluations] for each in (entry, baseline))
    if "" in mine or sorted(mine) != sorted(theirs):
        return None
    return [theirs.index(weights) for weights in mine]


# -- what can be compared ---------------------------------------------------------------------------------------------


def _check(one: Evaluation, other: Evaluation, name: str, other_name: str) -> None:
    """:class:`ConfigError` that names both, and what differs."""
    files = "files" in (one.which, other.which)
    for what, expected, found in (
        *(() if files else (("data", one.data, other.data), ("split", one.split, other.split))),
        ("protocol", one.protocol, other.protocol),
        ("classes", ", ".join(one.classes), ", ".join(other.classes)),
        ("evaluated classes", _classes(one), _classes(other)),
        ("scored pixels", *_regions(one, other)),
    ):
        if expected != found:
            raise ConfigError(f"{other_name}: expected {what} {expected} as in {name}, found {found}")
    mine, theirs = ({case.name: case for case in each.cases} for each in (one, other))
    if missing := [case for case in mine if case not in theirs] or [case for case in theirs if case not in mine]:
        lacks, has = (other_name, name) if missing[0] in mine else (name, other_name)
        raise ConfigError(
            f"{lacks}: expected the {len(mine if has == name else theirs)} images of {has}, found no {missing[0]!r}"
        )
    for case in mine.values():
        if difference := _differing(case, theirs[case.name]):
            raise ConfigError(f"{other_name}: {case.name!r}: expected {difference.format(name)}")


def _differing(one: CaseScores, other: CaseScores) -> str:
    for what, expected, found in (
        ("patient", one.patient, other.patient),
        ("readers", one.readers_total, other.readers_total),
        ("readers who drew something", one.readers, other.readers),
    ):
        if expected != found:
            return f"{what} {expected} as in {{}}, found {found}"
    mine, theirs = one.annotations.get("diversity"), other.annotations.get("diversity")
    if (mine is None) != (theirs is None) or (mine is not None and abs(mine - (theirs or 0)) > _TOLERANCE):
        return f"readers' masks of diversity {mine} as in {{}}, found {theirs}"
    return ""


def _classes(evaluation: Evaluation) -> str:
    return ", ".join(evaluation.classes[i] for i in evaluation.evaluated)


def _regions(one: Evaluation, other: Evaluation) -> tuple[str, str]:
    """What is scored of each image, where both say so."""
    if one.region is None or other.region is None:
        return "", ""
    mine, theirs = (
        "of whole images" if region.size is None else f"in the middle {shape_text(region.size)}"
        for region in (one.region, other.region)
    )
    return mine, theirs
