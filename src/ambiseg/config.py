"""A run as one typed configuration: recipes, YAML files and the command line all fill in these settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator, model_serializer, model_validator

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import did_you_mean, did_you_mean_key
from ambiseg.data.config import DataConfig
from ambiseg.methods import METHODS, MethodConfig, method_named
from ambiseg.methods.base import DEFAULT
from ambiseg.methods.schedules import Schedule
from ambiseg.metrics import PROTOCOLS
from ambiseg.nn.config import BackboneConfig
from ambiseg.settings import (
    EPOCHS,
    SAMPLES,
    SEED,
    Row,
    SettingError,
    Settings,
    Text,
    fields_of,
    group_of,
    keys,
    read_value,
    read_yaml,
    rows,
    shown,
    takes_text,
    validate,
)
from ambiseg.trainer_settings import TrainerConfig


class OptimizerConfig(Settings):
    """Adam."""

    lr: float = Field(default=1e-4, gt=0, le=1000, description="learning rate")
    weight_decay: float = Field(default=1e-5, ge=0, le=1000, description="as a penalty on the squared weights")
    decay: Literal["constant", "linear", "cosine", "plateau"] = Field(
        default="constant",
        description="constant; linear or cosine to ``min_lr`` over the whole run, step by step; or plateau: times "
        "``factor`` when the training loss has not improved for more than ``patience`` epochs",
    )
    min_lr: float = Field(default=1e-5, ge=0, le=1000, description="the smallest learning rate")
    factor: float = Field(default=0.5, gt=0, le=1, description="of plateau")
    patience: int = Field(default=10, ge=0, le=EPOCHS, description="of plateau, in epochs")
    warm_up: int = Field(default=0, ge=0, le=10**9, description="steps over which the learning rate rises from 0")
    clip: float | None = Field(
        default=None, gt=0, le=1e9, description="largest norm of the gradient; null: not clipped"
    )
    average: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="keep an exponential average of the weights with this memory (0.998 remembers some 500 steps), and "
        "validate and save that one; 0: off",
    )


class EvaluationConfig(Settings):
    """How models are compared while they train, and by default afterwards."""

    samples: int = Field(default=16, ge=2, le=SAMPLES, description="masks per image, drawn in standard form")
    protocol: Text = Field(
        default="mose",
        examples=list(PROTOCOLS),
        description="how GED and matched IoU are computed, a key of ``ambiseg.PROTOCOLS``",
    )

    @field_validator("protocol")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise ValueError(f"expected one of {known}, found {shown(name)}{did_you_mean(name, PROTOCOLS)}")
        return name


class Config(Settings):
    """Everything that decides what a run does.

    >>> Config(trainer={"epochs": 8}).trainer.epochs
    8
    >>> Config.from_recipe("demo", {"trainer": {"epochs": 8}, "optimizer.lr": 1e-3}).optimizer.lr
    0.001
    """

    data: DataConfig = Field(default_factory=DataConfig, description="what to load and how")
    backbone: BackboneConfig = Field(default_factory=BackboneConfig, description="the network that gives features")
    model: SerializeAsAny[MethodConfig] = Field(
        default_factory=lambda: method_named(None).Config(), description="the method and its settings"
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="how it is fitted")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="how long, and on what")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="how models are compared")
    seed: int = Field(default=0, ge=0, le=SEED, description="of weights, samples, order and augmentation")

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_method(cls, given: Any) -> Any:
        """Settings are told apart by ``method``, and checked by that method's own configuration."""
        return MethodConfig.named(given).model_validate(given) if isinstance(given, Mapping) else given

    @model_validator(mode="before")
    @classmethod
    def _with_needs_of_the_method(cls, given: Any) -> Any:
        """What the method needs of other sections, where nobody says otherwise."""
        if not isinstance(given, Mapping):
            return given
        model = given.get("model")
        name = model.get("method") if isinstance(model, Mapping) else getattr(model, "method", None)
        known = name is None or (isinstance(name, str) and name in METHODS)  # others are refused where they are read
        for key, value in (method_named(name).defaults if known else {}).items():
            section, setting = key.split(".")
            found = given.get(section, {})
            if isinstance(found, Mapping):
                given = {**given, section: {setting: value, **found}}
        return given

    @model_validator(mode="after")
    def _fit_together(self) -> Config:
        if self.data.augment.warps and self.data.size is None:
            needs = "rotate and scale of data.augment need"
            raise SettingError("data.size", f"expected a window, which {needs}, found null")
        accepted, asked = method_named(self.model.method).annotations, self.data.annotations
        if asked is not None and ("once" if isinstance(asked, int) else asked) not in accepted:
            found = f"{asked} with {self.model.method}"
            raise SettingError("data.annotations", f"expected one of {', '.join(accepted)}, found {found}")
        return self

    @classmethod
    def from_recipe(cls, recipe: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Config:
        """A recipe, and what you change of it.

        With another ``data.name`` than the recipe's, the recipe's ``data.options`` are left out, with another
        ``backbone.name`` its ``backbone.channels`` and ``backbone.options``, and with another ``model.method`` its
        settings of the model: they are of another data set, network or method.

        Args:
            recipe: the name of a recipe, or the path of a YAML file.
            settings: values by key, as on the command line: ``{"trainer.epochs": 8}``; a section may be a table.
        """
        content = _recipe(recipe)
        return _changed(content, [(key.split("."), value) for key, value in _flat(settings or {})])

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """A copy with some settings changed, by key: ``{"trainer.epochs": 8}``; everything is checked again."""
        return _changed(self.model_dump(), [(key.split("."), value) for key, value in _flat(settings)])

    @model_serializer(mode="wrap")
    def _only_what_it_has(self, dump: Any) -> dict[str, Any]:
        """Without the backbone of a method that has none."""
        content = dump(self)
        if not method_named(self.model.method).uses_backbone:
            del content["backbone"]
        return content


# -- files and arguments ----------------------------------------------------------------------------------------------


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(resources.files("ambiseg") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe: the path of a YAML file, or a name in ``recipes/``."""
    text = os.fspath(name)
    if text in recipes():
        return recipes()[text]
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        if not Path(text).is_file():
            raise ConfigError(f"{text}: expected a recipe, found no such file")
        return Path(text)
    known = ["auto", *recipes()]  # auto is a plan: see ambiseg.planning
    hint = did_you_mean(text, known)
    raise ConfigError(f"recipe: expected one of {', '.join(known)} or a YAML file, found {text!r}{hint}")


def parse(arguments: Sequence[str], recipe: str | os.PathLike[str] | None = None) -> Config:
    """A configuration from the command line, over a recipe, over the defaults; see :meth:`Config.from_recipe`.

    >>> parse(["--trainer.epochs", "8", "--data.options.size", "32"]).trainer.epochs
    8
    >>> parse(["--trainer.epoch", "8"])
    Traceback (most recent call last):
    ambiseg._util.errors.ConfigError: --trainer.epoch: no such setting; did you mean --trainer.epochs?
    """
    content = {} if recipe is None else _recipe(recipe)
    given = _given(arguments)
    return _changed(content, given, dashes="--" if given else "")


# What belongs to the value of a setting, and is left out when that is another than the recipe's; all of the section.
_BELONGS = {
    ("data", "name"): ("options",),
    ("backbone", "name"): ("channels", "options"),
    ("model", "method"): None,
}


def _recipe(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a recipe, which is valid."""
    path = find_recipe(recipe)
    content = migrated(read_yaml(path))
    validate(Config, content, prefix=f"{path}: ")
    return content


def _changed(content: dict[str, Any], given: Sequence[tuple[list[str], Any]], dashes: str = "") -> Config:
    """Settings over the content of a recipe; texts of the command line are :class:`_Typed`."""
    for (section, key), below in _BELONGS.items():
        asked = [value for path, value in given if path == [section, key]]
        own = content.get(section, {})
        if asked and asked[-1] != own.get(key, fields_default(section, key)):
            content[section] = {k: v for k, v in own.items() if k not in below} if below else {}
    for path, value in given:
        _put(content, path, value)
    return validate(Config, content, dashes=dashes)


def _flat(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sections that are tables as keys with dots, at the places where the present version has them.

    >>> _flat({"trainer": {"epochs": 8}, "data.options": {"size": 32}, "model.backbone": "unet-light"})
    [('trainer.epochs', 8), ('data.options', {'size': 32}), ('backbone.name', 'unet-light')]
    """
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in Config.model_fields:
            found += [(_moved(f"{key}.{name}"), below) for name, below in value.items()]
        else:
            found.append((_moved(key), value))
    return found


def fields_default(section: str, key: str) -> Any:
    """The default of a setting."""
    return getattr(getattr(Config(), section), key)


def load(path: str | os.PathLike[str]) -> Config:
    """The configuration that a YAML file holds."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a configuration, found no such file")
    return validate(Config, migrated(read_yaml(path)), prefix=f"{path}: ")


def dump(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """YAML of all settings, defaults included, in the order of their sections.

    Args:
        comments: put beside settings, by their keys.

    >>> text = dump(Config(), {"trainer.epochs": "as long as it takes"})
    >>> next(line for line in text.splitlines() if "epochs" in line)
    '  epochs: 30  # as long as it takes'
    """
    import yaml

    content = config.model_dump(mode="json")
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1 << 16)  # a setting, a line
    return _commented(text, comments) if comments else text


def _commented(text: str, comments: Mapping[str, str]) -> str:
    lines, path = [], list[str]()
    for line in text.splitlines():
        if key := re.match(r"( *)([\w-]+):(?: |$)", line):  # not an item of a list
            path = [*path[: len(key[1]) // 2], key[2]]
            if reason := comments.get(".".join(path)):
                line += f"  # {' '.join(reason.split())}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def nested(settings: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Settings by key, or as arguments of a command, as nested tables; values are not checked yet.

    >>> nested(["--data.root", "scans/", "--data.size=64"])
    {'data': {'root': 'scans/', 'size': 64}}
    >>> nested({"data.root": "scans/", "trainer": {"epochs": 8}})
    {'data': {'root': 'scans/'}, 'trainer': {'epochs': 8}}
    """
    by_key = isinstance(settings, Mapping)
    content: dict[str, Any] = {}
    for path, value in [(key.split("."), value) for key, value in _flat(settings)] if by_key else _given(settings):
        _put(content, path, value)
    return content


class _Typed(str):
    """What was typed on a command line, and is still to be read."""


def _given(arguments: Sequence[str]) -> list[tuple[list[str], _Typed]]:
    """``--section.key value`` and ``--section.key=value`` as paths and texts."""
    found, left = [], list(arguments)
    while left:
        word = left.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"expected settings as --section.key value, found {word!r}")
        if not equals:
            if not left or left[0].startswith("--"):
                known = keys(Config, {"model": {}})
                hint = (
                    "expected a value, found none"
                    if key in known
                    else f"no such setting{did_you_mean_key(key, known, '--')}"
                )
                raise ConfigError(f"--{key}: {hint}")
            text = left.pop(0)
        found.append((_moved(key).split("."), _Typed(text)))
    return found


def _put(content: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set one key of nested tables. A setting that is a text takes what was typed, any other what it says as YAML."""
    kind: Any = Config
    table = content
    for part in path[:-1]:
        inner = table.get(part)
        table[part] = dict(inner) if isinstance(inner, Mapping) else {}
        field = fields_of(kind).get(part)
        kind = None if field is None else group_of(field.annotation, table[part])
        table = table[part]
    field = fields_of(kind).get(path[-1])
    if isinstance(value, _Typed):
        text, value = str(value), read_value(value)
        if field is not None and value is not None and takes_text(field.annotation, or_else=isinstance(value, Mapping)):
            value = text  # such as a number with leading zeros, or a name with a colon in it
    table[path[-1]] = value


# -- configurations of earlier versions -------------------------------------------------------------------------------

# Version 0.1 had one flat section for method and backbone, and one for schedules.
_MOVES = {
    "model.backbone": "backbone.name",
    "model.channels": "backbone.channels",
    "model.convs": "backbone.convs",
    "model.momentum": "backbone.momentum",
    "schedules": "model",
}


def _moved(key: str) -> str:
    """The present key of a setting that an earlier version had elsewhere.

    >>> _moved("model.channels"), _moved("schedules.capacity.values"), _moved("seed")
    ('backbone.channels', 'model.capacity.values', 'seed')
    """
    for old, new in _MOVES.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def migrated(content: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a YAML file with the settings of earlier versions at their present places.

    >>> migrated({"model": {"convs": 2}, "schedules": {"capacity": {"kind": "constant", "values": [1]}}})
    {'model': {'capacity': 1}, 'backbone': {'convs': 2}}
    """
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()}
    model, schedules = found.get("model"), found.pop("schedules", {})
    if isinstance(model, dict):
        moved = {key: model.pop(key) for key in list(model) if _moved(f"model.{key}") != f"model.{key}"}
        for key, value in moved.items():
            section, _, name = _moved(f"model.{key}").partition(".")
            found.setdefault(section, {})[name] = value
    for name, schedule in (schedules or {}).items():
        if isinstance(schedule, Mapping) and schedule.get("kind", "constant") == "constant":
            schedule = (schedule.get("values") or [1.0])[0]
        if schedule is not None:  # samples: null took model.samples
            found.setdefault("model", {})[name] = schedule
    data = found.get("data")
    if isinstance(data, dict):
        for key, default in (("cache", "temporary"), ("annotations", "all")):
            if schedules and data.get(key) == default:  # the default of version 0.1, which has another name now
                del data[key]
    return found


# -- the table of settings --------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """One section of the table of settings."""

    key: str
    title: str
    rows: list[Row]


def tables() -> list[Table]:
    """Every setting with its default and its meaning, by section; those of the methods one method after the other."""
    found: list[Table] = []
    for name, field in Config.model_fields.items():
        if name == "model":
            for method, kind in METHODS.items():
                title, (first, *own) = f"model, method {method}: {_summary(kind.Config)}", rows(kind.Config, name)
                about = "which method is trained; ``ambiseg methods`` lists them"
                named = [first._replace(meaning=about, words=tuple(METHODS))] if method == DEFAULT else []
                found.append(Table("model", title, [*named, *own]))
            moving = "a setting that moves from epoch to epoch, instead of its number, such as model.capacity"
            found.append(Table("schedule", f"SCHEDULE: {moving}", list(rows(Schedule, "SCHEDULE"))))
        elif (kind := group_of(field.annotation)) is not None:
            found += _sections(kind, name)
    found.append(Table("", "in no section", [row for row in rows(Config, "") if row.key == "seed"]))
    return found


def _sections(kind: Any, key: str) -> list[Table]:
    """A section and the sections inside of it."""
    found = [Table(key, f"{key}: {_summary(kind)}", list(rows(kind, key)))]
    for name, field in fields_of(kind).items():
        if (below := group_of(field.annotation)) is not None:
            found += _sections(below, f"{key}.{name}")
    return found


def _summary(kind: Any) -> str:
    import inspect

    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
