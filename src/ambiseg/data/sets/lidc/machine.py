"""The machine that goes through a pickle: its stack, what it makes of names, and values that stay in the file."""

from __future__ import annotations

import ast
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError

LONG = 512  # texts and bytes longer than this are left in the file


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes that were left in the file: where they start, how many they are, and how they are written there."""

    start: int
    count: int
    coding: str  # a key of CODINGS

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.start)
        content = file.read(self.count)
        if len(content) < self.count:
            raise EOFError
        return CODINGS[self.coding](content)


@dataclass(eq=False, slots=True)
class Stored:
    """An array that is still in the file."""

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    fortran: bool = False
    raw: Raw | bytes = b""

    def read(self, file: BinaryIO) -> np.ndarray:
        """The array itself: one read of its bytes. ``ValueError`` where they are not as many as its shape needs."""
        content = self.raw.read(file) if isinstance(self.raw, Raw) else self.raw
        array = np.frombuffer(content, self.dtype)
        if array.size != int(np.prod(self.shape)):
            raise ValueError(f"{len(content)} bytes where {list(self.shape)} {self.dtype} needs another number")
        return array.reshape(self.shape, order="F" if self.fortran else "C")


@dataclass(eq=False, slots=True)
class _Type:
    """A dtype that is being put together: its state comes after its name, and may swap its bytes."""

    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Name:
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Mark:
    pass


MARK = _Mark()
_NUMPY = ("numpy.core.", "numpy._core.", "numpy.")


def _known(name: Name) -> str | None:
    """What a global means to the machine; ``None`` is a global that it refuses."""
    for prefix in _NUMPY:
        if f"{name.module}.".startswith(prefix):
            inner = f"{name.module}.".removeprefix(prefix) + name.name
            found = {
                "multiarray._reconstruct": "array",
                "multiarray.scalar": "scalar",
                "numeric._frombuffer": "buffer",
                "ndarray": "ndarray",
                "dtype": "dtype",
            }.get(inner)
            if found:
                return found
    return {
        ("_codecs", "encode"): "encode",
        ("collections", "OrderedDict"): "dict",
        ("builtins", "dict"): "dict",
        ("__builtin__", "dict"): "dict",
        ("builtins", "bytes"): "bytes",  # how protocols 0 to 2 write empty bytes
        ("__builtin__", "bytes"): "bytes",
        ("builtins", "str"): "text",
        ("__builtin__", "str"): "text",
        ("__builtin__", "unicode"): "text",
        ("pydicom.uid", "UID"): "text",  # a text with methods; the text is all that is taken
        ("dicom.UID", "UID"): "text",
    }.get((name.module, name.name))


class Machine:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = file.seek(0, 2)
        file.seek(0)
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    # -- reading ---------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        content = self.file.read(count)
        if len(content) < count:
            raise EOFError
        return content

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        content = self.file.readline()
        if not content.endswith(b"\n"):
            raise EOFError
        return content[:-1]

    def content(self, count: int, coding: str) -> Any:
        """Bytes or a text of known length: itself when it is short, its place when it is long."""
        if count < 0:
            raise ValueError("negative length")
        start = self.file.tell()
        if start + count > self.size:
            raise EOFError
        if count > LONG:
            self.file.seek(count, 1)
            return Raw(start, count, coding)
        found = self.take(count)
        return found.decode("utf-8", "surrogatepass") if coding == "utf-8" else found

    # -- the stack -------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def refuse(self, name: Name) -> DataError:
        return DataError(
            f"{self.path}: expected plain values and NumPy arrays, found that it wants to call {name}: "
            "refused, nothing in it was run"
        )

    def name(self, module: Any, name: Any) -> None:
        found = Name(text_of(module), text_of(name))
        if _known(found) is None:
            raise self.refuse(found)
        self.push(found)

    def call(self, function: Any, arguments: Any) -> Any:
        """What REDUCE and NEWOBJ make of a known name; the arguments are values of this machine."""
        if not isinstance(function, Name):
            raise ValueError("a call of something that is not a name")
        match _known(function), tuple(arguments):
            case "array", (Name(), _, _):
                return Stored(np.dtype("u1"))
            case "dtype", (code, *_):
                return _Type(_dtype(code))
            case "encode", (Raw() as raw, "latin1" | "latin-1") if f"{raw.coding} as latin-1" in CODINGS:
                return Raw(raw.start, raw.count, f"{raw.coding} as latin-1")
            case "encode", (str() as text, "latin1" | "latin-1"):
                return text.encode("latin-1")
            case "buffer", (raw, _Type() as kind, tuple() as shape, order):
                return Stored(kind.dtype, _shape(shape), order == "F", raw)
            case "scalar", (_Type() as kind, bytes() | str() as raw):
                content = raw.encode("latin-1") if isinstance(raw, str) else raw
                value = np.frombuffer(content, kind.dtype, 1)[0]
                return value.item()
            case "dict", ():
                return {}
            case "dict", (list() as pairs,):
                return dict(pairs)
            case "bytes", ():
                return b""
            case "text", (str() as text,):
                return str(text)
        raise self.refuse(function)

    def build(self, state: Any) -> None:
        """BUILD: the state of an array or of a dtype; that of anything else says nothing that is needed."""
        made = self.stack[-1]
        if isinstance(made, Stored):
            *_, shape, kind, fortran, raw = state
            if not isinstance(kind, _Type) or not isinstance(raw, Raw | bytes | str):
                raise ValueError("an array of Python objects")
            made.dtype, made.shape, made.fortran = kind.dtype, _shape(shape), bool(fortran)
            made.raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        elif isinstance(made, _Type) and isinstance(state, tuple) and state[1] in ("<", ">", "|", "="):
            if state[3] is not None:
                raise ValueError("an array of records")
            made.dtype = made.dtype.newbyteorder(state[1])
        elif isinstance(made, dict | _Type):
            raise ValueError("a state of its own")


def text_of(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _dtype(code: Any) -> np.dtype:
    made = np.dtype(text_of(code))
    if made.kind not in "biufUS":
        raise ValueError(f"an array of {made}")
    return made


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape!r:.40}")
    return shape


def quoted(line: bytes) -> bytes:
    """What a quoted line of Python 2 stands for: a byte an escape, or itself."""
    value = ast.literal_eval("b" + line.decode("latin-1").lstrip("b"))
    return value


CODINGS = {  # how bytes that stay in the file are written there -> the bytes that they stand for
    "bytes": bytes,
    "quoted": quoted,  # a line of protocol 0 by Python 2
    "utf-8": bytes,
    "escaped": bytes,  # a text of protocol 0
    # Bytes that protocols 0 to 2 have to write as a text, because Python 2 has no other way to tell them apart.
    "utf-8 as latin-1": lambda content: content.decode("utf-8", "surrogatepass").encode("latin-1"),
    "escaped as latin-1": lambda content: content.decode("raw-unicode-escape").encode("latin-1"),
}
