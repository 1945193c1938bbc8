"""A comparison as a record: all numbers, saved as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg._util.progress import progress
from ambiseg._util.reading import read_json, validated
from ambiseg._util.records import Number, Record
from ambiseg.comparison.looking import Area, areas
from ambiseg.comparison.scores import Aggregate, Entry, aggregate, check_comparable, difference, setting_of
from ambiseg.comparison.sources import Scored
from ambiseg.comparison.timing import Timing
from ambiseg.evaluation.looking import LossKey
from ambiseg.evaluation.results import METRICS, Evaluation
from ambiseg.methods.drawing import FORMS

FORMAT = "ambiseg.Comparison/1"


class Value(Record):
    """A mean with its 95 % interval over patients and seeds; see :class:`~ambiseg.comparison.scores.Aggregate`."""

    mean: Number
    low: Number
    high: Number
    spread: Number
    count: int

    @staticmethod
    def of(found: Aggregate | Area) -> Value:
        return Value(mean=found.mean, low=found.low, high=found.high, spread=found.spread, count=found.count)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Score(Record):
    """A metric of a method in one form, and its difference to the baseline.

    ``samples`` masks were asked for, and ``masks`` there are. ``against`` is the form of the baseline's masks, which is
    the same where the baseline has it.
    """

    method: str
    form: Literal["standard", "compact"]
    samples: int
    masks: int
    metric: str
    value: Value
    difference: Value | None
    against: Literal["standard", "compact"] | None


class Method(Record):
    """One method: its runs, and what it costs. ``None`` is what is not known.

    ``training_minutes`` are CPU minutes of one training, the mean over seeds; ``mask_seconds`` the CPU seconds of 16
    masks of one image, ``mask_ratio`` the same in passes of the baseline, of which each makes one mask of the image.
    """

    name: str
    method: str
    runs: list[str]
    weights: list[str]
    seeds: int = Field(ge=1)
    symmetries: int
    training_minutes: Number = None
    parameters: int | None = None
    mask_seconds: Number = None
    mask_ratio: Number = None


class LookRow(Record):
    """AURC of a method: the mean loss of the images that are left to it, those it is surest of first.

    ``loss`` is ``readers``, how much the readers really disagreed, or ``ged``, what the method's masks get wrong.
    """

    method: str
    loss: LossKey
    value: Value
    difference: Value | None


class CaseRow(Record):
    """One image: how its readers differ, and the GED of each method, the mean over seeds, in order."""

    name: str
    patient: str
    readers: int
    readers_total: int
    disagreement: Number
    ged: list[Number]


class Comparison(Record):
    """All numbers of a comparison.

    Attributes:
        baseline: the method that the others are compared with.
        data, split, protocol, which: what was scored, and how. ``which`` weights.
        images, patients, unit, annotator: as in an :class:`~ambiseg.evaluation.results.Evaluation`.
        samples, metrics: what was asked for.
        case_samples: number of masks of ``cases``, in standard form.
        methods: in the order in which they were given.
        scores: of each method in each form, number of masks and metric.
        cases: every image.
        looking: how well each method says which images a person must look at.
    """

    baseline: str
    data: str
    split: str
    protocol: str
    which: str
    images: int
    patients: int
    unit: str
    annotator: str
    samples: list[int]
    metrics: list[str]
    case_samples: int
    methods: list[Method] = Field(min_length=1)
    scores: list[Score]
    cases: list[CaseRow]
    looking: list[LookRow] = Field(default_factory=list)

    def score(self, method: str, form: str, samples: int, metric: str) -> Score | None:
        """One of the scores; ``None`` where there are no such masks."""
        wanted = method, form, samples, metric
        return next((one for one in self.scores if (one.method, one.form, one.samples, one.metric) == wanted), None)

    def to_json(self) -> str:
        """The text of ``comparison.json``."""
        import json

        content = {"format": FORMAT, **self.model_dump()}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, all of it or nothing."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Read what :meth:`save` wrote; :class:`DataError` for anything else."""
        content = read_json(path, "a comparison", dict[str, Any])
        if (found := content.pop("format", None)) != FORMAT:
            raise DataError(f"{Path(path)}: expected a comparison of format {FORMAT}, found {found}")
        return validated(Comparison, content, Path(path), "a comparison")


def comparison_of(
    scored: Sequence[Scored],
    baseline: str,
    samples: Sequence[int],
    metrics: Sequence[str] = METRICS,
    timings: Mapping[str, Timing] | None = None,
    quiet: bool = False,
) -> Comparison:
    """The record of methods that were scored on the same images; see :func:`~.scores.check_comparable`."""
    entries = [one.entry for one in scored]
    check_comparable(entries)
    base = next(entry for entry in entries if entry.name == baseline)
    wanted = [(e, form, n, m) for m in metrics for n in samples for e in entries for form in FORMS]
    found = [_score(*one, base) for one in progress(wanted, len(wanted), "computing intervals", quiet)]
    timings = timings or {}
    first = next((e.first for e in entries if e.first.which != "files"), base.first)
    return Comparison(
        baseline=baseline,
        data=first.data,
        split=first.split,
        protocol=first.protocol,
        which=first.which,
        images=base.first.images,
        patients=base.first.patients,
        unit=base.first.unit,
        annotator=base.first.annotator,
        samples=list(samples),
        metrics=list(metrics),
        case_samples=max(samples),
        methods=[_method(one, timings.get(one.entry.name), timings.get(baseline)) for one in scored],
        scores=[one for one in found if one is not None],
        cases=_cases(entries, base.first, max(samples)),
        looking=[_looked(*one) for one in areas(entries, base)],
    )


def _score(entry: Entry, form: Any, samples: int, metric: str, baseline: Entry) -> Score | None:
    value = aggregate(entry, form, samples, metric)
    if value is None:
        return None
    # A method without a compact form is compared by what it has.
    against: Any = form if setting_of(baseline.first, form, samples) is not None else "standard"
    change = difference(entry, baseline, form, samples, metric, baseline_form=against)
    return Score(
        method=entry.name,
        form=form,
        samples=samples,
        masks=value.masks,
        metric=metric,
        value=Value.of(value),
        difference=None if change is None else Value.of(change),
        against=None if change is None else against,
    )


def _looked(name: str, loss: LossKey, value: Area, change: Area | None) -> LookRow:
    return LookRow(
        method=name, loss=loss, value=Value.of(value), difference=None if change is None else Value.of(change)
    )


def _method(scored: Scored, timing: Timing | None, baseline: Timing | None) -> Method:
    entry, runs = scored.entry, [run for run in scored.runs if run is not None]
    minutes = []
    for run in runs:
        cost = run.cost
        if cost is not None and cost.epochs >= len(run.history):
            minutes.append(cost.cpu_seconds / 60)
    return Method(
        name=entry.name,
        method=runs[0].config.model.method if runs else "",
        runs=[one.run for one in entry.evaluations],
        weights=[one.weights for one in entry.evaluations],
        seeds=len(entry.evaluations),
        symmetries=entry.first.symmetries,
        training_minutes=sum(minutes) / len(minutes) if minutes and len(minutes) == len(entry.evaluations) else None,
        parameters=timing.parameters if timing else None,
        mask_seconds=timing.masks if timing else None,
        mask_ratio=timing.masks / baseline.one if timing and baseline and baseline.one else None,
    )


def _cases(entries: Sequence[Entry], first: Evaluation, samples: int) -> list[CaseRow]:
    values = [case_values(entry, samples, "ged") for entry in entries]
    return [
        CaseRow(
            name=case.name,
            patient=case.patient,
            readers=case.readers,
            readers_total=case.readers_total,
            disagreement=case.annotations.get("diversity"),
            ged=[of[case.name] for of in values],
        )
        for case in first.cases
    ]


def case_values(entry: Entry, samples: int, metric: str) -> dict[str, float | None]:
    """A metric of each image in standard form, the mean over seeds; ``None`` where a seed has no value."""
    columns: dict[str, list[float | None]] = {}
    for one in entry.evaluations:
        setting = setting_of(one, "standard", samples)
        for case in one.cases:
            columns.setdefault(case.name, []).append(case.scores[setting.key][metric] if setting else None)
    return {
        name: None if None in values else sum(v for v in values if v is not None) / len(values)
        for name, values in columns.items()
    }
