"""Parts of the report: which cases, which annotations, which curves."""

from __future__ import annotations

from typing import Any

import torch

from ambiseg import MaskDistribution
from ambiseg.evaluation.results import CaseScores
from ambiseg.reporting import curves
from ambiseg.reporting.gallery import choose_cases, distinct_annotations

# -- parts ------------------------------------------------------------------------------------------------------------


def test_cases_are_chosen_by_their_scores():
    def scored(name: str, ged: float | None, diversity: float | None) -> CaseScores:
        scores = {"k": {"ged": ged}, "other": {"ged": None if ged is None else -ged}, "none": {"ged": None}}
        about: dict[str, Any] = {"name": name, "patient": name, "readers": 1, "readers_total": 4, "empty_share": 0}
        return CaseScores(**about, strata_weights=None, annotations={"diversity": diversity}, scores=scores)

    distances = zip("fedcba", (0.5, 0.1, 0.1, 0.9, 0.3, None), (0.0, 0.1, 0.2, None, 0.2, 0.9), strict=True)
    cases = [scored(*values) for values in distances]
    assert choose_cases(cases, "k", 3) == {
        "ambiguous": ["a", "b", "d"],  # no score is needed for that
        "best": ["d", "e", "b"],  # a tie goes by name
        "median": ["e", "b", "f"],
        "worst": ["c", "f", "b"],
    }
    assert choose_cases(cases, "k", 99)["median"] == ["d", "e", "b", "f", "c"]
    assert choose_cases(cases, "none", 3) == {"ambiguous": ["a", "b", "d"], "best": [], "median": [], "worst": []}


def test_annotations_that_are_the_same_are_one():
    a, b = torch.zeros(2, 2, dtype=torch.uint8), torch.tensor([[1, 0], [0, 0]], dtype=torch.uint8)
    elsewhere = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)  # b, but for a void pixel
    labels = torch.stack([a, b, a, elsewhere, b])[None]
    valid = torch.tensor([[[True, True], [True, False]]])
    found = distinct_annotations(MaskDistribution(labels, torch.tensor([[0.2, 0.3, 0.2, 0.3, 0.0]]), valid))
    assert [(round(one.weight, 3), one.readers, int(one.labels.sum())) for one in found] == [(0.6, 2, 1), (0.4, 2, 0)]


def test_the_best_epoch_is_the_first_of_the_smallest():
    history = [{"epoch": 1.0}, {"epoch": 2.0, "val_ged": 0.2}, {"epoch": 3.0, "val_ged": 0.2}, {"epoch": 4.0}]
    assert curves.best_epoch(history) == 2
    assert curves.best_epoch([{"epoch": 1.0}]) is None
    assert curves.best_by(history) == "GED"
    assert (
        curves.best_by([{"epoch": 1.0, "val_ged": 0.2, "val_ged_unbiased": 0.1, "val_masks": 16.0}]) == "unbiased GED"
    )
