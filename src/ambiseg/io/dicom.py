"""DICOM, by pydicom: single files of one frame or many, and folders with one file per slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text, some
from ambiseg.io.errors import FileError, Problem
from ambiseg.io.formats import format_of
from ambiseg.io.source import ReadOptions, Source, guard

_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM counts millimetres to the left and back, NIfTI to the right and front
_DECODE = "pip install pylibjpeg[all], or decompress the files, for example with `dcmdjpeg` or `gdcmconv --raw`"


def open_dicom(path: Path, options: ReadOptions) -> Source:
    """One file, of one frame or many, or a folder with one file a slice, sorted by position along their normal."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if not p.name.startswith(".") and format_of(p) == "DICOM")
        if not files:
            raise FileError.of("E204", path, "expected the DICOM files of one series, found none in this folder")
    else:
        files = [path]
    headers = [(file, _header(file)) for file in files]
    notes: tuple[Problem, ...] = ()
    if len(headers) > 1:
        headers, notes = _sorted(path, headers)
    first = headers[0][1]
    frames = int(first.get("NumberOfFrames") or 1)
    if len(headers) > 1 and any(int(h.get("NumberOfFrames") or 1) > 1 for _, h in headers):
        raise FileError.of(
            "E204", path, "expected one frame a file, found files with several", "one such file a volume"
        )
    for file, header in headers[1:]:
        if (header.Rows, header.Columns) != (first.Rows, first.Columns):
            found, wanted = shape_text((header.Rows, header.Columns)), shape_text((first.Rows, first.Columns))
            raise FileError.of("E204", file, f"expected {wanted} as {headers[0][0].name} of its series, found {found}")
    dtype = np.result_type(*(_dtype(header, options) for _, header in headers))
    colour = int(first.SamplesPerPixel) == 3 or (
        first.PhotometricInterpretation == "PALETTE COLOR" and not options.mask
    )
    size, slices = (int(first.Rows), int(first.Columns)), max(frames, len(headers))

    def read(k: int) -> np.ndarray:
        file, header = headers[k] if len(headers) > 1 else headers[0]
        with guard(file):  # of a series, the slice that is damaged
            pixels = _pixels(file, header, 0 if len(headers) > 1 else k, frames, options)
        return np.ascontiguousarray(pixels.astype(dtype, copy=False))

    return Source(path, "DICOM", slices, size, 3 if colour else 1, dtype, read, _affine(headers, frames), notes)


def _header(file: Path) -> Any:
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    with guard(file):  # of a series, the slice that is damaged
        try:
            header = dcmread(file, stop_before_pixels=True)
        except InvalidDicomError:
            raise ValueError("no DICOM header") from None
        if "Rows" not in header and "Modality" not in header:
            raise ValueError("its header ends before the image")
    modality = str(header.get("Modality", "DICOM"))
    if modality in ("SEG", "RTSTRUCT"):
        fix = "export it as NIfTI, or as one label map a reader"
        raise FileError.of("E105", file, f"expected an image or a label map, found a DICOM {modality} object", fix)
    if "Rows" not in header or "Columns" not in header:
        raise FileError.of("E204", file, f"expected an image, found {modality} without pixels")
    syntax = getattr(header.file_meta, "TransferSyntaxUID", None)
    if syntax is not None and syntax.is_encapsulated:
        from pydicom.pixels.decoders.base import get_decoder

        try:
            decoder = get_decoder(syntax)
        except NotImplementedError:
            raise FileError.of("E202", file, f"expected a known compression, found {syntax.name}") from None
        if not decoder.is_available:
            raise FileError.of("E202", file, f"expected a DICOM that can be decoded, found {syntax.name}", _DECODE)
    return header


def _sorted(folder: Path, headers: list[tuple[Path, Any]]) -> tuple[list[tuple[Path, Any]], tuple[Problem, ...]]:
    series = {str(header.get("SeriesInstanceUID", "")) for _, header in headers}
    if len(series) > 1:
        first = {str(header.get("SeriesInstanceUID", "")): file.name for file, header in reversed(headers)}
        names = sorted(first.values())
        raise FileError.of("E204", folder, f"expected the slices of one series, found {len(series)}: {some(names)}")
    if all("ImagePositionPatient" in h and "ImageOrientationPatient" in h for _, h in headers):
        across, down = np.array(headers[0][1].ImageOrientationPatient, float).reshape(2, 3)
        normal = np.cross(across, down)
        places = np.array([float(np.dot(normal, np.array(h.ImagePositionPatient, float))) for _, h in headers])
    elif all(h.get("InstanceNumber") is not None for _, h in headers):
        places = np.array([float(h.InstanceNumber) for _, h in headers])
    else:
        file = next(f for f, h in headers if "ImagePositionPatient" not in h and h.get("InstanceNumber") is None)
        raise FileError.of("E204", file, "expected a position or an instance number to sort by, found neither")
    order = np.argsort(places, kind="stable")
    headers, places = [headers[i] for i in order], places[order]
    steps = np.diff(places)
    if (again := np.flatnonzero(steps < 1e-4)).size:
        one, other = headers[again[0]][0], headers[again[0] + 1][0]
        raise FileError.of("E204", other, f"expected one slice a position, found {one.name} at the same one")
    usual = float(np.median(steps))
    if (uneven := np.flatnonzero(np.abs(steps - usual) > 0.1 * usual)).size:
        k = int(uneven[0])
        found = f"{steps[k]:.4g} between {headers[k][0].name} and {headers[k + 1][0].name}"
        return headers, (Problem("W208", str(folder), f"expected steps of {usual:.4g} between slices, found {found}"),)
    return headers, ()


def _affine(headers: list[tuple[Path, Any]], frames: int) -> np.ndarray | None:
    """From (slice, row, column) to millimetres right, front and up; of frames within one file it is not known."""
    first, last = headers[0][1], headers[-1][1]
    wanted = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
    if frames > 1 or not all(first.get(name) is not None and last.get(name) is not None for name in wanted):
        return None
    across, down = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    between_rows, between_columns = (float(x) for x in first.PixelSpacing)
    origin = np.array(first.ImagePositionPatient, float)
    step = np.cross(across, down) * float(first.get("SliceThickness") or 1)
    if len(headers) > 1:
        step = (np.array(last.ImagePositionPatient, float) - origin) / (len(headers) - 1)
    affine = np.eye(4)
    affine[:3] = np.stack([step, down * between_rows, across * between_columns, origin], 1)
    return _LPS @ affine


def _scale(header: Any, frame: int) -> tuple[float, float]:
    """Slope and intercept, which files of many frames keep in groups of their own."""
    places = [header]
    for name, index in (("PerFrameFunctionalGroupsSequence", frame), ("SharedFunctionalGroupsSequence", 0)):
        if (group := header.get(name)) and index < len(group):
            places += list(group[index].get("PixelValueTransformationSequence") or [])
    for place in places:
        if place.get("RescaleSlope") is not None and place.get("RescaleIntercept") is not None:
            return float(place.RescaleSlope), float(place.RescaleIntercept)
    return 1.0, 0.0


def _dtype(header: Any, options: ReadOptions) -> np.dtype:
    """Of the values after rescaling, from the header alone: all slices of a data set get the same."""
    bits, signed = int(header.get("BitsAllocated", 16)), bool(header.get("PixelRepresentation", 0))
    raw = np.dtype(f"{'i' if signed else 'u'}{max(bits // 8, 1)}")
    if header.PhotometricInterpretation == "PALETTE COLOR" and not options.mask:
        return np.dtype(np.uint8)
    frames = range(int(header.get("NumberOfFrames") or 1))
    scales = {_scale(header, frame) for frame in frames}
    if options.mask or scales == {(1.0, 0.0)}:
        return raw
    if not all(slope == int(slope) and shift == int(shift) for slope, shift in scales):
        return np.dtype(np.float32)
    stored = int(header.get("BitsStored", bits))
    ends = (-(1 << (stored - 1)), (1 << (stored - 1)) - 1) if signed else (0, (1 << stored) - 1)
    values = [int(slope) * end + int(shift) for slope, shift in scales for end in ends]
    return np.dtype(np.int16) if min(values) >= -32768 and max(values) <= 32767 else np.dtype(np.int32)


def _pixels(file: Path, header: Any, frame: int, frames: int, options: ReadOptions) -> np.ndarray:
    """``[C, H, W]`` of one frame: modality units for an image, numbers as stored for a mask."""
    from pydicom.pixels.processing import apply_color_lut
    from pydicom.pixels.utils import pixel_array

    try:
        pixels = pixel_array(file, index=frame) if frames > 1 else pixel_array(file)
    except RuntimeError as error:
        if "plugin" not in str(error):
            raise
        found = header.file_meta.TransferSyntaxUID.name  # a decoder is there, but not for this kind of it
        raise FileError.of("E202", file, f"expected a DICOM that can be decoded, found {found}", _DECODE) from None
    if header.PhotometricInterpretation == "PALETTE COLOR" and not options.mask:
        colours = apply_color_lut(pixels, header)[..., :3]
        deep = colours.dtype.itemsize > 1
        return np.moveaxis((colours >> 8 if deep else colours).astype(np.uint8), -1, 0)
    if pixels.ndim == 3:
        return np.moveaxis(pixels, -1, 0)
    if options.mask:
        return pixels[None]
    slope, shift = _scale(header, frame)
    if (slope, shift) != (1.0, 0.0):
        return (pixels.astype(np.float64) * slope + shift)[None]
    if header.PhotometricInterpretation == "MONOCHROME1":  # 0 is white; turned, so that more is brighter everywhere
        top = -1 if header.get("PixelRepresentation", 0) else (1 << int(header.get("BitsStored", 16))) - 1
        return (top - pixels.astype(np.int64)).astype(pixels.dtype)[None]
    return pixels[None]
