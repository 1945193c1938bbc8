"""What a study is: a YAML file of :class:`Definition`.

.. code-block:: yaml

    title: Latent codes of one and of eight dimensions
    question: Is one dimension enough?
    base:
      small: {recipe: lidc71-paper, settings: {trainer.epochs: 10}}
      paper: {recipe: lidc}
    members:
      one: {}
      eight: {settings: {model.latent: 8}}
    columns: [ged@16, matched_iou@16]
    reference: {member: one}
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import did_you_mean
from ambiseg.evaluation.results import METRICS
from ambiseg.methods.drawing import Form
from ambiseg.settings import SAMPLES, SettingError, Settings, Text, inline, read_yaml, shown, validate

Scale = Literal["small", "paper"]
MODES = ("modes_found", "modes_distance")  # of data whose modes are known
SIZES = ("parameters", "megabytes")  # of networks, without training
RESERVED = ("members", "logs", "failures", "locks", "plans")  # folders that all studies share
SEEDS = 1000  # of a member, at most
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,79}")
_COLUMN = re.compile(r"([a-z_]+)(?:@([1-9]\d{0,3}))?")
_VALUE = re.compile(r"(-?\d*\.?\d+)(?:\s*±\s*(\d*\.?\d+))?")

Key = Annotated[str, Field(min_length=1, max_length=200)]
Value = bool | int | float | str | None


class Column(NamedTuple):
    """A column: a metric, and for how many masks per image; 0 where that does not matter."""

    metric: str
    samples: int

    def __str__(self) -> str:
        return f"{self.metric}@{self.samples}" if self.samples else self.metric


class Number(NamedTuple):
    """A number of a paper, and its standard deviation over trainings where there is one."""

    mean: float
    spread: float | None


class Base(Settings):
    """What the members of a study change, at one scale."""

    recipe: Text = Field(description="name or file of a recipe")
    settings: dict[Key, Any] = Field(default={}, description="what is changed of it, by key")
    minutes: float | None = Field(
        default=None, gt=0, le=1e6, description="CPU time of every training, from which epochs follow; null: as set"
    )


class MemberDefinition(Settings):
    """One row of the table."""

    title: str = Field(default="", max_length=200, description="in the table; empty: the member's name")
    settings: dict[Key, Any] = Field(default={}, description="what it changes of the base, by key")
    seeds: int | None = Field(default=None, ge=1, le=SEEDS, description="trainings; null: as of the study")
    samples: list[Annotated[int, Field(ge=1, le=SAMPLES)]] | None = Field(
        default=None, max_length=32, description="numbers of masks that are scored; null: those of the columns"
    )
    note: str = Field(default="", max_length=2000, description="printed below the table")


class Reference(Settings):
    """The row that all others are compared with."""

    member: str = Field(description="its name")
    form: Form | None = Field(default=None, description="of its masks; null: that of the row it is compared with")


class Plot(Settings):
    """A figure of the table."""

    x: Key = Field(description="a setting that is a number in every member")
    y: str = Field(description="a column")
    title: str = Field(default="", max_length=200, description="of the horizontal axis")
    logarithmic: bool = Field(default=False, description="scale of the horizontal axis")


class PaperRow(Settings):
    """What a paper reports of one row."""

    member: str = Field(description="its name")
    form: Form = Field(default="standard", description="of its masks")
    source: str = Field(min_length=1, max_length=200, description="label of the paper's table")
    values: dict[str, str | float] = Field(description="by column: .218 ± .003, or without ±")

    @field_validator("values")
    @classmethod
    def _numbers(cls, values: dict[str, str | float]) -> dict[str, str | float]:
        for key, value in values.items():
            if _VALUE.fullmatch(str(value).strip()) is None:
                raise ValueError(f"expected a number, or one as .218 ± .003, found {shown(value)} for {shown(key)}")
        return values

    @property
    def numbers(self) -> dict[Column, Number]:
        """The values."""
        found = {}
        for key, value in self.values.items():
            match = _VALUE.fullmatch(str(value).strip())
            assert match is not None
            found[column(key)] = Number(float(match[1]), None if match[2] is None else float(match[2]))
        return found


class Definition(Settings):
    """A study."""

    title: str = Field(min_length=1, max_length=200, description="in one line")
    question: str = Field(min_length=1, max_length=2000, description="that it answers")
    repeats: str = Field(default="", max_length=400, description="which table or figure of which paper")
    base: dict[Scale, Base] = Field(description="by scale, small and paper")
    settings: dict[Key, Any] = Field(default={}, description="of all members, at any scale and on any data")
    members: dict[str, MemberDefinition] = Field(default={}, max_length=1000, description="the rows, by name")
    axes: dict[Key, list[Value]] = Field(
        default={}, max_length=4, description="rows for all combinations of these values of settings"
    )
    train: bool = Field(default=True, description="false: networks are only counted")
    seeds: int = Field(default=3, ge=1, le=SEEDS, description="trainings of every member")
    forms: list[Form] = Field(default=["standard", "compact"], min_length=1, description="of masks")
    columns: list[str] = Field(min_length=1, max_length=40, description="metric@masks, such as ged@16")
    reference: Reference | None = Field(default=None, description="the row that others are compared with")
    plot: Plot | None = Field(default=None, description="a figure of the table")
    paper: list[PaperRow] = Field(default=[], max_length=1000, description="what a paper reports")
    paper_data: str = Field(
        default="paper, LIDC 128×128: other data", max_length=200, description="title of the paper's columns"
    )
    note: str = Field(default="", max_length=2000, description="printed below the table")

    @field_validator("members")
    @classmethod
    def _names(cls, members: dict[str, MemberDefinition]) -> dict[str, MemberDefinition]:
        for name in members:
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"expected names of letters, digits and . _ = -, found {shown(name)}")
        return members

    @field_validator("columns")
    @classmethod
    def _columns(cls, columns: list[str]) -> list[str]:
        for text in columns:
            column(text)
        return columns

    @model_validator(mode="after")
    def _fits_together(self) -> Definition:
        if "small" not in self.base:
            raise SettingError("base", f"expected small, found {shown(list(self.base))}")
        if not self.rows:
            raise SettingError("members", "expected members or axes, found neither")
        if len(self.rows) > 1000:
            raise SettingError("axes", f"expected at most 1,000 members, found {len(self.rows):,}")
        names = [("reference", self.reference.member)] if self.reference else []
        for key, name in [*names, *(("paper", row.member) for row in self.paper)]:
            if name not in self.rows:
                hint = did_you_mean(name, self.rows)
                raise SettingError(key, f"expected the name of a member, found {shown(name)}{hint}")
        for text in [*([self.plot.y] if self.plot else []), *(key for row in self.paper for key in row.values)]:
            if column(text) not in self.table_columns:
                raise SettingError("columns", f"expected {text}, which paper or plot has, found {shown(self.columns)}")
        counted = [one.metric in SIZES for one in self.table_columns]
        if not self.train and not all(counted):
            raise SettingError(
                "columns", f"expected {' or '.join(SIZES)} without training, found {shown(self.columns)}"
            )
        return self

    @property
    def rows(self) -> dict[str, MemberDefinition]:
        """The members by name: those that are listed, and all combinations of the axes."""
        return {**self.members, **dict(self._combined())}

    def _combined(self) -> Iterator[tuple[str, MemberDefinition]]:
        for values in itertools.product(*self.axes.values()) if self.axes else ():
            settings = dict(zip(self.axes, values, strict=True))
            name = "_".join(f"{key.rpartition('.')[2]}-{inline(value)}" for key, value in settings.items())
            yield re.sub(r"[^A-Za-z0-9._=-]", "-", name)[:80], MemberDefinition(settings=settings)

    @property
    def table_columns(self) -> list[Column]:
        """The columns."""
        return [column(text) for text in self.columns]

    @property
    def samples(self) -> list[int]:
        """The numbers of masks per image that are scored."""
        return sorted({one.samples for one in self.table_columns if one.samples})


def column(text: str) -> Column:
    """A column from its text.

    >>> column("ged@16"), column("parameters")
    (Column(metric='ged', samples=16), Column(metric='parameters', samples=0))
    """
    known, match = (*METRICS, *MODES, *SIZES), _COLUMN.fullmatch(text)
    if match is None or match[1] not in known:
        hint = did_you_mean(text.partition("@")[0], known)
        raise ValueError(f"expected METRIC@MASKS with one of {', '.join(known)}, found {shown(text)}{hint}")
    if (match[2] is None) != (match[1] in ("modes_found", *SIZES)):
        expected = f"{match[1]}@MASKS" if match[2] is None else match[1]
        raise ValueError(f"expected {expected}, found {shown(text)}")
    samples = int(match[2] or 0)
    if samples > SAMPLES:
        raise ValueError(f"expected at most {SAMPLES:,} masks, found {shown(text)}")
    return Column(match[1], samples)


# -- files ------------------------------------------------------------------------------------------------------------


def studies() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    folder = Path(str(resources.files("ambiseg.studies") / "tables"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str | os.PathLike[str]) -> tuple[str, Definition]:
    """The name of a study, and the study: one of the package's, or of a YAML file."""
    text = os.fspath(name)
    path = studies().get(text)
    if path is None:
        path = Path(text)
        if path.suffix not in (".yaml", ".yml"):
            hint = did_you_mean(text, studies())
            raise ConfigError(f"study: expected one of {', '.join(studies())} or a YAML file, found {text!r}{hint}")
        if not path.is_file():
            raise ConfigError(f"{path}: expected a study, found no such file")
    if path.stem in RESERVED or _NAME.fullmatch(path.stem) is None:
        expected = f"a name of letters, digits and . _ = -, and not one of {', '.join(RESERVED)}"
        raise ConfigError(f"{path}: expected {expected}, found {shown(path.stem)}")
    return path.stem, validate(Definition, _checked(read_yaml(path), path), prefix=f"{path}: ")


def _checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a file, whose tables of tables are checked one by one, so that a message names the right one."""
    for key, kind in (("base", Base), ("members", MemberDefinition)):
        if isinstance(content.get(key), Mapping):
            content[key] = {name: {} if one is None else one for name, one in content[key].items()}
            for name, one in content[key].items():
                if isinstance(one, Mapping):
                    validate(kind, one, prefix=f"{path}: {key}.{shown(name)[:80]}.".replace("'", ""))
    for i, row in enumerate(content["paper"] if isinstance(content.get("paper"), list) else (), 1):
        if isinstance(row, Mapping):
            validate(PaperRow, row, prefix=f"{path}: paper, row {i}: ")
    return content
