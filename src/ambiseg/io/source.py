"""One file of pixels: which formats are read, and how a picture, a stack or an array becomes ``[C, H, W]``."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ambiseg._util.text import shape_text, some
from ambiseg.io.problems import Problem, Refused

FORMATS: dict[str, str] = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".nii": "NIfTI",
    ".nii.gz": "NIfTI",
    ".dcm": "DICOM",
    ".dicom": "DICOM",
}

# Pictures all the same, so a folder that holds them is not just untidy: the checker says that they are not read.
UNREAD: dict[str, str] = {
    ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage", ".hdr": "Analyze", ".img": "Analyze", ".mgz": "MGH",
    ".gif": "GIF", ".webp": "WebP", ".heic": "HEIC", ".jp2": "JPEG 2000", ".svs": "Aperio", ".ndpi": "Hamamatsu",
    ".czi": "Zeiss", ".h5": "HDF5", ".hdf5": "HDF5", ".mat": "MATLAB", ".pkl": "pickle", ".pt": "PyTorch",
    ".svg": "SVG", ".xcf": "GIMP", ".psd": "Photoshop",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Source:
    """One opened file, or one series: what its header says, and its slices on demand.

    Args:
        slices: how many; 1 for a picture.
        size: height and width of a slice.
        channels: of an image; of a mask, 3 if it is in colour.
        read: slice number -> ``[C, H, W]``. A mask that was stored with one bit a pixel is bool.
        affine: ``[4, 4]``, from (slice, row, column) to millimetres right, anterior and superior; ``None`` if the
            format has none.
        notes: what is odd about the file without keeping it from being read.
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

    @property
    def nbytes(self) -> int:
        """What all slices take in memory."""
        return self.slices * self.channels * self.size[0] * self.size[1] * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Size in words: ``64×48``, or ``20 slices of 64×48``."""
        return shape_text(self.size) if self.slices == 1 else f"{self.slices} slices of {shape_text(self.size)}"


@dataclass(frozen=True)
class How:
    """How a file is to be read: as an image or a mask, and what the folder's settings say about its format."""

    mask: bool = False
    coloured: bool = False  # a mask's palette is its colours, because the settings map colours
    axes: str | None = None
    axis: int = 2
    like: Source | None = None  # the image, whose grid a mask is turned into
    geometry: bool = True


def suffix_of(path: Path) -> str:
    """The suffix in lower case, ``.nii.gz`` in one; ``""`` for a file whose name has none.

    >>> suffix_of(Path("Scan.01.NII.GZ")), suffix_of(Path("IM0001"))
    ('.nii.gz', '')
    """
    name = path.name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else path.suffix.lower()


def stem_of(path: Path) -> str:
    """The file's name without its suffix, if that is one of a known format.

    >>> stem_of(Path("Scan.01.nii.gz")), stem_of(Path("1.2.840"))
    ('Scan.01', '1.2.840')
    """
    suffix = suffix_of(path)
    return path.name[: -len(suffix)] if suffix in FORMATS or suffix in UNREAD else path.name


def format_of(path: Path) -> str | None:
    """The format by suffix; scanners name DICOM files without one, so those are known by their first bytes."""
    if (suffix := suffix_of(path)) in FORMATS:
        return FORMATS[suffix]
    if (not suffix or suffix[1:].isdigit()) and path.is_file():
        try:
            with path.open("rb") as file:
                return "DICOM" if file.read(132)[128:] == b"DICM" else None
        except OSError:
            return None
    return None


def open_source(path: Path, how: How | None = None) -> Source:
    """Read the header of a file, or of a folder of DICOM slices. Raises ``DataError`` that names it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npy"
    >>> np.save(path, np.zeros((4, 6), np.int16))
    >>> source = open_source(path)
    >>> source.form, source.dtype, source.read(0).shape
    ('4×6', dtype('int16'), (1, 4, 6))
    """
    how = how or How()
    with guard(path):
        kind = "DICOM" if path.is_dir() else format_of(path)
        if kind is None:
            found = UNREAD.get(suffix_of(path), path.suffix or "no suffix")
            raise Refused.of("E105", path, f"expected one of {' '.join(FORMATS)}, found {found}")
        if not path.exists():
            if path.is_symlink():
                found = f"found a link to {os.readlink(path)}, where nothing is"
                raise Refused.of("E106", path, f"expected a file, {found}", "mend the link, or copy the file itself")
            raise Refused.of("E106", path, "expected a file, found none")
        if not (path.is_file() or path.is_dir()):  # reading from a pipe would wait for ever
            raise Refused.of("E201", path, "expected a file, found a pipe or a device", "remove it")
        source = OPENERS[kind](path, how)
        return Source(**{**source.__dict__, "read": _guarded(path, source.read)})


def _guarded(path: Path, read: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
    def guarded(index: int) -> np.ndarray:
        with guard(path):
            return read(index)

    return guarded


@contextmanager
def guard(path: Path) -> Iterator[None]:
    """Whatever a decoder raises becomes one line that names the file; what it has to say besides is kept quiet."""
    loggers = [logging.getLogger(name) for name in ("tifffile", "nibabel.global", "pydicom")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True  # a change of level would empty the caches of all loggers, each time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Refused:
        raise
    except MemoryError:
        raise
    except Exception as error:  # damaged files fail in more ways than can be listed: zlib, struct, headers, EOF
        raise Refused.of("E201", path, *_diagnosis(path, error)) from None
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _diagnosis(path: Path, error: Exception) -> tuple[str, str]:
    """What was expected and found in a file that cannot be decoded, and what to do."""
    expected = f"expected {FORMATS.get(suffix_of(path), 'DICOM')}"
    if isinstance(error, PermissionError):
        return "expected a file that may be read, found that permission is denied", "change the file's permissions"
    if type(error).__name__ == "DecompressionBombError":  # Pillow's, which not every file needs
        found = re.search(r"\((\d+) pixels\).* (\d+) pixels", str(error))
        size, most = (f"{int(n):,}" for n in found.groups()) if found else ("more", "fewer")
        return f"{expected} of at most {most} pixels, found {size}", "save so large a picture as TIFF, or in parts"
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as unreadable:
        return f"{expected}, found {unreadable.strerror or unreadable}", ""
    if not head:
        return f"{expected}, found an empty file (0 bytes)", "copy the file again: it arrived without its content"
    if not head.strip(b"\0"):
        return f"{expected}, found zeros", "copy the file again: it arrived without its content"
    if head.startswith(b"version https://git-lfs"):
        return f"{expected}, found a Git LFS pointer", "fetch the file itself with `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return f"{expected}, found a web page or XML", "download the file itself, not the page about it"
    if b"\0" not in head and all(byte >= 32 or byte in b"\t\r\n" for byte in head):
        return f"{expected}, found text", "look into the file: its name promises a picture"
    said = " ".join(str(error).split()).removesuffix(".").replace(str(path), "the file")
    said = next((plain for odd, plain in _PLAIN.items() if odd in said), said)
    return f"{expected} that can be decoded, found damage: {said[:160] or type(error).__name__}", ""


_PLAIN = {  # what decoders say, in words that a user can do something with
    "cannot identify image file": "no header of a picture",
    "not enough data in file": "the file ends too early",
    "cannot reshape array of size": "the file ends too early",
    "Compressed file ended before": "the file ends too early",
}


def once(read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """``read``, called once: the slices of a compressed volume come out together."""
    kept: list[np.ndarray] = []

    def value() -> np.ndarray:
        if not kept:
            kept.append(read())
        return kept[0]

    return value


def _open_array(path: Path, how: How) -> Source:
    array = _load_array(path, how)
    if array.dtype.kind not in "buif":
        raise Refused.of("E201", path, f"expected numbers, found {array.dtype}")
    axes = how.axes if how.axes and (array.ndim == len(how.axes)) else {2: "HW", 3: "DHW"}.get(array.ndim)
    if how.mask and how.axes and how.axes != axes and array.ndim == len(how.axes) - 1:
        axes = how.axes.replace("C", "")  # an image's channels have no counterpart in its masks
    if axes is None:
        code = f'expected two axes, three, or those that "axes" names, found shape {shape_text(array.shape)}'
        raise Refused.of("E207", path, code)
    order = [axes.index(name) for name in "DCHW" if name in axes]
    array = array.transpose(order)  # a view: nothing is read yet
    array = array[(slice(None) if "D" in axes else None, slice(None) if "C" in axes else None)]
    dtype = array.dtype.newbyteorder("=")
    slices, channels, height, width = array.shape
    return Source(path, "NumPy", slices, (height, width), channels, dtype, lambda k: array[k].astype(dtype))


def _load_array(path: Path, how: How) -> np.ndarray:
    if suffix_of(path) == ".npy":
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise ValueError("no NumPy header")
        with _no_pickles(path):
            return np.load(path, mmap_mode="r", allow_pickle=False)
    with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file, _no_pickles(path):
        names = file.files
        key = "mask" if how.mask else "image"
        if len(names) != 1 and key not in names:
            raise Refused.of("E201", path, f"expected one array or one called {key!r}, found {some(names) or 'none'}")
        return file[names[0] if len(names) == 1 else key]


@contextmanager
def _no_pickles(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "allow_pickle" not in str(error) and "Python objects" not in str(error):
            raise
        raise Refused.of("E201", path, "expected numbers, found pickled objects, which are not opened") from None


# The decoders are imported when the first file of their kind is met: `import ambiseg.data` needs none of them.


def _open_picture(path: Path, how: How) -> Source:
    from ambiseg.io.pictures import open_picture

    return open_picture(path, how)


def _open_tiff(path: Path, how: How) -> Source:
    from ambiseg.io.pictures import open_tiff

    return open_tiff(path, how)


def _open_nifti(path: Path, how: How) -> Source:
    from ambiseg.io.medical import open_nifti

    return open_nifti(path, how)


def _open_dicom(path: Path, how: How) -> Source:
    from ambiseg.io.medical import open_dicom

    return open_dicom(path, how)


OPENERS: dict[str, Callable[[Path, How], Source]] = {
    "PNG": _open_picture,
    "JPEG": _open_picture,
    "BMP": _open_picture,
    "TIFF": _open_tiff,
    "NumPy": _open_array,
    "NIfTI": _open_nifti,
    "DICOM": _open_dicom,
}
