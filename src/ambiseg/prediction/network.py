"""A model as new images meet it: how they are read and prepared, and what is odd about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.text import shape_text
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.methods.base import Stratified
from ambiseg.methods.symmetries import symmetric
from ambiseg.prediction.inputs import read_pixels, with_extra
from ambiseg.prediction.looking import Lookout
from ambiseg.prediction.result import Options
from ambiseg.runs import Run, TrainedModel

_LARGER = 1.1  # sides by which an image may exceed those that the model was validated on


class Network:
    """A trained model and the options of its images.

    Args:
        model: with its card.
        options: which must fit the model.
        run: that the model is from, if it is from one.
    """

    def __init__(self, model: TrainedModel, options: Options, run: Run | None) -> None:
        self.options = options
        self.method = symmetric(model.method, options.symmetries)
        self.card, self.which, self.device = model.card, model.which, model.device
        self.lookout = Lookout(model, run)
        if options.per_stratum is not None and not self.method.stratum:
            message = f"expected None for {type(self.method).__name__}, which has no strata"
            raise ConfigError(f"per_stratum: {message}, found {options.per_stratum}; set samples instead")
        if options.extra is not None and self.card.extra is None:
            raise ConfigError("extra: expected None for a model that takes no further channels, found a folder")
        if options.assume_window is not None and self.card.extra is not None:
            raise ConfigError("assume_window: expected None for a model with further channels, found a window")
        # Slices are cut as in training: along another axis they look different.
        reading = self.card.reading
        axis = next((axis for axis in (options.axis, reading.axis) if axis is not None), 2)
        self.reading = ReadOptions(axes=options.axes or reading.axes, axis=axis)
        self.convert = options.convert or reading.convert

    def open(self, path: Path) -> Source:
        """A file's image, with the channels that the model needs beside it."""
        source, extra, card = open_source(path, self.reading), self.card.extra, self.card
        if extra is None or source.channels == card.channels:
            return source
        if self.options.extra is None:
            own = card.channels - extra.classes
            needs = f"{own} of the image and {extra.classes} of another model's prediction, whose folder extra names"
            raise DataError(f"{source.path}: expected {card.channels} channels, {needs}, found {source.channels}")
        return with_extra(source, Path(self.options.extra), extra)

    def prepared(self, source: Source, k: int) -> tuple[Tensor, np.ndarray]:
        """The network's input for a slice, ``[1, C, H, W]``, and its pixels ``[C, H, W]`` in the units of the data."""
        if self.card.channels == 0:  # of a bare method, which takes what it is given
            self.card = replace(self.card, channels=source.channels)
        raw = read_pixels(source, k, self.card.channels, self.convert, self.options.assume_window)
        return self.card.prepare(raw.to(self.device)), raw[0].numpy()

    def strata(self, channels: int) -> int:
        """K, which is known when something is predicted, however small; 0 for methods without strata."""
        if not self.method.stratum:
            return 0
        side = max(2, self.method.multiple)
        predictive = self.method.predict(torch.zeros(1, channels, side, side, device=self.device))
        return predictive.weights.shape[1] if isinstance(predictive, Stratified) else 0

    def notes(self, source: Source, slices: Sequence[np.ndarray]) -> tuple[str, ...]:
        """What is odd about an image for this model: values far from those it was trained on, and its size.

        Args:
            slices: its pixels ``[C, H, W]``, as the model takes them.
        """
        card, found = self.card, []
        if card.values is None and _is_blank(card.intensity(torch.from_numpy(np.stack(slices)))):
            found.append("its values become one number under the model's intensity: it is blank, or in other units")
        if card.values is not None and (odd := card.values.problem(*slices)):
            units = f" ({card.units})" if card.units else ""
            note = f"{odd}{units}; its masks may mean nothing"
            if source.dtype in (np.uint8, np.uint16) and self.options.assume_window is None and "all" not in odd:
                note += "; if it is a picture for the screen, give its window: --assume-window LOW HIGH"
            found.append(note)
        if card.size is not None and math.prod(source.size) > _LARGER**2 * math.prod(card.size):
            size = f"it is {shape_text(source.size)}, and the largest image that the model was validated on"
            found.append(f"{size} {shape_text(card.size)}; masks and their weights may be worse than on such images")
        return tuple(found)


def _is_blank(images: Tensor) -> bool:
    """Whether the middle 98 % of the network's input, whose values span a few units, lie within 0.02."""
    low, high = np.percentile(images.numpy(), (1, 99))
    return bool(high - low < 0.02)
