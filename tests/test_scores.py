"""An evaluation as text, and what its numbers rest on: nothing that was not measured is shown as a number."""

from __future__ import annotations

import re

import pytest
import torch
from rich.console import Console

from ambiseg.cli.scores import show
from ambiseg.evaluation import evaluate
from ambiseg.evaluation.records import Interval
from tests.test_evaluation import scored_case, summary


def test_calibration_of_empty_masks_by_predicted_weight():
    """Two of five, none of five and all of five masks are empty; readers who drew nothing are 1, 0 and 2 of 3."""
    empty, full = torch.zeros(4, 4, dtype=torch.long), torch.ones(4, 4, dtype=torch.long)
    drawn = [(2, 1), (0, 0), (5, 2), (5, 3)]
    scored = [
        scored_case(
            torch.stack([empty] * p + [full] * (5 - p)), torch.stack([empty] * r + [full] * (3 - r)), str(i), str(i)
        )
        for i, (p, r) in enumerate(drawn)
    ]
    bins = summary(scored).settings[0].empty.calibration
    assert [(one.low, one.high, one.images) for one in bins] == [
        (0.0, 0.2, 1), (pytest.approx(0.2), pytest.approx(0.4), 1), (0.8, 1.0, 2)
    ]  # fmt: skip
    assert [one.predicted for one in bins] == pytest.approx([0, 0.4, 1])
    assert [one.readers for one in bins] == pytest.approx([0, 1 / 3, 5 / 6])
    nobody = summary([scored_case(torch.stack([full]), torch.stack([full]), "a", "a")])
    assert nobody.settings[0].empty.calibration == []  # there is nothing to compare


def test_nothing_measured_is_no_number():
    """No pixel is predicted as the class: ECE has no value, in the table too, and it is said why."""
    nothing = torch.zeros(5, 4, 4, dtype=torch.long)
    found = summary([scored_case(nothing, torch.ones(3, 4, 4, dtype=torch.long), str(i), str(i)) for i in range(3)])
    setting = found.settings[0]
    assert (setting.ece, setting.ece_share) == (Interval(mean=None, low=None, high=None), 0)
    assert found.cases[0].scores["files-5"]["ece"] is None
    console = Console(width=100, record=True)
    show(found, console)
    text = console.export_text()
    assert "no ECE: no pixel is predicted as an evaluated class" in text
    assert re.search(r"^ECE +– *$", text, re.MULTILINE)
    assert "worse than one constant mask" not in text  # there is no training part, and no such anchor
    assert "this prediction" in text
    half = torch.zeros(5, 4, 4, dtype=torch.long)
    half[:, :2] = 1
    setting = summary([scored_case(half, half, "a", "a")]).settings[0]
    assert (setting.ece.mean, setting.ece_share) == (0, 0.5)


def test_words_of_the_data_are_used(tiny_run):
    found = evaluate(tiny_run, samples=(4,), accelerator="cpu", quiet=True)
    assert (found.unit, found.annotator) == ("patient", "reader")
    street = found.model_copy(update={"unit": "sequence", "annotator": "mode", "verdict": "", "anchors": []})
    console = Console(width=100, record=True)
    show(street, console)
    text = console.export_text()
    assert f"of {found.patients} sequences" in text
    assert "patient" not in text
    assert "reader" not in text
