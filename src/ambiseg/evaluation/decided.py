"""Records: how well single masks and measurements that are made of the predicted masks fit those of the readers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

Number: TypeAlias = Annotated[float | None, BeforeValidator(lambda value: None if value != value else value)]

OVERLAPS = ("dice", "iou")
SURFACES = ("hd95", "assd")
READER = "reader"
"""The row of one reader, whose mask is compared with those of the others."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Span(_Record):
    """A mean over images with its 95 % interval over patients, and how many images have a value."""

    mean: Number
    low: Number
    high: Number
    count: int

    @property
    def text(self) -> str:
        """``0.812 [0.790, 0.833]``"""
        if self.mean is None:
            return "–"
        mean = f"{self.mean:.4g}" if abs(self.mean) >= 1000 else f"{self.mean:.3f}"
        return mean if self.low is None or self.high is None else f"{mean} [{self.low:.3f}, {self.high:.3f}]"


class ConsensusScores(_Record):
    """One mask of each image.

    Attributes:
        how: the rule that made it of the predicted masks; or ``reader``.
        expected: ``dice`` and ``iou`` with a mask of the prediction, as the prediction itself expects; empty for
            ``reader``.
        readers: ``dice``, ``iou`` and, where they were computed, ``hd95`` and ``assd`` with each reader's mask.
        majority: the same with the readers' majority; empty for ``reader``.
    """

    how: str
    expected: dict[str, Span]
    readers: dict[str, Span]
    majority: dict[str, Span]


class Coverage(_Record):
    """How many of the readers' values are in the central interval of the prediction, and how wide it is."""

    level: float
    covered: Span
    width: Span


class MeasureScores(_Record):
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
    predicted: Span
    readers: Span
    crps: Span
    crps_of_readers: Span
    pit: list[float]
    coverage: list[Coverage]

    def at(self, level: float) -> Coverage | None:
        """The interval of this level."""
        return next((one for one in self.coverage if abs(one.level - level) < 1e-9), None)


class Decided(_Record):
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
