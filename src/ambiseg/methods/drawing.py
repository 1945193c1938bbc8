"""Masks drawn from a :class:`~ambiseg.methods.predictive.Predictive`, in the forms of papers. Everybody draws here.

``standard`` is N equally likely masks. ``compact`` is the same number of masks of every stratum, weighted; only methods
with strata have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution, exact
from ambiseg.methods.base import Noise, Predictive, Stratified
from ambiseg.metrics import Compared

Form: TypeAlias = Literal["standard", "compact"]
FORMS: tuple[Form, ...] = get_args(Form)


class Drawing(NamedTuple):
    """Masks, and from how many strata of equally many masks they were drawn: those of one stratum lie side by side."""

    masks: MaskDistribution
    strata: int


def per_stratum(samples: int, strata: int) -> int:
    """Masks of every stratum so that all together are as close to ``samples`` as can be, the smaller number on a tie.

    >>> per_stratum(16, 4), per_stratum(50, 4), per_stratum(51, 4), per_stratum(1, 4)
    (4, 12, 13, 1)
    """
    low = max(1, samples // strata)
    return low if samples - low * strata <= (low + 1) * strata - samples else low + 1


def settings_of(predictive: Predictive, forms: Sequence[str], samples: Sequence[int]) -> list[tuple[Form, int]]:
    """Form and real number of masks of every setting that this method can draw, each once."""
    found: dict[tuple[Form, int], None] = {}
    for form in forms:
        for n in samples:
            if form == "standard":
                found["standard", n] = None
            elif isinstance(predictive, Stratified):
                strata = predictive.weights.shape[1]
                found["compact", strata * per_stratum(n, strata)] = None
    return list(found)


def draw_noise(predictive: Predictive, form: str, samples: int, generator: torch.Generator | None = None) -> Noise:
    """The noise of about ``samples`` masks per image; the compact form takes the nearest number that it can."""
    if form == "compact" and isinstance(predictive, Stratified):
        return predictive.compact_noise(per_stratum(samples, predictive.weights.shape[1]), generator)
    if form != "standard":
        raise ValueError(f"form: expected one of {', '.join(FORMS)} that the method has, found {form!r}")
    return predictive.noise(samples, generator)


def draw(predictive: Predictive, form: str, samples: int, generator: torch.Generator | None = None) -> Drawing:
    """Masks in the form that is asked for."""
    masks = predictive.render(draw_noise(predictive, form, samples, generator))
    strata = predictive.weights.shape[1] if form == "compact" and isinstance(predictive, Stratified) else 1
    return Drawing(masks, strata)


def unbiased_ged(pair: Compared, strata: int) -> Tensor:
    """GED without the :func:`bias` of masks from so many strata, ``[B]``: on average that of infinitely many masks."""
    return pair.ged() - bias(pair.pred, pair.diversity(strata))


def bias(masks: MaskDistribution, diversity: Tensor) -> Tensor:
    """Expected excess of the GED of these masks, because each is compared with itself too, ``[B]``.

    Independent draws of weights w:  D · Σw² / (1 − Σw²),  which is D / (N − 1) when they are equal.
    S draws from each of K strata of shares π (the compact form):  Σ_k π_k² D_k / (S − 1),  because pairs of
    different strata have no bias. ``diversity`` is D ``[B]`` of all masks, or D_k ``[B, K]`` of those of each stratum.
    nan where there is only one draw.
    """
    weights = exact(masks.mass)
    if diversity.ndim == 1:
        weights = weights / weights.sum(1, keepdim=True)
        squares = weights.square().sum(1)
        return diversity * squares / (1 - squares)
    B, K = diversity.shape
    S = masks.count // K
    if S < 2:
        return weights.new_full((B,), torch.nan)
    share = weights.view(B, K, S).sum(2)
    share = share / share.sum(1, keepdim=True)
    return torch.where(share > 0, share.square() * diversity, 0).sum(1) / (S - 1)
