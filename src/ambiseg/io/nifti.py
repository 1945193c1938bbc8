"""NIfTI volumes, by nibabel."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.source import ReadOptions, Source, judge

_NIFTI2 = 540  # bytes of the longer header
_EXTENSIONS = 16 << 20  # bytes that may lie between header and voxels
_PIECE = 1 << 18  # bytes that are read, and four times as many inflated, at a time
_MEMBERS = 1024  # of a gzip file; more, if each holds as many bytes
_SLAB = 16  # slices that are turned into numbers at a time


def open_nifti(path: Path, options: ReadOptions) -> Source:
    """A volume's slices along ``options.axis`` as stored, each turned as radiologists view it.

    Rows go down the patient (or to the back, in an axial slice), columns to the patient's left (to the back, in a
    sagittal one). A mask is turned and flipped into the voxel order of its image; it is never resampled.
    """
    from nibabel.orientations import inv_ornt_aff, io_orientation, ornt_transform
    from nibabel.volumeutils import apply_read_scaling

    compressed = path.name.lower().endswith(".gz")  # its slices are decoded together
    header, affine = _header(path, compressed)
    stored_shape, kind = tuple(map(int, header.get_data_shape())), np.dtype(header.get_data_dtype())
    flat = len(stored_shape) == 2
    shape = (*stored_shape, 1) if flat else stored_shape
    colour = kind.names is not None  # RGB24: one record per voxel
    channels = 3 if colour else shape[3] if len(shape) == 4 else 1
    if not 3 <= len(shape) <= 4 or (len(shape) == 4 and shape[3] > 1 and (options.mask or colour)):
        wanted = "three axes" if options.mask else "three axes, or four with the last for channels"
        fix = "save one label map of three axes for each reader" if options.mask else "save one volume per file"
        raise FileError.of("E201", path, f"expected {wanted}, found shape {shape_text(stored_shape)}", fix)
    if not colour and (kind.kind not in "buif" or kind.itemsize > 8):
        raise FileError.of("E201", path, f"expected whole numbers or fractions of at most 8 bytes, found {kind}")
    orientation = io_orientation(affine)
    if options.like is not None and options.like.affine is not None:
        turn = ornt_transform(orientation, io_orientation(options.like.affine))
    else:
        turn = _turn_for_viewing(orientation, 2 if flat else options.axis)
    across, row, column = np.argsort(turn[:, 0]).tolist()  # stored axes of slices, rows and columns
    if not np.array_equal(np.sort(turn[:, 0]), [0, 1, 2]) or not (np.abs(turn[:, 1]) == 1).all():
        found = affine[:3, :3].tolist()
        raise FileError.of("E201", path, f"expected an affine that says where each axis points, found {found}")
    step = turn[:, 1].astype(int)  # -1: reversed
    slices, size = shape[across], (shape[row], shape[column])
    slope, shift = (by if by is not None else 1.0 - i for i, by in enumerate(header.get_slope_inter()))
    scaled = (slope, shift) != (1, 0)
    dtype = np.dtype(np.uint8) if colour else np.dtype(np.float32) if scaled else kind.newbyteorder("=")
    judge(path, size, slices, channels, max(dtype, kind, key=lambda one: one.itemsize))
    start, nbytes = int(header.get_data_offset()), prod(shape) * kind.itemsize
    if not compressed and start + nbytes > (there := path.stat().st_size):
        found = f"found {there:,}: the file ends too early"
        raise FileError.of("E201", path, f"expected NIfTI of {start + nbytes:,} bytes, {found}")

    def voxels(raw: np.ndarray) -> np.ndarray:
        if colour:
            raw = np.stack([raw[name] for name in ("R", "G", "B")], -1)
        elif scaled:
            raw = apply_read_scaling(raw, np.float64(slope), np.float64(shift))
        return raw.astype(dtype, copy=False)

    @cache
    def whole() -> tuple[np.ndarray, bool]:
        """As stored; or as numbers, if it is a mask that :func:`_compact` makes smaller."""
        raw = np.ndarray(shape, kind, _inflated(path, start + nbytes), start, order="F")
        compact = _compact(raw, voxels) if options.mask and not colour else None
        return (raw, False) if compact is None else (compact, True)

    def read(k: int) -> np.ndarray:
        at = k if step[across] > 0 else slices - 1 - k
        index = tuple(at if axis == across else slice(None) for axis in range(len(shape)))
        if compressed:
            volume, made = whole()
            plane = volume[index] if made else voxels(volume[index])
        else:
            plane = voxels(np.array(np.memmap(path, kind, "r", start, shape, "F")[index]))
        plane = plane.reshape(*plane.shape[:2], -1)  # [.., .., C]
        plane = plane.swapaxes(0, 1) if row > column else plane
        return np.ascontiguousarray(np.moveaxis(plane[:: step[row], :: step[column]], -1, 0))

    placed = np.asarray(affine @ inv_ornt_aff(turn, shape[:3]), float)
    return Source(path, "NIfTI", slices, size, channels, dtype, read, placed)


def _header(path: Path, compressed: bool) -> tuple[Any, np.ndarray]:
    """The header and its affine; nothing beyond it is read."""
    from nibabel import Nifti1Header, Nifti2Header

    with path.open("rb") as file:
        content = _Inflater(file).read(_NIFTI2, short=True).tobytes() if compressed else file.read(_NIFTI2)
    kinds = {348: Nifti1Header, _NIFTI2: Nifti2Header}
    said = int.from_bytes(content[:4], "little"), int.from_bytes(content[:4], "big")
    length = next((length for length in kinds if length in said), None)
    if length is None or len(content) < length:
        raise ValueError("no NIfTI header" if length is None else "the file ends too early")
    header = kinds[length].from_fileobj(BytesIO(content[:length]))
    if bytes(header["magic"]).rstrip(b"\0\r\n\x1a") not in (b"n+1", b"n+2"):
        raise ValueError("no header of a NIfTI that holds its image")
    start = float(header["vox_offset"])
    if not length <= start <= _EXTENSIONS:
        found = f"expected voxels behind the header and {_EXTENSIONS:,} bytes of extensions, found them at {start:.4g}"
        raise FileError.of("E201", path, found)
    affine = np.asarray(header.get_best_affine(), float)
    if not np.isfinite(affine).all():
        raise FileError.of("E201", path, f"expected an affine of finite numbers, found {affine[:3].tolist()}")
    return header, affine


class _Inflater:
    """Bytes of a gzip file from its beginning, inflated as far as they are asked for.

    Unlike ``gzip``, it ends at names without an end, and at thousands of members that hold nothing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left, self._members = file, b"", 0
        self._engine = zlib.decompressobj(31)

    def read(self, size: int, short: bool = False) -> np.ndarray:
        """``size`` bytes; ``short``: fewer where the file ends before."""
        content, done = np.empty(size, np.uint8), 0
        fed = 0
        while done < size:
            if self._engine.eof:
                self._left = self._engine.unused_data
                self._members += 1
                self._engine = zlib.decompressobj(31)
                if self._members > _MEMBERS + done // _MEMBERS:
                    raise ValueError(f"{self._members:,} gzip members of hardly any bytes")
            self._left = self._left or self._file.read(_PIECE)
            if not self._left:
                break
            fed += len(self._left)
            piece = self._engine.decompress(self._left, min(size - done, 4 * _PIECE))
            self._left = self._engine.unconsumed_tail
            content[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
            if not done and fed > _PIECE:
                raise ValueError("a gzip file that begins with no content")
        if done < size and not short:
            raise ValueError("the file ends too early")
        return content[:done]


def _inflated(path: Path, size: int) -> np.ndarray:
    """The first bytes of a gzip file."""
    with path.open("rb") as file:
        return _Inflater(file).read(size)


def _turn_for_viewing(orientation: np.ndarray, axis: int) -> np.ndarray:
    """``[3, 2]``: for each stored axis 0, 1 or 2 for slices, rows or columns, and 1, or -1 if it is reversed."""
    towards = np.nan_to_num(orientation)  # stored axis -> axis of the patient (right, front, up) and direction
    # The lower patient axis runs along the rows: left-right before front-back before up-down.
    column, row = sorted((a for a in range(3) if a != axis), key=lambda a: towards[a, 0])
    turn = np.zeros((3, 2))
    turn[[axis, row, column]] = [(0, 1), (1, -towards[row, 1] or 1), (2, -towards[column, 1] or 1)]
    return turn


def _compact(raw: np.ndarray, voxels: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """A mask in the smallest integer type that holds its values: many programs save masks as float64.

    ``None`` for fractions. Slab by slab, since ``voxels`` makes numbers of four or eight bytes.
    """
    slabs = [slice(k, k + _SLAB) for k in range(0, raw.shape[2], _SLAB)]
    ends: list[int] = []
    for slab in slabs:
        values = voxels(raw[:, :, slab])
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and not (np.isfinite([low, high]).all() and (values == np.rint(values)).all()):
            return None
        ends += [int(low), int(high)]
    kind = np.promote_types(np.min_scalar_type(min(ends)), np.min_scalar_type(max(ends)))
    if kind.kind not in "bui":
        return None
    compact = np.empty(raw.shape, kind, order="F")
    for slab in slabs:
        compact[:, :, slab] = voxels(raw[:, :, slab])
    return compact
