"""ambiseg: segmentation where annotators disagree. Every plausible mask, and how likely each one is.

    image ─► backbone ─► experts + gate ─► Predictive ─► MaskDistribution ─► OT loss (training) / metrics ─► report

- :mod:`ambiseg.masks`       MaskDistribution: weighted masks, the one currency
- :mod:`ambiseg.regions`     pixels that all annotators labelled alike = one region; region sums
- :mod:`ambiseg.overlap`     pairwise IoU of hard masks; soft IoU and cross-entropy costs ``[B, N, M]``
- :mod:`ambiseg.transport`   couplings (nearest, greedy, exact) and the relaxed OT objective
- :mod:`ambiseg.metrics`     ged, matched_iou, ece, diversity, entropy; named protocols; bootstrap intervals
- :mod:`ambiseg.streaming`   the same metrics as torchmetrics classes
- :mod:`ambiseg.nn`          backbones, experts, gate, the fused pixel head
- :mod:`ambiseg.methods`     MoSE, and the protocol that other methods will follow
- :mod:`ambiseg.data`        data sets, splits, augmentation, loading
- :mod:`ambiseg.config`      a run as one typed configuration; recipes; :mod:`ambiseg.schema` says what does not fit
- :mod:`ambiseg.runs`        the folder of a run, and loading a model from it
- :mod:`ambiseg.training`    ``train``; :mod:`ambiseg.evaluation` ``evaluate``; :mod:`ambiseg.prediction` ``predict``
- :mod:`ambiseg.report`      the page of a run
- :mod:`ambiseg.cli`         the ``ambiseg`` command

Everything is imported when it is first used: PyTorch alone takes over a second, and ``ambiseg --help`` needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ambiseg import data, masks, methods, metrics, nn, overlap, regions, transport
    from ambiseg.evaluation import evaluate
    from ambiseg.masks import MaskDistribution
    from ambiseg.methods import METHODS, MoSE, load_official
    from ambiseg.metrics import (
        PROTOCOLS,
        bootstrap,
        ece,
        ged,
        matched_iou,
        pixel_entropy,
        reliability_curve,
        sample_diversity,
    )
    from ambiseg.overlap import pairwise_iou
    from ambiseg.prediction import predict
    from ambiseg.runs import load
    from ambiseg.training import train

__version__ = "0.1.0.dev0"

# Where each public name lives; a module is its own home. `TYPE_CHECKING` above says the same to editors.
_HOMES = {
    "METHODS": "methods",
    "PROTOCOLS": "metrics",
    "MaskDistribution": "masks",
    "MoSE": "methods",
    "bootstrap": "metrics",
    "ece": "metrics",
    "evaluate": "evaluation",
    "ged": "metrics",
    "load": "runs",
    "load_official": "methods",
    "matched_iou": "metrics",
    "pairwise_iou": "overlap",
    "pixel_entropy": "metrics",
    "predict": "prediction",
    "reliability_curve": "metrics",
    "sample_diversity": "metrics",
    "train": "training",
}
_MODULES = ("data", "masks", "methods", "metrics", "nn", "overlap", "regions", "streaming", "transport")

__all__ = [  # noqa: RUF022 - names first, then modules
    "METHODS",
    "PROTOCOLS",
    "MaskDistribution",
    "MoSE",
    "bootstrap",
    "ece",
    "evaluate",
    "ged",
    "load",
    "load_official",
    "matched_iou",
    "pairwise_iou",
    "pixel_entropy",
    "predict",
    "reliability_curve",
    "sample_diversity",
    "train",
    "data",
    "masks",
    "methods",
    "metrics",
    "nn",
    "overlap",
    "regions",
    "transport",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"ambiseg.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"ambiseg.{name}")
    else:
        raise AttributeError(f"module 'ambiseg' has no attribute {name!r}")
    globals()[name] = value  # the next look finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
