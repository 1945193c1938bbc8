"""PNG, JPEG and BMP, by Pillow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.text import count
from ambiseg.io.errors import FileError
from ambiseg.io.source import ReadOptions, Source


def open_picture(path: Path, options: ReadOptions) -> Source:
    """One picture, decoded at once: orientation, palette and alpha decide its size and channels."""
    kind, pixels = _read(path, options)
    channels, height, width = pixels.shape
    return Source(path, kind, 1, (height, width), channels, pixels.dtype, lambda _: pixels)


def _read(path: Path, options: ReadOptions) -> tuple[str, np.ndarray]:
    """Format by content, whatever the suffix is, and ``[C, H, W]``."""
    from PIL import Image, ImageOps

    content = io.BytesIO(path.read_bytes())
    with Image.open(content) as image:
        kind = str(image.format)
        if kind == "PNG" and image.mode in ("RGB", "RGBA") and ";16B" in str(image.tile[0][3]):
            return kind, np.moveaxis(without_alpha(path, _read_deep(path, image, content)), -1, 0)
        turned = ImageOps.exif_transpose(image)  # as every viewer shows it
        if turned.mode == "P" and not options.applies_palette:
            return kind, np.asarray(turned)[None]
        if turned.mode in ("P", "PA"):
            turned = turned.convert("RGBA" if "transparency" in turned.info or turned.mode == "PA" else "RGB")
        elif turned.mode in ("CMYK", "YCbCr", "HSV", "LAB"):
            turned = turned.convert("RGB")
        pixels = np.asarray(turned)
    if pixels.dtype == np.bool_ and not options.mask:
        pixels = pixels.astype(np.uint8) * np.uint8(255)  # black and white, as a viewer shows it
    if pixels.ndim == 2:
        return kind, pixels[None].astype(pixels.dtype.newbyteorder("="), copy=False)
    return kind, np.moveaxis(without_alpha(path, pixels), -1, 0)


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


def without_alpha(path: Path, pixels: np.ndarray) -> np.ndarray:
    """``[H, W, C]`` without its alpha channel, which must be opaque: colours of clear pixels are undefined."""
    if pixels.shape[2] in (1, 3):
        return pixels
    full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
    clear = int((pixels[..., -1] != full).sum())
    if clear:
        raise FileError.of("E203", path, f"expected opaque pixels, found {count(clear, 'transparent pixel')}")
    return pixels[..., :-1]
