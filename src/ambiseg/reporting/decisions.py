"""The words of the section on single masks and measurements."""

from __future__ import annotations

from ambiseg.decisions.measure import MEASURES
from ambiseg.evaluation.decided import READER
from ambiseg.evaluation.results import Evaluation

_RULES = {
    "marginal": ("most probable class", "of each pixel, by the soft probabilities"),
    "majority": ("majority", "the class of each pixel that most masks have"),
    "union": ("union", "whatever any mask marks"),
    "intersection": ("intersection", "what all masks mark"),
    "iou": ("best IoU", "the mask that is expected to overlap most, by IoU"),
    "dice": ("best Dice", "the same by Dice"),
    "staple": ("STAPLE", "masks weighted by how good each seems to be"),
    READER: ("a single {annotator}", "compared with the other {annotator}s of the image"),
}


def rules(annotator: str) -> dict[str, tuple[str, str]]:
    """What each rule is called, and what it does."""
    return {key: (a.format(annotator=annotator), b.format(annotator=annotator)) for key, (a, b) in _RULES.items()}


def measures() -> dict[str, str]:
    """What each measurement is called: of images, which evaluations are of."""
    return {name: "area" if name == "size" else one.title for name, one in MEASURES.items()}


def sentence(evaluation: Evaluation) -> str:
    """The result in plain words."""
    decided, who = evaluation.decided, evaluation.annotator
    if decided is None:
        return ""
    made = [one for one in decided.consensus if one.how != READER and one.readers["dice"].mean is not None]
    if not made:
        return f"No mask could be compared with a {who}'s."
    best = max(made, key=lambda one: one.expected["dice"].mean or 0)
    alone = next((one.readers["dice"].mean for one in decided.consensus if one.how == READER), None)
    title = _RULES[best.how][0]
    text = f"Where one mask is needed, the rule that the prediction expects most of ({title}) overlaps with "
    text += f"a {who}'s mask by a Dice of {best.readers['dice'].mean:.3f}; it expected {best.expected['dice'].mean:.3f}"
    text += f", and two {who}s overlap by {alone:.3f}." if alone is not None else "."
    size = next((one for one in decided.measures if one.what == "size"), None)
    at = None if size is None else size.at(0.9)
    if at is not None and at.covered.mean is not None and len(evaluation.evaluated) == 1:
        text += f" The 90 % interval of the area holds {100 * at.covered.mean:.0f} % of the {who}s' areas."
    return text
