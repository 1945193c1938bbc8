"""HDF5 files made from the v1 pickle: groups train, val and test with images, labels and a number a series."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.crops import PARTS, READERS, UNIT, Crops, Entry, Options, unit_image

_BLOCK = 32  # images that are read at once: files of compressed blocks are slow to read one by one
_LOOK = 64  # images that are looked at to tell whether a file is shifted
_IDS = ("series_uid", "series_uids", "uids", "uid", "patient", "patients")


class Hdf5(Crops):
    """PHiSeg's ``data_lidc.hdf5`` and its descendants.

    Images are ``[N, H, W]`` (or ``[N, 1, H, W]``), in [0, 1] or shifted by -0.5; the shift is undone. Labels are
    ``[N, H, W, 4]`` or ``[N, 4, H, W]``. ``uids`` are numbers, a hash of each series that cannot be turned back; they
    still tell which cases belong together.
    """

    form = "v1 HDF5"

    def __init__(self, source: Path, options: Options) -> None:
        self.source = source
        self._file = None
        self._block: tuple[tuple[str, int], np.ndarray, np.ndarray] | None = None
        try:
            super().__init__(source, self._entries(), UNIT, options)
        except BaseException:
            self.close()  # who corrects the file can write to it
            raise

    def _entries(self) -> list[Entry]:
        source, file = self.source, self._open()
        entries, self._places = [], []
        groups = [part for part in PARTS if part in file] or ([""] if "images" in file else [])
        if not groups:
            found = ", ".join(sorted(file)[:5]) or "nothing"
            raise DataError(f"{source}: expected groups {', '.join(PARTS)} with images and labels, found {found}")
        lows = []
        for part in groups:
            group = file[part] if part else file
            count = self._check(group, part)
            ids, hashed = self._ids(group, part, count)
            width = len(str(max(count - 1, 1)))
            for i in range(count):
                name = f"{part}-{i:0{width}d}" if part else f"{i:0{width}d}"
                origin = {"group": part, "number": i}
                series, patient = (None, f"series-{ids[i]}") if hashed else (ids[i], None)
                entries.append(Entry(name, series, patient, part or None, origin))
                self._places.append((part, i))
            if count:
                steps = np.unique(np.linspace(0, count - 1, _LOOK).astype(int))
                lows.append(min(float(self._rows(group["images"], int(i), 1).min()) for i in steps))
        self._shift = 0.5 if lows and min(lows) < 0 else 0.0
        return entries

    def _open(self) -> Any:
        if not self._file:  # h5py: a closed file is false
            import h5py

            try:
                self._file = h5py.File(self.source, "r")
            except OSError as error:
                raise DataError(f"{self.source}: expected a whole HDF5 file, found: {error}") from None
        return self._file

    def _check(self, group: Any, part: str) -> int:
        where = f"{self.source}: group {part or '/'!r}"
        if missing := [key for key in ("images", "labels") if not hasattr(group, "keys") or key not in group]:
            raise DataError(f"{where}: expected images and labels, found no {missing[0]}")
        images, labels = group["images"].shape, group["labels"].shape
        if len(images) == 4 and 1 in (images[1], images[3]):
            images = tuple(n for i, n in enumerate(images) if i != (1 if images[1] == 1 else 3))
        if len(images) != 3 or len(labels) != 4 or self._layout(images, labels) is None:
            expected = f"images [N, H, W] and labels [N, H, W, {READERS}] or [N, {READERS}, H, W]"
            raise DataError(f"{where}: expected {expected}, found {list(group['images'].shape)} and {list(labels)}")
        return images[0]

    @staticmethod
    def _layout(images: tuple[int, ...], labels: tuple[int, ...]) -> str | None:
        if labels == (*images, READERS):
            return "last"
        return "first" if labels == (images[0], READERS, *images[1:]) else None

    def _ids(self, group: Any, part: str, count: int) -> tuple[Sequence[str | None], bool]:
        """What tells series apart, and whether it is but a number that somebody hashed them to."""
        name = next((name for name in _IDS if name in group), None)
        if name is None:
            return [None] * count, False
        values = group[name][()]
        if values.shape != (count,):
            where = f"{self.source}: {part}/{name}"
            raise DataError(f"{where}: expected one for each of {count} images, found {list(values.shape)}")
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist()]
        return texts, values.dtype.kind in "iu"

    def _rows(self, dataset: Any, start: int, count: int) -> np.ndarray:
        try:
            return np.asarray(dataset[start : start + count])
        except OSError as error:
            raise DataError(f"{self.source}: {dataset.name} cannot be read at {start}: {error}") from None

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part, i = self._places[index]
        key = part, i // _BLOCK
        if self._block is None or self._block[0] != key:
            group = self._open()[part] if part else self._open()
            images, labels = (self._rows(group[name], key[1] * _BLOCK, _BLOCK) for name in ("images", "labels"))
            images = images.reshape(len(images), *(n for n in images.shape[1:] if n != 1))
            if self._layout(images.shape, labels.shape) == "last":
                labels = np.moveaxis(labels, -1, 1)
            self._block = key, images, labels
        _, images, labels = self._block
        where = f"{self.source}: case {self.names[index]!r}"
        return unit_image(images[i % _BLOCK], where, self._shift), labels[i % _BLOCK]

    def close(self) -> None:
        if self._file:
            self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_block": None}

    def files(self) -> list[Path]:
        return [self.source]
