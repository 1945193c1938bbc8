"""Texts as plain values, within limits: JSON and YAML, of any content. :mod:`ambiseg._util.reading` reads files by it.

Plain values are texts, numbers, true, false, null, and lists and tables of these with texts as keys. By construction

- no parser goes deeper than a few hundred levels, and what it makes is at most ``DEPTH`` deep and fits into memory;
- a table has every key once; YAML has no anchors, aliases, merged keys and tags, and dates in it are texts;
- numbers are finite and whole ones have at most 64 bits; texts can be encoded and hold no null character.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

LIMIT = 256 << 20  # bytes of a file, or of a line of JSON lines
YAML_LIMIT = 256 << 10  # YAML is made for people, and read 100 times as slowly
DEPTH = 32  # lists and tables in each other
CONTAINERS, VALUES = 2_000_000, 20_000_000  # lists and tables (or rows), and all values, that fit into 2 GB of memory
_BITS = 63
_SHOWN = 60  # characters of a value in an error


class Mistake(ValueError):
    """What is wrong with a text, in one line that names no file; ``expected …, found …``."""


def decoded(content: bytes, what: str = "text") -> str:
    """UTF-8 as text; :class:`Mistake` for other bytes and for null characters."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Mistake(f"expected {what} in UTF-8, found byte {error.object[error.start]:#x}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise Mistake(f"expected {what}, found a null character in line {line}")
    return text


def size_text(number: int) -> str:
    """Bytes in words."""
    return f"{number >> 20:,} MB" if number >= 1 << 20 else f"{number >> 10:,} kB"


def check_number(text: Any, rows: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Refuse, before anything is made of it, a text of more values than memory has room for."""
    for marks, most, what in ((rows, CONTAINERS, "lists and tables"), (rows + values, VALUES, "values")):
        if len(text) > most and (found := sum(map(text.count, marks))) > most:
            raise Mistake(f"expected at most {most:,} {what}, found {found:,}")


# -- JSON -------------------------------------------------------------------------------------------------------------


def parse_json(text: str, what: str = "JSON", finite: bool = True) -> Any:
    """The value of a text; :class:`Mistake` for anything else. Unless ``finite``, nan and infinity are numbers too.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ambiseg._util.parsing.Mistake: expected every key once, found 'a' again
    """
    from pydantic_core import from_json

    check_number(text, rows=("[", "{"), values=(",",))
    try:
        value = from_json(text.encode(), allow_inf_nan=not finite)  # bounded in depth and in the digits of a number
    except ValueError as error:
        form = what if "JSON" in what else f"{what} as JSON"
        raise Mistake(f"expected {form}, found a mistake: {nesting_or(str(error))}") from None
    check_plain(value, finite)
    json.loads(text, object_pairs_hook=_check_keys)  # what is left unseen until here is a key that is there twice
    return value


def nesting_or(problem: str) -> str:
    """What a parser says, without its own words for what is too deep."""
    return problem.replace("recursion limit exceeded", "lists and tables nested too deeply")


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise Mistake(f"expected every key once, found {shown(key)} again")
        seen.add(key)


def check_plain(value: Any, finite: bool = True) -> None:
    """Refuse what is too deep, too large a number or a text that no file or terminal takes; level by level."""
    level = [value]
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for one in level:
            kind = type(one)
            if kind is str:
                check_text(one)
            elif kind is list:
                below += one
            elif kind is dict:
                below += one
                below += one.values()
            elif kind is int and one.bit_length() > _BITS:
                raise Mistake(f"expected whole numbers of at most {_BITS} bits, found one of {one.bit_length():,}")
            elif kind is float and finite and not math.isfinite(one):
                raise Mistake(f"expected finite numbers, found {one}")
        if not below:
            return
        level = below
    raise Mistake(f"expected at most {DEPTH} lists and tables in each other, found more")


def check_text(text: str) -> None:
    """Refuse null characters, which end the names of files, and halves of characters, which cannot be written."""
    if not text.isprintable() and (found := re.search("[\0\ud800-\udfff]", text)):
        raise Mistake(f"expected text, found the character U+{ord(found[0]):04X} in {shown(text)}")


# -- YAML -------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str) -> Any:
    """The value of one YAML document; :class:`Mistake` for anything else. Keys are texts, as they were written.

    >>> parse_yaml("{size: 32, on: 2024-01-31, 7: [yes, ~]}")
    {'size': 32, 'on': '2024-01-31', '7': [True, None]}
    >>> parse_yaml("&a [*a]")
    Traceback (most recent call last):
    ambiseg._util.parsing.Mistake: expected YAML without anchors and aliases, found &a in line 1
    """
    import yaml

    if len(text) > YAML_LIMIT:
        raise Mistake(f"expected YAML of at most {size_text(YAML_LIMIT)}, found {size_text(len(text))}")
    try:
        loader = yaml.SafeLoader(text)
        try:
            value = _Builder(loader).document()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else error.character[0]
        raise Mistake(f"expected YAML, found the character U+{code:04X} at position {error.position + 1}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Mistake(f"expected YAML, found a mistake{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise Mistake(f"expected YAML, found a mistake: {error}") from None
    except Mistake:
        raise
    except (ValueError, OverflowError) as error:  # \U with too large a number, a version of 5,000 digits
        raise Mistake(f"expected YAML, found a mistake: {error}") from None
    check_plain(value)
    return value


class _Builder:
    """Values from the events of YAML's parser, of which each is judged before the next is asked for.

    PyYAML's own step from events to values calls itself for every level and follows aliases.
    """

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.loader = loader

    def document(self) -> Any:
        import yaml

        loader, done = self.loader, list[Any]()
        while not loader.check_event(yaml.StreamEndEvent):
            event = loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                if done:
                    raise Mistake(f"expected one YAML document, found a second in line {_line(event)}")
                done.append(self._value())
        return done[0] if done else None

    def _value(self) -> Any:
        import yaml

        top: list[Any] = []
        open_: list[tuple[Any, str | None]] = [(top, None)]  # lists and tables that have begun, with the key to fill
        while True:
            event = self.loader.get_event()
            if isinstance(event, yaml.DocumentEndEvent):
                return top[0]
            if isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                value = open_.pop()[0]
            else:
                inside, key = open_[-1]
                self._check(event, len(open_))
                if isinstance(inside, dict) and key is None:
                    open_[-1] = inside, self._key(event, inside)
                    continue
                if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                    open_.append(([] if isinstance(event, yaml.SequenceStartEvent) else {}, None))
                    continue
                value = self._scalar(event)
            inside, key = open_[-1]
            if isinstance(inside, list):
                inside.append(value)
            else:
                inside[key] = value
                open_[-1] = inside, None

    def _check(self, event: Any, depth: int) -> None:
        import yaml

        if event.anchor is not None:
            found = f"{'*' if isinstance(event, yaml.AliasEvent) else '&'}{shown(event.anchor)[1:-1]}"
            raise Mistake(f"expected YAML without anchors and aliases, found {found} in line {_line(event)}")
        if event.tag is not None:
            raise Mistake(f"expected YAML without tags, found {shown(event.tag)[1:-1]} in line {_line(event)}")
        if depth > DEPTH:
            raise Mistake(f"expected at most {DEPTH} lists and tables in each other, found more in line {_line(event)}")

    def _key(self, event: Any, table: dict[str, Any]) -> str:
        import yaml

        if not isinstance(event, yaml.ScalarEvent):
            raise Mistake(f"expected texts as keys, found a list or a table in line {_line(event)}")
        if event.value in table:
            raise Mistake(f"line {_line(event)}: expected every key once, found {shown(event.value)} again")
        if event.value == "<<" and event.implicit[0]:
            raise Mistake(f"expected YAML without merged keys, found << in line {_line(event)}")
        return event.value

    def _scalar(self, event: Any) -> Any:
        import yaml

        tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit).rpartition(":")[2]
        make = {
            "null": self.loader.construct_yaml_null,
            "bool": self.loader.construct_yaml_bool,
            "int": self.loader.construct_yaml_int,
            "float": self.loader.construct_yaml_float,
        }.get(tag)
        if make is None:
            return event.value  # dates too
        if len(event.value) > 400:
            found = f"{len(event.value):,} in line {_line(event)}"
            raise Mistake(f"expected numbers of at most 400 digits, found one of {found}")
        try:
            return make(yaml.ScalarNode(tag, event.value))
        except (ValueError, OverflowError):  # 0x_, 0b_ or a base of 60 that is too large: no number after all
            return event.value


def _line(event: Any) -> int:
    return event.start_mark.line + 1


# -- values in errors --------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A value in an error: one short line, texts in quotes.

    >>> shown("a\\nb"), shown([1] * 20)
    ("'a\\\\nb'", '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]')
    """
    if isinstance(value, str):
        text = ascii(value[:_SHOWN]) if not value[:_SHOWN].isprintable() else repr(value[:_SHOWN])
        return text if len(value) <= _SHOWN else f"{text[:-1]}…{text[-1]}"
    if isinstance(value, list | tuple | dict) and len(value) > _SHOWN:
        value = dict(list(value.items())[:_SHOWN]) if isinstance(value, dict) else value[:_SHOWN]
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a whole number of {value.bit_length():,} bits"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
