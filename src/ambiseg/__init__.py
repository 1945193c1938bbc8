"""ambiseg: segmentation where annotators disagree. Every plausible mask, and how likely each one is.

    image ─► backbone ─► experts + gate ─► Predictive ─► MaskDistribution ─► OT loss (training) / metrics ─► report

- :mod:`ambiseg.masks`       MaskDistribution: weighted masks, the one currency
- :mod:`ambiseg.regions`     pixels that all annotators labelled alike = one region; region sums
- :mod:`ambiseg.overlap`     pairwise IoU of hard masks; soft IoU and cross-entropy costs ``[B, N, M]``
- :mod:`ambiseg.transport`   couplings (nearest, greedy, exact) and the relaxed OT objective
- :mod:`ambiseg.metrics`     ged, matched_iou, ece, diversity, entropy; named protocols; bootstrap intervals
- :mod:`ambiseg.streaming`   the same metrics as torchmetrics classes (imported on demand)
- :mod:`ambiseg.nn`          backbones, experts, gate, the fused pixel head
- :mod:`ambiseg.methods`     MoSE, and the protocol that other methods will follow
"""

from ambiseg import masks, methods, metrics, nn, overlap, regions, transport
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

__version__ = "0.1.0.dev0"

__all__ = [
    "METHODS",
    "PROTOCOLS",
    "MaskDistribution",
    "MoSE",
    "bootstrap",
    "ece",
    "ged",
    "load_official",
    "masks",
    "matched_iou",
    "methods",
    "metrics",
    "nn",
    "overlap",
    "pairwise_iou",
    "pixel_entropy",
    "regions",
    "reliability_curve",
    "sample_diversity",
    "transport",
]
