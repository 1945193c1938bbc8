"""The calibration of a run, where it is applied to new images: which one, and what it says nothing about."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import shape_text
from ambiseg.decisions.calibration import FILE, Calibration, Guaranteed, apply
from ambiseg.io.source import Source
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Predictive, Stratified
from ambiseg.prediction.drawing import draw, form_of
from ambiseg.prediction.result import Options
from ambiseg.runs import Run, Which


def calibration_of(run: Run, which: Which, given: Calibration | str | os.PathLike[str] | None) -> Calibration | None:
    """The calibration that is given or that the run has; an error for one of other weights."""
    if isinstance(given, Calibration):
        found, place = given, "calibration"
    else:
        place = run.folder / FILE if given is None else Path(given)
        if given is None and not place.is_file():
            return None
        if not place.exists():
            raise ConfigError(f"{place}: expected a calibration, found no such file")
        found = Calibration.load(place)
    if found.weights != run.digest(which):
        hint = "ambiseg calibrate makes one, calibration=False goes on without"
        raise ConfigError(
            f"{place}: expected a calibration of the weights of {run.folder} ({which}), found one of others; {hint}"
        )
    if found.classes and max(one.id for one in found.classes) >= len(run.card.classes):
        top = max(one.id for one in found.classes)
        raise ConfigError(f"{place}: expected class ids below {len(run.card.classes)}, found {top}")
    return found


def not_guaranteed(found: Calibration | None, source: Source, options: Options) -> tuple[str, ...]:
    """Why a calibration says nothing of an image, or not what it should."""
    if found is None:
        return ()
    if source.slices > 1:
        why = "the calibration is of single images, and the slices of a volume share their draws"
        return (f"nothing is guaranteed for a volume: {why}; a slice that is predicted as an image has its guarantees",)
    if found.symmetries != options.symmetries:
        other = f"symmetries={found.symmetries}, and this is with {options.symmetries}"
        return (f"the calibration is with {other}: it says nothing here",)
    (h, w), (height, width) = found.size
    if not (h <= source.size[0] <= height and w <= source.size[1] <= width):
        sizes = " to ".join(dict.fromkeys((shape_text((h, w)), shape_text((height, width)))))
        return (f"the calibration is of images of {sizes} pixels: nothing is guaranteed for {source.form}",)
    return ()


def guaranteed(
    found: Calibration | None,
    predictive: Predictive,
    drawn: MaskDistribution,
    options: Options,
    device: torch.device,
) -> Guaranteed | None:
    """What a calibration says of an image, by masks that are drawn as they were for the calibration.

    Args:
        drawn: the masks that ``options`` ask for: taken where those are the same.
    """
    if found is None or found.symmetries != options.symmetries:
        return None
    same = replace(options, per_stratum=found.per_stratum, samples=found.samples, seed=found.seed, keep=None)
    draws = drawn if form_of(predictive, same) == form_of(predictive, options) else draw(predictive, same, device)[0]
    weights = predictive.weights[0].detach().cpu().numpy() if isinstance(predictive, Stratified) else None
    return apply(found, draws.to("cpu"), weights)
