"""Data of known modes (:mod:`ambiseg.data.sets.street.flips`): how often each is predicted, and by which expert.

A mode is a combination of flips, the same in every image. In an image that lacks a class, modes that differ in that
class alone look alike: what falls to them is divided by their probabilities, so that a perfect model is found perfect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ambiseg.data.case import Flip
from ambiseg.data.sets.street.flips import ModeTable, flip_modes, happening, mode_weights
from ambiseg.masks import MaskDistribution
from ambiseg.metrics import PROTOCOLS
from ambiseg.overlap import Absent
from ambiseg.regions import Regions

_TIE = 1e-9  # IoUs that differ by less are equal: classes are averaged in another order


@dataclass(frozen=True, eq=False)
class ModeScores:
    """One image's masks among its modes; M = 2ⁿ combinations of flips, in the order of ``happening``.

    Attributes:
        ratio: ``[M]`` weight of the masks that are nearest to each mode, sums to 1.
        flipped, either: ``[n]`` expected number of pixels that are flipped, and of those that are flipped or not.
        true_flipped, true_either: ``[n]`` the same of the annotations.
        nearest: ``[K, M]`` share of each expert's masks that are nearest to each mode; ``None`` without experts.
        iou: ``[K, M]`` mean IoU of each expert's masks with each mode.
    """

    ratio: np.ndarray
    flipped: np.ndarray
    either: np.ndarray
    true_flipped: np.ndarray
    true_either: np.ndarray
    nearest: np.ndarray | None
    iou: np.ndarray | None


def score_modes(
    masks: MaskDistribution,
    regions: Regions,
    flips: Sequence[Flip],
    evaluated: Sequence[int],
    protocol: str,
    strata: int = 1,
) -> list[ModeScores | None]:
    """Where the masks of each image lie among its modes; ``None`` for an image without a valid pixel.

    Args:
        masks: N an image; those of one stratum (expert) lie side by side.
        regions: of the image's annotations, the first of which is the one without flips.
        flips: that make the modes.
        evaluated: class ids that IoU is averaged over.
        protocol: a key of ``PROTOCOLS``.
        strata: how many experts drew the masks; 1 is no experts.
    """
    absent = PROTOCOLS[protocol].absent(evaluated)
    labels, weights = masks.labels.cpu().numpy(), masks.mass.detach().double().cpu().numpy()
    index, said, size = (x.cpu().numpy() for x in (regions.index, regions.labels[:, 0], regions.size))
    return [
        _score(
            labels[b].reshape(masks.count, -1), weights[b], index[b], said[b], size[b], flips, evaluated, absent, strata
        )
        if size[b].any()
        else None
        for b in range(len(masks))
    ]


def iou_with_modes(
    masks: MaskDistribution, regions: Regions, flips: Sequence[Flip], evaluated: Sequence[int], protocol: str
) -> tuple[ModeTable, np.ndarray]:
    """The modes of a single image, and the IoU ``[N, D]`` of its masks with each."""
    index, said, size = (x[0].cpu().numpy() for x in (regions.index, regions.labels[:, 0], regions.size))
    modes, counts = _among(masks.labels[0].cpu().numpy().reshape(masks.count, -1), index, said, size, flips, evaluated)
    return modes, _iou(counts, modes.table, size, evaluated, PROTOCOLS[protocol].absent(evaluated))


def _among(
    labels: np.ndarray,
    index: np.ndarray,
    said: np.ndarray,
    size: np.ndarray,
    flips: Sequence[Flip],
    evaluated: Sequence[int],
) -> tuple[ModeTable, np.ndarray]:
    """The modes, and pixels that each mask gives each class in each region, ``[N, C, U]``; void ones are in none."""
    modes = flip_modes(said, size > 0, flips)
    classes, regions = 1 + max(int(labels.max()), int(modes.table.max()), *evaluated), len(size)
    counts = np.empty((len(labels), classes, regions))
    for n, mask in enumerate(labels):
        pairs = np.bincount(mask.astype(np.int64) * (regions + 1) + index, minlength=classes * (regions + 1))
        counts[n] = pairs.reshape(classes, regions + 1)[:, :regions]
    return modes, counts


def _score(
    labels: np.ndarray,
    weights: np.ndarray,
    index: np.ndarray,
    said: np.ndarray,
    size: np.ndarray,
    flips: Sequence[Flip],
    evaluated: Sequence[int],
    absent: Absent,
    strata: int,
) -> ModeScores:
    modes, counts = _among(labels, index, said, size, flips, evaluated)
    classes = counts.shape[1]
    iou = _iou(counts, modes.table, size, evaluated, absent)  # [N, D]
    nearest = iou >= iou.max(1, keepdims=True) - _TIE
    nearest = nearest / nearest.sum(1, keepdims=True)  # several as near as the nearest: in equal parts
    share = mode_weights(flips) / modes.weights[modes.which]  # of each combination in the mode that it is here
    nearest, iou = nearest[:, modes.which] * share, iou[:, modes.which]
    weights = weights / weights.sum()
    area = np.einsum("n,ncu->c", weights, counts)
    true = (modes.weights * ((modes.table[:, None] == np.arange(classes)[:, None]) * size[:, None, None]).sum(0)).sum(1)
    source, target = (np.array([getattr(flip, end) for flip in flips]) for end in ("source", "target"))

    def by_expert(values: np.ndarray) -> np.ndarray | None:
        return None if strata == 1 else values.reshape(strata, -1, values.shape[1]).mean(1)

    return ModeScores(
        ratio=(weights[:, None] * nearest).sum(0),  # a product of matrices may depend on the number of threads
        flipped=area[target],
        either=area[target] + area[source],
        true_flipped=true[target],
        true_either=true[target] + true[source],
        nearest=by_expert(nearest),
        iou=by_expert(iou),
    )


def _iou(
    counts: np.ndarray, table: np.ndarray, size: np.ndarray, evaluated: Sequence[int], absent: Absent
) -> np.ndarray:
    """Of every mask with every mode, ``[N, D]``; 1 for a pair that has none of the classes."""
    total, found = np.zeros((len(counts), table.shape[1])), np.zeros((len(counts), table.shape[1]))
    for c in evaluated:
        drawn = (table == c).astype(float)
        intersection = counts[:, c] @ drawn
        union = counts[:, c].sum(1)[:, None] + size @ drawn - intersection
        both = union > 0
        total += np.divide(intersection, union, out=np.full_like(union, float(absent == "agree")), where=both)
        found += both | (absent == "agree")
    return np.divide(total, found, out=np.ones_like(total), where=found > 0)


# -- averages ---------------------------------------------------------------------------------------------------------


def summarise_modes(
    scored: Sequence[dict[str, ModeScores]],
    settings: Sequence[str],
    flips: Sequence[Flip],
    classes: Sequence[str],
    expert_weights: Sequence[Sequence[float] | None],
) -> dict[str, Any] | None:
    """The part ``modes`` of an evaluation, from each image's scores by setting, in the order of the images.

    ``ratio``, ``flips``, ``experts`` and what follows are of ``setting``: the compact form where there is one, because
    it knows the experts. ``by_setting`` has the ratios of all of them.
    """
    if not scored or not flips:
        return None
    chosen = next((key for key in settings if scored[0][key].nearest is not None), settings[-1])
    truth = mode_weights(flips)
    parts = [one[chosen] for one in scored]
    ratio = np.mean([part.ratio for part in parts], 0)
    sums = {
        name: np.sum([getattr(part, name) for part in parts], 0)
        for name in ("flipped", "either", "true_flipped", "true_either")
    }
    found = {
        "setting": chosen,
        "images": len(scored),
        "names": ["".join(str(int(bit)) for bit in row) for row in happening(len(flips))],
        "probability": truth.tolist(),
        "ratio": ratio.tolist(),
        "distance": _apart(ratio, truth),
        "flips": [
            {
                "class": classes[flip.source],
                "to": classes[flip.target],
                "probability": flip.probability,
                "truth": _share(sums["true_flipped"][f], sums["true_either"][f]),
                "predicted": _share(sums["flipped"][f], sums["either"][f]),
            }
            for f, flip in enumerate(flips)
        ],
        "experts": [],
        "by_setting": {
            key: {
                "ratio": (mean := np.mean([one[key].ratio for one in scored], 0)).tolist(),
                "distance": _apart(mean, truth),
            }
            for key in settings
        },
    }
    experts = [(part.nearest, part.iou) for part in parts if part.nearest is not None and part.iou is not None]
    weights = [weights for weights in expert_weights if weights is not None]
    if len(experts) == len(weights) == len(parts):
        nearest, iou = (np.mean(values, 0) for values in zip(*experts, strict=True))
        found |= _match(nearest, iou, np.mean(weights, 0), truth)
    return found


def _match(nearest: np.ndarray, iou: np.ndarray, weights: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Experts and modes, one to one, so that the masks of as many experts as can be are nearest to their modes."""
    from scipy.optimize import linear_sum_assignment

    # Shares decide. Where an expert is nearest to neither of two modes, or the other way round, IoU does.
    experts, modes = linear_sum_assignment(nearest + 1e-3 * iou, maximize=True)
    matching: list[int | None] = [None] * nearest.shape[1]
    for expert, mode in zip(experts.tolist(), modes.tolist(), strict=True):
        matching[mode] = expert
    pairs = [(weights[expert], truth[mode]) for mode, expert in enumerate(matching) if expert is not None]
    x, y = (np.array(side) - np.mean(side) for side in zip(*pairs, strict=True))
    spread = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return {
        "experts": iou.tolist(),
        "nearest": nearest.tolist(),
        "weights": weights.tolist(),
        "matching": matching,  # the expert of each mode, from 0
        "found": len(set(nearest.argmax(1).tolist())),  # modes that some expert draws more often than any other
        "correlation": float((x * y).sum()) / spread if spread > 0 else None,  # of matched weights and probabilities
    }


def _apart(ratio: np.ndarray, truth: np.ndarray) -> float:
    """Total variation: how much probability is with the wrong modes."""
    return float(np.abs(ratio - truth).sum() / 2)


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 else None
