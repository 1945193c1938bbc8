"""Scores of single images: masks drawn in every form that is asked for, and what each of them is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.data.case import Flip
from ambiseg.data.loader import Batch, seed_of
from ambiseg.evaluation.modes import ModeScores, score_modes
from ambiseg.masks import MaskDistribution, exact
from ambiseg.methods.base import Predictive
from ambiseg.metrics import (
    PROTOCOLS,
    ReliabilityCurve,
    ged,
    matched_iou,
    pixel_entropy,
    reliability_curve,
    sample_diversity,
)
from ambiseg.overlap import common_valid

METRICS = ("ged", "ged_unbiased", "matched_iou", "diversity", "entropy", "ece", "empty_mass")
"""What every image is scored by; docs/evaluate.md says what each is."""


class CaseScores(TypedDict):
    """One image: how its readers differ, which experts it is given to, and its scores by setting and metric."""

    name: str
    patient: str
    readers: int  # who drew any evaluated class
    readers_total: int
    empty_share: float | None  # weight of the readers who drew nothing
    annotations: dict[str, float | None]  # diversity and entropy of the readers' own masks
    expert_weights: list[float] | None
    scores: dict[str, dict[str, float | None]]


@dataclass(frozen=True, eq=False)
class Scored:
    """One image's scores, its pixels binned by confidence, which pool over images, and its masks among known modes."""

    case: CaseScores
    curves: dict[str, ReliabilityCurve]
    modes: dict[str, ModeScores] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """How masks are compared.

    Args:
        protocol: a key of ``PROTOCOLS``.
        evaluated: class ids that metrics look at.
        classes: C, how many there are.
        flips: that make the modes, for data of known modes.
    """

    protocol: str
    evaluated: tuple[int, ...]
    classes: int
    flips: tuple[Flip, ...] = ()

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol: expected one of {', '.join(PROTOCOLS)}, found {self.protocol!r}")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the metrics."""
        return {"classes": self.evaluated, "protocol": self.protocol}


# -- drawing ----------------------------------------------------------------------------------------------------------


def _standard(predictive: Predictive, samples: int, generator: torch.Generator) -> tuple[MaskDistribution, int]:
    return predictive.sample(samples, generator), 1


def _compact(predictive: Any, samples: int, generator: torch.Generator) -> tuple[MaskDistribution, int]:
    experts = predictive.expert_weights.shape[1]
    return predictive.compact(per_expert(samples, experts), generator), experts


# Masks, and from how many strata of equally many masks they were drawn: those of one stratum lie side by side.
FORMS: dict[str, Callable[[Any, int, torch.Generator], tuple[MaskDistribution, int]]] = {
    "standard": _standard,
    "compact": _compact,
}


def per_expert(samples: int, experts: int) -> int:
    """Masks of every expert so that all together are as close to ``samples`` as can be, the smaller number on a tie.

    >>> per_expert(16, 4), per_expert(50, 4), per_expert(51, 4), per_expert(1, 4)
    (4, 12, 13, 1)
    """
    low = max(1, samples // experts)
    return low if samples - low * experts <= (low + 1) * experts - samples else low + 1


def settings_of(predictive: Predictive, forms: Sequence[str], samples: Sequence[int]) -> list[tuple[str, int]]:
    """Form and real number of masks of every setting that this method can draw, each once."""
    found: dict[tuple[str, int], None] = {}
    for form in forms:
        if form == "compact" and not callable(getattr(predictive, "compact", None)):
            continue
        for n in samples:
            if form == "compact":
                experts = predictive.expert_weights.shape[1]  # type: ignore[attr-defined]
                n = experts * per_expert(n, experts)
            found[form, n] = None
    return list(found)


def score_batch(
    predictive: Predictive, batch: Batch, rules: Rules, forms: Sequence[str], samples: Sequence[int], seed: int = 0
) -> list[Scored]:
    """Score every image of a batch in every setting. All draws come from one :class:`Predictive`: features once.

    What is random comes from (seed, form, number of masks, the batch's first name) and from nothing else.
    """
    settings = settings_of(predictive, forms, samples)
    if not settings:
        raise ConfigError(f"form: expected one that the method has, found {', '.join(forms)}")
    annotations = batch.annotations
    cases = _cases(annotations, batch.names, batch.patients, rules, getattr(predictive, "expert_weights", None))
    curves: list[dict[str, ReliabilityCurve]] = [{} for _ in cases]
    modes: list[dict[str, ModeScores]] = [{} for _ in cases]
    for form, n in settings:
        generator = torch.Generator(annotations.device)
        generator.manual_seed(seed_of(seed, "evaluate", form, n, batch.names[0]))
        masks, strata = FORMS[form](predictive, n, generator)
        key = f"{form}-{masks.count}"
        _add(cases, curves, key, masks, annotations, rules, strata)
        if rules.flips:
            found = score_modes(masks, batch.annotations.regions, rules.flips, rules.evaluated, rules.protocol, strata)
            for own, one in zip(modes, found, strict=True):
                own |= {} if one is None else {key: one}
    return [Scored(*parts) for parts in zip(cases, curves, modes, strict=True)]


def score_masks(
    masks: MaskDistribution, annotations: MaskDistribution, name: str, patient: str, rules: Rules, key: str
) -> Scored:
    """The same for masks of one image that are there already; their setting is called ``key``."""
    cases = _cases(annotations, [name], [patient], rules)
    curves: list[dict[str, ReliabilityCurve]] = [{}]
    _add(cases, curves, key, masks, annotations, rules)
    return Scored(cases[0], curves[0])


# -- scoring ----------------------------------------------------------------------------------------------------------


def _cases(
    annotations: MaskDistribution,
    names: Sequence[str],
    patients: Sequence[str],
    rules: Rules,
    expert_weights: Tensor | None = None,
) -> list[CaseScores]:
    """What is known of the images before anything is drawn."""
    present, drew = annotations.mass > 0, marked(annotations, rules.evaluated)
    counted, total = (drew & present).sum(1).tolist(), present.sum(1).tolist()
    share = _plain(empty_mass(annotations, rules.evaluated))
    diversity = _plain(sample_diversity(annotations, **rules.options))
    entropy = _plain(pixel_entropy(annotations, rules.classes))
    weights = None if expert_weights is None else expert_weights.detach().double().cpu().tolist()
    return [
        CaseScores(
            name=name,
            patient=patient,
            readers=counted[i],
            readers_total=total[i],
            empty_share=share[i],
            annotations={"diversity": diversity[i], "entropy": entropy[i]},
            expert_weights=None if weights is None else weights[i],
            scores={},
        )
        for i, (name, patient) in enumerate(zip(names, patients, strict=True))
    ]


def _add(
    cases: list[CaseScores],
    curves: list[dict[str, ReliabilityCurve]],
    key: str,
    masks: MaskDistribution,
    annotations: MaskDistribution,
    rules: Rules,
    strata: int = 1,
) -> None:
    if (valid := common_valid(masks, annotations)) is not None:
        masks = replace(masks, valid=valid)  # so that diversity and entropy look where the others do
    try:
        matched = matched_iou(masks, annotations, **rules.options)
    except ValueError as error:  # a protocol that has no weighted form
        raise ConfigError(f"{cases[0]['name']}: {error}") from None
    distance, diversity = ged(masks, annotations, **rules.options), sample_diversity(masks, **rules.options)
    pixels = _curves(masks, annotations, rules)
    values = {
        "ged": distance,
        "ged_unbiased": distance - bias(masks, diversity, rules, strata),
        "matched_iou": matched,
        "diversity": diversity,
        "entropy": pixel_entropy(masks, rules.classes),
        "ece": torch.tensor([curve.ece for curve in pixels], dtype=torch.float64),
        "empty_mass": empty_mass(masks, rules.evaluated),
    }
    plain = {name: _plain(value) for name, value in values.items()}
    for i, case in enumerate(cases):
        case["scores"][key] = {name: plain[name][i] for name in METRICS}
        curves[i][key] = pixels[i]


def bias(masks: MaskDistribution, diversity: Tensor, rules: Rules, strata: int = 1) -> Tensor:
    """By how much GED of these draws is too large on average, because a mask is compared with itself too, ``[B]``.

    Independent draws of weights w:  D · Σw² / (1 − Σw²),  which is D / (N − 1) when they are equal.
    S draws from each of K strata of shares π (the compact form):  Σ_k π_k² D_k / (S − 1),  because pairs of different
    strata are right as they are. D is the diversity of all masks, D_k of those of a stratum. nan where there is
    but one draw to compare.
    """
    weights = exact(masks.mass)
    if strata == 1:
        weights = weights / weights.sum(1, keepdim=True)
        squares = weights.square().sum(1)
        return diversity * squares / (1 - squares)
    B, S = len(masks), masks.count // strata
    if S < 2:
        return torch.full_like(diversity, torch.nan)
    alone = MaskDistribution(
        masks.labels.reshape(B * strata, S, *masks.spatial),
        valid=None if masks.valid is None else masks.valid.repeat_interleave(strata, 0),
    )
    within = sample_diversity(alone, **rules.options).view(B, strata)
    share = weights.view(B, strata, S).sum(2)
    share = share / share.sum(1, keepdim=True)
    return torch.where(share > 0, share.square() * within, 0).sum(1) / (S - 1)


def marked(masks: MaskDistribution, evaluated: Sequence[int]) -> Tensor:
    """Which masks hold any of the classes at a pixel that counts, ``[B, N]`` bool.

    >>> marked(MaskDistribution(torch.tensor([[[[0, 2]], [[0, 1]]]])), (1,))
    tensor([[False,  True]])
    """
    found = torch.zeros(masks.labels.shape[:2], dtype=torch.bool, device=masks.device)
    for label in evaluated:
        there = masks.labels == label
        found |= (there if masks.valid is None else there & masks.valid[:, None]).flatten(2).any(2)
    return found


def empty_mass(masks: MaskDistribution, evaluated: Sequence[int]) -> Tensor:
    """How likely a mask is that holds none of the classes, ``[B]``; nan where no pixel counts.

    >>> empty_mass(MaskDistribution(torch.tensor([[[[0, 0]], [[0, 1]]]]), torch.tensor([[0.25, 0.75]])), (1,))
    tensor([0.2500], dtype=torch.float64)
    """
    mass = exact(masks.mass.detach())
    mass = mass / mass.sum(1, keepdim=True)
    value = torch.where(marked(masks, evaluated), 0, mass).sum(1)
    return value if masks.valid is None else value.masked_fill(~masks.valid.flatten(1).any(1), torch.nan)


def _curves(masks: MaskDistribution, annotations: MaskDistribution, rules: Rules) -> list[ReliabilityCurve]:
    # On the CPU, image by image: a GPU adds in another order each time, and sums must not depend on the batch.
    predicted, true = (x.marginal_probs(rules.classes).cpu().contiguous() for x in (masks, annotations))
    valid = None if masks.valid is None else masks.valid.cpu()
    return [
        reliability_curve(
            predicted[i : i + 1], true[i : i + 1], rules.evaluated, valid=None if valid is None else valid[i : i + 1]
        )
        for i in range(len(masks))
    ]


def _plain(values: Tensor) -> list[float | None]:
    """Python's numbers; ``None`` for nan, of which JSON knows nothing."""
    return [value if value == value else None for value in values.detach().double().cpu().tolist()]
