"""What is served, and how much of it: models and limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ambiseg.data.values import LEVELS
from ambiseg.runs import Card, Run, Which, is_shipped, open_run


@dataclass(frozen=True)
class Limits:
    """What a service takes on.

    Args:
        upload: bytes of a request's body.
        text: bytes of a body of JSON, which takes many times as much memory as it is long.
        queue: requests that are sent, wait or are computed at a time; more are refused.
        seconds: that one prediction may take, and that sending one body may take.
        idle: seconds without a byte of a body that is being sent.
        kept, kept_bytes: finished results that are held; the oldest go first, the newest stays.
        batch: images of one size that go through the network together, at most; 1: each alone.
        batch_file: bytes of a file that may be one of them.
    """

    upload: int = 512 << 20
    text: int = 32 << 20
    queue: int = 32
    seconds: float = 600.0
    idle: float = 30.0
    kept: int = 16
    kept_bytes: int = 2 << 30
    batch: int = 8
    batch_file: int = 4 << 20


@dataclass(frozen=True)
class Served:
    """A trained model under a name that clients see.

    Args:
        name: of it; the name of the run's folder unless another is given.
        run: the folder, or a model of the package.
        card: what its numbers mean.
        which: of its weights.
    """

    name: str
    run: str
    card: Card
    which: Which = "best"

    @staticmethod
    def open(run: str | os.PathLike[str] | Run, name: str | None = None, which: Which = "best") -> Served:
        """A run by its folder or name; the weights are read by the worker.

        >>> Served.open("demo").name
        'demo'
        """
        opened = run if isinstance(run, Run) else open_run(run)
        given = str(opened.folder) if isinstance(run, Run) else os.fspath(run)
        return Served(name or Path(os.path.abspath(given)).name, given, opened.card, which)

    def about(self, index: int) -> dict[str, object]:
        """Its line of ``/v1/models``."""
        card = self.card
        return {
            "index": index,
            "name": self.name,
            "title": card.title,
            "classes": list(card.classes),
            "channels": card.channels,
            "units": card.units,
            "stratum": card.stratum,
            "size": None if card.size is None else list(card.size),
            "window": self.window,
            "shipped": is_shipped(self.run),
        }

    @property
    def window(self) -> list[float] | None:
        """Raw values that a viewer shows from black to white: those that the network tells apart, or the usual ones."""
        intensity, values = self.card.intensity, self.card.values
        if not intensity.per_image and intensity.low is not None and intensity.high is not None:
            return [intensity.low, intensity.high]
        if values is None:
            return None
        low, high = LEVELS.index(0.5), LEVELS.index(99.5)
        return [min(row[low] for row in values.pooled), max(row[high] for row in values.pooled)]


def opened(runs: Sequence[str | os.PathLike[str]], which: Which = "best") -> list[Served]:
    """Several runs, whose names are told apart.

    >>> [one.name for one in opened(["demo", "demo"])]
    ['demo', 'demo-2']
    """
    found: list[Served] = []
    for run in runs:
        one, names = Served.open(run, which=which), {other.name for other in found}
        unique = next(n for n in (one.name, *(f"{one.name}-{i}" for i in range(2, len(runs) + 2))) if n not in names)
        found.append(replace(one, name=unique))
    return found
