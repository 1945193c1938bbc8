"""One ``.npz`` with all cases, as small collections of crops are shared."""

from __future__ import annotations

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Progress
from ambiseg.data.sets.arrays import Arrays, load_npz
from ambiseg.data.sets.lidc.crops import BYTES, LUNG, READERS, UNIT, Crop, Crops, unit_image

_KEPT = ("z", "pixel_spacing", "corner_xy", "nodule", "n_raters", "thickness")


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
        found = load_npz(self.source, (), ("series_uid", *_KEPT))
        extra = {key: values for key, values in found.items() if len(values) == len(arrays)}
        return [
            Crop(
                name,
                place=i,
                series=str(extra["series_uid"][i]) if "series_uid" in extra else None,
                patient=arrays.patients[i] if arrays.patients is not arrays.names else None,
                part=None if arrays.declared is None else arrays.declared[i],
                origin={key: extra[key][i].tolist() for key in _KEPT if key in extra},
            )
            for i, name in enumerate(arrays.names)
        ]

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        case = self._arrays[index]
        image = case.image[0]
        return unit_image(image, self.where(index)) if image.dtype.kind == "f" else image, case.labels
