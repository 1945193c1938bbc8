"""Small pictures of cases: outlines of every reader, and where readers differ. NumPy and Pillow only."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence

import numpy as np

from ambiseg.data.case import Case

_SIDE = 300  # pixels that the longer side of a picture has at least, or about
# Colours that people with any kind of colour vision tell apart (Okabe and Ito), without black; then a wheel of hues
_DISTINCT = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#0072b2", "#ffffff")
_HEAT = np.array([[60, 20, 110], [190, 40, 110], [245, 125, 40], [255, 235, 120]], float)


def reader_colours(readers: Sequence[str]) -> dict[str, str]:
    """A colour for each reader, the same wherever the reader is drawn.

    >>> reader_colours(["Ann", "Bob"])
    {'Ann': '#e69f00', 'Bob': '#56b4e9'}
    """
    wheel = [colorsys.hsv_to_rgb(i / len(readers), 0.75, 1) for i in range(len(readers))]
    hues = [f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}" for r, g, b in wheel]
    chosen = _DISTINCT if len(readers) <= len(_DISTINCT) else hues
    return dict(zip(readers, chosen, strict=False))


def heat_gradient() -> str:
    """The colours of :func:`differences` as CSS, from just above nothing to evenly divided."""
    return ", ".join(f"rgb({r:.0f}, {g:.0f}, {b:.0f})" for r, g, b in _HEAT)


def outlines(case: Case, colours: dict[str, str]) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image with each reader's outline. Where outlines coincide, their colours take turns."""
    picture = _picture(case).copy()
    labels = _scaled(case.regions)
    edges = np.stack([_edge(case.table[:, m].astype(np.int64)[labels]) for m in range(len(case.readers))])
    many = edges.sum(0)
    y, x = np.nonzero(many)
    turn = ((x + y) // 4) % many[y, x]
    rank = np.cumsum(edges[:, y, x], 0) - 1
    chosen = np.argmax((rank == turn) & edges[:, y, x], 0)
    palette = np.array([_rgb(colours.get(reader, "#ffffff")) for reader in case.readers], np.uint8)
    picture[y, x] = palette[chosen]
    return picture


def differences(case: Case) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image, and over it how many readers differ from the most common label; void is grey."""
    table = case.table
    most = np.stack([(table == table[:, m : m + 1]).sum(1) for m in range(table.shape[1])]).max(0)
    share = np.clip(2 * (1 - most / table.shape[1]), 0, 1)  # evenly divided is the most that two labels can be
    regions = _scaled(case.regions)
    at = share * (len(_HEAT) - 1)
    below = np.minimum(at.astype(int), len(_HEAT) - 2)
    heat = _HEAT[below] + (at - below)[:, None] * (_HEAT[below + 1] - _HEAT[below])
    picture = _picture(case).astype(float)
    grey = 0.6 * picture.mean(-1, keepdims=True)
    shown = np.where((share > 0)[regions][..., None], 0.15 * grey + 0.85 * heat[regions], grey)
    if case.void is not None:
        y, x = np.indices(regions.shape)
        shown = np.where((case.void[regions] & ((x + y) // 3 % 2 == 0))[..., None], 128, shown)
    return shown.astype(np.uint8)


def data_uri(picture: np.ndarray) -> str:
    """A PNG inside of a page."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _picture(case: Case) -> np.ndarray:
    """The image in bytes; other number types are cut to the middle 99 % of their values, for looking only."""
    image = case.image[:3] if len(case.image) >= 3 else np.repeat(case.image[:1], 3, 0)
    if image.dtype != np.uint8:
        low, high = np.percentile(image, (0.5, 99.5))
        image = np.clip((image - low) / max(high - low, 1e-9), 0, 1) * 255
    return _scaled(np.moveaxis(image, 0, -1)).astype(np.uint8)


def _scaled(pixels: np.ndarray) -> np.ndarray:
    """Nearest neighbours, so that class ids stay what they are: whole times larger, or every n-th pixel."""
    longer = max(pixels.shape[:2])
    if longer >= _SIDE:
        step = max(1, round(longer / (1.5 * _SIDE)))
        return pixels[::step, ::step]
    times = -(-_SIDE // longer)
    return pixels.repeat(times, 0).repeat(times, 1)


def _edge(labels: np.ndarray) -> np.ndarray:
    """Pixels on either side of a change of label: a line two pixels wide."""
    edge = np.zeros(labels.shape, bool)
    down, right = labels[1:] != labels[:-1], labels[:, 1:] != labels[:, :-1]
    edge[1:] |= down
    edge[:-1] |= down
    edge[:, 1:] |= right
    edge[:, :-1] |= right
    return edge


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
