"""Small pictures as arrays of bytes: images, masks in class colours, outlines, maps of values; and as PNG in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from ambiseg.viz.colours import VOID, heat_colours, palette

LARGE, SMALL = 288, 144  # pixels of the longer side: images with fine lines over them, and everything else


def photograph(image: np.ndarray, span: tuple[float, float] | None = None, side: int = LARGE) -> np.ndarray:
    """``[C, H, W]`` raw values as ``[h, w, 3]`` bytes; an image of fewer than three channels is grey.

    Args:
        span: the values that are black and white. ``None``: bytes are shown as they are, and of other types the
            middle 99 % of the values.
    """
    shown = scaled(np.moveaxis(image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, 0), 0, -1), side)
    if span is None and shown.dtype == np.uint8:
        return shown
    low, high = value_span(image) if span is None else span
    return (np.clip((shown - low) / max(high - low, 1e-9), 0, 1) * 255).round().astype(np.uint8)


def value_span(image: np.ndarray) -> tuple[float, float]:
    """The middle 99 % of the values of ``[C, H, W]`` that :func:`photograph` shows."""
    low, high = np.percentile(image[:3], (0.5, 99.5))
    return float(low), float(high)


def mask(labels: np.ndarray, colours: Sequence[str], valid: np.ndarray | None = None) -> np.ndarray:
    """``[H, W]`` class ids in the colours of the classes; void pixels are grey."""
    ids = labels.astype(np.int64)
    if valid is not None:
        ids = np.where(valid, ids, len(colours))
    return palette([*colours, VOID])[scaled(ids, SMALL)]


def probability(probs: np.ndarray, colours: Sequence[str]) -> np.ndarray:
    """``[C, H, W]`` probabilities as the mixture of the classes' colours: with two classes a scale of grey."""
    mixed = np.einsum("chw,cr->hwr", probs, palette(colours).astype(float))
    return scaled(np.clip(mixed, 0, 255).round().astype(np.uint8), SMALL)


def heat(values: np.ndarray, top: float) -> np.ndarray:
    """``[H, W]`` values from 0 to ``top`` in the colours of the heat map."""
    return scaled(heat_colours(values / top), SMALL)


def outlines(masks: Sequence[np.ndarray], colours: Sequence[str], width: int = 2) -> np.ndarray:
    """``[h, w, 4]`` bytes to lay over an image: each mask's edges. Shared edges are dashed in all their colours.

    Masks that differ in their classes alone have the same edges everywhere: these are white.
    """
    edges = np.stack([_edges(scaled(labels, LARGE), width) for labels in masks])
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
    """``[h, w, 4]`` outlines laid over an image ``[h, w, 3]``."""
    return np.where(lines[..., 3:] > 0, lines[..., :3], image)


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
    regions = scaled(regions, LARGE)
    grey = 0.6 * photograph(image).astype(float).mean(-1, keepdims=True)
    warm = heat_colours(0.2 + 0.8 * share)[regions]  # the heat map without its black
    shown = np.where((share > 0)[regions][..., None], 0.15 * grey + 0.85 * warm, grey)
    if void is not None:
        y, x = np.indices(regions.shape)
        shown = np.where((void[regions] & ((x + y) // 3 % 2 == 0))[..., None], 128, shown)
    return np.broadcast_to(shown, (*regions.shape, 3)).astype(np.uint8)


def scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """``[H, W, …]`` by nearest neighbours, so that class ids stay what they are: the longer side is about ``side``.

    Small pictures become a whole number of times larger; of large ones every n-th pixel is taken.

    >>> scaled(np.zeros((64, 32)), 144).shape, scaled(np.zeros((1024, 512)), 144).shape
    ((192, 96), (147, 74))
    """
    longer = max(pixels.shape[:2])
    if longer >= side:
        step = max(1, round(longer / side))
        return pixels[::step, ::step]
    times = -(-side // longer)
    return pixels.repeat(times, 0).repeat(times, 1)


def thinned(pixels: np.ndarray, side: int = LARGE) -> np.ndarray:
    """``[…, H, W]`` with every n-th pixel of what is much larger than ``side``; anything else as it is."""
    step = max(1, round(max(pixels.shape[-2:]) / side))
    return np.ascontiguousarray(pixels[..., ::step, ::step])


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
