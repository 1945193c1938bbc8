"""TIFF of any depth, with one page or many, by tifffile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.pictures import without_alpha
from ambiseg.io.source import ReadOptions, Source, once


def open_tiff(path: Path, options: ReadOptions) -> Source:
    """The pages of a file as slices; a single page is decoded at once, several together on the first read."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        series, page = file.series[0], file.pages.first
        if len(file.series) > 1:
            found = " and ".join(shape_text(one.shape) for one in file.series[:4])
            raise FileError.of("E201", path, f"expected pages of one size, found {found}", "save one stack per file")
        axes, shape = series.axes, series.shape
        planes = [n for name, n in zip(axes, shape, strict=True) if name not in "YXSC" and n > 1]
        if len(planes) > 1 or "Y" not in axes or "X" not in axes:
            raise FileError.of("E201", path, f"expected one axis of slices, found axes {axes} of {shape_text(shape)}")
        length = dict(zip(axes, shape, strict=True))
        dtype = np.dtype(series.dtype).newbyteorder("=")
        channels = length.get("S", 1) * length.get("C", 1) - _has_alpha(page)
        if _has_palette(page, options):
            dtype, channels = np.dtype(np.uint8), 3
        elif page.bitspersample == 1 and not options.mask:
            dtype = np.dtype(np.uint8)
        single = None if planes else _decode(file, path, options)  # while the file is open
    pages = once(lambda: _reopen(path, options) if single is None else single)
    size = length["Y"], length["X"]
    return Source(path, "TIFF", planes[0] if planes else 1, size, channels, dtype, lambda k: pages()[k])


def _has_palette(page: Any, options: ReadOptions) -> bool:
    return page.photometric == 3 and options.applies_palette  # PHOTOMETRIC.PALETTE


def _has_alpha(page: Any) -> bool:
    return any(extra != 0 for extra in page.extrasamples)  # EXTRASAMPLE.UNSPECIFIED


def _reopen(path: Path, options: ReadOptions) -> np.ndarray:
    import tifffile

    with tifffile.TiffFile(path) as file:
        return _decode(file, path, options)


def _decode(file: Any, path: Path, options: ReadOptions) -> np.ndarray:
    """``[D, C, H, W]`` of an open file."""
    import tifffile

    series, page = file.series[0], file.pages.first
    try:
        pixels = series.asarray()
    except (ValueError, KeyError) as error:
        if "imagecodecs" not in str(error):
            raise
        pixels = _decode_with_pillow(path, series.shape, np.dtype(series.dtype), str(page.compression.name))
    axes = series.axes  # at most one of those besides YXSC is longer than 1
    others = [i for i, name in enumerate(axes) if name not in "YXSC"]
    pixels = pixels.transpose([*others, *(axes.index(name) for name in "CSYX" if name in axes)])
    slices = int(np.prod(pixels.shape[: len(others)]))
    pixels = pixels.reshape(slices, -1, *pixels.shape[-2:])
    if _has_palette(page, options):
        table = (np.asarray(page.colormap) >> 8).astype(np.uint8)  # [3, 2^bits], 16 bits per channel
        return np.moveaxis(table[:, pixels[:, 0]], 0, 1)
    if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and not options.mask and pixels.dtype.kind in "bu":
        pixels = ~pixels  # as a viewer shows it
    if pixels.dtype == np.bool_ and not options.mask:
        pixels = pixels.astype(np.uint8) * np.uint8(255)
    if _has_alpha(page):
        pixels = np.stack([np.moveaxis(without_alpha(path, np.moveaxis(one, 0, -1)), -1, 0) for one in pixels])
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _decode_with_pillow(path: Path, shape: tuple[int, ...], dtype: np.dtype, compression: str) -> np.ndarray:
    """For compressions such as LZW, which tifffile decodes by another package; Pillow has no 16-bit colour."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        pages = np.stack([np.asarray(page) for page in ImageSequence.Iterator(image)])
    if pages.dtype != dtype or pages.size != np.prod(shape):
        fix = "pip install imagecodecs, or save the file without compression"
        raise FileError.of("E202", path, f"expected a TIFF that can be decoded, found {compression} of {dtype}", fix)
    return pages.reshape(shape)
