"""What follows from the masks of a prediction, each computed once: files, page and viewer ask for the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ambiseg._util.bands import counted
from ambiseg.decisions.compaction import compact
from ambiseg.decisions.consensus import Consensus, consensus_each
from ambiseg.decisions.measure import MEASURES, Measurement, measure_all
from ambiseg.masks import MaskDistribution

CHEAP = ("presence", "size")  # measures that are made of counts


class Decisions:
    """Single masks, measurements and fewer masks of one image or volume.

    Args:
        masks: of one image, without void pixels.
        classes: how many, with the background.
        spacing: of the pixels in mm.

    >>> found = Decisions(MaskDistribution(torch.tensor([[[[0, 1]], [[1, 1]]]])), 2)
    >>> found.consensus(["union"])["union"].labels.tolist(), [one.mean.item() for one in found.measures(["size"])]
    ([[[1, 1]]], [1.5])
    """

    def __init__(self, masks: MaskDistribution, classes: int, spacing: tuple[float, ...] | None = None) -> None:
        self.masks, self.classes, self.spacing = masks, classes, spacing
        self._consensus: dict[str, Consensus] = {}
        self._measures: dict[tuple[int, str], Measurement] = {}
        self._fewer: dict[int, MaskDistribution] = {}

    def consensus(self, rules: Sequence[str]) -> dict[str, Consensus]:
        """One mask by each rule."""
        missing = [rule for rule in rules if rule not in self._consensus]
        if missing:
            self._consensus |= consensus_each(self.masks, missing, classes=[*range(1, self.classes)] or [0])
        return {rule: self._consensus[rule] for rule in rules}

    def measures(self, what: Sequence[str] = tuple(MEASURES)) -> list[Measurement]:
        """Measures of all classes but the background, class by class."""
        asked = [(of, name) for of in range(1, self.classes) for name in what]
        missing = {name for of, name in asked if (of, name) not in self._measures}
        found = self._counts() if missing & {*CHEAP} else []
        if missing - {*CHEAP}:
            others = [name for name in MEASURES if name not in CHEAP]  # all of them take as long as one
            found += measure_all(self.masks, range(1, self.classes), self.spacing, others)
        self._measures |= {(one.of, one.what): one for one in found}
        return [self._measures[key] for key in asked]

    def fewer(self, count: int) -> MaskDistribution:
        """At most so many masks that stand for all."""
        if count not in self._fewer:
            few = self.masks.count <= count
            self._fewer[count] = self.masks if few else compact(self.masks, count).masks
        return self._fewer[count]

    def _counts(self) -> list[Measurement]:
        labels = self.masks.labels[0].numpy()  # of which nothing is copied: a volume may fill the memory
        pixels = np.stack([counted(mask, self.classes) for mask in labels], 1)
        ndim, weights = labels.ndim - 1, self.masks.mass
        unit = MEASURES["size"].unit(ndim, self.spacing)
        each = 1.0 if self.spacing is None else float(np.prod(self.spacing)) / (1000 if ndim == 3 else 1)
        found = []
        for of in range(1, self.classes):
            values = torch.from_numpy(pixels[of, None].astype(np.float64))
            found.append(Measurement("presence", of, "", (values > 0).double(), weights))
            found.append(Measurement("size", of, unit, values * each, weights))
        return found
