"""An opened image or mask file, the options it is read with, and errors of decoders as one line."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util import limits
from ambiseg._util.errors import DataError
from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError, Problem
from ambiseg.io.formats import FORMATS, suffix_of
from ambiseg.io.planes import Planes

_TOLERANCE = 0.1  # of a voxel: headers round positions, so smaller offsets between two grids are ignored


@dataclass(frozen=True, eq=False)
class Source:
    """One opened file or DICOM series: the content of its header, and its slices on demand.

    Args:
        slices: how many; 1 for a picture.
        size: height and width of a slice.
        channels: of an image; of a mask, 3 if it is in colour.
        read: slice number -> ``[C, H, W]``. A mask that was stored with one bit per pixel is bool.
        affine: ``[4, 4]``, from (slice, row, column) to millimetres right, anterior and superior; ``None`` if the
            format has none.
        notes: warnings about the file, which can be read all the same.
        dpi: pixels per inch of a picture, across and down, if the file says so.
        units: of the values, if the file says so.
        planes: of DICOM, the instance of each slice and where it lies.
        ids: values of a mask are class ids, whatever masks of other formats mean; 65535 is void.
        header: of an image whose file is gone, what :func:`ambiseg.io.write.geometry` kept of it.
        geometry: a file that has the image's place in space, if it is not ``path`` itself.
    """

    path: Path
    format: str
    slices: int
    size: tuple[int, int]
    channels: int
    dtype: np.dtype
    read: Callable[[int], np.ndarray]
    affine: np.ndarray | None = None
    notes: tuple[Problem, ...] = ()
    dpi: tuple[float, float] | None = None
    units: str = ""
    planes: Planes | None = None
    ids: bool = False
    header: bytes = b""
    geometry: Path | None = None

    @property
    def nbytes(self) -> int:
        """Memory that all slices take."""
        return self.slices * self.channels * self.size[0] * self.size[1] * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Size in words: ``64×48``, or ``20 slices of 64×48``."""
        return shape_text(self.size) if self.slices == 1 else f"{self.slices} slices of {shape_text(self.size)}"

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Millimetres between slices (of a volume), rows and columns; ``None`` where the file does not say.

        >>> affine = np.diag([2.5, 0.5, 0.75, 1.0])
        >>> Source(Path("a"), "NIfTI", 9, (4, 6), 1, np.dtype("f4"), lambda k: np.zeros((1, 4, 6)), affine).spacing
        (2.5, 0.5, 0.75)
        """
        if self.affine is not None:
            steps = np.linalg.norm(self.affine[:3, :3], axis=0)
        elif self.planes is not None and self.planes.placed:
            rows, columns = np.linalg.norm(self.planes.down[0]), np.linalg.norm(self.planes.across[0])
            steps = np.array([self.planes.step, rows, columns])
        else:
            return None
        steps = steps[0 if self.slices > 1 else 1 :]
        return tuple(steps.tolist()) if np.isfinite(steps).all() and (steps > 0).all() else None


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read.

    Args:
        mask: as a mask (class ids, as stored) instead of as an image (as a viewer shows it).
        coloured: colours of a mask are mapped to classes, so its palette is applied.
        axes: of NumPy arrays, such as ``"HWC"``; ``None``: ``HW`` or ``DHW``.
        axis: along which a NIfTI volume is cut into slices.
        like: the image of a mask, into whose voxel order the mask is turned; ``None``: it is turned as an image is.
        image: the image of a mask, for formats without a grid of their own.
        segments: class id, or "void", of each segment or structure by its name or number; the last is drawn on top.
        classes: names of the class ids, if they are declared.
    """

    mask: bool = False
    coloured: bool = False
    axes: str | None = None
    axis: int = 2
    like: Source | None = None
    image: Source | None = None
    segments: Mapping[str, int | str] | None = None
    classes: tuple[str, ...] | None = None

    @property
    def applies_palette(self) -> bool:
        """Whether a pixel of a palette picture is read as its colour, not as its index."""
        return not self.mask or self.coloured


def grid_distance(image: Source, mask: Source) -> float | None:
    """The largest distance in millimetres between the same corner of both grids; ``None`` within the tolerance.

    >>> from dataclasses import replace
    >>> a = Source(Path("a"), "NIfTI", 2, (4, 4), 1, np.dtype("u1"), lambda k: np.zeros((1, 4, 4)), np.eye(4))
    >>> moved = np.eye(4); moved[0, 3] = 3
    >>> grid_distance(a, replace(a, affine=moved)), grid_distance(a, a)
    (3.0, None)
    """
    if image.affine is None or mask.affine is None:
        return None
    corners = np.array([*product((0, image.slices - 1), *((0, n - 1) for n in image.size), (1,))], float).T
    offset = np.linalg.norm(((image.affine - mask.affine) @ corners)[:3], axis=0).max()
    voxel = np.linalg.norm(image.affine[:3, 1:3], axis=0).min()
    return None if offset <= _TOLERANCE * voxel else float(offset)


def judge(
    path: Path, size: tuple[int, int], slices: int = 1, channels: int = 1, dtype: np.dtype | None = None
) -> tuple[int, int]:
    """The size that a header claims, or a :class:`FileError`: of none, or above the limit (``_util/limits.py``).

    Every reader asks this before it allocates anything.
    """
    if min(*size, slices, channels) < 1:
        claimed = f"{shape_text(size)} pixels, {slices} slices and {channels} channels"
        raise FileError.of("E201", path, f"expected at least one pixel, found a header of {claimed}")
    if found := limits.too_large(size, slices, channels, 1 if dtype is None else dtype.itemsize):
        raise FileError.of("E210", path, *found)
    return size


@contextmanager
def decoding_at_most(pixels: int) -> Iterator[None]:
    """Pillow's own limit for a while: its decoders allocate some pictures before their size is known outside."""
    from PIL import Image

    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max(pixels // 2, 1)  # more are a warning, twice as many an error
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


class WholeRead(ValueError):
    """Somebody wanted all of a :class:`Frugal` file at once."""


class Frugal(io.BufferedReader):
    """A file of which only so many bytes may be read: headers that go on for ever end here, seeking is free.

    Args:
        path: the file.
        allowance: bytes that may be read before ``allow`` is called again.
    """

    def __init__(self, path: Path, allowance: int) -> None:
        raw: Any = path.open("rb", buffering=0)
        super().__init__(raw)
        self._allowed = self._left = allowance

    def allow(self, allowance: int) -> None:
        self._allowed = self._left = allowance

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise WholeRead("a file that must be read as a whole")
        content = super().read(min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"more than {self._allowed:,} bytes where fewer are enough")
        return content


# -- errors of decoders ----------------------------------------------------------------------------------------------


@contextmanager
def guard(path: Path) -> Iterator[None]:
    """Turns any exception of a decoder into a :class:`FileError` that names the file; silences its warnings."""
    loggers = map(logging.getLogger, ("tifffile", "nibabel.global", "pydicom"))
    before = {logger: logger.disabled for logger in loggers}
    try:
        for logger in before:
            logger.disabled = True  # not its level: changing that empties the caches of all loggers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (DataError, ModuleNotFoundError):
        raise
    except MemoryError as error:
        said = " ".join(str(error).split()) or f"none left for a file of {_bytes_of(path):,} bytes"
        fix = f"free some memory, or cut the image into parts; {limits.OPTION} refuses such images beforehand"
        raise FileError.of("E210", path, f"expected an image that fits into memory, found: {said}", fix) from None
    except Exception as error:  # damaged files fail in more ways than can be listed: zlib, struct, headers, EOF
        raise FileError.of("E201", path, *_diagnosis(path, error)) from None
    finally:
        for logger, disabled in before.items():
            logger.disabled = disabled


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_PLAIN = {  # messages of decoders, in words for users
    "cannot identify image file": "no header of a picture",
    "magic string is not correct": "no NumPy header",
    "Cannot load file containing pickled data": "no NumPy header",
    "not enough data in file": "the file ends too early",
    "cannot reshape array of size": "the file ends too early",
    "Compressed file ended before": "the file ends too early",
}


def _diagnosis(path: Path, error: Exception) -> tuple[str, str]:
    """For a file that cannot be decoded: what was expected and found, and the remedy."""
    expected = f"expected {FORMATS.get(suffix_of(path), 'DICOM')}"
    if isinstance(error, PermissionError):
        return "expected a file that may be read, found that permission is denied", "change the file's permissions"
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as unreadable:
        return f"{expected}, found {unreadable.strerror or unreadable}", ""
    if not head.strip(b"\0"):
        found = "zeros" if head else "an empty file (0 bytes)"
        return f"{expected}, found {found}", "copy the file again: its content is missing"
    if head.startswith(b"version https://git-lfs"):
        return f"{expected}, found a Git LFS pointer", "fetch the file itself with `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return f"{expected}, found a web page or XML", "download the file itself, not the page about it"
    if b"\0" not in head and all(byte >= 32 or byte in b"\t\r\n" for byte in head):
        return f"{expected}, found text", "look into the file: its suffix does not fit its content"
    said = " ".join(str(error).split()).removesuffix(".").replace(str(path), "the file")
    said = next((plain for odd, plain in _PLAIN.items() if odd in said), said)
    return f"{expected} that can be decoded, found damage: {said[:160] or type(error).__name__}", ""
