"""Settings as pydantic models: typed, bounded, described once, and one line for whatever does not fit.

The descriptions of the fields are what ``ambiseg train --settings`` and the documentation print.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ambiseg._util import parsing, reading
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.text import did_you_mean_key, printable

S = TypeVar("S", bound="Settings")
FORBID = ConfigDict(extra="forbid", allow_inf_nan=False)  # also for pydantic dataclasses that are settings
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "null"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}
_EXTRA = ("extra_forbidden", "unexpected_keyword_argument")
_LIMITS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
_SHOWN = 40  # values of a list that an error may repeat
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"expected a text without NUL, found {shown(text)}")
    return text


# Bounds that several settings and options share.
SEED = 2**32 - 1  # the largest seed, as NumPy's
EPOCHS = 10**6  # the longest training
SAMPLES = 1024  # masks of an image, at most
SIDE = 8192  # pixels of a window's side, at most
CLASSES = 1 << 16  # class ids, at most
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_without_nul)]  # a name or a path
Side = Annotated[int, Field(ge=1, le=SIDE)]
MaskValue = Annotated[int, Field(ge=-(2**31), lt=2**32)]  # a number in a mask's file
Sides = Annotated[Sequence[Side], Field(min_length=2, max_length=2)]  # height and width
ClassNames = Annotated[Sequence[Text], Field(min_length=2, max_length=CLASSES)]
ClassCount = Annotated[int, Field(ge=2, le=CLASSES)]


class SettingError(ValueError):
    """Raised by a check of several settings together; ``key`` is the setting of the section that is to be changed."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Settings(BaseModel):
    """A section of settings. Unknown keys are errors; assignments are checked as well.

    >>> from pydantic import Field
    >>> class Adam(Settings):
    ...     lr: float = Field(default=1e-4, gt=0, description="learning rate")
    >>> Adam(lr=1e-3).changed(lr=2).lr
    2.0
    """

    model_config = FORBID | ConfigDict(validate_assignment=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _bools_and_texts(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, Mapping) else ():
            field = cls.model_fields.get(str(name))
            if isinstance(value, bool) and field is not None and not _takes(field.annotation, bool):
                raise SettingError(str(name), f"expected {expected(field.annotation)}, found {inline(value)}")
            if isinstance(value, str):
                try:
                    parsing.check_text(value)  # else a run could not be read again
                except parsing.Mistake as mistake:
                    raise SettingError(str(name), str(mistake)) from None
        return given

    def changed(self: S, **changes: Any) -> S:
        """A copy with some settings changed; everything is checked again."""
        return type(self).model_validate({**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


# -- one line for what does not fit -----------------------------------------------------------------------------------


def validate(cls: type[S], content: Any, *, prefix: str = "", dashes: str = "") -> S:
    """``content`` as settings of ``cls``, or a :class:`ConfigError` of one line.

    Args:
        prefix: put before the message, such as the name of a file.
        dashes: put before keys, ``--`` for arguments of a command.

    >>> class Adam(Settings):
    ...     rate: float = 1e-4
    >>> validate(Adam, {"raet": 1}, prefix="my.yaml: ")
    Traceback (most recent call last):
    ambiseg._util.errors.ConfigError: my.yaml: raet: no such setting; did you mean rate?
    >>> validate(Adam, {"rate": "fast"}, dashes="--")
    Traceback (most recent call last):
    ambiseg._util.errors.ConfigError: --rate: expected a number, found 'fast'
    """
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        raise ConfigError(prefix + printable(explain(error, cls, content, dashes))) from None


def explain(error: ValidationError, cls: Any, content: Any = None, dashes: str = "") -> str:
    """The first problem of a validation, in one line that names the key, what was expected and what was found."""
    problems = [(problem, _place(cls, problem, content)) for problem in error.errors()]
    # Of a union every member complains. What is wrong inside a table says more than that it is not a number.
    section = problems[0][1].path[:1]
    problem, place = max(problems, key=lambda one: (one[1].path[:1] == section, len(one[1].path), _telling(one[0])))
    key = dashes + ".".join(place.path)
    kind, context = problem["type"], problem.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, SettingError):
        return f"{key}.{cause.key}: {cause}" if place.path else f"{dashes}{cause.key}: {cause}"
    if kind == "value_error":
        return f"{key}: {cause}" if place.path and not isinstance(cause, DataError) else str(cause)
    if kind in _EXTRA:
        return _unknown(place.path, problem["input"], keys(cls, content), dashes)
    if kind == "missing":
        return f"{key}: expected a value, found none"
    if place.field is None:
        return f"{key}: expected {expected(place.kind)}, found {shown(problem['input'])}"
    if kind in _LIMITS and (words := _bounds_in(context)):
        return f"{key}: expected {_bounds_of(place.field, kind) or words}, found {shown(problem['input'])}"
    if kind in ("too_short", "too_long"):
        sense, limit = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        found = f"{len(problem['input'])}" if kind == "too_long" else shown(problem["input"])
        return f"{key}: expected {sense} {context[limit]:,} values, found {found}"
    if kind in ("string_too_short", "string_too_long"):
        sense = "a text, found an empty one" if kind == "string_too_short" else f"at most {context['max_length']:,} "
        more = "" if kind == "string_too_short" else f"characters, found {len(problem['input']):,}"
        return f"{key}: expected {sense}{more}"
    hint = place.field.annotation if place.kind is None or len(_parts(place.field.annotation)) > 1 else place.kind
    return f"{key}: expected {expected(hint)}, found {shown(place.value)}"


def _telling(problem: Any) -> int:
    """Which of several problems of one key to report: an unknown key rather than a value that is therefore missing, a
    number beyond its bounds rather than that it is none of the words that could be there instead."""
    if problem["type"] in (*_EXTRA, *_LIMITS) or isinstance(problem.get("ctx", {}).get("error"), SettingError):
        return 2
    return int(problem["type"] != "missing")


class _Place(NamedTuple):
    """Where in the settings a problem is: keys, the field there, the section that it is or is in, what was given."""

    path: tuple[str, ...]
    field: FieldInfo | None
    kind: Any
    value: Any


def _place(cls: Any, problem: Any, content: Any) -> _Place:
    """Follow pydantic's location, which names members of unions and items of lists as well, to the last known key."""
    path: list[str] = []
    field, kind, value = None, cls, content
    for i, part in enumerate(problem["loc"]):
        fields = fields_of(kind)
        unknown = problem["type"] in _EXTRA and i == len(problem["loc"]) - 1
        if part not in fields and not unknown:
            continue
        field = None if unknown else fields[part]
        path.append(str(part))
        value = value[part] if isinstance(value, Mapping) and part in value else problem["input"]
        kind = None if field is None else group_of(field.annotation, value)
    return _Place(tuple(path), field, kind, value)


def _unknown(path: Sequence[str], value: Any, known: Sequence[str], dashes: str) -> str:
    text = ".".join(path)
    while isinstance(value, Mapping) and len(value) == 1:  # modle.cost is nearer to model.cost than modle is
        inner, value = next(iter(value.items()))
        text += f".{inner}"
    return f"{dashes}{text[:100]}: no such setting{did_you_mean_key(text[:100], known, dashes)}"


def keys(cls: Any, content: Any = None, key: str = "") -> list[str]:
    """Every key of a section and of those below it."""
    found = []
    for name, field in fields_of(cls).items():
        own = f"{key}.{name}" if key else name
        below = content.get(name) if isinstance(content, Mapping) else None
        group = group_of(field.annotation, below)
        found += [own, *(keys(group, below, own) if group is not None else [])]
    return found


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """The settings of a section: a pydantic model, or a dataclass of pydantic's."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_fields
    return getattr(kind, "__pydantic_fields__", {}) if is_dataclass(kind) else {}


def group_of(hint: Any, value: Any = None) -> Any:
    """The section that a type is, or may be; a base class is asked for the one that a value names."""
    for part in _parts(hint):
        if fields_of(part):
            return part.named(value) if hasattr(part, "named") else part
    return None


# -- types in words ---------------------------------------------------------------------------------------------------


def expected(hint: Any) -> str:
    """A type in words.

    >>> expected(int | tuple[int, int] | None), expected(list[float]), expected(Literal["iou", "ce"])
    ('a whole number, two whole numbers or null', 'a list of numbers', 'iou or ce')
    """
    words: list[str] = []
    for part in _parts(hint):
        origin, arguments = get_origin(part), get_args(part)
        if origin is Literal:
            words += map(str, arguments)
        elif origin in (list, Sequence) or (origin is tuple and Ellipsis in arguments):
            words.append(f"a list of {_MANY.get(_parts(arguments[0])[0], 'values')}")
        elif origin is tuple:
            words.append(f"two {_MANY.get(_parts(arguments[0])[0], 'values')}")
        elif origin is dict or part is dict:
            words.append(f"a table of {_MANY[arguments[1]]}" if arguments and arguments[1] in _MANY else "a table")
        elif names := list(fields_of(part)):
            words.append(f"a table of {', '.join(names[:5])}{' …' * (len(names) > 5)}")
        else:
            words.append(_NAMES.get(part, getattr(part, "__name__", str(part))))
    return one_of(list(dict.fromkeys(words)))


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone; without the metadata of ``Annotated``."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for member in get_args(hint) for part in _parts(member))
    return (hint,)


def _takes(hint: Any, kind: type) -> bool:
    return any(part in (kind, Any) or get_origin(part) is Literal for part in _parts(hint)) or not any(
        part in (int, float) for part in _parts(hint)
    )


def takes_text(hint: Any, or_else: bool = False) -> bool:
    """Whether an argument of this type is a text as it was typed, not YAML; with ``or_else``, whether it may be one."""
    parts = set(_parts(hint))
    return str in parts and (or_else or parts <= {str, types.NoneType})


def _bounds_of(field: FieldInfo, broken: str = "") -> str:
    """The bounds of a setting in words; who is below the lower one is not told an upper one that is far away."""
    found = [(name, getattr(part, name)) for part in field.metadata for name in _BOUNDS if hasattr(part, name)]
    if broken.startswith("greater"):
        found = [(name, value) for name, value in found if name in ("ge", "gt") or value <= 1]
    return " and ".join(f"{_BOUNDS[name]} {_number(value)}" for name, value in found)


def _bounds_in(context: Mapping[str, Any]) -> str:
    """The bound that a problem of pydantic's is about, in words."""
    return " and ".join(f"{_BOUNDS[name]} {_number(value)}" for name, value in context.items() if name in _BOUNDS)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def one_of(words: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def inline(value: Any) -> str:
    """A value as one would type it.

    >>> inline(None), inline((0.8, 1.25)), inline({"train": 0.7, "val": True}), inline("adam")
    ('null', '[0.8, 1.25]', '{train: 0.7, val: true}', 'adam')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if fields_of(type(value)):
        value = {name: getattr(value, name) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return str(value)


def shown(value: Any) -> str:
    """A value in an error: texts in quotes, one line, and not all of what is long.

    >>> shown("a\\nb"), shown(10**400), len(shown("x" * 999))
    ("'a\\\\nb'", 'a number of 401 digits', 81)
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a number of {_digits(value)} digits"
    if isinstance(value, list | tuple | Mapping) and len(value) > _SHOWN:
        return f"{'a table' if isinstance(value, Mapping) else 'a list'} of {len(value):,} values"
    text = repr(value[:100]) if isinstance(value, str) else printable(inline(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


def _digits(value: int) -> int:
    """Of a whole number of any size, which Python refuses to print above some thousand digits."""
    return int(abs(value).bit_length() * 0.30103) + 1


# -- tables -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One setting in a table; ``words`` are values that it may have, for tab completion."""

    key: str
    default: str
    meaning: str
    words: tuple[str, ...] = ()


def rows(cls: Any, key: str) -> Iterator[Row]:
    """The settings of one section, without those of the sections below it."""
    for name, field in fields_of(cls).items():
        if group_of(field.annotation) is not None and len(_parts(field.annotation)) == 1:
            continue
        default = "required" if field.is_required() else inline(field.get_default(call_default_factory=True))
        yield Row(f"{key}.{name}" if key else name, default, _meaning(field), _words(field))


def _meaning(field: FieldInfo) -> str:
    """The description, with the words that a setting may be where it does not name them."""
    meaning = (field.description or "").rstrip(".")
    words = _literals(field)
    if not all(re.search(rf"\b{re.escape(word)}\b", meaning) for word in words):
        meaning += f": {one_of(words)}"
    if bounds := _bounds_of(field).replace("at least ", "").replace(" and at most ", " to "):
        meaning += f" ({bounds})"
    shared = getattr(group_of(field.annotation), "shared", "")  # a table that several settings may be
    return f"{meaning}; or a {shared}" if shared else meaning


def _literals(field: FieldInfo) -> list[str]:
    return [str(word) for part in _parts(field.annotation) if get_origin(part) is Literal for word in get_args(part)]


def _words(field: FieldInfo) -> tuple[str, ...]:
    flags = ["true", "false"] if bool in _parts(field.annotation) else []
    return tuple(dict.fromkeys([*flags, *_literals(field), *(field.examples or ())]))


# -- files ------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file in which every key is there once; :class:`ConfigError` for anything else."""
    content = reading.read_yaml(path)
    if not isinstance(content, dict):
        found = {type(None): "an empty file", list: "a list", str: "a text"}.get(type(content)) or shown(content)
        raise ConfigError(f"{path}: expected sections of settings, found {found}")
    return content


def read_value(text: str) -> Any:
    """What an argument says, as YAML; a text that is no YAML is taken as it is.

    >>> read_value("[1, a]"), read_value("[1, a"), read_value("&a [*a]")
    ([1, 'a'], '[1, a', '&a [*a]')
    """
    try:
        return parsing.parse_yaml(text) if text else ""
    except parsing.Mistake:
        return text
