"""The folds of a cross-validation as one evaluation: every image scored by the model that has not seen its patient."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import some
from ambiseg.data.rules import parse_fold
from ambiseg.evaluation.results import Evaluation, Folds
from ambiseg.evaluation.scoring import ScoredCase
from ambiseg.evaluation.summary import summarise
from ambiseg.runs import Run

# Where a run was made and for how long it looked at its data, not what was trained.
_PLACES = ("data.fold", "data.root", "data.workers", "data.cache", "trainer.devices", "trainer.num_nodes")
_PLACES += ("trainer.accelerator", "trainer.strategy", "trainer.threads")


def check_folds(runs: Sequence[Run]) -> Folds:
    """Which folds the runs are; :class:`ConfigError` unless they are different folds of one division of the same data,
    trained by the same method. Other settings may differ, as plans for each fold do, and are listed in ``differing``.
    """
    numbers: dict[int, Run] = {}
    first, count = runs[0], 0
    for run in runs:
        rule = run.split.rule
        if not rule.fold:
            raise ConfigError(f"{run.folder}: expected a fold, trained with --data.fold K/N, found a split {rule}")
        k, n = parse_fold(rule.fold)
        count = count or n
        if n != count:
            raise ConfigError(f"{run.folder}: expected one of {count} folds as {first.folder}, found {rule.fold}")
        if k in numbers:
            raise ConfigError(f"{run.folder}: expected each fold once, found fold {k} in {numbers[k].folder} as well")
        if run.split.fingerprint != first.split.fingerprint or rule.seed != first.split.rule.seed:
            raise ConfigError(f"{run.folder}: expected a fold of the data and the split seed of {first.folder}")
        for key, one, other in (
            ("model.method", run.config.model.method, first.config.model.method),
            ("classes", run.card.classes, first.card.classes),
        ):
            if one != other:
                raise ConfigError(f"{run.folder}: expected {key} {other} as {first.folder}, found {one}")
        numbers[k] = run
    tested: dict[str, Run] = {}
    for run in numbers.values():
        for name in run.split.parts["test"]:
            if name in tested:
                raise ConfigError(f"{run.folder}: case {name!r} is in the test part of {tested[name].folder} as well")
            tested[name] = run
    settings = [flat(run.config.model_dump(mode="json")) for run in runs]
    differing = sorted({key for one in settings for key in one if any(one[key] != it.get(key) for it in settings)})
    return Folds(
        count=count,
        folds=sorted(numbers),
        runs=[str(numbers[k].folder) for k in sorted(numbers)],
        differing=[key for key in differing if key not in _PLACES],
    )


def pool(folds: Folds, scored: Mapping[str, tuple[Sequence[ScoredCase], dict[str, Any]]]) -> Evaluation:
    """One evaluation of all folds, from the scored images of each run and what is to be said of it.

    Strata are left out: the first stratum of one model has nothing to do with the first of another. Settings that not
    all models have, such as a compact form of another number of strata, are left out too.
    """
    parts = [scored[run] for run in folds.runs]
    keys = [key for key in parts[0][0][0].scores.scores if all(key in part[0].scores.scores for part, _ in parts)]
    if not keys:
        raise ConfigError(f"evaluate: expected a form and number of masks that all folds have, found none in {folds}")
    about = dict(parts[0][1])
    about["run"] = some(folds.runs, len(folds.runs))
    digests = "\n".join(each["weights"] for _, each in parts)
    about["weights"] = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
    regions = [each["region"] for _, each in parts if each.get("region") is not None]
    if regions:
        whole = all(region.kind == "whole" for region in regions)
        widest = max(regions, key=lambda region: region.windows)
        about["region"] = widest if whole or all(region == widest for region in regions) else None
    images = [_only(one, keys) for part, _ in parts for one in part]
    return summarise(images, **about, folds=folds)


def _only(one: ScoredCase, keys: Sequence[str]) -> ScoredCase:
    scores = {key: one.scores.scores[key] for key in keys}
    modes = {key: one.modes[key] for key in keys if key in one.modes}
    case = one.scores.model_copy(update={"scores": scores, "strata_weights": None})
    decided = one.decided if one.decided and one.decided.setting in keys else None
    return replace(one, scores=case, curves={key: one.curves[key] for key in keys}, modes=modes, decided=decided)


def flat(settings: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{start}{key}.") if isinstance(value, Mapping) else {f"{start}{key}": value}
    return found
