"""What a pickle of plain values and NumPy arrays holds, without running it and without reading its pixels.

A pickle is a program. :func:`index` goes through it with a machine of its own, which knows how to put together
dictionaries, lists, texts, numbers and arrays, and nothing else: a name that is not one of NumPy's few constructors is
refused, no module is imported and no function of the file's choice is called.

The bytes of arrays are not read either. The machine notes where they lie and jumps over them, so that a file of any
size becomes a small dictionary, and each array can be read alone, whenever and as often as it is wanted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.machine import LONG, MARK, Machine, Name, Raw, quoted, text_of

_MOST = 1 << 24  # objects on the stack; a case has some twenty


def index(path: Path) -> Any:
    """The object that the pickle at ``path`` describes, each array a :class:`Stored`.

    Raises :class:`DataError` that names the global a file wants to call, or the byte at which it is damaged.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.pickle")
    ...     _ = path.write_bytes(pickle.dumps({"k": np.arange(3)}, protocol=2))
    ...     found = index(path)["k"]
    ...     with open(path, "rb") as file:
    ...         found.shape, found.read(file)
    ((3,), array([0, 1, 2]))
    """
    with open(path, "rb") as file:
        machine = Machine(file, path)
        try:
            return _run(machine)
        except DataError:
            raise
        except EOFError:
            raise DataError(
                f"{path}: expected a whole pickle, found its end at byte {machine.size:,}: cut short, copy it again"
            ) from None
        except Exception as error:  # damaged bytes make any of the steps fail
            found = f"byte {file.tell():,} makes no sense ({type(error).__name__}: {error})"
            raise DataError(f"{path}: expected a pickle of NumPy arrays, found that {found}") from None


def _run(m: Machine) -> Any:
    while True:
        code = m.take(1)
        if code == pickle.STOP:
            return m.stack.pop()
        step = _STEPS.get(code)
        if step is None:
            raise ValueError(f"unknown opcode {code!r}")
        step(m)
        if len(m.stack) > _MOST:
            raise ValueError("more objects than a data set has")


# -- the steps, one an opcode --------------------------------------------------------------------------------


def _pushes(value: Any) -> Callable[[Machine], None]:
    return lambda m: m.push(value() if callable(value) else value)


def _counted(form: str, coding: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.content(m.number(form), coding))


def _numbered(form: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.number(form))


def _long(form: str) -> Callable[[Machine], None]:
    return lambda m: m.push(int.from_bytes(m.take(min(m.number(form), 64)), "little", signed=True))


def _put(number: Callable[[Machine], int]) -> Callable[[Machine], None]:
    return lambda m: m.memo.__setitem__(number(m), m.stack[-1])


def _get(number: Callable[[Machine], int]) -> Callable[[Machine], None]:
    return lambda m: m.push(m.memo[number(m)])


def _tuple(count: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        items = tuple(m.stack[len(m.stack) - count :])
        del m.stack[len(m.stack) - count :]
        m.push(items)

    return step


def _integer(m: Machine) -> None:
    line = m.line()
    m.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line))


def _line_text(m: Machine) -> None:
    start, line = m.file.tell(), m.line()
    m.push(Raw(start, len(line), "quoted") if len(line) > LONG else text_of(quoted(line)))


def _line_unicode(m: Machine) -> None:
    start, line = m.file.tell(), m.line()
    m.push(Raw(start, len(line), "escaped") if len(line) > LONG else line.decode("raw-unicode-escape"))


def _binary_text(form: str) -> Callable[[Machine], None]:
    """A byte string of Python 2: a text where it is one, and the bytes of an array where it is long."""

    def step(m: Machine) -> None:
        found = m.content(m.number(form), "bytes")
        m.push(found if isinstance(found, Raw) else found.decode("latin-1"))

    return step


def _set_items(m: Machine) -> None:
    items = m.pop_mark()
    target = m.stack[-1]
    if not isinstance(target, dict):
        raise ValueError("items of something that is not a dictionary")
    target.update(zip(items[::2], items[1::2], strict=True))


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.stack[-1][key] = value


def _append(m: Machine) -> None:
    value = m.stack.pop()
    _list(m.stack[-1]).append(value)


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    _list(m.stack[-1]).extend(items)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("items of something that is not a list")
    return value


def _dict_of_mark(m: Machine) -> None:
    items = m.pop_mark()
    m.push(dict(zip(items[::2], items[1::2], strict=True)))


def _global(m: Machine) -> None:
    m.name(m.line(), m.line())


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.name(module, name)


def _reduce(m: Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    m.push(m.call(function, arguments))


def _refuse_instance(m: Machine) -> None:
    raise m.refuse(Name(text_of(m.line()), text_of(m.line())))


def _protocol(m: Machine) -> None:
    if (version := m.take(1)[0]) > pickle.HIGHEST_PROTOCOL:
        raise ValueError(f"protocol {version}")


_STEPS: dict[bytes, Callable[[Machine], Any]] = {
    pickle.PROTO: _protocol,
    pickle.FRAME: lambda m: m.take(8),  # only says how much may be read ahead
    pickle.MARK: _pushes(MARK),
    pickle.POP: lambda m: m.stack.pop(),
    pickle.POP_MARK: lambda m: m.pop_mark(),
    pickle.DUP: lambda m: m.push(m.stack[-1]),
    pickle.NONE: _pushes(None),
    pickle.NEWTRUE: _pushes(True),
    pickle.NEWFALSE: _pushes(False),
    pickle.EMPTY_DICT: _pushes(dict),
    pickle.EMPTY_LIST: _pushes(list),
    pickle.EMPTY_TUPLE: _pushes(()),
    pickle.DICT: _dict_of_mark,
    pickle.LIST: lambda m: m.push(m.pop_mark()),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_mark())),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.INT: _integer,
    pickle.LONG: lambda m: m.push(int(m.line().rstrip(b"L"))),
    pickle.FLOAT: lambda m: m.push(float(m.line())),
    pickle.BININT: _numbered("<i"),
    pickle.BININT1: _numbered("<B"),
    pickle.BININT2: _numbered("<H"),
    pickle.LONG1: _long("<B"),
    pickle.LONG4: _long("<i"),
    pickle.BINFLOAT: _numbered(">d"),
    pickle.STRING: _line_text,
    pickle.UNICODE: _line_unicode,
    pickle.BINSTRING: _binary_text("<i"),
    pickle.SHORT_BINSTRING: _binary_text("<B"),
    pickle.BINUNICODE: _counted("<I", "utf-8"),
    pickle.SHORT_BINUNICODE: _counted("<B", "utf-8"),
    pickle.BINUNICODE8: _counted("<Q", "utf-8"),
    pickle.BINBYTES: _counted("<I", "bytes"),
    pickle.SHORT_BINBYTES: _counted("<B", "bytes"),
    pickle.BINBYTES8: _counted("<Q", "bytes"),
    pickle.BYTEARRAY8: _counted("<Q", "bytes"),
    pickle.READONLY_BUFFER: lambda m: None,
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.PUT: _put(lambda m: int(m.line())),
    pickle.BINPUT: _put(lambda m: m.take(1)[0]),
    pickle.LONG_BINPUT: _put(lambda m: m.number("<I")),
    pickle.MEMOIZE: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    pickle.GET: _get(lambda m: int(m.line())),
    pickle.BINGET: _get(lambda m: m.take(1)[0]),
    pickle.LONG_BINGET: _get(lambda m: m.number("<I")),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _reduce,
    pickle.BUILD: lambda m: m.build(m.stack.pop()),
    pickle.INST: _refuse_instance,
}
