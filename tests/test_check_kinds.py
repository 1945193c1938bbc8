"""`data check` on what is no folder of images and masks, on masks with soft edges, and what it says to do next."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image, ImageFilter

from ambiseg.cli import main
from ambiseg.data.check.check import check
from ambiseg.data.sets.folder.labels import Values
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.store import Store
from ambiseg.io.errors import FileError
from tests import lidc_fakes as fakes


def refused(path, capsys) -> str:
    assert main(["data", "check", str(path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("at", ["cs", "cs/leftImg8bit", "."])
def test_cityscapes_is_known(tmp_path, capsys, at):
    root = tmp_path / "cs"
    for folder in ("leftImg8bit", "gtFine"):
        (root / folder / "train" / "aachen").mkdir(parents=True)
    error = refused(tmp_path / at, capsys)
    assert "found Cityscapes" in error
    assert f"ambiseg train cityscapes --data.root {root}`, or --data.name cityscapes" in error
    shutil.rmtree(root / "gtFine")
    assert "put gtFine/ beside" in refused(root, capsys)


def test_camvid_is_known(tmp_path, capsys):
    np.savez(tmp_path / "camvid.npz", train_image=np.zeros((1, 2, 2, 3)), train_label=np.zeros((1, 2, 2)))
    assert "use `ambiseg train camvid --data.root" in refused(tmp_path / "camvid.npz", capsys)
    (tmp_path / "CamVid" / "trainannot").mkdir(parents=True)
    assert "use `ambiseg train camvid --data.root" in refused(tmp_path / "CamVid", capsys)


def test_lidc_is_known(tmp_path, capsys):
    (tmp_path / "v1").mkdir()
    path = fakes.write_pickle(tmp_path / "v1" / "data_lidc.pickle", fakes.crops(2), 4)
    for place in (path, path.parent):
        assert f"`ambiseg data prepare lidc {place} --out lidc/`" in refused(place, capsys)
    raw = tmp_path / "raw" / "patient"
    raw.mkdir(parents=True)
    (raw / "1.dcm").write_bytes(b"\0" * 128 + b"DICM")
    assert "LIDC" not in refused(tmp_path / "raw", capsys)  # DICM of anything
    (raw / "outlines.xml").touch()
    assert "`ambiseg data prepare lidc" in refused(tmp_path / "raw", capsys)


def test_other_folders_are_not_taken_for_one_of_these(tmp_path, capsys):
    (tmp_path / "train" / "photos").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "train" / "photos" / "a.png")
    error = refused(tmp_path, capsys)
    assert "expected images/ and masks/, or a manifest.csv, found train/" in error
    assert "LIDC" not in error


def test_a_store_and_arrays_are_checked(tmp_path, capsys):
    Store.build(Shapes(count=6, size=16), tmp_path / "a store")
    assert main(["data", "check", str(tmp_path / "a store")]) == 0
    assert f"next: ambiseg train auto --data.root '{tmp_path}/a store'" in capsys.readouterr().out
    masks = np.zeros((4, 2, 8, 8), np.uint8)
    masks[:, :, 2:5, 2:5] = 1
    np.savez(tmp_path / "a.npz", image=np.random.default_rng(0).integers(0, 255, (4, 8, 8), np.uint8), masks=masks)
    result = check(tmp_path / "a.npz", quiet=True)
    assert result.next == f"ambiseg train auto --data.root {tmp_path}/a.npz"
    assert result.as_dict()["next"] == result.next


def test_what_cannot_be_trained_on_is_not_offered_for_training(tmp_path, capsys):
    image, masks = np.random.default_rng(0).integers(0, 255, (4, 8, 8), np.uint8), np.zeros((4, 2, 8, 8), np.uint8)
    np.savez(tmp_path / "empty.npz", image=image, masks=masks)
    masks[:, :, 2:5, 2:5] = 1
    np.savez(tmp_path / "two.npz", image=image[:2], masks=masks[:2])
    for name, why in (
        ("empty.npz", "nothing is marked: there is nothing to train on"),
        ("two.npz", "training needs 3 patients, one for each of train, val, test, found 2"),
    ):
        assert main(["data", "check", str(tmp_path / name)]) == 0
        said = capsys.readouterr().out
        assert why in said
        assert "next:" not in said


# -- soft edges ------------------------------------------------------------------------------------------------


def write(root, suffix="png", blur=True, count=8):
    noise = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48]
    for folder in ("images", "masks/Ann", "masks/Bob"):
        (root / folder).mkdir(parents=True)
    for i in range(count):
        Image.fromarray(noise.integers(0, 256, (48, 48), np.uint8)).save(root / "images" / f"im{i}.png")
        for r, reader in enumerate(("Ann", "Bob")):
            mask = Image.fromarray(((y - 24 - r) ** 2 + (x - 20 - i) ** 2 < 90).astype(np.uint8) * 255)
            mask = mask.filter(ImageFilter.GaussianBlur(1)) if blur else mask
            mask.save(root / "masks" / reader / f"im{i}.{suffix}")
    return root


@pytest.mark.parametrize(
    ("suffix", "blur", "line"),
    [
        ("png", True, "expected class ids 0, 1, 2 … or 0 and 255 in all masks, found soft edges in 16 of 16 masks: "),
        ("jpg", False, "expected masks without loss, found 16 masks as JPEG, whose values are not class ids"),
    ],
)
def test_soft_masks_are_one_problem_with_a_remedy(tmp_path, capsys, suffix, blur, line):
    root = write(tmp_path / "data", suffix, blur)
    assert main(["data", "check", str(root)]) == 1
    text = capsys.readouterr().out
    assert line in text
    assert text.rstrip().endswith("1 error")
    assert "value 1" not in text
    assert len(text.splitlines()) < 35
    result = check(root, quiet=True)
    assert [problem.severity for problem in result.problems].count("error") == 1
    assert result.suggestion["labels"] == {"threshold": 128}
    assert result.statistics.iou > 0.8  # of the masks as the remedy cuts them
    assert result.next == ""
    (root / "ambiseg.json").write_text(json.dumps(result.suggestion))
    again = check(root, quiet=True)
    assert (again.exit_code, again.statistics.iou) == (0, result.statistics.iou)


def test_training_refuses_soft_masks_in_one_line(tmp_path):
    from ambiseg.data.sets.folder.cases import Folder

    for classes in (None, 2):
        with pytest.raises(FileError, match="found soft edges in 16 of 16 masks"):
            _ = Folder(write(tmp_path / f"data {classes}"), quiet=True, classes=classes).classes


def test_numbers_of_objects_and_classes_are_not_soft():
    from pathlib import Path

    def seen(pixels) -> bool:
        values = Values()
        values.count(pixels, Path("a.png"))
        return values.soft

    edge = {0: 9000, 255: 500} | dict.fromkeys(range(5, 250, 7), 20)
    assert seen(edge)
    assert not seen({0: 9000} | dict.fromkeys(range(1, 201), 20))  # objects
    assert not seen({0: 9000, 85: 100, 170: 100, 255: 100})  # classes, spread over the greys
    assert not seen({i: 100 for i in range(34)})  # class ids
    assert not seen({})


def test_parts_that_the_owner_did_not_give_are_told(tmp_path, capsys):
    for part in ("train", "val"):
        write(tmp_path / part, blur=False, count=3)
    main(["data", "check", str(tmp_path)])
    assert "train 3, val 3; training takes test out of train" in capsys.readouterr().out


def test_a_patient_who_is_likely_in_two_splits(tmp_path, capsys):
    def named(name: str, left: str, right: str):
        for part, side in ((left, "L"), (right, "R")):
            write(tmp_path / name / part, blur=False, count=6)
            for path in list((tmp_path / name / part).rglob("im*.png")):
                path.rename(path.with_name(f"Image_0{path.stem[2:]}{side}.png"))
        return [problem for problem in check(tmp_path / name, quiet=True).problems if problem.code == "W415"]

    (problem,) = named("divided", "train", "test")
    assert "found 6 likely ones in two, if names that end in L and R are taken" in problem.message
    assert "Image_00 in train (Image_00L) and test (Image_00R)" in problem.message
    (tmp_path / "divided" / "ambiseg.json").write_text('{"patient": ".+"}')
    assert "W415" not in {problem.code for problem in check(tmp_path / "divided", quiet=True).problems}


def test_a_fold_can_be_frozen(tmp_path, capsys):
    shapes = ["data", "split", "shapes", "--set", "count=20", "--set", "size=16", "--out", str(tmp_path / "s.json")]
    assert main([*shapes, "--fold", "2/5"]) == 0
    assert "fold 2 of 5, by rank of the hash of the patient with seed 0" in capsys.readouterr().out
    assert main([*shapes, "--fold", "6/5"]) == 2
    assert "fold: expected K/N such as 2/5" in capsys.readouterr().err
