"""From the scores of single images to averages: with intervals by patient, by bucket of readers, and by mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ambiseg.config import EvaluationConfig
from ambiseg.data.case import Flip
from ambiseg.data.sets.street.flips import happening, mode_weights
from ambiseg.evaluation.anchors import AnchorScores, anchors_of, verdict
from ambiseg.evaluation.deciding import DecisionRules, summarise_decided
from ambiseg.evaluation.modes import ModeScores
from ambiseg.evaluation.records import Interval, Mean
from ambiseg.evaluation.results import (
    METRICS,
    Bucket,
    CaseScores,
    EmptyBin,
    EmptyMasks,
    Evaluation,
    FlipScores,
    Modes,
    ModeShares,
    Reliability,
    SettingScores,
    Strata,
    StrataBucket,
    headline,
)
from ambiseg.evaluation.scoring import ScoredCase
from ambiseg.evaluation.selecting import looking
from ambiseg.metrics import ReliabilityCurve, bootstrap

_RESAMPLES = 10_000  # of all images
_EMPTY_BINS = 5
_BUCKET_RESAMPLES = 2_000  # there are many buckets, and their intervals are wide


def summarise(
    scored: Sequence[ScoredCase],
    classes: Sequence[str],
    flips: Sequence[Flip] = (),
    stratum: str = "stratum",
    decisions: DecisionRules | None = None,
    **about: Any,
) -> Evaluation:
    """Averages of all images in the order given.

    Args:
        scored: every image, all in the same settings.
        classes: names of the classes.
        flips: the flips that make the modes, for data of known modes.
        stratum: what the method calls a stratum.
        decisions: what was made of the predicted masks.
        about: the other fields of :class:`Evaluation`.
    """
    cases = [one.scores for one in scored]
    patients = [case.patient for case in cases]
    annotations = {name: [case.annotations[name] for case in cases] for name in ("diversity", "entropy")}
    annotations["empty_share"] = [case.empty_share for case in cases]
    settings = [_setting(key, scored) for key in cases[0].scores]
    among = [one for one in scored if one.modes]
    weights = [one.scores.strata_weights for one in among]
    anchors = [one.anchors for one in scored if one.anchors is not None]
    if len(anchors) == len(scored):
        about |= _beside(
            anchors, cases, settings, about.get("annotator", "reader"), bool(flips), about.get("unit", "patient")
        )
    key = headline(settings, EvaluationConfig().samples).key
    areas = [one.areas[key] for one in scored if key in one.areas]
    return Evaluation(
        images=len(cases),
        patients=len(set(patients)),
        annotations={name: mean_of(values, patients) for name, values in annotations.items()},
        settings=settings,
        strata=_strata(stratum, scored, settings),
        modes=summarise_modes([one.modes for one in among], flips, classes, weights),
        decided=summarise_decided([one.decided for one in scored], patients, decisions or DecisionRules()),
        classes=list(classes),
        cases=cases,
        looking=looking(cases, settings, areas if len(areas) == len(cases) else None),
        **about,
    )


def _beside(
    scored: Sequence[AnchorScores],
    cases: Sequence[CaseScores],
    settings: Sequence[SettingScores],
    annotator: str,
    known: bool,
    unit: str,
) -> dict[str, Any]:
    """The anchors, and the verdict on the setting that models are compared by."""
    patients = [case.patient for case in cases]
    anchors = anchors_of(
        scored, [s.samples for s in settings], annotator, known, lambda values: mean_of(list(values), patients)
    )
    setting = headline(settings, EvaluationConfig().samples)
    values = _array([case.scores[setting.key]["ged"] for case in cases])
    text = verdict(setting.metrics["ged"], values.tolist(), scored, anchors, setting.samples, patients, unit)
    return {"anchors": anchors, "verdict": text}


def mean_of(values: Sequence[float | None], patients: Sequence[str], resamples: int = _RESAMPLES) -> Mean:
    """The mean of the images that have a value, with its interval over patients.

    >>> mean_of([0.1, 0.3, None], ["ann", "bob", "bob"]).count
    2
    """
    numbers = _array(values)
    found = bootstrap(numbers, patients, resamples=resamples)
    return Mean(mean=found.mean, low=found.low, high=found.high, count=int((~np.isnan(numbers)).sum()))


def _setting(key: str, scored: Sequence[ScoredCase]) -> SettingScores:
    form, _, samples = key.rpartition("-")
    pooled = _pool(scored, key)
    bins = len(pooled.count)

    def averages(chosen: Sequence[ScoredCase], resamples: int) -> dict[str, Any]:
        patients = [one.scores.patient for one in chosen]
        values = {name: [one.scores.scores[key][name] for one in chosen] for name in METRICS if name != "ece"}
        means = {metric: mean_of(numbers, patients, resamples) for metric, numbers in values.items()}
        return {"metrics": means, "ece": _pooled_ece(chosen, key, resamples)}

    mass, share = _empty(scored, key)
    return SettingScores(
        form=form,
        samples=int(samples),
        **averages(scored, _RESAMPLES),
        ece_share=pooled.share if pooled.total > 0 else 0.0,
        reliability=Reliability(
            edges=[i / bins for i in range(bins + 1)],
            confidence=pooled.confidence.tolist(),
            accuracy=pooled.accuracy.tolist(),
            weight=(pooled.count.double() / pooled.total).tolist(),
        ),
        empty=EmptyMasks(
            correlation=_correlation(mass, share),
            error=_finite_mean(np.abs(mass - share)),
            calibration=_empty_calibration(mass, share),
        ),
        buckets=[
            Bucket(readers=readers, images=len(chosen), **averages(chosen, _BUCKET_RESAMPLES))
            for readers, chosen in _buckets(scored)
        ],
    )


def _empty(scored: Sequence[ScoredCase], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each image: probability of an empty mask, and share of the readers who drew none of the classes."""
    mass = _array([one.scores.scores[key]["empty_mass"] for one in scored])
    return mass, _array([one.scores.empty_share for one in scored])


def _empty_calibration(mass: np.ndarray, share: np.ndarray) -> list[EmptyBin]:
    """Images binned by the predicted probability of an empty mask."""
    both = ~(np.isnan(mass) | np.isnan(share))
    mass, share = mass[both], share[both]
    if not mass.any() and not share.any():
        return []
    edges = np.linspace(0, 1, _EMPTY_BINS + 1)
    bin_of = np.clip(np.searchsorted(edges, mass), 1, _EMPTY_BINS) - 1
    return [
        EmptyBin(
            low=float(edges[k]),
            high=float(edges[k + 1]),
            images=int((bin_of == k).sum()),
            predicted=float(mass[bin_of == k].mean()),
            readers=float(share[bin_of == k].mean()),
        )
        for k in sorted(set(bin_of.tolist()))
    ]


def _buckets(scored: Sequence[ScoredCase]) -> list[tuple[int, list[ScoredCase]]]:
    found = sorted({one.scores.readers for one in scored})
    return [(readers, [one for one in scored if one.scores.readers == readers]) for readers in found]


def _pool(scored: Sequence[ScoredCase], key: str) -> ReliabilityCurve:
    """All pixels together, added up in the order of the images."""
    return reduce(add, (one.curves[key] for one in scored))


def _pooled_ece(scored: Sequence[ScoredCase], key: str, resamples: int) -> Interval:
    """ECE of all pixels together, and its interval: whole patients are resampled, and their pixels pooled again."""
    value = _pool(scored, key).ece
    by_patient: dict[str, list[ReliabilityCurve]] = {}
    for one in scored:
        by_patient.setdefault(one.scores.patient, []).append(one.curves[key])
    if (size := len(by_patient)) < 2 or np.isnan(value):
        return Interval(mean=value, low=None, high=None)
    gaps = [np.sum([c.confidence_sum - c.accuracy_sum for c in curves], 0) for curves in by_patient.values()]
    totals = np.array([sum(float(curve.total) for curve in curves) for curves in by_patient.values()])
    binned = np.array([sum(float(curve.count.sum()) for curve in curves) for curves in by_patient.values()])
    rng, equal, found = np.random.default_rng(0), np.full(size, 1 / size), []
    for start in range(0, resamples, step := max(1, 2**20 // size)):  # in blocks, to bound memory
        times = rng.multinomial(size, equal, size=min(step, resamples - start))
        # Sums, because the last digit of a matrix product depends on the number of threads.
        pixels = (times * totals).sum(1)
        apart = sum(np.abs((times * gap).sum(1)) for gap in np.transpose(gaps))
        found.append((apart / np.maximum(pixels, 1))[(times * binned).sum(1) > 0])
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975]).tolist()
    return Interval(mean=value, low=low, high=high)


def _strata(name: str, scored: Sequence[ScoredCase], settings: Sequence[SettingScores]) -> Strata | None:
    if any(one.scores.strata_weights is None for one in scored):
        return None
    # The compact form has masks of every stratum; without it, the largest number of draws has most of them.
    key = max(settings, key=lambda setting: (setting.form == "compact", setting.samples)).key

    def weights(chosen: Sequence[ScoredCase]) -> np.ndarray:
        return np.array([one.scores.strata_weights for one in chosen], np.float64)

    def bucket(readers: int, chosen: Sequence[ScoredCase]) -> StrataBucket:
        mass, share = map(_finite_mean, _empty(chosen, key))
        mean = weights(chosen).mean(0).tolist()
        return StrataBucket(readers=readers, images=len(chosen), mean=mean, empty_mass=mass, empty_share=share)

    patients = [one.scores.patient for one in scored]
    usage = [mean_of(column.tolist(), patients) for column in weights(scored).T]
    intervals: dict[str, Any] = {end: [getattr(one, end) for one in usage] for end in ("mean", "low", "high")}
    buckets = [bucket(*one) for one in _buckets(scored)]
    return Strata(name=name, count=len(usage), **intervals, setting=key, by_bucket=buckets)


# -- modes ------------------------------------------------------------------------------------------------------------


def summarise_modes(
    scored: Sequence[dict[str, ModeScores]],
    flips: Sequence[Flip],
    classes: Sequence[str],
    strata_weights: Sequence[Sequence[float] | None],
) -> Modes | None:
    """The part ``modes`` of an evaluation, from each image's scores by setting, in the order of the images."""
    if not scored or not flips:
        return None
    settings = list(scored[0])
    chosen = next((key for key in settings if scored[0][key].nearest is not None), settings[-1])
    truth = mode_weights(flips)
    parts = [one[chosen] for one in scored]

    def shares(key: str) -> ModeShares:
        ratio = np.mean([one[key].ratio for one in scored], 0)
        return ModeShares(ratio=ratio.tolist(), distance=float(np.abs(ratio - truth).sum() / 2))

    def share(part: str, whole: str) -> list[float]:  # of each flip; nan where there is no such pixel
        some, all_ = (np.sum([getattr(one, name) for one in parts], 0) for name in (part, whole))
        return np.divide(some, all_, out=np.full(len(flips), np.nan), where=all_ > 0).tolist()

    true, predicted = share("true_flipped", "true_either"), share("flipped", "either")
    by_setting = {key: shares(key) for key in settings}
    matched: dict[str, Any] = {}
    if parts[0].nearest is not None and None not in strata_weights:
        nearest, iou = (np.mean([getattr(part, name) for part in parts], 0) for name in ("nearest", "iou"))
        matched = _match(nearest, iou, np.array(strata_weights, float).mean(0), truth)
    return Modes(
        setting=chosen,
        images=len(scored),
        names=["".join(str(int(bit)) for bit in row) for row in happening(len(flips))],
        probability=truth.tolist(),
        **by_setting[chosen].model_dump(),
        flips=[
            FlipScores(
                name=classes[flip.source],
                to=classes[flip.target],
                probability=flip.probability,
                truth=true[f],
                predicted=predicted[f],
            )
            for f, flip in enumerate(flips)
        ],
        by_setting=by_setting,
        **matched,
    )


def _match(nearest: np.ndarray, iou: np.ndarray, weights: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Strata and modes, one to one, so that as many masks as possible are nearest to the modes of their strata."""
    from scipy.optimize import linear_sum_assignment

    # Shares decide; IoU decides between modes of equal shares.
    strata, modes = linear_sum_assignment(nearest + 1e-3 * iou, maximize=True)
    stratum_of = dict(sorted(zip(modes.tolist(), strata.tolist(), strict=True)))
    return {
        "strata_iou": iou.tolist(),
        "nearest": nearest.tolist(),
        "weights": weights.tolist(),
        "matching": [stratum_of.get(mode) for mode in range(len(truth))],
        "found": len(set(nearest.argmax(1).tolist())),
        "correlation": _correlation(weights[list(stratum_of.values())], truth[list(stratum_of)]),
    }


# -- numbers ----------------------------------------------------------------------------------------------------------


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's, of the pairs that have both values; ``None`` where one of them does not vary."""
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def _finite_mean(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
