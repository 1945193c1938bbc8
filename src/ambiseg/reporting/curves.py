"""What happened in training, epoch by epoch, from the columns that the run's method logged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ambiseg.history import best_row, selected_by
from ambiseg.viz.colours import INK, OTHERS, SERIES, SOFT

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

    ``epoch``, ``step`` and ``val_masks`` count, other ``val_…`` are scores on the validation images, ``lr…`` and the
    settings of the method that may be ``scheduled`` are schedules, and every other column is a term of the loss.

    >>> columns([{"epoch": 1, "lr": 0.1, "tau": 2, "loss": 3, "kl": math.nan, "val_ged": 4}], {"tau"})
    Columns(losses=['loss'], scores=['val_ged'], schedules=['lr', 'tau'])
    """
    found = Columns([], [], [])
    for key in dict.fromkeys(key for row in history for key in row):
        if key in ("epoch", "step", "val_masks") or not any(math.isfinite(row.get(key, math.nan)) for row in history):
            continue
        moves = key == "lr" or key.startswith("lr_") or key in scheduled
        kind = found.scores if key.startswith("val_") else found.schedules if moves else found.losses
        kind.append(key)
    return found


class Change(NamedTuple):
    """A scheduled setting that moved: new values hold from epoch ``first`` on, the last of them from ``last`` on."""

    name: str
    first: int
    last: int
    before: float
    after: float

    @property
    def label(self) -> str:
        """Such as ``capacity 0.03 → 1``."""
        return f"{_name(self.name)} {self.before:.2g} → {self.after:.2g}"

    @property
    def when(self) -> str:
        """Such as ``at epoch 4``."""
        return f"at epoch {self.first}" if self.first == self.last else f"in epochs {self.first} to {self.last}"


def changes(history: History, scheduled: Iterable[str]) -> list[Change]:
    """When each of the ``scheduled`` settings moved; epochs in a row are one change.

    >>> changes([{"epoch": e, "tau": tau} for e, tau in enumerate((1, 1, 2, 3, 3), 1)], ["tau"])
    [Change(name='tau', first=3, last=4, before=1, after=3)]
    """
    found: list[Change] = []
    for key in scheduled:
        rows = [(int(row["epoch"]), row[key]) for row in history if math.isfinite(row.get(key, math.nan))]
        for (_, before), (epoch, after) in itertools.pairwise(rows):
            if before == after:
                continue
            if found and (found[-1].name, found[-1].last) == (key, epoch - 1):
                found[-1] = found[-1]._replace(last=epoch, after=after)
            else:
                found.append(Change(key, epoch, epoch, before, after))
    return found


def best_epoch(history: History) -> int | None:
    """The epoch whose weights were kept, see :func:`ambiseg.history.best_row`."""
    best = best_row(history)
    return None if best is None else int(best["epoch"])


def best_by(history: History) -> str:
    """The score that it has the smallest value of.

    >>> best_by([{"epoch": 1, "val_ged": 0.2}])
    'GED'
    """
    return {"val_ged": "GED", "val_ged_unbiased": "unbiased GED"}[selected_by(history)]


def curves(figure: Figure, history: History, keys: Sequence[str], label: str, changes: Sequence[Change] = ()) -> None:
    """Several columns of the history on one axis, with a line where a setting changed."""
    axes = figure.add_subplot()
    for key, colour in zip(keys, SERIES, strict=False):
        _line(axes, history, key, colour)
    levels: list[float] = []  # where the label of the last change on each line of text ends
    for change in changes:
        start, end = change.first - 0.5, change.last - 0.5
        if end > start:
            axes.axvspan(start, end, color=OTHERS, alpha=0.25, linewidth=0)
        axes.axvline(start, color=SOFT, linewidth=1.2, linestyle=(0, (1, 1.5)))
        line = next((i for i, taken in enumerate(levels) if taken < start), len(levels))
        levels[line:] = [start + 0.5 * (history[-1]["epoch"] - history[0]["epoch"])]
        place = axes.get_xaxis_transform()
        axes.text(start, 1.01 + 0.06 * line, change.label, transform=place, size=7.5, color=SOFT, ha="center")
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
