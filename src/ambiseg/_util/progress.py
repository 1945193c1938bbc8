"""Progress on the error stream, for whatever takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 2.0  # seconds that pass without a word
_INTERVAL = 30.0  # seconds between two lines where there is no terminal to draw a bar on


def progress(items: Iterable[T], total: int, what: str, quiet: bool = False) -> Iterator[T]:
    """``items``, with a bar on a terminal and now and then a line elsewhere; results never share its stream.

    >>> list(progress([1, 2], 2, "reading"))
    [1, 2]
    """
    with reporting(what, quiet) as report:
        for done, item in enumerate(items):
            report(done, total)
            yield item


@contextmanager
def reporting(what: str, quiet: bool = False) -> Iterator[Callable[[float, int], None]]:
    """The same for functions that take a callback of (done, total); both may change from call to call.

    >>> with reporting("reading") as report:
    ...     report(1, 2)
    """
    started = said = time.monotonic()
    bar = None

    def report(done: float, total: int) -> None:
        nonlocal said, bar
        now = time.monotonic()
        if quiet or now - started <= _PATIENCE:
            return
        if sys.stderr.isatty():
            bar = bar or _bar(what, total)
            bar.update(bar.task_ids[0], completed=done, total=total)
        elif now - said > _INTERVAL:
            print(f"{what}: {int(done):,} of {total:,}", file=sys.stderr, flush=True)
            said = now

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    bar.add_task(what, total=total)
    return bar
