"""NumPy's files, judged before they are read: what a header claims, and what a compressed array inflates to."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ambiseg._util import limits
from ambiseg._util.text import shape_text

_HEADER = 10_000  # characters, as NumPy has it; read before it asks
_DIRECTORY = 1 << 20  # bytes of a zip's list of members: some 10,000 arrays
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes, and what is inflated piece by piece


class Header(NamedTuple):
    """What is known of an array before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # where its values begin

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * max(self.dtype.itemsize, 1)


def read_header(stream: Any) -> Header:
    """The header of an ``.npy``; ``ValueError`` unless it is one of an array of plain values."""
    start = stream.read(8)
    version = np.lib.format.read_magic(io.BytesIO(start))
    wide = 2 if version == (1, 0) else 4
    length = int.from_bytes(size := stream.read(wide), "little")
    if len(size) < wide or length > _HEADER:
        raise ValueError(f"a header of {length:,} characters")
    parse = np.lib.format.read_array_header_1_0 if wide == 2 else np.lib.format.read_array_header_2_0
    shape, _, dtype = parse(io.BytesIO(size + stream.read(length)))
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    if any(side < 0 for side in shape):
        raise ValueError(f"an array of {shape_text(shape)}")
    return Header(shape, dtype, 8 + wide + length)


class Npz:
    """The arrays of an ``.npz`` by name. Nothing is allocated before its size is known to be within the limit."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._left = archive, limits.most_bytes()
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def header(self, name: str) -> Header:
        info = self._members[name]
        if info.compress_type not in _PACKED:
            raise ValueError(f"a compression that NumPy does not write, in {name!r}")
        with self._archive.open(info) as stream:
            header = read_header(stream)
        if header.offset + header.nbytes > info.file_size and header.nbytes <= limits.most_bytes():
            raise ValueError(f"{name!r} ends too early")
        return header

    def read(self, name: str) -> np.ndarray:
        """``ValueError`` if this array, or all that were read, are larger than a file may be."""
        header = self.header(name)
        if header.nbytes > self._left:
            most = f"{limits.most_bytes():,} bytes ({limits.OPTION})"
            raise ValueError(f"arrays of more than {most}: {name!r} has {shape_text(header.shape)} of {header.dtype}")
        self._left -= header.nbytes
        with self._archive.open(self._members[name]) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False, max_header_size=_HEADER)


@contextmanager
def open_npz(handle: BinaryIO) -> Iterator[Npz]:
    """An ``.npz`` that is open for reading; ``ValueError`` if it is none, or holds absurdly many arrays."""
    end: Any = zipfile._EndRecData(handle)  # pyright: ignore[reportAttributeAccessIssue] - what ZipFile itself reads
    if end is None:
        raise ValueError("no zip archive")
    if end[5] > _DIRECTORY:  # of the central directory, which ZipFile reads as a whole
        raise ValueError(f"a list of arrays that takes {end[5]:,} bytes")
    handle.seek(0)
    with zipfile.ZipFile(handle) as archive:
        yield Npz(archive)
