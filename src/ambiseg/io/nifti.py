"""NIfTI volumes, by nibabel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.source import ReadOptions, Source


def open_nifti(path: Path, options: ReadOptions) -> Source:
    """A volume's slices along ``options.axis`` as stored, each turned as radiologists view it.

    Rows go down the patient (or to the back, in an axial slice), columns to the patient's left (to the back, in a
    sagittal one). A mask is turned and flipped into the voxel order of its image; it is never resampled.
    """
    import nibabel
    from nibabel.orientations import inv_ornt_aff, io_orientation, ornt_transform

    image: Any = nibabel.load(path)
    flat, dtype = len(image.shape) == 2, np.dtype(image.get_data_dtype())
    shape = (*image.shape, 1) if flat else image.shape
    colour = dtype.names is not None  # RGB24: one record per voxel
    channels = 3 if colour else shape[3] if len(shape) == 4 else 1
    if len(shape) > 4 or (len(shape) == 4 and shape[3] > 1 and (options.mask or colour)):
        wanted = "three axes" if options.mask else "three axes, or four with the last for channels"
        fix = "save one label map of three axes for each reader" if options.mask else "save one volume per file"
        raise FileError.of("E201", path, f"expected {wanted}, found shape {shape_text(image.shape)}", fix)
    orientation = io_orientation(image.affine)
    if options.like is not None and options.like.affine is not None:
        turn = ornt_transform(orientation, io_orientation(options.like.affine))
    else:
        turn = _turn_for_viewing(orientation, 2 if flat else options.axis)
    across, row, column = np.argsort(turn[:, 0]).tolist()  # stored axes of slices, rows and columns
    step = turn[:, 1].astype(int)  # -1: reversed
    slices = shape[across]
    scaled = image.dataobj.slope != 1 or image.dataobj.inter != 0
    dtype = np.dtype(np.uint8) if colour else np.dtype(np.float32) if scaled else dtype.newbyteorder("=")

    def stored(index: tuple[Any, ...] = ()) -> np.ndarray:
        voxels = np.asanyarray(image.dataobj[index] if index else image.dataobj)
        if colour:
            voxels = np.stack([voxels[name] for name in ("R", "G", "B")], -1)
        return voxels.astype(dtype, copy=False)

    whole = cache(lambda: _compact(stored()) if options.mask else stored())
    compressed = path.name.lower().endswith(".gz")  # its slices are decoded together

    def read(k: int) -> np.ndarray:
        at = k if step[across] > 0 else slices - 1 - k
        index = () if flat else tuple(at if axis == across else slice(None) for axis in range(len(shape)))
        plane = whole()[index] if flat or compressed else stored(index)
        plane = plane.reshape(*plane.shape[:2], -1)  # [.., .., C]
        plane = plane.swapaxes(0, 1) if row > column else plane
        return np.ascontiguousarray(np.moveaxis(plane[:: step[row], :: step[column]], -1, 0))

    affine = np.asarray(image.affine @ inv_ornt_aff(turn, shape[:3]), float)
    return Source(path, "NIfTI", slices, (shape[row], shape[column]), channels, dtype, read, affine)


def _turn_for_viewing(orientation: np.ndarray, axis: int) -> np.ndarray:
    """``[3, 2]``: for each stored axis 0, 1 or 2 for slices, rows or columns, and 1, or -1 if it is reversed."""
    towards = np.nan_to_num(orientation)  # stored axis -> axis of the patient (right, front, up) and direction
    # The lower patient axis runs along the rows: left-right before front-back before up-down.
    column, row = sorted((a for a in range(3) if a != axis), key=lambda a: towards[a, 0])
    turn = np.zeros((3, 2))
    turn[[axis, row, column]] = [(0, 1), (1, -towards[row, 1] or 1), (2, -towards[column, 1] or 1)]
    return turn


def _compact(array: np.ndarray) -> np.ndarray:
    """A mask in the smallest integer type that holds its values: many programs save masks as float64."""
    if array.dtype.kind == "b" or not array.size:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind == "f" and not (np.isfinite([low, high]).all() and (array == np.rint(array)).all()):
        return array
    return array.astype(np.promote_types(np.min_scalar_type(int(low)), np.min_scalar_type(int(high))), copy=False)
