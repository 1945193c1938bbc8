"""LIDC v1: ``data_lidc.pickle``, 15,096 crops of 128 × 128 in one dictionary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.crops import READERS, UNIT, Crops, Entry, Options, unit_image
from ambiseg.data.sets.lidc.machine import Raw, Stored, text_of
from ambiseg.data.sets.lidc.unpickle import index

_KEYS = ("image", "masks", "series_uid")


class Pickle(Crops):
    """A dictionary: a name -> ``{"image": [H, W] in [0, 1], "masks": four [H, W] of 0 and 1, "series_uid": text}``.

    No code in the file runs, and only one case at a time is in memory: see :mod:`ambiseg.data.sets.lidc.unpickle`.
    """

    form = "v1 pickle"

    def __init__(self, source: Path, options: Options) -> None:
        found = index(source)
        if not isinstance(found, dict):
            raise DataError(f"{source}: expected a dictionary of cases, found a {type(found).__name__}")
        entries, self._arrays = [], []
        for key, value in found.items():
            name = text_of(key)
            image, masks, series = _checked(value, f"{source}: case {name!r}")
            entries.append(Entry(name, series=series, origin={"key": name}))
            self._arrays.append((image, masks))
        self._file: BinaryIO | None = None
        super().__init__(source, entries, UNIT, options)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, masks = self._arrays[index]
        where = f"{self.source}: case {self.names[index]!r}"
        try:
            file = self._open()
            pixels = image.read(file)
            marked = [mask.read(file) for mask in masks]
        except (ValueError, EOFError) as error:
            raise DataError(f"{where}: expected its pixels, found {error or 'the end of the file'}") from None
        shapes = {mask.shape for mask in marked}
        if len(shapes) > 1:
            raise DataError(f"{where}: expected masks of one size, found {' and '.join(map(str, sorted(shapes)))}")
        labels = np.stack(marked) if len(marked) > 1 else marked[0]
        return unit_image(pixels, where), labels

    def _open(self) -> BinaryIO:
        if self._file is None or self._file.closed:
            self._file = open(self.source, "rb")  # noqa: SIM115  open for as long as cases are read; see __getstate__
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            file.close()

    def files(self) -> list[Path]:
        return [self.source]


def _checked(value: Any, where: str) -> tuple[Stored, list[Stored], str]:
    """The arrays of one case, and its series; a key of Python 2 may be bytes."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a dictionary with {', '.join(_KEYS)}, found a {type(value).__name__}")
    said = {text_of(key): item for key, item in value.items()}
    if missing := [key for key in _KEYS if key not in said]:
        raise DataError(f"{where}: expected {', '.join(_KEYS)}, found no {missing[0]}")
    image, masks, series = (said[key] for key in _KEYS)
    masks = list(masks) if isinstance(masks, list | tuple) else [masks]
    if isinstance(series, Raw) or not isinstance(series, str | bytes):
        raise DataError(f"{where}: expected a text as series_uid, found a {type(series).__name__}")
    for array in (image, *masks):
        if not isinstance(array, Stored):
            raise DataError(f"{where}: expected arrays as image and masks, found a {type(array).__name__}")
    count = masks[0].shape[0] if len(masks) == 1 and len(masks[0].shape) == 3 else len(masks)
    if count != READERS:
        raise DataError(f"{where}: expected {READERS} masks, found {count}")
    return image, masks, text_of(series)
