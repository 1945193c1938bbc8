"""NumPy arrays: ``.npy`` by memory map, ``.npz``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ambiseg._util.npz import Header, open_npz, read_header
from ambiseg._util.text import shape_text, some
from ambiseg.io.errors import FileError
from ambiseg.io.formats import suffix_of
from ambiseg.io.source import ReadOptions, Source, judge


def open_array(path: Path, options: ReadOptions) -> Source:
    """An array whose axes are ``options.axes``, or else ``HW`` or ``DHW``. A mask lacks the axis of channels."""
    try:
        with path.open("rb") as handle:
            if suffix_of(path) == ".npy":
                axes = _axes(path, read_header(handle), options)
                array = np.lib.format.open_memmap(path, mode="r")
            else:
                with open_npz(handle) as file:
                    key = "mask" if options.mask else "image"
                    names = file.names
                    if len(names) != 1 and key not in names:
                        found = f"expected one array or one called {key!r}, found {some(names) or 'none'}"
                        raise FileError.of("E201", path, found)
                    key = names[0] if len(names) == 1 else key
                    axes = _axes(path, file.header(key), options)
                    array = file.read(key)
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise FileError.of("E201", path, "expected numbers, found pickled objects, which are not opened") from None
    array = array.transpose([axes.index(name) for name in "DCHW" if name in axes])  # a view: nothing is read yet
    array = array[(slice(None) if "D" in axes else None, slice(None) if "C" in axes else None)]
    dtype = array.dtype.newbyteorder("=")
    slices, channels, height, width = array.shape
    return Source(path, "NumPy", slices, (height, width), channels, dtype, lambda k: array[k].astype(dtype))


def _axes(path: Path, header: Header, options: ReadOptions) -> str:
    """Which axis is which, of numbers whose size is within the limit."""
    if header.dtype.kind not in "buif" or header.dtype.itemsize > 8:
        raise FileError.of("E201", path, f"expected numbers, found {header.dtype}")
    shape, axes = header.shape, options.axes or ""
    if options.mask and len(shape) == len(axes) - 1:
        axes = axes.replace("C", "")
    if len(shape) != len(axes):
        axes = {2: "HW", 3: "DHW"}.get(len(shape))
    if axes is None:
        found = f'expected two axes, three, or those that "axes" names, found shape {shape_text(shape)}'
        raise FileError.of("E207", path, found)
    length = dict(zip(axes, shape, strict=True))
    judge(path, (length["H"], length["W"]), length.get("D", 1), length.get("C", 1), header.dtype)
    return axes
