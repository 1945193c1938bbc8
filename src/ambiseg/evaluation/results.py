"""The numbers of an evaluation, from scoring to the page: one type, saved as JSON and CSV.

``None`` stands for what has no value: a mean of no image, an interval of one patient.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg._util.reading import read_json, validated
from ambiseg._util.records import Number, Record
from ambiseg._util.text import percent, shape_text
from ambiseg.evaluation.coherence import incoherent
from ambiseg.evaluation.decided import Decided
from ambiseg.evaluation.looking import Looking
from ambiseg.evaluation.records import Interval, Mean
from ambiseg.methods.formats import evaluation_of_format_1

FORMAT = "ambiseg.Evaluation/3"
METRICS = (
    "ged",
    "ged_unbiased",
    "ged_unbiased_both",
    "matched_iou",
    "diversity",
    "entropy",
    "ece",
    "empty_mass",
)
"""What every image is scored by; docs/evaluate.md defines each."""


class Region(Record):
    """Which pixels of the images are scored.

    ``kind`` is ``whole`` or ``middle``; ``size``, height and width of the middle; ``share``, the scored part of all
    pixels of these images; ``windows``, the most windows that an image was cut into, 1 where all were taken whole.

    >>> Region(kind="middle", size=(64, 64), share=0.004).text
    'the middle 64×64 pixels of each image, 0.4 % of their pixels'
    """

    kind: Literal["whole", "middle"]
    size: tuple[int, int] | None = None
    share: float = 1.0
    windows: int = 1

    @property
    def text(self) -> str:
        """In words."""
        if self.kind == "middle" and self.size is not None:
            return f"the middle {shape_text(self.size)} pixels of each image, {percent(self.share)} of their pixels"
        return "whole images" if self.windows == 1 else f"whole images, by up to {self.windows} windows"


AnchorKey: TypeAlias = Literal["perfect", "reader", "consensus", "constant", "empty"]


class Anchor(Record):
    """What something simple, or perfect, scores on the same images: what a model's number is compared with.

    ``samples`` is the number of masks that its score depends on; ``None`` where it depends on none.
    """

    key: AnchorKey
    title: str
    explanation: str
    ged: Mean
    matched_iou: Mean | None = None
    samples: int | None = None


class Bucket(Record):
    """The images in which ``readers`` readers drew any evaluated class."""

    readers: int
    images: int
    metrics: dict[str, Mean]
    ece: Interval


class Reliability(Record):
    """Pixels of all images binned by predicted probability: mean, accuracy and share of pixels of each bin."""

    edges: list[float]
    confidence: list[Number]
    accuracy: list[Number]
    weight: list[Number]


class EmptyBin(Record):
    """The images whose predicted probability of an empty mask is in (low, high], 0 in the first of them."""

    low: float
    high: float
    images: int
    predicted: float  # mean probability of an empty mask
    readers: float  # mean share of the readers who drew nothing


class EmptyMasks(Record):
    """How the probability of an empty mask follows the share of readers who drew none, over images.

    ``calibration`` has the bins that hold an image; it is empty where no reader drew nothing and no mask is empty.
    """

    correlation: Number
    error: Number  # mean absolute difference
    calibration: list[EmptyBin] = Field(default_factory=list)


class SettingScores(Record):
    """One form and number of samples. ``metrics`` has all of ``METRICS`` except ``ece``, which pools all pixels.

    ``ece_share`` is the share of the scored pixels that ``ece`` rests on, those that are in one of its bins; where it
    is 0, nothing was measured and ``ece`` has no value.
    """

    form: str
    samples: int
    metrics: dict[str, Mean]
    ece: Interval
    ece_share: float
    reliability: Reliability
    empty: EmptyMasks
    buckets: list[Bucket]

    @property
    def key(self) -> str:
        """Its name in :attr:`CaseScores.scores`, such as ``standard-16``."""
        return f"{self.form}-{self.samples}"

    def score(self, metric: str) -> Interval:
        """The average of any of ``METRICS``."""
        return self.ece if metric == "ece" else self.metrics[metric]


def headline(settings: Sequence[SettingScores], samples: int) -> SettingScores:
    """The setting that models are compared by: ``samples`` draws in standard form, or the first there is."""
    standard = [setting for setting in settings if setting.form == "standard"]
    return next((s for s in standard if s.samples == samples), (standard or settings)[0])


class CaseScores(Record):
    """One image: how its readers differ, the weights of the strata, and its scores by setting and metric."""

    name: str
    patient: str
    readers: int  # who drew any evaluated class
    readers_total: int
    empty_share: Number  # weight of the readers who drew none of the evaluated classes
    annotations: dict[str, Number]  # diversity and entropy of the readers' own masks
    strata_weights: list[float] | None  # None for methods without strata
    scores: dict[str, dict[str, Number]]


class StrataBucket(Record):
    """Mean weights of the strata in the images in which ``readers`` readers drew any evaluated class."""

    readers: int
    images: int
    mean: list[float]
    empty_mass: Number
    empty_share: Number = None


class Strata(Record):
    """How often the model uses each of its K strata: ``[K]`` mean weights with their intervals."""

    name: str  # what the method calls a stratum
    count: int
    mean: list[Number]
    low: list[Number]
    high: list[Number]
    setting: str  # the key of the setting that ``empty_mass`` is taken from
    by_bucket: list[StrataBucket]

    @property
    def intervals(self) -> list[Interval]:
        """Mean weight and interval of each stratum."""
        return [Interval(mean=m, low=a, high=b) for m, a, b in zip(self.mean, self.low, self.high, strict=True)]


class FlipScores(Record):
    """How often the pixels of class ``name`` are of class ``to``: in the annotations and in the predictions."""

    name: str
    to: str
    probability: float
    truth: Number
    predicted: Number


class ModeShares(Record):
    """Share of the predicted masks that are nearest to each mode, and the total variation from the truth."""

    ratio: list[float]
    distance: float


class Modes(ModeShares):
    """Data of M known modes: how likely each is, how often it is predicted, and which of K strata predicts it.

    Without strata the lists from ``strata_iou`` on are empty.
    """

    setting: str  # the key of the setting that everything but ``by_setting`` is of; compact where there is one
    images: int  # with a valid pixel
    names: list[str]  # [M], one digit per flip; 1 is flipped
    probability: list[float]  # [M] in the annotations
    flips: list[FlipScores]
    by_setting: dict[str, ModeShares]
    # [K][M] mean IoU of each stratum's masks with each mode
    strata_iou: list[list[float]] = Field(default_factory=list)
    # [K][M] share of each stratum's masks that are nearest to each mode
    nearest: list[list[float]] = Field(default_factory=list)
    weights: list[float] = Field(default_factory=list)  # [K] mean weight of each stratum
    # [M] the stratum of each mode, from 0, one to one; None for a mode without
    matching: list[int | None] = Field(default_factory=list)
    found: int | None = None  # number of modes that some stratum draws more often than any other mode
    correlation: Number = None  # of the probabilities of the modes and the weights of their strata


class Folds(Record):
    """Which folds of a cross-validation were pooled, and the run of each.

    >>> print(Folds(count=3, folds=[1, 3], runs=["runs/f1", "runs/f3"]))
    folds 1 and 3 of 3; missing: 2
    """

    count: int
    folds: list[int]
    runs: list[str]
    differing: list[str] = Field(default_factory=list)  # settings that are not the same in all runs

    @property
    def missing(self) -> list[int]:
        return [k for k in range(1, self.count + 1) if k not in self.folds]

    def __str__(self) -> str:
        if not self.missing:
            return f"all {self.count} folds"
        listed = " and ".join(filter(None, [", ".join(map(str, self.folds[:-1])), str(self.folds[-1])]))
        return f"folds {listed} of {self.count}; missing: {', '.join(map(str, self.missing))}"


class Evaluation(Record):
    """All numbers of an evaluation.

    Attributes:
        run, split, which, weights: what was evaluated, with a hash of its weights; for mask files, their folder,
            ``all`` or the part, ``files`` and an empty text.
        data: the title of the data.
        protocol, seed, threads, batch_size: how. With the same of each, any number of processes gives the same numbers.
        symmetries: over how many flips and quarter turns of each image predictions were averaged; 1 is the image alone.
        images, patients: how many.
        unit, annotator: what images are grouped by, and who drew the masks: patient and reader, or sequence and mode.
        region: which pixels are scored; ``None`` in files of earlier versions, which do not say.
        anchors: what the simple and the perfect score on these images.
        verdict: the model beside the anchors, in one sentence.
        classes, evaluated: names of the classes, and ids of those that are scored.
        annotations: ``diversity``, ``entropy`` and ``empty_share`` of the readers' own masks, to compare with.
        settings: averages for every form and number of samples.
        strata: mean weight of each stratum, over all images and by bucket; ``None`` for methods without strata.
        modes: for data of known modes; else ``None``.
        decided: single masks and measurements of the predicted masks; ``None`` for known modes and very large images.
        cases: every image with its scores.
        looking: in what order a person should look at images; ``None`` in files of earlier versions.
        folds: of a cross-validation, where several runs were pooled; else ``None``.
        unpredicted: for mask files, number of cases that were left out because they have none.
    """

    run: str
    split: str
    protocol: str
    which: Literal["best", "last", "files"]
    weights: str
    seed: int
    data: str
    threads: int
    batch_size: int
    symmetries: int = Field(default=1, ge=1)
    images: int
    patients: int
    unit: str = "patient"
    annotator: str = "reader"
    region: Region | None = None
    anchors: list[Anchor] = Field(default_factory=list)
    verdict: str = ""
    classes: list[str]
    evaluated: list[int]
    annotations: dict[str, Mean]
    settings: list[SettingScores] = Field(min_length=1)
    strata: Strata | None
    modes: Modes | None = None
    decided: Decided | None = None
    cases: list[CaseScores]
    looking: Looking | None = None
    folds: Folds | None = None
    unpredicted: int = 0

    def setting(self, form: str, samples: int) -> SettingScores:
        """The averages of one form and number of samples."""
        settings, key = {setting.key: setting for setting in self.settings}, f"{form}-{samples}"
        if key not in settings:
            raise KeyError(f"expected one of {', '.join(settings)}, found {key}")
        return settings[key]

    def headline(self, samples: int) -> SettingScores:
        """The setting that models are compared by: ``samples`` draws in standard form, or the first there is."""
        return headline(self.settings, samples)

    def anchor(self, key: AnchorKey, samples: int | None = None) -> Anchor | None:
        """An anchor by its key; of those that depend on the number of masks, the one for ``samples``."""
        return next((one for one in self.anchors if one.key == key and one.samples in (None, samples)), None)

    @property
    def forms(self) -> dict[str, list[SettingScores]]:
        """Settings by form, in the order of the evaluation; of each form the smaller numbers of samples first."""
        ordered = sorted(self.settings, key=lambda setting: setting.samples)
        return {one.form: [setting for setting in ordered if setting.form == one.form] for one in self.settings}

    @property
    def flipped(self) -> list[tuple[int, int]]:
        """Pairs of class ids of which the first becomes the second in some modes."""
        ids = {name: i for i, name in enumerate(self.classes)}
        flips = self.modes.flips if self.modes else []
        return [(ids[flip.name], ids[flip.to]) for flip in flips if flip.name in ids and flip.to in ids]

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line per case, so that two evaluations can be compared by ``diff``."""
        content = {"format": FORMAT, **self.model_dump()}
        cases = content.pop("cases")
        head = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        lines = ",\n  ".join(json.dumps(case, ensure_ascii=False, allow_nan=False) for case in cases)
        return f'{head[:-2]},\n "cases": [\n  {lines}\n ]\n}}\n'

    def to_csv(self) -> str:
        """One row per image and setting; a cell without a value is empty."""
        columns = ["name", "patient", "readers", "readers_total", "empty_share", "form", "samples", *METRICS]
        if self.strata is not None:
            columns += [f"{self.strata.name}_{k + 1}" for k in range(self.strata.count)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for case in self.cases:
            about = [case.name, case.patient, case.readers, case.readers_total, case.empty_share]
            for setting in self.settings:
                scores = [case.scores[setting.key][metric] for metric in METRICS]
                writer.writerow([*about, setting.form, setting.samples, *scores, *(case.strata_weights or [])])
        return text.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to ``path``, and the table of images beside it as ``.csv``; each appears whole or not at all."""
        write_text(path, self.to_json())
        write_text(Path(path).with_suffix(".csv"), self.to_csv())

    @staticmethod
    def load(path: str | os.PathLike[str], split: str | None = None) -> Evaluation:
        """Read what :meth:`save` wrote; :class:`DataError` for anything else, or for another split than asked for."""
        path = Path(path)
        content = read_json(path, "an evaluation", dict[str, Any], finite=False)  # format 1 had nan
        found = content.pop("format", None)
        if found == "ambiseg.Evaluation/1":
            content, found = evaluation_of_format_1(content), "ambiseg.Evaluation/2"
        if found == "ambiseg.Evaluation/2":
            _migrate(content)
        elif found != FORMAT:
            raise DataError(f"{path}: expected an evaluation of format {FORMAT}, found {found}")
        evaluation: Evaluation = validated(Evaluation, content, path, "an evaluation")
        if problem := incoherent(evaluation, METRICS):
            raise DataError(f"{path}: {problem}")
        if split is not None and evaluation.split != split:
            raise DataError(f"{path}: expected an evaluation of split {split}, found {evaluation.split}")
        return evaluation


def _migrate(content: dict[str, Any]) -> None:
    """What format 2 did not have: words, a metric without a value, and the share of pixels that ECE rests on.

    Where that is 0 its ECE, which was written as 0, was not measured.
    """
    missing = {"mean": None, "low": None, "high": None}
    try:
        if content.get("modes"):
            content["annotator"] = "mode"
        for setting in content["settings"]:
            setting["ece_share"] = min(1.0, sum(weight or 0 for weight in setting["reliability"]["weight"]))
            if not setting["ece_share"]:
                setting["ece"] = missing
            for part in (setting, *setting["buckets"]):
                part["metrics"].setdefault("ged_unbiased_both", {**missing, "count": 0})
        for case in content["cases"]:
            for scores in case["scores"].values():
                if scores:
                    scores.setdefault("ged_unbiased_both", None)
    except (KeyError, TypeError, AttributeError):
        return  # of another form: what is wrong with it is said when it is validated
