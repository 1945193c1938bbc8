"""Everything that decides what a network is shown, as one dataclass; it is saved with every run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ambiseg._util.errors import DataError
from ambiseg.data.augment import Augment
from ambiseg.data.case import Cases
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Outside, Which
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.sets.street.camvid import CamVid
from ambiseg.data.sets.street.cityscapes import Cityscapes
from ambiseg.data.sets.street.flips import Flips
from ambiseg.data.splits import Split
from ambiseg.data.store import Progress, Store

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
TEMPORARY = "temporary"


@dataclass
class DataConfig:
    """What to load and how.

    Args:
        name: which data set, a key of ``DATASETS``.
        root: where it is, for data sets that are not part of the package.
        options: further arguments of the data set, such as ``{"size": 128}`` for nodules. ``flips`` makes any data
            of one class-id map an image ambiguous, see :class:`~ambiseg.data.sets.street.flips.Flips`.
        extra: a folder of another model's predictions that join the images as channels, for data sets that take them.
        split: ``declared`` (the owner's), ``hash`` (by patient), ``mose`` (as released with the paper, for LIDC), the
            path of a frozen split, or nothing: the owner's where the data have one, else by hash.
        fractions: shares of the patients, for ``hash``.
        split_seed: another seed, another split.
        intensity: how raw values become input; nothing takes what the data set recommends.
        size: height and width of the training window; one number is a square, nothing takes whole images.
        eval_size: the same for validation and test; always in the middle.
        outside: what lies beyond the border of an image that is smaller than the window.
        augment: random operations on training images.
        annotations: ``all``; ``random``: one, drawn anew each time; ``once``: one, drawn once for good; or its number.
        fraction: train on this part of the training set; whole patients, and a quarter is part of the half.
        batch_size: images a step and process.
        eval_batch_size: images at a time in validation and test.
        workers: processes that load; 0 loads in the training process.
        cache: ``temporary`` decodes everything once, into files that go with the process; a folder keeps them for
            the next run; nothing reads the source every time.
        seed: of the order, the windows, the augmentation and the annotations that are drawn.
    """

    name: str = "nodules"
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    extra: str | None = None
    split: str | None = None
    fractions: dict[str, float] = field(default_factory=lambda: {"train": 0.7, "val": 0.1, "test": 0.2})
    split_seed: int = 0
    intensity: Intensity | None = None
    size: int | tuple[int, int] | None = None
    eval_size: int | tuple[int, int] | None = None
    outside: Outside = "reflect"
    augment: Augment = field(default_factory=Augment)
    annotations: Which = "all"
    fraction: float = 1.0
    batch_size: int = 16
    eval_batch_size: int = 32
    workers: int = 0
    cache: str | None = TEMPORARY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            close = get_close_matches(self.name, DATASETS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise DataError(f"data.name: expected one of {', '.join(DATASETS)}, found {self.name!r}{hint}")
        for key in ("batch_size", "eval_batch_size"):
            if getattr(self, key) < 1:
                raise DataError(f"data.{key}: expected at least 1, found {getattr(self, key)}")
        if self.workers < 0:
            raise DataError(f"data.workers: expected 0 or more, found {self.workers}")


def open_cases(config: DataConfig) -> Cases:
    """The data set that a configuration names. Cases are read when they are asked for."""
    dataset = DATASETS[config.name]
    accepted = inspect.signature(dataset).parameters
    first = next(iter(accepted))
    needs_root = config.name in NEEDS_ROOT
    if needs_root and config.root is None:
        raise DataError(f"data.root: expected the folder of the {config.name} data, found nothing")
    if not needs_root and config.root is not None:
        raise DataError(f"data.root: {config.name} is part of the package and takes no folder, found {config.root!r}")
    options = {**config.options, **({} if config.extra is None else {"extra": config.extra})}
    flips = None if "flips" in accepted else options.pop("flips", None)
    if unknown := [key for key in options if key not in accepted or (needs_root and key == first)]:
        known = ", ".join(key for key in accepted if not (needs_root and key == first))
        raise DataError(f"data.options: expected some of {known or 'no options'}, found {unknown[0]!r}")
    cases = dataset(*([config.root] if needs_root else []), **options)  # type: ignore[call-arg]
    return cases if flips is None else Flips(cases, flips)


def cached(cases: Cases, cache: str | None, progress: Progress | None = None) -> Cases:
    """The same cases, decoded once into a memory-mapped store, as ``DataConfig.cache`` says."""
    if cache is None or isinstance(cases, Store):
        return cases
    if cache == TEMPORARY:
        return Store.build(cases, None, progress)
    return Store.build(cases, cache_folder(cases, cache), progress)


def cache_folder(cases: Cases, cache: str) -> Path:
    """A folder of its own for every state of every data set: a changed source never meets an old copy."""
    return Path(cache) / f"{type(cases).__name__.lower()}-{cases.state()[:16]}"


def open_split(cases: Cases, config: DataConfig, progress: Progress | None = None) -> Split:
    """The split that a configuration names; a frozen one is compared with the data it is used on."""
    how = config.split or ("hash" if cases.declared is None else "declared")
    if how == "hash":
        return Split.by_hash(cases, config.fractions, config.split_seed, progress)
    if how == "declared":
        lacks_val = cases.declared is not None and "val" not in cases.declared and "train" in cases.declared
        share = config.fractions.get("val", 0.1)
        return Split.declared(cases, share if lacks_val else None, config.split_seed, progress)
    if how == "mose":
        return Split.released(cases, how, progress)
    if not Path(how).is_file():
        raise DataError(f"data.split: expected hash, declared, mose or the file of a frozen split, found {how!r}")
    split = Split.load(how)
    split.verify(cases, progress)
    return split
