"""Maps of many pixels, some pixels at a time: what NumPy does to a whole map may take many times its memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PIXELS = 1 << 22
"""Pixels that are worked on at a time, where nothing depends on the number."""


def bands(length: int, most: int = PIXELS) -> Iterator[slice]:
    """Slices that cover 0 … ``length`` in order, each of at most ``most``; of nothing, one that is empty.

    >>> list(bands(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(start, min(start + most, length)) for start in range(0, max(length, 1), most))


def looked_up(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``table[index]`` of a map of row numbers, for which NumPy would widen the whole map to 64 bits.

    >>> looked_up(np.array([5, 7]), np.array([[0, 1, 1]], np.uint8)).tolist()
    [[5, 7, 7]]
    """
    if index.size <= PIXELS:
        return table[index]
    found = np.empty((*index.shape, *table.shape[1:]), table.dtype)
    flat, rows = found.reshape(index.size, *table.shape[1:]), index.reshape(-1)
    for band in bands(index.size):
        flat[band] = table[rows[band]]
    return found


def counted(numbers: np.ndarray, minlength: int = 0) -> np.ndarray:
    """``np.bincount`` of numbers of any shape.

    >>> counted(np.array([[0, 2], [2, 2]], np.uint8)).tolist()
    [1, 0, 3]
    """
    flat, total = numbers.reshape(-1), np.zeros(minlength, np.intp)
    for band in bands(flat.size):
        found = np.bincount(flat[band], minlength=len(total))
        found[: len(total)] += total
        total = found
    return total
