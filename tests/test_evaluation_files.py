"""Masks of other tools: layouts, weights, hand-computed scores, and one line for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ambiseg import MaskDistribution, ged, matched_iou
from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.data.export import export
from ambiseg.data.rules import Rule
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.splits import Split
from ambiseg.evaluation import evaluate_files
from ambiseg.prediction import predict
from tests.files import disc, save, save_nifti
from tests.test_prediction import fresh, noise

LEFT, RIGHT, ALL, NONE = (np.array([row] * 2, np.uint8) for row in ([1, 1, 0, 0], [0, 0, 1, 1], [1] * 4, [0] * 4))
READERS = {"a": {"Ann": LEFT, "Bob": RIGHT}, "b": {"Ann": ALL, "Bob": NONE}}
SAMPLES = {"a": {"s1": LEFT, "s2": LEFT}, "b": {"s1": ALL, "s2": NONE}}
# a: 2 E[d(S, Y)] = 2 · ½, no diversity of samples, E[d(Y, Y′)] = ½.  b: the readers' own masks.
GED, MATCHED = {"a": 0.5, "b": 0.0}, {"a": 0.5, "b": 1.0}


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Predictions as sample/case.png, truth as reader/case.png."""
    for place, masks in (("predictions", SAMPLES), ("truth", READERS)):
        for case, by in masks.items():
            for who, mask in by.items():
                save(tmp_path / place / who / f"{case}.png", mask * 255)
    return tmp_path / "predictions", tmp_path / "truth"


def scores(predictions: Path, truth: Path, **options) -> dict[str, dict[str, float | None]]:
    found = evaluate_files(predictions, truth, quiet=True, **options)
    return {case.name: case.scores[found.settings[0].key] for case in found.cases}


def check(found: dict[str, dict[str, float | None]]) -> None:
    assert {name: values["ged"] for name, values in found.items()} == GED
    assert {name: values["matched_iou"] for name, values in found.items()} == MATCHED


def test_hand_case(folders):
    found = scores(*folders)
    check(found)
    assert (found["a"]["empty_mass"], found["b"]["empty_mass"]) == (0, 0.5)
    assert (found["a"]["diversity"], found["b"]["diversity"]) == (0, 0.5)
    assert found["b"]["entropy"] == pytest.approx(np.log(2))
    assert (found["a"]["ece"], found["b"]["ece"]) == (
        0.25,
        0,
    )  # certain in half of the pixels, with half right
    whole = evaluate_files(*folders, quiet=True)
    assert (whole.images, whole.patients, whole.split, whole.which) == (2, 2, "all", "files")
    assert [case.readers for case in whole.cases] == [2, 1]
    assert whole.strata is None


def test_folders_in_the_other_order(folders, tmp_path):
    for case, by in SAMPLES.items():
        for sample, mask in by.items():
            save(tmp_path / "turned" / case / f"{sample}.png", mask)  # 0 and 1 instead of 0 and 255
    check(scores(tmp_path / "turned", folders[1]))


def test_distributions_of_the_library(folders, tmp_path):
    for case, by in SAMPLES.items():
        masks = MaskDistribution(torch.from_numpy(np.stack([by["s1"], by["s2"]]))[None])
        (tmp_path / "npz").mkdir(exist_ok=True)
        masks.save(tmp_path / "npz" / f"{case}.npz")
    check(scores(tmp_path / "npz", folders[1]))


def test_one_mask_per_case_needs_no_folder_of_its_own(folders, tmp_path):
    for case, by in SAMPLES.items():
        save(tmp_path / "flat" / f"{case}.png", by["s1"])
    found = scores(tmp_path / "flat", folders[1])
    assert {name: values["ged"] for name, values in found.items()} == {"a": 0.5, "b": 0.5}
    assert {name: values["ged_unbiased"] for name, values in found.items()} == {"a": None, "b": None}
    save(tmp_path / "flat/s2/a.png", LEFT)  # either this order or that
    with pytest.raises(DataError, match=r"s2/a\.png: expected masks as .*, found a name that is of none"):
        scores(tmp_path / "flat", folders[1])


def test_what_predict_wrote_is_scored(tmp_path):
    """Pictures by all that was written, volumes by their masks, each with the weights that lie beside them."""
    for name in "ab":
        save(tmp_path / f"truth/images/p/{name}.png", noise(16, 20))
        save(tmp_path / f"truth/masks/Ann/p/{name}.png", disc(16, 20) * 255)
    model = fresh()
    made = {one.name: one for one in predict(model, tmp_path / "truth/images", tmp_path / "mine")}
    found = scores(tmp_path / "mine", tmp_path / "truth")
    assert set(found) == set(made) == {"p/a", "p/b"}
    readers = torch.from_numpy(disc(16, 20))[None, None]
    for name, one in made.items():
        assert found[name]["ged"] == pytest.approx(ged(one.masks, readers).item())
        assert one.masks.count < 2 or found[name]["ged_unbiased"] is None  # masks of unequal weights are no draws
    volume = noise(4, 5, 6, dtype=np.int16)
    save_nifti(tmp_path / "ct/images/v.nii.gz", volume)
    save_nifti(tmp_path / "ct/masks/v.nii.gz", (volume > 90).astype(np.uint8), np.eye(4))
    [one] = predict(model, tmp_path / "ct/images/v.nii.gz", tmp_path / "volumes", overview=False)
    found = scores(tmp_path / "volumes", tmp_path / "ct")
    truth = Folder(tmp_path / "ct")
    for k, values in enumerate(found.values()):
        masks = MaskDistribution(one.masks.labels[:, :, k], one.masks.weights)
        expected = ged(masks, torch.from_numpy(truth[k].labels)[None].long())
        assert values["ged"] == pytest.approx(expected.item())
    assert evaluate_files(tmp_path / "volumes/v", tmp_path / "ct", quiet=True).images == 6  # the folder of one case
    with pytest.raises(DataError, match=r"volumes/v: expected the prediction of a case of the truth, found 'v'"):
        scores(tmp_path / "volumes", tmp_path / "truth")


@pytest.mark.parametrize("format", ["ambiseg.Prediction/1", "ambiseg.Prediction/2"])
def test_every_format_of_predictions(format, folders, tmp_path):
    for case, by in SAMPLES.items():
        for sample, mask in by.items():
            save(tmp_path / "mine" / case / f"{sample}.png", mask)
        save(tmp_path / "mine" / case / "overview.png", LEFT)  # not in the list: no mask
        masks = [{"file": f"{sample}.png", "weight": 0.5, "more": 1} for sample in by]
        (tmp_path / "mine" / case / "weights.json").write_text(
            json.dumps({"format": format, "slices": 1, "masks": masks, "more": 1})
        )
    check(scores(tmp_path / "mine", folders[1]))
    masks = [{"file": "s1.png", "weight": 0.25}, {"file": "s2.png", "weight": 0.75}]
    (tmp_path / "mine/b/weights.json").write_text(json.dumps({"format": format, "slices": 1, "masks": masks}))
    assert scores(tmp_path / "mine", folders[1])["b"]["empty_mass"] == 0.75
    (tmp_path / "mine/b/weights.json").write_text(json.dumps({"format": format, "masks": [{"file": "s1.png"}]}))
    with pytest.raises(DataError, match=r"b/weights\.json: masks\.0\.weight: expected a value in a prediction"):
        scores(tmp_path / "mine", folders[1])


def test_weights(folders):
    predictions, truth = folders
    (predictions / "weights.json").write_text(json.dumps({"b": {"s1": 3, "s2": 1}}))
    found = scores(predictions, truth)
    expected = MaskDistribution(torch.tensor(np.stack([ALL, NONE]))[None], torch.tensor([[0.75, 0.25]]))
    readers = torch.tensor(np.stack([ALL, NONE]))[None]
    assert found["b"]["ged"] == pytest.approx(ged(expected, readers).item()) == pytest.approx(0.125)
    assert found["b"]["matched_iou"] == pytest.approx(matched_iou(expected, readers).item())
    assert found["b"]["empty_mass"] == 0.25
    assert found["a"]["ged"] == GED["a"]


def test_a_data_folder_with_images_void_patients_and_splits(tmp_path):
    cases = Shapes(count=6, size=16, readers=3)
    export(cases, tmp_path / "truth")
    settings = json.loads((tmp_path / "truth" / "ambiseg.json").read_text())
    (tmp_path / "truth" / "ambiseg.json").write_text(json.dumps({**settings, "void": 255}))
    truth = Folder(tmp_path / "truth", quiet=True)
    name = truth.file_of(0, "reader_1")
    marked = np.array(truth[0].labels[0])
    marked[:4] = 255
    save(name, marked)
    for case in cases:
        save(tmp_path / "mine" / "only" / f"{case.name}.png", case.labels[0])
    found = evaluate_files(tmp_path / "mine", tmp_path / "truth", quiet=True)
    assert (found.images, found.patients) == (6, 3)
    first = Folder(tmp_path / "truth", quiet=True)[0]
    valid = torch.from_numpy(first.valid)[None]  # type: ignore[arg-type]
    expected = ged(cases[0].labels[None, :1], MaskDistribution(torch.from_numpy(first.labels)[None], valid=valid))
    assert found.cases[0].scores["files-1"]["ged"] == expected.item()
    assert found.cases[0].scores["files-1"]["ged_unbiased"] is None

    rows = (tmp_path / "truth" / "manifest.csv").read_text().splitlines()
    assert "split" not in rows[0]
    parts = ["split", *("train" if n < 9 else "test" for n in range(18))]  # three readers a case
    parted = [f"{row},{part}" for row, part in zip(rows, parts, strict=True)]
    (tmp_path / "truth" / "manifest.csv").write_text("\n".join(parted) + "\n")
    part = evaluate_files(tmp_path / "mine", tmp_path / "truth", split="test", quiet=True)
    assert [case.name for case in part.cases] == [case.name for case in found.cases[3:]]
    assert part.cases == found.cases[3:]


def test_volumes_slice_by_slice(tmp_path):
    rng = np.random.default_rng(0)
    image, reader = rng.normal(size=(8, 6, 3)).astype(np.float32), (rng.random((8, 6, 3)) > 0.5).astype(np.uint8)
    save_nifti(tmp_path / "truth" / "images" / "scan.nii.gz", image)
    save_nifti(tmp_path / "truth" / "masks" / "Ann" / "scan.nii.gz", reader)
    save_nifti(tmp_path / "mine" / "1" / "scan.nii.gz", reader)
    save_nifti(tmp_path / "mine" / "2" / "scan.nii.gz", 1 - reader)
    found = evaluate_files(tmp_path / "mine", tmp_path / "truth", quiet=True)
    assert [case.name for case in found.cases] == ["scan#000", "scan#001", "scan#002"]
    assert {case.scores["files-2"]["matched_iou"] for case in found.cases} == {0.5}
    assert found.patients == 1


def _drop(predictions: Path, truth: Path) -> None:
    for sample in ("s1", "s2"):
        (predictions / sample / "b.png").unlink()


def _resize(predictions: Path, truth: Path) -> None:
    save(predictions / "s2" / "a.png", disc(4, 4))


def _stray(predictions: Path, truth: Path) -> None:
    shutil.copy(predictions / "s1" / "a.png", predictions / "s1" / "c.png")


def _twice(predictions: Path, truth: Path) -> None:
    shutil.copy(predictions / "s1" / "a.png", predictions / "s1" / "a.bmp")


def _text(predictions: Path, truth: Path) -> None:
    (predictions / "s1" / "a.png").write_text("not a picture")


def _class(predictions: Path, truth: Path) -> None:
    save(predictions / "s1" / "a.png", LEFT * 7)


def _damaged(predictions: Path, truth: Path) -> None:
    (predictions / "a.npz").write_bytes(b"PK nothing")


def _two_images(predictions: Path, truth: Path) -> None:
    MaskDistribution(torch.zeros(2, 3, 2, 4, dtype=torch.long)).save(predictions / "a.npz")


def _class_in_npz(predictions: Path, truth: Path) -> None:
    MaskDistribution(torch.full((1, 3, 2, 4), 2)).save(predictions / "a.npz")


def _weights(content: str):
    def write(predictions: Path, truth: Path) -> None:
        (predictions / "weights.json").write_text(content)

    return write


def _beside(predictions: Path, truth: Path) -> None:
    shutil.copy(truth / "Ann" / "a.png", truth / "a.png")


def _nothing(predictions: Path, truth: Path) -> None:
    shutil.rmtree(truth)
    truth.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "predictions: expected masks of 2 cases, found none of 1: 'b'; --partial scores those that are there"),
        (_resize, "s2/a.png: expected 2×4 as its image a.png, found 4×4"),
        (_stray, "s1/c.png: expected masks as SAMPLE/CASE.png, CASE/SAMPLE.png, CASE.png or CASE.npz with a case of"),
        (_twice, "a.png: expected one file for sample 's1' of 'a', found a.bmp too"),
        (_text, "s1/a.png: expected PNG, found text"),
        (_class, "s1/a.png: expected the declared values 0, 1, 255, found value 7 in 4 pixels"),
        (_damaged, "a.npz: cannot be read as a MaskDistribution"),
        (_two_images, "a.npz: expected masks of 1 image of 2×4 as the truth's, found 2 images of 2×4"),
        (_class_in_npz, "a.npz: class ids must be below classes=2, found 2"),
        (_weights("{"), "weights.json: expected weights as JSON, found"),
        (_weights("[]"), "weights.json: expected {case: {sample: weight}}, found"),
        (_weights('{"z": {}}'), "weights.json: expected cases of the truth, found 'z'"),
        (_weights('{"a": {"s1": 1}}'), "weights.json: expected a weight for each mask of 'a', found no weight of 's2'"),
        (
            _weights('{"a": {"s1": 1, "s2": -1}}'),
            "a.s2: expected at least 0, found -1",
        ),
        (
            _weights('{"a": {"s1": 1, "s2": true}}'),
            "a.s2: expected a number, found true",
        ),
        (_weights('{"a": {"s1": 0, "s2": 0}}'), "weights.json: expected a weight above 0 for 'a', found [0.0, 0.0]"),
        (_beside, "truth/a.png: expected images/ and masks/, or masks as READER/CASE.png, found it beside both"),
        (_nothing, "truth: expected images/ and masks/, or masks as READER/CASE.png, found no mask"),
    ],
)
def test_one_line_names_the_file(damage, message, folders, capsys):
    predictions, truth = folders
    damage(predictions, truth)
    assert main(["evaluate", "--predictions", str(predictions), "--truth", str(truth), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--predictions", "nowhere", "--truth", "truth"],
            "nowhere: expected a folder of predicted masks, found no such folder",
        ),
        (["--predictions", "predictions", "--truth", "nowhere"], "nowhere: expected a folder of the readers' masks"),
        (["--predictions", "predictions"], "expected --predictions and --truth together, found one of them"),
        (["--predictions", "predictions", "--truth", "truth", "--samples", "4"], "expected --samples with a RUN only"),
        (
            ["--predictions", "predictions", "--truth", "truth", "--split", "test"],
            "expected a folder that declares a split, found none; --split RUN/split.json takes the parts of a run",
        ),
        (["--predictions", "predictions", "--truth", "truth", "--protocol", "x"], "protocol: expected one of mose"),
        ([], "expected the folder of a run, or --predictions DIR --truth DIR, found neither"),
    ],
)
def test_one_line_names_the_option(options, message, folders, capsys, monkeypatch):
    monkeypatch.chdir(folders[0].parent)
    assert main(["evaluate", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_command(folders, tmp_path, capsys):
    predictions, truth = folders
    out = tmp_path / "scores [old].json"  # brackets are no markup
    assert main(["evaluate", "--predictions", str(predictions), "--truth", str(truth), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "2 images of 2 patients" in text
    assert "0.250 [0.000, 0.500]" in text
    assert f"all numbers: {out}, scores [old].csv" in text
    assert json.loads(out.read_text())["settings"][0]["form"] == "files"
    assert (tmp_path / "scores [old].csv").is_file()


def test_the_cases_that_are_there(folders, capsys):
    predictions, truth = folders
    for sample in ("s1", "s2"):
        (predictions / sample / "b.png").unlink()
    found = evaluate_files(predictions, truth, quiet=True, partial=True)
    assert ([case.name for case in found.cases], found.unpredicted) == (["a"], 1)
    assert found.cases[0].scores[found.settings[0].key]["ged"] == GED["a"]
    assert main(["evaluate", "--predictions", str(predictions), "--truth", str(truth), "--partial"]) == 0
    assert "scored 1 of 2 cases; the others have no prediction" in capsys.readouterr().out
    assert evaluate_files(predictions, predictions, quiet=True, partial=True).unpredicted == 0
    for sample in ("s1", "s2"):
        (predictions / sample / "a.png").unlink()
    with pytest.raises(DataError, match="expected masks of 2 cases, found none of 2"):
        evaluate_files(predictions, truth, quiet=True, partial=True)


def test_the_part_of_a_saved_split(folders, tmp_path, capsys):
    predictions, truth = folders
    for sample in ("s1", "s2"):
        (predictions / sample / "b.png").unlink()
    run = tmp_path / "run"
    run.mkdir()
    rule = Rule({"train": 0.5, "test": 0.5})
    Split({"train": ("b",), "test": ("a",)}, "", rule).save(run / "split.json")
    for split in (run, run / "split.json", f"{run / 'split.json'}:test"):
        found = evaluate_files(predictions, truth, quiet=True, split=split)
        assert ([case.name for case in found.cases], found.split, found.unpredicted) == (["a"], "test", 0)
    with pytest.raises(DataError, match="expected masks of 1 case, found none of 1: 'b'"):
        evaluate_files(predictions, truth, quiet=True, split=f"{run}:train")
    with pytest.raises(DataError, match="expected part 'val', found train, test"):
        evaluate_files(predictions, truth, quiet=True, split=f"{run}:val")
    Split({"train": ("b",), "test": ("a", "c")}, "", rule).save(run / "split.json")
    with pytest.raises(DataError, match=r"expected the 2 cases of test in .*, found none of 1: 'c'"):
        evaluate_files(predictions, truth, quiet=True, split=run)
    assert main(["evaluate", str(run), "--partial"]) == 2
    assert "expected --partial with --predictions only" in capsys.readouterr().err
