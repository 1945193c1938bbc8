"""A calibration: scores of readers' masks, the thresholds that follow from them, and what these say of a new image.

:mod:`ambiseg.decisions.conformal` has the mathematics. Of every evaluated class, with m its marginal:

=========  ============  ===================================================================================
``outer``  {m ≥ t}       a reader's mask lies in it, and ``inner`` in that mask, with probability 1 − α
``inner``  {m > t}       (each by itself with 1 − α/2)
``found``  {m ≥ t}       misses on average at most α of a reader's mask
``sure``   {m > t}       on average at most α of it is outside of a reader's mask
``area``   an interval   holds a reader's area with probability 1 − α; weighted quantiles, widened on √area
=========  ============  ===================================================================================

and a set of strata that holds the one nearest to a reader's mask with probability 1 − α.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ambiseg import __version__
from ambiseg._util.errors import ConfigError
from ambiseg._util.files import write_text
from ambiseg._util.reading import read_json
from ambiseg._util.records import Record
from ambiseg._util.text import percent
from ambiseg.bits import areas, encode
from ambiseg.decisions.conformal import (
    LEVELS,
    Per,
    conformal_threshold,
    containment_scores,
    controlled_level,
    false_fractions,
    fewest_patients,
    interval_scores,
    missed_fractions,
    nearest_strata,
    stratum_scores,
    stratum_set,
    weighted_quantile,
)
from ambiseg.intervals import Interval, bootstrap
from ambiseg.masks import MaskDistribution

FORMAT = "ambiseg.Calibration/1"
FILE = "calibration.json"
Readers: TypeAlias = Literal["all", "marked"]
STATEMENTS = ("inner and outer", "outer", "inner", "found", "sure", "area", "strata")


_Level = Field(ge=0, le=1)


class ClassThresholds(Record):
    """Of one class: levels of its marginal, and how far an interval of √area (in pixels) is widened."""

    id: int = Field(ge=0)
    name: str
    patients: int
    readings: int
    outer: float = _Level
    inner: float = _Level
    found: float = _Level
    sure: float = _Level
    area: float


class Checked(Record):
    """How often a statement held on another part: a mean over patients with its 95 % interval."""

    part: str
    patients: int
    statements: dict[str, dict[str, tuple[float, float | None, float | None]]]


class Calibration(Record):
    """What ``ambiseg calibrate`` stores in a run.

    ``weights`` is the fingerprint of the model's weights; ``per_stratum`` or ``samples``, ``seed`` and ``symmetries``
    are how masks were drawn, as they are drawn again for every new image; ``size`` the smallest and the largest height
    and width of the images.
    """

    format: Literal["ambiseg.Calibration/1"] = FORMAT
    alpha: float = Field(gt=0, lt=1)
    weights: str
    which: str
    data: str
    part: str
    patients: int
    images: int
    readers: Readers = "all"
    per: Per = "reading"
    slack: float = Field(default=0.0, ge=0)
    per_stratum: int | None = None
    samples: int | None = None
    seed: int = 0
    symmetries: int = 1
    size: tuple[tuple[int, int], tuple[int, int]]
    classes: list[ClassThresholds]
    stratum: str = ""
    strata: float | None = None
    guarantees: list[str] = Field(default_factory=list)
    checked: Checked | None = None
    version: str = __version__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON. The file appears whole or not at all."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read what :meth:`save` wrote; an error in one line for anything else."""
        return read_json(path, "a calibration", Calibration)


# -- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Of one class of one image: its M readings, and losses ``[T]`` that are means over those."""

    share: np.ndarray  # [M] weight of each reading; 0: does not count
    outer: np.ndarray
    inner: np.ndarray
    missed: np.ndarray
    wrong: np.ndarray
    low: float  # quantiles of √area among the draws
    high: float
    values: np.ndarray  # [M] √area


@dataclass(frozen=True, eq=False)
class ImageScores:
    """All scores of the readings of one image."""

    patient: str
    size: tuple[int, int]
    classes: dict[int, ClassScores]
    share: np.ndarray  # [M]
    strata: np.ndarray | None  # [M]


@dataclass(frozen=True)
class Rules:
    """What is calibrated: see :class:`Calibration`."""

    alpha: float = 0.1
    readers: Readers = "all"
    per: Per = "reading"
    slack: float = 0.0


def score_readings(
    draws: MaskDistribution,
    readers: MaskDistribution,
    patient: str,
    classes: Sequence[int],
    rules: Rules,
    strata: tuple[Tensor, Tensor] | None = None,
) -> ImageScores:
    """The scores of one image.

    Args:
        draws: weighted masks, with their soft marginal if there is one.
        readers: their masks.
        classes: ids of the evaluated classes.
        strata: weights ``[1, K]`` of the strata, and ``[1, N]`` which of them each draw is of.
    """
    mass = readers.mass[0].double().cpu().numpy()
    present = mass > 0
    mass, said = mass[present] / mass[present].sum(), readers.labels[0].cpu().numpy()[present]
    valid = None if readers.valid is None else readers.valid[0].cpu().numpy()
    soft = draws.marginal_probs(max(*classes, draws.classes - 1) + 1)[0].cpu().numpy()
    found = {c: _score_class(soft[c], draws, said == c, c, mass, valid, rules) for c in classes}
    scores = None
    if strata is not None:
        nearest = nearest_strata(draws, strata[1], readers, classes)[0].cpu().numpy()[present]
        scores = stratum_scores(strata[0][0].detach().double().cpu().numpy(), nearest)
    height, width = readers.spatial[-2:]
    return ImageScores(patient, (int(height), int(width)), found, mass, scores)


def _score_class(
    marginal: np.ndarray,
    draws: MaskDistribution,
    said: np.ndarray,
    label: int,
    mass: np.ndarray,
    valid: np.ndarray | None,
    rules: Rules,
) -> ClassScores:
    said = said if valid is None else said & valid
    values = said.reshape(len(said), -1).sum(1)
    share = mass if rules.readers == "all" else np.where(values > 0, mass, 0)
    total = share.sum()
    weights = (share / total if total > 0 else share)[:, None]
    outer, inner = containment_scores(marginal, said, valid, rules.slack)
    missed, wrong = missed_fractions(marginal, said, valid), false_fractions(marginal, said, valid)
    low, high = area_quantiles(draws, label, rules.alpha, valid)
    losses = np.clip((missed * weights).sum(0), 0, 1), np.clip((wrong * weights).sum(0), 0, 1)
    return ClassScores(weights[:, 0], outer, inner, *losses, low, high, np.sqrt(values))


def area_quantiles(
    draws: MaskDistribution, label: int, alpha: float, valid: np.ndarray | None = None
) -> tuple[float, float]:
    """The quantiles α/2 and 1 − α/2 of √area, in pixels, among weighted masks of one image."""
    counts = None if valid is None else torch.from_numpy(valid)[None].to(draws.device)
    pixels, mass = areas(encode(draws, label, counts))[0].cpu().double().numpy(), draws.mass[0].double().cpu().numpy()
    low, high = (weighted_quantile(np.sqrt(pixels), mass, level) for level in (alpha / 2, 1 - alpha / 2))
    return low, high


# -- thresholds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """Those of :class:`Calibration`: of every class by its id, and of the strata."""

    classes: dict[int, dict[str, float]]
    strata: float | None
    patients: dict[int, int]
    readings: dict[int, int]


def thresholds(scores: Sequence[ImageScores], rules: Rules) -> Thresholds:
    """Calibrate on scored images; :class:`ConfigError` with too few patients for the statements to say anything."""
    found, patients, readings = {}, {}, {}
    for label in scores[0].classes:
        mine = [(image.patient, image.classes[label]) for image in scores]
        counted = {patient for patient, one in mine if one.share.any()}
        least = fewest_patients(rules.alpha / 2)
        if len(counted) < least:
            enough = f"expected at least {least} patients" + (" with a mark" if rules.readers == "marked" else "")
            raise ConfigError(f"alpha {rules.alpha:g}: {enough}, found {len(counted)}; a larger alpha needs fewer")
        found[label] = _class_thresholds(mine, rules)
        patients[label] = len(counted)
        readings[label] = sum(int((one.share > 0).sum()) for _, one in mine)
    strata = None
    if scores[0].strata is not None:
        names, share = _flat([(image.patient, image.share) for image in scores])
        values = np.concatenate([image.strata for image in scores if image.strata is not None])
        strata = min(1.0, conformal_threshold(values, names, rules.alpha, share, rules.per))
    return Thresholds(found, strata, patients, readings)


def _class_thresholds(mine: Sequence[tuple[str, ClassScores]], rules: Rules) -> dict[str, float]:
    names, share = _flat([(patient, one.share) for patient, one in mine])

    def threshold(values: list[np.ndarray], alpha: float) -> float:
        return conformal_threshold(np.concatenate(values), names, alpha, share, rules.per)

    outer = threshold([one.outer for _, one in mine], rules.alpha / 2)
    inner = threshold([one.inner for _, one in mine], rules.alpha / 2)
    widened = [interval_scores(np.array(one.low), np.array(one.high), one.values) for _, one in mine]
    counted = [(patient, one) for patient, one in mine if one.share.any()]
    owners = [patient for patient, _ in counted]
    found = controlled_level(np.stack([one.missed for _, one in counted]), owners, rules.alpha)
    sure = controlled_level(np.stack([one.wrong for _, one in counted]), owners, rules.alpha)
    return {
        "outer": min(1.0, max(0.0, -outer)),
        "inner": min(1.0, max(0.0, inner)),
        "found": float(LEVELS[::-1][found]),
        "sure": float(LEVELS[sure]),
        "area": threshold(widened, rules.alpha),
    }


def _flat(images: Sequence[tuple[str, np.ndarray]]) -> tuple[list[str], np.ndarray]:
    """The patient and the weight of every reading. The images of a patient that have any count alike."""
    return [patient for patient, share in images for _ in share], np.concatenate([share for _, share in images])


def held(scores: ImageScores, found: Thresholds, rules: Rules) -> dict[str, dict[int, float]]:
    """How often each statement holds among the readings of an image, and of ``found`` and ``sure`` the loss: by class;
    strata under 0. Classes without a reading that counts are left out. With ``per="patient"`` 1 or 0, whether it holds
    for all readings."""
    said: dict[str, dict[int, float]] = {name: {} for name in STATEMENTS}

    def rate(share: np.ndarray, holds: np.ndarray) -> float:
        return float(share @ holds) if rules.per == "reading" else float(holds[share > 0].all())

    for label, one in scores.classes.items():
        if not one.share.any():
            continue
        at = found.classes[label]
        outer, inner = one.outer <= -at["outer"], one.inner <= at["inner"]
        area = interval_scores(np.array(one.low), np.array(one.high), one.values) <= at["area"]
        for name, holds in (("inner and outer", outer & inner), ("outer", outer), ("inner", inner), ("area", area)):
            said[name][label] = rate(one.share, holds)
        said["found"][label] = float(one.missed[np.searchsorted(-LEVELS[::-1], -at["found"])])
        said["sure"][label] = float(one.wrong[np.searchsorted(LEVELS, at["sure"])])
    if scores.strata is not None and found.strata is not None:
        top = scores.strata <= found.strata
        said["strata"][0] = rate(scores.share, top)
    return said


def coverage(scores: Sequence[ImageScores], found: Thresholds, rules: Rules) -> dict[str, dict[int, Interval]]:
    """:func:`held` as a mean over patients with its 95 % interval: of all images of a patient the mean, or with
    ``per="patient"`` whether it holds for all."""
    values: dict[tuple[str, int], dict[str, list[float]]] = {}
    for image in scores:
        for name, by_class in held(image, found, rules).items():
            for label, value in by_class.items():
                values.setdefault((name, label), {}).setdefault(image.patient, []).append(value)
    made: dict[str, dict[int, Interval]] = {}
    for (name, label), patients in values.items():
        whole = rules.per == "patient" and name not in ("found", "sure")
        means = [min(each) if whole else float(np.mean(each)) for each in patients.values()]
        made.setdefault(name, {})[label] = bootstrap(means)
    return made


def in_words(found: Calibration) -> list[str]:
    """What is guaranteed, one sentence each.

    The first says to whom, the last what is not said.
    """
    sure, risk = percent(1 - found.alpha), percent(found.alpha)
    marked = " that marks the class" if found.readers == "marked" else ""
    one = f"a mask{marked}, drawn from those of a new patient's readers and images,"
    every = f"every reader's mask{marked} of every image of a new patient"
    who, verb = (one, "lies") if found.per == "reading" else (every, "lies")
    slack = f", up to {found.slack:g} pixels" if found.slack else ""
    said = [
        f"calibrated on {found.images} images of {found.patients} patients ({found.data}, part {found.part}); what "
        "follows holds for patients exchangeable with those, whose images are made and cut in the same way"
    ]
    for one_class in found.classes:
        name = one_class.name
        said += [
            f"{name}, inner and outer: with probability at least {sure}, {who} {verb} in the outer mask and holds the "
            f"inner one{slack}",
            f"{name}, found: misses on average at most {risk} of a reader's mask{marked}",
            f"{name}, sure: on average at most {risk} of it is outside of a reader's mask{marked}",
            f"{name}, area: with probability at least {sure}, the interval holds the area of {who.rstrip(',')}",
        ]
    if found.strata is not None:
        said.append(f"{found.stratum}s: with probability at least {sure}, the set holds the {found.stratum} nearest to "
                    "a reader's mask")  # fmt: skip
    return [*said, "each sentence holds by itself, on average over patients: not all together, and not for each image"]


# -- a new image ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bounds:
    """What a calibration says of one class of a new image."""

    id: int
    name: str
    inner: np.ndarray  #: ``[H, W]`` bool
    outer: np.ndarray  #: ``[H, W]`` bool
    sure: np.ndarray  #: ``[H, W]`` bool
    found: np.ndarray  #: ``[H, W]`` bool
    area: tuple[float, float]  #: in pixels


@dataclass(frozen=True, eq=False)
class Guaranteed:
    """What a calibration says of a new image: bounds of each class, and a set of strata, heaviest first."""

    calibration: Calibration
    classes: tuple[Bounds, ...]
    strata: tuple[int, ...] | None


def apply(calibration: Calibration, draws: MaskDistribution, weights: np.ndarray | None = None) -> Guaranteed:
    """The statements about one image.

    Args:
        draws: its masks, drawn as those of the calibration, with their marginal.
        weights: ``[K]`` of its strata.
    """
    soft = draws.marginal_probs(max(draws.classes, *(one.id + 1 for one in calibration.classes)))[0].cpu().numpy()
    made = []
    for one in calibration.classes:
        m = np.clip(soft[one.id].astype(np.float64), 0, 1)
        low, high = area_quantiles(draws, one.id, calibration.alpha)
        low, high = low - one.area, high + one.area
        if low > high:  # narrowed to nothing: one number holds no less
            low = high = (low + high) / 2
        area = (max(0.0, low) ** 2, max(0.0, high) ** 2)
        made.append(Bounds(one.id, one.name, m > one.inner, m >= one.outer, m > one.sure, m >= one.found, area))
    strata = None
    if calibration.strata is not None and weights is not None:
        strata = tuple(stratum_set(weights.astype(np.float64), calibration.strata))
    return Guaranteed(calibration, tuple(made), strata)
