"""Cases as rows of small pictures, for the page and for figures: the readers' masks, and a row for each stratum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ambiseg._util.text import count
from ambiseg.evaluation.results import Evaluation
from ambiseg.report.figures import coloured_strata
from ambiseg.report.gallery import KINDS, CaseView, Gallery, Samples
from ambiseg.viz import pictures
from ambiseg.viz.colours import BRIGHT, SERIES, VARIABLES, distinct
from ambiseg.viz.page import number

MAX_ENTROPY = math.log(2)  # nats: two classes as likely as each other
_SCORES = {"ged": "GED", "ged_unbiased": "unbiased", "matched_iou": "matched IoU"} | {
    name: name for name in ("diversity", "entropy")
}


@dataclass(frozen=True, eq=False)
class Tile:
    """A picture with a caption, and a text for those who cannot see it."""

    pixels: np.ndarray  # [h, w, 3], or [h, w, 4] to lay over the image of the case
    alt: str
    caption: str = ""
    photo: bool = False
    empty: bool = False
    ring: str = ""  # colour of its outline in another picture

    @property
    def over(self) -> bool:
        """Whether it is laid over the image of the case."""
        return self.pixels.shape[-1] == 4

    @property
    def source(self) -> str:
        """The picture for a page."""
        return pictures.data_uri(self.pixels)


@dataclass(frozen=True, eq=False)
class Row:
    """The masks of a stratum, or of a method without: most likely outline, samples, mean of their probabilities."""

    label: str
    weight: str
    width: str  # of a bar that shows the weight
    colour: str
    tiles: Sequence[Tile]


@dataclass(frozen=True, eq=False)
class Card:
    """One case on the page. Its photograph and outlines, masks of readers, maps of entropy, and rows of samples."""

    place: str
    name: str
    about: str
    scores: str
    photographs: Sequence[Tile]
    masks: Sequence[Tile]
    more_masks: str
    maps: Sequence[Tile]
    rows: Sequence[Row]
    more_rows: str
    samples: int

    @property
    def aspect(self) -> str:
        """Width and height as CSS."""
        height, width = self.photographs[0].pixels.shape[:2]
        return f"{width}/{height}"

    @property
    def landscape(self) -> bool:
        """Whether there is no room for anything beside it."""
        height, width = self.photographs[0].pixels.shape[:2]
        return width > 1.4 * height


@dataclass(frozen=True)
class Link:
    """A case that is shown elsewhere on the page."""

    place: str
    name: str
    scores: str
    title: str  # of the kind that it is shown under


def make_cards(gallery: Gallery, evaluation: Evaluation, key: str) -> Iterator[tuple[str, str, list[Card | Link]]]:
    """Title, explanation and cases of each kind. A case of two kinds is drawn once, and linked from the other."""
    drawn: dict[str, Link] = {}
    for kind, (title, text) in KINDS.items():
        cases: list[Card | Link] = []
        for i, name in enumerate(gallery.chosen[kind], 1):
            if name in drawn:
                cases.append(drawn[name])
            else:
                card = make_card(gallery, name, evaluation, key, f"case-{kind}-{i}")
                drawn[name] = Link(card.place, name, card.scores, title)
                cases.append(card)
        yield title, text, cases


def make_card(gallery: Gallery, name: str, evaluation: Evaluation, key: str, place: str = "") -> Card:
    """One case; ``place`` is its id on the page."""
    view, modes = gallery.views[name], evaluation.modes is not None
    tones = distinct(len(view.annotations))
    scores = [(label, view.scores.scores[key].get(metric)) for metric, label in _SCORES.items()]
    rest = 1 - sum(one.weight for one in view.annotations)
    hidden, weight = view.hidden
    stratum = evaluation.strata.name if evaluation.strata else ""
    readers, total = view.scores.readers, view.scores.readers_total
    return Card(
        place=place,
        name=name,
        about=f"{total} modes" if modes else f"{readers} of {total} readers drew something",
        scores=" · ".join(f"{label} {number(value)}" for label, value in scores if value is not None) or "no score",
        photographs=[
            Tile(pictures.photograph(view.image, gallery.span), f"{name}: the image", "image", photo=True),
            Tile(
                pictures.outlines([one.labels for one in view.annotations], tones, 4),
                f"{name}: the image with the readers' outlines",
                "outlines" if modes else "readers' outlines",
                photo=True,
            ),
        ],
        # Modes differ in their classes and have one outline.
        masks=[
            _mask(one.labels, gallery.colours, f"{name}: mask of {_frequency(view, i)}", _frequency(view, i),
                  view.valid, "" if modes else tone)
            for i, (one, tone) in enumerate(zip(view.annotations, tones, strict=True))
        ],
        more_masks=f"and other masks with {100 * rest:.0f} % of the weight" if rest > 0.005 else "",
        maps=[
            Tile(pictures.heat(values, MAX_ENTROPY), f"{name}: entropy of {of}", f"entropy, {of}")
            for values, of in ((view.disagreement, "readers"), (view.entropy, "prediction"))
        ],
        rows=[_row(name, samples, gallery.colours, evaluation) for samples in view.samples],
        more_rows=f"and {count(hidden, stratum)} more with {100 * weight:.1f} % of the weight" if hidden else "",
        samples=len(view.samples[0].masks),
    )  # fmt: skip


def _row(name: str, samples: Samples, colours: Sequence[str], evaluation: Evaluation) -> Row:
    label, who, weight, tone, bright = "all samples", "the model", "", "var(--others)", "#ffffff"
    if samples.stratum is not None and evaluation.strata is not None:
        label = f"{evaluation.strata.name} {samples.stratum + 1}"
        who, weight = f"{label}, weight {100 * samples.weight:.0f} %", _percent(samples.weight)
        coloured = coloured_strata(evaluation.strata.mean)
        if samples.stratum in coloured:
            rank = coloured.index(samples.stratum)
            # Lines over an image are in the colours of the dark page, which stand out from grey pixels.
            tone, bright = f"var({VARIABLES[SERIES[rank]]})", BRIGHT[rank]
    lines = pictures.outlines([samples.most_likely], [bright], 5)
    return Row(label, weight, f"{100 * samples.weight:.1f}%", tone, [
        Tile(lines, f"{name}: most likely outline of {who}", photo=True, empty=not samples.most_likely.any()),
        *(_mask(mask, colours, f"{name}: sample {i} of {who}") for i, mask in enumerate(samples.masks, 1)),
        Tile(samples.mean, f"{name}: mean probability of {who}"),
    ])  # fmt: skip


def _mask(
    labels: np.ndarray, colours: Sequence[str], alt: str, caption: str = "", valid: np.ndarray | None = None,
    ring: str = "",
) -> Tile:  # fmt: skip
    empty = not (labels if valid is None else labels * valid).any()
    return Tile(
        pictures.mask(labels, colours, valid), alt + (", empty" if empty else ""), caption, empty=empty, ring=ring
    )


def _frequency(view: CaseView, index: int) -> str:
    annotation, total = view.annotations[index], view.scores.readers_total
    return f"{annotation.readers} of {total}" if view.equal_readers and total else _percent(annotation.weight)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"


def mode_tiles(gallery: Gallery, evaluation: Evaluation, most: int) -> Iterator[tuple[str, str, list]]:
    """Per case its name, a text, and the most likely modes: flips, IoU, and tiles of the mode and of its stratum."""
    stratum = evaluation.strata.name if evaluation.strata else ""
    names = [flip.to for flip in evaluation.modes.flips] if evaluation.modes else []
    for case, found in gallery.matches.items():
        shown, (spare, weight) = [], found.spare
        for match in found.matches[:most]:
            p, w, who = (
                f"{100 * match.probability:.1f} %",
                f"{100 * match.weight:.1f} %",
                f"{stratum} {match.stratum + 1}",
            )
            flipped = ", ".join(name for name, bit in zip(names, match.flips, strict=False) if bit == "1")
            truth = Tile(
                pictures.mask(match.truth, gallery.colours, found.valid),
                f"{case}: mode {match.flips}, probability {p}", f"{p} mode",
            )  # fmt: skip
            alt = f"{case}: {who}, weight {w}, matched with mode {match.flips}"
            mask = Tile(pictures.mask(match.mask, gallery.colours), alt, f"{w} {who}")
            shown.append((flipped or "nothing flipped", number(match.iou, 2), [truth, mask]))
        text = f"{found.modes} modes"
        if hidden := len(found.matches) - len(shown):
            text += f"; {hidden} less likely pairs are not shown"
        if spare:
            text += f"; {count(spare, stratum)} without a mode, with {100 * weight:.1f} % of the weight"
        yield case, text, shown
