"""The page: one file without scripts and network requests, for light and dark screens, phones and paper."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ambiseg import config as configuration
from ambiseg._util.text import count
from ambiseg.evaluation.results import Evaluation, Interval, Modes, SettingScores, Strata
from ambiseg.metrics import PROTOCOLS
from ambiseg.report import curves, figures
from ambiseg.report.cards import MAX_ENTROPY, make_cards, mode_tiles
from ambiseg.report.figures import THIRD, Figures, Plot
from ambiseg.report.gallery import Gallery
from ambiseg.report.panels import save_cases
from ambiseg.runs import Run
from ambiseg.viz.colours import HEAT, class_colours
from ambiseg.viz.page import number, render, safe, share

_ENOUGH = 10  # images that the summary makes a statement about
_MODES = 16  # of a case that are shown beside their strata


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
Section = dict[str, Any]


def page(run: Run, evaluation: Evaluation, gallery: Gallery | None, folder: Path | None) -> str:
    """The whole page as HTML; its figures are also saved to ``folder``."""
    headline = evaluation.headline(run.config.evaluation.samples)
    plots = Figures(folder)
    with figures.drawing():
        sections = {
            "result": _result(evaluation, headline, plots),
            "strata": _strata(evaluation, headline, plots),
            "modes": evaluation.modes and _modes(evaluation, evaluation.modes, gallery, plots),
            "cases": gallery and {"title": "Cases", "kinds": list(make_cards(gallery, evaluation, headline.key))},
            "training": _training(run, plots),
            "configuration": _configuration(run, evaluation),
        }
        if gallery is not None:
            save_cases(gallery, evaluation, headline.key, plots)
    return render(
        "ambiseg.report",
        "report.html",
        name=run.folder.resolve().name,
        title=run.card.title,
        about=f"split {evaluation.split} · method {run.config.model.method} · trained {_day(run)}",
        summary=summary(evaluation, headline),
        style=safe((resources.files("ambiseg.report") / "style.css").read_text(encoding="utf-8")),
        sections={key: section for key, section in sections.items() if section},
        evaluation=evaluation,
        headline=headline,
        metrics=METRICS,
        stratum=evaluation.strata.name if evaluation.strata else "",
        colours=class_colours(evaluation.classes, evaluation.evaluated, evaluation.flipped),
        heat=HEAT,
        max_entropy=MAX_ENTROPY,
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


def _day(run: Run) -> str:
    started = str(run.about.get("started", ""))
    try:
        day = datetime.fromisoformat(started[:10])
    except ValueError:
        return started
    return f"{day.day} {day:%B %Y}"


def _result(evaluation: Evaluation, headline: SettingScores, plots: Figures) -> Section:
    evaluated = ", ".join(evaluation.classes[i] for i in evaluation.evaluated if i < len(evaluation.classes))
    source = f" ({PROTOCOLS[evaluation.protocol].source})" if evaluation.protocol in PROTOCOLS else ""
    diversity = evaluation.annotations["diversity"].mean
    text = "GED against the number of masks drawn. As published, it counts each mask with itself and falls with their "
    text += "number; the unbiased form does not. Bars are 95 % intervals."
    ged = plots.make("ged", "GED by number of samples", text, figures.ged_by_samples, evaluation)
    text = f"Reliability, {headline.form} form with {headline.samples} masks: the share of readers who marked a pixel "
    text += "against the predicted probability; on the dashed line both are the same. Below: share of all pixels."
    curve = headline.reliability
    bins = zip(curve.edges, curve.edges[1:], curve.confidence, curve.accuracy, curve.weight, strict=False)
    return {
        "title": "Result",
        "text": f"Means over {count(evaluation.images, 'image')}, with 95 % intervals that come from resampling "
        f"{count(evaluation.patients, 'patient')}. Protocol {evaluation.protocol}{source}; evaluated: {evaluated}. "
        f"Weights of the {evaluation.which} epoch.",
        "readers_diversity": "" if diversity is None else f"; the readers' own: {diversity:.3f}",
        "plots": [ged, plots.make("reliability", "Reliability diagram", text, figures.reliability, headline)],
        "bins": [(f"{low:.2f} to {high:.2f}", number(p), number(q), share(w)) for low, high, p, q, w in bins],
    }


def _strata(evaluation: Evaluation, headline: SettingScores, plots: Figures) -> Section | None:
    """Scores by how many readers drew something; weights of the strata, for methods that have them."""
    strata = evaluation.strata
    if not headline.buckets and strata is None:
        return None
    shown = [name for name in METRICS if any(name in bucket.metrics for bucket in headline.buckets)]
    section: Section = {
        "title": f"{strata.name}s".capitalize() if strata else "Readers",
        "caption": f"By how many readers drew something; {headline.form} form, {headline.samples} masks",
        "head": ["readers who drew", "images", *(METRICS[name].label for name in shown)],
        "rows": [
            (b.readers, f"{b.images:,}", *(METRICS[name].value(b.metrics[name].mean) for name in shown))
            for b in headline.buckets
        ],
        "plots": [],
        "weights": [],
    }
    return section | _strata_weights(strata, evaluation, headline, plots) if strata else section


def _strata_weights(strata: Strata, evaluation: Evaluation, headline: SettingScores, plots: Figures) -> Section:
    name = strata.name
    text = f"Mean weight of each {name}, in all images and by how many readers drew something. Numbers are per cent."
    title = f"Weights of the {name}s"
    made = [plots.make(_file(f"{name}s"), title, text, figures.strata_weights, strata)]
    if sum(b.empty_mass is not None and b.empty_share is not None for b in strata.by_bucket) > 1:
        text = "Weight that the model puts on empty masks against the share of readers who drew nothing. Larger dots "
        text += "are more images; on the dashed line the model abstains as often as the readers do."
        if headline.empty.correlation is not None:
            text += f" Over images the two have a correlation of {number(headline.empty.correlation, 2)}."
        made.append(plots.make("empty", "Weight on empty masks", text, figures.empty_masks, strata))
    names = [f"{name} {k + 1}" for k in range(strata.count)]
    rows = [("all", evaluation.images, strata.mean, None)]
    rows += [(str(b.readers), b.images, b.mean, b.empty_mass) for b in strata.by_bucket]
    return {
        "plots": made,
        "weights_caption": f"Mean weights of the {name}s",
        "weights_head": ["readers who drew", "images", *names, "on empty masks"],
        "weights": [(who, f"{n:,}", *map(number, mean), number(empty)) for who, n, mean, empty in rows],
    }


def _file(name: str) -> str:
    """A name as a part of file names and ids: ``ensemble members`` -> ``ensemble-members``."""
    return re.sub(r"\W+", "-", name).strip("-")


def _modes(evaluation: Evaluation, modes: Modes, gallery: Gallery | None, plots: Figures) -> Section:
    stratum, text = evaluation.strata.name if evaluation.strata else "", ""
    if modes.found is not None:
        text = f"{modes.found} of {len(modes.names)} modes are drawn more often than any other by some {stratum}."
    if modes.correlation is not None:
        text += f" Weights of the {stratum}s and probabilities of their modes correlate with r = "
        text += (
            f"{number(modes.correlation, 2)}; {100 * modes.distance:.0f} % of the predicted probability is with the "
        )
        text += "wrong modes."
    about = "Share of predictions of each mode (dots) against its probability in the annotations (bars)."
    if modes.flips:
        about += f" One digit per class: {', '.join(flip.name for flip in modes.flips)}; 1 is flipped."
    made = [plots.make("modes", "Probabilities of the modes", about, figures.mode_shares, modes, size=THIRD)]
    if modes.flips:
        about = "How often the pixels of each class are flipped: in the annotations (rings) and predicted (dots)."
        made.append(plots.make("flips", "Class flips", about, figures.class_flips, modes, size=THIRD))
    if modes.strata_iou:
        about = f"Mean IoU of the masks of each {stratum} with each mode: bright cells are modes that it draws."
        if modes.matching:
            about += f" Modes are in descending order of probability, and each {stratum} is in the row of its mode."
        title = f"{stratum}s and modes".capitalize()
        name = _file(f"mode-{stratum}s")
        made.append(plots.make(name, title, about, figures.mode_strata, modes, stratum, size=THIRD))
    return {
        "title": "Known modes",
        "text": text,
        "plots": made,
        "rows": [
            (name, number(p), number(q))
            for name, p, q in zip(modes.names, modes.probability, modes.ratio, strict=False)
        ],
        "flips": [(flip.name, number(flip.truth), number(flip.predicted)) for flip in modes.flips],
        "cases": list(mode_tiles(gallery, evaluation, _MODES)) if gallery else [],
    }


def _training(run: Run, plots: Figures) -> Section | None:
    history = run.history
    if not history:
        return None
    best, found = curves.best_epoch(history), curves.columns(history, vars(run.config.model))
    mark = f" Dashed: epoch {best}, whose weights were kept." if best is not None else ""
    made: list[Plot] = []
    for name, keys, title, text, draw, label in (
        ("loss", found.losses, "Training loss", "The loss in training and its terms.", curves.curves, ["loss"]),
        ("validation", found.scores, "Validation", "Scores on the validation images.", curves.curves, ["score"]),
        ("schedules", found.schedules, "Schedules", "What changed during training.", curves.schedules, []),
    ):
        if keys:
            data = (history, keys, *label)
            made.append(plots.make(f"training-{name}", title, text + mark, draw, *data, size=THIRD))
    steps = f", {int(history[-1]['step']):,} steps." if "step" in history[-1] else "."
    return {"title": "Training", "text": count(len(history), "epoch") + steps, "plots": made}


def _configuration(run: Run, evaluation: Evaluation) -> Section:
    about, split = run.about, run.about.get("split", {})
    command = ["ambiseg", *map(str, about.get("command", [])[1:])]  # without the path of the program
    again = [shlex.join(command)] if about.get("command") else []
    again += [f"ambiseg {name} RUN --split {evaluation.split}" for name in ("evaluate", "report")]
    return {
        "title": "Configuration",
        "facts": {
            "data": run.card.title,
            "classes": ", ".join(run.card.classes),
            "split": f"{split.get('rule', 'unknown')}; fingerprint {split.get('fingerprint', 'unknown')}",
            "seed": about.get("seed", "unknown"),
            "commit": about.get("git") or "not known",
            "started": about.get("started", "unknown"),
        },
        "again": "\n".join(again),
        "settings": configuration.dump(run.config),
        "versions": list(about.get("versions", {}).items()),
    }
