"""The page: one file without scripts and network requests, for light and dark screens, phones and paper."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args

import ambiseg.reporting.curves as curves
import ambiseg.reporting.figures as figures
from ambiseg import config as configuration
from ambiseg._util.text import count
from ambiseg.evaluation.results import Evaluation, Interval, SettingScores
from ambiseg.methods.schedules import Schedule
from ambiseg.metrics import PROTOCOLS
from ambiseg.reporting.figures import THIRD, Figures, Plot
from ambiseg.reporting.gallery import KINDS, MAX_ENTROPY, Gallery
from ambiseg.reporting.panels import save_cases
from ambiseg.runs import Run
from ambiseg.viz import colours, pictures
from ambiseg.viz.page import number, render, safe, share

_ENOUGH = 10  # images that the summary makes a statement about


class Metric(NamedTuple):
    """How a metric is written."""

    label: str
    meaning: str
    better: str
    digits: int | None  # None: as per cent

    def value(self, value: float | None) -> str:
        """One number."""
        return share(value) if self.digits is None else number(value, self.digits)

    def interval(self, score: Interval, missing: str = "") -> str:
        """Its bounds, or ``missing`` where there are none."""
        if score.low is None or score.high is None:
            return missing
        return f"{self.value(score.low)} to {self.value(score.high)}"


METRICS = {
    "ged": Metric("GED", "as published", "less is better", 3),
    "ged_unbiased": Metric("GED, unbiased", "0 for a perfect sampler", "less is better", 3),
    "matched_iou": Metric("matched IoU", "of the best matching", "more is better", 3),
    "diversity": Metric("diversity", "of the masks drawn", "", 3),
    "entropy": Metric("entropy", "mean of the pixels, nats", "", 4),
    "ece": Metric("ECE", "calibration of pixels", "less is better", None),
}


def page(run: Run, evaluation: Evaluation, gallery: Gallery | None, folder: Path | None) -> str:
    """The whole page as HTML; its figures are also saved to ``folder``."""
    headline, history = evaluation.headline(run.config.evaluation.samples), run.history
    stratum = evaluation.strata.name if evaluation.strata else ""
    with figures.drawing():
        plots = _plots(run, evaluation, headline, Figures(folder))
        if gallery is not None:
            save_cases(gallery, stratum, Figures(folder))
    sections = {
        "result": "Result",
        "strata": f"{stratum}s".capitalize() if stratum else "Readers" if headline.buckets else "",
        "modes": "Known modes" if evaluation.modes else "",
        "cases": "Cases" if gallery else "",
        "training": "Training" if history else "",
        "configuration": "Configuration",
    }
    return render(
        "ambiseg.reporting",
        "report.html",
        style=safe((resources.files("ambiseg.reporting") / "style.css").read_text(encoding="utf-8")),
        sections={key: title for key, title in sections.items() if title},
        run=run,
        trained=_day(run.about.get("started")),
        again=_commands(run, evaluation.split),
        settings=configuration.dump(run.config),
        history=history,
        best_epoch=curves.best_epoch(history),
        evaluation=evaluation,
        headline=headline,
        summary=summary(evaluation, headline),
        metrics=METRICS,
        bucket_metrics={k: metric for k, metric in METRICS.items() if any(k in b.metrics for b in headline.buckets)},
        protocol=PROTOCOLS.get(evaluation.protocol),
        stratum=stratum,
        strata_names=[f"{stratum} {k + 1}" for k in range(evaluation.strata.count if evaluation.strata else 0)],
        plots=plots,
        gallery=gallery,
        kinds=KINDS,
        max_entropy=MAX_ENTROPY,
        strata_colours=figures.strata_colours(evaluation.strata.mean if evaluation.strata else []),
        colours=colours,
        pictures=pictures,
    )


def summary(evaluation: Evaluation, headline: SettingScores) -> str:
    """The result in plain words, with its number and interval."""

    def words(name: str) -> str:
        score, metric = headline.metrics[name], METRICS[name]
        interval = metric.interval(score)
        text = "no value" if score.mean is None else metric.value(score.mean)
        return f"{text} (95 % interval {interval})" if interval else text

    text = (
        f"On {count(evaluation.images, 'image')} of {count(evaluation.patients, 'patient')}, "
        f"{count(headline.samples, 'mask')} drawn for each image are at a distance (GED) of {words('ged')} from what "
        f"the readers drew, and overlap with it by an IoU of {words('matched_iou')} when they are matched."
    )
    buckets = evaluation.strata.by_bucket if evaluation.strata else []
    known = [(b.readers, b.empty_mass) for b in buckets if b.empty_mass is not None and b.images >= _ENOUGH]
    if len(known) > 1:
        (few, mass), (many, less) = known[0], known[-1]
        who = "no reader" if few == 0 else count(few, "reader")
        text += f" Where {who} drew something, {100 * mass:.0f} % of the predicted weight is on empty masks; "
        text += f"where {count(many, 'reader')} did, {100 * less:.0f} %."
    return text


def _plots(run: Run, evaluation: Evaluation, headline: SettingScores, made: Figures) -> dict[str, Plot]:
    """The figures that this evaluation and this run have, by what they show; files are named by strata's own name."""
    strata, modes, history = evaluation.strata, evaluation.modes, run.history
    plots = {
        "ged": made.plot("ged", figures.ged_by_samples, evaluation),
        "reliability": made.plot("reliability", figures.reliability, headline),
    }
    name = re.sub(r"\W+", "-", f"{strata.name}s").strip("-") if strata else ""
    if strata:
        plots["strata"] = made.plot(name, figures.strata_weights, strata)
        if sum(b.empty_mass is not None and b.empty_share is not None for b in strata.by_bucket) > 1:
            plots["empty"] = made.plot("empty", figures.empty_masks, strata)
    if modes:
        plots["modes"] = made.plot("modes", figures.mode_shares, modes, size=THIRD)
        if modes.flips:
            plots["flips"] = made.plot("flips", figures.class_flips, modes, size=THIRD)
        if modes.strata_iou and strata:
            plots["mode_strata"] = made.plot(f"mode-{name}", figures.mode_strata, modes, strata.name, size=THIRD)
    settings = type(run.config.model).model_fields
    scheduled = [name for name, field in settings.items() if Schedule in get_args(field.annotation)]
    found = curves.columns(history, scheduled)
    for key, draw, columns, *label in (
        ("loss", curves.curves, found.losses, "loss"),
        ("validation", curves.curves, found.scores, "score"),
        ("schedules", curves.schedules, found.schedules),
    ):
        if columns:
            plots[key] = made.plot(f"training-{key}", draw, history, columns, *label, size=THIRD)
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
