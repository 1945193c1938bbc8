"""Pictures: PNG, JPEG, BMP, PPM and GIF by Pillow; TIFF of any depth, with one page or many, by tifffile."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import count, shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.source import ReadOptions, Source


def open_picture(path: Path, options: ReadOptions) -> Source:
    """One picture, decoded at once: orientation, palette and alpha decide its size and channels."""
    from PIL import Image

    content = io.BytesIO(path.read_bytes())
    with Image.open(content) as image:
        kind, dpi = str(image.format), image.info.get("dpi")
        if (frames := getattr(image, "n_frames", 1)) > 1 and kind == "GIF":
            raise FileError.of("E105", path, f"expected one picture, found a film of {frames} frames")
        pixels = _read_picture(path, image, content, options)
    channels, height, width = pixels.shape
    return Source(path, kind, 1, (height, width), channels, pixels.dtype, lambda _: pixels, dpi=dpi)


def _read_picture(path: Path, image: Any, content: io.BytesIO, options: ReadOptions) -> np.ndarray:
    """``[C, H, W]``."""
    from PIL import ImageOps

    if image.format == "PNG" and image.mode in ("RGB", "RGBA") and ";16B" in str(image.tile[0][3]):
        pixels = _read_deep(path, image, content)
    else:
        turned = ImageOps.exif_transpose(image)  # as every viewer shows it
        coloured = options.applies_palette or image.format == "GIF"  # whose numbers are any program's own choice
        if turned.mode == "PA" or (turned.mode == "P" and coloured):
            turned = turned.convert("RGBA" if "transparency" in turned.info or turned.mode == "PA" else "RGB")
        elif turned.mode in ("CMYK", "YCbCr", "HSV", "LAB"):
            turned = turned.convert("RGB")
        pixels = np.asarray(turned)
    pixels = np.moveaxis(np.atleast_3d(pixels), -1, 0)
    return _as_shown(pixels if len(pixels) in (1, 3) else _without_alpha(path, pixels), options)


def _as_shown(pixels: np.ndarray, options: ReadOptions) -> np.ndarray:
    """In native byte order; one bit per pixel is black and white in an image, and stays bool in a mask."""
    if pixels.dtype == np.bool_ and not options.mask:
        return pixels.astype(np.uint8) * np.uint8(255)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _read_deep(path: Path, image: Any, content: io.BytesIO) -> np.ndarray:
    """``[H, W, C]`` uint16 of a PNG with 16 bits per channel, which Pillow would cut down to 8.

    Pillow can unpack the high bytes or the low bytes, so the content is decoded once for each.
    """
    from PIL import Image

    tile = image.tile[0]
    if tile[3] not in ("RGB;16B", "RGBA;16B"):
        raise FileError.of("E203", path, "expected 16-bit grey without alpha, found alpha")
    high = np.asarray(image).astype(np.uint16)
    content.seek(0)
    with Image.open(content) as again:
        again.tile = [tile._replace(args=tile[3].replace("16B", "16L"))]
        low = np.asarray(again)
    return high << 8 | low


def _without_alpha(path: Path, pixels: np.ndarray) -> np.ndarray:
    """``[…, C, H, W]`` without its alpha channel, which must be opaque: colours of clear pixels are undefined."""
    full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
    if clear := int((pixels[..., -1, :, :] != full).sum()):
        raise FileError.of("E203", path, f"expected opaque pixels, found {count(clear, 'transparent pixel')}")
    return pixels[..., :-1, :, :]


# -- TIFF --------------------------------------------------------------------------------------------------------------


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
        single = None if planes else _read_tiff(file, path, options)  # while the file is open

    @cache
    def pages() -> np.ndarray:
        if single is not None:
            return single
        with tifffile.TiffFile(path) as again:
            return _read_tiff(again, path, options)

    size = length["Y"], length["X"]
    return Source(path, "TIFF", planes[0] if planes else 1, size, channels, dtype, lambda k: pages()[k])


def _has_palette(page: Any, options: ReadOptions) -> bool:
    return page.photometric == 3 and options.applies_palette  # PHOTOMETRIC.PALETTE


def _has_alpha(page: Any) -> bool:
    return any(extra != 0 for extra in page.extrasamples)  # EXTRASAMPLE.UNSPECIFIED


def _read_tiff(file: Any, path: Path, options: ReadOptions) -> np.ndarray:
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
    pixels = pixels.reshape(int(np.prod(pixels.shape[: len(others)])), -1, *pixels.shape[-2:])
    if _has_palette(page, options):
        table = (np.asarray(page.colormap) >> 8).astype(np.uint8)  # [3, 2^bits], 16 bits per channel
        return np.moveaxis(table[:, pixels[:, 0]], 0, 1)
    if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and not options.mask and pixels.dtype.kind in "bu":
        pixels = ~pixels  # as a viewer shows it
    return _as_shown(_without_alpha(path, pixels) if _has_alpha(page) else pixels, options)


def _decode_with_pillow(path: Path, shape: tuple[int, ...], dtype: np.dtype, compression: str) -> np.ndarray:
    """For compressions such as LZW, which tifffile decodes by another package; Pillow has no 16-bit colour."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        pages = np.stack([np.asarray(page) for page in ImageSequence.Iterator(image)])
    if pages.dtype != dtype or pages.size != np.prod(shape):
        fix = "pip install imagecodecs, or save the file without compression"
        raise FileError.of("E202", path, f"expected a TIFF that can be decoded, found {compression} of {dtype}", fix)
    return pages.reshape(shape)
