"""LIDC v1: ``data_lidc.pickle``, 15,096 crops of 128 × 128 in one dictionary."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.text import some
from ambiseg.data.case import Progress
from ambiseg.data.sets.lidc.crops import READERS, Crop, Crops, unit_image
from ambiseg.data.sets.lidc.safe_pickle import StoredArray, index, text_of

_KEYS = ("image", "masks", "series_uid")


class Pickle(Crops):
    """A dictionary: name -> ``{"image": [H, W] in [0, 1], "masks": four [H, W] of 0 and 1, "series_uid": text}``.

    No code in the file runs, and only one case at a time is in memory: see
    :mod:`ambiseg.data.sets.lidc.safe_pickle`.
    """

    form = "v1 pickle"
    suffixes = (".pickle", ".pkl")
    _file: BinaryIO | None = None

    def index(self, progress: Progress | None) -> list[Crop]:
        found = index(self.source)
        if not isinstance(found, dict):
            raise DataError(f"{self.source}: expected a dictionary of cases, found a {type(found).__name__}")
        return [_crop(text_of(key), value, f"{self.source}: case {text_of(key)!r}") for key, value in found.items()]

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        where = self.where(index)
        if self._file is None:
            self._file = open(self.source, "rb")  # noqa: SIM115  open for as long as cases are read; see __getstate__
        try:
            image, *masks = (array.read(self._file) for array in self.crops[index].place)
        except (ValueError, EOFError) as error:
            raise DataError(f"{where}: expected its pixels, found {error or 'the end of the file'}") from None
        if len(shapes := {mask.shape for mask in masks}) > 1:
            raise DataError(f"{where}: expected masks of one size, found {some(sorted(shapes), joint=' and ')}")
        return unit_image(image, where), np.stack(masks) if len(masks) > 1 else masks[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


def _crop(name: str, value: Any, where: str) -> Crop:
    """One item of the dictionary; a key of Python 2 may be bytes."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a dictionary with {', '.join(_KEYS)}, found a {type(value).__name__}")
    items = {text_of(key): item for key, item in value.items()}
    if missing := [key for key in _KEYS if key not in items]:
        raise DataError(f"{where}: expected {', '.join(_KEYS)}, found no {missing[0]}")
    image, masks, series = (items[key] for key in _KEYS)
    masks = list(masks) if isinstance(masks, list | tuple) else [masks]
    if not isinstance(series, str | bytes):
        raise DataError(f"{where}: expected a text as series_uid, found a {type(series).__name__}")
    for array in (image, *masks):
        if not isinstance(array, StoredArray):
            raise DataError(f"{where}: expected arrays as image and masks, found a {type(array).__name__}")
    count = masks[0].shape[0] if len(masks) == 1 and len(masks[0].shape) == 3 else len(masks)
    if count != READERS:
        raise DataError(f"{where}: expected {READERS} masks, found {count}")
    return Crop(name, (image, *masks), series=text_of(series), origin={"key": name})
