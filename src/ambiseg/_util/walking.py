"""Walking through folders of any shape in bounded time: links that lead round in circles, and too many files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ambiseg._util.errors import DataError

MOST = 2_000_000  # files and folders of a data set
DEEPEST = 64  # folders in each other
_SYSTEM = ("/proc", "/sys", "/dev")  # not on any disk, without end, and with files that are waited for


def walk(
    top: Path,
    leave: Callable[[str], bool] = lambda name: False,
    refused: Callable[[OSError], object] | None = None,
    *,
    most: int = MOST,
    been: set[str] | None = None,
) -> Iterator[tuple[Path, list[str]]]:
    """Every folder below ``top``, and itself, with the names of its files, all in order.

    Links are followed, and a folder that several links lead to is visited once, so that no shape of links makes the
    walk longer than there are folders. Folders of the system itself are left out. :class:`DataError` for more than
    ``most`` files and folders.

    Args:
        leave: whether a name, of a file or a folder, is passed over.
        refused: called for a folder that may not be read.
        been: real paths of folders that are not to be visited.

    >>> import tempfile
    >>> top = Path(tempfile.mkdtemp())
    >>> (top / "a").mkdir()
    >>> (top / "a/loop").symlink_to(top)
    >>> (top / "a/x.png").touch()
    >>> [(folder.name == "a", names) for folder, names in walk(top)]
    [(False, []), (True, ['x.png'])]
    """
    been, seen = {*_SYSTEM, *(been or ())}, 0
    depth = len(top.parts)
    for here, folders, files in os.walk(top, onerror=refused, followlinks=True):
        real = os.path.realpath(here)
        if real in been or len(Path(here).parts) - depth > DEEPEST:  # also where two links were listed before
            folders.clear()
            continue
        been.add(real)
        seen += len(folders) + len(files)
        if seen > most:
            raise DataError(f"{top}: expected a folder of at most {most:,} files, found more")
        folders[:] = sorted(name for name in folders if not leave(name))
        yield Path(here), sorted(name for name in files if not leave(name))
