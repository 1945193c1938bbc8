"""The embedded data set: lung nodules that up to four radiologists outlined, on simulated CT."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.random import PCG64, Generator

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, digest
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.nodules import outlines
from ambiseg.data.sets.nodules.anatomy import Grid
from ambiseg.data.sets.nodules.outlines import Native, Nodule
from ambiseg.data.sets.nodules.rendering import VERSION, Field, render

SLOTS = 4  # readers who looked at every scan
_JITTER = 2.0  # mm, the largest distance of a nodule's middle from the middle of its image


class Nodules(Cases):
    """Outlines and ratings of the LIDC's radiologists, one slice per nodule, on CT that is **simulated**.

    The masks are real: what up to four readers drew on the slice where the sum of their areas is largest. The pixels
    are not: a seeded simulation draws lung, vessels, chest wall and a nodule that fit the outlines and the ratings.
    Methods can be tried on it without a download. Results on it say nothing about patients.

    Each case has four masks. Four readers looked at every scan, so one who drew nothing on the slice has an empty mask.
    Masks that are not empty come first. The readers are exchangeable: ``reader_1`` of two cases need not be the same
    person.

    Args:
        size: height and width in pixels.
        spacing: of the pixels, in mm. Where it is the scanner's own, a mask is exactly what the reader drew.

    Images of all sizes and spacings show one scene: a larger one shows more of it, a finer one the same in more
    detail. Vessels are drawn up to 50 mm from the nodule.

    >>> nodules = Nodules()
    >>> nodules.title, len(nodules), nodules.patients[0]
    ('LIDC nodules on simulated CT', 2638, 'LIDC-IDRI-0001')
    >>> case = nodules[0]
    >>> case.image.shape, case.image.dtype, case.labels.sum((1, 2)).tolist()
    ((1, 64, 64), dtype('int16'), [1840, 1773, 1767, 1759])
    """

    def __init__(self, size: int = 64, spacing: float = 0.5) -> None:
        if not 1 <= size <= 4096:
            raise DataError(f"nodules: size must be from 1 to 4096 pixels, found {size}")
        if not 0.05 <= spacing <= 5:
            raise DataError(f"nodules: spacing must be from 0.05 to 5 mm, found {spacing:g}")
        self.size, self.spacing = size, float(spacing)
        self.title = "LIDC nodules on simulated CT"
        self.classes = ("background", "nodule")
        self.evaluated = (1,)
        self.channels = 1
        self.units = "HU"
        self.intensity = Intensity(low=-1000, high=400, mean=-300, std=700)
        self._nodules = outlines.load()
        self.names = [f"nodule-{i + 1:04d}" for i in range(len(self._nodules))]
        self.patients = [nodule.patient for nodule in self._nodules]

    def __getitem__(self, index: int) -> Case:
        index = range(len(self))[index]
        native = self.native(index)
        middle = _middle(native.masks)
        origin = (native.corner[0] + middle[0], native.corner[1] + middle[1])
        field, grid = Field(native, origin), self._grid(index)
        masks = np.zeros((SLOTS, self.size, self.size), bool)
        masks[: len(field.distance)] = field.at(grid) > 0
        image = render(self._nodules[index], field, index, grid)[None]
        return Case.of(image, masks, name=self.names[index], patient=self.patients[index])

    def record(self, index: int) -> Nodule:
        """Everything that is real about case ``index``: patient, series, slice, the readers' outlines and ratings.

        >>> nodule = Nodules().record(0)
        >>> nodule.series[-12:], nodule.z, nodule.ratings.tolist()[0]
        ('059720603192', -117.5, [5, 3, 4, 5, 6])
        """
        return self._nodules[index]

    def native(self, index: int) -> Native:
        """The four masks on the pixels that the readers saw, with their place in the slice of 512×512.

        >>> native = Nodules().native(0)
        >>> native.masks.shape, native.corner, native.spacing
        ((4, 47, 39), (298, 340), 0.703125)
        """
        return outlines.native(self._nodules[index], SLOTS)

    def marked(self, index: int) -> int:
        """How many readers marked the nodule on any slice; on the slice of the case some may have drawn nothing.

        >>> nodules = Nodules()
        >>> np.bincount([nodules.marked(i) for i in range(len(nodules))]).tolist()
        [0, 771, 490, 481, 896]
        """
        return len(self._nodules[index].marks)

    def state(self) -> str:
        """Hash of what images are made of: the packed file, the simulation's version, size and spacing."""
        return digest(hashlib.sha256(outlines.PACKED.read_bytes()).hexdigest(), *self._settings())

    def image_digest(self, index: int, case: Case | None = None) -> str:
        """Hash of what the image is made of; its pixels may be rounded differently on other machines."""
        nodule = self._nodules[index]
        drawn: list[np.ndarray | np.generic] = []
        for mark in nodule.marks:
            drawn.append(mark.ratings)
            drawn += [part for outline in mark.outlines for part in (np.bool_(outline.included), outline.points)]
        return digest(self.names[index], np.array([nodule.spacing, nodule.thickness]), *drawn, *self._settings())

    def digest(self, index: int, case: Case | None = None) -> str:
        """Hash of what the case is made of."""
        return digest(self.image_digest(index), self.patients[index])

    def _settings(self) -> tuple[str, np.ndarray]:
        return f"simulation {VERSION}", np.array([self.size, self.spacing])

    def _grid(self, index: int) -> Grid:
        """Pixel centres around the nodule's middle, shifted a little: by whole native pixels, to keep them in line."""
        rng, step = Generator(PCG64([index, 99])), self._nodules[index].spacing
        angle, away = rng.uniform(0, 2 * math.pi), _JITTER * math.sqrt(rng.random())
        along = (np.arange(self.size) - self.size // 2) * self.spacing
        x, y = (round(away * part / step) * step for part in (math.cos(angle), math.sin(angle)))
        return Grid(along - x, along - y, self.spacing)


def _middle(masks: np.ndarray) -> tuple[int, int]:
    """x, y of the native pixel at the centre of mass of all masks; in integers, so that all machines round alike."""
    _, y, x = np.nonzero(masks)
    x_middle, y_middle = ((2 * int(place.sum()) + len(place)) // (2 * len(place)) for place in (x, y))
    return x_middle, y_middle
