"""Volumes with a place in the patient: NIfTI, and DICOM as single files, many frames or a folder of slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text, some
from ambiseg.io.problems import Problem, Refused
from ambiseg.io.source import How, Source, format_of, guard, once

_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM counts millimetres to the left and back, NIfTI to the right and front
_DECODE = "pip install pylibjpeg[all], or decompress the files, for example with `dcmdjpeg` or `gdcmconv --raw`"
_TOLERANCE = 0.1  # of a voxel: headers round their positions, and a mask that is off by less is not off


# -- NIfTI -------------------------------------------------------------------------------------------------------


def open_nifti(path: Path, how: How) -> Source:
    """A volume's slices along ``how.axis`` as stored, each turned the way it is looked at.

    Rows go down the patient (or to the back, in an axial slice), columns to the patient's left (to the back, in a
    sagittal one). A mask is turned and flipped into the voxel order of its image; it is never resampled.
    """
    import nibabel

    image: Any = nibabel.load(path)
    shape, dtype = image.shape, np.dtype(image.get_data_dtype())
    colour = dtype.names is not None  # RGB24: one record a voxel
    if len(shape) == 2:
        shape = (*shape, 1)
    channels = shape[3] if len(shape) == 4 else 1
    if len(shape) > 4 or (how.mask and channels > 1) or (colour and channels > 1):
        wanted = "three axes" if how.mask else "three axes, or four with the last for channels"
        fix = "save one label map of three axes for each reader" if how.mask else "save one volume a file"
        raise Refused.of("E201", path, f"expected {wanted}, found shape {shape_text(image.shape)}", fix)
    affine = np.asarray(image.affine, float)
    wanted = how.like.affine if how.like is not None and how.geometry else None
    axis = 2 if len(image.shape) == 2 else how.axis
    turn = _viewing(affine, axis) if wanted is None else _like(affine, wanted)
    affine = _turned(affine, shape[:3], turn)
    slices, height, width = (shape[int(axis)] for axis, _ in turn)
    scaled = image.dataobj.slope != 1 or image.dataobj.inter != 0
    dtype = np.dtype(np.uint8) if colour else np.dtype(np.float32) if scaled else dtype.newbyteorder("=")

    def stored(index: tuple[Any, ...]) -> np.ndarray:
        voxels = np.asanyarray(image.dataobj[index] if len(image.shape) == len(index) else image.dataobj)
        if colour:
            voxels = np.stack([voxels[name] for name in ("R", "G", "B")], -1)
        return voxels.astype(dtype, copy=False)

    def whole() -> np.ndarray:
        return _compact(stored(())) if how.mask else stored(())

    compressed = path.name.lower().endswith(".gz")
    everything = once(whole)

    def read(k: int) -> np.ndarray:
        axis, flip = int(turn[0][0]), turn[0][1] < 0
        at = slices - 1 - k if flip else k
        index = tuple(at if a == axis else slice(None) for a in range(3)) + (slice(None),) * (len(image.shape) - 3)
        flat = len(image.shape) == 2
        plane = everything()[() if flat else index] if flat or compressed else stored(index)
        plane = plane.reshape(*plane.shape[:2], -1)  # [.., .., C]
        if turn[1][0] > turn[2][0]:
            plane = plane.swapaxes(0, 1)
        plane = plane[:: int(turn[1][1]), :: int(turn[2][1])]
        return np.ascontiguousarray(np.moveaxis(plane, -1, 0))

    return Source(path, "NIfTI", slices, (height, width), 3 if colour else channels, dtype, read, affine)


def _viewing(affine: np.ndarray, axis: int) -> np.ndarray:
    """``[3, 2]``: for slices, rows and columns, which stored axis, and whether it is reversed (-1)."""
    from nibabel.orientations import io_orientation

    towards = io_orientation(affine)  # stored axis -> axis of the patient (right, front, up) and direction
    towards[np.isnan(towards)] = 0
    plane = sorted((a for a in range(3) if a != axis), key=lambda a: towards[a, 0])
    column, row = plane  # the lower patient axis runs along the rows: left-right before front-back before up-down
    turn = [(axis, 1), (row, -towards[row, 1] or 1), (column, -towards[column, 1] or 1)]
    return np.array(turn, float)


def _like(affine: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The turn that brings a stored volume into the slices, rows and columns of ``wanted``."""
    from nibabel.orientations import io_orientation

    mine, theirs = io_orientation(affine), io_orientation(wanted)
    turn = np.zeros((3, 2))
    for place in range(3):
        axis = int(np.flatnonzero(mine[:, 0] == theirs[place, 0])[0])
        turn[place] = axis, mine[axis, 1] * theirs[place, 1]
    return turn


def _turned(affine: np.ndarray, shape: tuple[int, ...], turn: np.ndarray) -> np.ndarray:
    """The affine from (slice, row, column): columns permuted, flipped axes counted from their other end."""
    result = affine.copy()
    for place, (axis, direction) in enumerate(turn):
        step = affine[:3, int(axis)]
        result[:3, place] = step * direction
        if direction < 0:
            result[:3, 3] += step * (shape[int(axis)] - 1)
    return result


def distance(image: Source, mask: Source) -> float | None:
    """By how many millimetres a corner of the mask misses that of its image; ``None`` where that is too little.

    >>> from dataclasses import replace
    >>> a = Source(Path("a"), "NIfTI", 2, (4, 4), 1, np.dtype("u1"), lambda k: np.zeros((1, 4, 4)), np.eye(4))
    >>> moved = np.eye(4); moved[0, 3] = 3
    >>> distance(a, replace(a, affine=moved)), distance(a, a)
    (3.0, None)
    """
    if image.affine is None or mask.affine is None:
        return None
    ends = [(0, n - 1) for n in (image.slices, *image.size)]
    corners = np.array([(s, r, c, 1) for s in ends[0] for r in ends[1] for c in ends[2]], float).T
    miss = np.linalg.norm(((image.affine - mask.affine) @ corners)[:3], axis=0).max()
    voxel = np.linalg.norm(image.affine[:3, 1:3], axis=0).min()
    return float(miss) if not miss <= _TOLERANCE * voxel else None


def _compact(array: np.ndarray) -> np.ndarray:
    """A mask volume in the fewest bytes that hold it: many programs save masks as float64."""
    if array.dtype.kind == "b" or not array.size:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high) and (array == np.rint(array)).all()):
        return array
    return array.astype(np.promote_types(np.min_scalar_type(int(low)), np.min_scalar_type(int(high))), copy=False)


# -- DICOM -------------------------------------------------------------------------------------------------------


def open_dicom(path: Path, how: How) -> Source:
    """One file, of one frame or many, or a folder with one file a slice, sorted by position along their normal."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if not p.name.startswith(".") and format_of(p) == "DICOM")
        if not files:
            raise Refused.of("E204", path, "expected the DICOM files of one series, found none in this folder")
    else:
        files = [path]
    headers = [(file, _header(file)) for file in files]
    notes: tuple[Problem, ...] = ()
    if len(headers) > 1:
        headers, notes = _sorted(path, headers)
    first = headers[0][1]
    frames = int(first.get("NumberOfFrames") or 1)
    if len(headers) > 1 and any(int(h.get("NumberOfFrames") or 1) > 1 for _, h in headers):
        raise Refused.of("E204", path, "expected one frame a file, found files with several", "one such file a volume")
    for file, header in headers[1:]:
        if (header.Rows, header.Columns) != (first.Rows, first.Columns):
            found, wanted = shape_text((header.Rows, header.Columns)), shape_text((first.Rows, first.Columns))
            raise Refused.of("E204", file, f"expected {wanted} as {headers[0][0].name} of its series, found {found}")
    dtype = np.result_type(*(_dtype(header, how) for _, header in headers))
    colour = int(first.SamplesPerPixel) == 3 or (first.PhotometricInterpretation == "PALETTE COLOR" and not how.mask)
    size, slices = (int(first.Rows), int(first.Columns)), max(frames, len(headers))

    def read(k: int) -> np.ndarray:
        file, header = headers[k] if len(headers) > 1 else headers[0]
        with guard(file):  # of a series, the slice that is damaged
            pixels = _pixels(file, header, 0 if len(headers) > 1 else k, frames, how)
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
        raise Refused.of("E105", file, f"expected an image or a label map, found a DICOM {modality} object", fix)
    if "Rows" not in header or "Columns" not in header:
        raise Refused.of("E204", file, f"expected an image, found {modality} without pixels")
    syntax = getattr(header.file_meta, "TransferSyntaxUID", None)
    if syntax is not None and syntax.is_encapsulated:
        from pydicom.pixels.decoders.base import get_decoder

        try:
            decoder = get_decoder(syntax)
        except NotImplementedError:
            raise Refused.of("E202", file, f"expected a known compression, found {syntax.name}") from None
        if not decoder.is_available:
            raise Refused.of("E202", file, f"expected a DICOM that can be decoded, found {syntax.name}", _DECODE)
    return header


def _sorted(folder: Path, headers: list[tuple[Path, Any]]) -> tuple[list[tuple[Path, Any]], tuple[Problem, ...]]:
    series = {str(header.get("SeriesInstanceUID", "")) for _, header in headers}
    if len(series) > 1:
        first = {str(header.get("SeriesInstanceUID", "")): file.name for file, header in reversed(headers)}
        names = sorted(first.values())
        raise Refused.of("E204", folder, f"expected the slices of one series, found {len(series)}: {some(names)}")
    if all("ImagePositionPatient" in h and "ImageOrientationPatient" in h for _, h in headers):
        across, down = np.array(headers[0][1].ImageOrientationPatient, float).reshape(2, 3)
        normal = np.cross(across, down)
        places = np.array([float(np.dot(normal, np.array(h.ImagePositionPatient, float))) for _, h in headers])
    elif all(h.get("InstanceNumber") is not None for _, h in headers):
        places = np.array([float(h.InstanceNumber) for _, h in headers])
    else:
        file = next(f for f, h in headers if "ImagePositionPatient" not in h and h.get("InstanceNumber") is None)
        raise Refused.of("E204", file, "expected a position or an instance number to sort by, found neither")
    order = np.argsort(places, kind="stable")
    headers, places = [headers[i] for i in order], places[order]
    steps = np.diff(places)
    if (again := np.flatnonzero(steps < 1e-4)).size:
        one, other = headers[again[0]][0], headers[again[0] + 1][0]
        raise Refused.of("E204", other, f"expected one slice a position, found {one.name} at the same one")
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


def _dtype(header: Any, how: How) -> np.dtype:
    """Of the values after rescaling, from the header alone: all slices of a data set get the same."""
    bits, signed = int(header.get("BitsAllocated", 16)), bool(header.get("PixelRepresentation", 0))
    raw = np.dtype(f"{'i' if signed else 'u'}{max(bits // 8, 1)}")
    if header.PhotometricInterpretation == "PALETTE COLOR" and not how.mask:
        return np.dtype(np.uint8)
    frames = range(int(header.get("NumberOfFrames") or 1))
    scales = {_scale(header, frame) for frame in frames}
    if how.mask or scales == {(1.0, 0.0)}:
        return raw
    if not all(slope == int(slope) and shift == int(shift) for slope, shift in scales):
        return np.dtype(np.float32)
    stored = int(header.get("BitsStored", bits))
    ends = (-(1 << (stored - 1)), (1 << (stored - 1)) - 1) if signed else (0, (1 << stored) - 1)
    values = [int(slope) * end + int(shift) for slope, shift in scales for end in ends]
    return np.dtype(np.int16) if min(values) >= -32768 and max(values) <= 32767 else np.dtype(np.int32)


def _pixels(file: Path, header: Any, frame: int, frames: int, how: How) -> np.ndarray:
    """``[C, H, W]`` of one frame: modality units for an image, numbers as stored for a mask."""
    from pydicom.pixels.processing import apply_color_lut
    from pydicom.pixels.utils import pixel_array

    try:
        pixels = pixel_array(file, index=frame) if frames > 1 else pixel_array(file)
    except RuntimeError as error:
        if "plugin" not in str(error):
            raise
        found = header.file_meta.TransferSyntaxUID.name  # a decoder is there, but not for this kind of it
        raise Refused.of("E202", file, f"expected a DICOM that can be decoded, found {found}", _DECODE) from None
    if header.PhotometricInterpretation == "PALETTE COLOR" and not how.mask:
        colours = apply_color_lut(pixels, header)[..., :3]
        deep = colours.dtype.itemsize > 1
        return np.moveaxis((colours >> 8 if deep else colours).astype(np.uint8), -1, 0)
    if pixels.ndim == 3:
        return np.moveaxis(pixels, -1, 0)
    if how.mask:
        return pixels[None]
    slope, shift = _scale(header, frame)
    if (slope, shift) != (1.0, 0.0):
        return (pixels.astype(np.float64) * slope + shift)[None]
    if header.PhotometricInterpretation == "MONOCHROME1":  # 0 is white; turned, so that more is brighter everywhere
        top = -1 if header.get("PixelRepresentation", 0) else (1 << int(header.get("BitsStored", 16))) - 1
        return (top - pixels.astype(np.int64)).astype(pixels.dtype)[None]
    return pixels[None]
