"""The page's figures by matplotlib: for papers as PNG and SVG, for the page as SVG that follows its colours."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ambiseg._util.files import atomic_write
from ambiseg.report.results import Modes, Results, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of figures on white paper, and the page's variable that takes the place of each
INK, SOFT, LINE, PAPER = "#1c2530", "#5a6675", "#d3dae3", "#fefefe"
EXPERTS = ("#2468b4", "#d2691e", "#14866a", "#ad3f78", "#a67c00", "#6a55b5", "#2288a6", "#7b6a57")
OTHERS = "#9aa4b1"
VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--card", OTHERS: "--others"} | {
    colour: f"--e{i + 1}" for i, colour in enumerate(EXPERTS)
}
BLUE, ORANGE, GREEN, PINK = EXPERTS[:4]
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
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Made:
    """One figure: its name is that of its files, ``title`` and ``text`` tell what it shows to who cannot see it."""

    name: str
    title: str
    text: str
    svg: str  # to put into a page

    @property
    def html(self) -> str:
        """The figure with its caption."""
        return f'<figure class="plot">{self.svg}<figcaption>{escape(self.text)}</figcaption></figure>'


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's settings are, without a display and without a word about caches."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # a home that cannot be written to is no news to anybody
    try:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)  # type: ignore[call-overload,arg-type]
            yield
    finally:
        log.setLevel(level)


def make(
    name: str,
    title: str,
    text: str,
    draw: Callable[[Figure], None],
    folder: Path | None = None,
    size: tuple[float, float] = HALF,
) -> Made:
    """Draw a figure, save it to ``folder`` as PNG (300 dpi, white) and SVG, and make it ready for a page."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    draw(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # where things are by now is where they stay in every file
    if folder is not None:
        save(figure, name, folder)
    content = io.BytesIO()
    rcParams["svg.fonttype"] = "none"  # the page's own letters; in a file of its own letters are shapes
    figure.savefig(content, format="svg", transparent=True, metadata=_NO_METADATA)
    rcParams["svg.fonttype"] = "path"
    return Made(name, title, text, inline(content.getvalue().decode(), f"figure-{name}", title, text))


def save(figure: Figure, name: str, folder: Path) -> None:
    """``name.png`` of 300 dpi and ``name.svg``, on white, the same bytes each time."""
    for kind, options in (("png", {"dpi": 300}), ("svg", {"metadata": _NO_METADATA})):
        content = io.BytesIO()
        figure.savefig(content, format=kind, facecolor="white", **options)  # type: ignore[arg-type]
        with atomic_write(folder / f"{name}.{kind}") as file:
            file.write(content.getvalue())


_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def inline(svg: str, name: str, title: str, text: str) -> str:
    """A stand-alone SVG as a part of a page: its colours are the page's, its ids its own, its text a description."""
    svg = svg[svg.index("<svg") :]
    body = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    found = re.search(r'viewBox="([^"]+)"', svg)
    assert found is not None
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', body))
    kept = {one or other for one, other in used}
    body = re.sub(
        r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in kept else "", body
    )  # others would be there twice
    body = re.sub(r'href="#', f'href="#{name}-', body).replace("url(#", f"url(#{name}-")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    body = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "system-ui, 'DejaVu Sans', sans-serif", body)
    body = re.sub(r"\n\s*", "\n", body).strip()
    head = f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{name}-title {name}-text">'
    told = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(text)}</desc>'
    return f"{head}{told}\n{body}\n</svg>"


# -- the result -----------------------------------------------------------------------------------------------------


def ged_by_samples(results: Results) -> Callable[[Figure], None]:
    """GED against the number of samples, as published and unbiased, with intervals."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        forms = results.forms
        lines = [(form, metric) for form in forms for metric in ("ged", "ged_unbiased")]
        for place, (form, metric) in enumerate(lines):
            settings = forms[form]
            shift = 1.045 ** (place - (len(lines) - 1) / 2)  # side by side, so that intervals do not hide each other
            x = np.array([setting.samples for setting in settings]) * shift
            values = np.array([_bounds(setting, metric) for setting in settings])
            colour = (BLUE, ORANGE, GREEN, PINK)[list(forms).index(form) % 4]
            published = metric == "ged"
            axes.plot(
                x, values[:, 0], color=colour, linestyle="-" if published else (0, (3, 2)), marker="o",
                markerfacecolor=colour if published else PAPER, markeredgecolor=colour,
                label=f"{form}, {'as published' if published else 'unbiased'}", zorder=3,
            )  # fmt: skip
            axes.vlines(x, values[:, 1], values[:, 2], color=colour, linewidth=1.2, zorder=2)
        numbers = sorted({setting.samples for setting in results.settings})
        axes.set_xscale("log")
        ticks = [n for n, after in zip(numbers, [*numbers[1:], math.inf], strict=True) if after / n > 1.1]
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_xticks([], minor=True)
        if len(numbers) == 1:
            axes.set_xlim(numbers[0] / 2, numbers[0] * 2)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("masks drawn for an image")
        axes.set_ylabel("GED, smaller is better")
        figure.legend(loc="outside upper left", ncols=2, handlelength=2.2, columnspacing=1.2)

    return draw


def _bounds(setting: Setting, metric: str) -> tuple[float, float, float]:
    found = setting.metrics.get(metric)
    return (found.mean, found.low, found.high) if found else (math.nan, math.nan, math.nan)


def reliability(setting: Setting) -> Callable[[Figure], None]:
    """How often readers agree, against how sure the model is; and how many pixels that is about."""
    curve = setting.reliability
    assert curve is not None

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        edges = np.array(curve.edges)
        left, width = edges[:-1], np.diff(edges)
        accuracy, confidence = np.array(curve.accuracy), np.array(curve.confidence)
        above.bar(left, accuracy, width, align="edge", color=BLUE, alpha=0.28, linewidth=0)
        above.plot([0, 1], [0, 1], color=SOFT, linestyle=(0, (3, 2)), linewidth=1.1)
        above.vlines(confidence, confidence, accuracy, color=ORANGE, linewidth=2.2)
        above.plot(confidence, accuracy, "o-", color=BLUE)
        above.set_ylim(0, 1.02)
        above.set_xlim(0, 1)
        above.set_ylabel("share of readers")
        above.text(0.03, 0.93, f"ECE {percent(setting.ece.mean)}", transform=above.transAxes, va="top")
        weight = np.array(curve.weight)
        below.bar(left, weight, width * 0.92, align="edge", color=OTHERS, linewidth=0)
        if (weight > 0).any():
            below.set_yscale("log")
            below.set_ylim(10 ** math.floor(math.log10(weight[weight > 0].min()) - 0.3), 1)
            below.set_yticks([1, 10 ** math.floor(math.log10(weight[weight > 0].min()) - 0.3)])
            below.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            below.set_yticks([], minor=True)
        below.set_ylabel("pixels")
        below.set_xlabel("predicted probability")
        figure.align_ylabels()

    return draw


# -- the experts ----------------------------------------------------------------------------------------------------


def expert_ranks(mean: Sequence[float]) -> tuple[list[int], list[int]]:
    """The experts that have a colour of their own, in order, and the others: up to eight all do.

    >>> expert_ranks([0.5, 0.2, 0.3])
    ([0, 1, 2], [])
    """
    if len(mean) <= len(EXPERTS):
        return list(range(len(mean))), []
    heaviest = sorted(range(len(mean)), key=lambda k: (-mean[k], k))[: len(EXPERTS) - 1]
    return sorted(heaviest), [k for k in range(len(mean)) if k not in heaviest]


def expert_usage(results: Results) -> Callable[[Figure], None]:
    """Stacked bars of the experts' mean weights: over all images, and by how many readers drew something."""
    experts = results.experts
    assert experts is not None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        own, others = expert_ranks(experts.mean)
        buckets = experts.by_bucket if len(experts.by_bucket) > 1 else ()
        rows = [("all\nimages", experts.mean), *((str(b.readers), b.mean) for b in buckets)]
        x = np.array([0.0, *(i + 1.35 for i in range(len(rows) - 1))])
        bottom = np.zeros(len(rows))
        stack = [(f"expert {k + 1}", [k], EXPERTS[i]) for i, k in enumerate(own)]
        stack += [(f"{len(others)} others", others, OTHERS)] if others else []
        for label, members, colour in stack:
            height = np.array([sum(mean[k] for k in members) for _, mean in rows])
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
        axes.set_xlabel("readers who drew something" if buckets else "")
        axes.set_ylabel("mean weight")
        columns = min(4, len(stack))
        figure.legend(loc="outside upper left", ncols=columns, handlelength=0.8, handleheight=0.8, columnspacing=1.1)

    return draw


def empty_mass(results: Results) -> Callable[[Figure], None]:
    """The predicted probability of drawing nothing against the share of readers who drew nothing."""
    experts = results.experts
    assert experts is not None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        points = [(b.empty_share, b.empty_mass, b) for b in experts.by_bucket]
        points = sorted((p for p in points if math.isfinite(p[0] + p[1])), key=lambda p: p[:2])
        axes.plot([0, 1], [0, 1], color=SOFT, linestyle=(0, (3, 2)), linewidth=1.1)
        axes.text(
            0.985, 0.945, "as often as readers", color=SOFT, size=8, ha="right", va="top",
            rotation=45, rotation_mode="anchor", transform_rotates_text=True,
        )  # fmt: skip
        if points:
            x, y, buckets = zip(*points, strict=True)
            axes.plot(x, y, color=BLUE, zorder=2)
            most = max(b.images for b in buckets)
            axes.scatter(x, y, [40 + 160 * b.images / most for b in buckets], color=BLUE, edgecolor=PAPER, zorder=3)
            for at, height, bucket in points:
                axes.annotate(
                    f"{bucket.readers} drew", (at, height), (0, -14 if height < at else 12), textcoords="offset points",
                    ha="center", va="center", size=8,
                )  # fmt: skip
        axes.set_xlim(-0.08, 1.08)
        axes.set_ylim(-0.1, 1.1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([0, 0.25, 0.5, 0.75, 1])
            axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlabel("readers who drew nothing")
        axes.set_ylabel("weight on empty masks")

    return draw


# -- known modes ----------------------------------------------------------------------------------------------------


def mode_ratio(modes: Modes) -> Callable[[Figure], None]:
    """How often each mode is predicted against how likely it is."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        order = sorted(range(len(modes.names)), key=lambda i: (-modes.probability[i], i))
        x = np.arange(len(order))
        truth, found = (np.array(v)[order] for v in (modes.probability, modes.ratio))
        axes.bar(x, truth, 0.8, color=OTHERS, alpha=0.55, linewidth=0, label="in the annotations")
        axes.plot(x, found, "o", color=BLUE, label="predicted")
        axes.vlines(x, np.minimum(truth, found), np.maximum(truth, found), color=BLUE, linewidth=1)
        axes.set_xticks(x, [modes.names[i] for i in order], rotation=90, size=8 if len(order) <= 16 else 6)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0)
        axes.set_ylabel("probability of the mode")
        figure.legend(loc="outside upper left", ncols=2)

    return draw


def class_flips(modes: Modes) -> Callable[[Figure], None]:
    """How often each class is flipped: in the annotations and in the predictions."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        y = np.arange(len(modes.flips))[::-1]
        truth, found = (np.array([getattr(f, key) for f in modes.flips]) for key in ("truth", "predicted"))
        axes.hlines(y, np.minimum(truth, found), np.maximum(truth, found), color=OTHERS, linewidth=2)
        axes.plot(truth, y, "o", color=PAPER, markeredgecolor=SOFT, markersize=8, label="in the annotations")
        axes.plot(found, y, "o", color=ORANGE, label="predicted")
        axes.set_yticks(y, [flip.name for flip in modes.flips])
        axes.set_ylim(-0.6, len(y) - 0.4)
        axes.set_xlim(0, 1)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("share of pixels that are flipped")
        figure.legend(loc="outside upper left", ncols=2)

    return draw


def mode_experts(modes: Modes) -> Callable[[Figure], None]:
    """Which expert draws which mode: their mean IoU."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        table, names = np.array(modes.experts, float), modes.names
        rows = list(range(len(table)))
        if modes.matching:  # along the diagonal: modes by probability, experts by their modes, spare ones last
            order = sorted(range(len(names)), key=lambda i: (-modes.probability[i], i))
            rows = [k for k in (modes.matching[i] for i in order) if k is not None]
            rows += [k for k in range(len(table)) if k not in rows]
            table, names = table[np.ix_(rows, order)], [names[i] for i in order]
        shown = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.grid(visible=False)
        axes.set_xticks(range(table.shape[1]), names, rotation=90, size=8 if table.shape[1] <= 16 else 6)
        step = max(1, len(table) // 12)
        axes.set_yticks(range(0, len(table), step), [str(k + 1) for k in rows[::step]])
        axes.set_xlabel("mode")
        axes.set_ylabel("expert")
        bar = figure.colorbar(shown, ax=axes, pad=0.02)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.set_label("mean IoU")

    return draw


def percent(value: float) -> str:
    """A share with digits enough for small ones.

    >>> percent(0.0143), percent(0.00041)
    ('1.43 %', '0.041 %')
    """
    return "–" if math.isnan(value) else f"{100 * value:.{2 if value >= 0.001 or value == 0 else 3}f} %"
