"""``metrics.csv``: one line per epoch of a run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ambiseg._util.errors import ConfigError
from ambiseg._util.reading import read_csv

Row = Mapping[str, float]


def best_row(history: Sequence[Row]) -> Row | None:
    """The epoch whose weights are the best, the first with the smallest :func:`selected_by`; ``None`` if none has any.

    >>> best_row([{"epoch": 1, "val_ged": 0.3}, {"epoch": 2, "val_ged": 0.2}, {"epoch": 3}])
    {'epoch': 2, 'val_ged': 0.2}
    """
    column = selected_by(history)
    scored = [row for row in history if math.isfinite(row.get(column, math.nan))]
    return min(scored, key=lambda row: row[column], default=None)


def selected_by(history: Sequence[Row]) -> str:
    """The column by which epochs are compared, ``val_ged_unbiased``; ``val_ged`` in runs of 0.1.

    Those were selected by it, and have no column ``val_masks``. A run that goes on keeps what it began with.
    """
    validated = [row for row in history if "val_ged" in row or "val_masks" in row]
    return "val_ged_unbiased" if all("val_masks" in row for row in validated) else "val_ged"


def written(history: Sequence[Row]) -> str:
    """The text of the file.

    >>> print(written([{"epoch": 1, "loss": 0.5, "val_ged": math.nan}, {"epoch": 2, "loss": 0.25, "val_ged": 1 / 3}]))
    epoch,loss,val_ged
    1,0.5,
    2,0.25,0.33333333
    <BLANKLINE>
    """
    columns = list(dict.fromkeys(key for row in history for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in history:
        writer.writerow({key: f"{value:.8g}" for key, value in row.items() if not math.isnan(value)})
    return text.getvalue()


def read(path: Path) -> list[dict[str, float]]:
    """One dictionary per epoch; empty cells are left out. Without a file there is no epoch yet.

    Epochs are numbered from 1, and each has a loss: what reads this relies on it.
    """
    if not path.exists():
        return []
    columns, *lines = read_csv(path) or [[]]
    if not {"epoch", "loss"} <= set(columns) or len(set(columns)) < len(columns):
        raise ConfigError(f"{path}: expected columns with epoch and loss among them, found {','.join(columns)[:100]!r}")
    history = []
    for number, cells in enumerate(lines, 2):
        where = f"{path}: line {number}"
        if len(cells) != len(columns):
            raise ConfigError(f"{where}: expected {len(columns)} cells, found {len(cells)}")
        row = {name: _number(cell, f"{where}: {name}") for name, cell in zip(columns, cells, strict=True) if cell}
        if row.get("epoch") != number - 1 or "loss" not in row:
            raise ConfigError(f"{where}: expected epoch {number - 1} and its loss, found {','.join(cells)[:100]!r}")
        history.append(row)
    return history


def _number(cell: str, where: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ConfigError(f"{where}: expected a number, found {cell[:40]!r}") from None
