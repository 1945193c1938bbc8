"""Pictures by Pillow: PNG, JPEG, BMP, PPM and GIF."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util import limits
from ambiseg._util.text import count
from ambiseg.io.errors import FileError
from ambiseg.io.source import Frugal, ReadOptions, Source, decoding_at_most, judge

_FORMATS = ("PNG", "JPEG", "BMP", "PPM", "GIF")  # no other decoder of Pillow's is run, whatever a file holds
_METADATA = 16 << 20  # bytes of a file that may be anything but pixels: profiles, comments, previews
_START = 1 << 16  # bytes within which the header of a PPM ends
_STRIP = 1 << 22  # pixels that are taken over from Pillow at a time
_SLOW = {"ppm": 1 << 22, "ppm_plain": 1 << 22, "bmp_rle": 1 << 22}  # decoders in Python: pixels that take seconds
_SCANS = 64  # of a JPEG; as many decoded pixels as 16 scans of the largest picture
_BYTES = {"I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2, "I": 4, "F": 4}  # per channel, by mode


def open_picture(path: Path, options: ReadOptions) -> Source:
    """One picture, decoded at once: orientation, palette and alpha decide its size and channels."""
    from PIL import Image

    with Frugal(path, _METADATA) as content, decoding_at_most(limits.max_pixels()):
        _judge_start(path, content)
        try:
            image = Image.open(content, formats=_FORMATS)
        except Image.DecompressionBombError as error:
            pixels = int((re.findall(r"\d+", str(error)) or [0])[0])
            message, fix = limits.too_large((pixels, 1)) or (str(error), "")
            raise FileError.of("E210", path, message.replace(f"{pixels}×1", f"{pixels:,}"), fix) from None
        with image:
            kind = "JPEG" if image.format == "MPO" else str(image.format)
            deep = kind == "PNG" and image.mode in ("RGB", "RGBA") and ";16B" in str(image.tile[0][3])
            bands, itemsize = len(image.getbands()), 2 if deep else _BYTES.get(image.mode, 1)
            judge(path, (image.height, image.width), 1, bands, np.dtype(f"u{itemsize}"))
            pixels, decoder = image.width * image.height, str(image.tile[0][0]) if image.tile else ""
            if pixels > (most := _SLOW.get(decoder, pixels)):
                found = f"expected {kind} of at most {most:,} pixels in this encoding, found {pixels:,}"
                raise FileError.of("E210", path, found, "save it as PNG")
            allowance = _METADATA + 2 * pixels * max(bands, 3) * itemsize  # noise, badly packed
            content.allow(allowance)
            if kind == "GIF" and getattr(image, "is_animated", False):
                raise FileError.of("E105", path, "expected one picture, found a film of several frames")
            content.allow(allowance)
            array = _read_deep(path, image, content, allowance) if deep else _read(image, options)
            array = np.moveaxis(np.atleast_3d(array), -1, 0)
            dpi = _resolution(image.info.get("dpi"))
        array = as_shown(array if len(array) in (1, 3) else without_alpha(path, array), options)
    channels, height, width = array.shape
    return Source(path, kind, 1, (height, width), channels, array.dtype, lambda _: array, dpi=dpi)


# -- before Pillow -----------------------------------------------------------------------------------------------------


def _judge_start(path: Path, content: Frugal) -> None:
    """What Pillow would go through byte by byte, or thousands of times."""
    start = content.read(_START)
    content.seek(0)
    if start[:1] == b"P" and len(start) == _START:
        words = re.sub(rb"#[^\r\n]*([\r\n]|$)", b" ", start).split(None, 4)
        if len(words) < 4:
            raise FileError.of("E201", path, f"expected the header of a PPM, found no end of it in {_START:,} bytes")
    if start[:3] == b"\xff\xd8\xff":
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            scans, pixels = _scans(mapped)
        most = max(16, min(_SCANS, 16 * limits.DEFAULT // max(pixels, 1)))
        if scans > most:
            fix = "save it again as a baseline JPEG, or as PNG"
            raise FileError.of("E201", path, f"expected JPEG of at most {most} scans, found {scans:,}", fix)


_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # within a scan, all others are escapes and restarts


def _scans(content: mmap.mmap) -> tuple[int, int]:
    """How many scans a JPEG has, and pixels, by its markers; counting stops where it is damaged."""
    place, scans, pixels = 2, 0, 0
    while found := _MARKER.search(content, place):
        kind, place = content[found.start() + 1], found.end()
        if kind == 0xD9 or place + 2 > len(content):
            break
        if kind in (0x01, 0xD8):  # markers without a segment
            continue
        segment = content[place : place + 7]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC) and len(segment) == 7:
            pixels = max(pixels, int.from_bytes(segment[3:5], "big") * int.from_bytes(segment[5:7], "big"))
        scans += kind == 0xDA
        place += max(int.from_bytes(segment[:2], "big"), 2)
    return scans, pixels


# -- pixels ------------------------------------------------------------------------------------------------------------


def _read(image: Any, options: ReadOptions) -> np.ndarray:
    """``[H, W]`` or ``[H, W, C]``."""
    from PIL import ImageOps

    ImageOps.exif_transpose(image, in_place=True)  # as every viewer shows it
    coloured = options.applies_palette or image.format == "GIF"  # whose numbers are any program's own choice
    if image.mode == "PA" or (image.mode == "P" and coloured):
        image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
    elif image.mode in ("CMYK", "YCbCr", "HSV", "LAB"):
        image = image.convert("RGB")
    strips = _strips(image)
    _, pixels = next(strips)
    if len(pixels) < image.height:
        whole = np.empty((image.height, *pixels.shape[1:]), pixels.dtype)
        whole[: len(pixels)] = pixels
        pixels = whole
    for rows, strip in strips:
        pixels[rows] = strip
    return pixels


def _strips(image: Any) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows at a time, since Pillow makes two copies of what becomes an array."""
    rows = max(_STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        yield slice(top, box[3]), np.asarray(image if rows >= image.height else image.crop(box))


def _read_deep(path: Path, image: Any, content: Frugal, allowance: int) -> np.ndarray:
    """``[H, W, C]`` uint16 of a PNG with 16 bits per channel, which Pillow would cut down to 8.

    Pillow can unpack the high bytes or the low bytes, so the content is decoded once for each.
    """
    from PIL import Image

    tile = image.tile[0]
    if tile[3] not in ("RGB;16B", "RGBA;16B"):
        raise FileError.of("E203", path, "expected 16-bit grey without alpha, found alpha")
    pixels = np.empty((image.height, image.width, len(image.getbands())), np.uint16)
    for rows, high in _strips(image):
        np.left_shift(high, 8, out=pixels[rows], dtype=np.uint16)
    image.im = None  # not two pictures at once
    content.allow(allowance)
    content.seek(0)
    with Image.open(content, formats=_FORMATS) as again:
        again.tile = [tile._replace(args=tile[3].replace("16B", "16L"))]
        for rows, low in _strips(again):
            pixels[rows] |= low
    return pixels


def as_shown(pixels: np.ndarray, options: ReadOptions) -> np.ndarray:
    """In native byte order; one bit per pixel is black and white in an image, and stays bool in a mask."""
    if pixels.dtype == np.bool_ and not options.mask:
        return pixels.astype(np.uint8) * np.uint8(255)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def without_alpha(path: Path, pixels: np.ndarray) -> np.ndarray:
    """``[…, C, H, W]`` without its alpha channel, which must be opaque: colours of clear pixels are undefined."""
    full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
    if clear := int((pixels[..., -1, :, :] != full).sum()):
        raise FileError.of("E203", path, f"expected opaque pixels, found {count(clear, 'transparent pixel')}")
    return pixels[..., :-1, :, :]


def _resolution(said: Any) -> tuple[float, float] | None:
    """Pixels per inch, if they can be true."""
    try:
        across, down = map(float, said)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    return (across, down) if all(isfinite(x) and 0 < x < 1e6 for x in (across, down)) else None
