"""What happened in training, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ambiseg.report.figures import BLUE, GREEN, INK, ORANGE, PINK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, float]]

LOSSES = {"loss": "loss", "transport": "transport", "kl": "KL"}
SCORES = {"val_ged": "GED", "val_ged_unbiased": "GED, unbiased", "val_matched_iou": "matched IoU"}
SCHEDULES = {  # what moves, if it does
    "lr": "learning rate",
    "capacity": "capacity γ",
    "group_threshold": "group threshold",
    "samples": "samples an expert",
    "annealing": "annealing",
}


def best_epoch(history: History) -> int | None:
    """The epoch whose weights were kept: the first with the smallest validation GED."""
    scored = [row for row in history if math.isfinite(row.get("val_ged", math.nan))]
    return int(min(scored, key=lambda row: row["val_ged"])["epoch"]) if scored else None


def columns(history: History, names: Mapping[str, str]) -> dict[str, str]:
    """Those of the columns that hold a number."""
    return {key: label for key, label in names.items() if any(math.isfinite(r.get(key, math.nan)) for r in history)}


def curves(history: History, names: Mapping[str, str], label: str) -> Callable[[Figure], None]:
    """Several columns of the history on one axis."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for (key, name), colour in zip(columns(history, names).items(), (BLUE, ORANGE, GREEN, PINK), strict=False):
            _line(axes, history, key, name, colour)
        axes.set_ylabel(label)
        _finish(axes, history)
        figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2)

    return draw


def schedules(history: History) -> Callable[[Figure], None]:
    """The learning rate, and below it whatever else moved, each on an axis of its own."""

    def draw(figure: Figure) -> None:
        shown = columns(history, SCHEDULES)
        moved = [key for key in shown if len({row.get(key) for row in history}) > 1]
        keys = (moved or list(shown))[:3]
        stack = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
        for axes, key, colour in zip(stack, keys, (BLUE, ORANGE, GREEN), strict=False):
            _line(axes, history, key, shown[key], colour)
            axes.set_title(shown[key], loc="left", color=INK)
            axes.set_ylim(bottom=0)
            axes.margins(y=0.15)
        _finish(stack[-1], history)
        for axes in stack[:-1]:
            _mark(axes, history)

    return draw


def _line(axes: Axes, history: History, key: str, name: str, colour: str) -> None:
    rows = [(row["epoch"], row[key]) for row in history if math.isfinite(row.get(key, math.nan))]
    marker = "o" if len(rows) < 16 else None  # a line through one epoch would be nothing
    axes.plot([x for x, _ in rows], [y for _, y in rows], color=colour, label=name, marker=marker, markersize=3.5)


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
