"""The page's figures by matplotlib: for papers as PNG and SVG, for the page as SVG in the page's own colours."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ambiseg._util.files import atomic_write
from ambiseg.evaluation.looking import Looking
from ambiseg.evaluation.results import EmptyMasks, Evaluation, Modes, SettingScores, Strata
from ambiseg.reporting.terms import Standing
from ambiseg.viz.colours import BRIGHT, INK, LINE, OTHERS, PAPER, SERIES, SOFT, VARIABLES
from ambiseg.viz.page import safe, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = SERIES[:2]
HALF, THIRD = (4.5, 3.1), (3.7, 3.0)  # inches of figures, two and three of which are side by side on a wide screen

_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names may hold a $
    "svg.hashsalt": "ambiseg",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
} | {f"{x}tick.{key}": value for x in "xy" for key, value in
     {"color": SOFT, "labelcolor": INK, "major.size": 0, "minor.size": 0}.items()}  # fmt: skip
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with its default settings and the page's style, without a display and without messages on caches."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # a home that cannot be written to is no problem here
    try:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)  # type: ignore[call-overload,arg-type]
            yield
    finally:
        log.setLevel(level)


@dataclass(frozen=True)
class Plot:
    """A figure of the page: the name of its files, and its view box and content as SVG."""

    name: str
    view_box: str
    svg: str


@dataclass(frozen=True)
class Figures:
    """Makes figures for the page; each is also saved to ``folder``, unless it is ``None``."""

    folder: Path | None

    def plot(self, name: str, draw: Callable[..., None], *data: Any, size: tuple[float, float] = HALF) -> Plot:
        """``draw(figure, *data)`` as a part of the page."""
        from matplotlib import rcParams

        figure = self.file(name, draw, *data, size=size)
        content = io.BytesIO()
        rcParams["svg.fonttype"] = "none"  # letters are text in the page, and shapes in a file of its own
        figure.savefig(content, format="svg", transparent=True, metadata=_NO_METADATA)
        rcParams["svg.fonttype"] = "path"
        return Plot(name, *_inline(content.getvalue().decode(), f"figure-{name}"))

    def file(self, name: str, draw: Callable[..., None], *data: Any, size: tuple[float, float] = HALF) -> Figure:
        """The same as files only."""
        from matplotlib.figure import Figure

        figure = Figure(size, layout="constrained")
        draw(figure, *data)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the same positions in every file
        self.save(figure, name)
        return figure

    def save(self, figure: Figure, name: str) -> None:
        """``name.png`` of 300 dpi and ``name.svg``, on white, the same bytes each time."""
        for kind, options in (("png", {"dpi": 300}), ("svg", {"metadata": _NO_METADATA})):
            if self.folder is not None:
                content = io.BytesIO()
                figure.savefig(content, format=kind, facecolor="white", **options)  # type: ignore[arg-type]
                with atomic_write(self.folder / f"{name}.{kind}") as file:
                    file.write(content.getvalue())


def _inline(svg: str, name: str) -> tuple[str, str]:
    """View box and content of a stand-alone SVG: its colours become the page's, its ids start with ``name``."""
    svg = svg[svg.index("<svg") :]
    body = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    found = re.search(r'viewBox="([^"]+)"', svg)
    assert found is not None
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = {one or other for one, other in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', body)}
    body = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", body)
    body = re.sub(r'href="#', f'href="#{name}-', body).replace("url(#", f"url(#{name}-")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    body = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "system-ui, 'DejaVu Sans', sans-serif", body)
    return found[1], safe(re.sub(r"\n\s*", "\n", body).strip())


# -- the result -------------------------------------------------------------------------------------------------------


def anchors(figure: Figure, standings: Sequence[Standing], end: float) -> None:
    """The model's GED on one scale with what it is compared with."""
    axes = figure.add_subplot()
    y = np.arange(len(standings))[::-1]
    for height, row in zip(y, standings, strict=True):
        colour, at = BLUE if row.model else SOFT, row.place * end / 100
        if row.span is not None:
            low, high = row.span
            axes.hlines(height, low * end / 100, high * end / 100, color=colour, linewidth=1.4)
        axes.plot([at], [height], "o", color=colour, markersize=8 if row.model else 5)
        axes.annotate(
            row.value, (at, height), (7, 6), textcoords="offset points", size=8, color=colour,
            weight="bold" if row.model else "normal",
        )  # fmt: skip
    axes.set_yticks(y, [row.title for row in standings])
    axes.set_ylim(-0.6, len(y) - 0.3)
    axes.set_xlim(0, 1.1 * end)
    axes.set_xlabel("GED, smaller is better")


def ged_by_samples(figure: Figure, evaluation: Evaluation) -> None:
    """GED against the number of samples, as published and unbiased, with intervals."""
    axes = figure.add_subplot()
    lines = [(form, metric) for form in evaluation.forms for metric in ("ged", "ged_unbiased")]
    for place, (form, metric) in enumerate(lines):
        settings = evaluation.forms[form]
        shift = 1.045 ** (place - (len(lines) - 1) / 2)  # side by side, so that intervals do not hide each other
        x = np.array([setting.samples for setting in settings]) * shift
        scores = [setting.score(metric) for setting in settings]
        values = np.array([(score.mean, score.low, score.high) for score in scores], float)
        if np.isnan(values[:, 0]).all():
            continue
        colour, published = SERIES[place // 2 % 4], metric == "ged"
        axes.plot(
            x, values[:, 0], color=colour, linestyle="-" if published else (0, (3, 2)), marker="o",
            markerfacecolor=colour if published else PAPER, markeredgecolor=colour,
            label=f"{form}, {'as published' if published else 'unbiased'}", zorder=3,
        )  # fmt: skip
        axes.vlines(x, values[:, 1], values[:, 2], color=colour, linewidth=1.2, zorder=2)
    numbers = sorted({setting.samples for setting in evaluation.settings})
    axes.set_xscale("log")
    ticks = [n for n, after in zip(numbers, [*numbers[1:], math.inf], strict=True) if after / n > 1.1]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xticks([], minor=True)
    if len(numbers) == 1:
        axes.set_xlim(numbers[0] / 2, numbers[0] * 2)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("masks per image")
    axes.set_ylabel("GED, smaller is better")
    figure.legend(loc="outside upper left", ncols=2, handlelength=2.2, columnspacing=1.2)


def reliability(figure: Figure, setting: SettingScores, annotator: str) -> None:
    """How many annotators marked a pixel against the predicted probability, and how many pixels that is about."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    curve = setting.reliability
    confidence, accuracy, weight = (np.array(v, float) for v in (curve.confidence, curve.accuracy, curve.weight))
    left, width = np.array(curve.edges[:-1]), np.diff(curve.edges)
    above.bar(left, accuracy, width, align="edge", color=BLUE, alpha=0.28, linewidth=0)
    _diagonal(above)
    above.vlines(confidence, confidence, accuracy, color=ORANGE, linewidth=2.2)
    above.plot(confidence, accuracy, "o-", color=BLUE)
    above.set_ylim(0, 1.02)
    above.set_xlim(0, 1)
    above.set_ylabel(f"share of {annotator}s")
    above.text(0.03, 0.93, f"ECE {share(setting.ece.mean)}", transform=above.transAxes, va="top")
    below.bar(left, weight, width * 0.92, align="edge", color=OTHERS, linewidth=0)
    if (weight > 0).any():
        least = 10 ** math.floor(math.log10(weight[weight > 0].min()) - 0.3)
        below.set_yscale("log")
        below.set_ylim(least, 1)
        below.set_yticks([1, least])
        below.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        below.set_yticks([], minor=True)
    below.set_ylabel("pixels")
    below.set_xlabel("predicted probability")
    figure.align_ylabels()


def _diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=SOFT, linestyle=(0, (3, 2)), linewidth=1.1)


def risk_coverage(figure: Figure, looking: Looking, annotator: str) -> None:
    """Mean loss of the images that are left to the model, by their share, beside a random and the best order."""
    titles = {"readers": f"what {annotator}s disagree on", "ged": "what masks get wrong (GED)"}
    shown = looking.shown
    parts = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, one in zip(parts, shown, strict=True):
        x = one.curve.coverage
        axes.axhline(one.random, color=SOFT, linestyle=(0, (3, 2)), linewidth=1.1, label="random order")
        axes.plot(x, one.curve.oracle, color=OTHERS, label="best order")
        axes.plot(x, one.curve.risk, color=BLUE, label="the model's order")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, None)
        axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        axes.set_title(titles[one.loss])
    parts[0].set_ylabel("mean loss of these images")
    figure.supxlabel("share of the images left to the model", size=9)
    figure.legend(*parts[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, handlelength=1.6)


# -- strata -----------------------------------------------------------------------------------------------------------


def coloured_strata(mean: Sequence[float | None]) -> list[int]:
    """The strata that have a colour of their own: all of up to eight, else the seven of the largest mean weight.

    >>> coloured_strata([0.5, 0.2, 0.3])
    [0, 1, 2]
    """
    if len(mean) <= len(SERIES):
        return list(range(len(mean)))
    return sorted(sorted(range(len(mean)), key=lambda k: (-(mean[k] or 0), k))[: len(SERIES) - 1])


def strata_colours(mean: Sequence[float | None]) -> list[tuple[str, str]]:
    """Of each stratum, as CSS on the page, and bright for lines over an image."""
    own = coloured_strata(mean)
    ranks = [own.index(k) if k in own else None for k in range(len(mean))]
    return [("var(--others)", "#ffffff") if r is None else (f"var({VARIABLES[SERIES[r]]})", BRIGHT[r]) for r in ranks]


def strata_weights(figure: Figure, strata: Strata, annotator: str) -> None:
    """Stacked bars of the strata's mean weights: over all images, and by how many annotators drew something."""
    axes = figure.add_subplot()
    own = coloured_strata(strata.mean)
    others = [k for k in range(strata.count) if k not in own]
    buckets = strata.by_bucket if len(strata.by_bucket) > 1 else []
    rows = [("all\nimages", strata.mean), *((str(bucket.readers), bucket.mean) for bucket in buckets)]
    x = np.array([0.0, *(i + 1.35 for i in range(len(rows) - 1))])
    bottom = np.zeros(len(rows))
    stack = [(f"{strata.name} {k + 1}", [k], colour) for k, colour in zip(own, SERIES, strict=False)]
    stack += [(f"{len(others)} others", others, OTHERS)] if others else []
    for label, members, colour in stack:
        height = np.array([mean for _, mean in rows], float)[:, members].sum(1)
        axes.bar(x, height, 0.82, bottom=bottom, color=colour, edgecolor=PAPER, linewidth=0.8, label=label)
        for at, low, size in zip(x, bottom, height, strict=True):
            if size >= 0.09:
                axes.text(at, low + size / 2, f"{100 * size:.0f}", color=PAPER, ha="center", va="center", size=8)
        bottom += np.nan_to_num(height)
    axes.set_xticks(x, [name for name, _ in rows])
    axes.set_xlim(-0.7, max(x[-1], 2.5) + 0.7)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(visible=False)
    axes.set_xlabel(f"{annotator}s who drew something" if buckets else "")
    axes.set_ylabel("mean weight")
    columns = min(4, len(stack))
    figure.legend(loc="outside upper left", ncols=columns, handlelength=0.8, handleheight=0.8, columnspacing=1.1)


def empty_calibration(figure: Figure, empty: EmptyMasks, annotator: str) -> None:
    """How often annotators drew nothing where the model predicts an empty mask with some probability."""
    axes = figure.add_subplot()
    _diagonal(axes)
    x, y, images = zip(*((one.predicted, one.readers, one.images) for one in empty.calibration), strict=True)
    axes.plot(x, y, color=BLUE, zorder=2)
    axes.scatter(x, y, [40 + 160 * n / max(images) for n in images], color=BLUE, edgecolor=PAPER, zorder=3)
    _shares(axes)
    axes.set_xlabel("predicted probability of an empty mask")
    axes.set_ylabel(f"{annotator}s who drew nothing")


def _shares(axes: Axes) -> None:
    """Both axes from 0 to 100 %."""
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.1, 1.1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([0, 0.25, 0.5, 0.75, 1])
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def empty_masks(figure: Figure, strata: Strata, annotator: str) -> None:
    """The predicted probability of an empty mask against the share of annotators who drew nothing."""
    axes = figure.add_subplot()
    points = sorted(
        (bucket.empty_share, bucket.empty_mass, bucket.readers, bucket.images)
        for bucket in strata.by_bucket
        if bucket.empty_share is not None and bucket.empty_mass is not None
    )
    _diagonal(axes)
    axes.text(
        0.985, 0.945, f"as often as {annotator}s", color=SOFT, size=8, ha="right", va="top",
        rotation=45, rotation_mode="anchor", transform_rotates_text=True,
    )  # fmt: skip
    if points:
        x, y, _, images = zip(*points, strict=True)
        axes.plot(x, y, color=BLUE, zorder=2)
        axes.scatter(x, y, [40 + 160 * n / max(images) for n in images], color=BLUE, edgecolor=PAPER, zorder=3)
    for at, height, readers, _ in points:
        axes.annotate(
            f"{readers} drew", (at, height), (0, -14 if height < at else 12), textcoords="offset points",
            ha="center", va="center", size=8,
        )  # fmt: skip
    _shares(axes)
    axes.set_xlabel(f"{annotator}s who drew nothing")
    axes.set_ylabel("weight on empty masks")


# -- known modes ------------------------------------------------------------------------------------------------------


def mode_shares(figure: Figure, modes: Modes) -> None:
    """How often each mode is predicted against how likely it is."""
    axes = figure.add_subplot()
    order = _by_probability(modes)
    x = np.arange(len(order))
    truth, found = (np.array(values)[order] for values in (modes.probability, modes.ratio))
    axes.bar(x, truth, 0.8, color=OTHERS, alpha=0.55, linewidth=0, label="in the annotations")
    axes.plot(x, found, "o", color=BLUE, label="predicted")
    axes.vlines(x, np.minimum(truth, found), np.maximum(truth, found), color=BLUE, linewidth=1)
    axes.set_xticks(x, [modes.names[i] for i in order], rotation=90, size=8 if len(order) <= 16 else 6)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0)
    axes.set_ylabel("probability of the mode")
    figure.legend(loc="outside upper left", ncols=2)


def class_flips(figure: Figure, modes: Modes) -> None:
    """How often each class is flipped: in the annotations and in the predictions."""
    axes = figure.add_subplot()
    y = np.arange(len(modes.flips))[::-1]
    truth, found = np.array([(flip.truth, flip.predicted) for flip in modes.flips], float).T
    axes.hlines(y, np.minimum(truth, found), np.maximum(truth, found), color=OTHERS, linewidth=2)
    axes.plot(truth, y, "o", color=PAPER, markeredgecolor=SOFT, markersize=8, label="in the annotations")
    axes.plot(found, y, "o", color=ORANGE, label="predicted")
    axes.set_yticks(y, [flip.name for flip in modes.flips])
    axes.set_ylim(-0.6, len(y) - 0.4)
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of pixels that are flipped")
    figure.legend(loc="outside upper left", ncols=2)


def mode_strata(figure: Figure, modes: Modes, stratum: str) -> None:
    """Which stratum draws which mode: their mean IoU."""
    axes = figure.add_subplot()
    table, columns = np.array(modes.strata_iou, float), list(range(len(modes.names)))
    rows = list(range(len(table)))
    if modes.matching:  # along the diagonal: modes by probability, strata by their modes, spare ones last
        columns = _by_probability(modes)
        rows = [k for k in (modes.matching[i] for i in columns) if k is not None]
        rows += [k for k in range(len(table)) if k not in rows]
    table = table[np.ix_(rows, columns)]
    shown = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    names = [modes.names[i] for i in columns]
    axes.set_xticks(range(len(names)), names, rotation=90, size=8 if len(names) <= 16 else 6)
    step = max(1, len(table) // 12)
    axes.set_yticks(range(0, len(table), step), [str(k + 1) for k in rows[::step]])
    axes.set_xlabel("mode")
    axes.set_ylabel(stratum)
    bar = figure.colorbar(shown, ax=axes, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label("mean IoU")


def _by_probability(modes: Modes) -> list[int]:
    return sorted(range(len(modes.names)), key=lambda i: (-modes.probability[i], i))
