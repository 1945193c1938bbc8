"""A simulated CT slice around a nodule that real readers outlined."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import PCG64, Generator

from ambiseg.data.sets.nodules.anatomy import Grid, Tubes, Wall, join, occupancy, spokes, texture, tree
from ambiseg.data.sets.nodules.outlines import RATINGS, Native, Nodule

VERSION = "2"  # of the simulation: raise it when the same nodule gives another picture
# Each has its own random numbers.
_PARTS = ("scan", "lung", "walls", "tissue 1", "tissue 2", "vessels", "nodule", "noise")
_MARGIN = 10  # native pixels around the outlines, for the nodule's edge to fade in


class Field:
    """Signed distances to the edge of each drawn mask in mm, positive inside, on the native pixels and between them.

        s_m = ±(d - ½ pixel),    d the distance to the nearest pixel of the other side

    On a native pixel its sign is the mask. Between pixels it is interpolated, which gives masks at any spacing.

    Args:
        native: at least one of its masks is not empty; those that are empty are left out.
        origin: native x, y of the point from which places are counted.

    >>> row = Native(np.array([[[False, True, True, False]]]), corner=(10, 20), spacing=0.5)
    >>> Field(row, origin=(10, 20)).at(Grid(np.array([0, 0.25, 0.5, 1.0, 1.5]), np.array([0.0]), 0.5))
    array([[[-0.25,  0.  ,  0.25,  0.25, -0.25]]], dtype=float32)
    """

    def __init__(self, native: Native, origin: tuple[int, int]) -> None:
        from scipy.ndimage import distance_transform_edt

        drawn = native.masks[native.masks.any((1, 2))]
        padded = np.pad(drawn, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))
        # To the nearest pixel of the other side: one of the two distances is 0.
        signed = [np.asarray(distance_transform_edt(m)) - np.asarray(distance_transform_edt(~m)) for m in padded]
        self.distance = ((np.stack(signed) - np.where(padded, 0.5, -0.5)) * native.spacing).astype(np.float32)
        self.spacing = native.spacing
        self.corner = (native.corner[0] - _MARGIN - origin[0], native.corner[1] - _MARGIN - origin[1])

    def at(self, grid: Grid) -> np.ndarray:
        """``[M, H, W]`` at the pixels of ``grid``; beyond the margin, as at its edge."""
        rows, down = self._places(grid.y, self.corner[1], self.distance.shape[1])
        columns, right = self._places(grid.x, self.corner[0], self.distance.shape[2])
        level = self.distance[:, rows] * (1 - down)[:, None] + self.distance[:, rows + 1] * down[:, None]
        return level[:, :, columns] * (1 - right) + level[:, :, columns + 1] * right

    def _places(self, mm: np.ndarray, corner: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        place = np.clip(mm / self.spacing - corner, 0, count - 1)
        first = np.minimum(place.astype(np.intp), count - 2)
        return first, (place - first).astype(np.float32)

    @property
    def points(self) -> np.ndarray:
        """``[P, 2]`` x, y in mm of all native pixels that any reader marked."""
        y, x = np.nonzero((self.distance > 0).any(0))
        return np.stack([x + self.corner[0], y + self.corner[1]], 1) * self.spacing

    @property
    def radius(self) -> float:
        """In mm, of the disc that has the mean area of the masks."""
        return math.sqrt(float((self.distance > 0).mean(0).sum()) / math.pi) * self.spacing


def render(nodule: Nodule, field: Field, number: int, grid: Grid) -> np.ndarray:
    """``[H, W]`` int16 Hounsfield units; the same in every call.

    The outlines, the ratings and the thickness of the slice are real; every pixel is simulated. The steps are those of
    a scanner: a scene in mm, averaged through the slice, blurred by the scanner, then correlated noise. Neither the
    scene nor the noise depends on ``grid``.

    Args:
        field: the readers' masks.
        number: of the nodule; its random numbers come from it.
        grid: pixel centres around the field's origin.

    >>> from ambiseg.data.sets.nodules import outlines
    >>> nodule = outlines.load()[0]
    >>> native = outlines.native(nodule)
    >>> places = np.arange(-16, 16) * 0.5
    >>> image = render(nodule, Field(native, native.corner), 0, Grid(places, places, 0.5))
    >>> image.shape, image.dtype, bool(image.min() >= -1024)
    ((32, 32), dtype('int16'), True)
    """
    from scipy.ndimage import gaussian_filter

    rngs = {part: Generator(PCG64([number, i])) for i, part in enumerate(_PARTS)}
    scan = rngs["scan"]
    blur = scan.uniform(0.38, 0.62)  # mm, of the scanner
    blood = max(scan.normal(45, 15), 0) + 110 * (scan.random() < 0.35)  # with and without contrast agent
    pad = math.ceil(3 * blur / grid.spacing)
    wide = Grid(_extend(grid.x, grid.spacing, pad), _extend(grid.y, grid.spacing, pad), grid.spacing)
    thickness = min(max(nodule.thickness, 0.6), 3.0)

    walls = _walls(rngs["walls"], field)
    lung = _parenchyma(rngs["lung"], wide)
    image = _vessels(rngs["vessels"], wide, lung, walls[0], thickness, blood, field.radius)
    image = np.maximum(image, _nodule(rngs["nodule"], wide, lung, nodule, field, thickness))
    for i, wall in enumerate(walls, 1):
        share, hounsfield = wall.behind(wide, rngs[f"tissue {i}"])
        image = image + share * (hounsfield - image)
    image = gaussian_filter(image, blur / grid.spacing, truncate=3.0)[pad:-pad, pad:-pad]
    image = image + _noise(rngs["noise"], grid, image)
    return np.rint(np.clip(image, -1024, 3071)).astype(np.int16)


def _extend(places: np.ndarray, spacing: float, pad: int) -> np.ndarray:
    more = spacing * np.arange(1, pad + 1)
    return np.concatenate([places[0] - more[::-1], places, places[-1] + more])


def _walls(rng: Generator, field: Field) -> list[Wall]:
    """The wall nearest to the nodule, and sometimes another one opposite; neither cuts into an outline."""
    kinds, points = ("chest", "mediastinum", "dome"), field.points
    angles = (np.arange(16) + rng.random()) * (math.pi / 8)
    normals = np.stack([np.cos(angles), np.sin(angles)], 1)
    kind = kinds[int(np.searchsorted([0.72, 0.86], rng.random()))]
    if rng.random() < 0.24:
        # It touches the nodule, more likely on a side where more of the outline lies close to the tangent.
        heights = points @ normals.T
        contact = (heights > heights.max(0) - 1.0).sum(0) ** 2
        side, gap = int(rng.choice(16, p=contact / contact.sum())), rng.normal(0.0, 0.3)
    else:
        side, gap = int(rng.integers(16)), 0.8 + rng.exponential(13.0)
    walls = [_tangent(kind, normals[side], gap, rng.uniform(45, 120), points)]
    if rng.random() < 0.3:
        other = normals[(side + rng.integers(5, 12)) % 16]
        kind = kinds[rng.integers(3)]
        walls.append(_tangent(kind, other, 10 + rng.exponential(14.0), rng.uniform(45, 120), points))
    return walls


def _tangent(kind: str, normal: np.ndarray, gap: float, radius: float, points: np.ndarray) -> Wall:
    """The wall that stays ``gap`` mm away from all points."""
    wall = Wall(kind, normal, float((points @ normal).max()) + gap, radius)
    short = float(wall.depth(points[:, 0], points[:, 1]).max()) + gap  # it is bent, and may meet them at its sides
    return Wall(kind, normal, wall.distance + short, radius)


def _parenchyma(rng: Generator, grid: Grid) -> np.ndarray:
    """``[H, W]`` lung alone: mottled, denser towards the back, at times with emphysema or haze."""
    x, y = grid.x, grid.y[:, None]
    lung = rng.normal(-868, 42) + rng.normal(0, 0.5) * x + rng.uniform(0, 1.2) * y
    mottle = 24 * texture(grid, rng, 1.6) + 14 * texture(grid, rng, 4.0) + 12 * texture(grid, rng, 12.0)
    lung = lung + math.exp(rng.normal(0, 0.3)) * mottle
    kind = rng.random()
    if kind < 0.15:  # emphysema
        lung = lung - 70 * np.maximum(texture(grid, rng, 6.0) - 0.2, 0)
    elif kind < 0.27:  # haze
        lung = lung + 120 * np.maximum(texture(grid, rng, 9.0) - 0.3, 0)
    if rng.random() < 0.1:  # a fissure
        angle, place, bend = rng.uniform(0, math.pi), rng.uniform(-25, 25), rng.normal(0, 0.004)
        across = x * math.cos(angle) + y * math.sin(angle)
        along = y * math.cos(angle) - x * math.sin(angle)
        lung = lung + rng.uniform(60, 220) * np.exp(-(((across - place - bend * along**2) / 0.6) ** 2) / 2)
    return np.maximum(lung, -985)


def _vessels(
    rng: Generator, grid: Grid, lung: np.ndarray, wall: Wall, thickness: float, blood: float, radius: float
) -> np.ndarray:
    """``[H, W]`` lung with its vessels, some of which lead to the nodule, and airways beside a few of the larger."""
    vessels, trunks = tree(rng, wall.normal, math.exp(rng.normal(-0.5, 0.25)))
    count = int(rng.choice(4, p=[0.45, 0.3, 0.17, 0.08]))
    length, calibre = radius + rng.uniform(6, 20, count), rng.uniform(0.35, 0.4 + 0.1 * min(radius, 6), count)
    leading = spokes(rng, 0.6 * radius, length, calibre)
    image = lung + occupancy(join(vessels, leading), grid, thickness) * (blood - lung)
    airways = (trunks.radius.max(1) > 1.2) & trunks.chosen(rng, 0.4)
    if airways.any():
        lumen = 0.75 * trunks.radius[airways]
        aside = np.array([-wall.normal[1], wall.normal[0], 0]) * (2.1 * lumen.mean(1))[:, None]
        start, end = trunks.start[airways] + aside, trunks.end[airways] + aside
        shell = occupancy(Tubes(start, end, 1.1 * lumen + 0.3), grid, thickness)
        image = np.maximum(image, lung + 0.6 * shell * (20 - lung))
        image = image + occupancy(Tubes(start, end, lumen), grid, thickness) * (-965 - image)
    return image


def _nodule(rng: Generator, grid: Grid, lung: np.ndarray, nodule: Nodule, field: Field, thickness: float) -> np.ndarray:
    """``[H, W]`` lung with the nodule alone.

    Its shape comes from the mean of the readers' signed distances, its edge from their ratings of the margin:

        body = Φ((s̄ + lean · (max_m s_m - s̄) + roughness - shift) / width),    width = w(margin) + a · std_m(s_m)

    It is softer where the readers disagree, and what only some of them drew is hazy. The fewer readers marked it and
    the subtler they found it, the fainter it is. How soft, hazy and faint, and how far the shape leans towards the
    reader who drew most, differ at random between nodules. So an image is informative about the disagreement, but does
    not determine it.
    """
    subtlety, margin, spiculation, solidity = nodule.ratings.mean(0)[:4]
    signed = field.at(grid)
    mean, radius = signed.mean(0), field.radius
    shape = mean + rng.uniform(0, 0.5) * (signed.max(0) - mean) + 0.22 * texture(grid, rng, 1.8)
    width = 0.3 * 1.5 ** (5 - margin) + rng.uniform(0, 0.5) * signed.std(0)
    body = _sigmoid((shape - rng.normal(0.16, 0.25)) / width)
    if spiculation > 1.4:
        count = round(4 * (spiculation - 1)) + 2
        length = radius * (0.5 + 0.25 * spiculation * rng.random(count)) + 1
        spicules = spokes(rng, 0.7 * radius, length, rng.uniform(0.4, 0.8, count))
        body = np.maximum(body, 0.8 * occupancy(spicules, grid, thickness))
    haze = rng.uniform(0, 0.8) * _sigmoid(signed / (0.5 + 0.2 * (5 - margin))).mean(0)

    # Ground glass, solid, or between the two a solid core in ground glass.
    solid = min(max((solidity + rng.normal(0, 0.15) - 1) / 4, 0.0), 1.0)
    deep = np.clip(mean / max(float(field.distance.mean(0).max()), 0.3), 0, 1)
    density = np.clip(1.05 * solid + 4 * solid * (1 - solid) * (deep - 0.45), 0, 1)
    glass, tissue = rng.normal(-560, 70), rng.normal(45, 20)
    level = glass + density * (tissue - glass) + (1 - density) * 45 * texture(grid, rng, 1.6)
    # A small nodule does not fill the thickness of the slice. The fewer readers saw it, the fainter it is, on average.
    missed = 4 - len(nodule.marks)
    strength = 1 - 0.2 * math.exp(-radius / 2.5)
    strength *= 1.03 - 0.02 * (4 - subtlety) - 0.06 * missed + rng.normal(0, 0.05 + 0.01 * missed)
    image = lung + np.maximum(body, haze) * (level - lung) * min(max(strength, 0.25), 1.1)
    return image + _calcium(rng, grid, nodule, mean, deep)


def _calcium(rng: Generator, grid: Grid, nodule: Nodule, mean: np.ndarray, deep: np.ndarray) -> np.ndarray | float:
    """What calcium adds, in the pattern that most readers saw; 0 if most saw none."""
    votes = nodule.ratings[:, RATINGS.index("calcification")]
    found = votes[votes < 6]  # 6 is "absent"
    if 2 * len(found) < len(votes):
        return 0.0
    inside = _sigmoid((mean - 0.3) / 0.4)
    pattern = int(np.bincount(found).argmax())
    if pattern == 1:  # popcorn
        inside = inside * np.clip(texture(grid, rng, 2.0), 0, 1)
    elif pattern == 2:  # laminated
        inside = inside * (0.3 + 0.3 * np.cos(deep * 4 * math.pi))
    elif pattern == 4:  # not central
        inside = inside * np.clip(0.5 + texture(grid, rng, 4.0), 0, 1)
    elif pattern == 5:  # central
        inside = inside * deep
    return inside * math.exp(rng.normal(7.0, 0.55)) * (len(found) / len(votes))


def _noise(rng: Generator, grid: Grid, image: np.ndarray) -> np.ndarray:
    """``[H, W]`` noise of a scanner: finer and stronger with a sharp kernel, at times in streaks."""
    scale, stretch = rng.uniform(1.3, 2.6), rng.uniform(1, 1.4)
    amount = min(26 * math.exp(rng.normal(0, 0.8)), 100) * (1.9 / scale) ** 1.7
    if rng.random() < 0.15:
        amount, stretch = min(amount * rng.uniform(1.2, 2.0), 120), rng.uniform(1.5, 3.5)
    # The sum of two windows of the tile, so that no two images have the same noise.
    grain = texture(grid, rng, scale, stretch, grainy=True) + texture(grid, rng, scale, stretch, grainy=True)
    # X-rays are lost in soft tissue, so there is more noise in it.
    return grain * (amount / math.sqrt(2)) * (1 + 0.4 * np.clip((image + 900) / 900, 0, 1))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Close to Φ, the integral of the Gaussian, and faster."""
    return 1 / (1 + np.exp(np.clip(-1.7 * x, -30, 30)))
