"""LIDC in HDF5 files that were made from the v1 pickle."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.extras import require
from ambiseg.data.case import Progress
from ambiseg.data.sets.lidc.crops import PARTS, READERS, Crop, Crops, check_shapes, shift_of, unit_image

_BLOCK = 32  # cases that are read at once: files of compressed blocks are slow to read one by one
_BLOCK_BYTES = 1 << 27  # if they are not larger than this
_IDS = ("series_uid", "series_uids", "uids", "uid", "patient", "patients")
_PATIENCE = 20.0  # seconds for an answer
_PROGRAM = Path(__file__).with_name("hdf5_process.py")


class Hdf5(Crops):
    """PHiSeg's ``data_lidc.hdf5`` and its descendants.

    Images are ``[N, H, W]`` (or ``[N, 1, H, W]``), in [0, 1] or shifted by -0.5; the shift is undone. Labels are
    ``[N, H, W, 4]`` or ``[N, 4, H, W]``. ``uids`` are numbers, a hash of each series that cannot be turned back; they
    still tell which cases belong together.

    The file is read by a process of its own, see :mod:`ambiseg.data.sets.lidc.hdf5_process`.
    """

    form = "v1 HDF5"
    suffixes = (".hdf5", ".h5")
    _at_once = _BLOCK
    _process: _Process | None = None
    _block: tuple[tuple[str, int], np.ndarray, np.ndarray] | None = None

    def index(self, progress: Progress | None) -> list[Crop]:
        crops: list[Crop] = []
        shifts = []
        for part, found in self._ask(do="describe", parts=PARTS, ids=_IDS)[0]["parts"].items():
            count = self._checked_count(part, found["images"], found["labels"])
            ids, hashed = self._checked_ids(count, found["ids"])
            width = len(str(max(count - 1, 1)))
            for i in range(count):
                name = f"{part}-{i:0{width}d}".lstrip("-")
                series, patient = (None, f"series-{ids[i]}") if hashed else (ids[i], None)
                crops.append(Crop(name, (part, i), series, patient, part or None, {"group": part, "number": i}))
            shifts.append(shift_of(count, lambda i, part=part: self._rows(part, "images", i, 1)))
        self._shift = max(shifts)
        return crops

    def _checked_count(self, part: str, images: dict[str, Any], labels: dict[str, Any]) -> int:
        where = f"{self.source}: group {part or '/'!r}"
        shape, drawn = tuple(images["shape"]), tuple(labels["shape"])
        flat = shape
        if len(shape) == 4 and 1 in (shape[1], shape[3]):
            flat = (shape[0], *shape[2:]) if shape[1] == 1 else shape[:3]
        if len(flat) != 3 or drawn not in ((*flat, READERS), (flat[0], READERS, *flat[1:])):
            expected = f"images [N, H, W] and labels [N, H, W, {READERS}] or [N, {READERS}, H, W]"
            raise DataError(f"{where}: expected {expected}, found {list(shape)} and {list(drawn)}")
        size = (np.dtype(images["dtype"]).itemsize + READERS * np.dtype(labels["dtype"]).itemsize) * math.prod(flat[1:])
        self._at_once = max(1, min(self._at_once, _BLOCK_BYTES // max(size, 1)))
        check_shapes(where, flat[1:], (READERS, *flat[1:]), np.dtype(images["dtype"]))
        return flat[0]

    def _checked_ids(self, count: int, found: dict[str, Any] | None) -> tuple[Sequence[str | None], bool]:
        """The id of each case's series, and whether it is a number that the series was hashed to."""
        if found is None:
            return [None] * count, False
        if (ids := len(found["values"])) != count:
            raise DataError(f"{self.source}: {found['name']}: expected one for each of {count} images, found {[ids]}")
        return found["values"], found["hashed"]

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part, i = self.crops[index].place
        key = part, i // self._at_once
        if self._block is None or self._block[0] != key:
            start = key[1] * self._at_once
            images, labels = (self._rows(part, name, start, self._at_once) for name in ("images", "labels"))
            images = images.reshape(len(images), *(n for n in images.shape[1:] if n != 1))
            if labels.shape == (*images.shape, READERS):
                labels = np.moveaxis(labels, -1, 1)
            self._block = key, images, labels
        _, images, labels = self._block
        return unit_image(images[i % self._at_once], self.where(index), self._shift), labels[i % self._at_once]

    def _rows(self, part: str, name: str, start: int, count: int) -> np.ndarray:
        return self._ask(do="rows", part=part, name=name, start=start, count=count)[1]

    def _ask(self, **request: Any) -> tuple[dict[str, Any], np.ndarray]:
        if self._process is None:
            self._process = _Process(self.source)
        try:
            return self._process.ask(request)
        except DataError:
            self._process.end()
            self._process = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_block": None}


class _Process:
    """The process that reads one file."""

    def __init__(self, path: Path) -> None:
        require("medical")
        no_filters = {"HDF5_PLUGIN_PRELOAD": "::"}  # libraries of others: code that the file could choose
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **no_filters, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.end = weakref.finalize(self, _end, self._process)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """The answer to one request, or an error if there is none in time."""
        pipe, answer = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answer is not None
        late = Timer(_PATIENCE, self._process.kill)
        late.daemon = True
        late.start()
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
            found = json.loads(answer.readline())
            if problem := found.get("problem"):
                raise DataError(f"{self._path}: {problem}")
            shape, dtype = found.get("shape", [0]), np.dtype(found.get("dtype", "u1"))
            content = answer.read(math.prod(shape) * dtype.itemsize)
            return found, np.frombuffer(content, dtype).reshape(shape)
        except DataError:
            raise
        except (OSError, ValueError):  # it has ended
            why = "which the HDF5 library does not survive"
            if not late.is_alive():
                why = f"in which the HDF5 library finds no end within {_PATIENCE:.0f} s"
            raise DataError(f"{self._path}: expected a whole HDF5 file, found damage {why}") from None
        finally:
            late.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # of what was written to it and not read
                pipe.close()
    process.wait()
