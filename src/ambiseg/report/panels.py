"""Cases as figures for papers: rows of experts with their weights, as in the paper's qualitative results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ambiseg.data.drawing import reader_colours
from ambiseg.report import pictures
from ambiseg.report.figures import save
from ambiseg.report.gallery import Gallery, View
from ambiseg.report.results import Results

_TILE, _GAP, _LABEL, _CAPTION = 0.85, 0.05, 0.75, 0.2  # inches
Tile = tuple[np.ndarray, str]  # pixels and what is written below


def save_cases(gallery: Gallery, results: Results, folder: Path) -> None:
    """The first case of each kind as ``case-<kind>.png`` and ``.svg``."""
    colours = pictures.class_colours(results.classes, results.evaluated)
    for kind, names in gallery.chosen.items():
        if names:
            save(panel(gallery.views[names[0]], gallery.span, colours), f"case-{kind}", folder)


def panel(view: View, span: tuple[float, float], colours: Sequence[str]):
    """A figure of one case: image and annotations above, then a row for each expert, entropy last."""
    from matplotlib.figure import Figure

    rows = _rows(view, span, colours)
    height, width = view.image.shape[1:]
    tall = _TILE * height / width
    columns = max(len(tiles) for _, tiles in rows)
    heights = [tall + _GAP + _CAPTION * any(text for _, text in tiles) for _, tiles in rows]
    size = (_LABEL + columns * (_TILE + _GAP), sum(heights) + _GAP)
    figure = Figure(size)
    top = size[1] - _GAP
    for (label, tiles), room in zip(rows, heights, strict=True):
        figure.text((_LABEL - 0.08) / size[0], (top - tall / 2) / size[1], label, ha="right", va="center", size=8)
        for column, (pixels, text) in enumerate(tiles):
            left = _LABEL + column * (_TILE + _GAP)
            place = (left / size[0], (top - tall) / size[1], _TILE / size[0], tall / size[1])
            axes = figure.add_axes(place)
            axes.imshow(pixels, interpolation="nearest", aspect="auto")
            axes.set_axis_off()
            if text:
                at = ((left + _TILE / 2) / size[0], (top - tall - 0.03) / size[1])
                figure.text(*at, text, ha="center", va="top", size=7)
        top -= room
    return figure


def _rows(view: View, span: tuple[float, float], colours: Sequence[str]) -> list[tuple[str, list[Tile]]]:
    image = pictures.photograph(view.image, span)
    tones = list(reader_colours([str(i) for i in range(len(view.opinions))]).values())
    lines = pictures.outlines([opinion.labels for opinion in view.opinions], tones, 4)
    readers: list[Tile] = [(image, "image"), (_over(image, lines), "outlines")]
    readers += [
        (pictures.mask(opinion.labels, colours, view.valid), f"{100 * opinion.share:.0f} %")
        for opinion in view.opinions[:6]
    ]
    rows = [("readers", readers)]
    for voice in view.voices:
        label = "samples" if voice.number is None else f"expert {voice.number}\n{100 * voice.weight:.0f} %"
        tiles: list[Tile] = [(pictures.mask(labels, colours, view.valid), "") for labels in voice.masks]
        rows.append((label, [*tiles, (pictures.probability(voice.probability, colours), "")]))
    top = math.log(2)
    maps = [(pictures.heat(view.disagreement, top), "readers"), (pictures.heat(view.entropy, top), "prediction")]
    return [*rows, ("entropy", maps)]


def _over(image: np.ndarray, lines: np.ndarray) -> np.ndarray:
    return np.where(lines[..., 3:] > 0, lines[..., :3], image)
