"""Writing files so that nobody ever reads half of one."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write to, which becomes ``path`` when the block ends well and vanishes when it does not.

    What was at ``path`` before stays whole until then. The new file is on the disk before it takes its name, so that
    a machine that goes down leaves the old content or the new, and it has the permissions of any new file of the
    user's. A link stays a link: the file it points to is replaced.

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
    draft = target.parent / f".ambiseg-{secrets.token_hex(8)}"  # not made of the target's name, which may be too long
    try:
        file = open(draft, "xb")  # noqa: SIM115  closed below; "x" lets the umask decide, as it does for any new file
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # nobody asked for the draft
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)  # a full disk does not say whose: writing knows no names
        raise


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` when the block ends well and vanishes when it does not.

    A folder that was at ``path`` before stays whole until then, and is replaced.

    >>> with tempfile.TemporaryDirectory() as place:
    ...     with atomic_folder(Path(place, "results")) as folder:
    ...         write_text(folder / "note.txt", "all of it")
    ...     os.listdir(place), os.listdir(Path(place, "results"))
    (['results'], ['note.txt'])
    """
    target = Path(path)
    try:
        draft = Path(tempfile.mkdtemp(prefix=".ambiseg-", dir=target.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # nobody asked for the draft
    try:
        yield draft
        os.umask(umask := os.umask(0))
        os.chmod(draft, 0o777 & ~umask)
        if target.exists():  # a folder cannot take the place of a full one: the old one steps aside first
            aside = Path(tempfile.mkdtemp(prefix=".ambiseg-", dir=target.parent))
            os.rename(target, aside / "old")
            try:
                os.rename(draft, target)
            except OSError:
                os.rename(aside / "old", target)
                raise
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(draft, target)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None and str(draft) in str(error.filename or draft):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` in UTF-8, all of it or nothing; see :func:`atomic_write`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "note.txt"), "± 1 px")
    ...     Path(folder, "note.txt").read_text(encoding="utf-8")
    '± 1 px'
    """
    content = text.encode()
    with atomic_write(path) as file:
        file.write(content)
