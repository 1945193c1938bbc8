"""Pixels that masks share, counted for every pair without a loop: 64 pixels to a word on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.distinct import distinct
from ambiseg.masks import MaskDistribution, exact

_CACHED = 2**16  # words, 512 kB: pairs of masks compared at a time, so that they stay in the cache
_LABELS = 2**26  # that are looked at at a time for equal masks
PIXELS = 2**22  # of an image whose masks are compared at a time


def encode(masks: MaskDistribution, cls: int, valid: Tensor | None) -> Tensor:
    """One class's masks as rows that :func:`intersections` can multiply.

    On the CPU 64 pixels share a word, so that an intersection is an AND and a bit count; elsewhere rows are 0/1
    floats and an intersection is a dot product. Both count exactly.
    """
    if not packs(masks.labels):
        rows = (masks.labels == cls).flatten(2)
        return (rows if valid is None else rows & valid.flatten(1)[:, None]).float()
    rows = (masks.labels.numpy() == cls).reshape(len(masks), masks.count, -1)
    if valid is not None:
        rows &= valid.numpy().reshape(len(masks), 1, -1)
    packed = np.packbits(np.ascontiguousarray(rows), axis=-1)
    words = np.zeros((*packed.shape[:2], -(-packed.shape[2] // 8) * 8), np.uint8)
    words[..., : packed.shape[2]] = packed
    return torch.from_numpy(words.view(np.int64))


def packs(labels: Tensor) -> bool:
    """Whether rows are words, not floats."""
    return labels.is_cpu


def areas(x: Tensor) -> Tensor:
    """Pixels of each row, ``[B, N]``."""
    if x.is_floating_point():
        return exact(x.sum(2))
    return exact(torch.from_numpy(_count_bits(x.numpy()).astype(np.float64)))


def intersections(x: Tensor, y: Tensor) -> Tensor:
    """Pixels shared by every pair of rows, ``[B, N, W] × [B, M, W] -> [B, N, M]``, as exact floating-point counts.

    Rows are 0/1 floats, or words of 64 pixels (int64, on the CPU).
    """
    if x.is_floating_point():  # float32 holds every count of a slice exactly; volumes are added slice by slice
        slices = zip(x.split(2**24, 2), y.split(2**24, 2), strict=True)
        return sum((exact(s @ t.transpose(1, 2)) for s, t in slices), start=torch.zeros((), device=x.device))
    if x.shape[1] > y.shape[1]:
        return intersections(y, x).transpose(1, 2)
    symmetric, p, q = x is y, x.numpy(), y.numpy()
    drawn = np.bitwise_or.reduce(p, (0, 1)) != 0  # most words are background in every mask: leave them out
    p, q = p[..., drawn], q[..., drawn]
    return exact(torch.from_numpy(_shared(p, q, symmetric)))


def _shared(p: np.ndarray, q: np.ndarray, symmetric: bool) -> np.ndarray:
    """:func:`intersections` of words. What there is more of, words or columns, is side by side in memory."""
    (B, n, words), m = p.shape, q.shape[1]
    order = (0, 1, 2) if words > m else (0, 2, 1)
    p, q = (np.ascontiguousarray(x.transpose(order)).transpose(order) for x in (p, q))
    counts = np.empty((B, n, m))
    rows = max(1, min(n, _CACHED // max(1, m * words)))
    images = max(1, _CACHED // max(1, rows * m * words))
    for b in range(0, B, images):
        for i in range(0, n, rows):
            first = i if symmetric else 0
            found = _count_bits(p[b : b + images, i : i + rows, None] & q[b : b + images, None, first:])
            counts[b : b + images, i : i + rows, first:] = found
            if symmetric:
                counts[b : b + images, first:, i : i + rows] = found.transpose(0, 2, 1)
    return counts


def equal(masks: MaskDistribution) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each image where each distinct mask comes first, in this order, and for each mask which of these it is.

    Draws are often equal, and what is computed of one holds for all. Void pixels make no difference. Computed once.

    >>> [part.tolist() for part in equal(MaskDistribution(torch.tensor([[[[0, 1]], [[1, 1]], [[0, 1]]]])))[0]]
    [[0, 1], [0, 1, 0]]
    """
    return masks.kept("equal", lambda: [_equal(masks, b) for b in range(len(masks))])


def _equal(masks: MaskDistribution, b: int) -> tuple[np.ndarray, np.ndarray]:
    labels = masks.labels[b].flatten(1).cpu().numpy()
    valid = None if masks.valid is None else masks.valid[b].flatten().cpu().numpy()
    anywhere = np.bitwise_or.reduce(labels, 0)
    several, step = bool(anywhere.max() > 1), max(1, _LABELS // labels.shape[1])
    some = anywhere > 0 if valid is None else (anywhere > 0) & valid

    def rows() -> Iterator[np.ndarray]:
        for i in range(0, len(labels), step):
            part = labels[i : i + step]
            part = part[:, some] if several or valid is not None else part
            yield from part if several else np.packbits(part, axis=1)

    return distinct(rows())


def shared_by_distinct(masks: MaskDistribution, cls: int, rows: Tensor | None = None) -> Tensor:
    """Pixels that every pair of the D distinct masks of one image shares in a class, ``[1, D, D]``. Computed once, and
    not to be changed.

    Args:
        rows: these masks as words, if the caller has them: of any pixels that hold all of the class, in any order.
    """

    def count() -> Tensor:
        first = torch.from_numpy(equal(masks)[0][0])
        parts = (encode(x, cls, x.valid)[:, first] for x in masks.bands(PIXELS)) if rows is None else (rows,)
        return sum((intersections(x, x) for x in parts), start=torch.zeros(()))

    return masks.kept(("shared", cls), count)


def _count_bits(words: np.ndarray) -> np.ndarray:
    """Set bits of each row of 64-bit words, summed in the narrowest type that holds them: it is the fastest."""
    total = np.uint16 if words.shape[-1] * 64 < 2**16 else np.uint64
    return np.bitwise_count(words.view(np.uint64)).sum(-1, dtype=total)
