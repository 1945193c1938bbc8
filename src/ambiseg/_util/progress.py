"""Progress on the error stream, for whatever takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE = 2.0  # seconds that pass without a word
_INTERVAL = 30.0  # seconds between two lines where there is no terminal to draw a bar on


def progress(items: Iterable[T], total: int, what: str, quiet: bool = False) -> Iterator[T]:
    """``items``, with a bar on a terminal and now and then a line elsewhere; results never share its stream.

    >>> list(progress([1, 2], 2, "reading"))
    [1, 2]
    """
    if quiet:
        yield from items
        return
    started = said = time.monotonic()
    bar = None
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if now - started > _PATIENCE:
                if sys.stderr.isatty():
                    bar = bar or _bar(what, total)
                    bar.update(bar.task_ids[0], completed=done)
                elif now - said > _INTERVAL:
                    print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)
                    said = now
            yield item
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def reporting(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """The same for functions that take a callback of (done, total).

    >>> with reporting("reading") as report:
    ...     report(1, 2)
    """
    steps: dict[str, Any] = {}

    def report(done: int, total: int) -> None:
        if "items" not in steps:
            steps["items"] = progress(iter(int, 1), total, what, quiet)  # an endless row of zeros: `report` counts
        next(steps["items"])

    try:
        yield report
    finally:
        if "items" in steps:
            steps["items"].close()


def _bar(what: str, total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    bar.add_task(what, total=total)
    return bar
