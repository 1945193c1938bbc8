"""Whether the parts of an evaluation fit each other: what a type cannot say about a file that is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeAlias

# Of evaluation/results.py, which imports this.
Evaluation: TypeAlias = Any
SettingScores: TypeAlias = Any
Modes: TypeAlias = Any


def incoherent(evaluation: Evaluation, metrics: tuple[str, ...]) -> str | None:
    """The first part that does not fit the others, in words that name its key; ``None`` if all fit.

    Args:
        metrics: what every image is scored by.
    """
    return next(_problems(evaluation, metrics), None)


def _problems(e: Evaluation, metrics: tuple[str, ...]) -> Iterator[str]:
    keys = [setting.key for setting in e.settings]
    if len(set(keys)) < len(keys):
        yield f"settings: expected each form and number of samples once, found {', '.join(keys)}"
    if len(e.cases) != e.images:
        yield f"cases: expected {e.images} as images says, found {len(e.cases)}"
    for id in e.evaluated:
        if not 0 <= id < len(e.classes):
            yield f"evaluated: expected class ids below {len(e.classes)}, found {id}"
    for setting in e.settings:
        yield from _setting(setting, {*metrics} - {"ece"})
    K = None if e.strata is None else e.strata.count
    for case in e.cases:
        if any(set(case.scores.get(key, ())) != {*metrics} for key in keys):
            missing = next(key for key in keys if set(case.scores.get(key, ())) != {*metrics})
            yield f"expected all scores of {case.name!r} in {missing}, found others"
        if case.strata_weights is not None and len(case.strata_weights) != K:
            yield f"strata_weights of {case.name!r}: expected {K or 0} values, found {len(case.strata_weights)}"
    if e.strata is not None:
        lists = {"mean": e.strata.mean, "low": e.strata.low, "high": e.strata.high}
        lists |= {f"by_bucket.{i}.mean": bucket.mean for i, bucket in enumerate(e.strata.by_bucket)}
        yield from _lengths("strata", lists, e.strata.count)
        if e.strata.setting not in keys:
            yield f"strata.setting: expected one of {', '.join(keys)}, found {e.strata.setting!r}"
    if e.modes is not None:
        yield from _modes(e.modes, keys)
    if e.looking is not None:
        if e.looking.setting not in keys:
            yield f"looking.setting: expected one of {', '.join(keys)}, found {e.looking.setting!r}"
        yield from _lengths("looking", {"values": e.looking.values}, len(e.cases))
        for one in e.looking.selections:
            yield from _lengths(f"looking.{one.loss}", one.curve.__dict__, len(one.curve.coverage))
    if e.decided is not None:
        if e.decided.setting not in keys:
            yield f"decided.setting: expected one of {', '.join(keys)}, found {e.decided.setting!r}"
        for one in e.decided.measures:
            if not 0 <= one.of < len(e.classes):
                yield f"decided.measures: expected class ids below {len(e.classes)}, found {one.of}"
    if e.folds is not None:
        folds = e.folds
        if not folds.folds or len(folds.runs) != len(folds.folds) or not {*folds.folds} <= {*range(1, folds.count + 1)}:
            yield f"folds: expected some of {folds.count} folds and a run for each, found {folds.folds}"


def _setting(setting: SettingScores, names: set[str]) -> Iterator[str]:
    if setting.samples < 1:
        yield f"{setting.key}: expected at least 1 sample, found {setting.samples}"
    if odd := sorted(setting.metrics.keys() ^ names):
        yield f"{setting.key}.metrics: expected all metrics and no others, found {odd[0]!r} otherwise"
    for bucket in setting.buckets:
        if not bucket.metrics.keys() == setting.buckets[0].metrics.keys() <= names:
            yield f"{setting.key}.buckets: expected the same metrics of each, found {', '.join(sorted(bucket.metrics))}"
    bins = setting.reliability
    lists = {"confidence": bins.confidence, "accuracy": bins.accuracy, "weight": bins.weight}
    yield from _lengths(f"{setting.key}.reliability", lists, len(bins.edges) - 1)


def _modes(modes: Modes, keys: list[str]) -> Iterator[str]:
    M, K = len(modes.names), len(modes.weights) or len(modes.strata_iou)
    if modes.setting not in keys:
        yield f"modes.setting: expected one of {', '.join(keys)}, found {modes.setting!r}"
    lists: dict[str, Sized] = {"ratio": modes.ratio, "probability": modes.probability}
    lists |= {f"by_setting.{key}": shares.ratio for key, shares in modes.by_setting.items()}
    lists |= {f"strata_iou.{k}": row for k, row in enumerate(modes.strata_iou)}
    lists |= {f"nearest.{k}": row for k, row in enumerate(modes.nearest)}
    if modes.matching:
        lists["matching"] = modes.matching
    yield from _lengths("modes", lists, M)
    rows = {"strata_iou": modes.strata_iou, "nearest": modes.nearest}
    yield from _lengths("modes", {name: table for name, table in rows.items() if table}, K)
    if any(k is not None and not 0 <= k < K for k in modes.matching):
        yield f"modes.matching: expected strata below {K}, found {modes.matching}"


def _lengths(where: str, lists: Mapping[str, Sized], length: int) -> Iterator[str]:
    for name, values in lists.items():
        if len(values) != length:
            yield f"{where}.{name}: expected {length} values, found {len(values)}"
