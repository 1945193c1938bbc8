"""Masks among known modes (:mod:`ambiseg.data.sets.street.flips`): which mode each mask is nearest to.

A mode is a combination of flips, the same in every image. In an image that lacks a class, modes that differ in that
class alone are equal: their share of the masks is divided by their probabilities, so that a perfect model gets a
perfect score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ambiseg._util.bands import bands
from ambiseg.data.case import Flip
from ambiseg.data.sets.street.flips import ModeTable, flip_modes, mode_weights
from ambiseg.evaluation.overlaps import region_iou
from ambiseg.masks import MaskDistribution
from ambiseg.methods.drawing import Drawing
from ambiseg.metrics import PROTOCOLS
from ambiseg.regions import Regions

_TIE = 1e-9  # IoUs that differ by less are equal: classes are averaged in another order


@dataclass(frozen=True, eq=False)
class ModeScores:
    """One image's masks among its modes; M = 2ⁿ combinations of flips, in the order of ``happening``."""

    ratio: np.ndarray  # [M] weight of the masks that are nearest to each mode, sums to 1
    flipped: np.ndarray  # [n] expected number of pixels that are flipped
    either: np.ndarray  # [n] the same of pixels that are flipped or not
    true_flipped: np.ndarray  # [n] the same of the annotations
    true_either: np.ndarray
    nearest: np.ndarray | None  # [K, M] share of each stratum's masks nearest to each mode; None without strata
    iou: np.ndarray | None  # [K, M] mean IoU of each stratum's masks with each mode


def score_modes(
    drawing: Drawing, regions: Regions, flips: Sequence[Flip], evaluated: Sequence[int], protocol: str
) -> list[ModeScores | None]:
    """Where the masks of each image are among its modes; ``None`` for an image without a valid pixel.

    Args:
        drawing: N masks per image.
        regions: of the image's annotations, the first of which is the one without flips.
        flips: the flips that make the modes.
        evaluated: class ids that IoU is averaged over.
        protocol: a key of ``PROTOCOLS``.
    """
    return [
        _score(_compare(drawing.masks, regions, b, flips, evaluated, protocol), flips, drawing.strata)
        if valid
        else None
        for b, valid in enumerate((regions.size > 0).any(1).tolist())
    ]


def iou_with_modes(
    masks: MaskDistribution, regions: Regions, flips: Sequence[Flip], evaluated: Sequence[int], protocol: str
) -> tuple[ModeTable, np.ndarray]:
    """The modes of a single image, and the IoU ``[N, D]`` of its masks with each."""
    compared = _compare(masks, regions, 0, flips, evaluated, protocol)
    return compared.modes, compared.iou


class _Compared(NamedTuple):
    """One image's masks beside its D different modes."""

    modes: ModeTable
    weights: np.ndarray  # [N] of the masks
    counts: np.ndarray  # [N, C, U] pixels that each mask gives each class in each region; void is in no region
    size: np.ndarray  # [U] pixels of each region
    iou: np.ndarray  # [N, D]


def _compare(
    masks: MaskDistribution, regions: Regions, b: int, flips: Sequence[Flip], evaluated: Sequence[int], protocol: str
) -> _Compared:
    labels = masks.labels[b].cpu().numpy().reshape(masks.count, -1)
    index, first, size = (x[b].cpu().numpy() for x in (regions.index, regions.labels[:, 0], regions.size))
    modes = flip_modes(first, size > 0, flips)
    classes, U = 1 + max(int(labels.max()), int(modes.table.max()), *evaluated), len(size)
    counts = np.zeros((len(labels), classes * (U + 1)))
    for band in bands(labels.shape[1]):
        for found, mask in zip(counts, labels, strict=True):
            found += np.bincount(mask[band].astype(np.int64) * (U + 1) + index[band], minlength=len(found))
    counts = counts.reshape(-1, classes, U + 1)[..., :U]
    iou = region_iou(counts, modes.table, size, evaluated, PROTOCOLS[protocol].absent(evaluated))
    iou = np.nan_to_num(iou, nan=1.0)  # of a pair that has none of the classes
    return _Compared(modes, masks.mass[b].detach().double().cpu().numpy(), counts, size, iou)


def _score(compared: _Compared, flips: Sequence[Flip], strata: int) -> ModeScores:
    modes, counts, iou = compared.modes, compared.counts, compared.iou
    nearest = iou >= iou.max(1, keepdims=True) - _TIE
    nearest = nearest / nearest.sum(1, keepdims=True)  # equal shares of several nearest modes
    share = mode_weights(flips) / modes.weights[modes.which]  # of each combination among those that are equal here
    nearest, iou = nearest[:, modes.which] * share, iou[:, modes.which]
    weights = compared.weights / compared.weights.sum()
    area = np.einsum("n,ncu->c", weights, counts)
    classes = np.arange(counts.shape[1])[:, None]
    true = (modes.weights * ((modes.table[:, None] == classes) * compared.size[:, None, None]).sum(0)).sum(1)
    source, target = (np.array([getattr(flip, end) for flip in flips]) for end in ("source", "target"))

    def by_stratum(values: np.ndarray) -> np.ndarray | None:
        return None if strata == 1 else values.reshape(strata, -1, values.shape[1]).mean(1)

    return ModeScores(
        ratio=(weights[:, None] * nearest).sum(0),  # the last digit of a matrix product depends on the threads
        flipped=area[target],
        either=area[target] + area[source],
        true_flipped=true[target],
        true_either=true[target] + true[source],
        nearest=by_stratum(nearest),
        iou=by_stratum(iou),
    )
