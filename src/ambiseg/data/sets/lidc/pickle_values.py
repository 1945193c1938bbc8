"""Values that :mod:`ambiseg.data.sets.lidc.safe_pickle` makes: arrays that are still in their file, and containers.

A container knows how deep it is and cannot be changed once it is in another, so that none is ever in itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

DEEP = 16  # lists and dictionaries in each other; those of LIDC are 3 deep
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[SU][1-9]\d{0,2})")  # others are slow to parse, or are records
_NOTHING = np.dtype(np.uint8)  # of an array that was not filled


class Form(NamedTuple):
    """How texts and bytes are written: what decodes them, and the most bytes that one character takes."""

    decode: Callable[[bytes], bytes | str]
    most: int = 1


@dataclass(eq=False, slots=True)
class Span:
    """Bytes that are left in the file: ``count`` of them from ``start``, in some form."""

    start: int
    count: int
    form: Form

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.start)
        content = file.read(self.count)
        if len(content) < self.count:
            raise EOFError
        return bytes_of(self.form.decode(content))


@dataclass(eq=False, slots=True)
class StoredArray:
    """An array that is still in the file."""

    dtype: np.dtype = _NOTHING
    shape: tuple[int, ...] = (0,)
    fortran: bool = False
    content: Span | bytes = b""

    def read(self, file: BinaryIO) -> np.ndarray:
        """The array itself. ``ValueError`` where the file has another number of bytes than its shape needs."""
        content = self.content.read(file) if isinstance(self.content, Span) else self.content
        if len(content) != self.dtype.itemsize * math.prod(self.shape):
            raise ValueError(f"{len(content)} bytes where {list(self.shape)} {self.dtype} needs another number")
        return np.frombuffer(content, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def set(self, shape: Any, kind: Any, fortran: Any, content: Any) -> StoredArray:
        if not isinstance(kind, DType) or not isinstance(content, Span | bytes | str):
            raise ValueError("an array of Python objects")
        if not isinstance(shape, Listed) or len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array of no shape")
        content = content if isinstance(content, Span) else bytes_of(content)
        size = kind.dtype.itemsize * math.prod(shape)
        found, most = (content.count, content.form.most) if isinstance(content, Span) else (len(content), 1)
        if not size <= found <= size * most + 2 * (most > 1):  # 2: the quotes of some forms
            raise ValueError(f"an array of shape {list(shape)} and {kind.dtype} in {found:,} bytes")
        self.dtype, self.shape, self.fortran, self.content = kind.dtype, tuple(shape), bool(fortran), content
        return self


@dataclass(eq=False, slots=True)
class DType:
    """A dtype that can still change: a pickle has its byte order after its name."""

    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Function:
    """One of the known functions; only its name is kept."""

    name: str


class Listed(list):
    """A list or tuple: how deep the containers in it are, and whether it is in one itself."""

    __slots__ = ("depth", "placed")

    def __init__(self, items: Sequence[Any] = ()) -> None:
        list.__init__(self, items)
        self.depth, self.placed = _depth(items), False

    def add(self, items: Sequence[Any]) -> None:
        self.depth = max(self.depth, _depth(items))
        if self.placed:  # asked last: it may be among the items
            raise ValueError("a list that grows in another")
        self.extend(items)


class Keyed(dict):
    """The same for a dictionary. Its keys are texts: bytes, as Python 2 has them, and whole numbers become texts."""

    __slots__ = ("depth", "placed")

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.depth, self.placed = 0, False
        self.add(items)

    def add(self, items: Sequence[Any]) -> None:
        """Keys and values in turn."""
        values = items[1::2]
        self.depth = max(self.depth, _depth(values))
        if self.placed:
            raise ValueError("a dictionary that grows in another")
        for key, value in zip(items[::2], values, strict=True):
            if not isinstance(key, str):
                if not isinstance(key, bytes | int):
                    raise ValueError("a key that is neither a text nor a whole number")
                key = text_of(key)
            self[key] = value


HOLDERS = (Listed, Keyed)  # once: a union of types is slow to make


def _depth(items: Sequence[Any]) -> int:
    """How deep containers are that hold ``items``, which must not change from here on."""
    depth = 0
    for item in items:
        if isinstance(item, HOLDERS):
            item.placed = True
            depth = max(depth, item.depth + 1)
    if depth > DEEP:
        raise ValueError("values in each other, deeper than a data set has them")
    return depth


def kind(value: Any) -> str:
    """What a value is called in messages."""
    ours = {Listed: "list", Keyed: "dictionary", StoredArray: "array", Span: "long text", DType: "dtype"}
    return {**ours, Function: "function"}.get(type(value), type(value).__name__)


def text_of(value: str | bytes | int) -> str:
    """A text, which Python 2 wrote as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def bytes_of(content: bytes | str) -> bytes:
    return content.encode("latin-1") if isinstance(content, str) else content


@cache
def plain_dtype(code: str) -> np.dtype:
    if not _DTYPE.fullmatch(code):
        raise ValueError(f"an array of {code[:40]!r}")
    return np.dtype(code)
