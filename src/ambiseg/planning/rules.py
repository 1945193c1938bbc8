"""The rules of a plan: from the facts of the training data to settings that fit, each with its reason.

They are fixed rules and heuristics, in the manner of nnU-Net (Isensee et al., Nature Methods 2021): nothing is tried
out on the data. What a user gives holds, and what depends on it follows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from ambiseg._util.text import count, percent, shape_text
from ambiseg.config import Config
from ambiseg.data.loader import steps_per_epoch
from ambiseg.methods import method_named
from ambiseg.methods.facts import Facts
from ambiseg.planning.cost import operations_per_pixel, seconds, validation_seconds
from ambiseg.settings import EPOCHS as LONGEST
from ambiseg.settings import validate

WIDTHS = (16, 32, 48, 64, 96)  # features of a U-Net's levels
WHOLE = 160  # working pixels: images of up to this side are trained on whole
WINDOW = 128  # working pixels: the side of the windows of larger ones
WORKING = 512  # working pixels: the side that large images are brought down to, if what is marked allows
FINEST = 4.0  # working pixels that the thickness of what is marked must keep
BATCH = 1 << 16  # pixels of a batch, of which a network of these widths learns well
EPOCHS = 24
LEAST_EPOCHS = 4
WINDOWS = 10_000  # of an image in an epoch, at most
VALIDATED = 0.15  # share of the budget that validation may take
UPRIGHT = 0.2
GAIN = 1.3
FOCUS = 0.9


class Draft:
    """Settings in the making. What the user gave stays; everything else is set once, with its reason."""

    def __init__(self, given: Mapping[str, Any], dashes: str = "") -> None:
        self.content: dict[str, Any] = copy.deepcopy(dict(given))
        self.dashes = dashes
        self.given = self.config
        self.reasons: dict[str, str] = {}

    def __call__(self, key: str, value: Any, reason: str) -> Any:
        """Set one setting unless it was given, and return what holds."""
        *sections, name = key.split(".")
        table = self.content
        for section in sections:
            if not isinstance(table.setdefault(section, {}), dict):
                return value  # the whole section was given as something else
            table = table[section]
        if name not in table:
            table[name], self.reasons[key] = value, reason
            return value
        if isinstance(table[name], Mapping) and isinstance(value, Mapping):
            table[name] = {**value, **table[name]}
        self.reasons[key] = "as given"
        found: Any = self.given
        for part in key.split("."):
            found = getattr(found, part)
        return found

    @property
    def config(self) -> Config:
        return validate(Config, self.content, dashes=self.dashes)


def make(given: Mapping[str, Any], facts: Facts, minutes: float, dashes: str = "") -> tuple[Config, dict[str, str]]:
    """A complete configuration and the reason of each choice; ``dashes`` go before keys in errors."""
    draft = Draft(given, dashes)
    _intensity(draft, facts)
    scale = _scale(draft, facts)
    window = _window(draft, facts, scale)
    _network(draft, window, scale)
    _augment(draft, facts)
    _length(draft, facts, window, minutes)
    if len(facts.evaluated) > 1 and facts.empty:  # the default has no GED then: classes in neither mask are skipped
        why = f"{percent(facts.empty)} of the masks mark nothing; two such masks agree"
        draft("evaluation.protocol", "phiseg", why)
    return draft.config, draft.reasons


# -- data -------------------------------------------------------------------------------------------------------------


def _intensity(draft: Draft, facts: Facts) -> None:
    key = "data.intensity"
    if facts.recommended:
        draft(key, None, "the data say themselves how values become input")
    elif facts.dtype == "uint8":
        what = "of the 8-bit values" if facts.channels == 1 else "of the 8-bit values, channel by channel"
        draft(key, {"mean": _round(facts.mean), "std": _round(facts.std)}, f"mean and spread {what}")
    elif facts.gain > GAIN and not _hounsfield(facts):
        values = {"low": -1.0, "high": 2.0, "mean": _round(facts.own_mean), "std": _round(facts.own_std)}
        draft(
            key,
            values | {"per_image": True},
            f"each image in its own range: the spread of values differs {facts.gain:.1f}-fold between images",
        )
    else:
        unit = " (Hounsfield units by their look)" if _hounsfield(facts) else ""
        low, high = _round((facts.low, facts.high)) if facts.low < facts.high else (None, None)
        values = {"low": low, "high": high, "mean": _round(facts.mean), "std": _round(facts.std)}
        draft(key, values, f"from the 0.5th to the 99.5th percentile of {facts.dtype} values{unit}")


def _hounsfield(facts: Facts) -> bool:
    return facts.dtype in ("int16", "int32", "float32", "float64") and -1100 <= facts.low <= -700 and facts.high > 0


def _scale(draft: Draft, facts: Facts) -> int:
    """How many times coarser to work: as large images need it, and as what is marked allows."""
    side, thickness = max(facts.median), facts.thickness
    wanted = max(-(-side // WORKING), math.ceil(4 * thickness / WINDOW) if side > WHOLE else 1)
    scale = max(1, min(wanted, int(thickness / FINEST), 8))
    if scale > 1:
        why = f"images of {shape_text(facts.median)}; what is marked stays {thickness / scale:.0f} pixels thick"
    elif wanted > 1:
        why = f"full resolution: what is marked is {thickness:.1f} pixels thick"
    else:
        why = f"full resolution: images of {shape_text(facts.median)}"
    return int(draft("backbone.scale", scale, why))


def _window(draft: Draft, facts: Facts, scale: int) -> tuple[int, int]:
    """Height and width of the training windows, in pixels of the image."""
    working = [length / scale for length in facts.median]
    whole = max(working) <= WHOLE
    sides = [length if whole else min(length, WINDOW) for length in working]
    depth = _levels(min(sides))
    multiple = scale * 2 ** (depth - 1)
    window = [multiple * max(1, math.ceil(side * scale / multiple - 1e-9)) for side in sides]
    size = window[0] if window[0] == window[1] else window
    if whole:
        why = f"whole images: {shape_text(facts.median)}, rounded up to a multiple of {multiple}"
    else:
        share = window[0] * window[1] / (facts.median[0] * facts.median[1])
        why = f"windows that show {percent(min(share, 1))} of an image of {shape_text(facts.median)}"
    chosen = draft("data.size", size, why)
    draft("data.eval_size", None, "whole images are validated and tested")
    if chosen is None:  # as given
        draft("data.focus", 0.0, "whole images")
        return facts.median
    height, width = (chosen, chosen) if isinstance(chosen, int) else chosen
    if 2 * height * width < facts.median[0] * facts.median[1]:
        draft("data.focus", FOCUS, f"of the windows hold a mark: {percent(facts.marked)} of the pixels are marked")
    else:
        draft("data.focus", 0.0, "windows show most of an image")
    return height, width


def _levels(side: float) -> int:
    """Levels of a U-Net whose deepest map is at least 4 pixels wide."""
    return min(max(int(math.log2(max(side, 8) / 4)) + 1, 2), len(WIDTHS))


def _network(draft: Draft, window: tuple[int, int], scale: int) -> None:
    depth = _levels(min(window) / scale)
    deepest = [max(1, length // scale // 2 ** (depth - 1)) for length in window]
    if draft("backbone.name", "unet", "a U-Net") in ("unet", "unet-light"):
        why = f"{depth} levels: the deepest map of a window has {shape_text(deepest)} pixels"
        draft("backbone.channels", list(WIDTHS[:depth]), why)
    draft("backbone.convs", 2, "convolutions per level, for a short training")
    draft("backbone.momentum", 0.1, "batch statistics follow within tens of steps")


def _augment(draft: Draft, facts: Facts) -> None:
    if facts.upright > UPRIGHT:
        draft("data.augment.flip", "horizontal", "images have an up and a down")
        turn, why = 15.0, "degrees: images have an up and a down"
    else:
        draft("data.augment.flip", "both", "images lie in any direction")
        turn, why = 180.0, "degrees: images lie in any direction"
    if draft.content["data"]["size"] is not None:
        draft("data.augment.rotate", turn, why)
        draft("data.augment.scale", [0.8, 1.25], "objects come in somewhat other sizes")
    if not _hounsfield(facts) and not facts.recommended:
        draft("data.augment.brightness", 0.2, "in units of the network's input: exposure differs")
        draft("data.augment.contrast", 0.2, "factor of e^±0.2: exposure differs")


# -- length -----------------------------------------------------------------------------------------------------------


def _length(draft: Draft, facts: Facts, window: tuple[int, int], minutes: float) -> None:
    """Batch, windows, epochs, learning rate and the method's own settings, from the budget."""
    method = method_named(draft.given.model.method)
    _method(draft, method, facts, EPOCHS)
    per_pixel = operations_per_pixel(draft.config, facts.channels, len(facts.classes))
    pixels = window[0] * window[1] / draft.config.backbone.scale**2
    batch = 2 ** round(math.log2(max(BATCH / pixels, 1)))
    batch = min(max(batch, 4), 16, facts.images)
    batch = int(draft("data.batch_size", batch, f"of {shape_text(window)}, {count(facts.images, 'training image')}"))
    step = seconds(per_pixel * batch * window[0] * window[1])
    validation = validation_seconds(per_pixel, facts)
    budget = 60 * minutes
    # At least three validations, whatever they cost; the rest of their share as far as there are epochs.
    steps = max(int((budget - max(VALIDATED * budget, 3 * validation)) / step), 1)
    steps = max(steps, int(budget / step / 2))
    given = draft.given.trainer.epochs if "epochs" in draft.content.get("trainer", {}) else None
    fraction = _fraction(draft, facts, steps * batch, batch, given)
    images = max(1, round(facts.images * fraction))
    windows = min(max(1, int(steps * batch / (EPOCHS * images))), WINDOWS)
    windows = int(draft("data.windows", windows, f"per image and epoch: an epoch of about {windows * images} windows"))
    per_epoch = steps_per_epoch(images, batch, windows)
    epochs = max(steps // per_epoch, min(LEAST_EPOCHS, steps))
    most = max(3, int(VALIDATED * budget / max(validation, 1e-9)))
    every = min(max(1, math.ceil((given or epochs) / most)), LONGEST)
    epochs = min(max(every, epochs // every * every), LONGEST // every * every)
    total = epochs * per_epoch
    spent = total * step + epochs // every * validation
    why = f"of {count(per_epoch, 'step')}, {total:,} in all: about {spent / 60:.1f} minutes of one core"
    epochs = int(draft("trainer.epochs", epochs, why))
    takes = count(max(1, round(validation / step)), "step")
    draft("trainer.check_every", every, f"epochs: a validation takes as long as {takes}")
    pixels = facts.largest[0] * facts.largest[1]
    at_once = min(max((1 << 18) // pixels, 1), 32)
    draft("data.eval_batch_size", at_once, "whole images at a time, by their size")
    _optimizer(draft, per_epoch * epochs)
    _method(draft, method, facts, epochs)


def _fraction(draft: Draft, facts: Facts, affordable: int, batch: int, epochs: int | None) -> float:
    """The part of a large training set that a few epochs within the budget can see."""
    kept = max(affordable // LEAST_EPOCHS, batch)
    if facts.images <= kept or epochs is not None:
        return float(draft("data.fraction", 1.0, "all training images"))
    share = float(f"{kept / facts.images:.2g}")
    return float(draft("data.fraction", share, f"of {facts.images:,} images: so many can be seen {LEAST_EPOCHS} times"))


def _optimizer(draft: Draft, steps: int) -> None:
    draft("optimizer.lr", 0.002, "Adam, on a small network")
    draft("optimizer.decay", "cosine", "to min_lr at the last step")
    draft("optimizer.warm_up", min(steps // 20, 100), f"steps, of {steps:,}")
    memory = round(min(0.995, 1 - 10 / max(steps, 20)), 4)
    draft("optimizer.average", memory, f"weights are averaged over some {1 / (1 - memory):.0f} steps")


def _method(draft: Draft, method: Any, facts: Facts, epochs: int) -> None:
    for name, choice in method.Config.planned(facts, epochs).items():
        key = f"model.{name}"
        if key in draft.reasons and draft.reasons[key] != "as given":  # a second time, with the epochs known
            draft.content["model"][name], draft.reasons[key] = choice
        else:
            draft(key, choice.value, choice.reason)


def _round(values: tuple[float, ...]) -> Any:
    """Four digits are enough; one number for one channel."""
    rounded = [float(f"{value:.4g}") for value in values]
    return rounded[0] if len(rounded) == 1 else rounded
