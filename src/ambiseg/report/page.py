"""The page: one file without a script and without a request, for light and dark screens, phones and paper."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path

from ambiseg import config as configuration
from ambiseg.metrics import PROTOCOLS
from ambiseg.report import curves, figures
from ambiseg.report import modes as known_modes
from ambiseg.report.cards import galleries
from ambiseg.report.figures import Made, make
from ambiseg.report.gallery import Gallery
from ambiseg.report.panels import save_cases
from ambiseg.report.results import Estimate, Results, Setting
from ambiseg.runs import Run

# Name, unit or explanation, whether less or more is better, digits
METRICS: dict[str, tuple[str, str, str, int]] = {
    "ged": ("GED", "as published", "less is better", 3),
    "ged_unbiased": ("GED, unbiased", "0 for a perfect sampler", "less is better", 3),
    "matched_iou": ("matched IoU", "of the best matching", "more is better", 3),
    "diversity": ("diversity", "of the masks drawn", "", 3),
    "entropy": ("entropy", "mean of the pixels, nats", "", 4),
}
_ENOUGH = 10  # images that a sentence may be about
FORMS = {"standard": "standard: equally likely masks", "compact": "compact: weighted masks of every expert"}


def page(run: Run, results: Results, gallery: Gallery | None, folder: Path | None) -> str:
    """The whole page as HTML; its figures are also saved to ``folder``."""
    headline = results.headline(run.config.evaluation.samples)
    with figures.drawing():
        sections = {
            "result": ("Result", _result(results, headline, folder)),
            "experts": ("Experts" if results.experts else "Readers", _experts(results, headline, folder)),
            "modes": ("Known modes", _modes(results, gallery, folder)),
            "cases": ("Cases", "" if gallery is None else galleries(gallery, results, headline.key)),
            "training": ("Training", _training(run, folder)),
            "configuration": ("Configuration", _configuration(run, results, gallery)),
        }
        if gallery is not None and folder is not None:
            save_cases(gallery, results, folder)
    sections = {key: (title, text) for key, (title, text) in sections.items() if text}
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, (title, _) in sections.items())
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>\n{text}\n</section>\n'
        for key, (title, text) in sections.items()
    )
    name = run.folder.resolve().name
    style = (resources.files("ambiseg.report") / "style.css").read_text(encoding="utf-8")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{escape(name)}: {escape(run.card.title)}</title>'
        f'<style>\n{style}</style></head>\n<body>\n<header>\n<p class="eyebrow">ambiseg report</p>'
        f'<h1>{escape(name)}</h1>\n<p class="soft">{_about(run, results)}</p>\n'
        f'<p class="lead">{escape(summary(results, headline))}</p>\n{_tiles(headline)}\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n{body}</main>\n'
        f"<footer><p>Made by ambiseg. This page needs no network.</p></footer>\n</body></html>\n"
    )


def summary(results: Results, headline: Setting) -> str:
    """The result in plain words, with its number and interval."""
    ged, iou = (headline.metrics.get(name, Estimate()) for name in ("ged", "matched_iou"))
    images, patients = count(results.images, "image"), count(results.patients, "patient")
    text = (
        f"On {images} of {patients}, {count(headline.samples, 'mask')} drawn for each image are at a distance (GED) of "
        f"{_in_words(ged)} from what the readers drew, and overlap with it by an IoU of {_in_words(iou)} when they are "
        "matched."
    )
    buckets = results.experts.by_bucket if results.experts else ()
    buckets = [b for b in buckets if math.isfinite(b.empty_mass) and b.images >= _ENOUGH]
    if len(buckets) > 1:
        few, many = buckets[0], buckets[-1]
        text += (
            f" Where {_who(few.readers)} drew something, {100 * few.empty_mass:.0f} % of the predicted weight is on "
            f"empty masks; where {_who(many.readers)} did, {100 * many.empty_mass:.0f} %."
        )
    return text


def _who(readers: int) -> str:
    return "no reader" if readers == 0 else count(readers, "reader")


def _in_words(value: Estimate) -> str:
    if math.isnan(value.mean):
        return "no value"
    interval = _interval(value, 3)
    return _number(value.mean, 3) + (f" (95 % interval {interval})" if interval else "")


def _about(run: Run, results: Results) -> str:
    started = str(run.about.get("started", ""))
    try:
        day = datetime.fromisoformat(started[:10])
        started = f"{day.day} {day:%B %Y}"
    except ValueError:
        pass  # another program's way of writing a date is better than none
    parts = [run.card.title, f"split {results.split}", f"method {run.config.model.method}", f"trained {started}"]
    return escape(" · ".join(parts))


def _tiles(headline: Setting) -> str:
    tiles = []
    for name in ("ged", "ged_unbiased", "matched_iou"):
        label, _, better, digits = METRICS[name]
        value = headline.metrics.get(name, Estimate())
        tiles.append((label, _number(value.mean, digits), _interval(value, digits) or "no interval", better))
    tiles.append(("ECE", figures.percent(headline.ece.mean), _percents(headline.ece), "less is better"))
    items = "".join(
        f'<div><dt>{label}</dt><dd class="big">{number}</dd><dd class="small">{interval}</dd>'
        f'<dd class="small">{better}</dd></div>'
        for label, number, interval, better in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


# -- result ---------------------------------------------------------------------------------------------------------


def _result(results: Results, headline: Setting, folder: Path | None) -> str:
    settings = [setting for group in results.forms.values() for setting in group]
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(group)}">{escape(FORMS.get(form, form))}</th>'
        for form, group in results.forms.items()
    )
    numbers = "".join(f'<th scope="col">{setting.samples} masks</th>' for setting in settings)
    units = {name: unit for name, (_, unit, _, _) in METRICS.items()}
    if math.isfinite(results.diversity.mean):
        units["diversity"] += f"; the readers' own: {results.diversity.mean:.3f}"
    rows = "".join(
        f'<tr><th scope="row">{label}<small>{units[name]}{f"; {better}" if better else ""}</small></th>'
        + "".join(_cell(setting.metrics.get(name, Estimate()), digits) for setting in settings)
        + "</tr>"
        for name, (label, _, better, digits) in METRICS.items()
    )
    ece = "".join(
        f"<td>{figures.percent(setting.ece.mean)}<small>{_percents(setting.ece)}</small></td>" for setting in settings
    )
    rows += f'<tr><th scope="row">ECE<small>calibration of pixels; less is better</small></th>{ece}</tr>'
    evaluated = ", ".join(results.classes[i] for i in results.evaluated if i < len(results.classes))
    source = f" ({PROTOCOLS[results.protocol].source})" if results.protocol in PROTOCOLS else ""
    told = (
        f"Means over {count(results.images, 'image')}, with 95 % intervals that come from resampling "
        f"{count(results.patients, 'patient')}. Protocol {results.protocol}{source}; evaluated: {evaluated}. "
        f"Weights of the {results.which} epoch."
    )
    table = (
        f'<p class="soft">{escape(told)}</p><div class="wide" tabindex="0" role="region" aria-label="Metrics"><table>'
        f'<caption>Metrics, by form and number of masks</caption><thead><tr><td rowspan="2"></td>{groups}</tr>'
        f"<tr>{numbers}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    text = "GED against the number of masks drawn. As published, it counts each mask with itself and falls with their "
    text += "number; the unbiased form does not. Bars are 95 % intervals."
    plots = [make("ged", "GED by number of samples", text, figures.ged_by_samples(results), folder)]
    more = ""
    if headline.reliability is not None:
        text = (
            f"Reliability, {headline.form} form with {headline.samples} masks: the share of readers who marked a pixel "
        )
        text += "against the predicted probability; on the dashed line both are the same. Below: share of all pixels."
        plots.append(make("reliability", "Reliability diagram", text, figures.reliability(headline), folder))
        curve = headline.reliability
        bins = zip(curve.edges, curve.edges[1:], curve.confidence, curve.accuracy, curve.weight, strict=False)
        cells = [
            (f"{low:.2f} to {high:.2f}", _number(p, 3), _number(q, 3), figures.percent(w))
            for low, high, p, q, w in bins
        ]
        head = ("probability", "mean probability", "share of readers", "pixels")
        more = _folded("Numbers of the reliability diagram", _table("Pixels by predicted probability", head, cells))
    return f"{table}\n{_plots(plots)}\n{more}"


def _cell(value: Estimate, digits: int) -> str:
    interval = _interval(value, digits)
    return f"<td>{_number(value.mean, digits)}{f'<small>{interval}</small>' if interval else ''}</td>"


# -- experts --------------------------------------------------------------------------------------------------------


def _experts(results: Results, headline: Setting, folder: Path | None) -> str:
    buckets = ""
    if headline.buckets:
        shown = [name for name in METRICS if any(name in b.metrics for b in headline.buckets)]
        cells = [
            (
                str(b.readers),
                f"{b.images:,}",
                *(_number(b.metrics.get(n, Estimate()).mean, METRICS[n][3]) for n in shown),
            )
            for b in headline.buckets
        ]
        head = ("readers who drew", "images", *(METRICS[name][0] for name in shown))
        caption = f"By how many readers drew something; {headline.form} form, {headline.samples} masks"
        buckets = _table(caption, head, cells)
    if results.experts is None:
        return buckets  # other methods
    experts = results.experts
    text = "Mean weight of each expert, in all images and by how many readers drew something. Numbers are per cent."
    plots = [make("experts", "Weights of the experts", text, figures.expert_usage(results), folder)]
    if sum(math.isfinite(b.empty_mass + b.empty_share) for b in experts.by_bucket) > 1:
        text = "Weight that the model puts on empty masks against the share of readers who drew nothing. Larger dots "
        text += "are more images; on the dashed line the model abstains as often as the readers do."
        if math.isfinite(headline.correlation):
            text += f" Image by image the two have a correlation of {headline.correlation:.2f}."
        plots.append(make("empty", "Weight on empty masks", text, figures.empty_mass(results), folder))
    head = ("readers who drew", "images", *(f"expert {k + 1}" for k in range(len(experts.mean))), "on empty masks")
    rows = [("all", results.images, experts.mean, math.nan)]
    rows += [(str(b.readers), b.images, b.mean, b.empty_mass) for b in experts.by_bucket]
    cells = [(name, f"{n:,}", *(_number(w, 3) for w in mean), _number(empty, 3)) for name, n, mean, empty in rows]
    numbers = _folded("Numbers of these figures", _table("Mean weights of the experts", head, cells))
    return f"{_plots(plots)}\n{buckets}\n{numbers}"


def _modes(results: Results, gallery: Gallery | None, folder: Path | None) -> str:
    modes = results.modes
    if modes is None:
        return ""
    cells = [
        (name, _number(p, 3), _number(q, 3))
        for name, p, q in zip(modes.names, modes.probability, modes.ratio, strict=False)
    ]
    numbers = _table("Modes", ("mode", "in the annotations", "predicted"), cells)
    flips = [(flip.name, _number(flip.truth, 3), _number(flip.predicted, 3)) for flip in modes.flips]
    numbers += _table("Class flips", ("class", "in the annotations", "predicted"), flips) if flips else ""
    shown = "" if gallery is None else known_modes.pairs(gallery.paired, results)
    plots = _plots(known_modes.figures_of(modes, folder))
    return f"{known_modes.in_words(modes)}{plots}\n{_folded('Numbers of these figures', numbers)}\n{shown}"


# -- training and configuration -------------------------------------------------------------------------------------


def _training(run: Run, folder: Path | None) -> str:
    history = run.history
    if not history:
        return ""
    best, plots = curves.best_epoch(history), []
    mark = f" Dashed: epoch {best}, whose weights were kept." if best is not None else ""
    for name, names, title, text, label in (
        ("loss", curves.LOSSES, "Training loss", "The loss in training and its terms.", "loss"),
        ("validation", curves.SCORES, "Validation", "Scores on the validation images.", "score"),
    ):
        if curves.columns(history, names):
            draw = curves.curves(history, names, label)
            plots.append(make(f"training-{name}", title, text + mark, draw, folder, figures.THIRD))
    if curves.columns(history, curves.SCHEDULES):
        text = "What moved while the model was trained." + mark
        plots.append(make("training-schedules", "Schedules", text, curves.schedules(history), folder, figures.THIRD))
    last = history[-1]
    told = f"{count(len(history), 'epoch')}, {int(last['step']):,} steps." if "step" in last else ""
    return f"<p>{told}</p>{_plots(plots)}"


def _configuration(run: Run, results: Results, gallery: Gallery | None) -> str:
    about, split = run.about, run.about.get("split", {})
    command = [str(part) for part in about.get("command") or []]
    command[:1] = ["ambiseg"] if command else []  # not where this machine keeps it
    attribution = (gallery.attribution if gallery else "") or str(about.get("data", {}).get("attribution", ""))
    facts = {
        "data": run.card.title,
        "attribution": attribution,
        "classes": ", ".join(run.card.classes),
        "split": f"{split.get('rule', 'unknown')}; fingerprint {split.get('fingerprint', 'unknown')}",
        "seed": str(about.get("seed", "unknown")),
        "commit": str(about.get("git") or "not known"),
        "started": str(about.get("started", "unknown")),
    }
    rows = "".join(f"<dt>{key}</dt><dd>{escape(value)}</dd>" for key, value in facts.items() if value)
    versions = [(str(name), str(number)) for name, number in about.get("versions", {}).items()]
    again = "\n".join([shlex.join(command)] * bool(command) + [f"ambiseg evaluate RUN --split {results.split}"])
    again += f"\nambiseg report RUN --split {results.split}"
    return (
        f'<dl class="facts">{rows}</dl>\n<h3>To reproduce it</h3><pre>{escape(again)}</pre>\n'
        + _folded("Every setting", f"<pre>{escape(configuration.dump(run.config))}</pre>")
        + _folded("Versions", _table("Software", ("package", "version"), versions))
    )


# -- pieces ---------------------------------------------------------------------------------------------------------


def count(number: int, what: str) -> str:
    """``1 image``, ``1,024 images``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def _interval(value: Estimate, digits: int) -> str:
    if not math.isfinite(value.low + value.high):
        return ""
    return f"{_number(value.low, digits)} to {_number(value.high, digits)}"


def _percents(value: Estimate) -> str:
    bounds = (figures.percent(value.low), figures.percent(value.high))
    return " to ".join(bounds) if math.isfinite(value.low + value.high) else "no interval"


def _plots(plots: Iterable[Made]) -> str:
    return f'<div class="plots">{"".join(plot.html for plot in plots)}</div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>\n"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )
