"""The words and numbers of the page: what each metric is called, what it means, and how it is written."""

from __future__ import annotations

from typing import NamedTuple

from ambiseg.evaluation.records import Interval
from ambiseg.evaluation.results import Evaluation, SettingScores
from ambiseg.viz.page import number, share


class Metric(NamedTuple):
    """How a metric is written and explained. ``{annotator}`` stands for the data's word, such as reader."""

    label: str
    meaning: str  # in one line, beside the number
    better: str
    digits: int | None  # None: as per cent

    def worded(self, **words: str) -> Metric:
        """The same in the words of the data."""
        return self._replace(meaning=self.meaning.format(**words), better=self.better.format(**words))

    def value(self, value: float | None) -> str:
        """One number."""
        return share(value) if self.digits is None else number(value, self.digits)

    def interval(self, score: Interval, missing: str = "") -> str:
        """Its bounds, or ``missing`` where there are none."""
        if score.low is None or score.high is None:
            return missing
        return f"{self.value(score.low)} to {self.value(score.high)}"


METRICS = {
    "ged": Metric("GED", "distance between the masks of the model and those of the {annotator}s", "less is better", 3),
    "ged_unbiased": Metric(
        "GED, unbiased in the masks", "the same without comparing a mask of the model with itself", "less is better", 3
    ),
    "ged_unbiased_both": Metric(
        "GED, unbiased in both",
        "nor a {annotator} with itself: 0 on average for a perfect model, however few {annotator}s; may be below 0",
        "less is better",
        3,
    ),
    "matched_iou": Metric(
        "matched IoU",
        "overlap of masks and {annotator}s when each is paired with what fits it best: 1 is the same, 0 is none",
        "more is better",
        3,
    ),
    "diversity": Metric(
        "diversity", "how much two masks of the model differ, 1 − IoU on average", "as for the {annotator}s is best", 3
    ),
    "entropy": Metric("entropy", "how uncertain a pixel is, mean of all pixels in nats", "", 4),
    "ece": Metric(
        "ECE",
        "calibration: how far predicted probabilities of pixels are from the share of {annotator}s who marked them",
        "less is better",
        None,
    ),
}

_SHOWN = 3  # class names in a sentence


def purpose(evaluation: Evaluation) -> str:
    """What the model does, in one sentence for somebody who has not heard of any of it."""
    names = [evaluation.classes[i] for i in evaluation.evaluated if i < len(evaluation.classes)]
    if evaluation.modes is not None or not 0 < len(names) <= _SHOWN:
        return "From one image, this model predicts every way in which it may be labelled, and how likely each is."
    return (
        f"From one image, this model predicts the outlines that different {evaluation.annotator}s may draw "
        f"({', '.join(names)}), and how likely each is."
    )


class Standing(NamedTuple):
    """A row of the scale: a model or something that it is compared with, and where it stands in per cent."""

    title: str
    explanation: str
    value: str
    place: float
    span: tuple[float, float] | None  # of its interval
    model: bool


def standings(evaluation: Evaluation, headline: SettingScores) -> tuple[list[Standing], float]:
    """The model among its anchors, the smallest GED first, and the end of the scale. Without anchors: nothing."""
    anchors = {one.key: one for one in evaluation.anchors if one.samples in (None, headline.samples)}
    rows = [(one.title, one.explanation, one.ged, False) for one in anchors.values() if one.ged.mean is not None]
    own, ged = headline.metrics["ged"], METRICS["ged"]
    if not rows or own.mean is None:
        return [], 0.0
    bounds = ged.interval(own)
    masks = f"{headline.samples} masks per image" if headline.samples > 1 else "1 mask per image"
    about = f"{masks}; 95 % interval {bounds}." if bounds else f"{masks}."
    rows.append(("this model", about, own, True))
    rows.sort(key=lambda row: (row[2].mean, not row[3]))
    end = 1.04 * max(max(score.mean or 0, score.high or 0 if model else 0) for _, _, score, model in rows) or 1.0

    def place(value: float) -> float:
        return 100 * min(max(value / end, 0), 1)

    return [
        Standing(
            title,
            text,
            ged.value(score.mean),
            place(score.mean or 0),
            (place(score.low), place(score.high)) if score.low is not None and score.high is not None else None,
            model,
        )
        for title, text, score, model in rows
    ], end
