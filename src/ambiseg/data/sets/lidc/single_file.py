"""LIDC in one file: the v1 pickle, and ``.npz`` archives; hdf5.py has HDF5 files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.text import some
from ambiseg.data.case import Progress
from ambiseg.data.sets.arrays import Arrays, load_npz, texts
from ambiseg.data.sets.lidc.crops import (
    BYTES,
    LUNG,
    READERS,
    UNIT,
    Crop,
    Crops,
    check_shapes,
    unit_image,
)
from ambiseg.data.sets.lidc.safe_pickle import StoredArray, index, kind, text_of

_KEYS = ("image", "masks", "series_uid")
_KEPT = ("z", "pixel_spacing", "corner_xy", "nodule", "n_raters", "thickness")


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
            raise DataError(f"{self.source}: expected a dictionary of cases, found a {kind(found)}")
        return [_crop(self.source, name, value) for name, value in found.items()]

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        where = self.where(index)
        if self._file is None:
            self._file = open(self.source, "rb")  # noqa: SIM115  open for as long as cases are read; see __getstate__
        try:
            image, *masks = (array.read(self._file) for array in self.crops[index].place)
        except (ValueError, EOFError) as error:
            raise DataError(f"{where}: expected its pixels, found {error or 'the end of the file'}") from None
        return unit_image(image, where), np.stack(masks) if len(masks) > 1 else masks[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


def _crop(source: Path, name: str, value: Any) -> Crop:
    """One item of the dictionary, checked as far as that is possible without its pixels."""
    where = f"{source}: case {name[:80]!r}"
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a dictionary with {', '.join(_KEYS)}, found a {kind(value)}")
    if missing := [key for key in _KEYS if key not in value]:
        raise DataError(f"{where}: expected {', '.join(_KEYS)}, found no {missing[0]}")
    image, masks, series = (value[key] for key in _KEYS)
    if not isinstance(series, str | bytes):
        raise DataError(f"{where}: expected a text as series_uid, found a {kind(series)}")
    series = text_of(series)
    if not (name.isprintable() and series.isprintable() and name and series):
        raise DataError(f"{where}: expected a name and a series_uid that can be printed, found {series[:80]!r}")
    masks = masks if isinstance(masks, list) else [masks]
    for array in (image, *masks[: READERS + 1]):
        if not isinstance(array, StoredArray) or array.dtype.kind not in "biuf":
            found = f"one of {array.dtype}" if isinstance(array, StoredArray) else f"a {kind(array)}"
            raise DataError(f"{where}: expected arrays of numbers as image and masks, found {found}")
    count = masks[0].shape[0] if len(masks) == 1 and len(masks[0].shape) == 3 else len(masks)
    if count != READERS:
        raise DataError(f"{where}: expected {READERS} masks, found {count}")
    if len(shapes := {mask.shape for mask in masks}) > 1:
        raise DataError(f"{where}: expected masks of one size, found {some(sorted(shapes), joint=' and ')}")
    check_shapes(where, image.shape, masks[0].shape if len(masks) == 1 else (count, *masks[0].shape), image.dtype)
    return Crop(name, (image, *masks), series=series, origin={"key": name})


class Archive(Crops):
    """``image [N, H, W]`` and ``masks [N, 4, H, W]``, and per case ``patient``, ``split``, ``series_uid`` …

    Whole numbers below 0 are Hounsfield units, bytes are grey values, fractions are in [0, 1].
    """

    form = "npz"
    suffixes = (".npz",)

    def index(self, progress: Progress | None) -> list[Crop]:
        self._arrays = arrays = Arrays(self.source)
        first = arrays[0]
        if arrays.channels != 1 or len(first.readers) != READERS:
            found = f"{arrays.channels} channels and {len(first.readers)} masks"
            raise DataError(f"{self.source}: expected grey images with {READERS} masks, found {found}")
        kind = first.image.dtype
        self.intensity = BYTES if kind == np.uint8 else UNIT if kind.kind == "f" else LUNG
        self.units = "8-bit grey" if kind == np.uint8 else "0 to 1" if kind.kind == "f" else "HU"
        found = load_npz(self.source, (), ("series_uid", *_KEPT))
        extra = {
            key: self._values(key, values)
            for key, values in found.items()
            if values.ndim and len(values) == len(arrays)
        }
        series = extra.get("series_uid")
        return [
            Crop(
                name,
                place=i,
                series=str(series[i]) if series else None,
                patient=arrays.patients[i] if arrays.patients is not arrays.names else None,
                part=None if arrays.declared is None else arrays.declared[i],
                origin={key: extra[key][i] for key in _KEPT if key in extra},
            )
            for i, name in enumerate(arrays.names)
        ]

    def _values(self, key: str, values: np.ndarray) -> list[Any]:
        """One for each case, ready for JSON: a text, a number, or a few of them."""
        if values.dtype.kind in "USO" or key == "series_uid":
            return texts(self.source, key, values)
        if values.dtype.kind not in "biuf" or values[0].size > 16 or not np.isfinite(values).all():
            found = f"{str(values.dtype)[:40]} of shape {list(values.shape)}"
            raise DataError(f"{self.source}: {key}: expected a few finite numbers per case, found {found}")
        return values.tolist()

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        case = self._arrays[index]
        image = case.image[0]
        return unit_image(image, self.where(index)) if image.dtype.kind == "f" else image, case.labels
