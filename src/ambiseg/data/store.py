"""A data set on disk in the form that training reads: memory-mapped, shared by all workers, held in memory by nobody.

A store is a folder:

- ``images.bin``, ``regions.bin``: pixels of one case after the other, as they are in memory, each starting at a
  multiple of 64 bytes;
- ``cases.jsonl``: one line a case: name, patient, readers, where its pixels start, its table of regions, its digests;
- ``store.json``: what is known of all cases. It is written last: a store without it was interrupted, and is taken up
  where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg.data.case import Case, Cases, Flip
from ambiseg.data.intensity import Intensity
from ambiseg.data.splits import combine

_FORMAT = "ambiseg.Store/1"
_ALIGN = 64
_FILES = {"images.bin", "regions.bin", "cases.jsonl", "store.json", "draft.json", "lock"}
Progress = Callable[[int, int], None]
"""Called with how many cases are done, and how many there are."""


class Store(Cases):
    """A data set that was written by :meth:`build`; opened without reading a pixel.

    >>> from ambiseg.data.sets.shapes import Shapes
    >>> store = Store.build(Shapes(count=4, size=16))             # no folder: a temporary one, gone with the store
    >>> len(store), np.array_equal(store[2].labels, Shapes(count=4, size=16)[2].labels)
    (4, True)
    """

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
        self.flips = tuple(Flip(**flip) for flip in header.get("flips", []))
        self.state_of_source: str = header["state"]
        self.patients_known: bool = header.get("patients_known", True)
        self.fingerprint: str | None = header.get("fingerprint")
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
        for name, needed in (("images.bin", _end(self._lines, "image")), ("regions.bin", _end(self._lines, "regions"))):
            found = size_of(self.folder / name)
            if found < needed:
                raise DataError(f"{self.folder / name}: expected {needed} bytes, found {found}: cut short")
        self._maps: dict[str, np.ndarray] = {}

    def __getitem__(self, index: int) -> Case:
        line = self._lines[index]
        void, weights = line["void"], line["weights"]
        return Case(
            image=self._pixels("images.bin", line["image"]),
            regions=self._pixels("regions.bin", line["regions"]),
            table=np.array(line["table"], dtype=line["ids"]).reshape(-1, len(line["readers"])),
            name=line["name"],
            patient=line["patient"],
            readers=tuple(line["readers"]),
            weights=None if weights is None else np.array(weights, np.float32),
            void=None if void is None else np.array(void, bool),
        )

    def image_digest(self, index: int) -> str:
        return self._lines[index]["image_digest"]

    def digest(self, index: int) -> str:
        return self._lines[index]["digest"]

    def origin(self, index: int) -> dict[str, Any]:
        return self._lines[index].get("origin", {})

    def about(self) -> dict[str, Any]:
        return self._about

    def state(self) -> str:
        return self.state_of_source

    def _pixels(self, file: str, place: dict[str, Any]) -> np.ndarray:
        if file not in self._maps:  # opened on first use, so that every worker has a map of its own
            path = self.folder / file
            self._maps[file] = np.memmap(path, np.uint8, "r") if size_of(path) else np.zeros(0, np.uint8)
        dtype, shape, start = np.dtype(place["dtype"]), place["shape"], place["at"]
        stop = start + dtype.itemsize * int(np.prod(shape))
        # The bare array: np.memmap's own bookkeeping makes every slice several times as slow.
        return self._maps[file][start:stop].view(np.ndarray).view(dtype).reshape(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a worker that is spawned maps the files itself

    @staticmethod
    def build(cases: Cases, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Store:
        """Write ``cases`` to ``folder`` and open it; a finished store of the same data is opened as it is.

        Cases are read one at a time, so memory does not grow with their number. What an interrupted call wrote is
        used by the next one. Without a folder the store is temporary and goes when the object goes.
        """
        if folder is None:
            place = tempfile.mkdtemp(prefix="ambiseg-store-")
            # A forked worker holds a copy of this object; only the process that made the folder may remove it.
            remove = weakref.finalize(cases, _remove, place, os.getpid())
            try:
                store = Store.build(cases, place, progress)
            except BaseException:
                remove()
                raise
            remove.detach()
            weakref.finalize(store, _remove, place, os.getpid())
            return store
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = cases.state()
        with _alone(folder):
            header = _header(folder)
            if header is None or header["state"] != state:
                if foreign := sorted({path.name for path in folder.iterdir()} - _FILES):
                    raise DataError(f"{folder}: expected a store or an empty folder to write one, found {foreign[0]}")
                _write(cases, folder, state, progress)
        return Store(folder)


def _write(cases: Cases, folder: Path, state: str, progress: Progress | None) -> None:
    draft = folder / "draft.json"
    kept: list[dict[str, Any]] = []
    if _state_of(draft) == state:
        kept = _read_lines(folder / "cases.jsonl", forgive_last=True)
        kept = kept[: _whole(kept, folder)]
    # From here the folder holds the draft of this data and nothing else.
    (folder / "store.json").unlink(missing_ok=True)
    write_text(draft, json.dumps({"format": _FORMAT, "state": state}))
    if [line["name"] for line in kept] != list(cases.names[: len(kept)]):
        kept = []
    write_text(folder / "cases.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    digests = [line["digest"] for line in kept]
    with (
        open(folder / "images.bin", "ab") as images,
        open(folder / "regions.bin", "ab") as regions,
        open(folder / "cases.jsonl", "a", encoding="utf-8") as journal,
    ):
        images.truncate(_end(kept, "image"))
        regions.truncate(_end(kept, "regions"))
        images.seek(0, os.SEEK_END)
        regions.seek(0, os.SEEK_END)
        for index in range(len(kept), len(cases)):
            line = _append(cases, index, images, regions)
            digests.append(line["digest"])
            # Pixels first: a line in the journal says that they are there.
            images.flush()
            regions.flush()
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            if progress is not None:
                progress(index + 1, len(cases))
        for file in (images, regions, journal):
            file.flush()
            os.fsync(file.fileno())
    header = {
        "format": _FORMAT,
        "state": state,
        "title": cases.title,
        "classes": list(cases.classes),
        "evaluated": list(cases.evaluated),
        "channels": cases.channels,
        "intensity": asdict(cases.intensity),
        "count": len(cases),
        "patients_known": cases.patients_known,
        "fingerprint": combine(digests),
        "about": cases.about(),
        **({"flips": [asdict(flip) for flip in cases.flips]} if cases.flips else {}),
    }
    write_text(folder / "store.json", json.dumps(header, indent=1, ensure_ascii=False) + "\n")
    draft.unlink()


def _append(cases: Cases, index: int, images: BinaryIO, regions: BinaryIO) -> dict[str, Any]:
    case = cases[index]
    return {
        "name": case.name,
        "patient": case.patient,
        "declared": None if cases.declared is None else cases.declared[index],
        "readers": list(case.readers),
        "weights": None if case.weights is None else np.asarray(case.weights, np.float64).tolist(),
        "void": None if case.void is None else case.void.tolist(),
        "ids": case.table.dtype.str,
        "table": case.table.reshape(-1).tolist(),
        "image": _put(images, case.image),
        "regions": _put(regions, case.regions),
        "image_digest": cases.image_digest(index),
        "digest": cases.digest(index),
        "origin": cases.origin(index),
    }


def _put(file: BinaryIO, array: np.ndarray) -> dict[str, Any]:
    file.write(b"\0" * (-file.tell() % _ALIGN))
    at = file.tell()
    array = np.ascontiguousarray(array)
    file.write(array.data)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "at": at}


def _end(lines: list[dict[str, Any]], which: str) -> int:
    """The byte after the last pixel that these lines speak of."""
    if not lines:
        return 0
    place = lines[-1][which]
    return place["at"] + np.dtype(place["dtype"]).itemsize * int(np.prod(place["shape"]))


def _whole(lines: list[dict[str, Any]], folder: Path) -> int:
    """How many of the cases of an interrupted store have all their pixels on disk."""
    images, regions = size_of(folder / "images.bin"), size_of(folder / "regions.bin")
    count = len(lines)
    while count and (_end(lines[:count], "image") > images or _end(lines[:count], "regions") > regions):
        count -= 1
    return count


def _read_lines(path: Path, forgive_last: bool = False) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for number, text in _numbered(path):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if forgive_last:
                break
            raise DataError(f"{path}: line {number}: expected one case as JSON, found {text[:40]!r}") from None
    return lines


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            yield from enumerate(file, 1)
    except FileNotFoundError:
        return


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


def _state_of(draft: Path) -> str | None:
    try:
        return json.loads(draft.read_text(encoding="utf-8")).get("state")
    except (FileNotFoundError, ValueError, AttributeError):
        return None


def state_of(folder: str | os.PathLike[str]) -> str | None:
    """The state of the data whose finished store is in a folder; ``None`` if there is none."""
    header = _header(Path(folder))
    return None if header is None else header["state"]


def size_of(path: Path) -> int:
    """Bytes in a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time writes a store; the others wait, and then find it finished."""
    try:
        import fcntl
    except ImportError:  # a system without such locks: nobody waits
        yield
        return
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by the system when the process ends, however it ends
        yield


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
