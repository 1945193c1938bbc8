"""Features of images that are too large for a network at once: overlapping windows, blended into one map.

Only features are computed by windows. The gate reads an average over the whole stitched map and latent codes are drawn
once, so that a sample is one mask over the whole image and no window has an opinion of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.nn import Backbone, DeepLabV3Plus, Features, UNet
from ambiseg.nn.unet import pad_to_multiple

WHOLE = 1024 * 1024  # pixels up to which an image is not cut: the default U-Net takes 1.8 GB for so many
WINDOW = 512
_FULL_PRECISION = 1 << 30  # bytes of stitched features above which they are kept in half precision

Step = Callable[[], None]


class Cut(NamedTuple):
    """A window along one axis: where it starts, and how much each of its pixels counts."""

    start: int
    weights: Tensor  # [w]; those of all windows add up to 1 at every pixel


Windows: TypeAlias = tuple[list[Cut], list[Cut]]
"""Cuts down and across an image: every one of the first meets every one of the second."""


def reduction(backbone: Backbone) -> int:
    """How many times smaller than the image the deepest map is: windows start at multiples of it.

    >>> reduction(UNet(1, (4, 8, 16)))
    4
    """
    if isinstance(backbone, UNet):
        return 2 ** (len(backbone.down) - 1)
    if isinstance(backbone, DeepLabV3Plus):
        return backbone.output_stride
    return 64  # a network of somebody else's: six halvings are as many as is usual


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
    """Window and overlap with their defaults; an overlap of more than half of the window is an error."""
    window = WINDOW if window is None else window
    overlap = window // 4 if overlap is None else overlap
    if window and not 0 <= overlap <= window // 2:
        raise DataError(f"--overlap: expected 0 to {window // 2}, half of the window, found {overlap}")
    return window, overlap


def plan(size: Sequence[int], backbone: Backbone, window: int | None, overlap: int | None) -> Windows | None:
    """Windows down and across an image of ``size``; ``None`` when it is taken whole.

    Args:
        window: side of a window; 0 takes every image whole, ``None`` images of up to :data:`WHOLE` pixels.
        overlap: of neighbouring windows, at most half of the window; a quarter of it unless given.
    """
    height, width = size
    if window == 0 or (window is None and height * width <= WHOLE):
        return None
    window, overlap = spacing(window, overlap)
    multiple = reduction(backbone)
    padded = [-(-length // multiple) * multiple for length in (height, width)]
    down, across = (cuts(length, window, overlap, multiple) for length in padded)
    return (down, across) if len(down) * len(across) > 1 else None


@torch.no_grad()
def stitched(backbone: Backbone, image: Tensor, windows: Windows, step: Step | None = None) -> Features:
    """Features of one image ``[1, C, H, W]``, window by window:

        dense(p) = Σ_i w_i(p) dense_i(p),     gate = Σ_i Σ_p w_i(p) gate_i(p) / Σ_i Σ_p w_i(p)

    The image is padded as the network itself would pad it, and windows start where its coarsest map has a pixel: if
    the quarter of an overlap exceeds the reach of the network, the features are those of the whole image.

    Returns:
        ``dense [1, F, H, W]`` and ``gate [1, G, 1, 1]``, already averaged: all that a gate reads is its mean.

    >>> backbone = UNet(1, (4, 8)).eval()
    >>> image = torch.rand(1, 1, 50, 200)
    >>> features = stitched(backbone, image, plan((50, 200), backbone, 128, 64))  # 16 pixels; the network reaches 15
    >>> torch.allclose(features.dense, backbone(image).dense, atol=1e-5)
    True
    """
    down, across = windows
    height, width = image.shape[2:]
    padded = pad_to_multiple(image, reduction(backbone))
    channels = backbone.dense_channels
    dtype = torch.float32 if 4 * channels * height * width <= _FULL_PRECISION else torch.float16
    dense = torch.zeros(height, width, channels, dtype=dtype, device=image.device)  # one pixel a row, as the head reads
    pooled = torch.zeros(backbone.gate_channels, device=image.device)
    mass = 0.0
    for (y, rows), (x, columns) in product(down, across):
        features = backbone(padded[:, :, y : y + len(rows), x : x + len(columns)])
        if features.skips:
            raise DataError(
                "--window: expected a model whose noise enters at the last features (model.inject_level 1), "
                "found one where it enters earlier; --window 0 takes images whole"
            )
        rows, columns = rows.to(image.device), columns.to(image.device)
        part = (rows[:, None] * columns)[: height - y, : width - x, None]  # what was padded is left out again
        inside = features.dense[0, :, : part.shape[0], : part.shape[1]]
        dense[y : y + part.shape[0], x : x + part.shape[1]] += (inside.permute(1, 2, 0) * part).to(dtype)
        coarse = [_shrunk(w, n) for w, n in zip((rows, columns), features.gate.shape[2:], strict=True)]
        pooled += torch.einsum("gyx,y,x->g", features.gate[0].float(), *coarse)
        mass += float(coarse[0].sum() * coarse[1].sum())
        if step is not None:
            step()
    return Features(dense.permute(2, 0, 1)[None], (pooled / mass)[None, :, None, None])


def _shrunk(weights: Tensor, length: int) -> Tensor:
    """The weights of a window's pixels ``[w]``, averaged over the pixels of a coarser map."""
    return F.adaptive_avg_pool1d(weights[None], length)[0]
