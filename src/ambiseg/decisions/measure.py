"""Measurements of every mask, and with the masks' weights their distributions: is it there, how large, how many.

``MEASURES`` has them by name; :func:`measure` applies one of them, or any function of a mask, to every mask.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.bits import equal
from ambiseg.decisions.objects import measure_objects
from ambiseg.masks import MaskDistribution, Masks, as_masks

Spacing: TypeAlias = tuple[float, ...] | None
"""Millimetres from pixel to pixel along each axis, slices first; ``None``: unknown, results are in pixels."""

Function: TypeAlias = "Callable[[np.ndarray, Spacing], np.ndarray]"
"""``[N, *spatial]`` bool, of one class, and the spacing -> ``[N]`` numbers."""

_LABELS = 1 << 26  # pixels of masks that are measured at a time


@dataclass(frozen=True, eq=False)
class Measurement:
    """One number of every mask, with the masks' weights: its distribution.

        F(x) = Σ_i weights[b, i] · [values[b, i] ≤ x]

    Attributes:
        what: a key of ``MEASURES``, or the name of the function.
        of: id of the class that is measured.
        unit: of the values; empty for counts and shares.
        values: ``[B, N]`` float64; nan: a mask without a value, which is left out of everything.
        weights: ``[B, N]`` float64, of rows that sum to 1, or to 0 where no mask has a value.

    >>> area = Measurement("size", 1, "mm²", torch.tensor([[0.0, 10, 20]]), torch.tensor([[0.25, 0.25, 0.5]]))
    >>> area.mean.tolist(), area.quantile(0.5).tolist(), area.interval(0.5).tolist()
    ([12.5], [10.0], [[0.0, 20.0]])
    """

    what: str
    of: int
    unit: str
    values: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        values, weights = self.values.detach().cpu().double(), self.weights.detach().cpu().double()
        if (missing := values.isnan()).any():
            weights = weights.masked_fill(missing, 0)
        total = weights.sum(1, keepdim=True)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weights", weights / total.masked_fill(total == 0, 1))

    def __len__(self) -> int:
        """Number of images."""
        return len(self.values)

    @property
    def mean(self) -> Tensor:
        """``[B]``"""
        return self._empty(torch.where(self.weights > 0, self.values * self.weights, 0).sum(1))

    @property
    def sd(self) -> Tensor:
        """Standard deviation of the distribution, ``[B]``."""
        apart = (self.values - self.mean[:, None]) ** 2
        return self._empty(torch.where(self.weights > 0, apart * self.weights, 0).sum(1)).sqrt()

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The smallest value x with F(x) ≥ q, ``[B]``; of several, ``[B, Q]``."""
        some = torch.as_tensor(q, dtype=torch.float64)
        if not bool(((some >= 0) & (some <= 1)).all()):
            raise ValueError(f"q must be in [0, 1], found {q}")
        values, order = torch.where(self.weights > 0, self.values, torch.inf).sort(1)
        reached = self.weights.gather(1, order).cumsum(1)
        wanted = some.reshape(1, -1).expand(len(self), -1) - 1e-6  # weights are of 32 bits
        place = torch.searchsorted(reached, wanted.contiguous()).clamp_max(values.shape[1] - 1)
        found = values.gather(1, place)
        found = torch.where((self.weights.sum(1) > 0)[:, None], found, torch.nan)
        return found[:, 0] if some.ndim == 0 else found

    def interval(self, level: float = 0.9) -> Tensor:
        """The central interval: quantiles (1 − level)/2 and (1 + level)/2, ``[B, 2]``."""
        return self.quantile([(1 - level) / 2, (1 + level) / 2])

    def probability(self, above: float = 0.0) -> Tensor:
        """P(value > above), ``[B]``."""
        return self._empty(torch.where(self.values > above, self.weights, 0).sum(1))

    def histogram(self, bins: int = 10, image: int = 0) -> tuple[Tensor, Tensor]:
        """Edges ``[bins + 1]`` from the smallest to the largest value of an image, and the weight in each bin.

        >>> one = Measurement("size", 1, "", torch.tensor([[0.0, 1, 4]]), torch.tensor([[0.25, 0.25, 0.5]]))
        >>> [part.tolist() for part in one.histogram(2)]
        [[0.0, 2.0, 4.0], [0.5, 0.5]]
        """
        there = self.weights[image] > 0
        values, weights = self.values[image, there].numpy(), self.weights[image, there].numpy()
        mass, edges = np.histogram(values, bins, weights=weights)
        return torch.from_numpy(edges), torch.from_numpy(mass.astype(np.float64))

    def summary(self, image: int = 0, level: float = 0.9) -> dict[str, Any]:
        """Mean, deviation, median and interval of an image, for JSON; ``None`` stands for no value."""
        one = Measurement(self.what, self.of, self.unit, self.values[image, None], self.weights[image, None])
        low, high = one.interval(level)[0].tolist()
        found = {"mean": float(one.mean), "sd": float(one.sd), "median": float(one.quantile(0.5))}
        found |= {"low": low, "high": high}
        numbers = {name: None if value != value else value for name, value in found.items()}
        return {"what": self.what, "unit": self.unit, **numbers, "level": level}

    def _empty(self, values: Tensor) -> Tensor:
        return torch.where(self.weights.sum(1) > 0, values, torch.nan)


class Measure(NamedTuple):
    """How a mask is measured, and the unit of it: by the number of axes of the masks, with a spacing and without."""

    title: str
    function: Function  # may return several rows
    units: tuple[str, str, str, str]  # images in mm, images in pixels, volumes in mm, volumes in pixels
    row: int = 0

    def unit(self, ndim: int, spacing: Spacing) -> str:
        """Of masks with 2 or 3 axes."""
        return self.units[2 * (ndim - 2) + (spacing is None)]


def measure(
    masks: Masks, what: str | Function = "size", of: int = 1, spacing: Sequence[float] | None = None
) -> Measurement:
    """One number of every mask.

    Args:
        masks: N masks per image. Void pixels are in no object.
        what: a key of ``MEASURES``, or a function of ``[N, *spatial]`` bool masks and the spacing -> ``[N]``.
        of: id of the class that is measured; every other class is outside.
        spacing: millimetres from pixel to pixel along each axis, slices first.

    The measures are

    - ``presence``: 1 where the mask has a pixel of the class; its mean is the probability of the class.
    - ``size``: the area of an image in mm², the volume of a volume in ml; without a spacing, the number of pixels.
    - ``diameter``: the longest distance between two points of the outline of one object, where pixels are squares; the
      longest of all objects, and of all slices of a volume, as in RECIST.
    - ``width``: the longest chord of the convex hull of that object at a right angle to the diameter, in that slice.
    - ``components``: objects that touch nowhere, not even at a corner.

    All are 0 for a mask without the class, so that the distribution says how likely that is.

    >>> masks = MaskDistribution(torch.tensor([[[[0, 1, 1, 1]], [[0, 0, 0, 0]]]]), torch.tensor([[0.75, 0.25]]))
    >>> measure(masks, "size", spacing=(0.5, 0.5)).mean.tolist()
    [0.5625]
    >>> measure(masks, lambda labels, spacing: labels[..., 0].any(-1)).values.tolist()
    [[0.0, 0.0]]
    """
    if isinstance(what, str):
        return measure_all(masks, (of,), spacing, (what,))[0]
    masks, name = as_masks(masks), getattr(what, "__name__", "function")
    known = None if spacing is None else _spacing(spacing, len(masks.spatial))
    values = [np.asarray(what(_of_class(masks, b, of), known), np.float64) for b in range(len(masks))]
    for found in values:
        if found.shape != (masks.count,):
            raise ValueError(f"{name} must return [{masks.count}] numbers, found shape {list(found.shape)}")
    return Measurement(name, of, "", torch.from_numpy(np.stack(values)), masks.mass)


def measure_all(
    masks: Masks,
    classes: Sequence[int] = (1,),
    spacing: Sequence[float] | None = None,
    what: Sequence[str] | None = None,
) -> list[Measurement]:
    """Several measures of several classes, class by class; all of ``MEASURES`` unless ``what`` names some.

    >>> [f"{one.what} {one.mean.item():g}" for one in measure_all(torch.tensor([[[[1, 0, 1]], [[0, 1, 1]]]]))]
    ['presence 1', 'size 2', 'diameter 1.82514', 'width 1.26612', 'components 1.5']
    """
    masks, names = as_masks(masks), tuple(MEASURES) if what is None else tuple(what)
    ndim = len(masks.spatial)
    known = None if spacing is None else _spacing(spacing, ndim)
    for name in names:
        if name not in MEASURES:
            raise ConfigError(f"measure: expected some of {', '.join(MEASURES)}, found {name!r}")
    functions = {MEASURES[name].function for name in names}  # each is called once, whatever number of rows it has
    step = max(1, _LABELS // masks.spatial.numel())
    found: list[Measurement] = []
    for of in classes:
        parts: list[dict[Any, np.ndarray]] = []
        for b, (first, which) in enumerate(equal(masks)):  # draws are often equal
            pieces = []
            for start in range(0, len(first), step):
                drawn = _cropped(_of_class(masks, b, of, first[start : start + step]))
                pieces.append({each: np.atleast_2d(each(drawn, known)) for each in functions})
            parts.append({each: np.hstack([piece[each] for piece in pieces])[:, which] for each in functions})
        for name in names:
            rule = MEASURES[name]
            values = torch.from_numpy(np.stack([part[rule.function][rule.row] for part in parts]))
            found.append(Measurement(name, of, rule.unit(ndim, known), values, masks.mass))
    return found


def _spacing(spacing: Sequence[float], ndim: int) -> tuple[float, ...]:
    found = tuple(float(step) for step in spacing)
    if len(found) != ndim or not all(0 < step < np.inf for step in found):
        raise ConfigError(f"spacing: expected {ndim} positive numbers, found {', '.join(map(str, found)) or 'none'}")
    return found


def _of_class(masks: MaskDistribution, b: int, of: int, some: np.ndarray | slice = slice(None)) -> np.ndarray:
    """``[N, *spatial]`` bool: where some masks of image b have the class."""
    found = masks.labels[b].cpu().numpy()[some] == of
    if masks.valid is not None:
        found &= masks.valid[b].cpu().numpy()
    return found


def _cropped(found: np.ndarray) -> np.ndarray:
    """The box around what any of the masks has; one pixel where there is nothing."""
    anywhere = found.any(0)
    box = []
    for axis in range(anywhere.ndim):
        others: Any = tuple(a for a in range(anywhere.ndim) if a != axis)
        there = np.flatnonzero(anywhere.any(others))
        box.append(slice(there[0], there[-1] + 1) if len(there) else slice(0, 1))
    return found[(slice(None), *box)]


# -- the measures ------------------------------------------------------------------------------------------------------


def _presence(masks: np.ndarray, spacing: Spacing) -> np.ndarray:
    return np.asarray(masks.reshape(len(masks), -1).any(1))


def _size(masks: np.ndarray, spacing: Spacing) -> np.ndarray:
    packed = np.packbits(masks.reshape(len(masks), -1), axis=1)  # counted faster than single pixels
    pixels = np.bitwise_count(packed).sum(1, dtype=np.float64)
    if spacing is None:
        return pixels
    return pixels * np.prod(spacing) / (1000 if masks.ndim == 4 else 1)  # a millilitre is 1000 mm³


def _objects(masks: np.ndarray, spacing: Spacing) -> np.ndarray:
    return measure_objects(masks, *((1.0, 1.0) if spacing is None else spacing[-2:]))


MEASURES: dict[str, Measure] = {
    "presence": Measure("present", _presence, ("", "", "", "")),
    "size": Measure("area or volume", _size, ("mm²", "pixels", "ml", "pixels")),
    "diameter": Measure("longest diameter", _objects, ("mm", "pixels", "mm", "pixels")),
    "width": Measure("width across the diameter", _objects, ("mm", "pixels", "mm", "pixels"), row=1),
    "components": Measure("number of objects", _objects, ("", "", "", ""), row=2),
}
"""The measures by name."""


def table(measurements: Sequence[Measurement], names: Sequence[str], image: int = 0) -> str:
    """One row per mask, as CSV: its number, its weight and its measurements; a cell without a value is empty.

    Args:
        measurements: of the same masks.
        names: of the classes.
        image: which of the images.

    >>> masks = torch.tensor([[[[0, 1]], [[1, 1]]]])
    >>> print(table(measure_all(masks, what=["presence", "size"]), ["background", "lesion"]), end="")
    mask,weight,lesion presence,lesion size (pixels)
    0,0.5,1.0,1.0
    1,0.5,1.0,2.0
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    units = [f" ({one.unit})" if one.unit else "" for one in measurements]
    titles = [f"{names[one.of]} {one.what}{unit}" for one, unit in zip(measurements, units, strict=True)]
    writer.writerow(["mask", "weight", *titles])
    if measurements:
        columns = [["" if value != value else value for value in one.values[image].tolist()] for one in measurements]
        weights = [round(weight, 9) for weight in measurements[0].weights[image].tolist()]
        writer.writerows([i, *row] for i, row in enumerate(zip(weights, *columns, strict=True)))
    return text.getvalue()
