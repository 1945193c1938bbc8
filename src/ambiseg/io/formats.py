"""The file formats that are read, and how a file's format is recognised."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FORMATS: dict[str, str] = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".bmp": "BMP",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".nii": "NIfTI",
    ".nii.gz": "NIfTI",
    ".dcm": "DICOM",
    ".dicom": "DICOM",
}

# Formats of images that are not read. The checker reports such files instead of ignoring them.
UNREAD: dict[str, str] = {
    ".nrrd": "NRRD", ".mha": "MetaImage", ".mhd": "MetaImage", ".hdr": "Analyze", ".img": "Analyze", ".mgz": "MGH",
    ".webp": "WebP", ".heic": "HEIC", ".jp2": "JPEG 2000", ".svs": "Aperio", ".ndpi": "Hamamatsu",
    ".czi": "Zeiss", ".h5": "HDF5", ".hdf5": "HDF5", ".mat": "MATLAB", ".pkl": "pickle", ".pt": "PyTorch",
    ".svg": "SVG", ".xcf": "GIMP", ".psd": "Photoshop",
}  # fmt: skip


def suffix_of(path: Path) -> str:
    """The suffix in lower case, with ``.nii.gz`` as one suffix; ``""`` for a name without any.

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
    """The format by suffix; a file without suffix is DICOM if its first bytes say so, as scanners name them."""
    suffix = suffix_of(path)
    if suffix not in FORMATS and (not suffix or suffix[1:].isdigit()) and path.is_file():
        with suppress(OSError), path.open("rb") as file:
            return "DICOM" if file.read(132)[128:] == b"DICM" else None
    return FORMATS.get(suffix)
