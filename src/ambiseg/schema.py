"""Nested dataclasses as settings: their keys, defaults and meanings, and one line for whatever does not fit them."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "null"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Setting:
    """One key: ``model.experts``, its type, its default and what its dataclass says of it."""

    key: str
    hint: Any
    default: Any
    meaning: str

    @property
    def group(self) -> type | None:
        """The dataclass whose settings are below this one, if any."""
        return _group(self.hint)

    @property
    def text(self) -> str:
        """Its meaning, and the words that it may be where it is one of a few and the meaning does not name them."""
        words = [str(word) for part in _parts(self.hint) if get_origin(part) is Literal for word in get_args(part)]
        named = all(re.search(rf"\b{re.escape(word)}\b", self.meaning) for word in words)
        return self.meaning if named else f"{self.meaning.rstrip('.')}: {_one_of(words)}."


def sections(cls: type, key: str = "") -> Iterator[tuple[str, type, list[Setting]]]:
    """Every group of settings as (its key, its dataclass, its fields), outer groups first.

    >>> from dataclasses import field, make_dataclass
    >>> inner = make_dataclass("Inner", [("size", int, 3)])
    >>> outer = make_dataclass("Outer", [("seed", int, 0), ("inner", inner, field(default_factory=inner))])
    >>> [(key, [setting.key for setting in own]) for key, _, own in sections(outer)]
    [('', ['seed', 'inner']), ('inner', ['inner.size'])]
    """
    meanings, hints, own = meanings_of(cls), get_type_hints(cls), []
    for field in fields(cls):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        name = f"{key}.{field.name}" if key else field.name
        own.append(Setting(name, hints[field.name], default, meanings.get(field.name, "")))
    yield key, cls, own
    for setting in own:
        if setting.group is not None:
            yield from sections(setting.group, setting.key)


def tables(cls: type) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """The same in words: of every group its key, what it is, and (key, default, meaning) of each setting.

    A group that occurs several times, such as a schedule, is told once, as ``<its parent>.NAME``.
    """
    groups = list(sections(cls))
    often = {kind for _, kind, _ in groups if sum(kind is other for _, other, _ in groups) > 1}
    found: dict[str, tuple[str, str, list[tuple[str, str, str]]]] = {}
    for key, kind, own in groups:
        name = f"{key.rpartition('.')[0]}.NAME" if kind in often else key
        rows = []
        for setting in own:
            last = setting.key.rpartition(".")[2]
            if setting.group in often:
                rows.append((setting.key, "", setting.text))
            elif setting.group is None or setting.default is None:
                rows.append((f"{name}.{last}" if name else last, inline(setting.default), setting.text))
        found.setdefault(name, (name, _summary(kind), rows))
    return sorted(found.values(), key=lambda group: not group[0])  # what is in no section comes last


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def meanings_of(cls: type) -> dict[str, str]:
    """What the ``Args`` of a docstring say, by name.

    >>> meanings_of(type("Adam", (), {"__doc__": "Adam.\\n\\nArgs:\\n    lr: learning rate,\\n        above 0."}))
    {'lr': 'learning rate, above 0.'}
    """
    _, _, text = (inspect.getdoc(cls) or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in text.split("\n"):
        if begun := re.match(r" {4}(\w+): (.*)", line):
            name = begun[1]
            found[name] = begun[2]
        elif line.startswith(" " * 8) and name:
            found[name] += f" {line.strip()}"
        elif line.strip() or not name:
            break
    return found


def check(cls: type, given: Any, key: str = "", dashes: str = "") -> None:
    """A ``ValueError`` of one line for the first of the nested keys ``given`` that ``cls`` has not, or of another type.

    >>> from dataclasses import make_dataclass
    >>> kind = make_dataclass("Kind", [("size", int, 3), ("rate", float | None, None)])
    >>> check(kind, {"size": 5, "rate": "1e-3"})
    >>> check(kind, {"siez": 5})
    Traceback (most recent call last):
    ValueError: siez: no such setting; did you mean size?
    >>> check(kind, {"rate": "fast"})
    Traceback (most recent call last):
    ValueError: rate: expected a number or null, found 'fast'
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{dashes}{key}: expected {expected(cls)}, found {_shown(given)}")
    hints = get_type_hints(cls)
    for name, value in given.items():
        path = f"{key}.{name}" if key else str(name)
        if name not in hints:
            while isinstance(value, Mapping) and len(value) == 1:  # modle.experts is nearer to model.experts than modle
                inner, value = next(iter(value.items()))
                path = f"{path}.{inner}"
            close = get_close_matches(path, keys(cls, key), 1)
            hint = f"; did you mean {dashes}{close[0]}?" if close else ""
            raise ValueError(f"{dashes}{path}: no such setting{hint}")
        group = _group(hints[name])
        if group is not None and (isinstance(value, Mapping) or group is hints[name]):
            check(group, value, path, dashes)
        elif not fits(value, hints[name]):
            raise ValueError(f"{dashes}{path}: expected {expected(hints[name])}, found {_shown(value)}")


def check_arguments(cls: type, arguments: Sequence[str]) -> None:
    """The same for ``--section.key value`` and ``--section.key=value``, with the values as YAML."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(f"expected settings as --section.key value, found {word!r}")
        given = bool(equals) or bool(left and not left[0].startswith("--"))
        if not given:
            _check_one(cls, key, _NOTHING)
            raise ValueError(f"--{key}: expected a value, found none")
        text = text if equals else left.pop(0)
        try:
            _check_one(cls, key, _value(text))
        except ValueError as error:
            try:
                _check_one(cls, key, text)  # a text that looks like something else, such as "scans: old"
            except ValueError:
                raise error from None


def _check_one(cls: type, key: str, value: Any) -> None:
    for part in reversed(key.split(".")):
        value = {part: value}
    check(cls, value, dashes="--")


def keys(cls: type, key: str = "") -> list[str]:
    """Every key below ``key``, groups included."""
    return [setting.key for _, _, own in sections(cls, key) for setting in own]


def build(cls: type[_T], values: Mapping[str, Any], key: str = "") -> _T:
    """The dataclass of nested plain values. What its ``__post_init__`` refuses is said with the key of its group."""
    hints, made = get_type_hints(cls), {}
    for name, value in values.items():
        group = _group(hints[name])
        path = f"{key}.{name}" if key else name
        made[name] = build(group, value, path) if group is not None and isinstance(value, Mapping) else value
    try:
        return cls(**made)
    except ValueError as error:
        text = " ".join(str(error).split())
        if key and not text.startswith(f"{key}."):
            text = f"{key}: {re.sub(r'^[a-z_]+: ', '', text)}"
        raise type(error)(text) from None


# -- YAML -------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The sections of a YAML file, in which every key is there once; a ``ValueError`` of one line for anything else."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def once(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        names = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for i, name in enumerate(names):
            if name in names[:i]:  # YAML would take the last and say nothing
                line = node.value[i][0].start_mark.line + 1
                raise ValueError(f"line {line}: expected every key once, found {name!r} again")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, once)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader: nothing is executed
    except UnicodeDecodeError:
        raise ValueError("expected YAML in UTF-8, found other bytes") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"expected YAML, found a mistake{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"expected YAML, found a mistake: {error}") from None
    if not isinstance(content, Mapping):
        found = {type(None): "nothing", list: "a list", str: "a text"}.get(type(content), _shown(content))
        raise ValueError(f"expected sections of settings, found {found}")
    return content


def _value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text  # such as a name with a colon in it


class _Nothing:
    def __repr__(self) -> str:
        return "no value"


_NOTHING = _Nothing()


# -- types ------------------------------------------------------------------------------------------------------------


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML can be what a type asks for; numbers may still be texts, as in 1e-4."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (list, tuple):
        wanted = len(arguments) if origin is tuple and Ellipsis not in arguments else None
        alike = isinstance(value, list | tuple) and (wanted is None or len(value) == wanted)
        return alike and all(fits(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(one, arguments[1]) for one in value.values())
    if hint is float:
        return not isinstance(value, bool) and _finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:  # what YAML takes for a number or a word is a text here
        return value is not None and not isinstance(value, Mapping)
    return hint is Any or (isinstance(hint, type) and isinstance(value, hint))


def expected(hint: Any) -> str:
    """A type in words.

    >>> expected(int | tuple[int, int] | None), expected(list[float]), expected(Literal["iou", "ce"])
    ('a whole number, two whole numbers or null', 'a list of numbers', 'iou or ce')
    """
    words = []
    for part in _parts(hint):
        origin, arguments = get_origin(part), get_args(part)
        if origin is Literal:
            words += map(str, arguments)
        elif origin is list or (origin is tuple and Ellipsis in arguments):
            words.append(f"a list of {_MANY[arguments[0]]}")
        elif origin is tuple:
            words.append(f"two {_MANY[arguments[0]]}")
        elif origin is dict:
            words.append(f"a table of {_MANY[arguments[1]]}" if arguments[1] in _MANY else "a table")
        elif is_dataclass(part):
            names = [field.name for field in fields(part)]
            words.append(f"a table of {', '.join(names[:5])}{' …' * (len(names) > 5)}")
        else:
            words.append(_NAMES.get(part, getattr(part, "__name__", str(part))))
    return _one_of(words)


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _group(hint: Any) -> Any:
    """The dataclass that a type is, or may be besides null."""
    return next((part for part in _parts(hint) if is_dataclass(part)), None)


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _one_of(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def inline(value: Any) -> str:
    """A value as one would type it.

    >>> inline(None), inline((0.8, 1.25)), inline({"train": 0.7, "val": True}), inline("mose")
    ('null', '[0.8, 1.25]', '{train: 0.7, val: true}', 'mose')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return str(value)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else inline(value)
