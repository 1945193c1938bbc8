"""What is made of the masks of a prediction when it is written: single masks, and measurements with distributions.

=======================  ==========================================================================================
``consensus_NAME.png``    one mask by the rule NAME of :data:`~ambiseg.decisions.consensus.CONSENSUS`
``measurements.csv``      a row for each mask: its weight, and its measurements by class
``measurements.json``     of each class and measure: mean, deviation, quantiles, histogram, and the value of each mask
=======================  ==========================================================================================
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from ambiseg._util.bands import counted
from ambiseg.decisions.consensus import Consensus, consensus_each
from ambiseg.decisions.measure import MEASURES, Measurement, measure_all
from ambiseg.io.source import Source
from ambiseg.prediction.result import Prediction

FORMAT = "ambiseg.Measurements/1"
CHEAP = ("presence", "size")
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS = 10


def spacing_of(source: Source) -> tuple[float, ...] | None:
    """Millimetres from pixel to pixel, of a volume from slice to slice first; ``None`` where the file does not say.

    >>> from pathlib import Path
    >>> known = Source(Path("a"), "NIfTI", 1, (4, 4), 1, np.dtype("u1"), lambda k: np.zeros((1, 4, 4)), 0.5 * np.eye(4))
    >>> spacing_of(known)
    (0.5, 0.5)
    """
    if source.affine is None:
        return None
    steps = np.linalg.norm(source.affine[:3, :3], axis=0)[0 if source.slices > 1 else 1 :]
    return tuple(steps.tolist()) if np.isfinite(steps).all() and (steps > 0).all() else None


def consensus_of(prediction: Prediction) -> dict[str, Consensus]:
    """The single masks that the options ask for, by rule."""
    rules, classes = prediction.options.consensus, range(1, len(prediction.classes))
    return consensus_each(prediction.masks, rules, classes=list(classes) or [0]) if rules else {}


def measured(prediction: Prediction) -> list[Measurement]:
    """All measures of all classes but the background, if the options ask for them; else :data:`CHEAP` ones."""
    spacing, classes = spacing_of(prediction.source), range(1, len(prediction.classes))
    if prediction.options.measure:
        return measure_all(prediction.masks, classes, spacing)
    labels = prediction.masks.labels[0].numpy()  # of which nothing is copied: a volume may fill the memory
    pixels = np.stack([counted(mask, len(prediction.classes)) for mask in labels], 1)
    ndim, weights = labels.ndim - 1, prediction.masks.mass
    unit = MEASURES["size"].unit(ndim, spacing)
    each = 1.0 if spacing is None else float(np.prod(spacing)) / (1000 if ndim == 3 else 1)
    found = []
    for of in classes:
        values = torch.from_numpy(pixels[of, None].astype(np.float64))
        found.append(Measurement("presence", of, "", (values > 0).double(), weights))
        found.append(Measurement("size", of, unit, values * each, weights))
    return found


def summaries(measurements: list[Measurement], classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Mean, deviation, median and 90 % interval of each, for ``weights.json``."""
    return [{"class": classes[one.of], **one.summary()} for one in measurements]


def measurements_json(prediction: Prediction, measurements: list[Measurement]) -> str:
    """All of them with their distributions, as JSON."""
    spacing = spacing_of(prediction.source)
    about = {"format": FORMAT, "name": prediction.name, "image": str(prediction.source.path)}
    about |= {"spacing_mm": spacing, "weights": prediction.masks.mass[0].tolist()}
    listed = []
    for one, summary in zip(measurements, summaries(measurements, prediction.classes), strict=True):
        edges, mass = (part.tolist() for part in one.histogram(_BINS))
        quantiles = dict(zip(map(str, _QUANTILES), one.quantile(_QUANTILES)[0].tolist(), strict=True))
        listed.append(
            {**summary, "quantiles": quantiles, "histogram": {"edges": edges, "weight": mass}}
            | {"values": one.values[0].tolist()}
        )
    return json.dumps({**about, "measurements": listed}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
