"""Cases as figures for papers: rows of small pictures with labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ambiseg.reporting.figures import Figures
from ambiseg.reporting.gallery import MAX_ENTROPY, CaseView, Gallery
from ambiseg.reporting.modes import ModeMatches
from ambiseg.viz import pictures
from ambiseg.viz.colours import distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TILE, _GAP, _LABEL, _CAPTION = 0.85, 0.05, 0.75, 0.2  # inches
_MASKS, _MODES = 6, 16  # of readers, and modes in rows of eight
Row = tuple[str, list[tuple[np.ndarray, str]]]  # a label, and pictures with their captions


def save_cases(gallery: Gallery, stratum: str, figures: Figures) -> None:
    """The first case of each kind as ``case-<kind>.png`` and ``.svg``; of known modes also ``mode-pairs``."""
    for kind, names in gallery.chosen.items():
        if names:
            figures.save(_panel(_case_rows(gallery, gallery.views[names[0]], stratum)), f"case-{kind}")
    for name, matches in list(gallery.matches.items())[:1]:
        image = pictures.photograph(gallery.views[name].image, gallery.span)
        figures.save(_panel([("image", [(image, "")]), *_mode_rows(gallery, matches, stratum)]), "mode-pairs")


def _case_rows(gallery: Gallery, view: CaseView, stratum: str) -> list[Row]:
    """Image and annotations, then a row for each stratum, entropy last."""
    image = pictures.photograph(view.image, gallery.span)
    masks = [one.labels for one in view.annotations]
    lines = pictures.over(image, pictures.outlines(masks, distinct(len(masks)), 4))
    readers = [(image, "image"), (lines, "outlines")]
    for one in view.annotations[:_MASKS]:
        readers.append((pictures.mask(one.labels, gallery.colours, view.valid), f"{100 * one.weight:.0f} %"))
    rows = [("readers", readers)]
    for samples in view.samples:
        label = "samples"
        if samples.stratum is not None:
            label = f"{stratum} {samples.stratum + 1}\n{100 * samples.weight:.0f} %"
        tiles = [(pictures.mask(mask, gallery.colours), "") for mask in samples.masks]
        rows.append((label, [*tiles, (samples.mean, "")]))
    maps = {"readers": view.disagreement, "prediction": view.entropy}
    return [*rows, ("entropy", [(pictures.heat(values, MAX_ENTROPY), name) for name, values in maps.items()])]


def _mode_rows(gallery: Gallery, found: ModeMatches, stratum: str) -> list[Row]:
    """The most likely modes, each above a sample of the stratum that is matched with it."""
    rows, matches = [], found.matches[:_MODES]
    for start in range(0, len(matches), 8):
        part = matches[start : start + 8]
        truth = [(pictures.mask(m.truth, gallery.colours, found.valid), f"{100 * m.probability:.1f} %") for m in part]
        drawn = [(pictures.mask(m.mask, gallery.colours), f"{100 * m.weight:.1f} %") for m in part]
        rows += [("modes", truth), (f"{stratum}s", drawn)]
    return rows


def _panel(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    image = rows[0][1][0][0]
    tall = _TILE * image.shape[0] / image.shape[1]
    heights = [tall + _GAP + _CAPTION * any(caption for _, caption in tiles) for _, tiles in rows]
    width = _LABEL + max(len(tiles) for _, tiles in rows) * (_TILE + _GAP)
    height = top = sum(heights) + _GAP
    figure = Figure((width, height))
    for (label, tiles), room in zip(rows, heights, strict=True):
        bottom = top - _GAP - tall
        figure.text((_LABEL - 0.08) / width, (bottom + tall / 2) / height, label, ha="right", va="center", size=8)
        for column, (pixels, caption) in enumerate(tiles):
            left = _LABEL + column * (_TILE + _GAP)
            axes = figure.add_axes((left / width, bottom / height, _TILE / width, tall / height))
            axes.imshow(pixels, interpolation="nearest", aspect="auto")
            axes.set_axis_off()
            place = (left + _TILE / 2) / width, (bottom - 0.03) / height
            figure.text(*place, caption, ha="center", va="top", size=7)
        top -= room
    return figure
