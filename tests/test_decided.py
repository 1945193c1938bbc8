"""Single masks and measurements in predictions and evaluations: files, numbers, words."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import ambiseg
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.decisions.consensus import CONSENSUS
from ambiseg.evaluation import Evaluation, evaluate_files
from ambiseg.evaluation.deciding import DecisionRules, decide, decision_rules
from ambiseg.masks import MaskDistribution
from tests import reference


@pytest.fixture(scope="module")
def stacks():
    """Two images, 5 weighted masks and 3 readers, with void pixels; blobs that grow."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:12, :14]

    def blobs(count):
        radius = rng.uniform(0.5, 5, (2, count, 1, 1))
        return ((y - 6 - rng.integers(-1, 2, (2, count, 1, 1))) ** 2 + (x - 7) ** 2 <= radius**2).astype(np.int64)

    weights = rng.dirichlet(np.ones(5), 2)
    valid = torch.from_numpy(rng.random((2, 12, 14)) < 0.95)
    masks = MaskDistribution(torch.from_numpy(blobs(5)), torch.from_numpy(weights), valid)
    return masks, MaskDistribution(torch.from_numpy(blobs(3)))


def test_scores_of_a_rule_are_those_of_its_mask(stacks):
    masks, readers = stacks
    cases = decide(masks, readers, (1,), DecisionRules(), "files-5")
    assert cases is not None
    for b, case in enumerate(cases):
        valid = masks.valid[b].numpy()
        for how in ("union", "dice"):
            mask = ambiseg.consensus(masks[b], how, classes=(1,)).labels[0].numpy()
            iou = [reference.iou(mask, one.numpy(), (1,), "agree", valid) for one in readers.labels[b]]
            assert case.consensus[how]["readers iou"] == pytest.approx(np.mean(iou))
            assert case.consensus[how]["readers dice"] == pytest.approx(np.mean([2 * v / (1 + v) for v in iou]))
            majority = (readers.labels[b].sum(0) >= 2).numpy().astype(int)
            assert case.consensus[how]["majority iou"] == pytest.approx(
                reference.iou(mask, majority, (1,), "agree", valid)
            )
        own = [
            reference.iou(readers.labels[b, i].numpy(), readers.labels[b, j].numpy(), (1,), "agree", valid)
            for i in range(3)
            for j in range(3)
            if i != j
        ]
        assert case.consensus["reader"]["readers iou"] == pytest.approx(np.mean(own))
        areas = (readers.labels[b].numpy() * valid).sum((1, 2))
        assert case.measures[1, "size"]["readers"] == pytest.approx(areas.mean())
        predicted = (masks.labels[b].numpy() * valid).sum((1, 2))
        assert case.measures[1, "size"]["predicted"] == pytest.approx((predicted * masks.mass[b].numpy()).sum())


def edge(mask):
    """Pixels of the mask that touch its outside by a side."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.argwhere(mask & ~inner)


def test_distances_of_outlines_are_in_millimetres(stacks):
    pytest.importorskip("monai")
    masks, readers = stacks
    step = np.array([0.5, 2.0])
    [case, _] = decide(masks, readers, (1,), DecisionRules(("union",), True, tuple(step)), "files-5") or []
    mask = ambiseg.consensus(masks[0], "union", classes=(1,)).labels[0].numpy().astype(bool)
    hd95, assd = [], []
    for one in readers.labels[0].numpy().astype(bool):
        a, b = edge(mask) * step, edge(one & masks.valid[0].numpy()) * step
        apart = np.linalg.norm(a[:, None] - b, axis=2)
        there, back = apart.min(1), apart.min(0)
        hd95.append(max(np.quantile(there, 0.95), np.quantile(back, 0.95)))
        assd.append(np.concatenate([there, back]).mean())
    assert case.consensus["union"]["readers hd95"] == pytest.approx(np.mean(hd95), rel=1e-4)
    assert case.consensus["union"]["readers assd"] == pytest.approx(np.mean(assd), rel=1e-4)


def test_a_mask_without_an_outline_has_no_distance(stacks):
    pytest.importorskip("monai")
    nothing = MaskDistribution(torch.zeros(2, 2, 12, 14, dtype=torch.long))
    [case, _] = decide(nothing, stacks[1], (1,), DecisionRules(("union",), True), "files-2") or []
    assert math.isnan(case.consensus["union"]["readers hd95"])
    assert case.consensus["union"]["readers dice"] == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("decided")
    rng = np.random.default_rng(1)
    y, x = np.mgrid[:16, :16]
    for case in "abc":
        for kind, names in (("truth", ("Ann", "Bob", "Cem")), ("mine", "1234")):
            for name in names:
                mask = (y - 8) ** 2 + (x - 8) ** 2 <= rng.uniform(1, 6) ** 2
                path = place / kind / name / f"{case}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((255 * mask).astype(np.uint8)).save(path)
    return place


def test_files_are_evaluated_and_the_record_is_read_again(folders, tmp_path):
    found = evaluate_files(folders / "mine", folders / "truth", quiet=True, spacing=[0.5])
    decided = found.decided
    assert decided is not None
    assert (decided.setting, decided.spacing, decided.length) == ("files-4", [0.5, 0.5], "mm")
    assert [one.how for one in decided.consensus] == [name for name in CONSENSUS if name != "staple"] + ["reader"]
    by = {one.how: one for one in decided.consensus}
    expected = [one.expected["dice"].mean or 0 for one in decided.consensus[:-1]]
    assert by["dice"].expected["dice"].mean == pytest.approx(max(expected))
    size = next(one for one in decided.measures if one.what == "size")
    assert size.unit == "mm²"
    assert sum(size.pit) == pytest.approx(1)
    found.save(tmp_path / "scores.json")
    assert Evaluation.load(tmp_path / "scores.json").decided == decided
    content = json.loads((tmp_path / "scores.json").read_text())
    content["decided"]["setting"] = "files-9"
    (tmp_path / "scores.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"decided\.setting: expected one of files-4, found 'files-9'"):
        Evaluation.load(tmp_path / "scores.json")


def test_the_command_shows_it(folders, capsys):
    arguments = ["evaluate", "--predictions", str(folders / "mine"), "--truth", str(folders / "truth")]
    assert main([*arguments, "--spacing", "0.5", "--consensus", "dice,union"]) == 0
    shown = capsys.readouterr().out
    assert "one mask of each image, files 4" in shown
    assert "size (mm²)" in shown
    assert main([*arguments, "--consensus", "best"]) == 2
    assert "consensus: expected one of marginal" in capsys.readouterr().err
    assert main([*arguments, "--spacing", "1", "2", "3"]) == 2
    assert "spacing: expected two positive numbers, down and across, found 1, 2, 3" in capsys.readouterr().err


def test_rules_are_checked_before_anything_is_read():
    with pytest.raises(ConfigError, match="expected one of"):
        decision_rules(["mean"])
    with pytest.raises(ConfigError, match="spacing"):
        decision_rules(spacing=[-1])
    assert decision_rules(spacing=[2]).spacing == (2, 2)


def test_predict_writes_one_mask_and_measurements(tmp_path):
    [one] = ambiseg.predict("demo", "sample", tmp_path, consensus=["dice", "union"], measure=True, overview=False)
    folder = tmp_path / "sample"
    about = json.loads((folder / "weights.json").read_text())
    assert [single["how"] for single in about["consensus"]] == ["dice", "union"]
    for single in about["consensus"]:
        import tifffile

        written = tifffile.imread(folder / single["file"])
        assert (written == ambiseg.consensus(one.masks, single["how"], classes=[1]).labels[0].numpy()).all()
    rows = list(csv.DictReader((folder / "measurements.csv").read_text().splitlines()))
    assert len(rows) == one.masks.count
    assert [float(row["nodule size (pixels)"]) for row in rows] == [mask["pixels"]["nodule"] for mask in about["masks"]]
    full = json.loads((folder / "measurements.json").read_text())
    assert full["format"] == "ambiseg.Measurements/1"
    assert [part["what"] for part in full["measurements"]] == ["presence", "size", "diameter", "width", "components"]
    assert sum(full["measurements"][1]["histogram"]["weight"]) == pytest.approx(1)
    # What is in weights.json by default is the same, from the counts of pixels.
    [plain] = ambiseg.predict("demo", "sample", tmp_path / "plain", overview=False)
    by_count = json.loads((tmp_path / "plain" / "sample" / "weights.json").read_text())
    assert by_count["measurements"] == about["measurements"][:2]
    assert by_count["consensus"] == []
    assert not (tmp_path / "plain" / "sample" / "measurements.csv").exists()
    assert plain.masks.count == one.masks.count


def test_a_volume_is_measured_in_millilitres(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    affine = np.diag([0.7, 0.7, 2.5, 1])
    slices = np.stack([Nodules(size=64)[i].image[0] for i in (7, 100, 200)], -1).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(slices, affine), tmp_path / "ct.nii")
    [one] = ambiseg.predict("demo", tmp_path / "ct.nii", tmp_path / "out", samples=3, measure=True, overview=False)
    about = json.loads((tmp_path / "out" / "ct" / "weights.json").read_text())
    [size] = [part for part in about["measurements"] if part["what"] == "size"]
    assert size["unit"] == "ml"
    volumes = (one.masks.labels[0] == 1).sum((1, 2, 3)).double() * 0.7 * 0.7 * 2.5 / 1000
    assert size["mean"] == pytest.approx(float((volumes * one.masks.mass[0]).sum()), rel=1e-5)


def test_an_unknown_rule_is_one_line(tmp_path, capsys):
    assert main(["predict", "demo", "sample", "--consensus", "mean", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("ambiseg: --consensus: expected one of marginal")
    assert not (tmp_path / "out").exists()
