"""The process that reads an HDF5 file for hdf5.py, which runs this file as a program.

The HDF5 library loops for ever, crashes or asks for any amount of memory on some damaged files. Here that ends this
process, and not the one that works with the data. Other files that a file names, by links, external storage or virtual
data, are not read, and no filters are loaded that the library does not have itself.

A request is a line of JSON on the standard input. Its answer is a line of JSON on the standard output, then the bytes
of an array if it has one. Nothing but NumPy and h5py is imported, so that the process starts fast.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

MEMORY, SECONDS = 3 << 30, 60  # of this process, and of its processor for each request
_EXPANDS = 1100  # times that compressed bytes may become more: 1,032 by zlib
_MOST_CASES, _MOST_TEXT = 1 << 20, 256


class Refused(Exception):
    """What was expected and found."""


def describe(file: Any, parts: list[str], ids: list[str]) -> dict[str, Any]:
    """Shapes and dtypes of the images and labels of every part, and the ids of their series if there are some."""
    groups = [part for part in parts if part in file] or ([""] if "images" in file else [])
    if not groups:
        found = ", ".join(str(name)[:40] for name, _ in zip(file, range(6), strict=False)) or "nothing"
        raise Refused(f"expected groups {', '.join(parts)} with images and labels, found {found}")
    return {part: _part(_own(file, part) if part else file, part, ids) for part in groups}


def _part(group: Any, part: str, ids: list[str]) -> dict[str, Any]:
    where = f"group {part or '/'!r}"
    for name in ("images", "labels"):
        if not hasattr(group, "keys") or name not in group:
            raise Refused(f"{where}: expected images and labels, found no {name}")
    found: dict[str, Any] = {name: _facts(_dataset(group, name)) for name in ("images", "labels")}
    name = next((name for name in ids if name in group), None)
    return found | {"ids": None if name is None else _ids(_dataset(group, name))}


def _own(group: Any, name: str) -> Any:
    """What the name stands for, if it is in this file itself."""
    import h5py

    link = group.get(name, getlink=True)
    if not isinstance(link, h5py.HardLink):
        raise Refused(f"{name}: expected data in the file itself, found a link: copy it with what it links to")
    return group[name]


def _dataset(group: Any, name: str) -> Any:
    import h5py

    data = _own(group, name)
    where = data.name or name
    if not isinstance(data, h5py.Dataset):
        raise Refused(f"{where}: expected an array, found a {type(data).__name__.lower()}")
    properties = data.id.get_create_plist()
    layouts = (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)  # not VIRTUAL
    if properties.get_external_count() or properties.get_layout() not in layouts:
        raise Refused(f"{where}: expected data in the file itself, found that it is kept in other files")
    if data.shape is None or not data.shape:
        raise Refused(f"{where}: expected an array, found a single value")
    size = int(np.prod(data.shape, dtype=object)) * data.dtype.itemsize
    if size > _EXPANDS * data.id.get_storage_size() + 4096:
        raise Refused(f"{where}: expected all of {list(data.shape)}, found {data.id.get_storage_size():,} bytes of it")
    return data


def _facts(data: Any) -> dict[str, Any]:
    if data.dtype.kind not in "biuf" or data.dtype.itemsize > 8:
        raise Refused(f"{data.name}: expected numbers, found {str(data.dtype)[:40]}")
    if len(data) > _MOST_CASES:
        raise Refused(f"{data.name}: expected at most {_MOST_CASES:,} cases, found {len(data):,}")
    return {"shape": list(data.shape), "dtype": data.dtype.str}


def _ids(data: Any) -> dict[str, Any]:
    """Texts, or numbers that the series were hashed to."""
    text = data.dtype.kind in "SU" or (data.dtype.kind == "O" and data.dtype.metadata and "vlen" in data.dtype.metadata)
    if not (text or data.dtype.kind in "iu") or data.dtype.itemsize > 4 * _MOST_TEXT:
        raise Refused(f"{data.name}: expected texts or whole numbers, found {str(data.dtype)[:40]}")
    if len(data.shape) != 1 or len(data) > _MOST_CASES:
        raise Refused(f"{data.name}: expected one for each image, found {list(data.shape)}")
    values = [value.decode() if isinstance(value, bytes) else str(value) for value in data[()].tolist()]
    if any(len(value) > _MOST_TEXT or not value.isprintable() for value in values):
        raise Refused(f"{data.name}: expected ids, found texts that are none")
    return {"name": data.name, "hashed": data.dtype.kind in "iu", "values": values}


def rows(file: Any, part: str, name: str, start: int, count: int) -> np.ndarray:
    return np.asarray(_dataset(_own(file, part) if part else file, name)[start : start + count])


def main(path: str) -> None:
    """Answer until there are no more requests."""
    import h5py

    file = None
    for line in sys.stdin:
        request, content = json.loads(line), b""
        _bound(SECONDS)
        try:
            file = h5py.File(path, "r", locking=False) if file is None else file
            if request.pop("do") == "rows":
                array = np.ascontiguousarray(rows(file, **request))
                answer: dict[str, Any] = {"shape": array.shape, "dtype": array.dtype.str}
                content = array.data.cast("B") if array.size else b""
            else:
                answer = {"parts": describe(file, **request)}
        except Refused as refused:
            answer = {"problem": str(refused)}
        except Exception as error:  # damaged bytes make the library raise anything
            answer = {"problem": f"expected a whole HDF5 file, found: {' '.join(str(error).split())[:160]}"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def _bound(seconds: int) -> None:
    """Let the system end this process if it runs away, even when nobody waits for it any more."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, most))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file: its neighbours are not modules of their own
    main(sys.argv[1])
    os._exit(0)  # the library is not asked to clean up what may be damaged
