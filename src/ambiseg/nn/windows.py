"""Images that are too large for a network at once: overlapping windows, and weights that blend them into one map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.nn.features import Backbone, Features, pad_to_multiple
from ambiseg.nn.gating import Mean, Running

WHOLE = 1024 * 1024  # pixels up to which an image is not cut: the default U-Net takes 1.8 GB for so many
WINDOW = 512
_KEPT, _PIXELS = 1 << 30, 1 << 24  # bytes of features and pixels of a whole image that are kept together

Step = Callable[[], None]


class Cut(NamedTuple):
    """A window along one axis: where it starts, and how much each of its pixels counts."""

    start: int
    weights: Tensor  # [w]; those of all windows add up to 1 at every pixel


Windows: TypeAlias = tuple[list[Cut], list[Cut]]
"""Cuts down and across an image: every one of the first meets every one of the second."""


def cuts(length: int, window: int, overlap: int, multiple: int = 1) -> list[Cut]:
    """Windows along one axis, and a partition of unity over them:  Σ_i weights_i(x) = 1.

    The outer quarter of an overlap counts nothing, because what a network says there is about the window's border. Over
    the middle half one window fades into the next as sin², and beyond it counts alone:

        weight(d) = sin²(π/2 · clip(2 d / overlap − 1/2, 0, 1)),     d pixels from the window's border

    before the weights of all windows at a pixel are divided by their sum. At the border of the image nothing fades.

    Args:
        length: of the axis, a multiple of ``multiple``.
        window: of how many pixels; rounded up to a multiple, and at least two overlaps.
        overlap: of neighbours; rounded up to a multiple. The last window is moved back to end with the axis, so that
            it may overlap more.

    >>> [(cut.start, cut.weights.shape[0]) for cut in cuts(100, window=40, overlap=10)]
    [(0, 40), (30, 40), (60, 40)]
    >>> print(*(f"{weight:.2f}" for weight in cuts(100, window=40, overlap=8)[1].weights[:8]))
    0.00 0.00 0.04 0.31 0.69 0.96 1.00 1.00
    """
    overlap = -(-overlap // multiple) * multiple
    window = min(max(-(-window // multiple) * multiple, 2 * overlap), length)
    starts = [*range(0, length - window, max(window - overlap, 1)), length - window]
    inside = torch.arange(window) + 0.5  # from the border to the middle of the pixel
    rise = (2 * inside / max(overlap, 1) - 0.5).clamp(0, 1) if overlap else torch.ones(window)
    rise = (math.pi / 2 * rise).sin().square()
    total, parts = torch.zeros(length), []
    for start in starts:
        weights = torch.ones(window)
        if start > 0:
            weights = weights * rise
        if start + window < length:
            weights = weights * rise.flip(0)
        total[start : start + window] += weights
        parts.append(weights)
    return [Cut(at, part / total[at : at + window]) for at, part in zip(starts, parts, strict=True)]


def spacing(window: int | None, overlap: int | None) -> tuple[int, int]:
    """Window and overlap with their defaults; an overlap of more than half of the window is a ``DataError``."""
    window = WINDOW if window is None else window
    overlap = window // 4 if overlap is None else overlap
    if window and not 0 <= overlap <= window // 2:
        raise DataError(f"overlap: expected 0 to {window // 2}, half of the window, found {overlap}")
    return window, overlap


def plan(size: tuple[int, int], multiple: int, window: int | None = None, overlap: int | None = None) -> Windows | None:
    """Windows down and across an image of ``size``; ``None`` when it is taken whole.

    Args:
        multiple: that windows start and end at; how many times smaller than the image a network's deepest map is.
        window: side of a window; 0 takes every image whole, ``None`` images of up to :data:`WHOLE` pixels.
        overlap: of neighbouring windows, at most half of the window; a quarter of it unless given.

    >>> down, across = plan((50, 200), multiple=2, window=128, overlap=64)
    >>> [cut.start for cut in down], [cut.start for cut in across]
    ([0], [0, 64, 72])
    """
    height, width = size
    if window == 0 or (window is None and height * width <= WHOLE):
        return None
    window, overlap = spacing(window, overlap)
    padded = [-(-length // multiple) * multiple for length in (height, width)]
    down, across = (cuts(length, window, overlap, multiple) for length in padded)
    return (down, across) if len(down) * len(across) > 1 else None


class Tile(NamedTuple):
    """One window of an image: where it lies, its pixels, and how much each of those inside the image counts."""

    y: int
    x: int
    image: Tensor  # [1, C, h, w]
    weights: Tensor  # [h', w'], cut at the border of the image

    def weighted(self, maps: Tensor) -> Tensor:
        """``[…, h, w]`` without what was padded, times the weights."""
        return maps[..., : self.weights.shape[0], : self.weights.shape[1]] * self.weights


class Block(NamedTuple):
    """A part of an image that is finished: where it lies, and its maps."""

    y: int
    x: int
    maps: Tensor  # [..., h, w]

    @property
    def place(self) -> tuple[Any, ...]:
        """Its rows and columns, as the index of maps ``[…, H, W]`` of the image."""
        h, w = self.maps.shape[-2:]
        return ..., slice(self.y, self.y + h), slice(self.x, self.x + w)


def tiles(image: Tensor, windows: Windows, multiple: int) -> Iterator[Tile]:
    """Every window of one image ``[1, C, H, W]``, which is padded as the networks themselves would pad it."""
    height, width = image.shape[2:]
    padded = pad_to_multiple(image, multiple)
    for (y, rows), (x, columns) in product(*windows):
        weights = rows.to(image.device)[:, None] * columns.to(image.device)
        pixels = padded[:, :, y : y + len(rows), x : x + len(columns)]
        yield Tile(y, x, pixels, weights[: height - y, : width - x])


def blended(parts: Iterable[tuple[Tile, Tensor]], windows: Windows, size: tuple[int, int]) -> Iterator[Block]:
    """Maps ``[…, h, w]`` of all windows in their order, blended:  Σ_i w_i(p) maps_i(p).

    Blocks cover the image once. Each comes as soon as no later window reaches it, so that no more is kept than what a
    row of windows shares with the next one, and one window.
    """
    (height, width), parts = size, iter(parts)
    down, across = ([cut.start for cut in cuts] for cuts in windows)
    above = None  # sums from row y on, of the windows above
    for y, next_y in pairwise([*down, height]):
        left, below = None, None  # sums from column x on, of these windows; and from row next_y on
        for x, next_x in pairwise([*across, width]):
            tile, maps = next(parts)
            values = tile.weighted(maps)
            sums, known = torch.zeros_like(values), 0 if left is None else left.shape[-1]
            if left is not None:
                sums[..., :known] = left
            if above is not None:
                sums[..., : above.shape[-2], known:] = above[..., x + known : x + sums.shape[-1]]
            sums += values
            rows, columns = next_y - y, next_x - x
            yield Block(y, x, sums[..., :rows, :columns])
            if rows < sums.shape[-2]:
                if below is None:
                    below = sums.new_empty(*sums.shape[:-2], sums.shape[-2] - rows, width)
                below[..., x:next_x] = sums[..., rows:, :columns]
            left = sums[..., columns:]
        above = below


def keeps(backbone: Backbone, size: tuple[int, int]) -> bool:
    """Whether the features of a whole image of ``size`` are kept; others are made again for every drawing, in parts."""
    pixels = size[0] * size[1]
    return pixels <= _PIXELS and 4 * backbone.dense_channels * pixels <= _KEPT


@torch.no_grad()
def stitched(
    backbone: Backbone, image: Tensor, windows: Windows, step: Step | None = None, pooled: Running | None = None
) -> Features:
    """Features of one image ``[1, C, H, W]``, window by window:

        dense(p) = Σ_i w_i(p) dense_i(p),     gate = Σ_i Σ_p w_i(p) gate_i(p) / Σ_i Σ_p w_i(p)

    Windows start where the coarsest map of the network has a pixel: if the quarter of an overlap exceeds the reach of
    the network, the features are those of the whole image.

    Args:
        pooled: collects ``gate`` in another way than its mean: :meth:`ambiseg.nn.gating.Pooling.over_windows`.

    Returns:
        ``dense [1, F, H, W]`` and ``gate [1, G, 1, 1]``, already pooled. Of an image whose features are not kept,
        ``dense`` has no pixel: :func:`dense_blocks` makes it again.

    >>> from ambiseg.nn.unet import UNet
    >>> backbone = UNet(1, (4, 8)).eval()
    >>> image = torch.rand(1, 1, 50, 200)
    >>> windows = plan((50, 200), backbone.multiple, 128, 64)  # a quarter is 16 pixels; the network reaches 15
    >>> torch.allclose(stitched(backbone, image, windows).dense, backbone(image).dense, atol=1e-5)
    True
    """
    size = image.shape[2], image.shape[3]
    room = size if keeps(backbone, size) else (0, 0)
    dense = torch.empty(*room, backbone.dense_channels, device=image.device)  # one pixel per row, as heads read
    pooled = Mean() if pooled is None else pooled

    def parts() -> Iterator[tuple[Tile, Tensor]]:
        for tile in tiles(image, windows, backbone.multiple):
            features = backbone(tile.image)
            if features.skips:
                raise ValueError("expected a backbone whose last features are dense, found one that stops before them")
            (down, across), shape = _cuts_at(windows, tile), features.gate.shape[2:]
            pooled.add(features.gate, *(_shrunk(w, n) for w, n in zip((down, across), shape, strict=True)))
            if step is not None:
                step()
            yield tile, features.dense[0]

    if room == size:
        for block in blended(parts(), windows, size):
            dense.permute(2, 0, 1)[block.place] = block.maps
    else:
        for _ in parts():
            pass
    return Features(dense.permute(2, 0, 1)[None], pooled.result()[:, :, None, None])


@torch.no_grad()
def dense_blocks(backbone: Backbone, image: Tensor, windows: Windows, step: Step | None = None) -> Iterator[Block]:
    """``dense`` of :func:`stitched`, to the bit, as blocks ``[1, F, h, w]`` of which one is in memory at a time."""

    def parts() -> Iterator[tuple[Tile, Tensor]]:
        for tile in tiles(image, windows, backbone.multiple):
            dense = backbone(tile.image).dense
            if step is not None:
                step()
            yield tile, dense

    yield from blended(parts(), windows, (image.shape[2], image.shape[3]))


def _cuts_at(windows: Windows, tile: Tile) -> tuple[Tensor, Tensor]:
    down, across = ({cut.start: cut.weights for cut in cuts} for cuts in windows)
    return down[tile.y], across[tile.x]


def _shrunk(weights: Tensor, length: int) -> Tensor:
    """The weights of a window's pixels ``[w]``, averaged over the pixels of a coarser map."""
    return F.adaptive_avg_pool1d(weights[None], length)[0]
