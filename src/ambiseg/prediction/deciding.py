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
from ambiseg.prediction.result import Prediction

FORMAT = "ambiseg.Measurements/1"
CHEAP = ("presence", "size")
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS = 10


def consensus_of(prediction: Prediction) -> dict[str, Consensus]:
    """The single masks that the options ask for, by rule."""
    rules, classes = prediction.options.consensus, range(1, len(prediction.classes))
    return consensus_each(prediction.masks, rules, classes=list(classes) or [0]) if rules else {}


def measured(prediction: Prediction) -> list[Measurement]:
    """All measures of all classes but the background, if the options ask for them; else :data:`CHEAP` ones."""
    spacing, classes = prediction.source.spacing, range(1, len(prediction.classes))
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
    spacing = prediction.source.spacing
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
