"""What a simulated CT shows around a nodule: lung texture, vessels and airways, the chest wall, noise.

Everything is a function of the place in mm with random numbers of its own, so that one scene can be rendered in any
window and at any pixel spacing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

_TILE = 512  # pixels of a periodic tile; every use draws another window of it
_FEATURE = 4  # tile pixels per feature: fine enough for linear interpolation
_PIECES = 5  # straight pieces per vessel
EXTENT = 50.0  # mm from the nodule to where vessels stop being drawn


@dataclass(frozen=True, eq=False)
class Grid:
    """Pixel centres in mm: ``x [W]`` to the right and ``y [H]`` downwards from the scene's origin."""

    x: np.ndarray
    y: np.ndarray
    spacing: float


@functools.cache
def _tile(grainy: bool, turned: bool = False) -> np.ndarray:
    """``[T, T]`` periodic Gaussian noise of unit variance: smooth, or with the spectrum of CT noise.

        power(f) ∝ exp(-(f/f₀)²)    or    f² · exp(-(f/f₁)²)

    The second is the ramp of filtered back-projection under a soft window.
    """
    if turned:
        return np.ascontiguousarray(_tile(grainy).T)
    frequency = np.hypot(np.fft.fftfreq(_TILE)[:, None], np.fft.rfftfreq(_TILE)[None]) * _FEATURE
    amplitude = np.exp(-((frequency / 0.45) ** 2) / 2)
    if grainy:
        amplitude = (frequency + 0.04) * np.exp(-((frequency / 0.55) ** 2) / 2)
    white = np.random.Generator(np.random.PCG64(int(grainy))).standard_normal((_TILE, _TILE))
    tile = np.fft.irfft2(np.fft.rfft2(white) * amplitude, (_TILE, _TILE))
    return ((tile - tile.mean()) / tile.std()).astype(np.float32)


def texture(grid: Grid, rng: Generator, scale: float, stretch: float = 1.0, grainy: bool = False) -> np.ndarray:
    """``[H, W]`` noise of unit variance with features of ``scale`` mm, ``stretch`` times as wide as they are high.

    It is a window of a periodic pattern: the value at a place in mm does not depend on the pixels.

    >>> coarse, fine = (Grid(np.arange(n) / n, np.arange(n) / n, 1 / n) for n in (8, 16))
    >>> same = [texture(grid, np.random.default_rng(0), scale=2.0) for grid in (coarse, fine)]
    >>> bool(np.allclose(same[0], same[1][::2, ::2], atol=1e-5))
    True
    """
    turn = int(rng.integers(8))
    signs = (1 if turn & 2 else -1, 1 if turn & 4 else -1)
    left, top = rng.random(2) * _TILE
    return _interpolate(
        _tile(grainy, bool(turn & 1)),
        (signs[0] * grid.y * (_FEATURE / scale) + top) % _TILE,
        (signs[1] * grid.x * (_FEATURE / (scale * stretch)) + left) % _TILE,
    )


def _interpolate(field: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Linear, on the lattice of ``rows`` by ``columns`` of a periodic ``field``."""
    i, j = rows.astype(np.intp), columns.astype(np.intp)
    down, right = (rows - i).astype(np.float32)[:, None], (columns - j).astype(np.float32)
    above, below = (i % _TILE * _TILE)[:, None], ((i + 1) % _TILE * _TILE)[:, None]
    left, next_ = j % _TILE, (j + 1) % _TILE
    upper, lower = field.take(above + left), field.take(below + left)  # flat indices are the fastest
    upper += (field.take(above + next_) - upper) * right
    lower += (field.take(below + next_) - lower) * right
    upper += (lower - upper) * down
    return upper


# -- tubes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tubes:
    """Straight pieces of tube: ``start`` and ``end [K, 3]`` in mm (z is 0 in the slice), ``radius [K, 2]`` at both."""

    start: np.ndarray
    end: np.ndarray
    radius: np.ndarray

    def chosen(self, rng: Generator, share: float) -> np.ndarray:
        """``[K]`` bool, True for all pieces of a ``share`` of the vessels of :func:`tree`."""
        return np.repeat(rng.random(len(self.radius) // _PIECES) < share, _PIECES)


def occupancy(tubes: Tubes, grid: Grid, thickness: float) -> np.ndarray:
    """``[H, W]`` share of the slice, in depth, that lies inside a tube; of several tubes the largest.

    A line through the slice at distance ρ from the axis of a tube of radius r, which rises at angle φ, is inside for

        2 · √(r² - ρ²) / cos φ,

    of which the part within ±thickness/2 counts. An oblique vessel fades where it leaves the slice. A tube that is
    thin for the pixels is drawn wider and fainter, with about the same sum over pixels.

    >>> grid = Grid(np.array([-2.0, 0.0, 2.0]), np.array([0.0]), 0.1)
    >>> upright = Tubes(np.array([[0.0, 0.0, -9.0]]), np.array([[0.0, 0.0, 9.0]]), np.array([[1.0, 1.0]]))
    >>> occupancy(upright, grid, thickness=2.0).round(2)
    array([[0., 1., 0.]], dtype=float32)
    >>> level = Tubes(np.array([[-5.0, 0.0, 0.0]]), np.array([[5.0, 0.0, 0.0]]), np.array([[0.5, 0.5]]))
    >>> occupancy(level, grid, thickness=2.0).round(2)
    array([[0.5, 0.5, 0.5]], dtype=float32)
    """
    shown = np.zeros((len(grid.y), len(grid.x)), np.float32)
    half, widest = thickness / 2, np.maximum(tubes.radius[:, 0], tubes.radius[:, 1]) + grid.spacing
    seen = np.arange(len(widest))
    # Few tubes come near the slice, so depth is tested first and the other two axes only for the rest.
    for axis, first, last in ((2, -half, half), (0, grid.x[0], grid.x[-1]), (1, grid.y[0], grid.y[-1])):
        a, b, margin = tubes.start[seen, axis], tubes.end[seen, axis], widest[seen]
        seen = seen[(np.minimum(a, b) - margin < last) & (np.maximum(a, b) + margin > first)]
    low, high = np.minimum(tubes.start[seen], tubes.end[seen]), np.maximum(tubes.start[seen], tubes.end[seen])
    start, run = tubes.start[seen], tubes.end[seen] - tubes.start[seen]
    level = np.hypot(run[:, 0], run[:, 1])
    rise = np.hypot(level, run[:, 2])
    upright = level < 0.15 * rise  # drawn as a disc where it is closest to the middle of the slice
    closest = np.clip(-start[:, 2] / np.where(upright, run[:, 2], 1), 0, 1)
    start = np.where(upright[:, None], start + closest[:, None] * run, start)
    run[upright] = 0
    slant, steep = rise / np.maximum(level, 0.15 * rise), 1 / np.maximum(level**2, 1e-6)
    radius = np.hypot(tubes.radius[seen], 0.5 * grid.spacing)
    faint = (tubes.radius[seen] / radius).min(1) ** 2 / thickness
    reach = radius.max(1)
    left, right = np.searchsorted(grid.x, [low[:, 0] - reach, high[:, 0] + reach])
    top, bottom = np.searchsorted(grid.y, [low[:, 1] - reach, high[:, 1] + reach])
    numbers = np.column_stack([start, run, radius, steep, slant, faint]).tolist()
    for row, first, last, above, below in zip(
        numbers, left.tolist(), right.tolist(), top.tolist(), bottom.tolist(), strict=True
    ):
        ax, ay, az, dx, dy, dz, begin, end, by_length, by_slant, weight = row
        window = shown[above:below, first:last]
        x, y = grid.x[first:last] - ax, (grid.y[above:below] - ay)[:, None]
        along = x * (dx * by_length) + y * (dy * by_length)
        np.minimum(np.maximum(along, 0, out=along), 1, out=along)
        square = (begin + along * (end - begin)) ** 2 - (x - along * dx) ** 2 - (y - along * dy) ** 2
        chord = np.sqrt(np.maximum(square, 0, out=square)) * by_slant
        z = az + along * dz
        inside = np.minimum(z + chord, half) - np.maximum(z - chord, -half)
        np.maximum(window, inside * weight, out=window)
    return shown


def tree(rng: Generator, towards: np.ndarray, calibre: float) -> tuple[Tubes, Tubes]:
    """Vessels of a block of lung around the origin: trunks with their branches and twigs; and the trunks alone.

    They run at random but for a drift ``towards`` the periphery (a unit vector in the slice), where they are finer:

        radius ∝ calibre · exp(-place · towards / 45 mm)

    The block is 2 · :data:`EXTENT` wide, and thicker than any vessel that reaches the slice in its middle.
    """
    count, length, generations = 84, 30.0, []
    start = (rng.random((count, 3)) - 0.5) * [2 * EXTENT, 2 * EXTENT, 34]
    heading = rng.standard_normal((count, 3)) * [1, 1, 0.8] + 0.6 * np.append(towards, 0)
    width = calibre * np.exp(0.5 * rng.standard_normal(count))
    for _ in range(3):
        heading = heading / np.sqrt(np.einsum("ij,ij->i", heading, heading))[:, None]
        bends = np.cumsum(0.28 * rng.standard_normal((len(start), _PIECES, 3)), 1)
        steps = (heading[:, None] + bends) * (length / _PIECES)
        paths = np.cumsum(np.concatenate([start[:, None], steps], 1), 1)
        radius = width[:, None] * np.linspace(1, 0.75, _PIECES + 1)
        radius = radius * np.exp(np.clip(paths[..., :2] @ towards, -40, 40) / -45)
        ends = np.stack([radius[:, :-1], radius[:, 1:]], -1)
        generations.append(Tubes(paths[:, :-1].reshape(-1, 3), paths[:, 1:].reshape(-1, 3), ends.reshape(-1, 2)))
        # two branches from each, finer and shorter
        joint = rng.integers(1, _PIECES + 1, (len(start), 2))
        start = paths[np.arange(len(paths))[:, None], joint].reshape(-1, 3)
        heading = np.repeat(heading, 2, 0) + 0.75 * rng.standard_normal((len(start), 3))
        width = np.repeat(width, 2) * (0.55 + 0.3 * rng.random(len(start)))
        length *= 0.6
    return join(*generations), generations[0]


def join(*parts: Tubes) -> Tubes:
    """All tubes in one."""
    return Tubes(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("start", "end", "radius")))


def spokes(rng: Generator, inner: float, length: np.ndarray, radius: np.ndarray) -> Tubes:
    """Tubes that lead away from the origin, evenly to all sides of the slice, and thin out; ``length``, ``radius [K]``.

    They start ``inner`` mm from the origin.
    """
    count = len(length)
    angle = (np.arange(count) + rng.random(count)) * (2 * math.pi / max(count, 1))
    ray = np.stack([np.cos(angle), np.sin(angle), np.zeros(count)], 1)
    aside = np.stack([-ray[:, 1], ray[:, 0], np.zeros(count)], 1)
    run = ray + 0.15 * aside * rng.standard_normal((count, 1))
    run[:, 2] = 0.12 * rng.standard_normal(count)
    return Tubes(inner * ray, inner * ray + run * length[:, None], np.stack([radius, 0.35 * radius], 1))


# -- the wall of the lung ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Wall:
    """Where the lung ends: a circle through ``normal · distance``, around the lung or, bulging, around the other side.

    Args:
        kind: "chest" with ribs, muscle and fat, "mediastinum", or "dome" for the heart and the diaphragm.
        normal: unit vector out of the lung.
        distance: mm from the origin to the wall along it.
        radius: of the circle, in mm.

    >>> wall = Wall("chest", np.array([1.0, 0.0]), distance=5.0, radius=80.0)
    >>> wall.depth(np.array([0.0, 5.0, 9.0]), np.array([0.0, 0.0, 0.0]))
    array([-5.,  0.,  4.])
    """

    kind: str
    normal: np.ndarray
    distance: float
    radius: float

    @property
    def centre(self) -> np.ndarray:
        return self.normal * (self.distance + (self.radius if self.kind == "dome" else -self.radius))

    def depth(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """How far behind the wall a place is, in mm; negative in the lung."""
        away = np.hypot(x - self.centre[0], y - self.centre[1])
        return self.radius - away if self.kind == "dome" else away - self.radius

    def behind(self, grid: Grid, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
        """``[H, W]`` share of the pixel behind the wall, and Hounsfield units there."""
        x, y = grid.x, grid.y[:, None]
        depth = self.depth(x, y) + 0.35 * texture(grid, rng, 7.0)
        # The heart moves and the diaphragm is cut at a slant: their edge is not as sharp.
        blur = max(grid.spacing, 0.6 + 3.0 * rng.random() ** 2 if self.kind == "dome" else 0.4 + 0.8 * rng.random())
        share = np.clip(depth / blur + 0.5, 0, 1).astype(np.float32)
        if not share.any():
            return share, share
        muscle = rng.normal(42, 14)
        fields = texture(grid, rng, 9.0), texture(grid, rng, 3.5)
        if self.kind == "dome":
            fat = _step(fields[0] - rng.uniform(0.8, 3), 0.3)
            return share, muscle + 10 + 10 * fields[1] + fat * (-110 - muscle)
        if self.kind == "mediastinum":
            contrast = rng.choice([0.0, 130.0, 200.0])
            fat = _step(-fields[0] - 0.5, 0.5)
            return share, muscle + (-95 - muscle) * fat + contrast * _step(fields[0] - 0.35, 0.5) + 12 * fields[1]
        period, phase = rng.uniform(12, 30), rng.uniform(0, 2 * math.pi)
        bands = np.sin(2 * math.pi * depth / period + phase + 0.8 * fields[0]) + 0.25 * fields[1]
        fat = _step(bands - rng.uniform(-0.5, 1.0), 0.55) * _step(depth - 1.2, 0.5)
        hounsfield = muscle + (-98 - muscle) * fat + 12 * fields[1]
        ribs, bone = self._ribs(x, y, depth, rng)
        bone = bone * (0.8 + 0.25 * fields[1])  # neither cortex nor marrow is even
        hounsfield = hounsfield + ribs * (bone - hounsfield)
        skin = rng.uniform(28, 110)  # where the body ends
        return share, hounsfield + _step(depth - skin, 0.4) * (-995 - hounsfield)

    def _ribs(self, x: np.ndarray, y: np.ndarray, depth: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
        angle = np.arctan2(y - self.centre[1], x - self.centre[0]) - np.arctan2(*self.normal[::-1])
        along = ((angle + math.pi) % (2 * math.pi) - math.pi) * self.radius
        period, begin = rng.uniform(32, 60), rng.uniform(0, 60)
        length, height = rng.uniform(7, 22), rng.uniform(2.8, 5.2)
        middle = height + rng.uniform(0.8, 3.0)
        turn = rng.normal(0, 0.12)  # ribs are cut at a slant, so their section is not quite parallel to the wall
        offset = (along + begin) % period - period / 2
        level = ((offset / length) ** 4 + ((depth - middle - turn * offset) / height) ** 2) ** 0.4
        inside = (1 - level) * height
        cortex = _step(rng.uniform(0.7, 1.5) - inside + 0.3 * np.sin(0.7 * along + begin), 0.35)
        marrow, shell = rng.uniform(20, 230), rng.uniform(560, 1150)
        return _step(inside, 0.25), marrow + (shell - marrow) * cortex


def _step(x: np.ndarray, width: float) -> np.ndarray:
    """0 below, 1 above, and a ramp of ±``width`` around 0."""
    return np.clip(x / (2 * width) + 0.5, 0, 1)
