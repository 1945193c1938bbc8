"""One picture of a prediction: image, entropy and weighted masks, in rows by stratum for methods that have strata.

It is put together with Pillow: a figure of as many axes took ten times as long as the network.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from torch import Tensor

from ambiseg._util.text import count, percent
from ambiseg.prediction.result import Prediction
from ambiseg.viz.colours import INK, LINE, SOFT, heat_colours, label_colours
from ambiseg.viz.pictures import overlay, photograph, scaled, scaled_values

_ROWS, _COLUMNS = 8, 5  # of panels, at most
_DPI = 120  # pixels of an inch; text is measured in points, 72 of which are an inch
_LARGE, _SMALL = 320, 176  # pixels of image and entropy, and of a panel, about
_PANEL, _LABEL, _TOP, _BOTTOM = 1.45, 1.0, 0.85, 0.5  # inches: a panel's longer side, row labels, title, legend
_BETWEEN, _LINE = 0.27, 0.17  # inches between rows, and of a line of notes
_ALERT = "#b02a1e"


class _Row(NamedTuple):
    """Panels side by side, each a mask and its title; weight, label and note stand to the left of them."""

    panels: list[tuple[Tensor, str]]
    weight: float | None = None
    label: str = ""
    note: str = ""


def draw_overview(prediction: Prediction, file: BinaryIO) -> None:
    """Write the picture as a PNG. Of a volume it shows the slice with the most entropy."""
    strata, (height, width) = prediction.strata, prediction.source.size
    if strata is not None and prediction.kept is None:
        rows, hidden = _strata_rows(prediction)
        titles = f"centre of the {strata.name}", "its samples, with their weights"
    else:
        rows, hidden = _mask_rows(prediction)
        titles = ("masks, with their weights",)
    columns, lines = max(len(row.panels) for row in rows), max(2, len(rows))
    ratio = min(max(height / width, 0.4), 2.5)
    panel = (_PANEL, _PANEL * ratio) if ratio <= 1 else (_PANEL / ratio, _PANEL)
    big = min(2.0, lines / 2)  # how many panels wide image and entropy are: each takes half of the height
    start = 0.15 + big * panel[0] + 0.45 + (_LABEL if rows[0].label else 0.1)
    wide = max(start + columns * (panel[0] + 0.08) + 0.3, 5.5)
    notes = [line for note in prediction.notes for line in _wrapped(f"Warning: {note}", wide - 0.3)]
    top = _TOP + (len(notes) + 0.5) * _LINE if notes else _TOP
    canvas = _Canvas(prediction, (wide, top + lines * (panel[1] + _BETWEEN) + _BOTTOM))
    canvas.header(hidden)
    for number, line in enumerate(notes):
        canvas.text(0.15, 0.47 + (number + 1) * _LINE, line, colour=_ALERT)
    canvas.maps(top, (big * panel[0], big * panel[1]), lines * (panel[1] + _BETWEEN) / 2)
    for column, title in enumerate(titles[:columns]):
        canvas.text(start + column * (panel[0] + 0.16), top - 0.25, title)
    for number, row in enumerate(rows):
        canvas.row(row, start, top + number * (panel[1] + _BETWEEN), panel)
    canvas.legend()
    canvas.picture.save(file, "PNG", compress_level=3)


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


@cache
def _font(points: float, bold: bool = False) -> Any:
    """DejaVu Sans, which matplotlib brings and which knows most scripts; without it the font of Pillow."""
    from PIL import ImageFont

    size = points * _DPI / 72
    brought = find_spec("matplotlib")  # looked up, not imported
    if brought is not None and brought.origin is not None:
        folder = Path(brought.origin).parent / "mpl-data" / "fonts" / "ttf"
        path = folder / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def _wrapped(text: str, width: float, points: float = 8) -> list[str]:
    """Lines of at most ``width`` inches, broken between words."""
    lines, font = [""], _font(points)
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width * _DPI:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class _Canvas:
    """A picture that is drawn on in inches from its top left corner."""

    def __init__(self, prediction: Prediction, size: tuple[float, float]) -> None:
        from PIL import Image, ImageDraw

        self.prediction, self.slice, (self.width, self.height) = prediction, None, size
        if prediction.source.slices > 1:
            self.slice = int(prediction.entropy.flatten(1).sum(1).argmax())
        self.picture = Image.new("RGB", (round(self.width * _DPI), round(self.height * _DPI)), "white")
        self._draw = ImageDraw.Draw(self.picture)
        self.image = prediction.source.read(self.slice or 0)
        self.small = photograph(self.image, side=_SMALL)
        self.colours = label_colours(max(2, len(prediction.classes)))

    def map(self, maps: Tensor, side: int) -> np.ndarray:
        """``[h, w]`` of a map of class ids or of numbers, of the image or of the slice that is shown."""
        shown = (maps if self.slice is None else maps[self.slice]).numpy()
        return scaled_values(shown, side, largest=True) if maps.is_floating_point() else scaled(shown, side)

    def paste(self, pixels: np.ndarray, x: float, y: float, wide: float, high: float) -> None:
        """``[h, w, 3]`` bytes, stretched to a rectangle."""
        from PIL import Image

        size = max(1, round(wide * _DPI)), max(1, round(high * _DPI))
        shown = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.BOX)
        self.picture.paste(shown, (round(x * _DPI), round(y * _DPI)))

    def box(self, x: float, y: float, wide: float, high: float, colour: str, outline: str | None = None) -> None:
        corners = [round(value * _DPI) for value in (x, y, x + wide, y + high)]
        if corners[2] > corners[0]:
            self._draw.rectangle((corners[0], corners[1], corners[2] - 1, corners[3] - 1), colour, outline)

    def text(self, x: float, y: float, text: str, size: float = 8, colour: str = SOFT, **look: bool) -> None:
        """A line of text on the base line ``y``, from ``x`` on, or ``right``: up to ``x``; ``bold`` or not."""
        anchor, font = "rs" if look.get("right") else "ls", _font(size, look.get("bold", False))
        self._draw.text((x * _DPI, y * _DPI), text, colour, font, anchor=anchor)

    def header(self, hidden: str) -> None:
        p, most = self.prediction, max(12, int(self.width * 8))
        name = p.name if len(p.name) <= most else f"…{p.name[1 - most :]}"
        place = "" if self.slice is None else f", slice {self.slice} of 0–{p.source.slices - 1}, the least certain one"
        self.text(0.15, 0.27, f"{name}{place}", 11, INK, bold=True)
        merged = f"{len(p.draws)} draws, {p.masks.count} different" if p.masks.count < len(p.draws) else ""
        drawn = f"{merged or count(len(p.draws), 'mask')}, {p.form} form"
        if p.kept is not None:
            drawn = f"{p.masks.count} kept of {len(p.draws)} draws, energy distance {p.kept.loss:.3f}"
        self.text(0.15, 0.47, f"{p.source.form} pixels, {drawn}")
        self.text(self.width - 0.15, self.height - 0.2, hidden, right=True)

    def maps(self, top: float, size: tuple[float, float], half: float) -> None:
        """The image, and below it the entropy with its scale."""
        entropy, most = self.prediction.entropy, math.log(len(self.prediction.classes))
        self.paste(photograph(self.image, side=_LARGE), 0.15, top, *size)
        self.text(0.15, top - 0.07, "image")
        self.paste(heat_colours(self.map(entropy, _LARGE) / most), 0.15, top + half, *size)
        self.text(0.15, top + half - 0.07, f"entropy, mean {float(entropy.mean()):.3f} nats")
        right = 0.15 + size[0] + 0.06
        self.paste(heat_colours(np.linspace(1, 0, 64)[:, None]), right, top + half, 0.08, size[1])
        self.text(right + 0.12, top + half + 0.1, f"{most:.2f}", 7)
        self.text(right + 0.12, top + half + size[1], "0", 7)

    def row(self, row: _Row, x: float, y: float, panel: tuple[float, float]) -> None:
        if row.weight is not None:
            self.text(x - 0.1, y + 0.3, percent(row.weight), 13, INK, right=True, bold=True)
            self.text(x - 0.1, y + 0.48, row.label, right=True)
            self.box(x - _LABEL + 0.15, y + 0.56, _LABEL - 0.25, 0.06, LINE)
            self.box(x - _LABEL + 0.15, y + 0.56, (_LABEL - 0.25) * row.weight, 0.06, INK)
            self.text(x - 0.1, y + 0.78, row.note, 7, right=True)
        for column, (labels, title) in enumerate(row.panels):
            gap = 0.08 * (row.weight is not None and column > 0)  # between a stratum's centre and its draws
            left, shape = x + column * (panel[0] + 0.08) + gap, self.map(labels, _SMALL)
            self.paste(overlay(self.small, shape, self.colours), left, y, *panel)
            self.text(left, y - 0.05, ", ".join(filter(None, (title, "" if shape.any() else "empty"))), 7)

    def legend(self) -> None:
        names = self.prediction.classes[1:]
        x, y = 0.15, self.height - 0.2
        for number, (name, colour) in enumerate(zip(names, self.colours[1:], strict=False)):
            advance = 0.42 + _font(8).getlength(name) / _DPI
            if x + advance > self.width - 1.2:
                self.text(x, y, f"and {len(names) - number} more")
                break
            self.box(x, y - 0.12, 0.12, 0.12, colour, INK)
            self.text(x + 0.18, y, name, colour=INK)
            x += advance
