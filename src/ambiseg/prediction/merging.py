"""Equal masks become one, and masks are put into the order of their weights in place."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import numpy as np
from torch import Tensor


def heaviest_first(labels: Tensor, mass: list[float], merge: bool) -> tuple[list[int], list[float], list[int]]:
    """The first draw and the weight of each distinct mask, heaviest first; and for each draw, which of these it is.

    >>> import torch
    >>> labels = torch.tensor([[[0]], [[1]], [[1]]], dtype=torch.uint8)
    >>> heaviest_first(labels, [0.5, 0.25, 0.5], merge=True)
    ([1, 0], [0.75, 0.5], [1, 0, 0])
    """
    keys: list[Any] = list(range(len(labels)))
    if merge:
        keys = [hashlib.blake2b(np.ascontiguousarray(one.numpy()).data).digest() for one in labels]
    total = defaultdict(float)
    for key, weight in zip(keys, mass, strict=True):
        total[key] += weight
    ranked = sorted(total, key=lambda key: -total[key])  # stable: of equal weights, the one drawn first
    return list(map(keys.index, ranked)), [total[key] for key in ranked], list(map(ranked.index, keys))


def ordered(labels: Tensor, order: list[int]) -> Tensor:
    """``labels[order]`` of distinct numbers in the memory of ``labels``: a second copy of all masks would not fit.

    >>> import torch
    >>> ordered(torch.tensor([5, 6, 7, 8]), [2, 0, 3]).tolist()
    [7, 5, 8]
    """
    count, order = len(order), [*order, *sorted(set(range(len(labels))).difference(order))]
    for start in range(len(order)):
        place, first = start, None
        while order[place] != place:  # around a cycle: each takes the one that it is to be
            first = labels[start].clone() if first is None else first
            source, order[place] = order[place], place
            labels[place] = first if source == start else labels[source]
            place = source
    return labels[:count]
