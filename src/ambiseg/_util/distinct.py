"""Equal rows of an array, found by their hashes: rows are not compared with all others."""

from __future__ import annotations

import numpy as np


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct row comes first, in this order, and for each row which of these it is.

    >>> first, which = distinct(np.array([[1, 0], [0, 0], [1, 0]]))
    >>> first.tolist(), which.tolist()
    ([0, 1], [0, 1, 0])
    """
    if rows.dtype == bool:
        rows = np.packbits(rows.reshape(len(rows), -1), axis=1)
    held = memoryview(rows.tobytes())  # whose parts are hashed where they are
    size, seen = held.nbytes // len(rows), dict[memoryview, int]()
    which = np.array([seen.setdefault(held[i : i + size], len(seen)) for i in range(0, held.nbytes, size)])
    return np.flatnonzero(np.diff(np.maximum.accumulate(which), prepend=-1)), which
