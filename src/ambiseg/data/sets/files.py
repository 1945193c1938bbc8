"""Files of data sets: listings without partial downloads, states for caches, and ``.npy`` arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError

_PARTIAL = (".part", ".crdownload", ".tmp", ".download", ".aria2", ".partial")


def finished_files(paths: Iterable[Path]) -> list[Path]:
    """The files among ``paths`` by name, numbers by value, without hidden ones; a partial download is an error."""
    kept = []
    for path in paths:
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix.lower() in _PARTIAL:
            raise DataError(f"{path}: expected a finished download, found a part of one")
        kept.append(path)
    return sorted(
        kept, key=lambda path: [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", f"{path}")]
    )


def file_state(path: Path) -> str:
    """A text that changes when the file does: place, size and time of the last change."""
    about = path.stat()
    return f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"


def read_npy(path: Path) -> np.ndarray:
    """An array of numbers; pickled objects are refused."""
    try:
        with open(path, "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        found = " ".join(str(error).split()) or "its end"
        raise DataError(f"{path}: expected a whole .npy file of numbers, found: {found}") from None
    if array.dtype.kind not in "biuf" or not array.size:
        found = f"{array.dtype} of shape {list(array.shape)}"
        raise DataError(f"{path}: expected a whole .npy file of numbers, found: {found}")
    return array
