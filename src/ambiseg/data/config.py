"""The settings of a data set, its split and its batches; they are saved with every run."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator

from ambiseg._util.errors import DataError
from ambiseg._util.own import imported, is_reference, made, parameters, told
from ambiseg._util.text import did_you_mean, shape_text
from ambiseg.data.augment import Augment
from ambiseg.data.cache import USER
from ambiseg.data.case import Case, Cases, Progress
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import AnnotationPolicy, Outside
from ambiseg.data.rules import SHARES, parse_fold
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.sets.street.camvid import CamVid
from ambiseg.data.sets.street.cityscapes import Cityscapes
from ambiseg.data.sets.street.flips import Flips
from ambiseg.data.splits import EmptyPart, Split
from ambiseg.data.store import Store
from ambiseg.settings import SEED, SIDE, SettingError, Settings, Side, Text, shown, validate

DATASETS: dict[str, type[Cases]] = {
    "nodules": Nodules,
    "shapes": Shapes,
    "folder": Folder,
    "arrays": Arrays,
    "store": Store,
    "cityscapes": Cityscapes,
    "camvid": CamVid,
}

NEEDS_ROOT = {"folder", "arrays", "store", "cityscapes", "camvid"}

Size = Side | tuple[Side, Side] | None


def _cache(given: Any) -> Any:
    return USER if given == "temporary" else given  # as configurations called it before there was a user's cache


class DataConfig(Settings):
    """What to load and how.

    >>> DataConfig(name="shapes", options={"size": 32}).changed(batch_size=8).batch_size
    8
    """

    name: Text = Field(
        default="nodules",
        examples=list(DATASETS),
        description=f"which data set: {', '.join(DATASETS)}, or module:Class of your own",
    )
    root: Text | None = Field(default=None, description="where the data are, unless they are part of the package")
    options: dict[str, Any] = Field(
        default={},
        description="further arguments of the data set, such as {size: 128} for nodules; flips makes data with one "
        "class-id map per image ambiguous",
    )
    extra: Text | None = Field(
        default=None, description="a folder of another model's predictions that join the images as channels"
    )
    split: Text | None = Field(
        default=None,
        description="declared (the owner's), hash (by patient), mose (as released with the paper, for LIDC) or the "
        "file of a saved split; null: declared where the data have one, else hash",
    )
    fractions: dict[str, float] = Field(
        default=SHARES, max_length=100, description="shares of the patients, for split hash"
    )
    split_seed: int = Field(default=0, ge=0, le=SEED, description="another seed, another split")
    fold: str | None = Field(
        default=None,
        description="one fold of a cross-validation by patient, for split hash: 2/5 tests on the second of five folds, "
        "and `ambiseg evaluate` of all five runs pools them",
    )
    intensity: Intensity | None = Field(
        default=None, description="how raw values become the network's input; null: as the data set recommends"
    )
    size: Size = Field(
        default=None, description="height and width of the training window; one number is a square; null: whole images"
    )
    eval_size: Size = Field(
        default=None,
        description="the same for validation and test, in the middle of the image; null: whole images, large ones by "
        "windows",
    )
    outside: Outside = Field(
        default="reflect", description="beyond the border of an image that is smaller than the window: reflect or void"
    )
    windows: int = Field(default=1, ge=1, le=10_000, description="training windows of every image per epoch")
    focus: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the training windows that hold a marked pixel in their middle half; the others are "
        "anywhere",
    )
    augment: Augment = Field(default=Augment(), description="random operations on training images")
    annotations: AnnotationPolicy = Field(
        default=None,
        description="annotations of a training image: all; random: one, drawn for each batch; once: one, drawn once "
        "for the whole training; the number of one; null: what the method needs",
    )
    fraction: float = Field(
        default=1.0, gt=0, le=1, description="part of the training set to train on; a quarter is part of the half"
    )
    batch_size: int = Field(default=16, ge=1, le=1 << 16, description="images per step and process")
    eval_batch_size: int = Field(
        default=32,
        ge=1,
        le=1 << 16,
        description="most images at a time in validation and test; fewer where they are large",
    )
    workers: int = Field(default=0, ge=0, le=256, description="processes that load; 0: load in the training process")
    cache: Annotated[Text | None, BeforeValidator(_cache)] = Field(
        default=USER,
        description="where decoded data are kept: user (the user's cache folder), or the path of another folder; null: "
        "read the source every time",
    )
    seed: int = Field(
        default=0, ge=0, le=SEED, description="of the order, the windows, the augmentation and the annotations drawn"
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in DATASETS and not is_reference(name):
            known = f"one of {', '.join(DATASETS)} or module:Class"
            raise ValueError(f"expected {known}, found {shown(name)}{did_you_mean(name, DATASETS)}")
        return name

    @field_validator("fold")
    @classmethod
    def _a_fold(cls, fold: str | None) -> str | None:
        try:
            if fold is not None:
                parse_fold(fold)
        except DataError as error:
            raise ValueError(str(error).removeprefix("fold: ")) from None
        return fold

    @field_validator("fractions")
    @classmethod
    def _shares(cls, fractions: dict[str, float]) -> dict[str, float]:
        """Each by itself: whether they sum to 1 depends on the parts that the data's owner declared."""
        for name, share in fractions.items():
            if not 0 < share <= 1:
                raise ValueError(f"expected shares above 0 and at most 1, found {shown(name)}: {share:g}")
        return fractions

    @model_validator(mode="after")
    def _windows_fit(self) -> DataConfig:
        if self.size is None:
            return self
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if self.augment.quarter_turns and height != width:
            found = f"{height}×{width}"
            raise SettingError("size", f"expected a square, which data.augment.quarter_turns needs, found {found}")
        if max(source := self.augment.source((height, width))) > 2 * SIDE:
            found = f"{shape_text(source)} for a window of {height}×{width}"
            raise SettingError("augment.scale", f"expected to need at most {2 * SIDE:,} pixels a side, found {found}")
        return self


def open_cases(config: DataConfig) -> Cases:
    """The data set that a configuration names. Cases are read when they are asked for."""
    if config.name not in DATASETS:
        return _own(config)
    dataset, needs_root = DATASETS[config.name], config.name in NEEDS_ROOT
    if needs_root and config.root is None:
        raise DataError(f"data.root: expected the folder of the {config.name} data, found none")
    if not needs_root and config.root is not None:
        raise DataError(f"data.root: {config.name} is part of the package and takes no folder, found {config.root!r}")
    known = (
        [*FolderSettings.model_fields] if dataset is Folder else [*inspect.signature(dataset).parameters][needs_root:]
    )
    options, flips = _options(config, known)
    if dataset is not Folder:  # which checks its settings itself
        options = _typed(dataset, options)
    cases = dataset(*([config.root] if needs_root else []), **options)  # type: ignore[call-arg]
    return cases if flips is None else Flips(cases, flips)


def _options(config: DataConfig, known: list[str] | None) -> tuple[dict[str, Any], Any]:
    """The arguments of a data set that takes those that are known, or any; and the flips, if it takes none itself."""
    options = {**config.options, **({} if config.extra is None else {"extra": config.extra})}
    flips = None if known is None or "flips" in known else options.pop("flips", None)
    if known is not None and (unknown := [key for key in options if key not in known]):
        expected = f"some of {', '.join(known)}" if known else "no options"
        raise DataError(
            f"data.options: expected {expected}, found {shown(unknown[0])}{did_you_mean(unknown[0], known)}"
        )
    return options, flips


def _typed(dataset: type[Cases], options: dict[str, Any]) -> dict[str, Any]:
    """The options with the types that the data set's constructor declares, or one line that names the first without."""
    hints = get_type_hints(dataset.__init__, include_extras=True)
    loose = {"root", "flips", "return"}  # flips say themselves what is wrong
    fields: Any = {name: (hint, None) for name, hint in hints.items() if name not in loose}
    checked = {name: value for name, value in options.items() if name in fields}
    found = validate(create_model(dataset.__name__, __base__=Settings, **fields), checked, prefix="data.options.")
    return {**options, **{name: getattr(found, name) for name in checked}}


def _own(config: DataConfig) -> Cases:
    """``module:Name``: a subclass of :class:`Cases`, or a function that returns one, with its first case read."""
    name, factory = config.name, imported(config.name, "data.name")
    takes = inspect.signature(factory).parameters
    options, flips = _options(config, parameters(factory, without="root"))
    if config.root is not None:
        if "root" not in takes:
            raise DataError(f"data.root: {name} takes no root, found {config.root!r}")
        options["root"] = config.root
    elif "root" in takes and takes["root"].default is inspect.Parameter.empty:
        raise DataError(f"data.root: expected where the data of {name} are, found none")
    cases = made(factory, options, name, "data.options")
    if not isinstance(cases, Cases):
        raise DataError(f"data.name: expected {name} to be a subclass of ambiseg.data.Cases, found {type(cases)}")
    for attribute in ("title", "classes", "evaluated", "channels", "intensity", "names", "patients"):
        if not hasattr(cases, attribute):
            raise DataError(f"data.name: expected {name} to have the attribute {attribute}, found none")
    try:
        first = cases[0] if len(cases) else None
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"data.name: expected the first case of {name}, found {told(error)}") from error
    if first is not None and (not isinstance(first, Case) or first.image.shape[0] != cases.channels):
        found = list(first.image.shape) if isinstance(first, Case) else type(first).__name__
        raise DataError(f"data.name: expected a Case of {cases.channels} channels as first of {name}, found {found}")
    return cases if flips is None else Flips(cases, flips)


def dataset_at(path: str | os.PathLike[str]) -> str:
    """Which data set a path holds: a store, arrays, street scenes, or else a folder of images and masks."""
    inside = {"store.json": "store", "leftImg8bit": "cityscapes", "trainannot": "camvid"}
    found = next((name for file, name in inside.items() if (Path(path) / file).exists()), "folder")
    return "arrays" if Path(path).suffix.lower() == ".npz" else found


def open_split(cases: Cases, config: DataConfig, progress: Progress | None = None) -> Split:
    """The split that a configuration names; a saved one is compared with the data that it is used on."""
    kind = config.split or ("hash" if cases.declared is None else "declared")
    if config.fold is not None and kind != "hash":
        found = config.split or "parts that the data's owner declared"
        raise DataError(f"data.fold: expected data.split hash, which divides all cases anew, found {found}")
    try:
        if kind == "hash":
            return Split.by_hash(cases, config.fractions, config.split_seed, progress, config.fold)
        if kind == "declared":
            said = set(cases.declared or ())
            shares = {"val": config.fractions.get("val", 0.1), "test": config.fractions.get("test")}
            lacking = {part: share for part, share in shares.items() if part not in said and "train" in said}
            return Split.declared(cases, seed=config.split_seed, progress=progress, **lacking)
    except EmptyPart as error:
        raise error.naming("data.split_seed={}") from None
    if kind == "mose":
        from ambiseg.data.sets.lidc.released import released_split

        return released_split(cases, progress)
    if not Path(kind).is_file():
        raise DataError(f"data.split: expected hash, declared, mose or the file of a saved split, found {kind!r}")
    split = Split.load(kind)
    split.verify(cases, progress=progress)
    return split
