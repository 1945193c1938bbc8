"""NumPy arrays: ``.npy`` by memory map, ``.npz``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ambiseg._util.text import shape_text, some
from ambiseg.io.errors import FileError
from ambiseg.io.formats import suffix_of
from ambiseg.io.source import ReadOptions, Source


def open_array(path: Path, options: ReadOptions) -> Source:
    """An array whose axes are ``options.axes``, or else ``HW`` or ``DHW``. A mask lacks the axis of channels."""
    try:
        array = _load(path, options)
    except ValueError as error:
        if not any(words in str(error) for words in ("Object arrays", "Python objects")):
            raise
        raise FileError.of("E201", path, "expected numbers, found pickled objects, which are not opened") from None
    if array.dtype.kind not in "buif":
        raise FileError.of("E201", path, f"expected numbers, found {array.dtype}")
    axes = options.axes or ""
    if options.mask and array.ndim == len(axes) - 1:
        axes = axes.replace("C", "")
    if array.ndim != len(axes):
        axes = {2: "HW", 3: "DHW"}.get(array.ndim)
    if axes is None:
        found = f'expected two axes, three, or those that "axes" names, found shape {shape_text(array.shape)}'
        raise FileError.of("E207", path, found)
    array = array.transpose([axes.index(name) for name in "DCHW" if name in axes])  # a view: nothing is read yet
    array = array[(slice(None) if "D" in axes else None, slice(None) if "C" in axes else None)]
    dtype = array.dtype.newbyteorder("=")
    slices, channels, height, width = array.shape
    return Source(path, "NumPy", slices, (height, width), channels, dtype, lambda k: array[k].astype(dtype))


def _load(path: Path, options: ReadOptions) -> np.ndarray:
    if suffix_of(path) == ".npy":
        return np.lib.format.open_memmap(path, mode="r")
    with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
        names = file.files
        key = "mask" if options.mask else "image"
        if len(names) != 1 and key not in names:
            raise FileError.of("E201", path, f"expected one array or one called {key!r}, found {some(names) or 'none'}")
        return file[names[0] if len(names) == 1 else key]
