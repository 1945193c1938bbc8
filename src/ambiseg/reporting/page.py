"""The page: one file without scripts and network requests, for light and dark screens, phones and paper."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import ambiseg.reporting.curves as curves
import ambiseg.reporting.decisions as decisions
import ambiseg.reporting.figures as figures
from ambiseg import config as configuration
from ambiseg._util.text import count
from ambiseg.evaluation.results import Evaluation, SettingScores
from ambiseg.evaluation.selecting import looking_of
from ambiseg.methods import method_named
from ambiseg.methods.schedules import Schedule
from ambiseg.metrics import PROTOCOLS
from ambiseg.reporting.figures import THIRD, Figures, Plot
from ambiseg.reporting.gallery import EXAMPLE, KINDS, MAX_ENTROPY, Gallery, steadiest
from ambiseg.reporting.panels import save_cases
from ambiseg.reporting.terms import METRICS, purpose, standings
from ambiseg.runs import Run
from ambiseg.viz import colours, pictures
from ambiseg.viz.page import render, safe

_ENOUGH = 10  # images that the summary makes a statement about


def page(run: Run, evaluation: Evaluation, gallery: Gallery | None, folder: Path | None) -> str:
    """The whole page as HTML; its figures are also saved to ``folder``."""
    headline, history = evaluation.headline(run.config.evaluation.samples), run.history
    stratum = evaluation.strata.name if evaluation.strata else ""
    words = {"annotator": evaluation.annotator, "unit": evaluation.unit}
    with figures.drawing():
        made = Figures(folder)
        plots = _plots(run, evaluation, headline, made)
        if gallery is not None:
            save_cases(gallery, evaluation, made)
    standing, end = standings(evaluation, headline)
    metrics = {key: metric.worded(**words) for key, metric in METRICS.items()}
    if headline.metrics["ged_unbiased_both"].mean is None:  # evaluations of earlier versions do not have it
        del metrics["ged_unbiased_both"]
    buckets = headline.buckets if len(headline.buckets) > 1 else []
    sections = {
        "cases": "Cases" if gallery else "",
        "result": "Result",
        "strata": f"{stratum}s".capitalize() if stratum else f"{evaluation.annotator}s".capitalize() if buckets else "",
        "decisions": "Decisions" if evaluation.decided else "",
        "modes": "Known modes" if evaluation.modes else "",
        "training": "Training" if history else "",
        "configuration": "Configuration",
    }
    return render(
        "ambiseg.reporting",
        "report.html",
        style=safe((resources.files("ambiseg.reporting") / "style.css").read_text(encoding="utf-8")),
        sections={key: title for key, title in sections.items() if title},
        **words,
        run=run,
        trained=_day(run.about.get("started")),
        warnings=[str(line) for line in run.about.get("warnings") or []],
        again=_commands(run, evaluation.split),
        settings=configuration.dump(run.config),
        history=history,
        best_epoch=curves.best_epoch(history),
        best_by=curves.best_by(history),
        unvalidated=_unvalidated(run),
        changes=(moved := curves.changes(history, _scheduled(run))),
        meanings=_meanings(run, moved),
        evaluation=evaluation,
        headline=headline,
        chosen_by=steadiest(evaluation),
        purpose=purpose(evaluation),
        summary=summary(evaluation, headline),
        standing=standing,
        scale_end=end,
        region=evaluation.region.text if evaluation.region else "region not recorded",
        looking=looking_of(evaluation),
        metrics=metrics,
        buckets=buckets,
        bucket_metrics={k: metric for k, metric in metrics.items() if any(k in b.metrics for b in buckets)},
        protocol=PROTOCOLS.get(evaluation.protocol),
        decisions=decisions.sentence(evaluation),
        rules=decisions.rules(evaluation.annotator),
        measures=decisions.measures(),
        stratum=stratum,
        strata_names=[f"{stratum} {k + 1}" for k in range(evaluation.strata.count if evaluation.strata else 0)],
        plots=plots,
        gallery=gallery,
        kinds={kind: (title, text.format(**words)) for kind, (title, text) in KINDS.items()},
        example_rule=EXAMPLE.format(**words),
        max_entropy=MAX_ENTROPY,
        strata_colours=figures.strata_colours(evaluation.strata.mean if evaluation.strata else []),
        colours=colours,
        pictures=pictures,
    )


def summary(evaluation: Evaluation, headline: SettingScores) -> str:
    """The result in plain words, with its number and interval; or why there is none."""
    who, unit = evaluation.annotator, evaluation.unit
    on = f"On {count(evaluation.images, 'image')}"
    if unit != "image":
        on += f" of {count(evaluation.patients, unit)}"

    def words(name: str) -> str:
        score, metric = headline.metrics[name], METRICS[name]
        interval = metric.interval(score)
        return f"{metric.value(score.mean)} (95 % interval {interval})" if interval else metric.value(score.mean)

    if headline.metrics["ged"].mean is None:
        return f"{on} nothing could be scored: no image has a pixel and a {who} that count."
    text = (
        f"{on}, {count(headline.samples, 'mask')} drawn for each image are at a distance (GED) of {words('ged')} from "
        f"those of the {who}s"
    )
    if headline.metrics["matched_iou"].mean is not None:
        text += f", and overlap with them by an IoU of {words('matched_iou')} when they are matched"
    text += "."
    buckets = evaluation.strata.by_bucket if evaluation.strata else []
    known = [(b.readers, b.empty_mass) for b in buckets if b.empty_mass is not None and b.images >= _ENOUGH]
    if len(known) > 1:
        (few, mass), (many, less) = known[0], known[-1]
        drew = f"no {who}" if few == 0 else count(few, who)
        text += f" Where {drew} drew something, {100 * mass:.0f} % of the predicted weight is on empty masks; "
        text += f"where {count(many, who)} did, {100 * less:.0f} %."
    return text


def _scheduled(run: Run) -> list[str]:
    """Settings of the method that may move in training."""
    fields = type(run.config.model).model_fields
    return [name for name, field in fields.items() if Schedule in get_args(field.annotation)]


def _meanings(run: Run, moved: Sequence[curves.Change]) -> dict[str, dict[str, str]]:
    """What the terms of the loss and the settings that moved are, in the method's own words."""
    fields, logged = type(run.config.model).model_fields, {key for row in run.history for key in row}
    terms = method_named(run.config.model.method).terms
    return {
        "loss": {name: text for name, text in terms.items() if any(key.endswith(name) for key in logged)},
        "schedules": {change.name: fields[change.name].description or "" for change in moved},
        "validation": {},
    }


def _unvalidated(run: Run) -> str:
    """Why no epoch has a validation score; empty where one has."""
    if curves.best_epoch(run.history) is not None:
        return ""
    every, epochs = run.config.trainer.check_every, len(run.history)
    if every > epochs:
        return f"it comes every {every} epochs, and the run has {epochs}"
    return "no validation image has a score"


def _plots(run: Run, evaluation: Evaluation, headline: SettingScores, made: Figures) -> dict[str, Plot]:
    """The figures that this evaluation and this run have, by what they show; files are named by strata's own name.

    What was not measured has no figure.
    """
    strata, modes, history, who = evaluation.strata, evaluation.modes, run.history, evaluation.annotator
    plots = {}
    if evaluation.anchors and headline.metrics["ged"].mean is not None:
        made.file("anchors", figures.anchors, *standings(evaluation, headline))
    if headline.metrics["ged"].mean is not None:
        plots["ged"] = made.plot("ged", figures.ged_by_samples, evaluation)
    if headline.ece.mean is not None:
        plots["reliability"] = made.plot("reliability", figures.reliability, headline, who)
    if looking := looking_of(evaluation):
        plots["looking"] = made.plot("looking", figures.risk_coverage, looking, who)
    name = re.sub(r"\W+", "-", f"{strata.name}s").strip("-") if strata else ""
    if strata:
        plots["strata"] = made.plot(name, figures.strata_weights, strata, who)
        if headline.empty.calibration:
            plots["calibration"] = made.plot("empty-calibration", figures.empty_calibration, headline.empty, who)
        if sum(b.empty_mass is not None and b.empty_share is not None for b in strata.by_bucket) > 1:
            plots["empty"] = made.plot("empty", figures.empty_masks, strata, who)
    if modes:
        plots["modes"] = made.plot("modes", figures.mode_shares, modes, size=THIRD)
        if modes.flips:
            plots["flips"] = made.plot("flips", figures.class_flips, modes, size=THIRD)
        if modes.strata_iou and strata:
            plots["mode_strata"] = made.plot(f"mode-{name}", figures.mode_strata, modes, strata.name, size=THIRD)
    found = curves.columns(history, scheduled := _scheduled(run))
    marks = curves.changes(history, scheduled)
    for key, draw, columns, *more in (
        ("loss", curves.curves, found.losses, "loss", marks),
        ("validation", curves.curves, found.scores, "score", marks),
        ("schedules", curves.schedules, found.schedules),
    ):
        if columns:
            plots[key] = made.plot(f"training-{key}", draw, history, columns, *more, size=THIRD)
    return plots


def _day(started: Any) -> str:
    try:
        day = datetime.fromisoformat(str(started)[:10])
    except ValueError:
        return str(started)
    return f"{day.day} {day:%B %Y}"


def _commands(run: Run, split: str) -> str:
    """What makes the run and this page again; without the path of the program."""
    command = [str(part) for part in run.about.get("command") or []]
    trained = [shlex.join(["ambiseg", *command[1:]])] if command else []
    return "\n".join([*trained, *(f"ambiseg {name} RUN --split {split}" for name in ("evaluate", "report"))])
