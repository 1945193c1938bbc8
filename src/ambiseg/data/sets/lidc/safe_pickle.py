"""What a pickle of plain values and NumPy arrays holds, without running it and without reading its pixels.

A pickle is a program. :func:`index` interprets it by a small machine of its own, which knows the opcodes that make
dictionaries, lists, texts, numbers and arrays. No module is imported and no function of the file's choice is called: a
name that is not one of NumPy's few constructors is refused.

What a file can cost is bounded by construction:

- steps, and with them values and time: by a number that grows with the file's size, as those of images do;
- depth: a list or dictionary cannot be changed once it is in another, so none is ever in itself, and each knows how
  deep it is; tuples are lists here;
- hashing: keys are texts, whose hash no file can choose, and the memo is a list;
- sizes: of lines, of numbers, and of arrays, whose shape must fit their bytes in the file.

Bytes of arrays are not read. Their place in the file is kept instead, so that a file of any size becomes a small
dictionary and each array can be read alone. The C unpickler cannot do this: its memo holds all bytes until the end.
"""

from __future__ import annotations

import codecs
import pickle
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.pickle_values import (
    DEEP,
    HOLDERS,
    DType,
    Form,
    Function,
    Keyed,
    Listed,
    Span,
    StoredArray,
    bytes_of,
    kind,
    plain_dtype,
    text_of,
)

__all__ = ["Span", "StoredArray", "index", "kind", "text_of"]

_LONG = 512  # texts and bytes longer than this are left in the file
_LINE = 1 << 26  # bytes of a line that is left in the file: an image of protocol 0
_NUMBER = 8  # bytes of an integer
_SOME, _BYTES_PER_STEP, _MOST = 1 << 17, 32, 1 << 23  # steps; the 15,096 cases of LIDC take 3 million in 3 GB
_KNOWN = re.compile(
    r"numpy(\.core|\._core)?\.(multiarray\._reconstruct|multiarray\.scalar|numeric\._frombuffer|ndarray|dtype)"
    r"|(builtins|__builtin__)\.(dict|bytes|str|unicode)|collections\.OrderedDict|_codecs\.encode"
    r"|(pydicom\.uid|dicom\.UID)\.UID"
)


def index(path: Path) -> Any:
    """The object that the pickle at ``path`` describes: keys are texts, sequences lists, each array a StoredArray.

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
            return _Machine(file, size).run()
        except _RefusedCallError as refused:
            found = f"that it wants to call {_plain(refused)}: refused, nothing in it was run"
            raise DataError(f"{path}: expected plain values and NumPy arrays, found {found}") from None
        except Exception as error:  # damaged bytes make any of the steps fail
            if file.tell() >= size:  # the last step is to stop, and no other reads the last byte
                found = f"its end at byte {size:,}: cut short, copy it again"
                raise DataError(f"{path}: expected a whole pickle, found {found}") from None
            found = f"byte {file.tell():,} makes no sense ({type(error).__name__}: {_plain(error)})"
            raise DataError(f"{path}: expected a pickle of NumPy arrays, found that {found}") from None


def _plain(error: Exception) -> str:
    """The text of an error without what a file may have put into it: line ends, controls, half characters."""
    return str(error)[:120].encode("unicode_escape").decode()


# -- the machine ---------------------------------------------------------------------------------------------


class _RefusedCallError(Exception):
    """Its text is the name of a function that is not called."""


class _Machine:
    """A stack of values, the stacks below each mark, and values by number that can be taken again."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.read = file.read  # at the file's end it gives less than asked for, and no step comes after that one
        self.left = min(_SOME + size // _BYTES_PER_STEP, _MOST)  # what a step can cost beyond itself, for all steps
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        read, steps = self.read, _STEPS
        for _ in range(self.left):
            code = read(1)
            if code not in steps:
                if code == pickle.STOP:
                    return self.stack.pop()
                raise ValueError("an opcode that plain values do not need")
            steps[code](self)
        raise ValueError("more steps than a data set of this size has")

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise ValueError("more steps than a data set of this size has")

    def line(self, most: int = 64) -> bytes:
        content = self.file.readline(most + 1)
        if not content.endswith(b"\n"):
            raise ValueError("a line that is too long")
        return content[:-1]

    # -- stack and memo

    def mark(self) -> None:
        if len(self.below) >= DEEP:
            raise ValueError("marks in each other, deeper than a data set has them")
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def marked(self, make: Callable[[list[Any]], Any]) -> None:
        items = self.pop_mark()
        self.stack.append(make(items))

    def pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        if len(items) < count:
            raise ValueError("values that are missing")
        return items

    def put(self, number: int) -> None:
        memo = self.memo
        if number == len(memo):  # most files count without a gap
            memo.append(self.stack[-1])
            return
        if number > len(memo):
            self.spend(number - len(memo))
            memo += [None] * (number + 1 - len(memo))
        memo[number] = self.stack[-1]

    # -- values

    def add(self, items: list[Any]) -> None:
        """Put items into the list or dictionary on top."""
        made = self.stack[-1]
        if not isinstance(made, HOLDERS):
            raise ValueError("values that are put into something that holds none")
        made.add(items)

    def text_line(self, form: Form) -> None:
        start = self.file.tell()
        content = self.file.readline(_LONG)
        count = len(content)
        while not content.endswith(b"\n"):
            count += len(content := self.file.readline(1 << 16))
            if not content or count > _LINE:
                raise ValueError("a line that is too long")
        self.stack.append(form.decode(content[:-1]) if count == len(content) else Span(start, count - 1, form))

    def counted(self, size: int, form: Form, signed: bool = False) -> None:
        """A text or bytes after their length, a number of ``size`` bytes."""
        count = int.from_bytes(self.read(size), "little", signed=signed)
        if count <= _LONG:
            if count < 0:
                raise ValueError("a negative length")
            self.stack.append(form.decode(self.read(count)))
            return
        start = self.file.tell()
        self.file.seek(min(start + count, self.size))
        self.stack.append(Span(start, count, form))

    def integer(self, size: int) -> None:
        count = int.from_bytes(self.read(size), "little", signed=size == 4)
        if not 0 <= count <= _NUMBER:
            raise ValueError("a number that is too large")
        self.stack.append(int.from_bytes(self.read(count), "little", signed=True))

    def integer_line(self) -> None:
        """Of INT or LONG; 00 and 01 are how INT writes False and True."""
        line = self.line(24)
        self.stack.append(line == b"01" if line in (b"00", b"01") else int(line.rstrip(b"L")))

    # -- functions

    def function(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a function whose name is no text")
        if not _KNOWN.fullmatch(known := f"{module}.{name}"):
            raise _RefusedCallError(known)
        self.stack.append(Function(known))

    def instance(self) -> None:
        raise _RefusedCallError(".".join(text_of(self.line(_LONG)) for _ in range(2)))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, Function) or not isinstance(arguments, Listed):
            raise ValueError("a call of something that is not a function")
        self.stack.append(self.made(function.name, arguments))

    def made(self, name: str, arguments: Listed) -> Any:
        """What a call of a known function makes."""
        match name.rpartition(".")[2], arguments:
            case "_reconstruct", (Function(), _, _):
                return StoredArray()
            case "_frombuffer", (content, kind, shape, order):
                return StoredArray().set(shape, kind, isinstance(order, str) and order == "F", content)
            case "dtype", (str() | bytes() as code, *_):
                return DType(plain_dtype(text_of(code)))
            case "scalar", (DType() as kind, bytes() | str() as content):
                return np.frombuffer(bytes_of(content), kind.dtype, 1)[0].item()
            case "encode", (Span() | str() as text, "latin1" | "latin-1"):  # how protocols 0 to 2 write bytes
                return text if isinstance(text, Span) else bytes_of(text)
            case "dict" | "OrderedDict", ():
                return Keyed()
            case "dict" | "OrderedDict", (Listed() as pairs,):  # how Python 2 writes an OrderedDict
                self.spend(len(pairs))  # a list that is made once can be taken many times
                if not all(isinstance(pair, Listed) and len(pair) == 2 for pair in pairs):
                    raise ValueError("a dictionary of something else than keys and values")
                return Keyed([one for pair in pairs for one in pair])
            case "bytes", ():  # how protocols 0 to 2 write empty bytes
                return b""
            case "str" | "unicode" | "UID", (str() as text,):  # UID: pydicom's subclass of str
                return text
        raise _RefusedCallError(name)

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, str):
            return  # a subclass of str may have a state, which is not needed
        if not isinstance(state, Listed) or not isinstance(made, StoredArray | DType):
            raise ValueError("a state of its own")
        if isinstance(made, StoredArray):
            made.set(*state[-4:])
        elif any(part is not None for part in state[2:5]) or state[1] not in _ORDERS:
            raise ValueError("an array of records")
        else:
            made.dtype = made.dtype.newbyteorder(state[1])


_ORDERS = ["<", ">", "|", "="]  # a list: `in` compares, and does not hash what is asked for
_BYTES = Form(bytes)
_LATIN = Form(partial(str, encoding="latin-1"))  # bytes of Python 2
_UTF8 = Form(partial(str, encoding="utf-8"), 2)  # characters of bytes, those below 256, take no more
_ESCAPED = Form(partial(str, encoding="raw-unicode-escape"), 6)


def _unquoted(line: bytes) -> str:
    """A byte string as Python 2 shows it."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a text without quotes")
    return codecs.escape_decode(line[1:-1])[0].decode("latin-1")  # type: ignore[attr-defined]  # as pickle does


def _natural(line: bytes) -> int:
    if not line.isdigit():
        raise ValueError("a value of no number")
    return int(line)


_QUOTED = Form(_unquoted, 4)
_half, _whole, _signed, _double = (struct.Struct(form).unpack for form in ("<H", "<I", "<i", ">d"))
_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda m: m.read(1),
    pickle.FRAME: lambda m: m.read(8),  # only tells how much may be read ahead
    pickle.READONLY_BUFFER: lambda m: None,
    pickle.MARK: _Machine.mark,
    pickle.POP: lambda m: m.stack.pop() if m.stack else m.pop_mark(),
    pickle.POP_MARK: _Machine.pop_mark,
    pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
    # values
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.INT: _Machine.integer_line,
    pickle.LONG: _Machine.integer_line,
    pickle.BININT: lambda m: m.stack.append(*_signed(m.read(4))),
    pickle.BININT1: lambda m: m.stack.append(m.read(1)[0]),
    pickle.BININT2: lambda m: m.stack.append(*_half(m.read(2))),
    pickle.LONG1: lambda m: m.integer(1),
    pickle.LONG4: lambda m: m.integer(4),
    pickle.FLOAT: lambda m: m.stack.append(float(m.line())),
    pickle.BINFLOAT: lambda m: m.stack.append(*_double(m.read(8))),
    pickle.STRING: lambda m: m.text_line(_QUOTED),
    pickle.UNICODE: lambda m: m.text_line(_ESCAPED),
    pickle.BINSTRING: lambda m: m.counted(4, _LATIN, signed=True),
    pickle.SHORT_BINSTRING: lambda m: m.counted(1, _LATIN),
    pickle.BINUNICODE: lambda m: m.counted(4, _UTF8),
    pickle.SHORT_BINUNICODE: lambda m: m.counted(1, _UTF8),
    pickle.BINUNICODE8: lambda m: m.counted(8, _UTF8),
    pickle.BINBYTES: lambda m: m.counted(4, _BYTES),
    pickle.SHORT_BINBYTES: lambda m: m.counted(1, _BYTES),
    pickle.BINBYTES8: lambda m: m.counted(8, _BYTES),
    pickle.BYTEARRAY8: lambda m: m.counted(8, _BYTES),
    # containers
    pickle.EMPTY_LIST: lambda m: m.stack.append(Listed()),
    pickle.EMPTY_TUPLE: lambda m: m.stack.append(Listed()),
    pickle.LIST: lambda m: m.marked(Listed),
    pickle.TUPLE: lambda m: m.marked(Listed),
    pickle.TUPLE1: lambda m: m.stack.append(Listed(m.pop(1))),
    pickle.TUPLE2: lambda m: m.stack.append(Listed(m.pop(2))),
    pickle.TUPLE3: lambda m: m.stack.append(Listed(m.pop(3))),
    pickle.APPEND: lambda m: m.add(m.pop(1)),
    pickle.APPENDS: lambda m: m.add(m.pop_mark()),
    pickle.EMPTY_DICT: lambda m: m.stack.append(Keyed()),
    pickle.DICT: lambda m: m.marked(Keyed),
    pickle.SETITEM: lambda m: m.add(m.pop(2)),
    pickle.SETITEMS: lambda m: m.add(m.pop_mark()),
    # memo
    pickle.PUT: lambda m: m.put(_natural(m.line(12))),
    pickle.BINPUT: lambda m: m.put(m.read(1)[0]),
    pickle.LONG_BINPUT: lambda m: m.put(*_whole(m.read(4))),
    pickle.MEMOIZE: lambda m: m.memo.append(m.stack[-1]),
    pickle.GET: lambda m: m.stack.append(m.memo[_natural(m.line(12))]),
    pickle.BINGET: lambda m: m.stack.append(m.memo[m.read(1)[0]]),
    pickle.LONG_BINGET: lambda m: m.stack.append(m.memo[_whole(m.read(4))[0]]),
    # functions
    pickle.GLOBAL: lambda m: m.function(text_of(m.line(_LONG)), text_of(m.line(_LONG))),
    pickle.STACK_GLOBAL: lambda m: m.function(*m.pop(2)),
    pickle.INST: _Machine.instance,
    pickle.REDUCE: _Machine.call,
    pickle.NEWOBJ: _Machine.call,
    pickle.BUILD: _Machine.build,
}
