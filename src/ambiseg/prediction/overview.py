"""One page about a prediction: the image, a row for each expert with its probability and samples, and the entropy."""

from __future__ import annotations

import colorsys
import math
import warnings
from typing import Any, BinaryIO

import numpy as np

from ambiseg.prediction.result import Prediction

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; the ground is black
_DISTINCT = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#0072b2")
_INK, _GREY = "#1d2630", "#5b6875"
_ROWS, _COLUMNS = 8, 4  # experts and samples of each that there is room for
_SIDE = 320  # pixels that a panel is drawn with, or about
_PANEL = 1.45  # inches
_GOLDEN = 0.618034  # of a turn: hues that follow each other are far apart, however many there are


def class_colours(count: int) -> np.ndarray:
    """``[count, 3]`` bytes: black for class 0, and colours that can be told apart for the next seven.

    >>> class_colours(3).tolist()
    [[0, 0, 0], [230, 159, 0], [86, 180, 233]]
    """
    known = [tuple(int(text[i : i + 2], 16) for i in (1, 3, 5)) for text in _DISTINCT[:count]]
    wheel = [colorsys.hsv_to_rgb(i * _GOLDEN % 1, 0.65, 0.95) for i in range(count - len(known))]
    return np.array([*known, *[tuple(round(255 * part) for part in hue) for hue in wheel]], np.uint8)


def heat(count: int) -> np.ndarray:
    """``[count, 3]`` bytes from black over red to light yellow, each brighter than the one before."""
    from matplotlib import colormaps

    return np.round(255 * colormaps["magma"](np.linspace(0, 1, count))[:, :3]).astype(np.uint8)


def overlay(image: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image in grey, every class tinted in its colour and outlined.

    Args:
        image: ``[h, w]`` or ``[h, w, 3]`` bytes.
        labels: ``[h, w]`` class ids.
    """
    grey = image.astype(float) if image.ndim == 2 else image.astype(float).mean(-1)
    grey = np.repeat((0.85 * grey)[..., None], 3, -1)
    colours = class_colours(max(classes, 2)).astype(float)[labels]
    marked = (labels > 0)[..., None]
    shown = np.where(marked, 0.68 * grey + 0.32 * colours, grey)
    edge = np.zeros(labels.shape, bool)  # inside of what is outlined: the colour is its class's own
    for axis in (0, 1):
        for shift in (1, -1, 2, -2):
            edge |= labels != _shifted(labels, shift, axis)
    return np.where((edge & (labels > 0))[..., None], colours, shown).astype(np.uint8)


def _shifted(labels: np.ndarray, shift: int, axis: int) -> np.ndarray:
    moved = np.roll(labels, shift, axis)
    ends = [slice(None), slice(None)]
    ends[axis] = slice(0, shift) if shift > 0 else slice(shift, None)
    moved[tuple(ends)] = labels[tuple(ends)]  # nothing comes in from the other side
    return moved


def draw_overview(prediction: Prediction, file: BinaryIO) -> None:
    """Write the page as a PNG. Of a volume it shows the slice with the most entropy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = _Page(prediction)
    figure = Figure(figsize=page.size, facecolor="white")
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have is shown as a box, and that is all
        page.draw(figure)
        figure.savefig(file, format="png", dpi=120, metadata={"Software": "ambiseg"})


class _Page:
    """What is drawn where."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.volume = prediction.source.slices > 1
        flat = prediction.entropy.flatten(1) if self.volume else prediction.entropy.flatten()[None]
        self.slice = int(flat.sum(1).argmax())
        self.ratio = min(max(prediction.source.size[0] / prediction.source.size[1], 0.4), 2.5)
        order = prediction.expert_weights.argsort(descending=True, stable=True).tolist()
        self.experts, self.hidden = order[:_ROWS], order[_ROWS:]
        self.drawn = {k: [draw for draw in prediction.draws if draw.expert == k] for k in order}
        self.columns = 1 + min(_COLUMNS, max(len(self.drawn[k]) for k in order))
        self.rows = max(2, len(self.experts))
        self.left = min(2.0, self.rows / 2)  # how many panels wide image and entropy are: they share the height
        self.panel = (_PANEL, _PANEL * self.ratio) if self.ratio <= 1 else (_PANEL / self.ratio, _PANEL)
        self.label, self.top, self.bottom = 1.0, 0.85, 0.5  # inches for the experts' names, the title and the legend
        width = self.left * self.panel[0] + 0.55 + self.label + self.columns * (self.panel[0] + 0.08)
        self.size = max(width + 0.2, 5.5), self.top + self.rows * (self.panel[1] + 0.27) + self.bottom
        self.picture = _scaled(_bytes(prediction.source.read(self.slice)), self._step)

    @property
    def _step(self) -> float:
        return max(self.prediction.source.size) / _SIDE

    def map(self, maps: Any) -> np.ndarray:
        """``[h, w]`` of a map of the image, or of the slice that is shown."""
        return _scaled((maps[self.slice] if self.volume else maps).numpy(), self._step)

    def draw(self, figure: Any) -> None:
        width, height = self.size
        p, (w, h) = self.prediction, self.panel

        def axes(x: float, y: float, wide: float, high: float) -> Any:
            """In inches from the top left."""
            made = figure.add_axes((x / width, 1 - (y + high) / height, wide / width, high / height))
            made.set_xticks([])
            made.set_yticks([])
            for spine in made.spines.values():
                spine.set_visible(False)
            return made

        def say(x: float, y: float, text: str, size: float = 8, colour: str = _INK, **more: Any) -> None:
            figure.text(x / width, 1 - y / height, text, fontsize=size, color=colour, parse_math=False, **more)

        place = f", slice {self.slice} of 0–{p.source.slices - 1}, the least certain one" if self.volume else ""
        say(0.15, 0.27, f"{_short(p.name, width)}{place}", 11, weight="bold")
        form = f"{len(p.draws)} draws, {p.masks.count} different" if p.masks.count < len(p.draws) else ""
        say(0.15, 0.47, f"{p.source.form} pixels, {form or f'{len(p.draws)} masks'}, {p.options.form} form", 8, _GREY)

        # Image and entropy fill the left side, each half of its height.
        big = self.left * w, self.left * h
        half = self.rows * (h + 0.27) / 2
        image = axes(0.15, self.top, *big)
        image.imshow(self.picture, cmap="gray", vmin=0, vmax=255, aspect="auto")
        say(0.15, self.top - 0.07, "image", colour=_GREY)
        most = math.log(len(p.classes))
        shown = axes(0.15, self.top + half, *big)
        heat_map = shown.imshow(self.map(p.entropy), cmap="magma", vmin=0, vmax=most, aspect="auto")
        say(0.15, self.top + half - 0.07, f"entropy, mean {float(p.entropy.mean()):.3f} nats", colour=_GREY)
        bar = axes(0.15 + big[0] + 0.06, self.top + half, 0.08, big[1])
        figure.colorbar(heat_map, cax=bar).set_ticks([0, most], labels=["0", f"{most:.2f}"])
        bar.tick_params(labelsize=7, length=0, colors=_GREY)

        start = 0.15 + big[0] + 0.45
        say(start + self.label, self.top - 0.25, "mean of the expert", colour=_GREY)
        if self.columns > 1:
            say(start + self.label + w + 0.16, self.top - 0.25, "its samples, with their weights", colour=_GREY)
        for row, k in enumerate(self.experts):
            y = self.top + row * (h + 0.27)
            weight = float(p.expert_weights[k])
            say(start + self.label - 0.1, y + 0.3, _percent(weight), 13, weight="bold", ha="right")
            say(start + self.label - 0.1, y + 0.48, f"expert {k + 1}", colour=_GREY, ha="right")
            meter = axes(start + 0.15, y + 0.56, self.label - 0.25, 0.06)
            meter.barh([0], [1], color="#e3e7eb", height=1)
            meter.barh([0], [weight], color=_INK, height=1)
            meter.set(xlim=(0, 1), ylim=(-0.5, 0.5))
            samples = self.drawn[k][: self.columns - 1]
            if len(samples) < len(self.drawn[k]):
                more = f"{len(samples)} of {len(self.drawn[k])} shown"
                say(start + self.label - 0.1, y + 0.78, more, 7, _GREY, ha="right")
            panels = [(p.expert_masks[k], "")]
            panels += [(p.masks.labels[0, draw.mask], _percent(draw.weight)) for draw in samples]
            for column, (labels, title) in enumerate(panels):
                x = start + self.label + column * (w + 0.08) + 0.08 * (column > 0)
                shape = self.map(labels)
                axes(x, y, w, h).imshow(overlay(self.picture, shape, len(p.classes)), aspect="auto")
                title += "" if shape.any() else ", nothing" if title else "nothing"
                say(x, y - 0.05, title, 7, _GREY)
        self._legend(figure, say)

    def _legend(self, figure: Any, say: Any) -> None:
        from matplotlib.patches import Rectangle

        (width, height), names = self.size, self.prediction.classes
        x, y = 0.15, height - 0.2
        for name, colour in list(zip(names, class_colours(len(names)) / 255.0, strict=True))[1:]:
            advance = 0.42 + 0.068 * len(name)
            if x + advance > width - 1.2:
                say(x, y, f"and {len(names) - 1 - names.index(name) + 1} more", colour=_GREY)
                break
            square = (x / width, 1 - y / height), 0.12 / width, 0.12 / height
            figure.add_artist(
                Rectangle(*square, transform=figure.transFigure, facecolor=tuple(colour), edgecolor=_INK, lw=0.4)
            )
            say(x + 0.18, y, name)
            x += advance
        if self.hidden:
            rest = float(self.prediction.expert_weights[self.hidden].sum())
            text = f"{len(self.hidden)} experts more, together {_percent(rest)}"
            say(width - 0.15, y, text, colour=_GREY, ha="right")


def _percent(share: float) -> str:
    """``42 %``, ``4.2 %``, ``< 0.1 %``."""
    if share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _short(name: str, inches: float) -> str:
    most = max(12, int(inches * 8))
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _bytes(image: np.ndarray) -> np.ndarray:
    """``[C, H, W]`` of any type as ``[H, W]`` or ``[H, W, 3]`` bytes: the middle 99 % of its values."""
    shown = np.moveaxis(image[:3], 0, -1) if len(image) >= 3 else image[0]
    if shown.dtype == np.uint8:
        return shown
    low, high = np.percentile(shown[:: max(1, len(shown) // 512)], (0.5, 99.5))
    return np.round(np.clip((shown - low) / max(float(high - low), 1e-9), 0, 1) * 255).astype(np.uint8)


def _scaled(pixels: np.ndarray, step: float) -> np.ndarray:
    """Nearest neighbours: class ids stay what they are."""
    rows, columns = (
        np.minimum((np.arange(max(1, round(n / step))) + 0.5) * step, n - 1).astype(int) for n in pixels.shape[:2]
    )
    return pixels[rows][:, columns]
