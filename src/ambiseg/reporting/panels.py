"""Cases as figures for papers: rows of small pictures with labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ambiseg.evaluation.results import Evaluation
from ambiseg.reporting.figures import Figures, strata_colours
from ambiseg.reporting.gallery import MAX_ENTROPY, CaseView, Gallery
from ambiseg.reporting.modes import ModeMatches
from ambiseg.viz import pictures
from ambiseg.viz.colours import distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TILE, _GAP, _LABEL, _CAPTION = 0.85, 0.05, 0.75, 0.2  # inches
_MASKS, _MODES = 6, 16  # of readers, and modes in rows of eight
Row = tuple[str, list[tuple[np.ndarray, str]]]  # a label, and pictures with their captions


def save_cases(gallery: Gallery, evaluation: Evaluation, figures: Figures) -> None:
    """The example and the first case of each kind as ``case-<kind>.png`` and ``.svg``; of modes also ``mode-pairs``."""
    stratum = evaluation.strata.name if evaluation.strata else ""
    shown = {"example": [gallery.example] if gallery.example else [], **gallery.chosen}
    for kind, names in shown.items():
        if names:
            figures.save(_panel(_case_rows(gallery, gallery.views[names[0]], evaluation)), f"case-{kind}")
    for name, matches in list(gallery.matches.items())[:1]:
        image = pictures.photograph(gallery.views[name].image, gallery.views[name].span)
        figures.save(_panel([("image", [(image, "")]), *_mode_rows(gallery, matches, stratum)]), "mode-pairs")


def _case_rows(gallery: Gallery, view: CaseView, evaluation: Evaluation) -> list[Row]:
    """Image and annotations, then a row for each stratum, entropy last."""
    image, small = (pictures.photograph(view.image, view.span, side) for side in (pictures.LARGE, pictures.SMALL))
    masks = [one.labels for one in view.annotations]
    two, tones = len(gallery.colours) == 2, distinct(len(masks))
    strata = evaluation.strata

    def laid(labels: np.ndarray, tone: str, valid: np.ndarray | None = None) -> np.ndarray:
        colours = [gallery.colours[0], tone] if two else gallery.colours
        lines = pictures.laid(labels, colours, valid, ground=gallery.ground, fill=0.35 if two else 0.6)
        return pictures.over(small, lines)

    drawn = [(image, "image"), (pictures.over(image, pictures.outlines(masks, tones, 4)), "outlines")]
    for one, tone in zip(view.annotations[:_MASKS], tones, strict=False):
        drawn.append((laid(one.labels, tone, view.valid), f"{100 * one.weight:.0f} %"))
    rows = [(f"{evaluation.annotator}s", drawn)]
    bright = strata_colours(strata.mean if strata else [])
    for samples in view.samples:
        label, tone = "samples", "#ffffff"
        if samples.stratum is not None and strata is not None:
            label = f"{strata.name} {samples.stratum + 1}\n{100 * samples.weight:.0f} %"
            tone = bright[samples.stratum][1]
        tiles = [(laid(mask, tone), "") for mask in samples.masks]
        rows.append((label, [*tiles, (pictures.over(small, pictures.soft(samples.mean, tone if two else None)), "")]))
    maps = {f"{evaluation.annotator}s": view.disagreement, "prediction": view.entropy}
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
