"""Records: how well single masks and measurements that are made of the predicted masks fit those of the readers."""

from __future__ import annotations

from ambiseg._util.records import Record
from ambiseg.evaluation.records import Mean

OVERLAPS = ("dice", "iou")
SURFACES = ("hd95", "assd")
READER = "reader"
"""The row of one reader, whose mask is compared with those of the others."""


class ConsensusScores(Record):
    """One mask of each image.

    Attributes:
        how: the rule that made it of the predicted masks; or ``reader``.
        expected: ``dice`` and ``iou`` with a mask of the prediction, as the prediction itself expects; empty for
            ``reader``.
        readers: ``dice``, ``iou`` and, where they were computed, ``hd95`` and ``assd`` with each reader's mask.
        majority: the same with the readers' majority; empty for ``reader``.
    """

    how: str
    expected: dict[str, Mean]
    readers: dict[str, Mean]
    majority: dict[str, Mean]


class Coverage(Record):
    """How many of the readers' values are in the central interval of the prediction, and how wide it is."""

    level: float
    covered: Mean
    width: Mean


class MeasureScores(Record):
    """One measurement of one class.

    Attributes:
        of, what, unit: id of the class, which measurement, and its unit; empty for counts.
        predicted, readers: mean of the distribution, averaged over images.
        crps: of the prediction against the readers; of one reader predicted by the others.
        pit: share of the readers in each tenth of the predicted distribution, 0.1 each for a calibrated one.
        coverage: of central intervals.
    """

    of: int
    what: str
    unit: str
    predicted: Mean
    readers: Mean
    crps: Mean
    crps_of_readers: Mean
    pit: list[float]
    coverage: list[Coverage]

    def at(self, level: float) -> Coverage | None:
        """The interval of this level."""
        return next((one for one in self.coverage if abs(one.level - level) < 1e-9), None)


class Decided(Record):
    """Everything that is made of the masks of one setting.

    Attributes:
        setting: its key.
        spacing: of the pixels in mm, down and across; ``None``: lengths are in pixels.
        consensus: of each rule, and of one reader.
        measures: of each evaluated class.
    """

    setting: str
    spacing: list[float] | None
    consensus: list[ConsensusScores]
    measures: list[MeasureScores]

    @property
    def length(self) -> str:
        """The unit of distances."""
        return "pixels" if self.spacing is None else "mm"
