"""Pixels that masks share, counted for every pair without a loop: 64 pixels to a word on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution, exact

_CACHED = 2**16  # words, 512 kB: pairs of masks compared at a time, so that they stay in the cache


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
    p, q = (np.ascontiguousarray(x[..., drawn]) for x in (p, q))  # indexing alone would leave them transposed
    (B, n, words), m = p.shape, q.shape[1]
    counts = np.zeros((B, n, m))
    rows = max(1, min(n, _CACHED // max(1, m * words)))
    images = max(1, _CACHED // max(1, rows * m * words))
    for b in range(0, B, images):
        for i in range(0, n, rows):
            first = i if symmetric else 0
            pairs = p[b : b + images, i : i + rows, None] & q[b : b + images, None, first:]
            counts[b : b + images, i : i + rows, first:] = _count_bits(pairs)
    if symmetric:
        counts = np.triu(counts) + np.triu(counts, 1).transpose(0, 2, 1)
    return exact(torch.from_numpy(counts))


def _count_bits(words: np.ndarray) -> np.ndarray:
    """Set bits of each row of 64-bit words, summed in the narrowest type that holds them: it is the fastest."""
    total = np.uint16 if words.shape[-1] * 64 < 2**16 else np.uint64
    return np.bitwise_count(words.view(np.uint64)).sum(-1, dtype=total)
