"""What a user finds after a fault: nothing half-written, nothing left over, and in the end what there always is."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DRAFT = ".ambiseg-"
# What a kill leaves of Python's own: sockets by which data come from workers, and the file by which the module tempfile
# finds out whether a folder can be written to, as soon as any package asks it for one.
_PYTHONS = re.compile(r"tmp/(pymp-|[a-z0-9_]{8}$)")
# In JSON: when, by which version of the source, and how long it took.
_CHANGING = {"started", "git", "cpu_seconds", "wall_seconds"}
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([+-]\d\d:?\d\d)?")
_RUN = ("config.yaml", "split.json", "run.json")


def tree(folder: Path) -> set[str]:
    """All files and folders, relative, folders with a slash at the end."""
    found = set[str]()
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        found |= {str(inside / name) for name in files} | {f"{inside / name}/" for name in folders}
    return found


def drafts(names: Iterable[str]) -> list[str]:
    """Those that are drafts, or in one."""
    return sorted(name for name in names if any(part.startswith(DRAFT) for part in Path(name).parts))


def differences(found: Path, wanted: Path, beside: Iterable[str] = ()) -> list[str]:
    """How a folder differs from another in one line each; ``beside``: beginnings of names that do not count."""
    beside = tuple(beside)
    has, needs = (
        {name for name in tree(one) if not name.startswith(beside) and not _PYTHONS.match(name)}
        for one in (found, wanted)
    )
    lines = [f"left over: {name}" for name in sorted(has - needs)] + [
        f"missing: {name}" for name in sorted(needs - has)
    ]
    for name in sorted(has & needs):
        if not name.endswith("/") and not equal(found / name, wanted / name):
            lines.append(f"differs: {name}")
    return lines


def equal(one: Path, other: Path) -> bool:
    """Whether two files hold the same, apart from times; a file that cannot be read is equal to none."""
    first, second = one.read_bytes(), other.read_bytes()
    if first == second:
        return True
    read = _CONTENT.get(one.suffix)
    if read is None:
        return False
    try:
        return _same(read(first), read(second))
    except Exception:  # half a file fails in as many ways as there are readers
        return False


def unreadable(found: Path, *whole: Path) -> list[str]:
    """Files under their final names that hold a part of what they should; those that ``whole`` has are not read."""
    lines = list[str]()
    for name in sorted(tree(found)):
        path = found / name
        if name.endswith("/") or drafts([name]) or any(_bytes_equal(path, one / name) for one in whole):
            continue
        read = _READABLE.get(path.suffix)
        if read is None:
            continue
        try:
            read(path.read_bytes())
        except Exception as error:
            lines.append(f"half-written: {name}: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
    return lines


def half_a_run(folder: Path) -> list[str]:
    """What a run's folder lacks of what every run has, if there is anything in it."""
    inside = [name for name in os.listdir(folder) if not drafts([name])] if folder.is_dir() else []
    missing = [name for name in _RUN if not (folder / name).is_file()]
    return [f"half a run: {folder.name} has {sorted(inside)[0]} and no {name}" for name in missing if inside]


def partly_there(found: Path, wanted: Path, before: Path, patterns: Iterable[str]) -> list[str]:
    """Folders that should appear at once, and are there with another content than before or in the end."""
    lines = list[str]()
    for pattern in patterns:
        for path in sorted(found.glob(pattern)):
            inside = path.relative_to(found)
            if drafts([str(inside)]) or not path.is_dir():
                continue
            ends = [one / inside for one in (wanted, before) if (one / inside).is_dir()]
            if not any(not differences(path, one) for one in ends):
                lines.append(f"half a folder: {inside}: {differences(path, ends[0])[0] if ends else 'not expected'}")
    return lines


def unflushed(operations: Iterable[Any]) -> list[str]:
    """Files that took their final names before they were on the disk, by the order of operations."""
    dirty, lines = dict[str, str](), list[str]()
    for one in operations:
        if one.name in ("write", "pwrite", "writev", "pwritev", "ftruncate", "copy", "sendfile"):
            dirty[one.path] = one.name
        elif one.name in ("fsync", "fdatasync"):
            dirty.pop(one.path, None)
        elif one.name == "rename":
            inside = [path for path in dirty if path == one.path or path.startswith(f"{one.path}/")]
            for path in inside:
                place = one.other + path.removeprefix(one.path)
                dirty[place] = dirty.pop(path)
            if inside and not drafts([one.other]):
                lines.append(
                    f"not on the disk when it took its name: {one.other}"
                    + f" ({len(inside)} files)" * (len(inside) > 1)
                )
        elif one.name == "unlink":
            dirty.pop(one.path, None)
    return sorted(set(lines))


# -- what files hold --------------------------------------------------------------------------------------------------


def _bytes_equal(one: Path, other: Path) -> bool:
    return other.is_file() and one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def _json(content: bytes) -> Any:
    return _timeless(json.loads(content))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        typed = {"command": value["command"][1:]} if isinstance(value.get("command"), list) else {}  # not the program
        return {key: _timeless(one) for key, one in (value | typed).items() if key not in _CHANGING}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _checkpoint(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _safetensors(content: bytes) -> Any:
    from safetensors.torch import load

    return load(content)


def _arrays(content: bytes) -> Any:
    import numpy as np

    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _picture(content: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        picture.load()


def _table(content: bytes) -> Any:
    rows = list(csv.reader(io.StringIO(content.decode())))
    if not content.endswith(b"\n") or len({len(row) for row in rows}) != 1:
        raise ValueError("rows of several lengths, or no end of the last one")
    return rows


def _page(content: bytes) -> Any:
    if not content.rstrip().endswith((b"</html>", b"</svg>")):
        raise ValueError("no end")
    return _TIME.sub(b"", content)


def _yaml(content: bytes) -> Any:
    import yaml

    if not isinstance(found := yaml.safe_load(content), dict):
        raise ValueError(f"expected a mapping, found {type(found).__name__}")
    return found


_CONTENT: dict[str, Callable[[bytes], Any]] = {  # equal weights are equal bytes, and so are pictures and tables
    ".json": _json,
    ".ckpt": _checkpoint,
    ".npz": _arrays,
    ".html": _page,
}
_READABLE: dict[str, Callable[[bytes], Any]] = {
    **_CONTENT,
    ".safetensors": _safetensors,
    ".png": _picture,
    ".tif": _picture,
    ".csv": _table,
    ".svg": _page,
    ".yaml": _yaml,
}


def _same(one: Any, other: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)
