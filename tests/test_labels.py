"""What the numbers and colours in masks mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ambiseg.data.check.check import check
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.labels import Convention, Values, observed_convention
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.errors import FileError
from tests.files import disc, make, picture, refusal, save


def test_class_ids_and_void(tmp_path):
    save(tmp_path / "images/a.png", picture(1, 5))
    save(tmp_path / "masks/Ann/a.png", np.array([[0, 1, 2, 2, 255]], np.uint8))
    save(tmp_path / "masks/Bob/a.png", np.array([[0, 1, 255, 1, 1]], np.uint8))
    case = Folder(tmp_path, void=255)[0]
    assert case.labels.tolist() == [[[0, 1, 0, 2, 0]], [[0, 1, 0, 1, 0]]]
    assert case.valid is not None
    assert case.valid.tolist() == [[True, True, False, True, False]]  # void where anyone says so
    cases = Folder(tmp_path, void=255, classes=["sky", "road", "car"], evaluated=[2])
    assert (cases.classes, cases.evaluated) == (("sky", "road", "car"), (2,))


@given(st.sets(st.integers(0, 255), min_size=1))
def test_the_convention_is_binary_for_0_and_255_alone(numbers):
    seen = Values()
    for number in sorted(numbers):  # one mask each: it is the data set that decides
        seen.add(np.full((1, 2, 2), number, np.uint8), Path(f"{number}.png"))
    try:
        kind, classes = (found := observed_convention(seen, FolderSettings())).kind, len(found.classes)
    except FileError as refused:
        assert refused.problem.code == "E306"  # noqa: PT017
        present = len(numbers | {0})
        assert max(numbers) >= 64 or present * 2 < max(numbers) + 1
    else:
        assert (kind == "binary") == (255 in numbers and numbers <= {0, 255})
        assert classes == (2 if kind == "binary" else max(*numbers, 1) + 1)


def test_tables_thresholds_and_colours(tmp_path):
    save(tmp_path / "images/a.png", picture(1, 3))
    save(tmp_path / "masks/a.png", np.array([[0, 128, 255]], np.uint8))
    assert "found values 0, 128, 255 in them" in refusal(tmp_path)
    assert Folder(tmp_path, labels={"0": 0, "128": 1, "255": 2})[0].labels.tolist() == [[[0, 1, 2]]]
    case = Folder(tmp_path, labels={"0": 0, "128": 1, "255": "void"})[0]
    assert case.valid is not None
    assert (case.labels.tolist(), case.valid.tolist()) == ([[[0, 1, 0]]], [[True, True, False]])
    assert Folder(tmp_path, labels={"threshold": 128})[0].labels.tolist() == [[[0, 1, 1]]]
    save(tmp_path / "masks/a.png", np.array([[[0, 0, 0], [255, 0, 0], [0, 0, 255]]], np.uint8))
    assert refusal(tmp_path).endswith("expected one number per pixel, found 2 pixels in colour: #0000ff, #ff0000")
    colours = {"#000000": 0, "ff0000": 1}
    assert refusal(tmp_path, colours=colours).endswith("expected the 2 declared colours, found #0000ff (1 px)")
    assert Folder(tmp_path, colours={**colours, "#0000FF": 2})[0].labels.tolist() == [[[0, 1, 2]]]


def test_one_bit_masks_go_with_either_convention(tmp_path):
    make(tmp_path)
    Image.fromarray(disc(16, 20) > 0).save(tmp_path / "masks/Ann/a.png")
    assert Folder(tmp_path)[0].labels[0].tolist() == disc(16, 20).tolist()


def test_float_masks_are_taken_if_whole(tmp_path):
    make(tmp_path, foreground=1)
    (tmp_path / "masks/Ann/a.png").unlink()
    np.save(tmp_path / "masks/Ann/a.npy", disc(16, 20).astype(np.float64))
    assert Folder(tmp_path)[0].labels[0].tolist() == disc(16, 20).tolist()
    np.save(tmp_path / "masks/Ann/a.npy", disc(16, 20) * 0.5)
    assert refusal(tmp_path).endswith(f"expected whole numbers, found {disc(16, 20).sum()} pixels such as 0.5")
    np.save(tmp_path / "masks/Ann/a.npy", np.where(disc(16, 20) > 0, -np.inf, 0))
    assert refusal(tmp_path).endswith(f"expected whole numbers, found {disc(16, 20).sum()} pixels such as -inf")
    np.save(tmp_path / "masks/Ann/a.npy", disc(16, 20) * 1e20)
    assert refusal(tmp_path).endswith("expected class ids below 2⁶³, found 1e+20")


@given(st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_ids_are_translated_exactly_in_every_type(kind, values):
    mask = np.array([values]).astype(kind)
    ids, void = Convention("ids", tuple("abcde"), void=5)(mask[None], Path("a"))
    assert ids.tolist() == [[0 if v == 5 else v for v in values]]
    assert (void is None) == (5 not in values)
    assert void is None or void.tolist() == [[v == 5 for v in values]]


def test_of_masks_that_do_not_fit_together_the_odd_one_is_named(tmp_path):
    make(tmp_path)
    save(tmp_path / "masks/Ann/b.png", disc(16, 20))  # 0 and 1, where all others have 0 and 255
    message = refusal(tmp_path)
    assert message.startswith(str(tmp_path / "masks/Ann/b.png"))
    assert message.endswith("found values 0, 1, 255 in them, 1 in this mask alone")


def test_one_bit_masks_are_not_blamed_for_another(tmp_path):
    for name in "ab":
        save(tmp_path / f"images/{name}.png", picture())
        save(tmp_path / f"masks/{name}.png", disc(16, 20) > 0)
    np.save(tmp_path / "masks/b.npy", disc(16, 20).astype(np.int64) << 40)
    (tmp_path / "masks/b.png").unlink()
    report = check(tmp_path)
    [problem] = [p for p in report.problems if p.severity == "error"]
    assert (problem.code, Path(problem.file).name) == ("E306", "b.npy")
    assert f'"labels": {{"0": 0, "1": 1, "{1 << 40}": 2}}' in problem.remedy


def test_colours_that_are_found_are_suggested(tmp_path):
    make(tmp_path)
    for path in tmp_path.glob("masks/*/*.png"):
        on = np.asarray(Image.open(path))
        save(path, np.stack([on, on * 0, on * 0], -1))
    report = check(tmp_path)
    assert {problem.code for problem in report.problems} == {"E307"}
    assert report.suggestion == {"colours": {"#000000": 0, "#ff0000": 1}}
    (tmp_path / "ambiseg.json").write_text(json.dumps(report.suggestion))
    assert check(tmp_path).problems == []
    (tmp_path / "ambiseg.json").unlink()
    save(tmp_path / "masks/Ann/a.png", disc(16, 20))  # a table of colours would not fit this one
    assert "colours" not in check(tmp_path).suggestion
