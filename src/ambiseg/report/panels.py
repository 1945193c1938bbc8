"""Cases as figures for papers: rows of experts with their weights, as in the paper's qualitative results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ambiseg.report import pictures
from ambiseg.report.figures import save
from ambiseg.report.gallery import Gallery, View
from ambiseg.report.modes import Paired
from ambiseg.report.results import Results
from ambiseg.viz.drawing import reader_colours

_TILE, _GAP, _LABEL, _CAPTION = 0.85, 0.05, 0.75, 0.2  # inches
Tile = tuple[np.ndarray, str]  # pixels and what is written below


def save_cases(gallery: Gallery, results: Results, folder: Path) -> None:
    """The first case of each kind as ``case-<kind>.png`` and ``.svg``."""
    colours = pictures.class_colours(results.classes, results.evaluated, results.flipped)
    for kind, names in gallery.chosen.items():
        if names:
            save(panel(gallery.views[names[0]], gallery.span, colours), f"case-{kind}", folder)
    for name, paired in list(gallery.paired.items())[:1]:
        save(_draw(_pair_rows(gallery.views[name], paired, gallery.span, colours)), "mode-pairs", folder)


def panel(view: View, span: tuple[float, float], colours: Sequence[str]):
    """A figure of one case: image and annotations above, then a row for each expert, entropy last."""
    return _draw(_rows(view, span, colours))


def _draw(rows: Sequence[tuple[str, list[Tile]]]):
    from matplotlib.figure import Figure

    height, width = rows[0][1][0][0].shape[:2]
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
        tiles: list[Tile] = [(pictures.mask(labels, colours), "") for labels in voice.masks]
        rows.append((label, [*tiles, (pictures.probability(voice.probability, colours), "")]))
    top = math.log(2)
    maps = [(pictures.heat(view.disagreement, top), "readers"), (pictures.heat(view.entropy, top), "prediction")]
    return [*rows, ("entropy", maps)]


def _pair_rows(
    view: View, paired: Paired, span: tuple[float, float], colours: Sequence[str]
) -> list[tuple[str, list[Tile]]]:
    """The image, then the most likely modes, eight a row, each above the expert that is matched with it."""
    rows: list[tuple[str, list[Tile]]] = [("image", [(pictures.photograph(view.image, span), "")])]
    for start in range(0, min(len(paired.pairs), 16), 8):
        pairs = paired.pairs[start : start + 8]
        rows.append(
            ("modes", [(pictures.mask(p.truth, colours, paired.valid), f"{100 * p.probability:.1f} %") for p in pairs])
        )
        rows.append(("experts", [(pictures.mask(p.mask, colours), f"{100 * p.weight:.1f} %") for p in pairs]))
    return rows


def _over(image: np.ndarray, lines: np.ndarray) -> np.ndarray:
    return np.where(lines[..., 3:] > 0, lines[..., :3], image)
