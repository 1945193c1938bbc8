"""How measurements are written.

=======================  ==========================================================================================
``measurements.csv``      a row for each mask: its weight, and its measurements by class
``measurements.json``     of each class and measure: mean, deviation, quantiles, histogram, and the value of each mask
=======================  ==========================================================================================
"""

from __future__ import annotations

import json
from typing import Any

from ambiseg.decisions.measure import Measurement
from ambiseg.prediction.result import Prediction

FORMAT = "ambiseg.Measurements/1"
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS = 10


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
