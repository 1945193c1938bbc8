"""NIfTI volumes, by nibabel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.source import ReadOptions, Source, once


def open_nifti(path: Path, options: ReadOptions) -> Source:
    """A volume's slices along ``options.axis`` as stored, each turned as radiologists view it.

    Rows go down the patient (or to the back, in an axial slice), columns to the patient's left (to the back, in a
    sagittal one). A mask is turned and flipped into the voxel order of its image; it is never resampled.
    """
    import nibabel

    image: Any = nibabel.load(path)
    shape, dtype, flat = image.shape, np.dtype(image.get_data_dtype()), len(image.shape) == 2
    colour = dtype.names is not None  # RGB24: one record per voxel
    if flat:
        shape = (*shape, 1)
    channels = shape[3] if len(shape) == 4 else 1
    if len(shape) > 4 or (options.mask and channels > 1) or (colour and channels > 1):
        wanted = "three axes" if options.mask else "three axes, or four with the last for channels"
        fix = "save one label map of three axes for each reader" if options.mask else "save one volume per file"
        raise FileError.of("E201", path, f"expected {wanted}, found shape {shape_text(image.shape)}", fix)
    affine = np.asarray(image.affine, float)
    target = options.like.affine if options.like is not None and options.geometry else None
    turn = _turn_for_viewing(affine, 2 if flat else options.axis) if target is None else _turn_into(affine, target)
    affine = _turned(affine, shape[:3], turn)
    (across, flipped), (row, row_step), (column, column_step) = ((int(axis), int(step)) for axis, step in turn)
    slices, size = shape[across], (shape[row], shape[column])
    scaled = image.dataobj.slope != 1 or image.dataobj.inter != 0
    dtype = np.dtype(np.uint8) if colour else np.dtype(np.float32) if scaled else dtype.newbyteorder("=")

    def stored(index: tuple[Any, ...] = ()) -> np.ndarray:
        voxels = np.asanyarray(image.dataobj[index] if index else image.dataobj)
        if colour:
            voxels = np.stack([voxels[name] for name in ("R", "G", "B")], -1)
        return voxels.astype(dtype, copy=False)

    whole = once(lambda: _compact(stored()) if options.mask else stored())
    compressed = path.name.lower().endswith(".gz")  # its slices are decoded together

    def read(k: int) -> np.ndarray:
        if flat:
            plane = whole()
        else:
            at = slices - 1 - k if flipped < 0 else k
            index = tuple(at if axis == across else slice(None) for axis in range(len(image.shape)))
            plane = whole()[index] if compressed else stored(index)
        plane = plane.reshape(*plane.shape[:2], -1)  # [.., .., C]
        if row > column:
            plane = plane.swapaxes(0, 1)
        return np.ascontiguousarray(np.moveaxis(plane[::row_step, ::column_step], -1, 0))

    return Source(path, "NIfTI", slices, size, 3 if colour else channels, dtype, read, affine)


def _turn_for_viewing(affine: np.ndarray, axis: int) -> np.ndarray:
    """``[3, 2]``: for slices, rows and columns, the stored axis, and whether it is reversed (-1)."""
    from nibabel.orientations import io_orientation

    towards = io_orientation(affine)  # stored axis -> axis of the patient (right, front, up) and direction
    towards[np.isnan(towards)] = 0
    plane = sorted((a for a in range(3) if a != axis), key=lambda a: towards[a, 0])
    column, row = plane  # the lower patient axis runs along the rows: left-right before front-back before up-down
    turn = [(axis, 1), (row, -towards[row, 1] or 1), (column, -towards[column, 1] or 1)]
    return np.array(turn, float)


def _turn_into(affine: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The turn that brings a stored volume into the slices, rows and columns of ``target``."""
    from nibabel.orientations import io_orientation

    mine, theirs = io_orientation(affine), io_orientation(target)
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


def _compact(array: np.ndarray) -> np.ndarray:
    """A mask in the smallest integer type that holds its values: many programs save masks as float64."""
    if array.dtype.kind == "b" or not array.size:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high) and (array == np.rint(array)).all()):
        return array
    return array.astype(np.promote_types(np.min_scalar_type(int(low)), np.min_scalar_type(int(high))), copy=False)
