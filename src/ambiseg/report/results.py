"""What an evaluation found, read from its JSON: every number that the page shows, with nan for what has no value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ambiseg._util.errors import DataError

FORMAT = "ambiseg.Evaluation/1"


@dataclass(frozen=True)
class Estimate:
    """A mean with the bounds of its 95 % interval; nan where there is none."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Reliability:
    """Pixels binned by predicted probability."""

    edges: Sequence[float]
    confidence: Sequence[float]
    accuracy: Sequence[float]
    weight: Sequence[float]


@dataclass(frozen=True)
class Bucket:
    """The images in which ``readers`` readers drew something."""

    readers: int
    images: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True)
class Setting:
    """One form and number of samples, and what it scored."""

    form: str
    samples: int
    metrics: Mapping[str, Estimate]
    ece: Estimate
    reliability: Reliability | None
    correlation: float  # over images, of the weight on empty masks and the share of readers who drew nothing
    buckets: Sequence[Bucket]

    @property
    def key(self) -> str:
        """Its name among the scores of a case, such as ``standard-16``."""
        return f"{self.form}-{self.samples}"


@dataclass(frozen=True)
class Usage:
    """Mean weights of the experts in the images in which ``readers`` readers drew something."""

    readers: int
    images: int
    mean: Sequence[float]
    empty_mass: float  # how likely an empty mask is
    empty_share: float  # of the readers


@dataclass(frozen=True)
class Experts:
    """How often the model uses each of its experts."""

    mean: Sequence[float]
    by_bucket: Sequence[Usage]


@dataclass(frozen=True)
class Flip:
    """How often a class is another one: in the annotations and in the predictions."""

    name: str
    truth: float
    predicted: float
    to: str = ""  # the other class


@dataclass(frozen=True)
class Modes:
    """Data of known modes: how likely each is, how often it is predicted, and which expert predicts it.

    Attributes:
        names: of the modes.
        probability: of each mode in the annotations.
        ratio: share of the predicted masks that are nearest to each.
        experts: ``[K][modes]`` mean IoU of each expert's masks with each mode.
        flips: of each class.
        setting: the key of what was drawn.
        matching: the expert of each mode, from 0; ``None`` where there is none.
        weights: mean weight of each expert.
        found: modes that some expert draws more often than any other.
        correlation: of the probabilities of the modes and the weights of their experts.
        distance: how much probability is with the wrong modes.
    """

    names: Sequence[str]
    probability: Sequence[float]
    ratio: Sequence[float]
    experts: Sequence[Sequence[float]]
    flips: Sequence[Flip]
    setting: str = ""
    matching: Sequence[int | None] = ()
    weights: Sequence[float] = ()
    found: int | None = None
    correlation: float = math.nan
    distance: float = math.nan


@dataclass(frozen=True)
class Scored:
    """One image and its scores, by the key of a setting and the name of a metric."""

    name: str
    patient: str
    readers: int
    readers_total: int
    disagreement: float  # of its readers, E[1 − IoU]; nan when the evaluation does not tell
    scores: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Results:
    """An evaluation."""

    split: str
    protocol: str
    which: str
    seed: int
    images: int
    patients: int
    classes: Sequence[str]
    evaluated: Sequence[int]
    diversity: Estimate  # of the readers' own masks
    settings: Sequence[Setting]
    experts: Experts | None
    modes: Modes | None
    cases: Sequence[Scored]

    @staticmethod
    def load(path: str | os.PathLike[str], split: str) -> Results:
        """Read what ``ambiseg evaluate`` wrote; :class:`DataError` for anything else, or for another split."""
        return Results.parse(Path(path).read_bytes(), path, split)

    @staticmethod
    def parse(text: str | bytes, path: str | os.PathLike[str], split: str) -> Results:
        """The same from the content of a file; ``path`` is for errors."""
        try:
            content = json.loads(text)
        except ValueError as error:  # of JSON and of UTF-8
            raise DataError(f"{os.fspath(path)}: expected an evaluation as JSON, found {error}") from None
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        if found != FORMAT:
            raise DataError(f"{os.fspath(path)}: expected an evaluation of format {FORMAT}, found {found}")
        try:
            results = _results(content)
        except KeyError as error:
            raise DataError(f"{os.fspath(path)}: expected an evaluation with {error}, found none") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{os.fspath(path)}: expected an evaluation, found other values: {error}") from None
        if not results.settings:
            raise DataError(f"{os.fspath(path)}: expected an evaluation of at least one setting, found none")
        if results.split != split:
            raise DataError(f"{os.fspath(path)}: expected an evaluation of split {split}, found {results.split}")
        return results

    def headline(self, samples: int) -> Setting:
        """The setting that models are compared by: ``samples`` draws in standard form, or the first there is."""
        wanted = [s for s in self.settings if (s.form, s.samples) == ("standard", samples)]
        return (wanted or [s for s in self.settings if s.form == "standard"] or [*self.settings])[0]

    @property
    def flipped(self) -> list[tuple[int, int]]:
        """Class ids that become each other in some modes."""
        known = {name: i for i, name in enumerate(self.classes)}
        flips = self.modes.flips if self.modes else ()
        return [(known[f.name], known[f.to]) for f in flips if f.name in known and f.to in known]

    @property
    def forms(self) -> dict[str, list[Setting]]:
        """Settings by their form, the smaller numbers of samples first."""
        found: dict[str, list[Setting]] = {}
        for setting in sorted(self.settings, key=lambda s: s.samples):
            found.setdefault(setting.form, []).append(setting)
        return {form: found[form] for form in dict.fromkeys(s.form for s in self.settings)}


def _results(content: dict[str, Any]) -> Results:
    experts, modes = content["experts"], content.get("modes")
    return Results(
        split=str(content["split"]),
        protocol=str(content["protocol"]),
        which=str(content["which"]),
        seed=int(content["seed"]),
        images=int(content["images"]),
        patients=int(content["patients"]),
        classes=[str(name) for name in content["classes"]],
        evaluated=[int(i) for i in content["evaluated"]],
        diversity=_estimate((content.get("annotations") or {}).get("diversity") or {}),
        settings=[_setting(s) for s in content["settings"]],
        experts=None
        if experts is None
        else Experts(
            _numbers(experts["mean"]),
            [
                Usage(
                    int(b["readers"]),
                    int(b["images"]),
                    _numbers(b["mean"]),
                    _number(b.get("empty_mass")),
                    _number(b["empty_share"]) if "empty_share" in b else _undrawn(content["cases"], int(b["readers"])),
                )
                for b in sorted(experts["by_bucket"], key=lambda b: int(b["readers"]))
            ],
        ),
        modes=None if modes is None else _modes(modes),
        cases=[
            Scored(
                str(c["name"]),
                str(c["patient"]),
                int(c["readers"]),
                int(c["readers_total"]),
                _number((c.get("annotations") or {}).get("diversity")),
                {key: {name: _number(v) for name, v in scores.items()} for key, scores in c["scores"].items()},
            )
            for c in content["cases"]
        ],
    )


def _modes(content: dict[str, Any]) -> Modes:
    found = content.get("found")
    return Modes(
        [str(name) for name in content["names"]],
        _numbers(content["probability"]),
        _numbers(content["ratio"]),
        [_numbers(row) for row in content["experts"]],
        [
            Flip(str(f["class"]), _number(f["truth"]), _number(f["predicted"]), str(f.get("to", "")))
            for f in content["flips"]
        ],
        setting=str(content.get("setting", "")),
        matching=[None if k is None else int(k) for k in content.get("matching") or []],
        weights=_numbers(content.get("weights") or []),
        found=None if found is None else int(found),
        correlation=_number(content.get("correlation")),
        distance=_number(content.get("distance")),
    )


def _setting(content: dict[str, Any]) -> Setting:
    curve = content.get("reliability")
    return Setting(
        form=str(content["form"]),
        samples=int(content["samples"]),
        metrics=_estimates(content["metrics"]),
        ece=_estimate(content.get("ece") or {}, "value"),
        reliability=None
        if curve is None
        else Reliability(*(_numbers(curve[key]) for key in ("edges", "confidence", "accuracy", "weight"))),
        correlation=_number((content.get("empty") or {}).get("correlation")),
        buckets=[
            Bucket(int(b["readers"]), int(b["images"]), _estimates(b["metrics"]))
            for b in sorted(content.get("buckets") or [], key=lambda b: int(b["readers"]))
        ],
    )


def _estimates(metrics: dict[str, Any]) -> dict[str, Estimate]:
    return {name: _estimate(value) for name, value in metrics.items()}


def _estimate(value: dict[str, Any], mean: str = "mean") -> Estimate:
    return Estimate(*(_number(value.get(key)) for key in (mean, "low", "high")))


def _undrawn(cases: list[dict[str, Any]], readers: int) -> float:
    """The share of readers who drew nothing, in the images in which ``readers`` did."""
    totals = [int(c["readers_total"]) for c in cases if int(c["readers"]) == readers and c["readers_total"]]
    return 1 - sum(readers / total for total in totals) / len(totals) if totals else math.nan


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)  # JSON proper has no nan
