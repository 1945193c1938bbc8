"""Equal arrays, found by their hashes: they are not compared with all others."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

_LONG = 2**16  # bytes of an array that is known by its digest, so that it need not be kept


def distinct(rows: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct row comes first, in this order, and for each row which of these it is.

    >>> first, which = distinct(np.array([[1, 0], [0, 0], [1, 0]]))
    >>> first.tolist(), which.tolist()
    ([0, 1], [0, 1, 0])
    """
    seen = dict[bytes, int]()
    keys = (row.tobytes() if row.nbytes < _LONG else blake2b(np.ascontiguousarray(row).data).digest() for row in rows)
    which = np.array([seen.setdefault(key, len(seen)) for key in keys])
    return np.flatnonzero(np.diff(np.maximum.accumulate(which), prepend=-1)), which
