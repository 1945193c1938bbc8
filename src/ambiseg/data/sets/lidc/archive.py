"""One ``.npz`` with all cases, such as small collections of crops are shared in."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.lidc.crops import BYTES, LUNG, READERS, UNIT, Crops, Entry, Options, unit_image

_KEPT = ("z", "pixel_spacing", "corner_xy", "nodule", "n_raters", "thickness")


class Archive(Crops):
    """``image [N, H, W]`` and ``masks [N, 4, H, W]``, and one of each a case: ``patient``, ``split``, ``series_uid`` …

    Whole numbers below 0 are Hounsfield units, bytes are grey values, fractions are in [0, 1].
    """

    form = "npz"

    def __init__(self, source: Path, options: Options) -> None:
        self._arrays = arrays = Arrays(source)
        first = arrays[0]
        if arrays.channels != 1 or len(first.readers) != READERS:
            found = f"{arrays.channels} channels and {len(first.readers)} masks"
            raise DataError(f"{source}: expected grey images with {READERS} masks, found {found}")
        kind = first.image.dtype
        intensity = BYTES if kind == np.uint8 else UNIT if kind.kind == "f" else LUNG
        extra = _extra(source, len(arrays))
        entries = [
            Entry(
                name,
                series=str(extra["series_uid"][i]) if "series_uid" in extra else None,
                patient=arrays.patients[i] if arrays.patients is not arrays.names else None,
                part=None if arrays.declared is None else arrays.declared[i],
                origin={key: extra[key][i].tolist() for key in _KEPT if key in extra},
            )
            for i, name in enumerate(arrays.names)
        ]
        super().__init__(source, entries, intensity, options)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        case = self._arrays[index]
        image = case.image[0]
        if image.dtype.kind == "f":
            image = unit_image(image, f"{self.source}: case {self.names[index]!r}")
        return image, case.labels

    def files(self) -> list[Path]:
        return [self.source]


def _extra(source: Path, count: int) -> dict[str, np.ndarray]:
    with np.load(source, allow_pickle=False) as file:
        found = {key: file[key] for key in ("series_uid", *_KEPT) if key in file.files}
    return {key: values for key, values in found.items() if len(values) == count}
