"""A whole data set in one ``.npz``: how small collections are often shared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.limits import too_large
from ambiseg._util.npz import open_npz
from ambiseg.data.case import Case, Cases, byte_units, digest
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.files import file_state
from ambiseg.data.sets.folder.settings import plain_names
from ambiseg.settings import ClassCount, ClassNames, MaskValue, Text, explain


class Arrays(Cases):
    """Images and masks of all cases as the arrays of one .npz file.

    Needed are ``image [N, H, W]`` (or ``[N, H, W, C]``) and ``masks [N, M, H, W]`` of class ids; ``name``, ``patient``
    and ``split``, one text per case, are used if they are there, any other array is ignored. An empty mask is an
    annotation: the reader saw nothing. Pickled objects are refused.

    Args:
        root: the file.
        classes: names of the class ids, or their number.
        title: what the data are; the file's name unless given.
        intensity: how raw values become input: ``{"low": -1000, "high": 400, "mean": -300, "std": 700}``.
        void: a class id that marks pixels that count nowhere.
        units: of the images, such as HU; those of bytes are known.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        classes: ClassCount | ClassNames = 2,
        title: Text | None = None,
        intensity: Intensity | dict[str, Any] | None = None,
        void: MaskValue | None = None,
        units: Text | None = None,
    ) -> None:
        self._path = Path(root)
        arrays = _read(self._path)
        self._images, self._masks, self._void = arrays["image"], arrays["masks"], void
        self.classes = plain_names(classes) if isinstance(classes, int) else tuple(classes)
        self.evaluated = tuple(range(1, len(self.classes)))
        self.title = title or self._path.stem
        self.channels = 1 if self._images.ndim == 3 else self._images.shape[3]
        if isinstance(intensity, dict):
            try:
                intensity = Intensity(**intensity)
            except ValidationError as error:
                raise ConfigError(f"intensity.{explain(error, Intensity, intensity)}") from None
        self.intensity = Intensity.for_dtype(self._images.dtype) if intensity is None else intensity
        self.units = byte_units(self._images.dtype, self.channels) if units is None else units
        count = len(self._images)
        self.names = arrays.get("name", [f"case-{i:0{len(str(count))}d}" for i in range(count)])
        self.patients = arrays.get("patient", self.names)
        self.declared = arrays.get("split")
        self._check()

    def __getitem__(self, index: int) -> Case:
        image, labels = self._images[index], self._masks[index]
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            found = "nan or infinite ones"
            raise DataError(f"{self._path}: case {self.names[index]!r}: expected finite numbers, found {found}")
        valid = None if self._void is None else (labels != self._void).all(0)
        return Case.of(
            image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0),
            labels if valid is None else np.where(valid, labels, 0),
            name=self.names[index],
            patient=self.patients[index],
            valid=valid,
        )

    def state(self) -> str:
        return digest(
            "arrays",
            f"{file_state(self._path)} {self.classes} {self._void}",
            self.title,
            repr(self.intensity),
            self.units,
        )

    def _check(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise DataError(f"{self._path}: expected a name of its own for every case, found some twice")
        for name, masks in zip(self.names, self._masks, strict=True):  # one at a time: sorting all takes their memory
            if masks.min() >= 0 and masks.max() < len(self.classes):
                continue
            beyond = masks[(masks < 0) | (masks >= len(self.classes))]
            if self._void is not None:
                beyond = beyond[beyond != self._void]
            if beyond.size:
                known = f"class ids below {len(self.classes)}"
                expected = known if self._void is None else f"{known} or void {self._void}"
                raise DataError(f"{self._path}: case {name!r}: expected {expected}, found {beyond.min()}")


def load_npz(path: Path, needed: Sequence[str], wanted: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays ``needed`` and those of ``wanted`` that are there; :class:`DataError` names the file."""
    if not path.is_file():
        raise DataError(f"{path}: expected an .npz file, found {'a folder' if path.is_dir() else 'no such file'}")
    try:
        with open(path, "rb") as handle:
            if handle.read(6) == b"\x93NUMPY":
                raise DataError(f"{path}: expected an .npz file of several arrays, found a single array")
            with open_npz(handle) as file:
                if missing := [key for key in needed if key not in file.names]:
                    raise DataError(f"{path}: expected the arrays {' and '.join(needed)}, found no {missing[0]}")
                return {key: file.read(key) for key in dict.fromkeys((*needed, *wanted)) if key in file.names}
    except (DataError, PermissionError):
        raise
    except Exception as error:  # a damaged archive fails in more ways than can be listed: zip, zlib, headers, memory
        found = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(f"{path}: expected an .npz file of plain arrays, found {found}") from None


def texts(path: Path, key: str, values: np.ndarray) -> list[str]:
    """One text per case, such as its name: from an array of texts, bytes or whole numbers."""
    try:
        found = [value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist()]
    except ValueError:  # half characters
        found = [""]
    if (
        values.ndim != 1
        or values.dtype.kind not in "USiu"
        or any(not text.isprintable() or not 0 < len(text) <= 512 for text in found)
    ):
        raise DataError(f"{path}: {key}: expected one plain text per case, found others in {str(values.dtype)[:40]}")
    return found


def _read(path: Path) -> dict[str, Any]:
    about = ("name", "patient", "split")
    arrays: dict[str, Any] = load_npz(path, ("image", "masks"), about)
    image, masks = arrays["image"], arrays["masks"]
    fits = image.ndim in (3, 4) and masks.ndim == 4 and len(image) == len(masks) and image.size and masks.size
    if not fits or image.shape[1:3] != masks.shape[2:]:
        shapes = f"{list(image.shape)} and {list(masks.shape)}"
        raise DataError(f"{path}: expected image [N, H, W(, C)] and masks [N, M, H, W], found {shapes}")
    if masks.dtype.kind not in "bui" or image.dtype.kind not in "buif" or image.dtype.itemsize > 8:
        found = f"{str(image.dtype)[:40]} and {str(masks.dtype)[:40]}"
        raise DataError(f"{path}: expected numbers and class ids, found {found}")
    channels = image.shape[3] if image.ndim == 4 else 1
    if problem := too_large(image.shape[1:3], channels=channels, itemsize=image.dtype.itemsize):
        raise DataError(f"{path}: {'; '.join(problem)}")
    for key in (key for key in about if key in arrays):
        if (shape := arrays[key].shape) != (len(image),):
            raise DataError(f"{path}: expected one {key} for each of {len(image)} cases, found {list(shape)}")
        arrays[key] = texts(path, key, arrays[key])
    return arrays
