"""How many masks are drawn of an image, and from which noise."""

from __future__ import annotations

import torch

from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Noise, Predictive, Stratified
from ambiseg.methods.drawing import draw_noise, per_stratum
from ambiseg.prediction.result import Options

_PER_STRATUM, _SAMPLES, _TO_KEEP = 4, 16, 100  # masks that are drawn unless the options say how many


def asked(options: Options, strata: int | None) -> int:
    """Masks to draw: in all, or from each of so many strata."""
    if strata is None:
        return options.samples or (_SAMPLES if options.keep is None else _TO_KEEP)
    return options.per_stratum or (_PER_STRATUM if options.keep is None else per_stratum(_TO_KEEP, strata))


def form_of(predictive: Predictive, options: Options) -> tuple[int | None, int, int]:
    """What the draws of an image depend on: strata, how many, seed."""
    by_strata = isinstance(predictive, Stratified) and options.samples is None
    strata = predictive.weights.shape[1] if by_strata else None  # type: ignore[attr-defined]
    return strata, asked(options, strata), options.seed


def noise_of(predictive: Predictive, options: Options, device: torch.device) -> Noise:
    """What the masks of an image come from. Every image starts from the seed."""
    generator = torch.Generator(device).manual_seed(options.seed)
    strata, count, _ = form_of(predictive, options)
    if strata is None:
        return draw_noise(predictive, "standard", count, generator)
    return draw_noise(predictive, "compact", count * strata, generator)


def draw(predictive: Predictive, options: Options, device: torch.device) -> tuple[MaskDistribution, Noise]:
    """The masks of an image as ``options`` ask, with their soft marginal, and the noise that they come from."""
    noise = noise_of(predictive, options, device)
    return predictive.render(noise), noise
