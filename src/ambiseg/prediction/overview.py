"""One picture of a prediction: image, entropy and weighted masks, in rows by stratum for methods that have strata."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from torch import Tensor

from ambiseg._util.text import count, percent
from ambiseg.prediction.result import Prediction
from ambiseg.viz.colours import HEAT, INK, LINE, SOFT, label_colours
from ambiseg.viz.pictures import overlay, photograph, scaled, scaled_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS, _COLUMNS = 8, 5  # of panels, at most
_SIDE = 320  # pixels of a panel, about
_PANEL, _LABEL, _TOP, _BOTTOM = 1.45, 1.0, 0.85, 0.5  # inches: a panel's longer side, row labels, title, legend
_BETWEEN = 0.27  # inches between rows


class _Row(NamedTuple):
    """Panels side by side, each a mask and its title; weight, label and note stand to the left of them."""

    panels: list[tuple[Tensor, str]]
    weight: float | None = None
    label: str = ""
    note: str = ""


def draw_overview(prediction: Prediction, file: BinaryIO) -> None:
    """Write the picture as a PNG. Of a volume it shows the slice with the most entropy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    strata, (height, width) = prediction.strata, prediction.source.size
    if strata is not None:
        rows, hidden = _strata_rows(prediction)
        titles = f"centre of the {strata.name}", "its samples, with their weights"
    else:
        rows, hidden = _mask_rows(prediction)
        titles = ("masks, with their weights",)
    columns, lines = max(len(row.panels) for row in rows), max(2, len(rows))
    ratio = min(max(height / width, 0.4), 2.5)
    panel = (_PANEL, _PANEL * ratio) if ratio <= 1 else (_PANEL / ratio, _PANEL)
    big = min(2.0, lines / 2)  # how many panels wide image and entropy are: each takes half of the height
    start = 0.15 + big * panel[0] + 0.45 + (0.1 if strata is None else _LABEL)
    size = max(start + columns * (panel[0] + 0.08) + 0.3, 5.5), _TOP + lines * (panel[1] + _BETWEEN) + _BOTTOM
    canvas = _Canvas(prediction, Figure(figsize=size, facecolor="white"))
    FigureCanvasAgg(canvas.figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have is shown as a box
        canvas.header(hidden)
        canvas.maps((big * panel[0], big * panel[1]), lines * (panel[1] + _BETWEEN) / 2)
        for column, title in enumerate(titles[:columns]):
            canvas.text(start + column * (panel[0] + 0.16), _TOP - 0.25, title)
        for number, row in enumerate(rows):
            canvas.row(row, start, _TOP + number * (panel[1] + _BETWEEN), panel)
        canvas.legend()
        canvas.figure.savefig(file, format="png", dpi=120, metadata={"Software": "ambiseg"})


def _strata_rows(prediction: Prediction) -> tuple[list[_Row], str]:
    """A row for each of the heaviest strata: its centre, then its draws; and what is left out."""
    strata = prediction.strata
    assert strata is not None
    order = strata.weights.argsort(descending=True, stable=True).tolist()
    rows = []
    for k in order[:_ROWS]:
        draws = [draw for draw in prediction.draws if draw.stratum == k]
        samples = draws[: _COLUMNS - 1]
        panels = [(prediction.masks.labels[0, draw.mask], percent(draw.weight)) for draw in samples]
        note = f"{len(samples)} of {len(draws)} shown" if len(samples) < len(draws) else ""
        rows.append(_Row([(strata.centres[k], ""), *panels], float(strata.weights[k]), f"{strata.name} {k + 1}", note))
    rest = order[_ROWS:]
    return rows, _left_out(len(rest), strata.name, float(strata.weights[rest].sum()))


def _mask_rows(prediction: Prediction) -> tuple[list[_Row], str]:
    """The heaviest masks in reading order, and what is left out."""
    mass, most = prediction.masks.mass[0].tolist(), _COLUMNS * _ROWS // 2
    labels = prediction.masks.labels[0, :most]
    panels = [(ids, percent(weight)) for ids, weight in zip(labels, mass[:most], strict=True)]
    rows = [_Row(panels[i : i + _COLUMNS]) for i in range(0, len(panels), _COLUMNS)]
    return rows, _left_out(len(mass[most:]), "mask", sum(mass[most:]))


def _left_out(number: int, noun: str, weight: float) -> str:
    return f"{count(number, noun)} more, together {percent(weight)}" if number else ""


class _Canvas:
    """A figure that is drawn on in inches from its top left corner."""

    def __init__(self, prediction: Prediction, figure: Figure) -> None:
        self.prediction, self.figure, self.slice = prediction, figure, None
        if prediction.source.slices > 1:
            self.slice = int(prediction.entropy.flatten(1).sum(1).argmax())
        self.width, self.height = figure.get_size_inches().tolist()
        self.picture = photograph(prediction.source.read(self.slice or 0), side=_SIDE)
        self.colours = label_colours(max(2, len(prediction.classes)))

    def map(self, maps: Tensor) -> np.ndarray:
        """``[H, W]`` of a map of the image, or of the slice that is shown."""
        return (maps if self.slice is None else maps[self.slice]).numpy()

    def axes(self, x: float, y: float, wide: float, high: float) -> Any:
        width, height = self.width, self.height
        made = self.figure.add_axes((x / width, 1 - (y + high) / height, wide / width, high / height))
        made.set(xticks=[], yticks=[])
        made.spines[:].set_visible(False)
        return made

    def text(self, x: float, y: float, text: str, size: float = 8, colour: str = SOFT, **more: Any) -> None:
        place = x / self.width, 1 - y / self.height
        self.figure.text(*place, text, fontsize=size, color=colour, parse_math=False, **more)

    def header(self, hidden: str) -> None:
        p, most = self.prediction, max(12, int(self.width * 8))
        name = p.name if len(p.name) <= most else f"…{p.name[1 - most :]}"
        place = "" if self.slice is None else f", slice {self.slice} of 0–{p.source.slices - 1}, the least certain one"
        self.text(0.15, 0.27, f"{name}{place}", 11, INK, weight="bold")
        merged = f"{len(p.draws)} draws, {p.masks.count} different" if p.masks.count < len(p.draws) else ""
        self.text(0.15, 0.47, f"{p.source.form} pixels, {merged or count(len(p.draws), 'mask')}, {p.form} form")
        self.text(self.width - 0.15, self.height - 0.2, hidden, ha="right")

    def maps(self, size: tuple[float, float], half: float) -> None:
        """The image, and below it the entropy with its scale."""
        from matplotlib.colors import LinearSegmentedColormap

        entropy, top = self.prediction.entropy, math.log(len(self.prediction.classes))
        self.axes(0.15, _TOP, *size).imshow(self.picture, aspect="auto")
        self.text(0.15, _TOP - 0.07, "image")
        look = {"cmap": LinearSegmentedColormap.from_list("heat", HEAT), "vmin": 0, "vmax": top, "aspect": "auto"}
        drawn = self.axes(0.15, _TOP + half, *size).imshow(scaled_values(self.map(entropy), _SIDE), **look)
        self.text(0.15, _TOP + half - 0.07, f"entropy, mean {float(entropy.mean()):.3f} nats")
        bar = self.axes(0.15 + size[0] + 0.06, _TOP + half, 0.08, size[1])
        self.figure.colorbar(drawn, cax=bar).set_ticks([0, top], labels=["0", f"{top:.2f}"])
        bar.tick_params(labelsize=7, length=0, colors=SOFT)

    def row(self, row: _Row, x: float, y: float, panel: tuple[float, float]) -> None:
        if row.weight is not None:
            self.text(x - 0.1, y + 0.3, percent(row.weight), 13, INK, weight="bold", ha="right")
            self.text(x - 0.1, y + 0.48, row.label, ha="right")
            meter = self.axes(x - _LABEL + 0.15, y + 0.56, _LABEL - 0.25, 0.06)
            meter.barh([0, 0], [1, row.weight], color=[LINE, INK], height=1)
            meter.set(xlim=(0, 1), ylim=(-0.5, 0.5))
            self.text(x - 0.1, y + 0.78, row.note, 7, ha="right")
        for column, (labels, title) in enumerate(row.panels):
            gap = 0.08 * (row.weight is not None and column > 0)  # between a stratum's centre and its draws
            left, shape = x + column * (panel[0] + 0.08) + gap, scaled(self.map(labels), _SIDE)
            self.axes(left, y, *panel).imshow(overlay(self.picture, shape, self.colours), aspect="auto")
            self.text(left, y - 0.05, ", ".join(filter(None, (title, "" if shape.any() else "empty"))), 7)

    def legend(self) -> None:
        from matplotlib.patches import Rectangle

        names = self.prediction.classes[1:]
        x, y = 0.15, self.height - 0.2
        for number, (name, colour) in enumerate(zip(names, self.colours[1:], strict=False)):
            advance = 0.42 + 0.068 * len(name)
            if x + advance > self.width - 1.2:
                self.text(x, y, f"and {len(names) - number} more")
                break
            corner, side = (x / self.width, 1 - y / self.height), (0.12 / self.width, 0.12 / self.height)
            look = {"facecolor": colour, "edgecolor": INK, "lw": 0.4, "transform": self.figure.transFigure}
            self.figure.add_artist(Rectangle(corner, *side, **look))
            self.text(x + 0.18, y, name, colour=INK)
            x += advance
