"""What happened in training, epoch by epoch, from the columns that the run's method logged."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ambiseg.runs import best_row
from ambiseg.viz.colours import INK, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, float]]

_NAMES = {
    "lr": "learning rate",
    "val_ged": "GED",
    "val_ged_unbiased": "GED, unbiased",
    "val_matched_iou": "matched IoU",
}


@dataclass(frozen=True)
class Columns:
    """The columns of a history that hold numbers, by what they are."""

    losses: list[str]
    scores: list[str]
    schedules: list[str]


def columns(history: History, scheduled: Container[str]) -> Columns:
    """Tell columns apart by their names.

    ``epoch`` and ``step`` count, ``val_…`` are scores on the validation images, ``lr…`` and the settings of the method
    that may be ``scheduled`` are schedules, and every other column is a term of the loss.

    >>> columns([{"epoch": 1, "lr": 0.1, "tau": 2, "loss": 3, "kl": math.nan, "val_ged": 4}], {"tau"})
    Columns(losses=['loss'], scores=['val_ged'], schedules=['lr', 'tau'])
    """
    found = Columns([], [], [])
    for key in dict.fromkeys(key for row in history for key in row):
        if key in ("epoch", "step") or not any(math.isfinite(row.get(key, math.nan)) for row in history):
            continue
        moves = key == "lr" or key.startswith("lr_") or key in scheduled
        kind = found.scores if key.startswith("val_") else found.schedules if moves else found.losses
        kind.append(key)
    return found


def best_epoch(history: History) -> int | None:
    """The epoch whose weights were kept: the first with the smallest validation GED."""
    best = best_row(history)
    return None if best is None else int(best["epoch"])


def curves(figure: Figure, history: History, keys: Sequence[str], label: str) -> None:
    """Several columns of the history on one axis."""
    axes = figure.add_subplot()
    for key, colour in zip(keys, SERIES, strict=False):
        _line(axes, history, key, colour)
    axes.set_ylabel(label)
    _finish(axes, history)
    figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2)


def schedules(figure: Figure, history: History, keys: Sequence[str]) -> None:
    """Up to three of the columns that moved, or that there are, each on an axis of its own."""
    moved = [key for key in keys if len({row.get(key) for row in history}) > 1]
    keys = (moved or keys)[:3]
    stack = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for axes, key, colour in zip(stack, keys, SERIES, strict=False):
        _line(axes, history, key, colour)
        axes.set_title(_name(key), loc="left", color=INK)
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
    _finish(stack[-1], history)
    for axes in stack[:-1]:
        _mark(axes, history)


def _name(key: str) -> str:
    return _NAMES.get(key, key.removeprefix("val_").replace("_", " "))


def _line(axes: Axes, history: History, key: str, colour: str) -> None:
    rows = [(row["epoch"], row[key]) for row in history if math.isfinite(row.get(key, math.nan))]
    marker = "o" if len(rows) < 16 else None  # a line through one epoch is invisible
    axes.plot([x for x, _ in rows], [y for _, y in rows], color=colour, label=_name(key), marker=marker, markersize=3.5)


def _mark(axes: Axes, history: History) -> None:
    if (best := best_epoch(history)) is not None:
        axes.axvline(best, color=INK, linewidth=1, linestyle=(0, (2, 2)))


def _finish(axes: Axes, history: History) -> None:
    from matplotlib.ticker import MaxNLocator

    _mark(axes, history)
    epochs = [row["epoch"] for row in history]
    axes.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch")
