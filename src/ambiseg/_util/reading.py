"""Reading JSON, YAML and CSV files: whatever a file holds is plain values, or one line that says what is wrong.

A file is a regular one (a pipe or a device is never waited for), of bounded size, and in UTF-8;
:mod:`ambiseg._util.parsing` bounds what is in it. A schema, any type that pydantic knows, is then checked by
:func:`validated`. Files that cannot be opened raise ``OSError`` as everywhere.
"""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ambiseg._util.errors import ConfigError
from ambiseg._util.parsing import (
    LIMIT,
    YAML_LIMIT,
    Mistake,
    check_number,
    decoded,
    nesting_or,
    parse_json,
    parse_yaml,
    shown,
    size_text,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
Place = str | os.PathLike[str]

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "dataclass": "a table",
}
_BOUNDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "min_length": "a length of at least",
    "max_length": "a length of at most",
}


class Unreadable(ConfigError):
    """A file that is not what it should be; ``problem`` is the message without the file."""

    def __init__(self, path: Place, problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}")
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type[Unreadable], tuple[Place, str]]:
        return Unreadable, (self.path, self.problem)  # workers of a loader hand their errors over pickled


# -- files ------------------------------------------------------------------------------------------------------------


def open_regular(path: Place) -> BinaryIO:
    """A regular file, opened for reading; :class:`Unreadable` for a folder, a pipe or a device, without waiting."""
    try:
        # Without O_NONBLOCK a pipe would be waited for; what was opened is judged, not what had that name before.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        number = os.open(path, flags)
    except ValueError:
        raise Unreadable(repr(os.fspath(path)), "expected the name of a file, found a null character in it") from None
    except IsADirectoryError:  # on some systems
        raise Unreadable(path, "expected a file, found a folder") from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        found = next((words for test, words in _KINDS.items() if test(mode)), "something else")
        raise Unreadable(path, f"expected a file, found {found}")
    return os.fdopen(number, "rb")


def read_bytes(path: Place, limit: int = LIMIT) -> bytes:
    """All of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""  # files of the system's own have size 0
    if max(size, len(content)) > limit:
        raise Unreadable(path, f"expected at most {size_text(limit)}, found {size_text(max(size, len(content)))}")
    return content


def read_text(path: Place, what: str = "text", limit: int = LIMIT) -> str:
    """A file in UTF-8 without null characters; the mark that some editors put first is left out."""
    return _told(path, lambda: decoded(read_bytes(path, limit), what))


def read_json(path: Place, what: str = "JSON", kind: Any = Any, finite: bool = True) -> Any:
    """A file of one value, as the schema ``kind``; unless ``finite``, nan and infinity are numbers too."""
    content = _told(path, lambda: parse_json(decoded(read_bytes(path), what), what, finite))
    return content if kind is Any else validated(kind, content, path, what)


def read_yaml(path: Place) -> Any:
    """A file of one YAML document."""
    return _told(path, lambda: parse_yaml(decoded(read_bytes(path, YAML_LIMIT), "YAML")))


def read_csv(path: Place, delimiter: Callable[[str], str] | str = ",") -> list[list[str]]:
    """The rows of a table, cells without the spaces round them; ``delimiter`` may be found from the first line."""

    def rows() -> list[list[str]]:
        text = decoded(read_bytes(path), "CSV")
        mark = delimiter if isinstance(delimiter, str) else delimiter(text.split("\n", 1)[0])
        check_number(text, rows=("\n", "\r"), values=(mark,))
        try:
            return [
                [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=mark, strict=True)
            ]
        except csv.Error as error:
            raise Mistake(f"expected CSV, found {error}") from None

    return _told(path, rows)


def read_json_lines(path: Place, kind: Any, what: str = "an object", interrupted: bool = False) -> Iterator[Any]:
    """The values of a file that has one on each line, each checked against the schema ``kind``.

    A key that a line has twice counts once, as our own files have none. Of an ``interrupted`` file only what comes
    before the first mistake is read: the last line of one that is being written is often half a line.
    """
    from pydantic import ValidationError

    schema = _adapter(kind)
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LIMIT + 1), b""), 1):
            try:
                if interrupted and not line.endswith(b"\n"):
                    return
                check_number(line, rows=(b"[", b"{"), values=(b",",))
                try:
                    value = schema.validate_json(line.rstrip())
                except ValidationError as error:
                    raise Mistake(explained(error, what)) from None
                if b"\\u0000" in line:
                    parse_json(decoded(line, what), what)
            except Mistake as mistake:
                if interrupted:
                    return
                raise Unreadable(path, f"line {number}: {mistake}") from None
            yield value


def _told(path: Place, read: Callable[[], T]) -> T:
    try:
        return read()
    except Mistake as mistake:
        raise Unreadable(path, str(mistake)) from None


# -- schemas ----------------------------------------------------------------------------------------------------------


def validated(kind: Any, content: Any, path: Place, what: str) -> Any:
    """What a file holds as the type ``kind``; :class:`Unreadable` names the key, what was expected and what was found.

    >>> validated(dict[str, int], {"a": 1}, "x.json", "counts")
    {'a': 1}
    >>> validated(dict[str, int], {"a": [2]}, "x.json", "counts")
    Traceback (most recent call last):
    ambiseg._util.reading.Unreadable: x.json: a: expected a whole number, found [2]
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise Unreadable(path, explained(error, what)) from None


def explained(error: ValidationError, what: str) -> str:
    """The first thing that a schema does not allow, in one line: the key, what was expected and what was found."""
    first = error.errors(include_url=False)[0]
    kind, message, context = first["type"], first["msg"], first.get("ctx", {})
    place = f"{shown('.'.join(map(str, first['loc'])))[1:-1]}: " if first["loc"] else ""
    if kind == "json_invalid":
        form = what if "JSON" in what else f"{what} as JSON"
        return f"expected {form}, found a mistake: {nesting_or(str(context.get('error')))}"
    if kind == "missing":
        return f"{place}expected a value in {what}, found none"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place}expected a key of {what}, found {shown(first['input'])}"
    if kind in ("value_error", "assertion_error"):
        return f"{place}{context.get('error')}"
    if not place:
        return f"expected {what}, found {shown(first['input'])}"
    return f"{place}expected {_expected(kind, message, context)}, found {shown(first['input'])}"


def _expected(kind: str, message: str, context: dict[str, Any]) -> str:
    """What a schema asks for, in the words of all other messages."""
    if kind.endswith(("_type", "_parsing", "_from_float")) and (words := _TYPES.get(kind.partition("_")[0])):
        return words
    bound = next((f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context), None)
    return bound or message.removeprefix("Input should be ")


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
