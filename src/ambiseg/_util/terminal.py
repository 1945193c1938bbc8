"""Whether anybody watches, and wants colours: bars and styles only on a terminal, and not where they are declined."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def declined() -> bool:
    """Whether the environment asks for plain text: ``NO_COLOR``, or a terminal that can show nothing else."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def animated(stream: TextIO | None = None) -> bool:
    """Whether bars can be drawn on a stream, the error stream by default."""
    return (sys.stderr if stream is None else stream).isatty() and not declined()


def console(**options: Any) -> Console:
    """A console of rich's that prints neither colours nor control characters where they are declined."""
    from rich.console import Console

    return Console(**({"force_terminal": False} if declined() else {}), **options)
