"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ambiseg._util.text import printable

if TYPE_CHECKING:
    from rich.table import Table


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """A table without lines; the columns ``left`` are aligned to the left, all others to the right.

    >>> from rich.console import Console
    >>> Console(width=40).print(table(["class", "pixels"], [["lesion", "12"]]))
    class   pixels
    lesion      12
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(head):
        made.add_column(Text(printable(name)), justify="left" if i in left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made
