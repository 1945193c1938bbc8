"""DICOM, by pydicom: single files of one frame or many, and folders with one file per slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text, some
from ambiseg.io.dicom_files import DECODE, judge_boxes, modality_of, read_header
from ambiseg.io.dicom_seg import open_seg
from ambiseg.io.errors import FileError, Problem
from ambiseg.io.formats import format_of
from ambiseg.io.planes import Planes, from_headers
from ambiseg.io.rtstruct import open_rtstruct
from ambiseg.io.source import ReadOptions, Source, decoding_at_most, guard, judge

_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM counts millimetres to the left and back, NIfTI to the right and front
_TAGS: list[Any] = [  # all that is read of a header
    *("SpecificCharacterSet", "Modality", "SeriesInstanceUID", "InstanceNumber", "Rows", "Columns", "NumberOfFrames"),
    *("SOPInstanceUID", "FrameOfReferenceUID"),
    *("SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "PixelRepresentation"),
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness"),
    *("RescaleSlope", "RescaleIntercept", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(f"{colour}PaletteColorLookupTableDescriptor" for colour in ("Red", "Green", "Blue")),
    *(
        f"{form}{colour}PaletteColorLookupTableData"
        for form in ("", "Segmented")
        for colour in ("Red", "Green", "Blue")
    ),
]
DRAWN: dict[str, Callable[[Path, ReadOptions], Source]] = {"SEG": open_seg, "RTSTRUCT": open_rtstruct}  # no images
_FRAMES = 16_384  # the header is read again for each
_BAND = 1 << 22  # pixels that are rescaled at a time


def open_dicom(path: Path, options: ReadOptions) -> Source:
    """One file, of one frame or many, or a folder with one file per slice, sorted by position along their normal."""
    paths = [path]
    if path.is_dir():
        paths = sorted(p for p in path.iterdir() if not p.name.startswith(".") and format_of(p) == "DICOM")
        if not paths:
            raise FileError.of("E204", path, "expected the DICOM files of one series, found none in this folder")
    if options.mask and (kind := modality_of(paths[0])) in DRAWN:
        if len(paths) > 1:
            message = f"expected one {kind} for each reader and image, found {len(paths)} files"
            raise FileError.of("E204", path, message, "give each reader a folder with one such file per image")
        return DRAWN[kind](paths[0], options)
    headers, notes = [_header(file, options) for file in paths], ()
    if series := len(headers) > 1:
        headers, notes = _sorted(path, headers)
    first, size = headers[0], _size(headers[0])
    for header in headers if series else ():
        if (frames := _frames(header)) > 1:
            fix = "keep each such file as a volume of its own"
            raise FileError.of("E204", header.filename, f"expected one frame per file, found {frames}", fix)
        if _size(header) != size:
            expected = f"expected {shape_text(size)} as {_name(first)} of its series"
            raise FileError.of("E204", header.filename, f"{expected}, found {shape_text(_size(header))}")
        if _channels(header, options) != _channels(first, options):
            expected = f"expected {_channels(first, options)} channels as {_name(first)} of its series"
            raise FileError.of("E204", header.filename, f"{expected}, found {_channels(header, options)}")
    dtype = np.result_type(*(_dtype(header, options) for header in headers))
    channels, slices = _channels(first, options), len(headers) if series else _frames(first)
    judge(path, size, slices, channels, dtype)

    def read(k: int) -> np.ndarray:
        header, frame = (headers[k], 0) if series else (first, k)
        with guard(Path(header.filename)):  # of a series, the slice that is damaged
            return np.ascontiguousarray(_pixels(header, frame, options, dtype))

    scaled = first.get("RescaleIntercept") is not None or _scale(first, 0) != (1.0, 0.0)
    units = "HU" if first.get("Modality") == "CT" and channels == 1 and scaled else ""
    planes = from_headers(headers, _frames(first))
    about = {"affine": _affine(headers, planes), "units": units, "planes": planes}
    return Source(path, "DICOM", slices, size, channels, dtype, read, notes=notes, **about)


def _name(header: Any) -> str:
    return Path(header.filename).name


def _frames(header: Any) -> int:
    return int(header.get("NumberOfFrames") or 1)


def _size(header: Any) -> tuple[int, int]:
    return int(header.Rows), int(header.Columns)


def _channels(header: Any, options: ReadOptions) -> int:
    return 3 if int(header.SamplesPerPixel) == 3 or _has_palette(header, options) else 1


def _has_palette(header: Any, options: ReadOptions) -> bool:
    return header.PhotometricInterpretation == "PALETTE COLOR" and options.applies_palette


def _header(file: Path, options: ReadOptions) -> Any:
    with guard(file):  # of a series, the slice that is damaged
        header = read_header(file, _TAGS)
        if "Rows" not in header and "Modality" not in header:
            raise ValueError("its header ends before the image")
        modality = str(header.get("Modality", "DICOM"))
        if modality in DRAWN:
            fix = "keep it apart from the images: masks/READER/NAME.dcm is the reader's mask of images/NAME/"
            raise FileError.of("E105", file, f"expected an image, found a DICOM {modality} object", fix)
        if "Rows" not in header or "Columns" not in header:
            raise FileError.of("E204", file, f"expected an image, found {modality} without pixels")
        _judge(file, header, options)
    return header


def _judge(file: Path, header: Any, options: ReadOptions) -> None:
    """Everything that is used later is there and makes sense."""

    def number(name: str, known: Sequence[int], default: int | None = None) -> int:
        value = header.get(name, default)
        value = default if value in (None, "") else value
        if value is None or isinstance(value, list) or int(value) != value or int(value) not in known:
            expected = f"{known[0]} to {known[-1]}" if isinstance(known, range) else f"{some(known)}"
            raise FileError.of("E201", file, f"expected DICOM with {name} of {expected}, found {str(value)[:40]!r}")
        return int(value)

    size = number("Rows", range(1, 1 << 16)), number("Columns", range(1, 1 << 16))
    frames, samples = number("NumberOfFrames", range(1, 1 << 31), 1), number("SamplesPerPixel", (1, 3))
    bits = number("BitsAllocated", (1, 8, 16, 32, 64))
    number("BitsStored", range(1, bits + 1), bits)
    number("PixelRepresentation", (0, 1), 0)
    if not isinstance(header.get("PhotometricInterpretation"), str):
        raise FileError.of("E201", file, "expected DICOM with PhotometricInterpretation, found none")
    judge(file, size, frames, _channels(header, options), np.dtype(f"u{max(bits // 8, 1)}"))
    if frames > _FRAMES:
        raise FileError.of("E210", file, f"expected at most {_FRAMES:,} frames, found {frames:,}")
    meta = getattr(header, "file_meta", {})
    syntax = meta.get("TransferSyntaxUID")
    needed = size[0] * size[1] * frames * samples * bits // 8
    halves = header.PhotometricInterpretation == "YBR_FULL_422"
    if (syntax is None or not syntax.is_encapsulated) and needed // (1 + halves) > file.stat().st_size:
        found = f"found {file.stat().st_size:,}: the file ends too early"
        raise FileError.of("E201", file, f"expected DICOM of more than {needed:,} bytes, {found}")
    for frame in range(frames):
        if not all(map(math.isfinite, scale := _scale(header, frame))):
            raise FileError.of("E201", file, f"expected slope and intercept of finite numbers, found {scale}")


def _sorted(folder: Path, headers: list[Any]) -> tuple[list[Any], tuple[Problem, ...]]:
    """The slices of one series by their position, and a warning if their steps differ."""
    series = {str(header.get("SeriesInstanceUID", "")): _name(header) for header in reversed(headers)}
    if len(series) > 1:
        found = f"{len(series)}: {some(sorted(series.values()))}"
        raise FileError.of("E204", folder, f"expected the slices of one series, found {found}")
    if all("ImagePositionPatient" in h and "ImageOrientationPatient" in h for h in headers):
        across, down = np.array(headers[0].ImageOrientationPatient, float).reshape(2, 3)
        normal = np.cross(across, down)
        places = np.array([normal @ np.array(h.ImagePositionPatient, float) for h in headers])
    elif all(h.get("InstanceNumber") is not None for h in headers):
        places = np.array([float(h.InstanceNumber) for h in headers])
    else:
        file = next(h.filename for h in headers if h.get("InstanceNumber") is None)
        raise FileError.of("E204", file, "expected a position or an instance number to sort by, found neither")
    if not np.isfinite(places).all():
        raise FileError.of("E204", folder, "expected positions of finite numbers, found others")
    order = np.argsort(places, kind="stable")
    headers, steps = [headers[i] for i in order], np.diff(places[order])
    if steps[k := int(steps.argmin())] < 1e-4:
        message = f"expected one slice per position, found {_name(headers[k])} at the same one"
        raise FileError.of("E204", headers[k + 1].filename, message)
    usual = float(np.median(steps))
    uneven = np.flatnonzero(np.abs(steps - usual) > 0.1 * usual)
    if not uneven.size:
        return headers, ()
    k = int(uneven[0])
    found = f"{steps[k]:.4g} between {_name(headers[k])} and {_name(headers[k + 1])}"
    return headers, (Problem("W208", str(folder), f"expected steps of {usual:.4g} between slices, found {found}"),)


def _affine(headers: list[Any], planes: Planes) -> np.ndarray | None:
    """From (slice, row, column) to millimetres right, front and up; ``None`` for frames that lie anyhow."""
    first, last = headers[0], headers[-1]
    if _frames(first) > 1:
        return _affine_of_frames(planes)
    needed = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
    if any(header.get(name) is None for header in (first, last) for name in needed):
        return None
    across, down = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    between_rows, between_columns = (float(x) for x in first.PixelSpacing)
    origin = np.array(first.ImagePositionPatient, float)
    step = np.cross(across, down) * float(first.get("SliceThickness") or 1)
    if len(headers) > 1:
        step = (np.array(last.ImagePositionPatient, float) - origin) / (len(headers) - 1)
    affine = np.eye(4)
    affine[:3] = np.stack([step, down * between_rows, across * between_columns, origin], 1)
    if not np.isfinite(affine).all():
        raise FileError.of("E201", first.filename, f"expected positions of finite numbers, found {affine.tolist()}")
    return _LPS @ affine


def _affine_of_frames(planes: Planes) -> np.ndarray | None:
    """Of frames within one file that lie one behind the other in even steps, as they are stored."""
    if not planes.placed:
        return None
    count, step = len(planes.corner), (planes.corner[-1] - planes.corner[0]) / (len(planes.corner) - 1)
    even = planes.corner[0] + np.arange(count)[:, None] * step
    parts = planes.corner - even, planes.down - planes.down[0], planes.across - planes.across[0]
    reach = (1, *planes.size)
    off = max(float(np.abs(part).max()) * times for part, times in zip(parts, reach, strict=True))
    if off > 0.1 * np.linalg.norm(planes.across[0]) or abs(step @ planes.normals[0]) < 0.5 * np.linalg.norm(step):
        return None
    affine = np.eye(4)
    affine[:3] = np.stack([step, planes.down[0], planes.across[0], planes.corner[0]], 1)
    return _LPS @ affine if np.linalg.norm(step) > 1e-4 else None


def _scale(header: Any, frame: int) -> tuple[float, float]:
    """Slope and intercept, which files of many frames keep in groups of their own."""
    own, shared = (header.get(f"{name}FunctionalGroupsSequence") or [] for name in ("PerFrame", "Shared"))
    groups = [*own[frame : frame + 1], *shared[:1]]
    for place in (header, *(one for group in groups for one in group.get("PixelValueTransformationSequence") or [])):
        if place.get("RescaleSlope") is not None and place.get("RescaleIntercept") is not None:
            return float(place.RescaleSlope), float(place.RescaleIntercept)
    return 1.0, 0.0


def _dtype(header: Any, options: ReadOptions) -> np.dtype:
    """Of the values after rescaling, from the header alone: all slices of a data set get the same."""
    bits, signed = int(header.get("BitsAllocated", 16)), bool(header.get("PixelRepresentation", 0))
    raw = np.dtype(f"{'i' if signed else 'u'}{max(bits // 8, 1)}")
    if _has_palette(header, options):
        return np.dtype(np.uint8)
    scales = {_scale(header, frame) for frame in range(_frames(header))}
    if options.mask or scales == {(1.0, 0.0)}:
        return raw
    if not all(slope == int(slope) and shift == int(shift) for slope, shift in scales):
        return np.dtype(np.float32)
    stored = int(header.get("BitsStored", bits))
    low = -(1 << stored - 1) if signed else 0
    values = [int(slope) * end + int(shift) for slope, shift in scales for end in (low, low + (1 << stored) - 1)]
    types = [np.iinfo(np.int16), np.iinfo(np.int32)]
    return next((one.dtype for one in types if one.min <= min(values) <= max(values) <= one.max), np.dtype(np.float32))


def _judge_boxes(header: Any, frame: int) -> None:
    """See :func:`~ambiseg.io.dicom_files.judge_boxes`; nothing for other syntaxes."""
    from pydicom import dcmread
    from pydicom.encaps import get_frame
    from pydicom.uid import JPEG2000TransferSyntaxes

    if header.file_meta.get("TransferSyntaxUID") not in JPEG2000TransferSyntaxes:
        return
    stored: Any = dcmread(header.filename, specific_tags=["PixelData"])
    content = get_frame(stored.PixelData, frame, number_of_frames=_frames(header))
    judge_boxes(content)


def _pixels(header: Any, frame: int, options: ReadOptions, dtype: np.dtype) -> np.ndarray:
    """``[C, H, W]`` of one frame: modality units for an image, numbers as stored for a mask."""
    from pydicom.pixels.processing import apply_color_lut
    from pydicom.pixels.utils import pixel_array

    _judge_boxes(header, frame)
    try:
        with decoding_at_most(math.prod(_size(header))):
            pixels = pixel_array(header.filename, index=frame if _frames(header) > 1 else None)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "plugin" not in str(error):
            raise
        message = f"expected a DICOM that can be decoded, found {header.file_meta.TransferSyntaxUID.name}"
        raise FileError.of("E202", header.filename, message, DECODE) from None
    if pixels.shape != (wanted := (*_size(header), *((3,) if int(header.SamplesPerPixel) == 3 else ()))):
        raise ValueError(f"pixels of {shape_text(pixels.shape)} where the header says {shape_text(wanted)}")
    if _has_palette(header, options):
        colours = apply_color_lut(pixels, header)[..., :3]
        return np.moveaxis((colours >> 8 if colours.dtype.itemsize > 1 else colours).astype(dtype, copy=False), -1, 0)
    if pixels.ndim == 3:
        return np.moveaxis(pixels, -1, 0).astype(dtype, copy=False)
    slope, shift = _scale(header, frame)
    scaled = not options.mask and (slope, shift) != (1.0, 0.0)
    inverted = not options.mask and not scaled and header.PhotometricInterpretation == "MONOCHROME1"  # 0 is white
    if not scaled and not inverted:
        return pixels[None].astype(dtype, copy=False)
    top = -1 if header.get("PixelRepresentation", 0) else (1 << int(header.get("BitsStored") or 16)) - 1
    found, rows = np.empty((1, *pixels.shape), dtype), max(_BAND // pixels.shape[1], 1)
    for band in (slice(k, k + rows) for k in range(0, len(pixels), rows)):  # in eight bytes per pixel
        if scaled:
            found[0, band] = pixels[band].astype(np.float64) * slope + shift
        else:
            found[0, band] = (top - pixels[band].astype(np.int64)).astype(pixels.dtype)
    return found
