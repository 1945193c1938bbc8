"""Decoded data sets in the user's cache folder: every file is decoded once, and later runs read the store.

The cache is a folder of stores (see :mod:`ambiseg.data.store`), each named after the state of the data that it was made
from: paths, sizes and times of files, and settings. Data that change get another name, so a store is never out of date.

- One process writes a store; others wait, and find it finished. A process that is killed leaves a draft, which the next
  process that needs the data continues. Drafts that no process continued for a day are removed.
- A process that reads or writes a store holds a shared lock on its file ``used``, which the system releases when the
  process ends. When the cache exceeds its limit, the least recently used stores that no process holds are removed.

The folder is the user's cache folder, or the environment variable ``AMBISEG_CACHE``; the limit is 20 GB, or
``AMBISEG_CACHE_GB``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from contextlib import suppress
from functools import cache as once
from pathlib import Path

from ambiseg import __version__
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.processes import first_process
from ambiseg._util.text import printable
from ambiseg.data.case import Cases, Progress, digest
from ambiseg.data.store import FILES, Store, tidy

USER = "user"
_LIMIT = 20.0  # GB
_DAY = 24 * 3600.0
_LAYOUT = "2"  # stores of the first have no units
_REMOVED = ".removed-"  # stores on their way out; left behind only by a process that was killed meanwhile


def open_cached(
    cases: Cases, cache: str | None = USER, progress: Progress | None = None, *, decode: bool = True
) -> Cases:
    """The same cases as a memory-mapped store in the cache, decoded into it first if they are not there yet.

    Args:
        cases: the source. If the store is there, no file of the source is opened.
        cache: ``user``: the user's cache folder; the path of another folder, which has no size limit; or ``None``,
            which returns ``cases``. A user's cache that cannot be written returns ``cases`` with a note on stderr.
        progress: called while cases are decoded.
        decode: False returns ``cases`` unless the store is there already.
    """
    if cache is None or isinstance(cases, Store):
        return cases
    place = user_cache() if cache == USER else Path(cache)
    try:
        folder = place / store_name(cases)
        store = _open(folder) or (_fill(cases, folder, progress) if decode else None)
        if cache == USER and decode:
            trim(place)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        reason = getattr(error, "strerror", None) or str(error)
        if cache != USER:
            raise DataError(f"data.cache: expected a folder that can be written, found {place}: {reason}") from None
        _note(f"the cache {place} cannot be written ({reason}): files are decoded whenever they are needed")
        return cases
    if store is None:
        return cases
    store.group, store.annotator = cases.group, cases.annotator  # words, which a store of earlier days does not have
    return store


def user_cache() -> Path:
    """The folder of the cache: ``AMBISEG_CACHE``, or the one of the operating system for this user."""
    if given := os.environ.get("AMBISEG_CACHE"):
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("ambiseg")


def store_name(cases: Cases) -> str:
    """The folder's name for the present state of a data set."""
    return f"{type(cases).__name__.lower()}-{digest(__version__, _LAYOUT, cases.state())[:20]}"


def trim(place: Path, limit: float | None = None) -> None:
    """Remove stores, the least recently used first, until the others take at most ``limit`` bytes.

    Stores that a process reads or writes stay, whatever they take.
    """
    limit = _limit() if limit is None else limit
    for path in place.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    stores: list[tuple[float, int, Path]] = []  # last used, bytes, folder
    for path in place.iterdir():
        with suppress(OSError):  # not a store, or removed meanwhile by another process
            used = (path / "used").stat().st_mtime
            stores.append((used, sum(file.stat().st_size for file in path.iterdir() if file.name in FILES), path))
    total = sum(size for _, size, _ in stores)
    for used, size, path in sorted(stores):
        abandoned = not (path / "store.json").exists() and time.time() - used > _DAY
        if (total > limit or abandoned) and _remove(path):
            total -= size


def _open(folder: Path) -> Store | None:
    """The finished store in a folder, held until the object goes; ``None`` if there is none, or a damaged one."""
    try:
        hold = _Hold(folder)
        store = Store(folder)
    except (DataError, FileNotFoundError, NotADirectoryError):
        return None
    store.hold = hold
    with suppress(OSError):  # a cache that may be read only
        os.utime(folder / "used")
        tidy(folder)
    return store


def _fill(cases: Cases, folder: Path, progress: Progress | None) -> Store:
    from filelock import FileLock

    hold = None
    while hold is None:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process removed it before it was held
            (folder / "used").touch()
            hold = _Hold(folder)
    with FileLock(folder / "lock"):  # of the process that writes, see Store.build
        if (store := _open(folder)) is not None:  # another process has just written it
            return store
        (folder / "store.json").unlink(missing_ok=True)  # of a damaged store
    try:
        store = Store.build(cases, folder, progress)
    except DataError:  # of the source: once that is put right, its store has another name
        del hold
        _remove(folder)
        raise
    store.hold = hold
    return store


def _remove(folder: Path) -> bool:
    """Remove a store unless a process reads or writes it."""
    removed = folder.with_name(_REMOVED + secrets.token_hex(8))
    try:
        hold = _Hold(folder, shared=False)
        folder.rename(removed)  # at once: no process finds half a store
        del hold
    except OSError:  # held, or removed by another process; on Windows also a store whose files are open
        return False
    shutil.rmtree(removed, ignore_errors=True)
    return True


class _Hold:
    """A lock on a store's file ``used``, released with this object or when the process ends.

    Raises ``FileNotFoundError`` for a store that is not there (any more). ``shared``: of a process that reads or
    writes the store; else of one that removes it, ``BlockingIOError`` if another process holds it.
    """

    def __init__(self, folder: Path, shared: bool = True) -> None:
        self._file = os.open(folder / "used", os.O_RDONLY)
        with suppress(ImportError):  # a system without such locks
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(self._file), os.stat(folder / "used")):
            raise FileNotFoundError(f"{folder}: removed and made again by another process")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _limit() -> float:
    given = os.environ.get("AMBISEG_CACHE_GB", _LIMIT)
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ConfigError(f"AMBISEG_CACHE_GB: expected a number of gigabytes, found {given!r}")
    return limit * 1e9


@once
def _note(text: str) -> None:
    """Once per process."""
    if first_process():
        print(f"note: {printable(text)}", file=sys.stderr, flush=True)
