"""Progress on the error stream, for whatever takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ambiseg._util.terminal import animated, console
from ambiseg._util.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress

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

    On a terminal the bar is there after two seconds, even if the callback is never called: how far a model is loaded
    is not known, but that it is being loaded is.

    >>> with reporting("reading") as report:
    ...     report(1, 2)
    """
    started = said = time.monotonic()
    bar = None if quiet or not animated() else _Bar(what)

    def report(done: float, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if bar is not None:
            bar.update(done, total)
        elif not quiet and now - started > _PATIENCE and now - said > _INTERVAL:
            print(f"{printable(what)}: {int(done):,} of {total:,}", file=sys.stderr, flush=True)
            said = now

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


class _Bar:
    """A bar that a thread shows when two seconds have passed, unless it was stopped before.

    Of bars inside of each other only the innermost is shown: two would overwrite each other.
    """

    _running: ClassVar[list[_Bar]] = []

    def __init__(self, what: str) -> None:
        self.what, self.lock = what, threading.Lock()
        self.shown: Progress | None = None
        self.count: tuple[float, int | None] = 0, None
        if self._running:
            self._running[-1]._hide()
        self._running.append(self)
        self._wait()

    def update(self, done: float, total: int) -> None:
        with self.lock:
            self.count = done, total
            self._draw()

    def stop(self) -> None:
        self._hide()
        self._running.remove(self)
        if self._running:
            self._running[-1]._wait()

    def _wait(self) -> None:
        self.timer = threading.Timer(_PATIENCE, self._show)
        self.timer.daemon = True
        self.timer.start()

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        what, count = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[count]"))
        columns = what, BarColumn(), count, TimeElapsedColumn()
        with self.lock:
            if self.timer.finished.is_set():  # hidden in the meantime
                return
            self.shown = Progress(*columns, console=console(stderr=True), transient=True)
            self.shown.start()
            self.shown.add_task(printable(self.what), total=None, count="")
            self._draw()

    def _draw(self) -> None:
        done, total = self.count
        if self.shown is not None and total is not None:
            text = f"{int(done):,}/{total:,}"
            self.shown.update(self.shown.task_ids[0], completed=done, total=total, count=text)

    def _hide(self) -> None:
        self.timer.cancel()
        with self.lock:
            if self.shown is not None:
                self.shown.stop()
                self.shown = None
