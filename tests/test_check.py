"""The checker: every problem with its file, numbers that are right, and output for people, scripts and browsers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ambiseg.cli import main
from ambiseg.data.case import Case
from ambiseg.data.check.check import CheckResult, check
from ambiseg.data.check.statistics import Statistics
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.errors import KINDS, SEVERITIES, FileError, Problem
from ambiseg.overlap import pairwise_iou
from ambiseg.viz.colours import reader_colours
from ambiseg.viz.pictures import differences, outlines, over, photograph
from tests.conftest import REPOSITORY, SHARED
from tests.files import RNG, disc, made, make, picture, save, save_nifti, save_series
from tests.pages import Reader


def lines(result: CheckResult) -> list[str]:
    """Errors and warnings as the terminal has them."""
    return [f"{p.code} {p.line}" for p in map(result.relative, result.problems) if p.severity != "hint"]


def hints(result: CheckResult) -> list[str]:
    return [f"{p.code} {p.line}" for p in map(result.relative, result.problems) if p.severity == "hint"]


# -- each situation gives one clear line ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 7])
def test_a_folder_in_which_all_is_right(tmp_path, count):
    result = check(make(tmp_path / "my data", readers=[f"r {m}" for m in range(count)]))
    assert lines(result) == []
    assert result.exit_code == 0
    assert result.suggestion == {"classes": ["background", "foreground"], "labels": "binary"}
    assert result.labels == "0 is background, 255 is foreground (from all masks together)"
    (tmp_path / "my data/ambiseg.json").write_text(json.dumps(result.suggestion))
    assert check(tmp_path / "my data").problems == []  # what it suggests is what it wants


def test_a_corrupted_picture_and_a_mask_of_another_size(tmp_path):
    make(tmp_path, names=tuple("abcd"))
    path = tmp_path / "images/b.png"
    path.write_bytes(path.read_bytes()[:200])
    save(tmp_path / "masks/Bob/c.png", disc(16, 19) * 255)
    (tmp_path / "masks/Ann/d.png").write_bytes(b"")
    result = check(tmp_path)
    assert [line.replace("found damage: image file is truncated", "…").split(" (")[0] for line in lines(result)] == [
        "E201 images/b.png: expected PNG that can be decoded, …",
        "E201 masks/Ann/d.png: expected PNG, found an empty file",
        "E301 masks/Bob/c.png: expected 16×20 as its image c.png, found 16×19",
    ]
    assert result.exit_code == 1
    assert result.unread == 1
    assert [case.readers for case in result.statistics.cases] == [("Ann", "Bob"), ("Ann",), ("Bob",)]


def test_a_class_beyond_the_declared_ones(tmp_path):
    mask = disc(16, 20)
    mask[0, :3] = 7
    save(make(tmp_path, foreground=1) / "masks/Bob/b.png", mask)
    result = check(tmp_path, FolderSettings(classes=2))
    assert lines(result) == ["E303 masks/Bob/b.png: expected class ids 0 … 1, found value 7 in 3 pixels"]
    result = check(tmp_path)
    assert [line[:30] for line in lines(result)] == ["E306 masks/Bob/b.png: expected"]
    assert result.problems[0].remedy.startswith("correct the mask if 7 is a slip, or declare")
    assert "labels" not in result.suggestion


def test_missing_masks(tmp_path):
    make(tmp_path)
    (tmp_path / "masks/Bob/b.png").unlink()
    result = check(tmp_path)
    assert lines(result) == []
    assert "H108 masks/Bob: expected a mask for each of 3 images, found none for b.png" in hints(result)
    (tmp_path / "masks/Ann/b.png").unlink()
    result = check(tmp_path)
    assert lines(result) == ["E101 images/b.png: expected a mask of at least one reader in masks/, found none"]
    assert lines(check(tmp_path, FolderSettings(missing="skip"))) == []


def test_readers_whose_files_are_named_otherwise(tmp_path):
    make(tmp_path, names=[f"img_{i:03}" for i in range(10)])
    for path in sorted((tmp_path / "masks/Bob").iterdir()):
        path.rename(path.with_name(f"{path.stem}_seg.png"))
    result = check(tmp_path)
    (line,) = lines(result)
    assert line.startswith("E103 masks/Bob: expected masks named as the images, found 10 masks that fit none, such as")
    assert result.problems[0].remedy == 'write into ambiseg.json: {"mask_name": "{name}_seg"}'
    assert lines(check(tmp_path, FolderSettings(mask_name="{name}_seg"))) == []


def test_a_mask_with_a_slip_in_its_name(tmp_path):
    make(tmp_path, names=["img_001", "img_002"])
    (tmp_path / "masks/Ann/img_002.png").rename(tmp_path / "masks/Ann/img_02.png")
    (line,) = lines(check(tmp_path))
    expected = "expected an image named 'img_02', found none; the nearest is img_002.png"
    assert line == f"W102 masks/Ann/img_02.png: {expected}"


def test_what_is_odd_about_files(tmp_path):
    make(tmp_path)
    save(tmp_path / "images/b.png", np.full((16, 20), 9, np.uint8))
    (tmp_path / "images/scan.nrrd").write_bytes(b"NRRD")
    (tmp_path / "images/notes.txt").write_text("x")
    result = check(tmp_path)
    assert [line.split(": expected")[0] for line in lines(result)] == ["E105 images/scan.nrrd", "W209 images/b.png"]
    assert "H107 images/notes.txt: 1 file ignored: .txt is no format of pictures" in hints(result)


def test_volumes(tmp_path):
    volume = RNG.normal(0, 300, (8, 9, 12)).astype(np.int16)
    save_nifti(tmp_path / "images/s.nii.gz", volume)
    for reader in ("Ann", "Bob"):
        save_nifti(tmp_path / f"masks/{reader}/s.nii.gz", (volume > 100).astype(np.uint8))
    moved = np.eye(4) + np.eye(4, k=3) * 4
    save_nifti(tmp_path / "masks/Cid/s.nii.gz", (volume > 0).astype(np.uint8), moved)
    result = check(tmp_path)
    line = "E302 masks/Cid/s.nii.gz: expected the grid of s.nii.gz, found corners 4 mm away from its own"
    assert lines(result)[:1] == [line]  # once, not once a slice
    assert set(result.suggestion) == {"classes", "labels", "intensity"}
    save_series(tmp_path / "series/images/p1", np.concatenate([volume] * 2)[[0, 1, 2, 3, 4, 6]] * 0)
    np.save(made(tmp_path / "series/masks/p1.npy"), np.ones((6, 9, 12), np.uint8))
    assert lines(check(tmp_path / "series")) == []


# -- what only the whole data set shows -----------------------------------------------------------------------------


def test_leaks_and_copies(tmp_path):
    for part in ("train", "test"):
        make(tmp_path / part, names=["p1/a", "p2/b"] if part == "train" else ["p1/c", "p3/d"])
    same = picture()
    for name in ("train/images/p2/b.png", "test/images/p3/d.png"):
        save(tmp_path / name, same)
    assert lines(check(tmp_path)) == [
        "E401 patient p1: expected the patient in one split, found it in train (train/p1/a) and test (test/p1/c)",
        "E402 test/images/p3/d.png: expected a picture in one split, found it in train (train/p2/b) and test",
    ]
    flat = make(tmp_path / "flat")
    for name in "ac":
        save(flat / f"images/{name}.png", same)
    (line,) = lines(check(flat))
    assert line == "W403 images/c.png: expected a picture of its own, found the pixels of a, another patient's"


def test_readers_who_copy_who_never_mark_and_who_are_apart(tmp_path):
    make(tmp_path, readers=["Ann", "Bob", "Cid"])
    for name in "abc":
        mask = np.asarray(Image.open(tmp_path / f"masks/Ann/{name}.png"))
        save(tmp_path / f"masks/copy/{name}.png", mask)
        save(tmp_path / f"masks/empty/{name}.png", mask * 0)
        save(tmp_path / f"masks/far/{name}.png", disc(16, 20, 2, 2, 18) * 255)
    found = lines(check(tmp_path))
    assert [line.split(": ")[0] for line in found] == [
        "W404 reader copy",
        "W405 reader empty",
        "W408 reader far",
        *(f"W409 masks/far/{name}.png" for name in "abc"),
    ]
    assert found[0].endswith("found those of Ann on all 3 images they share")


def test_masks_without_a_mark_and_classes_without_a_pixel(tmp_path):
    result = check(make(tmp_path, foreground=0))
    assert [line[:4] for line in lines(result)] == ["W404", "W407"][1:]
    result = check(make(tmp_path, foreground=1), FolderSettings(classes=3))
    assert lines(result) == ["W406 expected pixels of class 2, found none in any mask"]


def test_patients_hidden_in_names(tmp_path):
    make(tmp_path, names=["p1_s1", "p1_s2", "p2_s1"])
    result = check(tmp_path)
    assert any(hint.startswith("H413") and "p1 (2), p2 (1)" in hint for hint in hints(result))
    result = check(tmp_path, FolderSettings(patient=str(result.suggestion["patient"])))
    assert [case.patient for case in result.statistics.cases] == ["p1", "p1", "p2"]


# -- the numbers ----------------------------------------------------------------------------------------------------


@given(st.integers(2, 4), st.integers(2, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_agreement_is_that_of_the_metrics(readers, classes, voids, seed):
    rng = np.random.default_rng(seed)
    statistics = Statistics(tuple("abcd"[:classes]), tuple(range(1, classes)), expected=3)
    agree, drawn, differing = [], [], []
    for i in range(3):
        labels = rng.integers(0, classes, (readers, 4, 4)) * rng.integers(0, 2, (readers, 1, 1))
        valid = rng.random((4, 4)) < 0.7 if voids else np.ones((4, 4), bool)
        valid[0, 0] = True
        statistics.add(Case.of(np.zeros((1, 4, 4)), labels, name=str(i), valid=valid))
        upper = np.triu_indices(readers, 1)
        masks = torch.from_numpy(labels * valid)[None]  # class 0 is not evaluated: void there is nowhere
        one, other = (pairwise_iou(masks, masks, statistics.evaluated, a)[0].numpy()[upper] for a in ("agree", "skip"))
        agree.append(one.mean())
        drawn += [np.nanmean(other)] if np.isfinite(other).any() else []
        differing.append((labels != labels[:1]).any(0)[valid].mean())
    assert statistics.iou == pytest.approx(np.mean(agree))
    assert statistics.iou_where_marked == pytest.approx(np.mean(drawn) if drawn else np.nan, nan_ok=True)
    assert statistics.differing == pytest.approx(np.mean(differing))
    assert statistics.ambiguous == pytest.approx(np.mean(np.array(differing) > 0))


def test_numbers_by_hand():
    """Two images of 1×4: on the first Ann marks two pixels and Bob one of them, on the second only Ann was there."""
    statistics = Statistics(("background", "disc"), (1,), expected=2)
    labels = np.array([[[0, 1, 1, 0]], [[0, 0, 1, 0]]])
    statistics.add(
        Case.of(np.arange(4, dtype=np.uint8).reshape(1, 1, 4), labels, name="a", readers=["Ann", "Bob"]), "train"
    )
    statistics.add(Case.of(np.full((1, 1, 4), 9, np.uint8), labels[:1] * 0, name="b", readers=["Ann"]), "test")
    assert (statistics.iou, statistics.iou_where_marked, statistics.ambiguous, statistics.differing) == (
        0.5,
        0.5,
        1.0,
        0.25,
    )
    assert statistics.empty == pytest.approx(1 / 3)
    assert statistics.readers_per_image == {1: 1, 2: 1}
    assert [(c.pixels, c.masks, c.images) for c in statistics.by_class] == [(9, 3, 2), (3, 2, 1)]
    assert [(r.images, r.empty, r.mean_iou) for r in statistics.by_reader.values()] == [(2, 1, 0.5), (1, 0, 0.5)]
    assert (statistics.low, statistics.high, statistics.blank) == (0, 9, [1])


def test_any_data_set_can_be_checked(tmp_path):
    from ambiseg.data.sets.folder.cases import Folder

    class Plain(Folder):
        """Looks like any other data set: no files to name."""

    cases = Plain(make(tmp_path))
    assert check(cases).exit_code == 0


# -- output ---------------------------------------------------------------------------------------------------------


def run(path: Path, **options: object) -> int:
    """``ambiseg data check`` as it is typed."""
    flags = ["--quiet"] if options.pop("quiet", False) else []
    return main(["data", "check", str(path), *flags, *(f"--{key}={value}" for key, value in options.items())])


def broken(tmp_path: Path) -> Path:
    root = make(tmp_path / "a <b> & c", names=[f"{i:02}" for i in range(12)])
    for i in range(9):
        save(root / f"masks/Bob/{i:02}.png", disc(16, 19) * 255)
    return root


def test_the_terminal_groups_what_is_alike(tmp_path, capsys):
    assert run(broken(tmp_path)) == 1
    out = capsys.readouterr().out
    assert out.count("expected 16×20 as its image") == 5
    assert "… and 4 more" in out
    assert out.count("export the mask at the size of its image") == 1
    assert "readers per image  1 (9 images), 2 (3 images)" in out
    assert out.rstrip().endswith("9 errors, 1 hint")


def test_quiet_is_a_line_a_problem(tmp_path, capsys):
    assert run(broken(tmp_path), quiet=True) == 1
    out, err = capsys.readouterr()
    assert err == ""
    pattern = r"masks/Bob/\d\d\.png: E301 expected 16×20 as its image \d\d\.png, found 16×19"
    assert len(out.splitlines()) == 9
    assert all(re.fullmatch(pattern, line) for line in out.splitlines())
    assert run(make(tmp_path / "fine"), quiet=True) == 0
    assert capsys.readouterr() == ("", "")


def test_nothing_to_read_is_one_line_on_the_error_stream(tmp_path, capsys):
    empty = made(tmp_path / "empty/x").parent
    for path, message in (
        (tmp_path / "nowhere", "expected a folder or a manifest, found nothing of that name"),
        (empty, "expected images/ and masks/, or a manifest.csv, found an empty folder"),
    ):
        assert run(path, json=tmp_path / "out.json") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"ambiseg: {path}: {message}")
        assert err.count("\n") == 1
        assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == 2
    assert run(make(tmp_path / "fine"), html=tmp_path / "no/where.html") == 2
    assert "expected a folder to write into, found none" in capsys.readouterr().err
    (tmp_path / "fine/ambiseg.json").write_text('{"clases": 2}')
    assert run(tmp_path / "fine") == 2
    assert "did you mean classes?" in capsys.readouterr().err


def test_all_masks_unreadable_is_code_2(tmp_path, capsys):
    make(tmp_path, names=["a"], readers=["Ann"])
    (tmp_path / "masks/Ann/a.png").write_bytes(b"")
    assert run(tmp_path, html=tmp_path / "page.html") == 2
    assert "masks/Ann/a.png: expected PNG, found an empty file" in capsys.readouterr().out
    page = Reader((tmp_path / "page.html").read_text())
    assert "masks/Ann/a.png expected PNG, found an empty file" in page.text
    assert page.all("img") == []


def test_json_has_everything(tmp_path, capsys):
    assert run(broken(tmp_path), json=tmp_path / "out.json", quiet=True) == 1
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["format"] == "ambiseg.check/1"
    assert len(said["problems"]) == 10
    assert said["problems"][0] == {
        "code": "E301",
        "file": "masks/Bob/00.png",
        "message": "expected 16×20 as its image 00.png, found 16×19",
        "fix": "export the mask at the size of its image",
        "severity": "error",
        "name": "size-differs",
    }
    statistics = said["statistics"]
    assert statistics["images"] == 12
    assert statistics["readers_per_image"] == {"1": 9, "2": 3}
    assert statistics["cases"][0]["iou"] is None
    assert [reader["name"] for reader in statistics["readers"]] == ["Ann", "Bob"]


def test_the_page_is_whole_and_stands_alone(tmp_path, capsys):
    root = broken(tmp_path)
    assert run(root, html=tmp_path / "page.html", quiet=True) == 1
    content = (tmp_path / "page.html").read_text()
    page = Reader(content)  # every element is closed
    assert not re.search(r"https?://|<script|<link", content)
    assert "prefers-color-scheme: dark" in content
    assert page.text.count("a <b> & c") == 3  # the title, the heading and the path
    assert len(re.findall(r"masks/Bob/\d\d\.png", page.text)) >= 9  # all of them, unlike in the terminal
    assert len(page.all("img")) > 10
    assert all(image["alt"] and str(image["src"]).startswith("data:image/png;base64,") for image in page.all("img"))
    assert not list(tmp_path.glob(".ambiseg*"))


def test_pictures_show_each_reader_and_where_they_differ():
    labels = np.stack([disc(16, 20, 4), disc(16, 20, 6), disc(16, 20, 6)])
    valid = np.ones((16, 20), bool)
    valid[:3, :3] = False
    case = Case.of(np.zeros((1, 16, 20), np.uint8), labels, name="a", readers=["Ann", "Bob", "Cid"], valid=valid)
    colours = reader_colours(case.readers)
    drawn = over(photograph(case.image), outlines([*case.labels], [*colours.values()]))
    shown = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in drawn.reshape(-1, 3)}
    assert shown == {"#000000", *colours.values()}  # where Bob and Cid coincide, both are seen
    heat = differences(case.image, case.table, case.regions, case.void)
    scale = heat.shape[0] // 16
    differs = (labels[0] != labels[1]).repeat(scale, 0).repeat(scale, 1)
    assert np.array_equal(heat.any(-1), differs | (heat == 128).all(-1))
    assert len(set(reader_colours([str(i) for i in range(30)]).values())) == 30


def test_every_problem_has_a_kind_that_the_guide_explains():
    guide = (REPOSITORY / "docs/folder.md").read_text()
    for code, kind in KINDS.items():
        assert re.fullmatch(r"[EWH]\d{3}", code)
        assert f"| `{code}` | {kind.name} |" in guide, code
    assert set(SEVERITIES) == {code[0] for code in KINDS}
    files = [path for room in ("data", "io") for path in (REPOSITORY / "src/ambiseg" / room).rglob("*.py")]
    source = "".join(path.read_text() for path in files)
    for code in KINDS:
        assert source.count(f'"{code}"') > 1, f"{code} is never reported"
    assert str(FileError(Problem("E201", "a.png", "expected x, found y"))) == "a.png: expected x, found y"


@pytest.mark.parametrize("name", ["dataset1_rat_smooth_muscle", "dataset2A_rabbit_smooth_muscle"])
def test_real_cells_of_ten_readers(tmp_path, name):
    """What the readme of the data says is found: two identical readers, two masks that mark another cell."""
    path = SHARED / "data/bu_bil" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"real data absent: set AMBISEG_SHARED to the folder that holds data/bu_bil/{path.name}")
    data = dict(np.load(path))
    for i, case in enumerate(data["name"]):
        save(tmp_path / f"images/{case}.png", data["image"][i])
        for m, reader in enumerate(data["rater"]):
            np.save(made(tmp_path / f"masks/{reader}/{case}.npy"), data["masks"][i, m] * 255)
    result = check(tmp_path, quiet=True)
    assert result.exit_code == 0
    assert result.statistics.iou == pytest.approx(0.76, abs=0.005)
    codes = {line[:4] for line in lines(result)}
    assert codes == ({"W404"} if "1" in name else {"W409"})
