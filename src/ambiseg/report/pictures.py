"""Small pictures for the page: images, masks in class colours, outlines to lay over an image, maps of probability."""

from __future__ import annotations

import base64
import colorsys
import io
import itertools
from collections.abc import Sequence

import numpy as np

from ambiseg.viz.drawing import reader_colours

LARGE, SMALL = 288, 144  # pixels of the longer side: images with fine lines over them, and everything else
GROUND, VOID = "#0d1117", "#7d8590"
_VIVID = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#6a3d9a", "#b15928", "#33a02c")
# From nothing to log 2 nats, where two classes are evenly divided; lighter is more, in print as well
HEAT = ("#0d1117", "#3b1260", "#8c2369", "#d8434e", "#f98e3c", "#fbe08a")


def class_colours(
    classes: Sequence[str], evaluated: Sequence[int], flipped: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """A colour for each class: white for the only one, else colours that can be told apart; the ground is dark.

    A class that flips has a colour of its own and what it becomes a tint of it; then all others are muted.

    >>> class_colours(["ground", "nodule"], [1])
    ['#0d1117', '#ffffff']
    >>> class_colours(["sky", "road", "road2"], [1, 2], [(1, 2)])
    ['#666666', '#0072b2', '#8cc0dc']
    """
    if len(classes) == 2:
        return [GROUND, "#ffffff"]
    if flipped:
        sources = [source for source, _ in flipped]
        vivid = dict(zip(sources, itertools.cycle(_VIVID), strict=False))
        others = [i for i in range(len(classes)) if i not in {*vivid, *(target for _, target in flipped)}]
        chosen = {str(i): _muted(number, len(others)) for number, i in enumerate(others)}
        chosen |= {str(i): colour for i, colour in vivid.items()}
        for source, target in flipped:
            chosen.setdefault(str(target), _tint(vivid[source]))
    else:
        shown = [i for i in range(len(classes)) if i or 0 in evaluated]
        chosen = reader_colours([str(i) for i in shown])
    return [chosen.get(str(i), GROUND) for i in range(len(classes))]


def _tint(colour: str) -> str:
    return "#" + "".join(f"{round(0.45 * part + 0.55 * 255):02x}" for part in rgb(colour))


def _muted(number: int, count: int) -> str:
    r, g, b = colorsys.hsv_to_rgb(number / count, 0.25 if count > 1 else 0, 0.4 + 0.25 * (number % 2))
    return f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}"


def photograph(image: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    """``[C, H, W]`` raw values as ``[h, w, 3]`` bytes: ``span`` goes from black to white; one channel is grey."""
    shown = image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, 0)
    low, high = span
    pixels = np.clip((shown - low) / max(high - low, 1e-9), 0, 1) * 255
    return scaled(np.moveaxis(pixels, 0, -1).round().astype(np.uint8), LARGE)


def mask(labels: np.ndarray, colours: Sequence[str], valid: np.ndarray | None = None) -> np.ndarray:
    """``[H, W]`` class ids in the colours of the classes; void pixels are grey."""
    palette = np.array([rgb(colour) for colour in (*colours, VOID)], np.uint8)
    ids = labels.astype(np.int64)
    if valid is not None:
        ids = np.where(valid, ids, len(colours))
    return palette[scaled(ids, SMALL)]


def probability(probs: np.ndarray, colours: Sequence[str]) -> np.ndarray:
    """``[C, H, W]`` probabilities as the mixture of the classes' colours: with two classes a scale of grey."""
    palette = np.array([rgb(colour) for colour in colours], float)
    mixed = np.einsum("chw,cr->hwr", probs, palette)
    return scaled(np.clip(mixed, 0, 255).round().astype(np.uint8), SMALL)


def heat(values: np.ndarray, top: float) -> np.ndarray:
    """``[H, W]`` values from 0 to ``top`` in the colours of :data:`HEAT`."""
    stops = np.array([rgb(colour) for colour in HEAT], float)
    at = np.clip(values / top, 0, 1) * (len(stops) - 1)
    below = np.minimum(at.astype(int), len(stops) - 2)
    mixed = stops[below] + (at - below)[..., None] * (stops[below + 1] - stops[below])
    return scaled(mixed.round().astype(np.uint8), SMALL)


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
    picture[y, x, :3] = np.array([rgb(colour) for colour in colours], np.uint8)[chosen]
    picture[y, x, 3] = 255
    return picture


def data_uri(picture: np.ndarray) -> str:
    """A PNG inside of a page; few colours are kept as a palette, which makes masks very small."""
    from PIL import Image

    depth = picture.shape[-1]
    packed = picture.astype(np.uint32) @ (256 ** np.arange(depth, dtype=np.uint32))  # sorts faster than rows of bytes
    found, ids = np.unique(packed, return_inverse=True)
    colours = np.stack([found >> 8 * i & 255 for i in range(depth)], 1)
    file = io.BytesIO()
    if len(colours) <= 256:
        made = Image.fromarray(ids.reshape(picture.shape[:2]).astype(np.uint8)).convert("P")
        made.putpalette(colours[:, :3].astype(np.uint8).tobytes())
        options = {"transparency": colours[:, 3].astype(np.uint8).tobytes()} if depth == 4 else {}
        made.save(file, "PNG", optimize=True, bits=_bits(len(colours)), **options)
    else:
        Image.fromarray(np.ascontiguousarray(picture)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """Nearest neighbours, so that class ids stay what they are: a whole number of times larger, or every n-th pixel."""
    longer = max(pixels.shape[:2])
    if longer >= side:
        step = max(1, round(longer / side))
        return pixels[::step, ::step]
    times = -(-side // longer)
    return pixels.repeat(times, 0).repeat(times, 1)


def rgb(colour: str) -> tuple[int, int, int]:
    """The three bytes of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _edges(labels: np.ndarray, width: int) -> np.ndarray:
    """Pixels within ``width`` / 2 of a change of label, along rows and columns."""
    edges = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        differ = np.pad(np.diff(labels.astype(np.int64), axis=axis) != 0, [(width, width)] * 2)
        rows, columns = labels.shape
        for shift in range(-(width // 2), width - width // 2):
            top, left = (width + shift, width) if axis == 0 else (width, width + shift)
            edges |= differ[top : top + rows, left : left + columns]
    return edges


def _bits(colours: int) -> int:
    return next(bits for bits in (1, 2, 4, 8) if colours <= 2**bits)
