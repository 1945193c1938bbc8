"""The part of an image that is shown large: around everything that anyone marked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MARGIN, _LEAST = 0.3, 24  # of the longer side of what is marked, on each side of it; pixels that are shown at least
_WHOLE = 0.8  # of an image's height and width: what is larger is shown as a whole


@dataclass(frozen=True)
class Crop:
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right`` of an image of ``size`` (height, width)."""

    top: int
    left: int
    bottom: int
    right: int
    size: tuple[int, int]

    @staticmethod
    def of(size: tuple[int, int]) -> Crop:
        """The whole image."""
        return Crop(0, 0, *size, size)

    @property
    def whole(self) -> bool:
        """Whether it is all of the image."""
        return self == Crop.of(self.size)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """This part of ``[…, H, W]``."""
        return pixels[..., self.top : self.bottom, self.left : self.right]

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, top, width and height in per cent of the image."""
        high, wide = self.size
        box = self.left / wide, self.top / high, (self.right - self.left) / wide, (self.bottom - self.top) / high
        return 100 * box[0], 100 * box[1], 100 * box[2], 100 * box[3]


def crop_around(marked: np.ndarray) -> Crop:
    """A crop that holds all of ``marked [H, W]`` with a margin, square where the image allows it.

    The whole image where nothing is marked, or where little would be left out.

    >>> marked = np.zeros((128, 128), bool)
    >>> marked[20:40, 60:70] = True
    >>> crop_around(marked)
    Crop(top=14, left=49, bottom=46, right=81, size=(128, 128))
    """
    size = marked.shape[0], marked.shape[1]
    rows, columns = (np.flatnonzero(marked.any(axis)) for axis in (1, 0))
    if not len(rows):
        return Crop.of(size)
    longer = max(np.ptp(rows), np.ptp(columns)) + 1
    side = max(_LEAST, int(np.ceil((1 + 2 * _MARGIN) * longer)))
    (top, bottom), (left, right) = (
        _around(int(found[0]), int(found[-1]) + 1, side, most)
        for found, most in zip((rows, columns), size, strict=True)
    )
    crop = Crop(top, left, bottom, right, size)
    return Crop.of(size) if bottom - top >= _WHOLE * size[0] and right - left >= _WHOLE * size[1] else crop


def _around(start: int, end: int, side: int, most: int) -> tuple[int, int]:
    """An interval of length ``side`` around the middle of [start, end), moved and cut to lie in [0, most)."""
    first = min(max(0, (start + end - side) // 2), max(0, most - side))
    return first, min(most, first + side)
