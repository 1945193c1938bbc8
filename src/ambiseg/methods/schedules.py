"""Settings that move while a network trains.

A method's setting of type :data:`Scheduled` is a number, or a :class:`Schedule`. Training makes a :class:`Linear` or a
:class:`Plateau` of it, whose ``value`` of the present epoch it passes to ``Method.loss`` under the setting's name:

>>> capacity = Schedule(kind="linear", values=[0.5, 1.0], epochs=2).start()
>>> for epoch in range(4):
...     print(capacity.value)               # model.loss(images, annotations, capacity=capacity.value)
...     capacity.update(loss=0.1)
0.5
0.75
1.0
1.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from ambiseg.settings import EPOCHS, SettingError, Settings, shown


class Schedule(Settings):
    """A setting that moves from epoch to epoch."""

    shared: ClassVar[str] = "SCHEDULE"  # its name in the table of settings
    kind: Literal["linear", "plateau"] = Field(
        default="linear",
        description="linear: from the first value to the last over ``epochs``; plateau: to the next value when the "
        "training loss has not improved for more than ``patience`` epochs",
    )
    values: list[float] = Field(min_length=1, max_length=10_000, description="two for linear, any number for plateau")
    epochs: int = Field(default=1, ge=1, le=EPOCHS, description="how long linear takes")
    warm_up: int = Field(default=0, ge=0, le=EPOCHS, description="epochs at the first value before linear begins")
    patience: int = Field(default=10, ge=0, le=EPOCHS, description="epochs without improvement that plateau waits")

    @model_validator(mode="after")
    def _two_ends(self) -> Schedule:
        if self.kind == "linear" and len(self.values) != 2:
            raise SettingError("values", f"expected two values for linear, found {shown(self.values)}")
        return self

    def start(self) -> Linear | Plateau:
        """The schedule at its first epoch."""
        if self.kind == "linear":
            return Linear(self.values[0], self.values[1], self.epochs, self.warm_up)
        return Plateau(self.values, self.patience)


Scheduled: TypeAlias = float | Schedule
"""A setting that stays, or moves."""


def values_of(setting: Scheduled) -> list[float]:
    """All values that a setting may have.

    >>> values_of(0.5), values_of(Schedule(values=[0.5, 1]))
    ([0.5], [0.5, 1.0])
    """
    return list(setting.values) if isinstance(setting, Schedule) else [setting]


def final(setting: Scheduled) -> float:
    """The value that a setting has, or arrives at."""
    return values_of(setting)[-1]


def check_range(key: str, setting: Scheduled, most: float) -> None:
    """``SettingError`` unless all values that a setting may have are from 0 to ``most``."""
    for value in values_of(setting):
        if not 0 <= value <= most:
            raise SettingError(key, f"expected 0 to {most:.0f}, found {value:g}")


class Linear:
    """From ``start`` to ``end`` in equal steps over ``epochs``, after ``warm_up`` epochs at ``start`` (the paper's)."""

    def __init__(self, start: float, end: float, epochs: int, warm_up: int = 0) -> None:
        if epochs < 1 or warm_up < 0:
            raise ValueError(f"expected at least one epoch and no negative warm-up, found {epochs} and {warm_up}")
        self.start, self.end, self.epochs, self.warm_up = start, end, epochs, warm_up
        self.epoch = 0

    @property
    def value(self) -> float:
        """What holds in the present epoch."""
        done = min(max(self.epoch - self.warm_up, 0), self.epochs) / self.epochs
        return self.start + done * (self.end - self.start)

    def update(self, loss: float) -> None:
        """An epoch has ended."""
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly here."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was."""
        self.epoch = state["epoch"]


class Plateau:
    """The next of ``values`` once the loss has not improved for more than ``patience`` epochs (the released code's).

    >>> capacity = Plateau([0.5, 1.0], patience=1)
    >>> for loss in (3.0, 2.0, 2.0, 2.0):
    ...     capacity.update(loss)
    >>> capacity.value
    1.0
    """

    def __init__(self, values: Sequence[float], patience: int) -> None:
        if not values or patience < 0:
            raise ValueError(f"expected at least one value and no negative patience, found {list(values)}, {patience}")
        self.values, self.patience = list(values), patience
        self.index, self.stale, self.best = 0, 0, math.inf

    @property
    def value(self) -> float:
        """What holds in the present epoch."""
        return self.values[self.index]

    def update(self, loss: float) -> None:
        """An epoch has ended with this mean training loss."""
        if loss < self.best:
            self.best, self.stale = loss, 0
            return
        self.stale += 1
        if self.stale > self.patience and self.index + 1 < len(self.values):
            self.index, self.stale, self.best = self.index + 1, 0, math.inf

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly here."""
        return {"index": self.index, "stale": self.stale, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was."""
        self.index, self.stale, self.best = state["index"], state["stale"], state["best"]
