"""One page about one prediction for whoever decides: one outline, the readings that matter, sizes, whether to look.

Of a volume, sizes are those of the whole, and pictures show the slice of which the one outline marks most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.files import write_text
from ambiseg.decisions.measure import MEASURES, Measurement, measure_all
from ambiseg.masks import MaskDistribution
from ambiseg.prediction.looking import reasons, verdict
from ambiseg.prediction.result import Prediction
from ambiseg.viz import pictures
from ambiseg.viz.colours import distinct, label_colours
from ambiseg.viz.page import number, render

READINGS = 3  # of the masks, that are shown
_MEASURED = ("size", "diameter")
_LEVEL, _BINS = 0.9, 24
_MUCH = 0.25  # of an image
_CLASSES = 6  # whose numbers are shown; weights.json has all


@dataclass(frozen=True)
class Line:
    """A measurement in words, of the readings with the class: the middle value, between which two values nine of ten
    are (none where all are equal), a histogram."""

    title: str
    middle: str
    low_and_high: tuple[str, str] | None
    bars: list[tuple[float, float, float, bool]]  # left, width, height in per cent; within the interval
    ends: tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """What is said of one class."""

    name: str
    present: float
    lines: list[Line]
    checked: tuple[str, str] | None = None  # area that holds a reader's, by the calibration


@dataclass(frozen=True)
class Bound:
    """What the calibration says of a class: a picture, unless there is nothing to draw, and a sentence."""

    name: str
    picture: str | None
    text: str


@dataclass(frozen=True)
class Reading:
    """One of the masks that stand for all."""

    picture: str
    weight: float
    text: str


def write_page(prediction: Prediction, path: Path) -> None:
    """Write the page as one HTML file, which needs no network."""
    write_text(path, page(prediction))


def page(prediction: Prediction) -> str:
    """The page as HTML.

    >>> from ambiseg import predict
    >>> [one] = predict("demo", "sample")
    >>> html = page(one)
    >>> "Readings that matter" in html, "http" in html
    (True, False)
    """
    best = prediction.decisions.consensus(["dice"])["dice"]
    k = _slice(best.labels[0]) if prediction.source.slices > 1 else None
    show = _Show(prediction, k)
    found = prediction.decisions.fewer(READINGS)
    findings = list(_findings(prediction))
    return render(
        "ambiseg.prediction",
        "page.html",
        prediction=prediction,
        slice=k,
        verdict=verdict(prediction.look),
        reasons=list(reasons(prediction.look)),
        outline=show.lines([best.labels[0]]),
        agreement=float(best.expected_dice[0]),
        findings=findings[:_CLASSES],
        hidden=max(0, len(findings) - _CLASSES),
        readings=list(_readings(prediction, found, show)),
        bounds=list(_bounds(prediction, show)),
        legend=_legend(prediction),
        today=date.today().isoformat(),
    )


class _Show:
    """Pictures of the image, or of one slice of a volume."""

    def __init__(self, prediction: Prediction, k: int | None) -> None:
        self.k = k
        self.photo = pictures.photograph(prediction.source.read(k or 0))
        self.colours = label_colours(max(2, len(prediction.classes)))

    def lines(self, masks: Sequence[Tensor | np.ndarray], colours: Sequence[str] | None = None) -> str:
        """The image with outlines of masks; a single one of several classes is tinted as well."""
        shown = [np.asarray(mask if self.k is None else mask[self.k]) for mask in masks]
        if colours is None:
            laid = pictures.laid(shown[0], self.colours, fill=0.12, side=pictures.LARGE)
        else:
            laid = pictures.outlines(shown, colours, 3)
        return pictures.photo_uri(pictures.over(self.photo, laid))


def _slice(labels: Tensor) -> int:
    """Of a volume the slice of which a mask marks most; the middle one where it marks none."""
    marked = (labels > 0).flatten(1).sum(1)
    return int(marked.argmax()) if bool(marked.any()) else len(labels) // 2


# -- what is there -----------------------------------------------------------------------------------------------------


def _findings(prediction: Prediction) -> Iterator[Finding]:
    """Of every class that any mask has, or of the first one; the most probable first."""
    measured = prediction.decisions.measures(("presence", *_MEASURED))
    width = 1 + len(_MEASURED)
    of_class = {one.of: measured[i * width : (i + 1) * width] for i, one in enumerate(measured[::width])}
    order = sorted(of_class, key=lambda c: -float(of_class[c][0].mean))
    shown = [c for c in order if float(of_class[c][0].mean) > 0] or order[:1]
    checked = _checked_areas(prediction)
    for c in shown:
        presence, *rest = of_class[c]
        lines = [_line(one) for one in rest]
        yield Finding(prediction.classes[c], float(presence.mean), lines, checked.get(c))


def _line(one: Measurement) -> Line:
    there = torch.where(one.values > 0, one.values, torch.nan)  # the readings without it are counted above
    one = replace(one, values=there if bool((one.values > 0).any()) else one.values)
    low, high = one.interval(_LEVEL)[0].tolist()
    unit = f" {one.unit}" if one.unit else ""
    edges, mass = one.histogram(_BINS)
    top, span = max(float(mass.max()), 1e-9), max(float(edges[-1] - edges[0]), 1e-9)
    bars = []
    for left, right, weight in zip(edges[:-1].tolist(), edges[1:].tolist(), mass.tolist(), strict=True):
        inside = right >= low and left <= high
        bars.append((100 * (left - float(edges[0])) / span, 100 / _BINS, 100 * weight / top, inside))
    title = {"size": "volume" if one.unit == "ml" else "area"}.get(one.what, MEASURES[one.what].title)
    middle = float(one.quantile(0.5))
    ends = f"{_short(float(edges[0]))}", f"{_short(float(edges[-1]))}{unit}"
    between = (_short(low), f"{_short(high)}{unit}") if high > low else None
    return Line(title, f"{_short(middle)}{unit}", between, bars if between else [], ends if between else ("", ""))


def _short(value: float) -> str:
    """Three digits are enough for a reader.

    >>> _short(0.04567), _short(12.345), _short(1234.4), _short(32)
    ('0.046', '12.3', '1,234', '32')
    """
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return number(value, 3 if abs(value) < 0.1 else 2 if abs(value) < 1 else 1)


def _checked_areas(prediction: Prediction) -> dict[int, tuple[str, str]]:
    """The areas of the calibration by class, in mm² where pixels have a size."""
    if prediction.guaranteed is None:
        return {}
    steps = prediction.source.spacing
    each, unit = (steps[0] * steps[1], "mm²") if steps else (1.0, "pixels")
    return {
        one.id: (_short(each * one.area[0]), f"{_short(each * one.area[1])} {unit}")
        for one in prediction.guaranteed.classes
    }


# -- pictures ----------------------------------------------------------------------------------------------------------


def _readings(prediction: Prediction, found: MaskDistribution, show: _Show) -> Iterator[Reading]:
    classes = range(1, len(prediction.classes))
    sizes = measure_all(found, classes, prediction.source.spacing, ("size",))
    for i, (weight, labels) in enumerate(zip(found.mass[0].tolist(), found.labels[0], strict=True)):
        if weight <= 0:
            continue
        marked = [(prediction.classes[one.of], float(one.values[0, i]), one.unit) for one in sizes]
        named = len(marked) > 1
        said = [f"{name if named else 'marks'} {_short(size)} {unit}" for name, size, unit in marked if size]
        text = ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")
        yield Reading(show.lines([labels]), weight, text or "marks nothing")


def _bounds(prediction: Prediction, show: _Show) -> Iterator[Bound]:
    """For each class of the calibration. An outer mask of much of the image rules out too little to show."""
    if prediction.guaranteed is None:
        return
    inner, outer = distinct(2)
    for one in prediction.guaranteed.classes:
        masks = [np.asarray(one.outer, np.uint8), np.asarray(one.inner, np.uint8)]
        said = []
        if one.outer.mean() > _MUCH:
            masks[0][:] = 0
            said.append("nothing is ruled out in much of the image")
        else:
            said.append(
                "all that they mark lies within the outer outline (blue)" if one.outer.any() else "none marks it"
            )
        said.append("all mark what is in the inner outline (orange)" if one.inner.any() else "no part is marked by all")
        drawn = any(mask.any() for mask in masks)
        yield Bound(one.name, show.lines(masks, [outer, inner]) if drawn else None, "; ".join(said) + ".")


def _legend(prediction: Prediction) -> list[tuple[str, str]]:
    names, colours = prediction.classes, label_colours(max(2, len(prediction.classes)))
    return list(zip(names[1:], colours[1:], strict=False)) if len(names) > 2 else []
