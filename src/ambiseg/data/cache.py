"""Decoded data sets in the user's cache folder: every file is decoded once, and later runs read the store.

The cache is a folder of stores (see :mod:`ambiseg.data.store`), each named after the state of the data that it was made
from: paths, sizes and times of files, and settings. Data that change get another name, so a store is never out of date.

- One process writes a store; others wait, and find it finished. A process that is killed leaves a draft, which the next
  process that needs the data continues. Drafts that no process continued for a day are removed.
- A process that reads a store holds a shared lock on its file ``used``, which the system releases when the process
  ends. When the cache exceeds its limit, the least recently used stores that no process holds are removed.

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
from ambiseg.data.case import Cases, Progress, digest
from ambiseg.data.store import FILES, Store

USER = "user"
_LIMIT = 20.0  # GB
_DAY = 24 * 3600.0
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
    return cases if store is None else store


def user_cache() -> Path:
    """The folder of the cache: ``AMBISEG_CACHE``, or the one of the operating system for this user."""
    if given := os.environ.get("AMBISEG_CACHE"):
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("ambiseg")


def store_name(cases: Cases) -> str:
    """The folder's name for the present state of a data set."""
    return f"{type(cases).__name__.lower()}-{digest(__version__, cases.state())[:20]}"


def trim(place: Path, limit: float | None = None) -> None:
    """Remove stores, the least recently used first, until the others take at most ``limit`` bytes.

    Stores that a process reads or writes stay, whatever they take.
    """
    limit = _limit() if limit is None else limit
    stores = [path for path in place.iterdir() if (path / "used").is_file()]
    for path in place.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    size = {path: sum(file.stat().st_size for file in path.iterdir() if file.name in FILES) for path in stores}
    total = sum(size.values())
    for path in sorted(stores, key=_last_used):
        abandoned = not (path / "store.json").exists() and time.time() - _last_used(path) > _DAY
        if (total > limit or abandoned) and _remove(path):
            total -= size[path]


def _open(folder: Path) -> Store | None:
    """The finished store in a folder, held until the object goes; ``None`` if there is none, or a damaged one."""
    hold = _hold(folder) if (folder / "store.json").exists() else None
    if hold is None:
        return None
    try:
        store = Store(folder)
    except (DataError, FileNotFoundError):  # damaged, or removed by another process before it was held
        return None
    store.hold = hold
    with suppress(OSError):  # a cache that may be read only
        os.utime(folder / "used")
    return store


def _fill(cases: Cases, folder: Path, progress: Progress | None) -> Store:
    with _lock(folder):
        if (store := _open(folder)) is not None:  # another process has just written it
            return store
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "used").touch()
        hold = _hold(folder)
        (folder / "store.json").unlink(missing_ok=True)  # of a damaged store
        store = Store.build(cases, folder, progress)
        store.hold = hold
        return store


def _lock(folder: Path):
    """Held by the process that writes or removes a store. Its file is beside the stores and is never removed."""
    from filelock import FileLock

    locks = folder.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{folder.name}.lock")


def _hold(folder: Path) -> _Hold | None:
    """Keep a store from being removed."""
    try:
        hold = _Hold(folder / "used")
    except FileNotFoundError:
        return None
    hold.lock(shared=True)
    return hold


def _remove(folder: Path) -> bool:
    """Remove a store unless a process reads or writes it."""
    from filelock import Timeout

    lock = _lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    try:
        hold = _Hold(folder / "used")
        if not hold.lock(shared=False):
            return False
        removed = folder.with_name(_REMOVED + secrets.token_hex(8))
        folder.rename(removed)  # at once: no process finds half a store
    except OSError:  # removed by another process; on Windows also a store whose files are open
        return False
    finally:
        lock.release()
    shutil.rmtree(removed, ignore_errors=True)
    return True


class _Hold:
    """A lock on a file, released with this object or when the process ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def lock(self, shared: bool) -> bool:
        """Wait for a shared lock, or try to get the only one; always True on systems without such locks."""
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _last_used(folder: Path) -> float:
    try:
        return (folder / "used").stat().st_mtime
    except FileNotFoundError:
        return 0.0


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
        print(f"note: {text}", file=sys.stderr, flush=True)
