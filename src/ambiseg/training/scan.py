"""The structure of a checkpoint, judged before PyTorch reads it: tables with plain keys, lists, numbers, tensors.

PyTorch's restricted reader runs no code, but it makes whatever it is told, and a few hundred bytes of tuples inside of
tuples as a key take for ever to hash. Here nothing is made: only kinds are followed.
"""

from __future__ import annotations

import pickletools
from typing import Any, cast

_PLAIN = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE"}
_PLAIN |= {"NEWTRUE", "NEWFALSE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MAKERS = ("torch._utils _rebuild_tensor_v2", "collections OrderedDict")


def check(content: bytes) -> None:
    """Raise ``ValueError`` unless a pickle has only what a checkpoint has."""
    stack: list[str] = []  # the kind of each value: plain, empty, tuple, table, the name of a maker, or other
    marks: list[int] = []
    memory: dict[int, str] = {}
    try:
        for code, argument, _ in pickletools.genops(content):
            name, value = code.name, cast(Any, argument)
            if name in _PLAIN:
                stack.append("plain")
            elif name in ("BINPUT", "LONG_BINPUT"):
                memory[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memory[value])
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "GLOBAL":
                known = value in _MAKERS or (value.startswith("torch ") and value.endswith("Storage"))
                stack.append(value if known else _refuse(value))
            elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
                stack.append({"EMPTY_DICT": "table", "EMPTY_TUPLE": "empty"}.get(name, "list"))
            elif name in _TUPLES or name == "TUPLE":
                start = marks.pop() if name == "TUPLE" else len(stack) - _TUPLES[name]
                stack[start:] = ["tuple"]
            elif name in ("APPEND", "APPENDS"):
                del stack[marks.pop() if name == "APPENDS" else -1 :]
                _expect(stack[-1] == "list", name)
            elif name in ("SETITEM", "SETITEMS"):
                start = marks.pop() if name == "SETITEMS" else len(stack) - 2
                _expect(set(stack[start::2]) <= {"plain"} and stack[start - 1] == "table", "a key that is not plain")
                del stack[start:]
            elif name == "BINPERSID":  # the numbers of a tensor
                stack[-1] = "other"
            elif name == "REDUCE":
                maker, given = stack[-2:]
                _expect(maker in _MAKERS and (given == "empty" or maker == _MAKERS[0]), f"{maker} of {given}")
                stack[-2:] = ["table" if given == "empty" else "other"]
            elif name == "BUILD":  # attributes of an ordered table
                stack.pop()
            elif name not in ("PROTO", "STOP"):
                _refuse(name)
    except (IndexError, KeyError, TypeError):
        raise ValueError("what is not there is used") from None


def _expect(fits: bool, found: str) -> None:
    if not fits:
        _refuse(found)


def _refuse(found: str) -> str:
    raise ValueError(f"{found[:80]} in its structure")
