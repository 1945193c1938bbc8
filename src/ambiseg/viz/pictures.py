"""Small pictures as arrays of bytes: images, masks in class colours, outlines, maps of values; and as PNG in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from ambiseg._util.bands import bands, counted, looked_up
from ambiseg.viz.colours import VOID, heat_colours, palette

_THIN = 0.7  # of a mask that is edge
_AT_ONCE = 1 << 20  # pixels of a photograph that are worked on at a time
LARGE, SMALL = 432, 216  # pixels of the longer side: images with fine lines over them, and everything else


def photograph(image: np.ndarray, span: tuple[float, float] | None = None, side: int = LARGE) -> np.ndarray:
    """``[C, H, W]`` raw values as ``[h, w, 3]`` bytes; an image of fewer than three channels is grey.

    Args:
        span: the values that are black and white. ``None``: bytes are shown as they are, and of other types the
            middle 99 % of the values.
    """
    if span is None and image.dtype != np.uint8:
        span = value_span(image)
    step = _step(image, side)
    rows = max(1, _AT_ONCE // (step * image.shape[2])) * step  # whole blocks, some at a time
    parts = [_shown(image[:, y : y + rows], span, step) for y in range(0, image.shape[1], rows)]
    shown = np.moveaxis(np.concatenate(parts, 1), 0, -1)
    times = _times(image, side)
    if times == 1:
        return shown
    from PIL import Image

    size = shown.shape[1] * times, shown.shape[0] * times
    return np.asarray(Image.fromarray(shown).resize(size, Image.Resampling.BICUBIC))


def _shown(image: np.ndarray, span: tuple[float, float] | None, step: int) -> np.ndarray:
    """``[3, h, w]`` bytes of some rows of an image, a ``step``-th as large."""
    shown = image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, 0)
    if span is not None:
        shown = np.clip((shown - span[0]) / max(span[1] - span[0], 1e-9), 0, 1) * 255
    return (shown if step == 1 else _blocks(shown, step).mean((-3, -1))).round().astype(np.uint8)


def value_span(image: np.ndarray) -> tuple[float, float]:
    """The middle 99 % of the values of ``[C, H, W]`` that :func:`photograph` shows."""
    low, high = np.percentile(image[:3], (0.5, 99.5))
    return float(low), float(high)


def mask(labels: np.ndarray, colours: Sequence[str], valid: np.ndarray | None = None) -> np.ndarray:
    """``[H, W]`` class ids in the colours of the classes; void pixels are grey."""
    ids = labels
    if valid is not None:
        ids = np.where(valid, labels, np.min_scalar_type(len(colours)).type(len(colours)))
    return palette([*colours, VOID])[scaled(ids, SMALL)]


def laid(
    labels: np.ndarray, colours: Sequence[str], valid: np.ndarray | None = None, *, ground: bool = True,
    fill: float = 0.35, side: int = SMALL,
) -> np.ndarray:  # fmt: skip
    """``[h, w, 4]`` bytes to lay over an image: classes tinted, their inner edges opaque.

    A structure that is no wider than an edge is opaque, so that it stays visible.

    Args:
        ground: whether class 0 is left clear.
        fill: how opaque the inside of a class is.
    """
    ids = scaled(labels, side)
    picture = np.concatenate([palette(colours)[ids], np.full((*ids.shape, 1), round(255 * fill), np.uint8)], -1)
    picture[_edges(ids, 2 * max(1, max(ids.shape) // 108)), 3] = 255  # one half of an edge is inside
    if ground:
        picture[ids == 0] = 0
    if valid is not None:
        picture[scaled((~valid).astype(np.uint8), side) > 0] = (*palette([VOID])[0], 160)
    return picture


def probability(probs: np.ndarray, colours: Sequence[str], ground: bool = True) -> np.ndarray:
    """``[C, H, W]`` probabilities as bytes ``[4, H, W]`` to lay over an image: the mixture of the classes' colours.

    Args:
        ground: whether class 0 is left clear; what is more likely another class is then more opaque.
    """
    first, own = int(ground), palette(colours).astype(float)
    picture = np.empty((4, *probs.shape[1:]), np.uint8)
    for band in bands(probs.shape[1], max(1, _AT_ONCE // probs.shape[2])):
        mass = probs[first:, band].sum(0)
        mixed = np.einsum("chw,cr->rhw", probs[first:, band], own[first:]) / np.maximum(mass, 1e-9)
        alpha = 255 * (mass if ground else np.full_like(mass, 0.85))
        shown = np.where(mass >= 0.005, np.concatenate([mixed, alpha[None]]), 0)
        picture[:, band] = shown.clip(0, 255).round()
    return picture


def soft(picture: np.ndarray, tone: str | None = None) -> np.ndarray:
    """``[4, H, W]`` of :func:`probability` as ``[h, w, 4]``, in steps of 2 %, which take a fifth of the bytes.

    Args:
        tone: a colour instead of those of the classes.
    """
    levels = np.moveaxis(scaled_values(picture, SMALL), 0, -1)
    levels = (levels / 5).round().astype(np.uint8) * 5
    if tone is not None:
        levels[..., :3] = np.where(levels[..., 3:] > 0, palette([tone])[0], 0)
    return levels


def heat(values: np.ndarray, top: float) -> np.ndarray:
    """``[H, W]`` values from 0 to ``top`` in the colours of the heat map; of large pictures the largest of a block."""
    return heat_colours((scaled_values(values, SMALL, largest=True) / top * 51).round() / 51)


def outlines(masks: Sequence[np.ndarray], colours: Sequence[str], width: int = 2) -> np.ndarray:
    """``[h, w, 4]`` bytes to lay over an image: each mask's edges. Shared edges are dashed in all their colours.

    Masks that differ in their classes alone have the same edges everywhere: these are white. A mask of thin structures
    is drawn itself, because its edges would be wider than it is.
    """
    edges = np.stack([_lines(scaled(labels, LARGE), width) for labels in masks])
    if len(masks) > 1 and (edges == edges[0]).all():
        edges, colours = edges[:1], ("#ffffff",)
    owners = edges.sum(0)
    y, x = np.nonzero(owners)
    nth = ((x + y) // 8) % owners[y, x]  # whose turn it is along the line
    here = edges[:, y, x]
    chosen = np.argmax(here & (np.cumsum(here, 0) - 1 == nth), 0)
    picture = np.zeros((*owners.shape, 4), np.uint8)
    picture[y, x, :3] = palette(colours)[chosen]
    picture[y, x, 3] = 255
    return picture


def over(image: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """``[h, w, 4]`` outlines or tints laid over an image ``[h, w, 3]``."""
    alpha = lines[..., 3:] / 255
    return (alpha * lines[..., :3] + (1 - alpha) * image).round().astype(np.uint8)


def overlay(image: np.ndarray, labels: np.ndarray, colours: Sequence[str]) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image in grey, every class but 0 tinted in its colour and outlined.

    Args:
        image: ``[h, w, 3]`` bytes.
        labels: ``[h, w]`` class ids.
    """
    grey = 0.85 * image.astype(float).mean(-1, keepdims=True)
    own = palette(colours).astype(float)[labels]
    marked = (labels > 0)[..., None]
    shown = np.where(marked, 0.68 * grey + 0.32 * own, grey)
    return np.where(_edges(labels, 4)[..., None] & marked, own, shown).astype(np.uint8)


def differences(image: np.ndarray, table: np.ndarray, regions: np.ndarray, void: np.ndarray | None) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image in grey, over it how many readers differ from the most common label.

    Args:
        image: ``[C, H, W]`` raw values.
        table: ``[U, M]`` what each of M readers called each of U regions.
        regions: ``[H, W]`` rows of ``table``.
        void: ``[U]`` regions that count nowhere, which are hatched in grey; ``None``: none.
    """
    most = np.stack([(table == table[:, m : m + 1]).sum(1) for m in range(table.shape[1])]).max(0)
    share = np.clip(2 * (1 - most / table.shape[1]), 0, 1)  # 1 where two labels are evenly divided
    values, order = np.unique(share, return_inverse=True)
    order = order.reshape(-1).astype(np.min_scalar_type(len(values)))
    ranks = scaled(looked_up(order, regions), LARGE, last=True)  # the larger difference stays visible
    grey = 0.6 * photograph(image).astype(float).mean(-1, keepdims=True)
    warm = heat_colours(0.2 + 0.8 * values)[ranks]  # the heat map without its black
    shown = np.where((values > 0)[ranks][..., None], 0.15 * grey + 0.85 * warm, grey)
    if void is not None:
        y, x = np.indices(ranks.shape)
        hidden = scaled(looked_up(void.astype(np.uint8), regions), LARGE) > 0
        shown = np.where((hidden & ((x + y) // 3 % 2 == 0))[..., None], 128, shown)
    return np.broadcast_to(shown, (*ranks.shape, 3)).astype(np.uint8)


def scaled(labels: np.ndarray, side: int, last: bool = False) -> np.ndarray:
    """``[…, H, W]`` class ids at another size, never mixed: the longer side is about ``side``.

    Small pictures become a whole number of times larger. Large ones become a whole number of times smaller; of the ids
    of each block of pixels the one is kept that is rarest in the picture, and 0 only where there is no other: a line
    of one pixel stays a line.

    Args:
        last: keep the largest id of each block instead.

    >>> scaled(np.zeros((64, 32), int), 144).shape, scaled(np.zeros((1024, 512), int), 144).shape
    ((192, 96), (147, 74))
    >>> scaled(np.eye(12, dtype=int), 3)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """
    return _repeated(thinned(labels, side, last), _times(labels, side))


def scaled_values(values: np.ndarray, side: int, largest: bool = False) -> np.ndarray:
    """``[…, H, W]`` numbers at the size of :func:`scaled`; blocks of pixels become their mean, or their largest."""
    return _repeated(shrunk(values, side, largest), _times(values, side))


def thinned(labels: np.ndarray, side: int = LARGE, last: bool = False) -> np.ndarray:
    """Class ids ``[…, H, W]`` that are much larger than ``side`` made smaller as by :func:`scaled`; others as is."""
    step = _step(labels, side)
    if step == 1:
        return labels
    amount = counted(labels)  # labels are small numbers, as class ids and ranks are
    order = np.arange(len(amount))
    if not last:
        order = order[np.lexsort((-order, -amount))]  # the commonest first; of equally common ones the larger id
        order = np.concatenate([[0], order[order != 0]])  # the ground is left over
    ranks = np.argsort(order).astype(np.min_scalar_type(len(order)))
    return order.astype(labels.dtype)[_blocks(looked_up(ranks, labels), step).max((-3, -1))]


def shrunk(values: np.ndarray, side: int = LARGE, largest: bool = False) -> np.ndarray:
    """Numbers ``[…, H, W]`` that are much larger than ``side``: the means of blocks of pixels. Others as they are."""
    step = _step(values, side)
    if step == 1:
        return values
    blocks = _blocks(values, step)
    return blocks.max((-3, -1)) if largest else blocks.mean((-3, -1))


def _step(pixels: np.ndarray, side: int) -> int:
    return max(1, round(max(pixels.shape[-2:]) / side))


def _blocks(pixels: np.ndarray, step: int) -> np.ndarray:
    """``[…, H, W]`` -> ``[…, h, step, w, step]``; the last row and column are repeated where blocks are not full."""
    room = [(0, 0)] * (pixels.ndim - 2) + [(0, -size % step) for size in pixels.shape[-2:]]
    full = np.pad(pixels, room, mode="edge")
    return full.reshape(*full.shape[:-2], full.shape[-2] // step, step, full.shape[-1] // step, step)


def _times(pixels: np.ndarray, side: int) -> int:
    """How many times larger ``[…, H, W]`` becomes, for a longer side of at least ``side``."""
    return -(-side // max(pixels.shape[-2:]))


def _repeated(pixels: np.ndarray, times: int) -> np.ndarray:
    return pixels.repeat(times, -2).repeat(times, -1)


def photo_uri(picture: np.ndarray) -> str:
    """``[h, w, 3]`` bytes of a photograph inside a page, as a JPEG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def data_uri(picture: np.ndarray) -> str:
    """``[h, w, 3 or 4]`` bytes as a PNG inside a page. Up to 256 colours are kept as a palette, which is smaller."""
    from PIL import Image

    depth = picture.shape[-1]
    packed = picture.astype(np.uint32) @ (256 ** np.arange(depth, dtype=np.uint32))  # sorts faster than rows of bytes
    found, ids = np.unique(packed, return_inverse=True)
    file = io.BytesIO()
    if len(found) <= 256:
        colours = np.stack([found >> 8 * i & 255 for i in range(depth)], 1).astype(np.uint8)
        image = Image.fromarray(ids.reshape(picture.shape[:2]).astype(np.uint8)).convert("P")
        image.putpalette(colours[:, :3].tobytes())
        bits = next(bits for bits in (1, 2, 4, 8) if len(found) <= 2**bits)
        options = {"transparency": colours[:, 3].tobytes()} if depth == 4 else {}
        image.save(file, "PNG", optimize=True, bits=bits, **options)
    else:
        Image.fromarray(np.ascontiguousarray(picture)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _lines(labels: np.ndarray, width: int) -> np.ndarray:
    """The edges of a mask, or the mask where most of it is edge."""
    edges, inside = _edges(labels, width), labels > 0
    return inside if (edges & inside).sum() > _THIN * inside.sum() else edges


def _edges(labels: np.ndarray, width: int) -> np.ndarray:
    """Pixels within ``width`` / 2 of a change of label, along rows and columns."""
    edges = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        changes = np.diff(labels.astype(np.int64), axis=axis) != 0  # between a pixel and the next
        room = [(0, 0), (0, 0)]
        room[axis] = (width, width)
        changes = np.pad(changes, room)
        for start in range(width - width // 2, 2 * width - width // 2):
            edges |= changes.take(range(start, start + labels.shape[axis]), axis)
    return edges
