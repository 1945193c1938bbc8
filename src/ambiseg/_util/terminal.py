"""Whether anybody watches, and wants colours: bars and styles only on a terminal, and not where they are declined."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from ambiseg._util.text import printable

if TYPE_CHECKING:
    from rich.console import Console


def declined() -> bool:
    """Whether the environment asks for plain text: ``NO_COLOR``, or a terminal that can show nothing else."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def animated(stream: TextIO | None = None) -> bool:
    """Whether bars can be drawn on a stream, the error stream by default."""
    stream = sys.stderr if stream is None else stream
    return stream is not None and stream.isatty() and not declined()


def console(**options: Any) -> Console:
    """A console of rich's that prints neither colours nor control characters where they are declined.

    What it is given is text, whatever it looks like: a folder may be called ``[/b]``, ``:smile:``, or have a control
    character in its name, which is escaped. Newlines stay.

    >>> console().print("[red]a\\x1b[2J[/b]:smile:")
    [red]a\\x1b[2J[/b]:smile:
    """
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str("\n".join(map(printable, text.split("\n"))), **how)

    return Plain(**({"force_terminal": False} if declined() else {}), markup=False, emoji=False, **options)


class Lasting:
    """A stream that may be closed at its other end: what is written then is lost, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of any stream."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(*lines: str) -> None:
    """Lines on the error stream. That nobody reads them any more is no reason to stop."""
    if sys.stderr is not None:  # closed from the start
        print(*lines, sep="\n", file=Lasting(sys.stderr), flush=True)  # type: ignore[arg-type]
