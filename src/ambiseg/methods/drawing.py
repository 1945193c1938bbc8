"""Masks drawn from a :class:`~ambiseg.methods.predictive.Predictive`, in the forms of papers. Everybody draws here.

``standard`` is N equally likely masks. ``compact`` is the same number of masks of every stratum, weighted; only methods
with strata have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Noise, Predictive, Stratified

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
