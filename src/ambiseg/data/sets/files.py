"""Files of data sets: listings without partial downloads, missing partners, states for caches, ``.npy`` arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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
    return sorted(kept, key=lambda p: [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", str(p))])


def check_partners(
    files: Mapping[str, Path], partners: Mapping[str, Path], wanted: Callable[[str, Path], Path], hint: str = ""
) -> None:
    """An error where a file has no partner of the same key; ``wanted(key, file)`` is the path of the partner."""
    if alone := [key for key in files if key not in partners]:
        file = files[alone[0]]
        more = f" ({len(alone) - 1:,} more are missing)" if len(alone) > 1 else ""
        belongs = f"{file.parent.name}/{file.name}"
        raise DataError(
            f"{wanted(alone[0], file)}: expected the file that belongs to {belongs}, found none{more}{hint}"
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
