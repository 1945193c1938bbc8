"""Known modes of one image: each beside the stratum that draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ambiseg._util.bands import looked_up
from ambiseg.data.case import Flip
from ambiseg.data.loader import Batch
from ambiseg.evaluation.modes import iou_with_modes
from ambiseg.evaluation.results import Evaluation
from ambiseg.methods.base import Stratified
from ambiseg.viz.pictures import thinned


@dataclass(frozen=True, eq=False)
class ModeMatch:
    """A mode of one image and the stratum that is matched with it."""

    name: str  # one character per flip: 1 happened, 0 did not, - makes no difference in this image
    flipped: Sequence[str]  # classes that the flips made
    probability: float
    truth: np.ndarray  # [H, W]
    stratum: int
    weight: float
    mask: np.ndarray  # [H, W] one sample of the stratum
    iou: float


@dataclass(frozen=True, eq=False)
class ModeMatches:
    """One image's modes beside its strata, in descending order of probability, and the strata without a mode."""

    matches: Sequence[ModeMatch]
    modes: int
    spare: tuple[int, float]  # number of strata without a mode, and their weight
    valid: np.ndarray | None


@torch.no_grad()
def match_modes(
    predictive: Stratified, batch: Batch, flips: Sequence[Flip], evaluation: Evaluation, seed: int
) -> ModeMatches:
    """One sample of every stratum, matched one to one with the modes of the image so that the sum of IoU is largest."""
    from scipy.optimize import linear_sum_assignment

    masks = predictive.compact(1, torch.Generator().manual_seed(seed))
    annotations = batch.annotations
    assert annotations.regions is not None
    modes, iou = iou_with_modes(masks, annotations.regions, flips, evaluation.evaluated, evaluation.protocol)
    weights = predictive.weights[0].tolist()
    valid = None if annotations.valid is None else thinned(annotations.valid[0].numpy().astype(np.uint8)) > 0
    regions = annotations.regions.index[0].numpy().reshape(tuple(annotations.spatial))
    regions = np.minimum(regions, len(modes.table) - 1)
    matches = [
        ModeMatch(
            name=modes.names[d],
            flipped=[evaluation.classes[f.target] for f, bit in zip(flips, modes.names[d], strict=True) if bit == "1"],
            probability=float(modes.weights[d]),
            truth=thinned(looked_up(modes.table[:, d], regions)),
            stratum=int(k),
            weight=weights[k],
            mask=thinned(masks.labels[0, k].numpy()),
            iou=float(iou[k, d]),
        )
        for k, d in zip(*linear_sum_assignment(iou, maximize=True), strict=True)
    ]
    matches.sort(key=lambda match: -match.probability)
    spare = len(weights) - len(matches), max(0.0, 1 - sum(match.weight for match in matches))
    return ModeMatches(matches, len(modes.names), spare, valid)
