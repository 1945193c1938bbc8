"""Files of data sets: listings without partial downloads, pairs, states for caches, ``.npy`` arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.limits import too_large
from ambiseg._util.npz import read_header

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


def paired_files(
    folders: tuple[Path, Path], endings: tuple[str, str], under: str = "", hint: str = "", skip: bool = False
) -> dict[str, tuple[Path, Path]]:
    """Files of two folders that have the same name but for its ending: ``{name: (file, partner)}``.

    ``under`` is a glob of the folders between, such as ``*/``. A file without a partner is an error, or skipped.
    """
    found = [
        {path.name.removesuffix(ending): path for path in finished_files(folder.glob(f"{under}*{ending}"))}
        for folder, ending in zip(folders, endings, strict=True)
    ]
    for here, there in () if skip else ((0, 1), (1, 0)):
        if alone := [name for name in found[here] if name not in found[there]]:
            file = found[here][alone[0]]
            wanted = folders[there] / file.relative_to(folders[here]).with_name(alone[0] + endings[there])
            more = f" ({len(alone) - 1:,} more are missing)" if len(alone) > 1 else ""
            belongs = f"{file.parent.name}/{file.name}"
            raise DataError(f"{wanted}: expected the file that belongs to {belongs}, found none{more}{hint}")
    return {name: (path, found[1][name]) for name, path in found[0].items() if name in found[1]}


def file_state(path: Path) -> str:
    """A text that changes when the file does: place, size and time of the last change."""
    about = path.stat()
    return f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"


def read_npy(path: Path) -> np.ndarray:
    """An array of numbers; pickled objects are refused."""
    try:
        with open(path, "rb") as file:
            header = read_header(file)
            if problem := too_large((prod(header.shape[:-1]), prod(header.shape[-1:])), itemsize=header.dtype.itemsize):
                raise DataError(f"{path}: {'; '.join(problem)}")
            if header.dtype.kind in "biuf" and header.dtype.itemsize <= 8 and prod(header.shape):
                if header.offset + header.nbytes > path.stat().st_size:
                    raise EOFError
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
        found = f"{str(header.dtype)[:80]} of shape {list(header.shape)[:8]}"
    except DataError:
        raise
    except Exception as error:  # a damaged header is a text of Python that fails in any way
        found = " ".join(str(error).split())[:160] or "its end"
    raise DataError(f"{path}: expected a whole .npy file of numbers, found: {found}")
