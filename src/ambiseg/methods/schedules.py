"""Settings that move during training: the capacity γ, the group threshold G₀, samples an expert, annealing.

A schedule has a ``value`` for the present epoch and is told the training loss when the epoch ends:

>>> capacity = Linear(0.5, 1.0, epochs=2)
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
from typing import Any


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
