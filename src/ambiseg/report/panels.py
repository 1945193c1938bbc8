"""Cases as figures for papers: rows of small pictures with labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ambiseg.evaluation.results import Evaluation
from ambiseg.report.cards import Card, Tile, make_card, mode_tiles
from ambiseg.report.figures import Figures
from ambiseg.report.gallery import Gallery
from ambiseg.viz import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TILE, _GAP, _LABEL, _CAPTION = 0.85, 0.05, 0.75, 0.2  # inches
_MASKS, _MODES = 6, 16  # readers' masks, and modes in rows of eight
Rows = Sequence[tuple[str, Sequence[Tile]]]


def save_cases(gallery: Gallery, evaluation: Evaluation, key: str, figures: Figures) -> None:
    """The first case of each kind as ``case-<kind>.png`` and ``.svg``; of known modes also ``mode-pairs``."""
    for kind, names in gallery.chosen.items():
        if names:
            card = make_card(gallery, names[0], evaluation, key)
            rows = [("readers", [*card.photographs, *card.masks[:_MASKS]])]
            rows += [(f"{row.label}\n{row.weight}".strip(), row.tiles) for row in card.rows]
            figures.save(_panel([*rows, ("entropy", card.maps)], card), f"case-{kind}")
    for name, _, matches in list(mode_tiles(gallery, evaluation, _MODES))[:1]:
        card = make_card(gallery, name, evaluation, key)
        pairs = [tiles for _, _, tiles in matches]
        figures.save(_panel([("image", card.photographs[:1]), *_pair_rows(pairs, evaluation)], card), "mode-pairs")


def _pair_rows(pairs: Sequence[Sequence[Tile]], evaluation: Evaluation) -> Iterator[tuple[str, list[Tile]]]:
    for start in range(0, len(pairs), 8):
        modes, strata = zip(*pairs[start : start + 8], strict=True)
        yield "modes", list(modes)
        yield f"{evaluation.strata.name}s" if evaluation.strata else "", list(strata)


def _panel(rows: Rows, card: Card) -> Figure:
    from matplotlib.figure import Figure

    photograph = card.photographs[0].pixels
    tall = _TILE * photograph.shape[0] / photograph.shape[1]
    heights = [tall + _GAP + _CAPTION * any(tile.caption for tile in tiles) for _, tiles in rows]
    width = _LABEL + max(len(tiles) for _, tiles in rows) * (_TILE + _GAP)
    height = top = sum(heights) + _GAP
    figure = Figure((width, height))
    for (label, tiles), room in zip(rows, heights, strict=True):
        middle = (top - _GAP - tall / 2) / height
        figure.text((_LABEL - 0.08) / width, middle, label, ha="right", va="center", size=8)
        for column, tile in enumerate(tiles):
            left, bottom = _LABEL + column * (_TILE + _GAP), top - _GAP - tall
            axes = figure.add_axes((left / width, bottom / height, _TILE / width, tall / height))
            pixels = pictures.over(photograph, tile.pixels) if tile.over else tile.pixels
            axes.imshow(pixels, interpolation="nearest", aspect="auto")
            axes.set_axis_off()
            place = (left + _TILE / 2) / width, (bottom - 0.03) / height
            figure.text(*place, tile.caption, ha="center", va="top", size=7)
        top -= room
    return figure
