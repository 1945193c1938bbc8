"""DICOM RTSTRUCT as the mask of one reader: contours in millimetres as pixels of the slices they were drawn on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ambiseg._util.text import count
from ambiseg.io.dicom_files import read_header
from ambiseg.io.errors import FileError
from ambiseg.io.planes import Planes
from ambiseg.io.rois import choose, mask_source, planes_of
from ambiseg.io.source import ReadOptions, Source, guard, judge

_TAGS: list[Any] = [
    *("SpecificCharacterSet", "Modality", "StructureSetROISequence", "ROIContourSequence"),
    "ReferencedFrameOfReferenceSequence",
]
_BYTES = 256 << 20  # of a file
_CONTOURS, _POINTS, _CROSSINGS = 1 << 16, 1 << 23, 1 << 26  # of all contours that are read
_AT_ONCE = 1 << 22  # crossings of edges and rows
_AREAS = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")
_DIGITS = 4  # of a pixel: coordinates in millimetres are rounded to about as many


class _Contour(NamedTuple):
    structure: int
    slice: int
    points: np.ndarray  # [N, 2] row and column


def rasterise(contours: Sequence[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """The pixels whose centres lie inside of contours ``[N, 2]`` (row, column), by the even-odd rule.

    The centre of the first pixel is (0, 0). A centre is inside if a ray from it to the left crosses the contours an odd
    number of times, so holes may be contours of their own or be cut in by a keyhole. A centre on a contour belongs to
    the area that lies below or right of it: areas that share an edge share no pixel.

    >>> square = np.array([[0.5, 0.5], [0.5, 2.5], [2.5, 2.5], [2.5, 0.5]])
    >>> rasterise([square], (4, 4)).astype(int)
    array([[0, 0, 0, 0],
           [0, 1, 1, 0],
           [0, 1, 1, 0],
           [0, 0, 0, 0]])
    """
    height, width = size
    starts = np.round(np.concatenate([np.zeros((0, 2)), *contours]), _DIGITS)
    ends = np.round(np.concatenate([np.zeros((0, 2)), *(np.roll(one, -1, 0) for one in contours)]), _DIGITS)
    forward = starts[:, :1] <= ends[:, :1]
    upper, lower = np.where(forward, starts, ends), np.where(forward, ends, starts)
    first, end = (np.clip(np.ceil(side[:, 0]), 0, height).astype(np.int64) for side in (upper, lower))
    crossing = first < end  # rows with upper <= row < lower
    upper, lower, first, rows = upper[crossing], lower[crossing], first[crossing], (end - first)[crossing]
    found = np.zeros(size, bool)
    if not len(rows):
        return found
    top, bottom = int(first.min()), int((first + rows).max())
    toggles = np.zeros((bottom - top) * (width + 1), np.int64)
    parts = np.flatnonzero(np.diff(np.cumsum(rows) // _AT_ONCE)) + 1
    for part in np.split(np.arange(len(rows)), parts):
        edge = np.repeat(part, rows[part])
        row = np.arange(len(edge)) - np.repeat(np.cumsum(rows[part]) - rows[part], rows[part]) + first[edge]
        (y, x), (below, right) = upper[edge].T, lower[edge].T
        at = np.round(x + (row - y) * ((right - x) / (below - y)), _DIGITS)
        column = np.clip(np.ceil(at), 0, width).astype(np.int64)
        toggles += np.bincount((row - top) * (width + 1) + column, minlength=len(toggles))
    found[top:bottom] = np.cumsum(toggles.reshape(-1, width + 1)[:, :width], 1) & 1
    return found


def open_rtstruct(path: Path, options: ReadOptions) -> Source:
    """The structures of one file as class ids, on the grid of ``options.image``.

    A contour lies on the slice that it refers to by UID, or else on the nearest one. One that lies on none is an error,
    as are points and open lines where a structure that is read has nothing else.
    """
    with guard(path):
        planes = planes_of(path, "RTSTRUCT", options.image, placed=True)
        assert options.image is not None
        image = options.image
        if (there := path.stat().st_size) > _BYTES:
            raise FileError.of("E210", path, f"expected at most {_BYTES:,} bytes, found {there:,}")
        header = read_header(path, _TAGS, _BYTES)
        listed = header.get("StructureSetROISequence") or []
        names = {int(roi.ROINumber): str(roi.get("ROIName") or roi.ROINumber) for roi in listed}
        frames = {int(roi.ROINumber): str(roi.get("ReferencedFrameOfReferenceUID") or "") for roi in listed}
        drawn = _drawn(path, header)
        areas = {number: name for number, name in names.items() if any(map(_is_area, drawn.get(number, ())))}
        chosen = choose(path, "structure", (areas if options.segments is None else None) or names, options)
        contours = [
            found
            for number in chosen.rank
            for found in _contours(path, names[number], number, drawn.get(number, []), frames[number], planes, image)
        ]
        if (points := sum(len(one.points) for one in contours)) > _POINTS:
            raise FileError.of("E210", path, f"expected at most {_POINTS:,} points of contours, found {points:,}")
        heights = (np.abs(np.diff(one.points[:, 0], append=one.points[:1, 0])) for one in contours)
        crossings = sum(float(height.clip(0, image.size[0]).sum()) for height in heights)
        if crossings > _CROSSINGS:
            raise FileError.of("E210", path, f"expected contours that cross at most {_CROSSINGS:,} rows, found more")
        judge(path, image.size, image.slices, 1, chosen.ranks)
    by_slice: dict[int, dict[int, list[np.ndarray]]] = {}
    for one in contours:
        by_slice.setdefault(one.slice, {}).setdefault(one.structure, []).append(one.points)

    def read(k: int) -> np.ndarray:
        plane = np.zeros(image.size, chosen.ranks)
        for number, points in by_slice.get(k, {}).items():
            chosen.paint(plane, rasterise(points, image.size), number)
        return chosen.classes(plane)

    return mask_source(path, image, chosen, read)


def _drawn(path: Path, header: Any) -> dict[int, list[Any]]:
    """The contours of each structure by its number."""
    found: dict[int, list[Any]] = {}
    total = 0
    for roi in header.get("ROIContourSequence") or []:
        contours = roi.get("ContourSequence") or []
        total += len(contours)
        if total > _CONTOURS:
            raise FileError.of("E210", path, f"expected at most {_CONTOURS:,} contours, found more")
        found.setdefault(int(roi.ReferencedROINumber), []).extend(contours)
    return found


def _is_area(contour: Any) -> bool:
    return str(contour.get("ContourGeometricType", "")).upper() in _AREAS


def _contours(
    path: Path, name: str, number: int, drawn: Sequence[Any], reference: str, planes: Planes, image: Source
) -> list[_Contour]:
    """The contours of one structure in pixels of their slices."""
    slices = {uid: planes.named(uid) for uid in set(planes.instances)}
    same = not (reference and planes.reference) or reference == planes.reference
    found: dict[tuple[int, bytes], _Contour] = {}
    for contour in drawn:
        kind = str(contour.get("ContourGeometricType", ""))
        if not _is_area(contour):
            message = f"expected closed contours of {name!r}, found {kind[:40]!r}"
            raise FileError.of("E313", path, message, 'leave it out: declare the others in "segments"')
        points = _points(path, name, contour)
        named = sorted({k for one in contour.get("ContourImageSequence") or [] for k in _referred(one, slices, planes)})
        if not named and not same:
            message = f"expected {name!r} on slices of {image.path.name}, found another frame of reference"
            raise FileError.of("E302", path, message, "give the mask of this image, or the image of this mask")
        k, away = planes.beside(points, named or range(len(planes.corner)))
        if not planes.on_slice(away):
            x, y, z = points.mean(0)
            where = f"a contour {away:.3g} mm away from the nearest, around ({x:.1f}, {y:.1f}, {z:.1f}) mm"
            message = f"expected contours of {name!r} on slices of {image.path.name}, found {where}"
            raise FileError.of("E302", path, message, "draw on the slices themselves, or export label maps")
        pixels = planes.pixels(points, k)
        alone = kind.upper() == "CLOSED_PLANAR"  # the same one again is a copy, which must not cancel the first
        content = np.round(pixels, _DIGITS).tobytes() if alone else len(found).to_bytes(4, "little")
        found[k, content] = _Contour(number, k, pixels)
    return list(found.values())


def _referred(reference: Any, slices: dict[str, list[int]], planes: Planes) -> list[int]:
    """The slices that a contour says it was drawn on."""
    frames = reference.get("ReferencedFrameNumber")
    wanted = {int(f) for f in ([frames] if isinstance(frames, int | str) else frames or [])}
    inside = slices.get(str(reference.get("ReferencedSOPInstanceUID", "")), [])
    return [k for k in inside if not wanted or (planes.frames[k] or 1) in wanted]


def _points(path: Path, name: str, contour: Any) -> np.ndarray:
    """``[N, 3]`` in millimetres. The text is taken as it is: pydicom makes an object of each number."""
    raw = contour.get_item("ContourData")
    value = getattr(raw, "value", None)
    if isinstance(value, bytes):
        numbers = np.array(value.replace(b"\0", b" ").split(b"\\"), "S32").astype(float)
    else:
        numbers = np.array([float(one) for one in (value or [])])
    if len(numbers) < 9 or len(numbers) % 3 or not np.isfinite(numbers).all():
        found = f"{count(len(numbers), 'number')}"
        message = f"expected contours of {name!r} of three points or more, found {found} or nan"
        raise FileError.of("E201", path, message)
    return numbers.reshape(-1, 3)
