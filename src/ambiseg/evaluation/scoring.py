"""Scores of single images: masks drawn in every form that is asked for, compared with the annotations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.records import Number
from ambiseg.data.case import Flip
from ambiseg.data.loader import Batch, seed_of
from ambiseg.evaluation.anchors import AnchorScores, anchor_scores
from ambiseg.evaluation.deciding import DecidedCase, DecisionRules, decide
from ambiseg.evaluation.modes import ModeScores, score_modes
from ambiseg.evaluation.results import METRICS, CaseScores
from ambiseg.evaluation.selecting import area_scores
from ambiseg.masks import MaskDistribution, exact
from ambiseg.methods.base import Predictive, Stratified
from ambiseg.methods.drawing import Drawing, bias, draw, settings_of
from ambiseg.metrics import (
    PROTOCOLS,
    ReliabilityCurve,
    compare,
    pixel_entropy,
    reliability_curve,
    sample_diversity,
)
from ambiseg.overlap import common_valid
from ambiseg.regions import RegionMasks


@dataclass(frozen=True)
class ScoringRules:
    """How masks are compared.

    Args:
        protocol: a key of ``PROTOCOLS``.
        evaluated: ids of the classes that are scored.
        classes: C, background included.
        flips: the flips that make the modes, for data of known modes.
        constant: ``[H, W]`` labels of one mask for all images, made of the training part: an anchor.
        decisions: what is made of the predicted masks; not for data of known modes.
    """

    protocol: str
    evaluated: tuple[int, ...]
    classes: int
    flips: tuple[Flip, ...] = ()
    constant: np.ndarray | None = field(default=None, compare=False)
    decisions: DecisionRules = field(default_factory=DecisionRules)

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol: expected one of {', '.join(PROTOCOLS)}, found {self.protocol!r}")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the metrics."""
        return {"classes": self.evaluated, "protocol": self.protocol}


@dataclass(frozen=True, eq=False)
class ScoredCase:
    """One image's scores, what others score on it and, by setting, what is pooled over images: binned pixels and masks
    among known modes; and how much masks are expected to differ by their areas."""

    scores: CaseScores
    curves: dict[str, ReliabilityCurve]
    modes: dict[str, ModeScores] = field(default_factory=dict)
    anchors: AnchorScores | None = None
    areas: dict[str, float] = field(default_factory=dict)
    decided: DecidedCase | None = None

    def renamed(self, old: str, new: str) -> ScoredCase:
        """The same with another key for a setting."""
        scores = self.scores.model_copy(update={"scores": {new: self.scores.scores[old]}})
        decided = self.decided and replace(self.decided, setting=new)
        curves, areas = {new: self.curves[old]}, {new: self.areas[old]}
        return replace(self, scores=scores, curves=curves, areas=areas, decided=decided)


def score_batch(
    predictive: Predictive,
    batch: Batch,
    rules: ScoringRules,
    forms: Sequence[str],
    samples: Sequence[int],
    seed: int = 0,
) -> list[ScoredCase]:
    """Score every image of a batch in every setting. All draws come from one :class:`Predictive`: features once.

    All random numbers follow from (seed, form, number of masks, the batch's first name).
    """
    settings = settings_of(predictive, forms, samples)
    if not settings:
        raise ConfigError(f"form: expected one that the method has, found {', '.join(forms)}")

    def drawings() -> Iterator[tuple[str, Drawing]]:
        for form, n in settings:
            generator = torch.Generator(batch.annotations.device)
            generator.manual_seed(seed_of(seed, "evaluate", form, n, batch.names[0]))
            yield f"{form}-{n}", draw(predictive, form, n, generator)

    weights = predictive.weights.detach().tolist() if isinstance(predictive, Stratified) else None
    key = decided_setting(settings)
    return _score(drawings(), batch.annotations, batch.names, batch.patients, rules, key, weights)


def decided_setting(settings: Sequence[tuple[str, int]]) -> str:
    """Whose masks single masks and measurements are made of: weighted ones, as ``predict`` writes them, and most."""
    form, n = max(settings, key=lambda setting: (setting[0] == "compact", setting[1]))
    return f"{form}-{n}"


def score_masks(
    masks: MaskDistribution, annotations: MaskDistribution, name: str, patient: str, rules: ScoringRules, key: str
) -> ScoredCase:
    """The same for given masks of one image; ``key`` is the name of their setting.

    Masks of unequal weights have no unbiased GED, which assumes independent draws.
    """
    (scored,) = _score([(key, Drawing(masks, 1))], annotations, [name], [patient], rules, key)
    if masks.weights is not None and float(masks.weights.max() - masks.weights.min()) > 1e-6:
        scored.scores.scores[key].update(ged_unbiased=None, ged_unbiased_both=None)
    return scored


def _score(
    drawings: Iterable[tuple[str, Drawing]],
    annotations: MaskDistribution,
    names: Sequence[str],
    patients: Sequence[str],
    rules: ScoringRules,
    decided_by: str,
    strata_weights: Sequence[list[float]] | None = None,
) -> list[ScoredCase]:
    """Scores of the masks in each setting, which are drawn one after the other, and what the annotations are like."""
    scores: list[dict[str, dict[str, Number]]] = [{} for _ in names]
    curves: list[dict[str, ReliabilityCurve]] = [{} for _ in names]
    modes: list[dict[str, ModeScores]] = [{} for _ in names]
    areas: list[dict[str, float]] = [{} for _ in names]
    decided: list[DecidedCase] | None = None
    regions = annotations.regions if rules.flips and isinstance(annotations, RegionMasks) else None
    own = sample_diversity(annotations, **rules.options), pixel_entropy(annotations, rules.classes)
    for key, drawing in drawings:
        for i, (row, curve) in enumerate(_compare(drawing, annotations, rules, names[0])):
            scores[i][key], curves[i][key] = row, curve
        for found, area in zip(areas, area_scores(drawing.masks, annotations, rules.evaluated), strict=True):
            found[key] = area
        if key == decided_by and not rules.flips:
            decided = decide(drawing.masks, annotations, rules.evaluated, rules.decisions, key)
        if regions is not None:
            placed = score_modes(drawing, regions, rules.flips, rules.evaluated, rules.protocol)
            for found, mode in zip(modes, placed, strict=True):
                found.update({} if mode is None else {key: mode})
        del drawing  # with all its masks, before the next setting draws as many
    present, drawn = annotations.mass > 0, marked(annotations, rules.evaluated)
    columns = {
        "name": names,
        "patient": patients,
        "readers": (drawn & present).sum(1).tolist(),
        "readers_total": present.sum(1).tolist(),
        "empty_share": empty_mass(annotations, drawn).tolist(),
        "strata_weights": strata_weights or [None] * len(names),
        "scores": scores,
    }
    anchors = anchor_scores(
        annotations, rules.classes, rules.evaluated, rules.protocol, bool(rules.flips), rules.constant
    )
    scored = []
    for i, (diversity, entropy) in enumerate(zip(*(values.tolist() for values in own), strict=True)):
        about: dict[str, Any] = {name: column[i] for name, column in columns.items()}
        case = CaseScores(**about, annotations={"diversity": diversity, "entropy": entropy})
        single = None if decided is None else decided[i]
        scored.append(ScoredCase(case, curves[i], modes[i], anchors[i], areas[i], single))
    return scored


def _compare(
    drawing: Drawing, annotations: MaskDistribution, rules: ScoringRules, name: str
) -> list[tuple[dict[str, Number], ReliabilityCurve]]:
    """All metrics and the binned pixels of each image of a batch whose first image is ``name``."""
    masks = drawing.masks
    if (valid := common_valid(masks, annotations)) is not None:
        masks = replace(masks, valid=valid)  # diversity and entropy of the same pixels as the other metrics
    pair = compare(masks, annotations, **rules.options)
    try:
        matched = pair.matched_iou()
    except ValueError as error:  # a protocol that has no weighted form
        raise ConfigError(f"{name}: {error}") from None
    distance, diversity = pair.ged(), pair.diversity()
    curves = _curves(masks, annotations, rules)
    unbiased = distance - bias(masks, diversity if drawing.strata == 1 else pair.diversity(drawing.strata))
    # Modes that are known are all there are, not a sample of more.
    unknown = torch.full_like(unbiased, torch.nan)
    values = {
        "ged": distance,
        "ged_unbiased": unbiased,
        "ged_unbiased_both": unknown if rules.flips else unbiased - bias(annotations, pair.truth_diversity()),
        "matched_iou": matched,
        "diversity": diversity,
        "entropy": pixel_entropy(masks, rules.classes),
        "ece": torch.tensor([curve.ece for curve in curves], dtype=torch.float64),
        "empty_mass": empty_mass(masks, pair.marked[:, : masks.count]),
    }
    columns = zip(*(values[metric].tolist() for metric in METRICS), strict=True)
    return [(dict(zip(METRICS, row, strict=True)), curve) for row, curve in zip(columns, curves, strict=True)]


def marked(masks: MaskDistribution, evaluated: Sequence[int]) -> Tensor:
    """Which masks hold any of the classes at a pixel that counts, ``[B, N]`` bool.

    >>> marked(MaskDistribution(torch.tensor([[[[0, 2]], [[0, 1]]]])), (1,))
    tensor([[False,  True]])
    """
    if isinstance(masks, RegionMasks) and masks.regions is not None:
        labels, valid = masks.regions.labels, masks.regions.size > 0
    else:
        labels, valid = masks.labels.flatten(2), None if masks.valid is None else masks.valid.flatten(1)
    found = torch.zeros(labels.shape[:2], dtype=torch.bool, device=labels.device)
    for label in evaluated:
        there = labels == label
        found |= (there if valid is None else there & valid[:, None]).any(2)
    return found


def empty_mass(masks: MaskDistribution, marked: Tensor) -> Tensor:
    """Probability of a mask that holds none of the classes, ``[B]``; nan where no pixel counts.

    ``marked [B, N]`` says which hold any.

    >>> masks = MaskDistribution(torch.tensor([[[[0, 0]], [[0, 1]]]]), torch.tensor([[0.25, 0.75]]))
    >>> empty_mass(masks, marked(masks, (1,)))
    tensor([0.2500], dtype=torch.float64)
    """
    mass = exact(masks.mass.detach())
    mass = mass / mass.sum(1, keepdim=True)
    value = torch.where(marked, 0, mass).sum(1)
    return value if masks.valid is None else value.masked_fill(~masks.valid.flatten(1).any(1), torch.nan)


def _curves(masks: MaskDistribution, annotations: MaskDistribution, rules: ScoringRules) -> list[ReliabilityCurve]:
    # On the CPU, image by image: a GPU adds in another order each time, and sums must not depend on the batch.
    curves: list[list[ReliabilityCurve]] = [[] for _ in range(len(masks))]
    for drawn, said in zip(masks.bands(), annotations.bands(), strict=True):
        predicted, true = (part.marginal_probs(rules.classes).cpu().contiguous() for part in (drawn, said))
        valid = [None] * len(masks) if drawn.valid is None else drawn.valid.cpu().split(1)
        images = zip(curves, predicted.split(1), true.split(1), valid, strict=True)
        for found, p, t, v in images:
            found.append(reliability_curve(p, t, rules.evaluated, valid=v))
    return [sum(parts[1:], start=parts[0]) for parts in curves]
