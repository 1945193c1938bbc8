"""``ambiseg train auto``: a complete configuration that fits the data, with the reason of every choice."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ambiseg._util.errors import DataError
from ambiseg.config import Config, dump, nested
from ambiseg.data.case import Progress
from ambiseg.methods.facts import Facts

if TYPE_CHECKING:
    from ambiseg.data.module import DataModule

__all__ = ["AUTO", "MINUTES", "Facts", "Plan", "plan", "warnings_of"]

AUTO = "auto"  # in the place of a recipe's name
CLASSES = 1024  # more are hardly classes: masks of instances, or numbers that mean something else
MINUTES = 6.0  # of one core: with set-up, evaluation and report about ten on two cores


@dataclass(frozen=True)
class Plan:
    """A configuration that fits the data.

    Attributes:
        config: ready for :func:`ambiseg.train`.
        reasons: why, by the keys of the settings.
        facts: what was found in the training part.
    """

    config: Config
    reasons: Mapping[str, str]
    facts: Facts

    def __str__(self) -> str:
        """The configuration as YAML, with the reasons as comments: a recipe."""
        return dump(self.config, self.reasons)


def plan(
    root: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    *,
    minutes: float = MINUTES,
    progress: Progress | None = None,
) -> Plan:
    """Look at the training part of a data set, and make a configuration that fits it.

    Args:
        root: the data: a folder of images and masks, a store, or an ``.npz`` of arrays.
        settings: what is decided already, by key: ``{"trainer.epochs": 3}``, or as arguments of the command. The rest
            follows.
        minutes: of one core that training may take.
        progress: called with (done, total) while images are looked at.

    >>> import ambiseg
    >>> made = ambiseg.plan(settings={"data.name": "shapes", "data.options": {"count": 40, "size": 32}})
    >>> made.config.data.size, made.reasons["data.size"]
    (32, 'whole images: 32×32, rounded up to a multiple of 8')
    """
    from ambiseg.data.config import NEEDS_ROOT, dataset_at
    from ambiseg.data.module import DataModule
    from ambiseg.planning.facts import gather
    from ambiseg.planning.rules import make
    from ambiseg.settings import validate

    if not minutes > 0:
        raise DataError(f"minutes: expected more than 0, found {minutes:g}")
    given, dashes = nested(settings or {}), "--" if isinstance(settings, Sequence) else ""
    data = given.setdefault("data", {})
    if root is not None:
        data["root"] = os.fspath(root)
    if "name" not in data:
        if data.get("root") is None:
            hint = f"--data.root PATH, or --data.name of a data set without one: {_without(NEEDS_ROOT)}"
            raise DataError(f"train auto: expected the data to plan for, found none: give {hint}")
        data["name"] = dataset_at(data["root"])
    module = DataModule(validate(Config, given, dashes=dashes).data, progress=progress)
    module.setup()
    if (found := len(module.cases.classes)) > CLASSES:
        hint = '"labels" in ambiseg.json says what the numbers in masks mean'
        raise DataError(
            f"{module.cases.title}: expected at most {CLASSES:,} classes to plan for, found {found:,}; {hint}"
        )
    facts = gather(module.cases, module.split, module.indices("train"), progress=progress)
    if not facts.marked:
        classes = ", ".join(facts.classes[c] for c in facts.evaluated)
        raise DataError(f"{module.cases.title}: expected pixels of {classes} in the training part, found none marked")
    made, reasons = make(given, facts, minutes, dashes)
    return Plan(made, reasons, facts)


def warnings_of(config: Config, data: DataModule) -> list[str]:
    """What keeps a training from learning, each line with its remedy; see :mod:`ambiseg.planning.warnings`.

    What keeps it from working at all is an error; see :mod:`ambiseg.planning.fit`.
    """
    from ambiseg.data.store import Store
    from ambiseg.planning.facts import gather
    from ambiseg.planning.fit import check_fit
    from ambiseg.planning.warnings import warnings

    most = None if isinstance(data.cases, Store) else 50  # others are decoded whenever they are read
    facts = gather(data.cases, data.split, data.indices("train"), pixels=0, most=most)
    check_fit(config, facts)
    return [str(one) for one in warnings(config, facts)]


def _without(needs_root: set[str]) -> str:
    from ambiseg.data.config import DATASETS

    return ", ".join(name for name in DATASETS if name not in needs_root)
