"""``ambiseg calibrate``: thresholds of a run, from readers' masks that it was not trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.progress import progress, reporting
from ambiseg.config import Config
from ambiseg.data.config import NEEDS_ROOT
from ambiseg.decisions.calibration import (
    Calibration,
    Checked,
    ClassThresholds,
    ImageScores,
    Rules,
    Thresholds,
    coverage,
    in_words,
    score_readings,
    thresholds,
)
from ambiseg.methods.base import Stratified, evaluation
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Options
from ambiseg.runs import Run, Which, open_run
from ambiseg.settings import validate


def calibrate(
    run: str | os.PathLike[str] | Run,
    alpha: float = 0.1,
    split: str = "val",
    *,
    check: str | None = None,
    rules: Rules | None = None,
    options: Options | None = None,
    which: Which = "best",
    data: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    quiet: bool = False,
) -> Calibration:
    """Calibrate a run on the readers' masks of a part of its data. The result is not saved: see
    :meth:`~ambiseg.decisions.calibration.Calibration.save`.

    Args:
        run: the folder of a run, or the name of a shipped model.
        alpha: how often a statement may fail.
        split: a part of the run's split that it was not trained on.
        check: another such part; how often the statements hold there is stored in ``checked``.
        rules: what is calibrated; its alpha is the argument of this function.
        options: how masks are drawn: of these, ``per_stratum`` or ``samples``, ``seed`` and ``symmetries`` are stored,
            and new images are judged by masks that are drawn in the same way.
        which: ``best`` or ``last`` weights.
        data: settings of the run's data to change, such as ``root``.
        device: to compute on.
        quiet: no progress.
    """
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha: expected a number between 0 and 1, found {alpha:g}")
    given = Rules() if rules is None else rules
    rules = Rules(alpha, given.readers, given.per, given.slack)
    opened = run if isinstance(run, Run) else open_run(run)
    for part in filter(None, (split, check)):
        if part == "train":
            parts = ", ".join(name for name in opened.split.parts if name != "train") or "none"
            raise ConfigError(f"{opened.folder}: expected a part that was not trained on ({parts}), found train")
    if check == split:
        raise ConfigError(f"{opened.folder}: expected another part to check on than {split}, found the same")
    options = options or Options()
    with reporting("loading the model", quiet):
        predictor = Predictor(opened, options, which, device, calibration=False)
    scored, drawn = score_part(opened, predictor, split, rules, data, quiet)
    try:
        found = thresholds(scored, rules)
    except ConfigError as error:
        raise ConfigError(f"{opened.folder}: part {split}: {error}") from None
    checked = None
    if check is not None:
        others, _ = score_part(opened, predictor, check, rules, data, quiet)
        checked = _checked(check, others, found, rules, opened)
    sides = [image.size for image in scored]
    made = Calibration(
        alpha=alpha,
        weights=opened.digest(which),
        which=which,
        data=opened.card.title,
        part=split,
        patients=len({image.patient for image in scored}),
        images=len(scored),
        readers=rules.readers,
        per=rules.per,
        slack=rules.slack,
        per_stratum=drawn.get("per_stratum"),
        samples=drawn.get("samples"),
        seed=options.seed,
        symmetries=options.symmetries,
        size=(
            (min(h for h, _ in sides), min(w for _, w in sides)),
            (max(h for h, _ in sides), max(w for _, w in sides)),
        ),
        classes=[
            ClassThresholds(
                id=label,
                name=opened.card.classes[label],
                patients=found.patients[label],
                readings=found.readings[label],
                **values,
            )
            for label, values in found.classes.items()
        ],
        stratum=opened.card.stratum,
        strata=found.strata,
        checked=checked,
    )
    return made.model_copy(update={"guarantees": in_words(made)})


def score_part(
    run: Run,
    predictor: Predictor,
    part: str,
    rules: Rules,
    data: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> tuple[list[ImageScores], dict[str, int]]:
    """The scores of every image of a part, one after the other, and the number of masks drawn as keys of
    :class:`~ambiseg.decisions.calibration.Calibration`."""
    module, indices = open_part(run, part, data, quiet)
    found, how = list[ImageScores](), dict[str, int]()
    for index in progress(indices, len(indices), f"scoring {part}", quiet):
        batch = module.batch_of(index)
        with torch.no_grad(), evaluation(predictor.method):
            predictive = predictor.method.predict_whole(batch.images.to(predictor.device))
            draws, noise = predictor.draw(predictive)
        strata = None
        if isinstance(predictive, Stratified) and noise.strata is not None:
            strata = predictive.weights.cpu(), noise.strata.cpu()
        by_strata = strata is not None and predictor.options.samples is None
        count = draws.count // predictive.weights.shape[1] if by_strata else draws.count  # type: ignore[attr-defined]
        how = {"per_stratum" if by_strata else "samples": count}
        scored = score_readings(
            draws.to("cpu"), batch.annotations, batch.patients[0], run.card.evaluated, rules, strata
        )
        found.append(scored)
    return found, how


def open_part(run: Run, part: str, data: Mapping[str, Any] | None, quiet: bool) -> tuple[Any, list[int]]:
    """The run's data as they were split, and the numbers of the cases of a part."""
    require("train")
    from ambiseg.data.module import DataModule

    parts = run.split
    if part not in parts.parts:
        known = ", ".join(parts.parts)
        raise ConfigError(f"{run.folder / 'split.json'}: expected part {part!r}, found {known}")
    changed = {**vars(run.config.data), "intensity": run.card.intensity, **(data or {})}
    config = validate(Config, {**dict(run.config), "data": changed}).data
    if config.name in NEEDS_ROOT and config.root is None:
        raise ConfigError(f"{run.folder}: expected the place of its data ({run.card.title}), found none; give --root")
    with reporting("preparing data", quiet) as report:
        module = DataModule(config, split=parts, progress=report)
        try:
            module.prepare_data()
            module.setup()
            parts.verify(module.cases)
        except DataError as error:
            raise ConfigError(f"{run.folder}: the data must be those that the run began with: {error}") from None
    return module, module.indices(part)


def _checked(part: str, scored: list[ImageScores], found: Thresholds, rules: Rules, run: Run) -> Checked:
    names = {0: run.card.stratum or "stratum"} | dict(enumerate(run.card.classes))
    said: dict[str, dict[str, tuple[float, float | None, float | None]]] = {}
    for statement, by_class in coverage(scored, found, rules).items():
        for label, value in by_class.items():
            name = f"{run.card.stratum}s" if statement == "strata" else names[label]
            low, high = (None, None) if value.low != value.low else (value.low, value.high)
            said.setdefault(statement, {})[name] = (value.mean, low, high)
    return Checked(part=part, patients=len({image.patient for image in scored}), statements=said)
