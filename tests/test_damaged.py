"""Files that we wrote, damaged: they are read, or refused in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.data.splits import Split
from ambiseg.evaluation.files import evaluate_files
from ambiseg.evaluation.results import Evaluation
from ambiseg.masks import MaskDistribution
from tests.cases import random_cases
from tests.mutations import survives
from tests.test_evaluation_faults import OLD

COUNT = 120


def test_a_split(tmp_path):
    cases, path = random_cases(30, patients=15), tmp_path / "split.json"
    Split.by_hash(cases, {"train": 0.5, "val": 0.2, "test": 0.3}, seed=3).save(path)

    def read() -> None:
        split = Split.load(path)
        for part in split.parts:
            split.indices(cases, part)
        split.verify(cases)
        split.save(tmp_path / "again.json")
        assert Split.load(tmp_path / "again.json") == split

    assert survives(path, read, COUNT) > COUNT // 3
    read()


def test_an_evaluation(tmp_path):
    path, old = tmp_path / "evaluation-test.json", tmp_path / "old.json"
    old.write_text(OLD)
    Evaluation.load(old).save(path)

    def read() -> None:
        found = Evaluation.load(path)
        found.save(tmp_path / "again.json")
        _ = found.forms, found.flipped, found.headline(16), str(found.folds), found.strata and found.strata.intervals

    assert survives(path, read, COUNT) > COUNT // 3
    assert survives(old, lambda: Evaluation.load(old), COUNT) > COUNT // 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": 9}, "cases: expected 9 as images says, found"),
        ({"evaluated": [7]}, "evaluated: expected class ids below"),
        ({"folds": {"count": 2, "folds": [3], "runs": ["a"]}}, "folds: expected some of 2 folds"),
        ({"folds": {"count": 2, "folds": [], "runs": []}}, "folds: expected some of 2 folds"),
    ],
)
def test_parts_of_an_evaluation_fit_each_other(tmp_path, change, message):
    (tmp_path / "old.json").write_text(OLD)
    Evaluation.load(tmp_path / "old.json").save(tmp_path / "e.json")
    content = json.loads((tmp_path / "e.json").read_text())
    (tmp_path / "e.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(DataError, match=message):
        Evaluation.load(tmp_path / "e.json")


def test_masks(tmp_path):
    path = tmp_path / "masks.npz"
    labels = torch.randint(0, 3, (1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    MaskDistribution(labels, torch.full((1, 4), 0.25), labels[:, 0] > 0).save(path)
    assert survives(path, lambda: MaskDistribution.load(path), COUNT) > COUNT // 2
    np.savez(path, format="ambiseg.MaskDistribution/1", labels=np.array([{}], object))
    with pytest.raises(DataError, match="cannot be read as a MaskDistribution"):
        MaskDistribution.load(path)


def test_weights_of_predictions(tmp_path):
    for folder, value in [("truth/Ann", 255), ("truth/Bob", 0), ("mine/a", 255)]:
        (tmp_path / folder).mkdir(parents=True)
        name = "a.png" if "truth" in folder else "s1.png"
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(tmp_path / folder / name)
    path = tmp_path / "mine/a/weights.json"
    content = {"format": "ambiseg.Prediction/2", "slices": 2, "masks": [{"file": "s1.png", "weight": 1.0}]}
    path.write_text(json.dumps(content))
    read = lambda: evaluate_files(tmp_path / "mine", tmp_path / "truth", quiet=True)  # noqa: E731
    assert survives(path, read, 40) > 10
    content["masks"] = [{"file": "../../truth/Ann/a.png", "weight": 1.0}]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"masks\.0\.file: expected"):
        read()
