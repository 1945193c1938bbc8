"""Objects of masks, found by their runs of pixels: how many there are, the longest diameter and the width across it.

A run is a row of neighbouring pixels. Masks are laid out one after the other with a background pixel behind each row
(and a background row behind each slice), so that a run is two positions, begin and end, and its neighbours in the next
row are those that overlap it one row further. No pixel is looked at but to find the runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_AT_ONCE = 1 << 22  # numbers that are computed with at a time
_NEAR = (1, 2, 4)  # rows up and down between which a corner of an outline must stand out


class _Runs(NamedTuple):
    """Of masks ``[N, H, W]`` or ``[N, D, H, W]``: R runs, in order."""

    begin: np.ndarray  # [R] place of the first pixel
    end: np.ndarray  # [R] place behind the last one
    row: int  # places from row to row
    slice: int  # places from slice to slice


def measure_objects(masks: np.ndarray, down: float = 1.0, across: float = 1.0) -> np.ndarray:
    """Diameter, width and number of objects of every mask, ``[3, N]``.

    The first two are of the object, in one slice, with the longest diameter. Objects touch nowhere, not even at a
    corner; in a volume they go through the slices.

    Args:
        masks: ``[N, H, W]`` or ``[N, D, H, W]`` bool.
        down, across: size of a pixel.

    >>> measure_objects(np.array([[[1, 1, 1], [0, 0, 0], [0, 0, 1]]], bool)).round(3).tolist()
    [[3.162], [1.054], [2.0]]
    """
    result = np.zeros((3, len(masks)))
    runs = _runs(masks)
    if not len(runs.begin):
        return result
    mask = runs.begin // (runs.slice * (masks.shape[1] + 1 if masks.ndim == 4 else 1))
    object_ = _connected(runs, (runs.row,))
    whole = object_
    if masks.ndim == 4:
        whole = _connected(runs, (runs.row, runs.slice - runs.row, runs.slice, runs.slice + runs.row))
    result[2] = np.bincount(mask[_firsts(whole)], minlength=len(masks))
    owner = mask[_firsts(object_)]
    found = _axes(runs, object_, down, across)
    best = np.lexsort((found[0], owner))  # the longest of each mask comes last, and stays
    result[:2, owner[best]] = found[:, best]
    return result


def _runs(masks: np.ndarray) -> _Runs:
    shape = (len(masks), *(side + 1 for side in masks.shape[1:]))
    places = np.zeros(1 + int(np.prod(shape)), bool)  # one before the first
    places[1:].reshape(shape)[tuple(slice(side) for side in masks.shape)] = masks
    ends = np.flatnonzero(places[1:] != places[:-1])
    return _Runs(ends[::2], ends[1::2], shape[-1], shape[-1] * shape[-2])


def _connected(runs: _Runs, steps: tuple[int, ...]) -> np.ndarray:
    """The object of each run, ``[R]``, numbered in the order of their first runs: runs are joined that touch when one
    of them is moved by a step."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    moves, R = np.array(steps), len(runs.begin)
    first = np.searchsorted(runs.end, runs.begin[:, None] + moves)  # [R, steps]
    count = np.searchsorted(runs.begin, runs.end[:, None] + moves, "right") - first
    behind = count.cumsum()
    touching = np.arange(behind[-1]) + np.repeat(first.ravel() - (behind - count.ravel()), count.ravel())
    rows = np.append(0, behind[len(steps) - 1 :: len(steps)])
    return connected_components(csr_array((np.ones(len(touching)), touching, rows), (R, R)), directed=False)[1]


def _firsts(numbers: np.ndarray) -> np.ndarray:
    """Where each of the numbers 0, 1, … comes first, in numbers that appear in this order."""
    return np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))


def _axes(runs: _Runs, object_: np.ndarray, down: float, across: float) -> np.ndarray:
    """Diameter and width of each object, ``[2, K]``."""
    order = object_.argsort(kind="stable")
    begin, end, object_ = runs.begin[order], runs.end[order], object_[order]
    row = begin // runs.row
    # Of a row of an object the first run begins it, and the last one ends it.
    first = np.flatnonzero((np.diff(object_, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
    last = np.append(first[1:], len(row)) - 1
    owner, row = object_[first], row[first]
    left, right = begin[first] - row * runs.row, end[last] - row * runs.row
    start = np.flatnonzero(np.diff(owner, prepend=-1))
    height = np.diff(start, append=len(owner))  # an object has a run in each of its rows
    line = np.arange(len(owner)) - np.repeat(start, height)
    by_height = height.argsort(kind="stable")  # objects of about one height are measured together
    rank, K = np.empty(len(height), int), len(height)
    rank[by_height] = np.arange(K)
    found, done = np.zeros((2, K)), 0
    while done < K:
        takes = (height[by_height[done:]] + 1.0) ** 2 * np.arange(1, K - done + 1)
        stop = done + max(1, int(np.searchsorted(takes, _AT_ONCE, "right")))
        some = slice(None) if stop - done == K else (rank[owner] >= done) & (rank[owner] < stop)
        place = rank[owner[some]] - done, line[some]
        sides = np.full((2, stop - done, height[by_height[stop - 1]]), np.inf)  # −right, so that both are least
        sides[0][place], sides[1][place] = left[some], -right[some]
        found[:, by_height[done:stop]] = _axes_of(sides, down, across)
        done = stop
    return found


def _axes_of(sides: np.ndarray, down: float, across: float) -> np.ndarray:
    """Of objects with the pixels left … right − 1 in each of their rows: ``[2, K, H]`` left and −right, infinite below
    the last row.

    The outline's corners lie on the H + 1 lines between rows of pixels. On each line only the leftmost and the
    rightmost can be an end of the longest distance, and of two lines the farthest pair is a left and a right one:

        diameter² = max_{y, y′} (right(y) − left(y′))² + (y − y′)²

    Both ends are corners of the convex hull, so other points are left out as far as that is cheap to see.
    """
    none = np.full((*sides.shape[:2], 1), np.inf)
    sides = np.minimum(np.concatenate([sides, none], 2), np.concatenate([none, sides], 2))  # of each line
    x, y = (part.reshape(2, -1, part.shape[-1]) for part in _corners(sides.reshape(-1, sides.shape[-1])))
    (left, right), (y_left, y_right) = (x[0] * across, -x[1] * across), y * down
    squares = right[:, :, None] - left[:, None, :]
    squares *= squares
    apart = y_right[:, :, None] - y_left[:, None, :]
    apart *= apart
    squares += apart
    k, flat = np.arange(len(left)), squares.reshape(len(left), -1)
    farthest = flat.argmax(1)
    diameter = np.sqrt(flat[k, farthest])
    i, j = np.divmod(farthest, left.shape[1])
    a, b = np.stack([right[k, i], y_right[k, i]], 1), np.stack([left[k, j], y_left[k, j]], 1)
    along = (b - a) / diameter[:, None]
    x, y = np.hstack([left, right]) - a[:, :1], np.hstack([y_left, y_right]) - a[:, 1:]  # corners, from one end
    s, t = x * along[:, :1] + y * along[:, 1:], y * along[:, :1] - x * along[:, 1:]
    return np.stack([diameter, _longest_chord(s, t)])


def _corners(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the points of outlines ``[M, L]`` that may be corners of the convex hull, in their order; rows are
    filled up with the first of them.

    A corner lies outside of the middle of a point above it and another as far below it.
    """
    kept = np.isfinite(x)
    for step in _NEAR:
        inner, ends = x[:, step:-step], x[:, : -2 * step] + x[:, 2 * step :]
        kept[:, step:-step] &= 2 * inner[:, : ends.shape[1]] < ends
    count = kept.sum(1)
    row, y = np.divmod(np.flatnonzero(kept), x.shape[1])
    first = count.cumsum() - count
    places = np.repeat(y[first, None], count.max(), 1)
    places[row, np.arange(len(y)) - np.repeat(first, count)] = y
    return np.take_along_axis(x, places, 1), places.astype(float)


def _longest_chord(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The longest chord along t of the convex hull of points (s, t), ``[K, P] -> [K]``, by duality:

        max {τ: p and p + (0, τ) in the hull} = min_α [max_p (t_p + α s_p) − min_p (t_p + α s_p)]

    The right side is convex and piecewise linear in α: where the tangents at both ends of an interval around its
    minimum meet is the next α, until the function is on the tangents there. Each step finds another piece, so it ends.
    """
    found, open_ = np.zeros(len(s)), np.arange(len(s))
    extent = s.max(1) - s.min(1)
    # The tangents far to the left and to the right are those of the two ends of the longest distance, where t is 0.
    low, high, at_low, at_high = -extent, extent.copy(), np.zeros(len(s)), np.zeros(len(s))
    while len(open_):
        alpha = (at_low - at_high) / (high - low)
        value = t + alpha[:, None] * s
        row, most, least = np.arange(len(open_)), value.argmax(1), value.argmin(1)
        height = value[row, most] - value[row, least]
        found[open_] = height
        piece = s[row, most] - s[row, least]
        left = piece < 0
        done = (height <= at_low + low * alpha + 1e-9 * extent) | (piece <= low) | (piece >= high)
        for slope, offset, some in ((low, at_low, left), (high, at_high, ~left)):
            np.copyto(slope, piece, where=some)
            np.copyto(offset, height - piece * alpha, where=some)
        if done.any():
            open_, (s, t) = open_[~done], (part[~done] for part in (s, t))
            extent, low, high, at_low, at_high = (part[~done] for part in (extent, low, high, at_low, at_high))
    return found
