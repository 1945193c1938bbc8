"""What a pickle of plain values and NumPy arrays holds, without running it and without reading its pixels.

A pickle is a program. :func:`index` interprets it with Python's own unpickler, reduced to the opcodes that make
dictionaries, lists, texts, numbers and arrays. No module is imported and no function of the file's choice is called: a
name that is not one of NumPy's few constructors is refused.

Bytes of arrays are not read. Their place in the file is kept instead, so that a file of any size becomes a small
dictionary and each array can be read alone. The C unpickler cannot do this: its memo holds all bytes until the end.
"""

from __future__ import annotations

import ast
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError

_LONG = 512  # texts and bytes longer than this are left in the file
_MOST = 1 << 25  # reads of the file: each makes at most one object, and a case of LIDC takes about 250
_KNOWN = re.compile(
    r"numpy(\.core|\._core)?\.(multiarray\._reconstruct|multiarray\.scalar|numeric\._frombuffer|ndarray|dtype)"
    r"|(builtins|__builtin__)\.(dict|bytes|str|unicode)|collections\.OrderedDict|_codecs\.encode"
    r"|(pydicom\.uid|dicom\.UID)\.UID"
)
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]  # the one in Python: its opcodes can be replaced
Decode = Callable[[bytes], bytes | str]


def index(path: Path) -> Any:
    """The object that the pickle at ``path`` describes, each array a :class:`StoredArray`.

    Raises :class:`DataError` that names the function that a file wants to call, or the byte at which it is damaged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.pickle")
    ...     _ = path.write_bytes(pickle.dumps({"k": np.arange(3)}, protocol=2))
    ...     found = index(path)["k"]
    ...     with open(path, "rb") as file:
    ...         found.shape, found.read(file)
    ((3,), array([0, 1, 2]))
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        try:
            return _Index(_File(file, size, _MOST)).load()
        except EOFError:
            found = f"its end at byte {size:,}: cut short, copy it again"
            raise DataError(f"{path}: expected a whole pickle, found {found}") from None
        except _RefusedCallError as refused:
            found = f"that it wants to call {refused}: refused, nothing in it was run"
            raise DataError(f"{path}: expected plain values and NumPy arrays, found {found}") from None
        except Exception as error:  # damaged bytes make any of the steps fail
            found = f"byte {file.tell():,} makes no sense ({type(error).__name__}: {error})"
            raise DataError(f"{path}: expected a pickle of NumPy arrays, found that {found}") from None


def text_of(value: Any) -> str:
    """A text, which Python 2 wrote as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


# -- values ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are left in the file: ``count`` of them from ``start``, and the function that decodes them."""

    start: int
    count: int
    decode: Decode

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.start)
        content = file.read(self.count)
        if len(content) < self.count:
            raise EOFError
        return _bytes_of(self.decode(content))


@dataclass(eq=False, slots=True)
class StoredArray:
    """An array that is still in the file."""

    dtype: np.dtype | None = None
    shape: tuple[int, ...] = ()
    fortran: bool = False
    content: Span | bytes = b""

    def read(self, file: BinaryIO) -> np.ndarray:
        """The array itself. ``ValueError`` where the file has another number of bytes than its shape needs."""
        content = self.content.read(file) if isinstance(self.content, Span) else self.content
        array = np.frombuffer(content, self.dtype or np.uint8)
        if array.size != int(np.prod(self.shape)):
            raise ValueError(f"{len(content)} bytes where {list(self.shape)} {self.dtype} needs another number")
        return array.reshape(self.shape, order="F" if self.fortran else "C")

    def set(self, shape: Any, kind: Any, fortran: Any, content: Any) -> StoredArray:
        if not isinstance(kind, _DType) or not isinstance(content, Span | bytes | str):
            raise ValueError("an array of Python objects")
        if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"shape {shape!r:.40}")
        self.dtype, self.shape, self.fortran = kind.dtype, shape, bool(fortran)
        self.content = content if isinstance(content, Span) else _bytes_of(content)
        return self


@dataclass(eq=False, slots=True)
class _DType:
    """A dtype that can still change: a pickle has its byte order after its name."""

    dtype: np.dtype

    def __post_init__(self) -> None:
        if self.dtype.kind not in "biufUS":
            raise ValueError(f"an array of {self.dtype}")


@dataclass(frozen=True, slots=True)
class _Function:
    """One of the known functions; only its name is kept."""

    name: str


class _Dict(dict):
    """Hashes texts and numbers only: the hash of nested tuples is recursive, and their depth is the file's choice."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | int | float):
            raise ValueError("a key that is neither a text nor a number")
        super().__setitem__(key, value)


def _bytes_of(content: bytes | str) -> bytes:
    return content.encode("latin-1") if isinstance(content, str) else content


# -- opcodes ---------------------------------------------------------------------------------------------------


class _RefusedCallError(Exception):
    """Its text is the name of a function that is not called."""


@dataclass
class _File:
    """The file as the unpickler sees it; an end that comes too early is an error."""

    file: BinaryIO
    size: int
    left: int  # reads

    def read(self, count: int) -> bytes:
        self.left -= 1
        if count > _LONG or not self.left:
            raise ValueError("more than a data set has")
        if len(content := self.file.read(count)) < count:
            raise EOFError
        return content

    def readline(self) -> bytes:
        if not (content := self.file.readline()).endswith(b"\n"):
            raise EOFError
        return content


class _Index(_Unpickler):
    """Python's unpickler with a fixed set of opcodes and functions, which leaves long texts and bytes in the file."""

    def __init__(self, file: _File) -> None:
        super().__init__(file)
        self.file, self.size = file.file, file.size

    def find_class(self, module: str, name: str) -> _Function:
        if not _KNOWN.fullmatch(f"{module}.{name}"):
            raise _RefusedCallError(f"{module}.{name}")
        return _Function(f"{module}.{name}")

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is not a function")
        self.append(_made(function.name, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, StoredArray):
            made.set(*state[-4:])
        elif isinstance(made, _DType):
            if state[3] is not None or state[1] not in ("<", ">", "|", "="):
                raise ValueError("an array of records")
            made.dtype = made.dtype.newbyteorder(state[1])
        elif not isinstance(made, str):  # a subclass of str may have a state, which is not needed
            raise ValueError("a state of its own")

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.append(_Dict())
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][key] = value

    def instance(self) -> None:
        raise _RefusedCallError(".".join(self.readline()[:-1].decode("latin-1") for _ in range(2)))

    def unknown(self) -> None:
        raise ValueError("an opcode that plain values do not need")

    def line(self, decode: Decode) -> None:
        start, line = self.file.tell(), self.readline()[:-1]
        self.append(decode(line) if len(line) <= _LONG else Span(start, len(line), decode))

    def counted(self, form: str, decode: Decode) -> None:
        """A text or bytes after their length."""
        (count,) = struct.unpack(form, self.read(struct.calcsize(form)))
        start = self.file.tell()
        if not 0 <= count <= self.size - start:
            raise EOFError
        if count > _LONG:
            self.file.seek(count, 1)
        self.append(decode(self.read(count)) if count <= _LONG else Span(start, count, decode))


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """What a call of a known function makes."""
    match name.rpartition(".")[2], arguments:
        case "_reconstruct", (_Function(), _, _):
            return StoredArray()
        case "_frombuffer", (content, kind, shape, order):
            return StoredArray().set(shape, kind, order == "F", content)
        case "dtype", (code, *_):
            return _DType(np.dtype(text_of(code)))
        case "scalar", (_DType() as kind, bytes() | str() as content):
            return np.frombuffer(_bytes_of(content), kind.dtype, 1)[0].item()
        case "encode", (Span() | str() as text, "latin1" | "latin-1"):  # how protocols 0 to 2 write bytes
            return text if isinstance(text, Span) else _bytes_of(text)
        case "dict" | "OrderedDict", (*pairs,) if len(pairs) < 2:
            made = _Dict()
            for key, value in pairs[0] if pairs else ():
                made[key] = value
            return made
        case "bytes", ():  # how protocols 0 to 2 write empty bytes
            return b""
        case "str" | "unicode" | "UID", (str() as text,):  # UID: pydicom's subclass of str
            return str(text)
    raise _RefusedCallError(name)


def _quoted(line: bytes) -> str:
    """A byte string as Python 2 shows it."""
    return text_of(ast.literal_eval("b" + text_of(line).lstrip("b")))


_utf8 = partial(str, encoding="utf-8", errors="surrogatepass")
_escaped = partial(str, encoding="raw-unicode-escape")
_KEPT = (
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE EMPTY_LIST LIST APPEND APPENDS SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 INT LONG FLOAT BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT "
    "GLOBAL STACK_GLOBAL PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"
)
_REPLACED: dict[bytes, Callable[[Any], Any]] = {
    pickle.FRAME: lambda self: self.read(8),  # only tells how much may be read ahead
    pickle.READONLY_BUFFER: lambda self: None,
    pickle.INST: _Index.instance,
    pickle.REDUCE: _Index.call,
    pickle.NEWOBJ: _Index.call,
    pickle.BUILD: _Index.build,
    pickle.DICT: _Index.make_dict,
    pickle.EMPTY_DICT: lambda self: self.append(_Dict()),
    pickle.STRING: lambda self: self.line(_quoted),
    pickle.UNICODE: lambda self: self.line(_escaped),
    pickle.BINSTRING: lambda self: self.counted("<i", text_of),
    pickle.SHORT_BINSTRING: lambda self: self.counted("<B", text_of),
    pickle.BINUNICODE: lambda self: self.counted("<I", _utf8),
    pickle.SHORT_BINUNICODE: lambda self: self.counted("<B", _utf8),
    pickle.BINUNICODE8: lambda self: self.counted("<Q", _utf8),
    pickle.BINBYTES: lambda self: self.counted("<I", bytes),
    pickle.SHORT_BINBYTES: lambda self: self.counted("<B", bytes),
    pickle.BINBYTES8: lambda self: self.counted("<Q", bytes),
    pickle.BYTEARRAY8: lambda self: self.counted("<Q", bytes),
}
_Index.dispatch = {
    **dict.fromkeys(range(256), _Index.unknown),
    **{(code := getattr(pickle, name)[0]): _Unpickler.dispatch[code] for name in _KEPT.split()},
    **{code[0]: load for code, load in _REPLACED.items()},
}
