"""Pictures: PNG, JPEG and BMP by Pillow, TIFF of any depth and with pages by tifffile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import count, shape_text
from ambiseg.io.problems import Refused
from ambiseg.io.source import How, Source, once

# -- PNG, JPEG, BMP ----------------------------------------------------------------------------------------------


def open_picture(path: Path, how: How) -> Source:
    """One picture, decoded at once: what its header says does not always hold, and it has one slice only."""
    kind, pixels = _read_picture(path, how)
    channels, height, width = pixels.shape
    return Source(path, kind, 1, (height, width), channels, pixels.dtype, lambda _: pixels)


def _is_deep(image: Any) -> bool:
    """Colour of 16 bits a channel, which Pillow would cut down to 8."""
    return image.format == "PNG" and image.mode in ("RGB", "RGBA") and ";16B" in str(image.tile[0][3])


def _read_picture(path: Path, how: How) -> tuple[str, np.ndarray]:
    """Format, whatever the suffix says, and ``[C, H, W]``."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        kind = str(image.format)
        if _is_deep(image):
            return kind, np.moveaxis(_read_deep(path, image), -1, 0)
        turned = ImageOps.exif_transpose(image)  # as every viewer shows it
        if turned.mode == "P" and how.mask and not how.coloured:
            return kind, np.asarray(turned)[None]
        if turned.mode in ("P", "PA"):
            turned = turned.convert("RGBA" if "transparency" in turned.info or turned.mode == "PA" else "RGB")
        elif turned.mode in ("CMYK", "YCbCr", "HSV", "LAB"):
            turned = turned.convert("RGB")
        pixels = np.asarray(turned)
    if pixels.dtype == np.bool_ and not how.mask:
        pixels = pixels.astype(np.uint8) * np.uint8(255)  # black and white, as a viewer shows it
    if pixels.ndim == 2:
        return kind, pixels[None].astype(pixels.dtype.newbyteorder("="), copy=False)
    return kind, np.moveaxis(_without_alpha(path, pixels), -1, 0)


def _read_deep(path: Path, image: Any) -> np.ndarray:
    """``[H, W, 3]`` uint16. Pillow has an unpacker for the high and one for the low byte, so the file is read twice."""
    from PIL import Image

    tile = image.tile[0]
    if tile[3] not in ("RGB;16B", "RGBA;16B"):
        raise Refused.of("E203", path, "expected 16-bit grey without alpha, found alpha")
    high = np.asarray(image).astype(np.uint16)
    with Image.open(path) as again:
        again.tile = [tile._replace(args=tile[3].replace("16B", "16L"))]
        low = np.asarray(again)
    return _without_alpha(path, high << 8 | low)


def _without_alpha(path: Path, pixels: np.ndarray) -> np.ndarray:
    """``[H, W, C]`` without its alpha channel, which must be opaque: what lies under glass is anybody's guess."""
    if pixels.shape[2] in (1, 3):
        return pixels
    full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
    clear = int((pixels[..., -1] != full).sum())
    if clear:
        raise Refused.of("E203", path, f"expected opaque pixels, found {count(clear, 'transparent pixel')}")
    return pixels[..., :-1]


# -- TIFF --------------------------------------------------------------------------------------------------------


def open_tiff(path: Path, how: How) -> Source:
    import tifffile

    with tifffile.TiffFile(path) as file:
        series, page = file.series[0], file.pages.first
        if len(file.series) > 1:
            found = " and ".join(shape_text(one.shape) for one in file.series[:4])
            raise Refused.of("E201", path, f"expected pages of one size, found {found}", "save one stack a file")
        axes, shape = series.axes, series.shape
        planes = [(name, n) for name, n in zip(axes, shape, strict=True) if name not in "YXSC" and n > 1]
        if len(planes) > 1 or "Y" not in axes or "X" not in axes:
            raise Refused.of("E201", path, f"expected one axis of slices, found axes {axes} of {shape_text(shape)}")
        by_axis = dict(zip(axes, shape, strict=True))
        slices, dtype = planes[0][1] if planes else 1, np.dtype(series.dtype)
        palette = page.photometric == tifffile.PHOTOMETRIC.PALETTE and not (how.mask and not how.coloured)
        if page.bitspersample == 1 and not how.mask:
            dtype = np.dtype(np.uint8)
        alpha = any(e != tifffile.EXTRASAMPLE.UNSPECIFIED for e in page.extrasamples)
    channels = 3 if palette else by_axis.get("S", 1) * by_axis.get("C", 1) - alpha
    size = by_axis["Y"], by_axis["X"]
    dtype = np.dtype(np.uint8) if palette else dtype.newbyteorder("=")
    read = once(lambda: _read_tiff(path, how)) if slices > 1 else lambda: _read_tiff(path, how)
    return Source(path, "TIFF", slices, size, channels, dtype, lambda k: read()[k])


def _read_tiff(path: Path, how: How) -> np.ndarray:
    """``[D, C, H, W]``."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        series, page = file.series[0], file.pages.first
        axes = series.axes
        try:
            pixels = series.asarray()
        except (ValueError, KeyError) as error:
            if "imagecodecs" not in str(error):
                raise
            pixels = _read_pages(path, series.shape, np.dtype(series.dtype), str(page.compression.name))
        for axis in range(len(axes) - 1, -1, -1):  # axes of length 1 that mean nothing here
            if axes[axis] not in "YX" and pixels.shape[axis] == 1:
                pixels, axes = pixels.squeeze(axis), axes[:axis] + axes[axis + 1 :]
        order = [axes.index(name) for name in axes if name not in "YXSC"]
        order += [axes.index(name) for name in "CS" if name in axes] + [axes.index("Y"), axes.index("X")]
        lead = pixels.shape[order[0]] if any(name not in "YXSC" for name in axes) else 1
        height, width = pixels.shape[axes.index("Y")], pixels.shape[axes.index("X")]
        pixels = pixels.transpose(order).reshape(lead, -1, height, width)
        if page.photometric == tifffile.PHOTOMETRIC.PALETTE and not (how.mask and not how.coloured):
            table = (np.asarray(page.colormap) >> 8).astype(np.uint8)  # [3, 2^bits], 16 bits a channel
            return np.moveaxis(table[:, pixels[:, 0]], 0, 1)
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and not how.mask and pixels.dtype.kind in "bu":
            pixels = ~pixels  # as a viewer shows it
        if pixels.dtype == np.bool_ and not how.mask:
            pixels = pixels.astype(np.uint8) * np.uint8(255)
        if any(e != tifffile.EXTRASAMPLE.UNSPECIFIED for e in page.extrasamples):
            pixels = np.stack([np.moveaxis(_without_alpha(path, np.moveaxis(one, 0, -1)), -1, 0) for one in pixels])
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _read_pages(path: Path, shape: tuple[int, ...], dtype: np.dtype, compression: str) -> np.ndarray:
    """With Pillow, whose own decoders know the compressions of old; it has no 16-bit colour."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        pages = np.stack([np.asarray(page) for page in ImageSequence.Iterator(image)])
    if pages.dtype != dtype or pages.size != np.prod(shape):
        fix = "pip install imagecodecs, or save the file without compression"
        raise Refused.of("E202", path, f"expected a TIFF that can be decoded, found {compression} of {dtype}", fix)
    return pages.reshape(shape)
