"""What an evaluation found: averages with intervals by patient, by how many readers drew anything, and every image."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg.evaluation.scoring import METRICS, CaseScores, Scored
from ambiseg.metrics import ReliabilityCurve, bootstrap

_FORMAT = "ambiseg.Evaluation/1"
_RESAMPLES = 10_000  # of all images
_FEWER = 2_000  # of a bucket: there are many of them, and their intervals are wide


class Mean(TypedDict):
    """A mean over images with its 95 % interval over patients, and how many images have a value at all.

    ``None`` stands for what is not defined: a mean of no image, an interval of one patient.
    """

    mean: float | None
    low: float | None
    high: float | None
    count: int


class Bucket(TypedDict):
    """The images in which this many readers drew anything."""

    readers: int
    images: int
    metrics: dict[str, Mean]
    ece: dict[str, float | None]


class Setting(TypedDict):
    """One form and number of samples. ``cases[i]["scores"][f"{form}-{samples}"]`` are its scores of single images."""

    form: str
    samples: int
    metrics: dict[str, Mean]
    ece: dict[str, float | None]  # value, low, high: of pixels pooled over all images
    reliability: dict[str, list[float | None]]  # edges; confidence, accuracy and weight (share of pixels) of each bin
    empty: dict[str, float | None]  # how the probability of an empty mask follows the share of readers who drew none
    buckets: list[Bucket]


@dataclass(frozen=True)
class Evaluation:
    """All numbers of an evaluation, in the form of its JSON. ``None`` is what has no value.

    Attributes:
        run, split, which, weights: what was evaluated, with a hash of its weights; of mask files, their folder,
            ``all``, ``files`` and nothing.
        data: what the data are.
        protocol, seed, threads, batch_size: how. With the same of each, any number of processes finds the same.
        classes, evaluated: names of the classes, and ids of those that are scored.
        annotations: ``diversity``, ``entropy`` and ``empty_share`` of the readers' own masks, to compare with.
        settings: averages of every form and number of samples.
        experts: mean weight of each expert, over all images and by bucket; ``None`` for methods without experts.
        cases: every image with its scores.
        modes: of data of known modes, :func:`ambiseg.evaluation.modes.summarise_modes`; else ``None``.
    """

    run: str
    split: str
    protocol: str
    which: str
    weights: str
    seed: int
    data: str
    threads: int
    batch_size: int
    images: int
    patients: int
    classes: list[str]
    evaluated: list[int]
    annotations: dict[str, Mean]
    settings: list[Setting]
    experts: dict[str, Any] | None
    cases: list[CaseScores]
    modes: dict[str, Any] | None = None

    def setting(self, form: str, samples: int) -> Setting:
        """The averages of one form and number of samples."""
        for setting in self.settings:
            if (setting["form"], setting["samples"]) == (form, samples):
                return setting
        known = ", ".join(f"{s['form']}-{s['samples']}" for s in self.settings)
        raise KeyError(f"expected one of {known}, found {form}-{samples}")

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line a case, so that two evaluations can be compared by ``diff``."""
        content = {"format": _FORMAT, **asdict(self)}
        cases = content.pop("cases")
        head = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        lines = ",\n  ".join(json.dumps(case, ensure_ascii=False, allow_nan=False) for case in cases)
        return f'{head[:-2]},\n "cases": [\n  {lines}\n ]\n}}\n'

    def to_csv(self) -> str:
        """One row for every image and setting; a cell without a value is empty."""
        experts = self.experts["count"] if self.experts else 0
        columns = ["name", "patient", "readers", "readers_total", "empty_share", "form", "samples", *METRICS]
        columns += [f"expert_{k + 1}" for k in range(experts)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for case in self.cases:
            for setting in self.settings:
                form, samples = setting["form"], setting["samples"]
                scores = case["scores"][f"{form}-{samples}"]
                row = [case["name"], case["patient"], case["readers"], case["readers_total"], case["empty_share"]]
                row += [form, samples, *(scores[name] for name in METRICS), *(case["expert_weights"] or [])]
                writer.writerow(row)
        return text.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to ``path``, and the table of images beside it as ``.csv``; each appears whole or not at all."""
        write_text(path, self.to_json())
        write_text(Path(path).with_suffix(".csv"), self.to_csv())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Evaluation:
        """Read what :meth:`save` wrote; :class:`~ambiseg._util.errors.DataError` for anything else."""
        try:
            content = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise DataError(f"{os.fspath(path)}: expected an evaluation as JSON, found {error}") from None
        found = content.pop("format", None) if isinstance(content, dict) else type(content).__name__
        if found != _FORMAT:
            raise DataError(f"{os.fspath(path)}: expected an evaluation of format {_FORMAT}, found {found}")
        content.setdefault("modes", None)
        names = [field.name for field in fields(Evaluation)]
        if missing := [name for name in names if name not in content]:
            raise DataError(f"{os.fspath(path)}: expected an evaluation with {missing[0]!r}, found none")
        return Evaluation(**{name: content[name] for name in names})


# -- from images to averages ------------------------------------------------------------------------------------------


def summarise(scored: Sequence[Scored], settings: Sequence[tuple[str, int]], **about: Any) -> Evaluation:
    """Averages of all images in the order given; ``about`` has the other fields of :class:`Evaluation`."""
    cases = [one.case for one in scored]
    patients = [case["patient"] for case in cases]
    averages = [_setting(form, samples, scored) for form, samples in settings]
    return Evaluation(
        images=len(cases),
        patients=len(set(patients)),
        annotations={
            "diversity": mean_of([case["annotations"]["diversity"] for case in cases], patients),
            "entropy": mean_of([case["annotations"]["entropy"] for case in cases], patients),
            "empty_share": mean_of([case["empty_share"] for case in cases], patients),
        },
        settings=averages,
        experts=_experts(scored, averages),
        cases=cases,
        **about,
    )


def mean_of(values: Sequence[float | None], patients: Sequence[str], resamples: int = _RESAMPLES) -> Mean:
    """The mean of the images that have a value, with its interval over patients.

    >>> mean_of([0.1, 0.3, None], ["ann", "bob", "bob"])["count"]
    2
    """
    numbers = _numbers(values)
    interval = bootstrap(numbers, patients, resamples=resamples)
    low, high = _plain([interval.low, interval.high])
    return Mean(mean=_plain([interval.mean])[0], low=low, high=high, count=int((~np.isnan(numbers)).sum()))


def _setting(form: str, samples: int, scored: Sequence[Scored]) -> Setting:
    key = f"{form}-{samples}"
    cases = [one.case for one in scored]
    pooled = _pool(scored, key)
    bins = len(pooled.count)

    def averages(chosen: Sequence[Scored], resamples: int) -> dict[str, Mean]:
        who = [one.case["patient"] for one in chosen]
        return {
            metric: mean_of([one.case["scores"][key][metric] for one in chosen], who, resamples)
            for metric in METRICS
            if metric != "ece"  # whose average is that of the pooled pixels
        }

    mass = _numbers([case["scores"][key]["empty_mass"] for case in cases])
    share = _numbers([case["empty_share"] for case in cases])
    return Setting(
        form=form,
        samples=samples,
        metrics=averages(scored, _RESAMPLES),
        ece=_pooled_ece(scored, key, _RESAMPLES),
        reliability={
            "edges": [i / bins for i in range(bins + 1)],
            "confidence": _plain(pooled.confidence.tolist()),
            "accuracy": _plain(pooled.accuracy.tolist()),
            "weight": _plain((pooled.count.double() / pooled.total).tolist()),
        },
        empty={"correlation": _correlation(mass, share), "error": _finite_mean(np.abs(mass - share))},
        buckets=[
            Bucket(
                readers=readers,
                images=len(chosen),
                metrics=averages(chosen, _FEWER),
                ece=_pooled_ece(chosen, key, _FEWER),
            )
            for readers, chosen in _buckets(scored)
        ],
    )


def _buckets(scored: Sequence[Scored]) -> list[tuple[int, list[Scored]]]:
    found = sorted({one.case["readers"] for one in scored})
    return [(readers, [one for one in scored if one.case["readers"] == readers]) for readers in found]


def _pool(scored: Sequence[Scored], key: str) -> ReliabilityCurve:
    """All pixels together, added up in the order of the images."""
    pooled = scored[0].curves[key]
    for one in scored[1:]:
        pooled = pooled + one.curves[key]
    return pooled


def _experts(scored: Sequence[Scored], settings: Sequence[Setting]) -> dict[str, Any] | None:
    if any(one.case["expert_weights"] is None for one in scored):
        return None
    # The compact form knows each expert's masks best; without it the largest number of draws does.
    best = max(settings, key=lambda setting: (setting["form"] == "compact", setting["samples"]))
    key = f"{best['form']}-{best['samples']}"

    def weights(chosen: Sequence[Scored]) -> np.ndarray:
        return np.array([one.case["expert_weights"] for one in chosen], np.float64)

    patients = [one.case["patient"] for one in scored]
    usage = [mean_of(column.tolist(), patients) for column in weights(scored).T]
    return {
        "count": len(usage),
        "mean": [expert["mean"] for expert in usage],
        "low": [expert["low"] for expert in usage],
        "high": [expert["high"] for expert in usage],
        "setting": key,  # that empty_mass is of
        "by_bucket": [
            {
                "readers": readers,
                "images": len(chosen),
                "mean": weights(chosen).mean(0).tolist(),
                "empty_mass": _finite_mean(_numbers([one.case["scores"][key]["empty_mass"] for one in chosen])),
                "empty_share": _finite_mean(_numbers([one.case["empty_share"] for one in chosen])),
            }
            for readers, chosen in _buckets(scored)
        ],
    }


def _pooled_ece(scored: Sequence[Scored], key: str, resamples: int) -> dict[str, float | None]:
    """ECE of all pixels together, and its interval: whole patients are drawn anew, and their pixels pooled again."""
    value = _plain([_pool(scored, key).ece])[0]
    number = {patient: i for i, patient in enumerate(dict.fromkeys(one.case["patient"] for one in scored))}
    if len(number) < 2 or value is None:
        return {"value": value, "low": None, "high": None}
    gaps, totals = np.zeros((len(number), len(scored[0].curves[key].count))), np.zeros(len(number))
    for one in scored:
        curve, i = one.curves[key], number[one.case["patient"]]
        gaps[i] += (curve.confidence_sum - curve.accuracy_sum).numpy()
        totals[i] += float(curve.total)
    rng, size = np.random.default_rng(0), len(number)
    equal, found = np.full(size, 1 / size), []
    for start in range(0, resamples, step := max(1, 2**20 // size)):  # a block of draws at a time: bounded memory
        times = rng.multinomial(size, equal, size=min(step, resamples - start))
        # Sums, not a product of matrices, whose last digit depends on the number of threads.
        pixels = (times * totals).sum(1)
        apart = sum(np.abs((times * gap).sum(1)) for gap in gaps.T)
        found.append((apart / np.maximum(pixels, 1))[pixels > 0])
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975]).tolist()
    return {"value": value, "low": low, "high": high}


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's, over the images that have both; ``None`` where one of them does not vary."""
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def _finite_mean(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _plain(values: Any) -> list[float | None]:
    return [None if value != value else float(value) for value in values]
