"""A data set on disk in the form that training reads: memory-mapped, shared by all workers, held in memory by none.

A store is a folder:

- ``images.bin``, ``regions.bin``: pixels of one case after the other, as they are in memory, each starting at a
  multiple of 64 bytes;
- ``cases.jsonl``: one line per case: name, patient, readers, where its pixels start, its table of regions, its digests;
- ``store.json``: what is known of all cases. It is written last.

While a store is written, ``draft.json`` names the state of its source and ``draft.jsonl`` has a line per case that is
complete: writing that was interrupted is continued there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg.data.case import Case, Cases, Decoded, Extra, Flip, Progress, Reading
from ambiseg.data.intensity import Intensity
from ambiseg.data.splits import combine

_FORMAT = "ambiseg.Store/1"
_ALIGN = 64
_DRAFT, _JOURNAL = "draft.json", "draft.jsonl"
_PIXELS = {"image": "images.bin", "regions": "regions.bin"}
FILES = {*_PIXELS.values(), "cases.jsonl", "store.json", _DRAFT, _JOURNAL, "lock", "used"}
"""Names of the files in a store's folder."""


class Store(Cases):
    """A data set that was written by :meth:`build`; opened without reading a pixel.

    >>> import tempfile
    >>> from ambiseg.data.sets.shapes import Shapes
    >>> store = Store.build(Shapes(count=4, size=16), tempfile.mkdtemp())
    >>> len(store), np.array_equal(store[2].labels, Shapes(count=4, size=16)[2].labels)
    (4, True)
    """

    hold: object = None  # kept as long as the store: the lock of a store in the cache, see data/cache.py

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        header = _header(self.folder)
        if header is None:
            raise DataError(f"{self.folder}: expected a finished store with store.json in it, found none")
        self.title: str = header["title"]
        self.classes = tuple(header["classes"])
        self.evaluated = tuple(header["evaluated"])
        self.channels: int = header["channels"]
        self.intensity = Intensity(**header["intensity"])
        self.units: str = header.get("units", "")
        self.reading = Reading(**header.get("reading", {}))
        extra = header.get("extra")  # JSON has numbers as texts
        self.extra = extra and Extra(extra["classes"], {int(key): value for key, value in extra["ids"].items()})
        self.flips = tuple(Flip(**flip) for flip in header.get("flips", []))
        self.patients_known: bool = header.get("patients_known", True)
        self.patients_assumed: str = header.get("patients_assumed", "")
        self.group: str = header.get("group", Cases.group)
        self.annotator: str = header.get("annotator", Cases.annotator)
        self.fingerprint = header.get("fingerprint")
        self._state: str = header["state"]
        self._about: dict[str, Any] = header.get("about", {})
        self._lines = _read_lines(self.folder / "cases.jsonl")
        if len(self._lines) != header["count"]:
            raise DataError(
                f"{self.folder / 'cases.jsonl'}: expected {header['count']} cases, found {len(self._lines)}; "
                "remove the folder and build it again"
            )
        self.names = [line["name"] for line in self._lines]
        self.patients = [line["patient"] for line in self._lines]
        declared = [line["declared"] for line in self._lines]
        self.declared = None if all(part is None for part in declared) else declared
        for which, name in _PIXELS.items():
            needed, found = _end(self._lines, which), _size(self.folder / name)
            if found < needed:
                raise DataError(f"{self.folder / name}: expected {needed} bytes, found {found}: cut short")

    @cached_property
    def _pixels(self) -> dict[str, np.ndarray]:
        return _mapped(self.folder)

    def __getitem__(self, index: int) -> Case:
        return _case(self._lines[index], self._pixels)

    def size_of(self, index: int) -> tuple[int, int]:
        height, width = self._lines[index]["regions"]["shape"]
        return height, width

    def image_digest(self, index: int, case: Case | None = None) -> str:
        return self._lines[index]["image_digest"]

    def digest(self, index: int, case: Case | None = None) -> str:
        return self._lines[index]["digest"]

    def origin(self, index: int) -> dict[str, Any]:
        return self._lines[index].get("origin", {})

    def about(self) -> dict[str, Any]:
        return self._about

    def state(self) -> str:
        """The state of the source when the store was written."""
        return self._state

    def __getstate__(self) -> dict[str, Any]:  # every process maps the pixels itself
        return {name: value for name, value in vars(self).items() if name not in ("hold", "_pixels")}

    @staticmethod
    def build(cases: Cases, folder: str | os.PathLike[str], progress: Progress | None = None) -> Store:
        """Write ``cases`` to ``folder``, one at a time, and open it; a finished store of the same data is only opened.

        What an interrupted call wrote is used by the next one. One process writes; others wait, and find it finished.
        """
        from filelock import FileLock

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = cases.state()
        with FileLock(folder / "lock"):  # released by the system when the process ends, however it ends
            if state_of(folder) != state:
                if foreign := sorted({path.name for path in folder.iterdir()} - FILES):
                    raise DataError(f"{folder}: expected a store or an empty folder to write one, found {foreign[0]}")
                _write(cases, folder, state, progress)
        return Store(folder)


def _write(cases: Cases, folder: Path, state: str, progress: Progress | None) -> None:
    draft = json.dumps({"format": _FORMAT, "state": state})
    continued = (folder / _DRAFT).exists() and (folder / _DRAFT).read_bytes() == draft.encode()
    lines = _complete_lines(folder) if continued else []
    (folder / "store.json").unlink(missing_ok=True)  # from here on the folder holds the draft of this state
    write_text(folder / _DRAFT, draft)
    _write_lines(folder / _JOURNAL, lines)
    with (
        open(folder / "images.bin", "ab") as images,
        open(folder / "regions.bin", "ab") as regions,
        open(folder / _JOURNAL, "a", encoding="utf-8") as journal,
    ):
        for file, which in ((images, "image"), (regions, "regions")):
            file.truncate(_end(lines, which))
            file.seek(0, os.SEEK_END)
        for decoded in cases.decode(len(lines)):
            lines.append(_line(decoded, images, regions))
            images.flush()
            regions.flush()
            print(json.dumps(lines[-1]), file=journal, flush=True)  # says that the pixels are complete
            if progress is not None:
                progress(len(lines), max(len(lines), cases.expected))
        os.fsync(images.fileno())
        os.fsync(regions.fileno())
    observed = [line.pop("observed", None) for line in lines]
    if cases.settle(observed):
        pixels = _mapped(folder)
        for line, values in zip(lines, observed, strict=True):
            case = cases.settled(_case(line, pixels), values)
            line.update(_table(case), digest=case.digest)
    header = {
        "format": _FORMAT,
        "state": state,
        "title": cases.title,
        "classes": list(cases.classes),
        "evaluated": list(cases.evaluated),
        "channels": cases.channels,
        "intensity": asdict(cases.intensity),
        "units": cases.units,
        "reading": asdict(cases.reading),
        "count": len(lines),
        "patients_known": cases.patients_known,
        **({"patients_assumed": cases.patients_assumed} if cases.patients_assumed else {}),
        "group": cases.group,
        "annotator": cases.annotator,
        "fingerprint": combine(line["digest"] for line in lines),
        "about": cases.about(),
        **({"extra": asdict(cases.extra)} if cases.extra else {}),
        **({"flips": [asdict(flip) for flip in cases.flips]} if cases.flips else {}),
    }
    _write_lines(folder / "cases.jsonl", lines)
    write_text(folder / "store.json", json.dumps(header, indent=1, ensure_ascii=False) + "\n")
    for name in (_DRAFT, _JOURNAL):
        (folder / name).unlink()


def _complete_lines(folder: Path) -> list[dict[str, Any]]:
    """The cases of an interrupted store whose pixels are all on disk."""
    lines = _read_lines(folder / _JOURNAL, interrupted=True)
    sizes = {which: _size(folder / name) for which, name in _PIXELS.items()}
    while lines and any(_end(lines, which) > size for which, size in sizes.items()):
        lines.pop()
    return lines


def _line(decoded: Decoded, images: BinaryIO, regions: BinaryIO) -> dict[str, Any]:
    case = decoded.case
    return {
        "name": case.name,
        "patient": case.patient,
        "declared": decoded.declared,
        "readers": list(case.readers),
        "weights": None if case.weights is None else np.asarray(case.weights, np.float64).tolist(),
        "void": None if case.void is None else case.void.tolist(),
        **_table(case),
        "image": _put(images, case.image),
        "regions": _put(regions, case.regions),
        "image_digest": decoded.image_digest,
        "digest": decoded.digest,
        "origin": decoded.origin or {},
        "observed": decoded.observed,  # until the cases are settled
    }


def _table(case: Case) -> dict[str, Any]:
    return {"ids": case.table.dtype.str, "table": case.table.reshape(-1).tolist()}


def _put(file: BinaryIO, array: np.ndarray) -> dict[str, Any]:
    file.write(b"\0" * (-file.tell() % _ALIGN))
    at = file.tell()
    array = np.ascontiguousarray(array)
    file.write(array.data)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "at": at}


def _mapped(folder: Path) -> dict[str, np.ndarray]:
    """The bytes of the two files of pixels, which the system reads when they are looked at."""
    paths = {which: folder / name for which, name in _PIXELS.items()}
    empty = np.zeros(0, np.uint8)
    return {which: np.memmap(path, np.uint8, "r") if _size(path) else empty for which, path in paths.items()}


def _case(line: dict[str, Any], pixels: Mapping[str, np.ndarray]) -> Case:
    def array(which: str) -> np.ndarray:
        # The bare array: np.memmap's own bookkeeping makes every slice several times as slow.
        flat = pixels[which][line[which]["at"] : _end([line], which)].view(np.ndarray)
        return flat.view(np.dtype(line[which]["dtype"])).reshape(line[which]["shape"])

    void, weights = line["void"], line["weights"]
    return Case(
        image=array("image"),
        regions=array("regions"),
        table=np.array(line["table"], dtype=line["ids"]).reshape(-1, len(line["readers"])),
        name=line["name"],
        patient=line["patient"],
        readers=tuple(line["readers"]),
        weights=None if weights is None else np.array(weights, np.float32),
        void=None if void is None else np.array(void, bool),
    )


def _end(lines: Sequence[dict[str, Any]], which: str) -> int:
    """The byte after the last pixel of these cases."""
    if not lines:
        return 0
    place = lines[-1][which]
    return place["at"] + np.dtype(place["dtype"]).itemsize * int(np.prod(place["shape"]))


def _read_lines(path: Path, interrupted: bool = False) -> list[dict[str, Any]]:
    """One case per line; of an ``interrupted`` file the last line may be incomplete."""
    lines: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") if path.exists() else nullcontext([]) as file:
        for number, text in enumerate(file, 1):
            try:
                lines.append(json.loads(text))
            except ValueError:
                if interrupted:
                    break
                raise DataError(f"{path}: line {number}: expected one case as JSON, found {text[:40]!r}") from None
    return lines


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _header(folder: Path) -> dict[str, Any] | None:
    path = folder / "store.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise DataError(f"{path}: expected JSON, found something else; remove the folder and build it again") from None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise DataError(f"{path}: expected a store of format {_FORMAT}, found {found}")
    return header


def state_of(folder: str | os.PathLike[str]) -> str | None:
    """The state of the data whose finished store is in a folder; ``None`` if there is none."""
    header = _header(Path(folder))
    return None if header is None else header["state"]


def _size(path: Path) -> int:
    """Bytes in a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0
