"""Single masks and measurements of the predicted masks against those of the readers, image by image and on average."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.extras import require
from ambiseg.decisions.consensus import CONSENSUS, check_rules, consensus, consensus_each
from ambiseg.decisions.measure import MEASURES, Measurement, measure_all
from ambiseg.decisions.verification import covered, crps, crps_of_readers, pit
from ambiseg.evaluation.decided import (
    OVERLAPS,
    READER,
    SURFACES,
    ConsensusScores,
    Coverage,
    Decided,
    MeasureScores,
)
from ambiseg.evaluation.records import Mean
from ambiseg.masks import MaskDistribution, common_valid
from ambiseg.metrics import bootstrap
from ambiseg.overlap import pairwise_iou

LEVELS = (0.5, 0.8, 0.9)
_RESAMPLES = 2_000  # there are many numbers
_FEW = 8  # classes of which everything is measured; of more, only what is cheap
_PIXELS = 1 << 24  # of an image; larger ones are left out


@dataclass(frozen=True)
class DecisionRules:
    """What is made of the predicted masks.

    Args:
        how: keys of ``CONSENSUS``; all but ``staple`` unless given.
        surfaces: HD95 and ASSD as well, by MONAI.
        spacing: of the pixels in mm, down and across; ``None``: lengths are in pixels.
    """

    how: tuple[str, ...] = tuple(name for name in CONSENSUS if name != "staple")
    surfaces: bool = False
    spacing: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_rules(self.how)
        if self.surfaces:
            require("surfaces")
        if self.spacing is not None and not (len(self.spacing) == 2 and all(0 < x < np.inf for x in self.spacing)):
            found = ", ".join(f"{x:g}" for x in self.spacing) or "none"
            raise ConfigError(f"spacing: expected two positive numbers, down and across, found {found}")


def decision_rules(
    how: Sequence[str] | None = None, surfaces: bool = False, spacing: Sequence[float] | None = None
) -> DecisionRules:
    """Of the options of ``evaluate``; one number of ``spacing`` is that of both axes."""
    steps = None if spacing is None else tuple(spacing) * (2 if len(spacing) == 1 else 1)
    rules = DecisionRules().how if how is None else tuple(how)
    return DecisionRules(rules, surfaces, steps)


@dataclass(frozen=True, eq=False)
class DecidedCase:
    """One image: scores by rule and name, and by class and measure."""

    consensus: Mapping[str, Mapping[str, float]]
    measures: Mapping[tuple[int, str], Mapping[str, Any]]
    setting: str


def decide(
    masks: MaskDistribution,
    annotations: MaskDistribution,
    evaluated: Sequence[int],
    rules: DecisionRules,
    setting: str,
) -> list[DecidedCase] | None:
    """The scores of every image of a batch; ``None`` for images that are too large."""
    if masks.spatial.numel() > _PIXELS or len(masks.spatial) != 2:
        return None
    valid = common_valid(masks, annotations)
    drawn = replace(masks, valid=valid).to("cpu")
    said = MaskDistribution(annotations.labels, annotations.weights, valid).to("cpu")
    what = tuple(MEASURES) if len(evaluated) <= _FEW else ("presence", "size")
    ours, theirs = (measure_all(one, evaluated, rules.spacing, what) for one in (drawn, said))
    measured = [(p.of, p.what, _verified(p, r)) for p, r in zip(ours, theirs, strict=True)]
    cases = []
    for b in range(len(drawn)):
        measures = {
            (of, name): {key: value[b].tolist() for key, value in columns.items()} for of, name, columns in measured
        }
        cases.append(DecidedCase(_consensus(drawn[b], said[b], evaluated, rules), measures, setting))
    return cases


def _verified(predicted: Measurement, readers: Measurement) -> dict[str, Tensor]:
    found = {"predicted": predicted.mean, "readers": readers.mean, "crps": crps(predicted, readers)}
    found |= {"crps_of_readers": crps_of_readers(readers), "pit": pit(predicted, readers)}
    for level in LEVELS:
        low, high = predicted.interval(level).unbind(1)
        found |= {f"covered {level}": covered(predicted, readers, level), f"width {level}": high - low}
    return found


def _consensus(
    masks: MaskDistribution, readers: MaskDistribution, evaluated: Sequence[int], rules: DecisionRules
) -> dict[str, dict[str, float]]:
    """Of one image: each rule's mask, and each reader's, against the readers and their majority."""
    made = consensus_each(masks, rules.how, classes=evaluated)
    majority = consensus(readers, "majority", classes=evaluated).labels
    there = (readers.mass[0] > 0).nonzero().flatten()
    drawn, v = readers.labels[:, there].long(), readers.mass[0, there].double()
    candidates = torch.cat([torch.stack([one.labels for one in made.values()], 1).long(), drawn], 1)
    against = torch.cat([drawn, majority[:, None].long()], 1)
    tables = _overlaps(candidates, against, readers.valid, evaluated)
    if rules.surfaces:
        tables |= _surfaces(candidates, against, readers.valid, evaluated, rules.spacing)
    counts = readers.valid is None or bool(readers.valid.any())
    scores: dict[str, dict[str, float]] = {}
    for k, (name, one) in enumerate(made.items()):
        row = {"expected iou": float(one.expected_iou), "expected dice": float(one.expected_dice)}
        for key, table in tables.items():
            row[f"readers {key}"] = _mean(table[k, :-1], v) if counts else np.nan
            row[f"majority {key}"] = float(table[k, -1]) if counts else np.nan
        scores[name] = row
    own, K = {}, len(made)
    for key, table in tables.items():
        each = [_mean(_without(table[K + j, :-1], j), _without(v, j)) for j in range(len(v))]
        own[f"readers {key}"] = _mean(torch.tensor(each), v) if counts and len(v) > 1 else np.nan
    scores[READER] = own
    return scores


def _overlaps(candidates: Tensor, against: Tensor, valid: Tensor | None, evaluated: Sequence[int]) -> dict[str, Tensor]:
    """Dice and IoU of K masks with M others, ``[K, M]``, means over the classes; a class in neither counts as 1."""
    a, b = MaskDistribution(candidates, valid=valid), MaskDistribution(against, valid=valid)
    iou = torch.stack([pairwise_iou(a, b, (c,))[0] for c in evaluated])
    return {"dice": (2 * iou / (1 + iou)).mean(0), "iou": iou.mean(0)}


def _surfaces(
    candidates: Tensor, against: Tensor, valid: Tensor | None, evaluated: Sequence[int], spacing: Sequence[float] | None
) -> dict[str, Tensor]:
    """HD95 and ASSD ``[K, M]`` by MONAI, means over the classes that both masks have; nan where there is none."""
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance
    from monai.metrics.surface_distance import compute_average_surface_distance

    K, M = candidates.shape[1], against.shape[1]
    found = torch.full((2, len(evaluated), K, M), torch.nan, dtype=torch.float64)
    keep = torch.ones_like(candidates[0, 0], dtype=torch.bool) if valid is None else valid[0]
    for i, c in enumerate(evaluated):
        # Equal masks are compared once: rules often agree.
        x, of_x = torch.unique(((candidates[0] == c) & keep).flatten(1), dim=0, return_inverse=True)
        y, of_y = torch.unique(((against[0] == c) & keep).flatten(1), dim=0, return_inverse=True)
        pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(y)))
        pairs = pairs[x.any(1)[pairs[:, 0]] & y.any(1)[pairs[:, 1]]]
        if not len(pairs):
            continue
        a, b = (rows[pairs[:, n]].view(-1, 1, *keep.shape).float() for n, rows in enumerate((x, y)))
        table = torch.full((2, len(x), len(y)), torch.nan, dtype=torch.float64)
        about: dict[str, Any] = {"include_background": True, "spacing": None if spacing is None else list(spacing)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of MONAI, about its own arguments
            hd95 = compute_hausdorff_distance(a, b, percentile=95, **about)
            assd = compute_average_surface_distance(a, b, symmetric=True, **about)
        table[0, pairs[:, 0], pairs[:, 1]] = hd95[:, 0].double()
        table[1, pairs[:, 0], pairs[:, 1]] = assd[:, 0].double()
        found[:, i] = table[:, of_x][:, :, of_y]
    return dict(zip(SURFACES, found.nanmean(1), strict=True))


def _mean(values: Tensor, weights: Tensor) -> float:
    """Of the pairs that have a value."""
    there = ~values.isnan()
    total = float(weights[there].sum())
    return float((values[there].double() * weights[there]).sum()) / total if total > 0 else np.nan


def _without(values: Tensor, j: int) -> Tensor:
    return torch.cat([values[:j], values[j + 1 :]])


# -- averages ----------------------------------------------------------------------------------------------------------


def summarise_decided(
    cases: Sequence[DecidedCase | None], patients: Sequence[str], rules: DecisionRules
) -> Decided | None:
    """Averages over all images, with intervals by patient; ``None`` unless all images were decided in one setting."""
    known = [case for case in cases if case is not None]
    if len(known) < len(cases) or len({case.setting for case in known}) != 1:
        return None

    def span(values: Sequence[float]) -> Mean:
        found = bootstrap(values, patients, resamples=_RESAMPLES)
        return Mean(mean=found.mean, low=found.low, high=found.high, count=int((~np.isnan(values)).sum()))

    def spans(how: str, start: str) -> dict[str, Mean]:
        keys = [f"{start} {key}" for key in (*OVERLAPS, *SURFACES) if f"{start} {key}" in known[0].consensus[how]]
        return {key.split()[1]: span([case.consensus[how][key] for case in known]) for key in keys}

    made = [
        ConsensusScores(
            how=how, expected=spans(how, "expected"), readers=spans(how, "readers"), majority=spans(how, "majority")
        )
        for how in known[0].consensus
    ]
    measures = []
    for of, what in known[0].measures:
        rows = [case.measures[of, what] for case in known]
        bins = np.array([row["pit"] for row in rows])
        bins = bins[~np.isnan(bins).any(1)]
        names = ("predicted", "readers", "crps", "crps_of_readers")
        measures.append(
            MeasureScores(
                of=of,
                what=what,
                unit=MEASURES[what].unit(2, rules.spacing),
                **{name: span([row[name] for row in rows]) for name in names},
                pit=bins.mean(0).tolist() if len(bins) else [],
                coverage=[
                    Coverage(
                        level=level,
                        covered=span([row[f"covered {level}"] for row in rows]),
                        width=span([row[f"width {level}"] for row in rows]),
                    )
                    for level in LEVELS
                ],
            )
        )
    spacing = None if rules.spacing is None else list(rules.spacing)
    return Decided(setting=known[0].setting, spacing=spacing, consensus=made, measures=measures)
