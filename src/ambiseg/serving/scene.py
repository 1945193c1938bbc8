"""What a client can look at: one image with its masks, slice by slice, as plain arrays."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ambiseg._util.bands import counted
from ambiseg.io.source import Source
from ambiseg.prediction.result import Prediction

MAGIC = b"AMB1"


class Scene(Protocol):
    """One image with whatever is known about its masks.

    Attributes:
        prediction: its masks with what is known of them; of annotations too, which no model made.
        slices: how many.
        nbytes: memory that it takes.
    """

    prediction: Prediction

    slices: int
    nbytes: int

    def summary(self) -> dict[str, Any]:
        """What there is to say about the image as a whole, as JSON has it."""
        ...

    def slice(self, k: int) -> Mapping[str, np.ndarray]:
        """The arrays of one slice, by name: ``image [C, h, w]`` float32, and others whose last axes are its size."""
        ...

    def header(self, k: int) -> Mapping[str, Any]:
        """What the header of a slice says beside its arrays."""
        ...


class PredictionScene:
    """The scene of a prediction."""

    def __init__(self, prediction: Prediction, model: int | None = 0) -> None:
        self.prediction, self.model = prediction, model
        self.slices = prediction.source.slices
        masks, strata = prediction.masks, prediction.strata
        held = [masks.labels, masks.marginal, prediction.entropy, None if strata is None else strata.centres]
        bounds = () if prediction.guaranteed is None else prediction.guaranteed.classes
        self.nbytes = prediction.source.nbytes + sum(x.nbytes for x in held if x is not None)
        self.nbytes += sum(4 * one.outer.nbytes for one in bounds)

    def summary(self) -> dict[str, Any]:
        """See ``docs/serve.md``; masks are heaviest first, strata are counted from 1."""
        found, source = self.prediction, self.prediction.source
        ends = [_range(source.read(k)) for k in range(source.slices)]
        strata, classes = found.strata, len(found.classes)
        masks = []
        for i, (weight, labels) in enumerate(zip(found.masks.mass[0].tolist(), found.masks.labels[0], strict=True)):
            of = [k + 1 for k in found.strata_of(i)]
            masks.append({"weight": weight, "strata": of, "pixels": counted(labels.numpy(), classes).tolist()})
        return {
            "name": found.name,
            "model": self.model,
            "form": found.form,
            "size": list(source.size),
            "slices": source.slices,
            "channels": source.channels,
            "classes": list(found.classes),
            "spacing": spacing(source),
            "units": source.units,
            "range": [min(low for low, _ in ends), max(high for _, high in ends)],
            "strata": None if strata is None else {"name": strata.name, "weights": strata.weights.tolist()},
            "masks": masks,
            "entropy_max": math.log(max(classes, 2)),
            "notes": [note.replace("--assume-window LOW HIGH", "assume_low and assume_high") for note in found.notes],
            "seed": found.options.seed,
            "symmetries": found.options.symmetries,
            "windows": found.windows,
            "kept": None if found.kept is None else found.kept._asdict(),
        }

    def slice(self, k: int) -> dict[str, np.ndarray]:
        """``image``, ``masks``, ``centres`` where there are strata, ``marginal`` and ``entropy``."""
        found, source = self.prediction, self.prediction.source
        flat, classes = source.slices == 1, len(found.classes)
        dtype = np.uint8 if classes <= 256 else np.uint16
        masks, marginal = found.masks.labels[0], found.masks.marginal
        assert marginal is not None
        arrays = {
            "image": source.read(k).astype(np.float32),
            "masks": (masks if flat else masks[:, k]).numpy().astype(dtype),
        }
        if found.strata is not None:
            centres = found.strata.centres
            arrays["centres"] = (centres if flat else centres[:, k]).numpy().astype(dtype)
        soft, entropy = marginal[0] if flat else marginal[0, :, k], found.entropy if flat else found.entropy[k]
        arrays["marginal"] = _byte(soft)
        arrays["entropy"] = _byte(entropy / math.log(max(classes, 2)))
        return arrays

    def header(self, k: int) -> dict[str, Any]:
        """The weights of the strata in this slice, where there are any."""
        strata = self.prediction.strata
        return {} if strata is None else {"weights": strata.slice_weights[k].tolist()}


def _range(pixels: np.ndarray) -> tuple[float, float]:
    """Smallest and largest finite value."""
    finite = pixels[np.isfinite(pixels)] if pixels.dtype.kind == "f" else pixels
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def _byte(share: torch.Tensor) -> np.ndarray:
    """Numbers from 0 to 1 as 0 to 255."""
    return (share * 255).round_().clamp_(0, 255).to(torch.uint8).numpy()


def spacing(source: Source) -> list[float | None] | None:
    """Millimetres between slices, rows and columns, for JSON; of an image the first of the three is null."""
    found = source.spacing
    return None if found is None else [*[None] * (3 - len(found)), *(float(f"{step:.6g}") for step in found)]


def packed(scene: Scene, k: int) -> bytes:
    """A slice for a browser, see :func:`pack`."""
    return pack(scene.slice(k), k, scene.header(k))


def pack(arrays: Mapping[str, np.ndarray], k: int, more: Mapping[str, Any]) -> bytes:
    """Arrays of slice ``k``, little endian, every part at a multiple of eight bytes:

    ``AMB1``, the length of the header as uint32, the header (JSON, padded with spaces), then the arrays one after
    another. ``offsets`` of the header count from its end.
    """
    listed, offsets, parts, at = [], [], list[bytes](), 0
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        listed.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        offsets.append(at)
        content = little.tobytes()
        parts += [content, bytes(-len(content) % 8)]
        at += len(content) + -len(content) % 8
    size = list(next(iter(arrays.values())).shape[-2:])
    header = {"slice": k, "size": size, "arrays": listed, "offsets": offsets, **more}
    text = json.dumps(header, ensure_ascii=True, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *parts])
