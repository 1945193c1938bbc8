"""ambiseg: segmentation where annotators disagree. Every plausible mask, and how likely each one is.

    image ─► Method ─► Predictive ─► MaskDistribution ─► loss (training) / metrics ─► report

- :mod:`ambiseg.masks`       MaskDistribution: weighted masks, for annotations and predictions alike
- :mod:`ambiseg.regions`     pixels that all annotators labelled alike form one region; sums over regions
- :mod:`ambiseg.overlap`     pairwise IoU of hard masks; soft IoU and cross-entropy costs ``[B, N, M]``
- :mod:`ambiseg.transport`   couplings (nearest, greedy, exact) and the relaxed transport objective
- :mod:`ambiseg.metrics`     ged, matched_iou, ece, diversity, entropy; named protocols
- :mod:`ambiseg.intervals`   bootstrap intervals by patient
- :mod:`ambiseg.decisions`   what masks mean: one mask, measurements
- :mod:`ambiseg.streaming`   the same metrics as torchmetrics classes
- :mod:`ambiseg.nn`          backbones, heads, windows of large images
- :mod:`ambiseg.methods`     the methods, and the protocol that they follow
- :mod:`ambiseg.io`          files of pixels: pictures, NIfTI, DICOM
- :mod:`ambiseg.data`        data sets, splits, augmentation, loading
- :mod:`ambiseg.config`      a run as one typed configuration; recipes
- :mod:`ambiseg.runs`        the folder of a run, and loading a model from it
- :mod:`ambiseg.planning`    ``plan``: settings that fit the data, with reasons; warnings before a training
- :mod:`ambiseg.training`    ``train``; :mod:`ambiseg.evaluation` ``evaluate``; :mod:`ambiseg.prediction` ``predict``
- :mod:`ambiseg.exporting`   ``export``, a trained model as one ONNX file or PyTorch program
- :mod:`ambiseg.reporting`   ``report``, the page of a run
- :mod:`ambiseg.comparison`  ``compare``, methods on the same images
- :mod:`ambiseg.studies`     ``study``, tables of papers on any data
- :mod:`ambiseg.cli`         the ``ambiseg`` command

Everything is imported when it is first used: PyTorch alone takes over a second, and ``ambiseg --help`` needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ambiseg import (
        config,
        data,
        evaluation,
        io,
        masks,
        methods,
        metrics,
        nn,
        overlap,
        prediction,
        regions,
        runs,
        training,
        transport,
    )
    from ambiseg.comparison import compare
    from ambiseg.config import Config
    from ambiseg.decisions.compaction import Compacted, compact
    from ambiseg.decisions.consensus import CONSENSUS, Consensus, consensus
    from ambiseg.decisions.measure import MEASURES, Measurement, measure
    from ambiseg.ensembles import ensemble
    from ambiseg.evaluation import Evaluation, evaluate, evaluate_files
    from ambiseg.exporting import export
    from ambiseg.familiarity import look
    from ambiseg.masks import MaskDistribution
    from ambiseg.methods import METHODS, Method, MoSE, Predictive, Stratified, load_official
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
    from ambiseg.planning import Plan, plan
    from ambiseg.prediction import predict
    from ambiseg.prediction.calibrating import calibrate
    from ambiseg.pruning import prune
    from ambiseg.reporting import report
    from ambiseg.runs import Run, TrainedModel, load
    from ambiseg.studies import study
    from ambiseg.training import train

__version__ = "0.2.0.dev0"

# Where each public name lives; a module is its own home. `TYPE_CHECKING` above says the same to editors.
_NAMES = {
    "comparison": ("compare",),
    "config": ("Config",),
    "decisions.compaction": ("Compacted", "compact"),
    "decisions.consensus": ("CONSENSUS", "Consensus", "consensus"),
    "decisions.measure": ("MEASURES", "Measurement", "measure"),
    "ensembles": ("ensemble",),
    "evaluation": ("Evaluation", "evaluate", "evaluate_files"),
    "exporting": ("export",),
    "familiarity": ("look",),
    "masks": ("MaskDistribution",),
    "methods": ("METHODS", "Method", "MoSE", "Plan", "Predictive", "Stratified", "load_official"),
    "metrics": (
        "PROTOCOLS", "bootstrap", "ece", "ged", "matched_iou", "pixel_entropy", "reliability_curve", "sample_diversity",
    ),
    "overlap": ("pairwise_iou",),
    "planning": ("Plan", "plan"),
    "prediction": ("predict",),
    "prediction.calibrating": ("calibrate",),
    "pruning": ("prune",),
    "reporting": ("report",),
    "runs": ("Run", "TrainedModel", "load"),
    "studies": ("study",),
    "training": ("train",),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = (
    "config", "data", "evaluation", "io", "masks", "methods", "metrics", "napari", "nn", "overlap", "prediction",
    "regions", "runs", "streaming", "training", "transport",
)  # fmt: skip

__all__ = [  # noqa: RUF022 - names first, then modules
    "CONSENSUS", "MEASURES", "METHODS", "PROTOCOLS", "Compacted", "Config", "Consensus", "Evaluation",
    "MaskDistribution", "Measurement", "Method", "MoSE", "Plan", "Predictive", "Run", "Stratified", "TrainedModel",
    "bootstrap", "calibrate", "compact", "compare", "consensus", "ece", "ensemble", "evaluate", "evaluate_files",
    "export", "ged", "load", "load_official", "look", "matched_iou", "measure", "pairwise_iou", "pixel_entropy", "plan",
    "predict", "prune", "reliability_curve", "report", "sample_diversity", "study", "train", "config", "data",
    "evaluation", "io", "masks", "methods", "metrics", "nn", "overlap", "prediction", "regions", "runs", "training",
    "transport",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'ambiseg' has no attribute {name!r}")
    try:
        home = import_module(f"ambiseg.{_HOMES.get(name, name)}")
    except ModuleNotFoundError as error:
        from ambiseg._util.extras import explained

        raise explained(error) from None
    value = getattr(home, name) if name in _HOMES else home
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
