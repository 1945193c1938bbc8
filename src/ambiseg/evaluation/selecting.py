"""Makes the record :class:`~ambiseg.evaluation.looking.Looking` from the scores of single images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ambiseg.config import EvaluationConfig
from ambiseg.decisions.looking import area_disagreement, risk_coverage, selective
from ambiseg.evaluation.looking import LOSSES, Looking, LossKey, RiskCurve, ScoreKey, Selection
from ambiseg.evaluation.records import Interval
from ambiseg.evaluation.results import CaseScores, Evaluation, SettingScores, headline
from ambiseg.intervals import Interval as Bootstrapped
from ambiseg.masks import MaskDistribution
from ambiseg.overlap import common_valid

_POINTS = 50  # of a curve


def area_scores(masks: MaskDistribution, annotations: MaskDistribution, evaluated: Sequence[int]) -> list[float]:
    """:func:`~ambiseg.decisions.looking.area_disagreement` of each image, of the pixels that are scored."""
    if (valid := common_valid(masks, annotations)) is not None:
        masks = replace(masks, valid=valid)
    return area_disagreement(masks, evaluated).tolist()


def pair_score(scores: dict[str, float | None]) -> float:
    """Expected disagreement of two draws, from the scores of an image: its diversity without pairs of equal draws.

    GED and its unbiased form differ by exactly what these pairs add. Masks whose weights are given have no such form.

    >>> round(pair_score({"diversity": 0.3, "ged": 0.2, "ged_unbiased": 0.18}), 2)
    0.32
    """
    diversity, ged, unbiased = (scores.get(key) for key in ("diversity", "ged", "ged_unbiased"))
    if diversity is None:
        return math.nan
    return diversity if ged is None or unbiased is None else diversity + ged - unbiased


def looking(
    cases: Sequence[CaseScores], settings: Sequence[SettingScores], areas: Sequence[float] | None = None
) -> Looking | None:
    """The record of all images; ``None`` where fewer than two have a score and disagreeing readers can be measured.

    Args:
        areas: :func:`area_scores` of each image in the setting that models are compared by; ``None`` where they are
            not known, as in evaluations of earlier versions.
    """
    key = headline(settings, EvaluationConfig().samples).key
    patients = [case.patient for case in cases]
    scores: dict[ScoreKey, list[float]] = {"pairs": [pair_score(case.scores[key]) for case in cases]}
    if areas is not None:
        scores["areas"] = list(areas)
    losses: dict[LossKey, list[float | None]] = {
        "readers": [case.annotations.get("diversity") for case in cases],
        "ged": [case.scores[key]["ged"] for case in cases],
    }
    found = [_selection(s, scores[s], which, losses[which], patients) for s in scores for which in LOSSES]
    if not any(found):
        return None
    one_mask = not np.nan_to_num(scores["pairs"]).any()
    shown: ScoreKey = "areas" if one_mask and "areas" in scores else "pairs"
    return Looking(setting=key, score=shown, selections=[one for one in found if one], values=list(scores[shown]))


def looking_of(evaluation: Evaluation) -> Looking | None:
    """That of an evaluation; made of its cases where an earlier version has written it."""
    if evaluation.looking is not None:
        return evaluation.looking
    return looking(evaluation.cases, evaluation.settings)


def _selection(
    score: ScoreKey, values: Sequence[float], loss: LossKey, losses: Sequence[float | None], patients: Sequence[str]
) -> Selection | None:
    found = selective(values, losses, patients)
    if found.images < 2 or not found.random > 0:  # nothing to choose between
        return None
    known = np.array([np.nan if one is None else one for one in losses], np.float64)
    scored = np.where(np.isnan(np.asarray(values, np.float64)), np.nan, known)
    coverage, risk = risk_coverage(values, losses)
    best = risk_coverage(scored, scored)[1]
    places = np.unique(np.linspace(0, len(risk) - 1, _POINTS).round().astype(int))
    curve = {"coverage": coverage, "risk": risk, "oracle": best}
    return Selection(
        score=score,
        loss=loss,
        images=found.images,
        aurc=_interval(found.aurc),
        excess=_interval(found.excess),
        random=found.random,
        oracle=found.oracle,
        gain=found.gain,
        curve=RiskCurve(**{name: line[places].tolist() for name, line in curve.items()}),
    )


def _interval(found: Bootstrapped) -> Interval:
    return Interval(mean=found.mean, low=found.low, high=found.high)
