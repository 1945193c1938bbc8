"""TIFF of any depth, with one page or many, by tifffile."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util import limits
from ambiseg._util.text import shape_text
from ambiseg.io.errors import FileError
from ambiseg.io.pictures import as_shown, without_alpha
from ambiseg.io.source import ReadOptions, Source, decoding_at_most, judge

_PAGES = 16_384
_SEGMENTS = 1 << 20  # strips and tiles of all pages: 16² pixels each make 16384²
_TEXT = 16 << 20  # bytes of descriptions
_TAGS = 4096  # of one page
_FAMILIES = ("mmstack", "ndtiff", "lsm", "fluoview", "stk", "sis", "svs", "scn", "qpi", "ndpi", "bif", "avs", "eer")
_FAMILIES += ("philips", "scanimage", "indica", "nih", "mdgel")  # microscopes' own: some name further files to read
_INTEGERS = {1: 1, 3: 2, 4: 4, 13: 4, 16: 8, 18: 8}  # bytes of a tag's types that hold sizes and places


def open_tiff(path: Path, options: ReadOptions) -> Source:
    """The pages of a file as slices; a single page is decoded at once, several together on the first read."""
    with path.open("rb") as handle:
        packed = _survey(path, handle)
        handle.seek(0)
        return _open(path, options, handle, packed)


def _open(path: Path, options: ReadOptions, handle: BinaryIO, packed: int) -> Source:
    with tiff_file(handle) as file:
        series, page = file.series[0], file.pages.first
        if len(file.series) > 1:
            found = " and ".join(shape_text(one.shape) for one in file.series[:4])
            raise FileError.of("E201", path, f"expected pages of one size, found {found}", "save one stack per file")
        axes, shape = series.axes, series.shape
        planes = [n for name, n in zip(axes, shape, strict=True) if name not in "YXSC" and n > 1]
        if len(planes) > 1 or "Y" not in axes or "X" not in axes:
            raise FileError.of("E201", path, f"expected one axis of slices, found axes {axes} of {shape_text(shape)}")
        dtype = np.dtype(series.dtype).newbyteorder("=")
        if dtype.kind not in "buif" or dtype.itemsize > 8:
            raise FileError.of("E201", path, f"expected whole numbers or fractions of at most 8 bytes, found {dtype}")
        length = dict(zip(axes, shape, strict=True))
        samples, slices = length.get("S", 1) * length.get("C", 1), planes[0] if planes else 1
        size = judge(path, (length["Y"], length["X"]), slices, samples, dtype)
        if packed > 2 * size[0] * size[1] * slices * samples * dtype.itemsize + _TEXT:
            found = f"found {packed:,} bytes of strips or tiles that lie over each other"
            raise FileError.of("E201", path, f"expected strips or tiles for {shape_text(shape)} of {dtype}, {found}")
        channels = samples - _has_alpha(page)
        if _has_palette(page, options):
            dtype, channels = np.dtype(np.uint8), 3
        elif page.bitspersample == 1 and not options.mask:
            dtype = np.dtype(np.uint8)
        judge(path, size, slices, channels, dtype)
        single = None if planes else _read_tiff(file, path, options)  # while the file is open

    @cache
    def pages() -> np.ndarray:
        if single is not None:
            return single
        with tiff_file(path) as again:
            return _read_tiff(again, path, options)

    return Source(path, "TIFF", slices, size, channels, dtype, lambda k: pages()[k])


def tiff_file(file: Path | BinaryIO) -> Any:
    """Opened as a plain TIFF, ImageJ's or OME's, and never with other files that it names."""
    import tifffile

    _bound_decoders()
    flags: dict[str, Any] = {f"is_{family}": False for family in _FAMILIES}
    return tifffile.TiffFile(file, _multifile=False, **flags)


@cache
def _bound_decoders() -> None:
    """tifffile's own decoders of deflate and LZMA inflate whatever a strip holds; these end at the strip's size."""
    import lzma

    import tifffile

    def bounded(engine: Any, data: bytes, out: Any) -> bytes:
        return engine.decompress(data, out if isinstance(out, int) else limits.most_bytes())

    codecs = getattr(tifffile.TIFF.DECOMPRESSORS, "_codecs", {})
    for code in (8, 32946, 50013):
        codecs[code] = lambda data, out=None: bounded(zlib.decompressobj(), data, out)
    codecs[34925] = lambda data, out=None: bounded(lzma.LZMADecompressor(memlimit=1 << 28), data, out)


# -- before tifffile ---------------------------------------------------------------------------------------------------


def _survey(path: Path, file: BinaryIO) -> int:
    """Walk through the pages without reading them; bytes of all strips and tiles.

    Raises :class:`FileError` for pages that lead back to an earlier one, and for more of anything than makes sense.
    tifffile would follow and load all of it.
    """
    end = file.seek(0, 2)
    file.seek(0)
    start = file.read(16)
    order: Any = {b"II": "<", b"MM": ">"}.get(start[:2])
    if order is None or len(start) < 8 or struct.unpack(f"{order}H", start[2:4])[0] not in (42, 43):
        raise ValueError("no TIFF header")
    big = struct.unpack(f"{order}H", start[2:4])[0] == 43
    place, wide = struct.Struct(f"{order}Q" if big else f"{order}I"), 8 if big else 4
    entry = struct.Struct(f"{order}HH{'Q8s' if big else 'I4s'}")  # code, type and number of its values; these, or where
    number = struct.Struct(f"{order}Q" if big else f"{order}H")

    def refuse(expected: str, found: str) -> FileError:
        return FileError.of("E201", path, f"expected TIFF of {expected}, found {found}")

    def values(tag: tuple[int, int, int, bytes], most: int) -> np.ndarray:
        """Of a tag of integers; none if they are of another type or beyond the end."""
        code, kind, many, content = tag
        size = _INTEGERS.get(kind, 0)
        if not size or size * many > end:
            return np.zeros(0, np.uint64)
        if many > most:
            raise refuse(f"at most {most:,} values in tag {code}", f"{many:,}")
        if size * many > wide:
            file.seek(place.unpack(content)[0])
            content = file.read(size * many)
        whole = min(len(content) // size, many) * size
        return np.frombuffer(content[:whole], f"{order}u{size}").astype(np.uint64)

    seen: set[int] = set()
    most = limits.max_pixels()
    pixels, packed, segments, text = 0, 0, 0, 0
    todo = [(place.unpack(start[8:16] if big else start[4:8])[0], True)]
    while todo:
        at, follows = todo.pop()
        if not at or at >= end:
            continue
        if at in seen and follows:
            raise refuse("pages in a row", f"a page that leads back to an earlier one at byte {at:,}")
        seen.add(at)
        if len(seen) > _PAGES:
            raise refuse(f"at most {_PAGES:,} pages", "more")
        file.seek(at)
        head = file.read(number.size)
        tags = number.unpack(head)[0] if len(head) == number.size else 0
        if tags > _TAGS:
            raise refuse(f"at most {_TAGS:,} tags per page", f"{tags:,}")
        content = file.read(tags * entry.size + wide)
        if follows and len(content) == tags * entry.size + wide:
            todo.append((place.unpack(content[-wide:])[0], True))
        whole = min(len(content) // entry.size, tags) * entry.size
        known = {tag[0]: tag for tag in entry.iter_unpack(content[:whole])}
        height, width = (int(values(known[code], 1).sum()) if code in known else 0 for code in (257, 256))
        pixels += height * width * follows
        if pixels > most:  # of several pages, perhaps; else it is judged as the others are, with its type
            found = limits.too_large((height, width)) or limits.too_large((1, 1), pixels)
            if found:
                raise FileError.of("E210", path, *found)
        for code in (273, 324, 279, 325):
            if code in known:
                many = values(known[code], _SEGMENTS)
                segments += len(many)
                packed += int(many.sum()) * (code in (279, 325)) * follows
        if segments > 2 * _SEGMENTS:
            raise refuse(f"at most {_SEGMENTS:,} strips or tiles", "more")
        text += sum(known[code][2] for code in (270, 305, 50838, 50839) if code in known)
        if text > _TEXT:
            raise refuse(f"at most {_TEXT:,} bytes of descriptions", f"{text:,}")
        if 330 in known and follows:  # pages of their own below this one, such as smaller copies
            todo = [*((int(at), False) for at in values(known[330], _PAGES)), *todo]
    return packed


# -- pixels ------------------------------------------------------------------------------------------------------------


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
    return as_shown(without_alpha(path, pixels) if _has_alpha(page) else pixels, options)


def _decode_with_pillow(path: Path, shape: tuple[int, ...], dtype: np.dtype, compression: str) -> np.ndarray:
    """For compressions such as LZW, which tifffile decodes by another package; Pillow has no 16-bit colour."""
    from PIL import Image

    with decoding_at_most(limits.max_pixels()), _muted(), Image.open(path, formats=("TIFF",)) as image:
        first = np.asarray(image)
        pages = math.prod(shape) // max(first.size, 1)
        if first.dtype != dtype or pages * first.size != math.prod(shape) or pages != getattr(image, "n_frames", 1):
            fix = "pip install imagecodecs, or save the file without compression"
            found = f"found {compression} of {dtype}"
            raise FileError.of("E202", path, f"expected a TIFF that can be decoded, {found}", fix)
        pixels = np.empty((pages, *first.shape), dtype)
        pixels[0] = first
        for k in range(1, pages):
            image.seek(k)
            pixels[k] = np.asarray(image)
    return pixels.reshape(shape)


@contextmanager
def _muted() -> Iterator[None]:
    """Without what libtiff writes on the error stream about damage; Pillow offers no other way to stop it."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no error stream
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
