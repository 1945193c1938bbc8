"""The raw values of a data set: their distribution, how far single images stray from it, and which images do not fit.

A network that was trained on Hounsfield units predicts something from any numbers, and nothing in its masks shows that
they were bytes. What tells is the distribution of the training pixels, which is saved with every model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = (0.5, 5.0, 25.0, 50.0, 75.0, 95.0, 99.5)
"""Percentiles that are kept, in percent."""
_SIDE = 64
_MOST = 512  # images that a distribution is made of
_JUDGED = (1, 3, 5)  # of LEVELS: 5, 50 and 95 %; the outer ones are a few pixels, and the others lie between
_MARGIN = 0.5  # of the middle 90 % of all pixels: how far beyond the training images' range a percentile may lie
_FACTOR = 4.0  # how many times wider or narrower the values of an image may be than those of any training image


@dataclass(frozen=True)
class Values:
    """Percentiles (``LEVELS``) of the raw values of each channel.

    Attributes:
        pooled: ``[C][7]`` of all pixels together.
        low, high: ``[C][7]`` of single images: the smallest and the largest that is usual, the 0.5th and the 99.5th
            percentile over the images.
        span: ``[C][2]`` the same two of the width of an image's middle 90 %.
        images: how many were looked at.

    >>> scans = [np.random.default_rng(i).normal(-700, 200, (1, 64, 64)) for i in range(20)]
    >>> values = Values.of(scans)
    >>> values.problem(scans[3]), values.problem(np.zeros((1, 8, 8)))
    (None, 'all its pixels are 0')
    >>> values.problem(np.random.default_rng(0).integers(0, 256, (1, 64, 64)))
    'its values are mostly 11 to 244, those of the training images -1030 to -371'
    """

    pooled: tuple[tuple[float, ...], ...]
    low: tuple[tuple[float, ...], ...]
    high: tuple[tuple[float, ...], ...]
    span: tuple[tuple[float, ...], ...]
    images: int

    @staticmethod
    def of(images: Iterable[np.ndarray]) -> Values:
        """Of images ``[C, H, W]``, at least one."""
        some = [_numbers(thinned(image)).reshape(len(image), -1) for image in images]
        each = np.stack([np.percentile(pixels, LEVELS, axis=1).T for pixels in some])  # [N, C, 7]
        pooled = np.percentile(np.concatenate(some, 1), LEVELS, axis=1).T
        low, high = np.percentile(each, (0.5, 99.5), axis=0)
        span = np.percentile(each[..., 5] - each[..., 1], (0.5, 99.5), axis=0).T
        return Values(_rows(pooled), _rows(low), _rows(high), _rows(span), len(some))

    def problem(self, *slices: np.ndarray) -> str | None:
        """What is odd about the values of an image ``[C, H, W]``; ``None``: nothing. Of a volume, what is odd about the
        first odd slice if nine of ten are: some slices of a volume may show air alone.

        A channel does not fit if all its pixels have one value, if one of the percentiles 5, 50 and 95 lies farther
        beyond those of all training images than half the width of their values, or if its values are four times
        wider or narrower than in any training image.
        """
        found = [odd for odd in map(self._problem, slices) if odd]
        return found[0] if found and len(found) >= 0.9 * len(slices) else None

    def _problem(self, image: np.ndarray) -> str | None:
        pixels = thinned(image[: len(self.pooled)]).reshape(len(self.pooled), -1)
        for c, found in enumerate(np.percentile(pixels, LEVELS, axis=1).T):
            where = "" if len(pixels) == 1 else f" of channel {c}"
            if pixels[c].min() == pixels[c].max() and self.span[c][0] > 0:
                return f"all its pixels{where} are {pixels[c][0]:.4g}"
            if not self._fits(c, found):
                own, usual = (f"{_short(q[1])} to {_short(q[5])}" for q in (found, self.pooled[c]))
                return f"its values{where} are mostly {own}, those of the training images {usual}"
        return None

    def _fits(self, c: int, found: np.ndarray) -> bool:
        margin = _MARGIN * (self.pooled[c][5] - self.pooled[c][1])
        inside = all(self.low[c][i] - margin <= found[i] <= self.high[c][i] + margin for i in _JUDGED)
        narrowest, widest = self.span[c]
        return inside and narrowest / _FACTOR <= found[5] - found[1] <= widest * _FACTOR


def some_of(indices: Sequence[int], most: int = _MOST) -> list[int]:
    """At most 512 of these numbers, evenly spaced: reading all of a large data set would take long."""
    step = max(1.0, len(indices) / most)
    return [indices[int(i * step)] for i in range(min(len(indices), most))]


def thinned(image: np.ndarray) -> np.ndarray:
    """``[C, H, W]`` with every k-th pixel of every k-th row: about 64 × 64 are enough for percentiles."""
    step = max(1, round(max(image.shape[1:]) / _SIDE))
    return image[:, ::step, ::step].astype(np.float32)


def _numbers(pixels: np.ndarray) -> np.ndarray:
    """Without what is no number or would overflow: percentiles are written as JSON, which has neither.

    >>> _numbers(np.array([np.nan, 2.5, -np.inf]))
    array([ 0.0e+00,  2.5e+00, -1.0e+30])
    """
    return np.clip(np.nan_to_num(pixels, nan=0.0), -1e30, 1e30)


def _rows(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{value:.6g}") for value in row) for row in values.tolist())


def _short(value: float) -> str:
    """Three digits, or all before the point.

    >>> _short(-1029.6), _short(0.01234)
    ('-1030', '0.0123')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
