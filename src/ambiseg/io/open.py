"""Open an image or a mask of any format."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.arrays import open_array
from ambiseg.io.dicom import open_dicom
from ambiseg.io.errors import FileError
from ambiseg.io.formats import FORMATS, UNREAD, format_of, suffix_of
from ambiseg.io.nifti import open_nifti
from ambiseg.io.pictures import open_picture
from ambiseg.io.source import ReadOptions, Source, guard
from ambiseg.io.tiff import open_tiff

# All other formats are pictures.
OPENERS = {"TIFF": open_tiff, "NumPy": open_array, "NIfTI": open_nifti, "DICOM": open_dicom}


def open_source(path: Path, options: ReadOptions | None = None) -> Source:
    """Read the header of a file, or of a folder of DICOM slices. Raises a ``FileError`` that names it.

    Pictures (PNG, JPEG, BMP, PPM, GIF, TIFF of one page) are decoded at once, other files of one slice on the first
    ``read``; both keep the pixels.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npy"
    >>> np.save(path, np.zeros((4, 6), np.int16))
    >>> source = open_source(path)
    >>> source.form, source.dtype, source.read(0).shape
    ('4×6', dtype('int16'), (1, 4, 6))
    """
    options = options or ReadOptions()
    with guard(path):
        kind = "DICOM" if path.is_dir() else format_of(path)
        if kind is None:
            found = UNREAD.get(suffix_of(path), path.suffix or "no suffix")
            raise FileError.of("E105", path, f"expected one of {' '.join(FORMATS)}, found {found}")
        if path.is_symlink() and not path.exists():
            message = f"expected a file, found a link to {os.readlink(path)}, which does not exist"
            raise FileError.of("E106", path, message, "mend the link, or copy the file itself")
        if not path.exists():
            raise FileError.of("E106", path, "expected a file, found none")
        if not (path.is_file() or path.is_dir()):  # reading from a pipe would block
            raise FileError.of("E201", path, "expected a file, found a pipe or a device", "remove it")
        source = OPENERS.get(kind, open_picture)(path, options)

    def read(k: int) -> np.ndarray:
        with guard(path):
            pixels = source.read(k)
            kind = pixels.dtype.kind in "buif" if options.mask else pixels.dtype == source.dtype
            if not kind or pixels.shape != (source.channels, *source.size):  # which others rely on
                claimed = f"{shape_text((source.channels, *source.size))} of {source.dtype}"
                raise ValueError(f"{shape_text(pixels.shape)} of {pixels.dtype} where the header says {claimed}")
            return pixels

    return replace(source, read=cache(read) if source.slices == 1 else read)
