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
from dataclasses import asdict
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import contents, made, named, sweep, write_text
from ambiseg._util.limits import too_large
from ambiseg._util.parsing import shown
from ambiseg._util.reading import Unreadable, read_json, read_json_lines, validated
from ambiseg._util.text import shape_text
from ambiseg.data.case import Case, Cases, Decoded, Progress, digest
from ambiseg.data.splits import combine
from ambiseg.data.stored import ALIGN, Header, Line, Pixels

_FORMAT = "ambiseg.Store/1"
_DRAFT, _JOURNAL = "draft.json", "draft.jsonl"
_PIXELS = {"image": "images.bin", "regions": "regions.bin"}
FILES = {*_PIXELS.values(), "cases.jsonl", "store.json", _DRAFT, _JOURNAL, "lock", "used"}
"""Names of the files in a store's folder."""
_AGAIN = "remove the folder and build it again"


# -- stores -----------------------------------------------------------------------------------------------------------


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
        self.title, self.units, self.reading = header.title, header.units, header.reading
        self.classes, self.evaluated, self.flips = header.classes, header.evaluated, header.flips
        self.channels, self.intensity, self.extra = header.channels, header.intensity, header.extra
        self.patients_known, self.patients_assumed = header.patients_known, header.patients_assumed
        self.group, self.annotator = header.group, header.annotator
        self.fingerprint, self._state, self._about = header.fingerprint, header.state, header.about
        path = self.folder / "cases.jsonl"
        self._lines: list[Line] = _lines_of(path)
        self._checked: set[int] = set()
        if len(self._lines) != header.count:
            raise DataError(f"{path}: expected {header.count} cases, found {len(self._lines)}; {_AGAIN}")
        self.names = [line["name"] for line in self._lines]
        self.patients = [line["patient"] for line in self._lines]
        declared = [line["declared"] for line in self._lines]
        self.declared = None if all(part is None for part in declared) else declared  # type: ignore[assignment]
        for which, name in _PIXELS.items():
            needed, found = _end(self._lines, which), _size(self.folder / name)
            if found < needed:
                raise DataError(f"{self.folder / name}: expected {needed} bytes, found {found}: cut short; {_AGAIN}")

    @cached_property
    def _pixels(self) -> dict[str, np.ndarray]:
        return _mapped(self.folder)

    def __getitem__(self, index: int) -> Case:
        line = self._lines[index]
        if index not in self._checked:  # once, so that training does not pay for it
            _check(line, self._pixels, self.folder, len(self.classes))
            self._checked.add(index)
        return _case(line, self._pixels)

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

        What an interrupted call wrote is used by the next one, unless a file of the source cannot be used: what is put
        right has another state. One process writes; others wait, and find it finished.
        """
        from filelock import FileLock

        folder = Path(folder)
        state = cases.state()
        if state_of(folder) != state and (foreign := sorted({*contents(folder)} - FILES)):
            raise DataError(f"{folder}: expected a store or an empty folder to write one, found {foreign[0]}")
        with made(folder), named(folder), FileLock(folder / "lock"):  # released when the process ends, however it ends
            sweep(folder)
            if state_of(folder) == state:
                tidy(folder)
                return Store(folder)
            try:
                _write(cases, folder, state, progress)
            except DataError:
                _remove(folder, *FILES - {"used"})
                raise
        return Store(folder)


def _write(cases: Cases, folder: Path, state: str, progress: Progress | None) -> None:
    draft = json.dumps({"format": _FORMAT, "state": state})
    continued = _size(folder / _DRAFT) == len(draft.encode()) and (folder / _DRAFT).read_bytes() == draft.encode()
    lines = _complete_lines(folder) if continued else []
    (folder / "store.json").unlink(missing_ok=True)  # from here on the folder holds the draft of this state
    write_text(folder / _DRAFT, draft)
    _write_lines(folder / _JOURNAL, [_signed(line) for line in lines])
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
            print(json.dumps(_signed(lines[-1])), file=journal, flush=True)  # says that the pixels are complete
            if progress is not None:
                progress(len(lines), max(len(lines), cases.expected))
        os.fsync(images.fileno())
        os.fsync(regions.fileno())
    observed = [line.pop("observed", None) for line in lines]
    if cases.settle(observed):
        pixels = _mapped(folder)
        for line, values in zip(lines, observed, strict=True):
            case = cases.settled(_case(line, pixels), values)
            line["ids"], line["table"], line["digest"] = *_table(case), case.digest
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
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what belongs to no finished store; a process that is killed in its last moment leaves it."""
    _remove(folder, _DRAFT, _JOURNAL)


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _complete_lines(folder: Path) -> list[Line]:
    """The cases of an interrupted store up to the first whose line or pixels are not as they were written."""
    lines: list[Line] = []
    sizes = {which: _size(folder / name) for which, name in _PIXELS.items()}
    for line in _lines_of(folder / _JOURNAL, interrupted=True) if _size(folder / _JOURNAL) else []:
        signed = line.pop("signature", "") == _signature(line)
        if not signed or any(_end([line], which) > size for which, size in sizes.items()):
            break
        lines.append(line)
    pixels = _mapped(folder) if lines else {}
    for number, line in enumerate(lines):
        try:
            _check(line, pixels, folder)
        except DataError:
            return lines[:number]
    return lines


def _signed(line: Line) -> Line:
    """A line of the journal with a hash of its content: what is continued was not changed in between."""
    return {**line, "signature": _signature(line)}


def _signature(line: Line) -> str:
    as_read = json.loads(json.dumps(line))  # JSON has numbers as texts
    return digest(json.dumps(as_read, sort_keys=True))


def _line(decoded: Decoded, images: BinaryIO, regions: BinaryIO) -> Line:
    case = decoded.case
    ids, table = _table(case)
    return {
        "name": case.name,
        "patient": case.patient,
        "declared": decoded.declared,
        "readers": list(case.readers),
        "weights": None if case.weights is None else np.asarray(case.weights, np.float64).tolist(),
        "void": None if case.void is None else case.void.tolist(),
        "ids": ids,
        "table": table,
        "image": _put(images, case.image),
        "regions": _put(regions, case.regions),
        "image_digest": decoded.image_digest,
        "digest": decoded.digest,
        "origin": decoded.origin or {},
        "observed": decoded.observed,  # until the cases are settled
    }


def _table(case: Case) -> tuple[str, list[int]]:
    return case.table.dtype.str, case.table.reshape(-1).tolist()


def _put(file: BinaryIO, array: np.ndarray) -> Any:
    file.write(b"\0" * (-file.tell() % ALIGN))
    at = file.tell()
    array = np.ascontiguousarray(array)
    file.write(array.data)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "at": at}


def _mapped(folder: Path) -> dict[str, np.ndarray]:
    """The bytes of the two files of pixels, which the system reads when they are looked at."""
    paths = {which: folder / name for which, name in _PIXELS.items()}
    empty = np.zeros(0, np.uint8)
    return {which: np.memmap(path, np.uint8, "r") if _size(path) else empty for which, path in paths.items()}


def _case(line: Line, pixels: Mapping[str, np.ndarray]) -> Case:
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


def _check(line: Line, pixels: Mapping[str, np.ndarray], folder: Path, classes: int | None = None) -> None:
    """:class:`DataError` unless a line fits its pixels: places, sizes, regions that the table has, known classes."""
    image, regions = line["image"]["shape"], line["regions"]["shape"]
    M, rows = len(line["readers"]), len(line["table"]) // len(line["readers"])
    weights, void = line["weights"], line["void"]
    lengths = [len(line["table"]), M if weights is None else len(weights), rows if void is None else len(void)]

    def refuse(file: str, expected: str, found: object) -> None:
        raise DataError(f"{folder / file}: case {line['name']!r}: expected {expected}, found {found}; {_AGAIN}")

    if image[1:] != regions:
        refuse("cases.jsonl", f"regions of the image's size {shape_text(image[1:])}", shape_text(regions))
    if lengths != [rows * M, M, rows]:
        refuse("cases.jsonl", f"a table of {M} readers, and weights and void regions that fit it", lengths)
    if weights is not None and not 0 < sum(weights) < np.finfo(np.float32).max:
        refuse("cases.jsonl", "weights with a sum above 0", shown(weights))
    if large := too_large((regions[0], regions[1]), 1, image[0], np.dtype(line["image"]["dtype"]).itemsize):
        raise DataError(f"{folder / 'cases.jsonl'}: case {line['name']!r}: {large[0]}")
    for which, name in _PIXELS.items():
        if (end := _end([line], which)) > len(pixels[which]):
            refuse(name, f"{end:,} bytes", f"{len(pixels[which]):,}")
    try:
        case = _case(line, pixels)
    except (OverflowError, ValueError) as error:  # a class id that its type does not hold
        return refuse("cases.jsonl", "class ids of the table's type", error)
    if (most := int(case.regions.max())) >= rows:
        refuse("regions.bin", f"regions below {rows}", most)
    ids = case.table if case.void is None else case.table[~case.void]
    if classes is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < classes:
        refuse("cases.jsonl", f"class ids below {classes}", f"{ids.min()} to {ids.max()}")


def _end(lines: Sequence[Line], which: str) -> int:
    """The byte after the last pixel of these cases."""
    if not lines:
        return 0
    place: Pixels = lines[-1][which]
    return place["at"] + np.dtype(place["dtype"]).itemsize * prod(place["shape"])


def _lines_of(path: Path, interrupted: bool = False) -> list[Line]:
    return list(read_json_lines(path, Line, "one case", interrupted))


def _write_lines(path: Path, lines: Sequence[Line]) -> None:
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _header(folder: Path) -> Header | None:
    path = folder / "store.json"
    try:
        content = read_json(path, "a store")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Unreadable as error:
        raise DataError(f"{error}; {_AGAIN}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise DataError(
            f"{path}: expected a store of format {_FORMAT}, found {found if isinstance(found, str) else shown(found)}"
        )
    try:
        return validated(Header, content, path, "a store")
    except Unreadable as error:
        raise DataError(f"{error}; {_AGAIN}") from None


def state_of(folder: str | os.PathLike[str]) -> str | None:
    """The state of the data whose finished store is in a folder; ``None`` if there is none."""
    header = _header(Path(folder))
    return None if header is None else header.state


def _size(path: Path) -> int:
    """Bytes in a file, 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0
