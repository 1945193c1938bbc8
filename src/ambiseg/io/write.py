"""Write maps of class ids or of numbers as PNG, TIFF, NIfTI or NumPy files, with the geometry of an opened image."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.bands import bands
from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_write
from ambiseg.io.source import Source, guard
from ambiseg.io.tiff import tiff_file
from ambiseg.viz.colours import heat_colours, label_colours, palette

_SUFFIXES = {"TIFF": ".tif", "NumPy": ".npy", "NIfTI": ".nii.gz"}  # the other formats of pictures are written as PNG
# Georeferencing of a TIFF: pixel scale, tie points, transformation, and the three directories of GeoTIFF
_GEOGRAPHIC = (33550, 33922, 34264, 34735, 34736, 34737)


def suffix_for(source: Source) -> str:
    """The suffix of label maps of an image: its own format where that can be written.

    >>> read = lambda k: np.zeros((1, 4, 6), np.uint8)
    >>> suffix_for(Source(Path("a.jpg"), "JPEG", 1, (4, 6), 1, np.dtype("u1"), read))
    '.png'
    """
    if source.slices == 1:
        return _SUFFIXES.get(source.format, ".png")
    if source.format in ("NIfTI", "DICOM"):
        return ".tif" if source.affine is None else ".nii.gz"  # which needs a position in space
    return _SUFFIXES.get(source.format, ".tif")


def write_map(path: Path, values: np.ndarray, source: Source) -> None:
    """Write ``[H, W]`` or ``[D, H, W]`` in the format of the path's suffix, with the geometry of ``source``.

    A NIfTI may have several values per voxel, ``[D, H, W, V]``.
    """
    with atomic_write(path) as file:
        if path.name.endswith(".nii.gz"):
            _write_nifti(file, values, source)
        elif path.suffix == ".npy":
            np.save(file, values, allow_pickle=False)
        elif path.suffix == ".tif":
            _write_tiff(file, values, source)
        else:
            colours = palette(label_colours(256)) if values.dtype == np.uint8 else None
            _write_png(file, values, colours, source.dpi)


def geometry(source: Source) -> bytes:
    """The part of an image's file that :func:`write_map` reads, as a small file without pixels: of NIfTI its header,
    of TIFF its scale and its place on the ground. Empty for other formats.

    Written to a file that ``Source.geometry`` names, it takes the place of a file that is gone.
    """
    if source.header or source.format not in ("NIfTI", "TIFF"):
        return source.header
    if source.format == "TIFF":
        return _placed(source.path)[1]
    import nibabel

    with guard(source.path):
        original: Any = nibabel.load(source.path)
        header = original.header.copy()
        header["vox_offset"], header["magic"] = header.single_vox_offset, header.single_magic
        return bytes(header.binaryblock) + bytes(4)  # no extensions


def write_heat(path: Path, values: np.ndarray, top: float) -> None:
    """Write ``[H, W]`` values of 0 to ``top`` as a PNG whose palette shows higher ones brighter."""
    shown, flat = np.empty(values.shape, np.uint8), np.ascontiguousarray(values).reshape(-1)
    for band in bands(flat.size):
        shown.reshape(-1)[band] = np.round(255 * np.clip(flat[band] / np.float64(top), 0, 1))
    with atomic_write(path) as file:
        _write_png(file, shown, heat_colours(np.linspace(0, 1, 256)))


def _write_png(file: BinaryIO, values: np.ndarray, colours: np.ndarray | None, dpi: Any = None) -> None:
    """Pixels hold the values themselves; the palette is for viewers."""
    from PIL import Image

    image = Image.fromarray(values)
    if colours is not None:
        image.putpalette(colours.tobytes())
    image.save(file, "PNG", dpi=dpi)


def _write_tiff(file: BinaryIO, values: np.ndarray, source: Source) -> None:
    import tifffile

    about: dict[str, Any] = {"photometric": "minisblack", "compression": "zlib"}
    about["metadata"] = {"axes": "ZYX" if values.ndim == 3 else "YX"}
    tifffile.imwrite(
        file, values, **about, **(_places(source.geometry or source.path) if source.format == "TIFF" else {})
    )


def _places(path: Path) -> dict[str, Any]:
    """The scale of a TIFF and its place on the ground, as arguments of tifffile; nothing if they cannot be written."""
    return _placed(path)[0]


def _placed(path: Path) -> tuple[dict[str, Any], bytes]:
    """The same, and a TIFF of one pixel that has them."""
    import tifffile

    about: dict[str, Any] = {}
    try:
        with guard(path):
            with tiff_file(path) as original:
                tags = original.pages.first.tags
                if {282, 283} <= set(tags.keys()):  # pixels per unit across and down, and the unit
                    about["resolution"] = tags[282].value, tags[283].value
                    about["resolutionunit"] = tags[296].value if 296 in tags else None
                found = [tags[code] for code in _GEOGRAPHIC if code in tags]
                about["extratags"] = [(tag.code, tag.dtype, tag.count, tag.value, True) for tag in found]
            made = io.BytesIO()
            tifffile.imwrite(made, np.zeros((1, 1), np.uint8), **about)  # whatever the tags of the image hold
    except DataError:
        return {}, b""
    return about, made.getvalue()


def _write_nifti(file: BinaryIO, values: np.ndarray, source: Source) -> None:
    """In the voxel order of a NIfTI source, with its affine; of DICOM, as (column, row, slice)."""
    import nibabel
    from nibabel.orientations import apply_orientation, io_orientation

    assert source.affine is not None
    volume = values[None] if values.ndim == 2 else values
    if source.format == "NIfTI":
        original: Any = nibabel.load(source.geometry or source.path)
        turn = np.round(np.linalg.pinv(original.affine) @ source.affine)  # (slice, row, column) -> the file's (i, j, k)
        steps = np.abs(turn[:3, :3])  # of an affine without an inverse, no permutation
        if (steps.sum(0) != 1).any() or (steps.sum(1) != 1).any():
            found = original.affine[:3, :3].tolist()
            raise DataError(f"{source.path}: expected an affine that can be inverted, found {found}")
        volume = apply_orientation(volume, io_orientation(turn)).reshape(
            (*original.shape, 1)[:3] + values.shape[3:] if values.ndim == 4 else original.shape[:3]
        )
        image = nibabel.Nifti1Image(volume, original.affine, original.header)
        image.header.extensions.clear()
        for field in ("descrip", "aux_file", "db_name"):  # may name the patient, and describe another file
            image.header[field] = b""
    else:
        image = nibabel.Nifti1Image(np.moveaxis(volume, (2, 1, 0), (0, 1, 2)), source.affine[:, [2, 1, 0, 3]])
        image.header.set_xyzt_units("mm")
    image.set_data_dtype(values.dtype)
    image.header["cal_min"] = image.header["cal_max"] = 0  # the display window of the image does not fit these values
    image.header.set_slope_inter(1, 0)
    if values.dtype.kind == "u":
        image.header.set_intent("label", name="class ids")
    packed = _Gzip(file)
    image.to_stream(packed)  # type: ignore[arg-type]
    packed.finish()


class _Gzip(io.RawIOBase):
    """Compresses what is written to it, without the time: equal masks are equal files. Nothing waits in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at, self._pack = file, 0, zlib.compressobj(6, zlib.DEFLATED, 31)  # 31: as gzip does

    def write(self, content: Any, /) -> int:
        self._file.write(self._pack.compress(content))
        self._at += len(content)
        return len(content)

    def tell(self) -> int:
        return self._at

    def seek(self, place: int, whence: int = 0, /) -> int:
        if place != self._at or whence:  # nibabel then fills up to it
            raise OSError(f"expected to stay at {self._at}, found a seek to {place}")
        return place

    def finish(self) -> None:
        self._file.write(self._pack.flush())
