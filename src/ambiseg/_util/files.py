"""Writing files and folders so that nobody ever reads half of one, and so that a killed process leaves nothing.

A draft is a file or folder ``.ambiseg-<16 hex digits>`` beside its place. Its writer holds a lock on it, which the
system releases when the process ends. A draft without a lock is the remainder of a process that was killed: the next
process that writes into the same folder removes it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ambiseg._util.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: without locks, drafts of killed processes stay
    fcntl = None

_PREFIX = ".ambiseg-"
LOCK = f"{_PREFIX}lock"
_FORMER = (".last.ckpt.draft", ".best.ckpt.draft")  # drafts of version 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)
_held: set[int] = set()  # descriptors with locks
_swept: set[str] = set()  # folders that this process has swept

Name = str | os.PathLike[str]


def is_draft(name: str) -> bool:
    """Whether a name is that of a draft or of a lock, and never that of content.

    >>> is_draft(".ambiseg-00ff00ff00ff00ff"), is_draft(".ambiseg-lock"), is_draft("ambiseg.json")
    (True, True, False)
    """
    return name.startswith(_PREFIX) or name in _FORMER


def contents(folder: Name) -> list[str]:
    """The sorted names of what is in a folder, without drafts and locks; nothing of a folder that does not exist."""
    try:
        return sorted(name for name in os.listdir(folder) if not is_draft(name))
    except FileNotFoundError:
        return []


def sweep(folder: Name) -> None:
    """Remove the drafts in a folder whose writers are dead, as far as that can be known and is permitted."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if not is_draft(name) or name == LOCK:
                continue
            path = Path(folder, name)
            held = _locked(path)
            if held is not None:
                _remove(path)
                _release(held)


# -- files and folders -------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Name) -> Iterator[BinaryIO]:
    """A binary file to write to, which becomes ``path`` when the block ends well and vanishes when it does not.

    What was at ``path`` before stays whole until then. The new file is on the disk before it takes its name, so that
    a machine that goes down leaves the old content or the new, and it has the permissions of any new file of the
    user's. A link stays a link: the file it points to is replaced. Inside of a folder that is a draft itself the file
    is written at its place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "note.txt")) as file:
    ...         _ = file.write(b"all of it")
    ...     Path(folder, "note.txt").read_bytes(), os.listdir(folder)
    (b'all of it', ['note.txt'])
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{os.fspath(path)}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise IsADirectoryError(f"{os.fspath(path)}: expected a file to write, found a folder")
    if target.exists() and not target.is_file():  # /dev/null must not become a file
        raise OSError(f"{os.fspath(path)}: expected a file to write, found a device or a pipe")
    if any(is_draft(parent.name) for parent in target.parents):
        with named(path), open(target, "wb") as file:
            yield file
        return
    with named(path, draft=True), _draft(target.parent, lambda name: open(name, "xb").close()) as draft:
        with open(draft, "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    _settle(target.parent)


@contextmanager
def atomic_folder(path: Name, replace: bool = True) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` when the block ends well and vanishes when it does not.

    A folder that was at ``path`` before stays whole until then, and is replaced; without ``replace`` only an empty one
    is, and any other is a ``FileExistsError``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with atomic_folder(Path(place, "results")) as folder:
    ...         write_text(folder / "note.txt", "all of it")
    ...     os.listdir(place), os.listdir(Path(place, "results"))
    (['results'], ['note.txt'])
    """
    target = Path(path)
    with named(path, draft=True), _draft(target.parent, os.mkdir) as draft:
        yield draft
        _settle_all(draft)
        _publish(draft, target, replace)
    _settle(target.parent)


def write_text(path: Name, text: str) -> None:
    """Write ``text`` in UTF-8, all of it or nothing; see :func:`atomic_write`.

    What UTF-8 does not have, of a file's name that is no text, is escaped as JSON does it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "note.txt"), "± 1 px")
    ...     Path(folder, "note.txt").read_text(encoding="utf-8")
    '± 1 px'
    """
    content = text.encode(errors="backslashreplace")
    with atomic_write(path) as file:
        file.write(content)


@contextmanager
def made(folder: Name) -> Iterator[Path]:
    """``folder``, made with its parents where they are missing, and removed again if the block fails.

    Of what was made only empty folders are removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with suppress(ValueError), made(Path(place, "runs", "first")):
    ...         raise ValueError
    ...     os.listdir(place)
    []
    """
    folder = Path(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        for path in missing:
            sweep(path)
            with suppress(OSError):  # not empty: another process writes there
                path.rmdir()
        raise


# -- one process per folder --------------------------------------------------------------------------------------------


class Lock:
    """A folder that one process writes to: a second one gets a :class:`ConfigError` of one line.

    The lock is on the file ``.ambiseg-lock``. It is removed at the end. One that a killed process left holds nobody up,
    since the system releases a lock with its process.

    Args:
        folder: exists.
        doing: what this process does there, such as ``training``, for the message of the other one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Lock(folder, "training"):
    ...         os.listdir(folder)
    ...     os.listdir(folder)
    ['.ambiseg-lock']
    []
    """

    def __init__(self, folder: Name, doing: str) -> None:
        self.folder, self.doing, self._descriptor = Path(folder), doing, -1

    def __enter__(self) -> Lock:
        try:
            while not self._taken():
                _release(self._descriptor)
            with suppress(OSError):  # a full disk: the other process is not told who has it
                os.ftruncate(self._descriptor, 0)
                os.write(self._descriptor, f"{self.doing} by process {os.getpid()}\n".encode())
            sweep(self.folder)
        except BaseException:
            _release(self._descriptor)
            _unlock(self.folder)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._descriptor in _held:  # not in a forked child, which has let go of it
            with suppress(OSError):
                (self.folder / LOCK).unlink()
            _release(self._descriptor)

    @property
    def descriptor(self) -> int:
        """Of the lock's file: a process that inherits it holds the lock as well, even if this one is killed."""
        return self._descriptor

    def _taken(self) -> bool:
        """Whether the lock is had, and its file was not removed meanwhile by the process that had it."""
        path = self.folder / LOCK
        with named(self.folder, draft=True):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        _held.add(self._descriptor)
        try:
            _flock(self._descriptor)
        except BlockingIOError:
            who = os.read(self._descriptor, 200).decode("utf-8", "replace").strip() or "another process"
            found = f"found {who}; wait until it has ended, or choose another folder"
            raise ConfigError(f"{self.folder}: expected no other process at work there, {found}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return _is(self._descriptor, path)


# -- drafts and locks --------------------------------------------------------------------------------------------------


@contextmanager
def _draft(folder: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A new draft in a folder, made by ``make`` and locked; it is removed if the block fails."""
    if (known := os.path.realpath(folder)) not in _swept:
        _swept.add(known)
        sweep(folder)
    draft, held = draft_name(folder), None
    try:
        make(draft)
        while (held := _locked(draft, sure=False)) is None:  # swept by another process before it was locked
            draft = draft_name(folder)
            make(draft)
        yield draft
    except BaseException:
        _remove(draft)
        raise
    finally:
        _release(held)


def draft_name(folder: Path) -> Path:
    """A name for a draft in a folder; it is not made of the target's name, which may be too long."""
    return folder / f"{_PREFIX}{secrets.token_hex(8)}"


def _locked(path: Path, sure: bool = True) -> int | None:
    """A descriptor of a file or folder with a lock; ``None`` if another process has it, or has removed it.

    Without ``sure`` a file system that knows no locks is good enough, and the descriptor may be -1.
    """
    unsure = None if sure else -1
    if fcntl is None:
        return unsure
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return -1
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return unsure
    _held.add(descriptor)
    try:
        _flock(descriptor)
    except OSError as error:
        _release(descriptor)
        return unsure if error.errno in _NO_LOCKS else None
    if _is(descriptor, path):
        return descriptor
    _release(descriptor)
    return None


def _flock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _release(descriptor: int | None) -> None:
    if descriptor is not None and descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go() -> None:
    """In a forked child: the locks are those of its parent, and must not outlive it."""
    for descriptor in list(_held):
        _release(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _unlock(folder: Path) -> None:
    """Remove the lock that a killed process left in a folder."""
    held = _locked(folder / LOCK)
    if held is not None:
        _remove(folder / LOCK)
        _release(held)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextmanager
def named(path: Name, draft: bool = False) -> Iterator[None]:
    """Errors of the system name the file that was asked for: nobody asked for the draft, and writing knows no names."""
    try:
        yield
    except OSError as error:
        inside = draft and _PREFIX in os.fsdecode(error.filename or "")
        if error.errno is not None and (error.filename is None or inside):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


# -- the disk ----------------------------------------------------------------------------------------------------------


def _publish(draft: Path, target: Path, replace: bool) -> None:
    """Give a draft of a folder its name."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(errno.EEXIST, "expected a folder to write, found a file", os.fspath(target))
    if not replace:
        _clear(target)
        try:
            os.rename(draft, target)  # onto an empty folder at most, whatever other processes do meanwhile
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            found = "expected a new or empty folder, found files in it"
            raise FileExistsError(errno.EEXIST, found, os.fspath(target)) from None
    elif not target.exists():
        os.rename(draft, target)
    elif _exchange(draft, target):
        shutil.rmtree(draft, ignore_errors=True)
    else:
        aside = draft_name(target.parent)
        os.rename(target, aside)
        try:
            os.rename(draft, target)
        except OSError:
            os.rename(aside, target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what killed processes left in a folder, their lock included; on Windows an empty folder as well."""
    sweep(folder)
    _unlock(folder)
    if os.name == "nt":
        with suppress(OSError):
            folder.rmdir()


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change places at once; whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def _settle(folder: Name) -> None:
    """Let a folder's names be on the disk, where the system can."""
    if os.name == "posix":
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _settle_all(folder: Path) -> None:
    """Let all files below a folder be on the disk."""
    for here, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(here, name), "rb") as file:
                os.fsync(file.fileno())
        _settle(here)
