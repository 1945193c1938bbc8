"""Record: in what order a person should look at images, by how much two masks are expected to differ."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ambiseg._util.records import Number, Record
from ambiseg.evaluation.records import Interval

ScoreKey: TypeAlias = Literal["pairs", "areas"]
LossKey: TypeAlias = Literal["readers", "ged"]

SCORES: dict[ScoreKey, str] = {
    "pairs": "expected disagreement of two masks, E[1 − IoU]",
    "areas": "1 − expected shared area / expected joint area of two masks",
}
LOSSES: dict[LossKey, str] = {
    "readers": "how much the {annotator}s really disagreed, E[1 − IoU]",
    "ged": "what the masks get wrong, GED",
}


class RiskCurve(Record):
    """Mean loss of the images left to the model, by their share: in the order of the score, and of the loss itself."""

    coverage: list[float]
    risk: list[float]
    oracle: list[float]


class Selection(Record):
    """What one order of the images is worth against one loss; see :class:`ambiseg.decisions.looking.Selective`."""

    score: ScoreKey
    loss: LossKey
    images: int
    aurc: Interval
    excess: Interval
    random: Number
    oracle: Number
    gain: Number
    curve: RiskCurve


class Looking(Record):
    """Both scores of all images against both losses.

    Attributes:
        setting: the key of the setting whose masks were scored.
        score: the one that is shown: ``pairs``, or ``areas`` for methods whose masks of an image are all the same.
        selections: of each score and loss.
        values: that score of each image, in the order of the cases.
    """

    setting: str
    score: ScoreKey
    selections: list[Selection]
    values: list[Number]

    def selection(self, loss: LossKey, score: ScoreKey | None = None) -> Selection | None:
        """One of them; of the score that is shown unless another is asked for."""
        wanted = self.score if score is None else score, loss
        return next((one for one in self.selections if (one.score, one.loss) == wanted), None)

    @property
    def shown(self) -> list[Selection]:
        """Those of the score that is shown."""
        return [one for one in self.selections if one.score == self.score]
