"""From the YAML of a study to configurations: base, members, what is typed, and schedules that keep their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.config import Config, nested, parse
from ambiseg.data.config import DATASETS, NEEDS_ROOT, dataset_at
from ambiseg.methods.schedules import Schedule
from ambiseg.settings import inline
from ambiseg.studies.definition import Base
from ambiseg.studies.fingerprint import differing, fingerprint

AUTO = "auto"
EPOCHS, CHECK, THREADS = "trainer.epochs", "trainer.check_every", "trainer.threads"
_EMBEDDED = {"nodules": "demo"}  # recipes of data that come with the package
# What belongs to a setting, and is left out where a later layer sets that to something else, as `from_recipe` does.
_BELONGS = {
    "data.name": ("data.options",),
    "backbone.name": ("backbone.channels", "backbone.options"),
    "model.method": ("model",),
}


@dataclass(frozen=True)
class Start:
    """What members are changes of: a recipe, and settings over it.

    Attributes:
        recipe: name or file of a recipe; ``auto`` plans one for the data and the method of each member.
        settings: over the recipe, by key.
    """

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One row: a configuration without its seed.

    Attributes:
        name, title, note: as in the YAML.
        config: what is trained.
        seeds: how many trainings are asked for.
        recipe, settings: what ``config`` is made of.
        samples: numbers of masks per image that are scored.
    """

    name: str
    title: str
    note: str
    config: Config
    seeds: int
    recipe: str
    settings: Mapping[str, Any]
    samples: tuple[int, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """See :func:`~ambiseg.studies.fingerprint.fingerprint`."""
        return fingerprint(self.config)


def start_of(base: Base, data: str | None, recipe: str | None) -> Start:
    """The start for these data: the study's own, unless they are of another kind than its recipe's.

    Args:
        base: of the study, at its scale.
        data: a path, or the name of data that come with the package; ``None``: those of the recipe.
        recipe: in place of the study's; ``auto`` plans one.
    """
    if data is not None and data in DATASETS and data not in NEEDS_ROOT and not Path(data).exists():
        chosen = recipe or _EMBEDDED.get(data, AUTO)
        own = base.settings if chosen != AUTO and recipe is None else {}
        return Start(chosen, {**own, "data.name": data})
    if data is not None and not Path(data).exists():
        names = ", ".join(name for name in DATASETS if name not in NEEDS_ROOT)
        raise DataError(f"{data}: expected a folder, an .npz, a store or one of {names}, found no such file")
    place = {} if data is None else {"data.root": data}
    if recipe is not None:
        found = {} if data is None or recipe != AUTO else {"data.name": dataset_at(data)}
        return Start(recipe, {**found, **place})
    if data is None or _fits(Config.from_recipe(base.recipe).data.name, data):
        return Start(base.recipe, {**base.settings, **place})
    return Start(AUTO, {"data.name": dataset_at(data), **place})


def _fits(name: str, data: str) -> bool:
    """Whether data are of the kind that a recipe is made for; street scenes may be arrays, too."""
    kind = dataset_at(data)
    return kind == name or (kind == "arrays" and name == "camvid")


def typed(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings that were typed on a command line, by key, with the values that they mean.

    >>> typed(["--data.size", "64", "--model.capacity={values: [0.5, 1]}"])
    {'data.size': 64, 'model.capacity': {'values': [0.5, 1]}}
    """
    found, left = dict[str, Any](), list(arguments)
    while left:
        word = left.pop(0)
        pair = [word] if "=" in word or not left or left[0].startswith("--") else [word, left.pop(0)]
        value, path = nested(pair), list[str]()
        while isinstance(value, Mapping) and len(value) == 1 and len(path) < word.partition("=")[0].count(".") + 1:
            path.append(next(iter(value)))
            value = value[path[-1]]
        found[".".join(path)] = value
    return found


# -- layers -----------------------------------------------------------------------------------------------------------


def resolve(
    start: Start, layers: Sequence[Mapping[str, Any]], last: Mapping[str, Any], prefix: str = ""
) -> tuple[Config, dict[str, Any]]:
    """The configuration of a member, and its settings over the recipe. Schedules keep their share of the training.

    Args:
        start: with a recipe that is not ``auto``.
        layers: settings of all members, of this one …, later ones over earlier ones.
        last: what was typed; it is taken as it is.
        prefix: put before messages.

    >>> config, _ = resolve(Start("lidc71", {"trainer.epochs": 10}), [], {})
    >>> config.model.capacity.warm_up, config.trainer.check_every
    (5, 10)
    """
    every = [start.settings, *layers, last]
    try:
        recipe = Config.from_recipe(start.recipe)
        config = Config.from_recipe(start.recipe, merged(every))
        fixed: dict[str, Any] = {} if any(CHECK in layer for layer in every) else {CHECK: config.trainer.epochs}
        fixed |= {} if any(THREADS in layer for layer in every) else {THREADS: 1}
        fixed |= _moved(config, recipe.trainer.epochs, every)
        settings = merged([*every, fixed])
        return Config.from_recipe(start.recipe, settings), settings
    except DataError as error:
        raise ConfigError(f"{prefix}{error}") from None


def merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Layers of settings as one: later ones win, and what belongs to a setting goes when that changes.

    >>> merged([{"backbone.channels": [8, 16]}, {"backbone.name": "deeplabv3plus"}])
    {'backbone.name': 'deeplabv3plus'}
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for key, below in _BELONGS.items():
            if key in layer and layer[key] != found.get(key):
                found = {k: v for k, v in found.items() if not any(_under(k, prefix) for prefix in below)}
        for key, value in layer.items():
            found = {k: v for k, v in found.items() if not _under(k, key) or k == key}  # a table replaces its parts
            found.pop(key, None)  # the order is that of the layers
            found[key] = value
    return found


def _under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _moved(config: Config, epochs: int, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Schedules at the same share of a training of another length.

    A schedule is written for the number of epochs of its layer: that of the recipe, or of the layer that sets it.

    Args:
        config: with all layers.
        epochs: of the recipe.
    """
    found: dict[str, Any] = {}
    for name, schedule in config.model.schedules.items():
        meant, known = epochs, epochs
        for layer in layers:
            known = layer.get(EPOCHS, known)
            if any(_under(key, f"model.{name}") for key in layer):
                meant = known
        if meant != config.trainer.epochs and schedule.kind == "linear":
            moved = scaled(schedule, config.trainer.epochs / meant)
            found |= {f"model.{name}.{key}": value for key, value in moved.items() if getattr(schedule, key) != value}
    return found


def scaled(schedule: Schedule, share: float) -> dict[str, int]:
    """The epochs of a schedule for a training that is ``share`` times as long.

    >>> scaled(Schedule(values=[0.5, 1], epochs=100, warm_up=27), 10 / 54)
    {'warm_up': 5, 'epochs': 19}
    """
    return {"warm_up": round(schedule.warm_up * share), "epochs": max(1, round(schedule.epochs * share))}


def command_of(member: Member, seed: int) -> list[str] | None:
    """Arguments of ``ambiseg train`` for one seed of a member; ``None`` where its settings cannot be typed.

    >>> settings = {"trainer.epochs": 2}
    >>> config = Config.from_recipe("demo", settings)
    >>> command_of(Member("short", "short", "", config, 3, "demo", settings), 1)
    ['demo', '--trainer.epochs', '2', '--seed', '1']
    """
    words = [word for key, value in member.settings.items() for word in (f"--{key}", inline(value))]
    words += ["--seed", str(seed)]
    try:
        meant = parse(words, member.recipe)
    except DataError:
        return None
    same = meant.trainer.accelerator == member.config.trainer.accelerator and not differing(meant, member.config)
    return [member.recipe, *words] if same else None
