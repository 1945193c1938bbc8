"""Data in layouts of their own: templates of paths, and the templates that are suggested."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.data import Folder
from ambiseg.data.sets.folder.paths import list_paths, suggest_paths
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.errors import FileError
from ambiseg.io.open import open_source
from tests.conftest import REPOSITORY

LAYOUTS = {  # as the sets are downloaded: files, and cases with their readers and parts
    "CHASE_DB1": (
        [f"Image_{i:02}{side}{end}" for i in (1, 2, 3) for side in "LR"
         for end in (".jpg", "_1stHO.png", "_2ndHO.png")],
        {f"Image_{i:02}{side}": (["1stHO", "2ndHO"], None) for i in (1, 2, 3) for side in "LR"},
    ),
    "STARE": (
        [f"{at}/im{i:04}{end}.ppm" for i in (1, 44, 324) for at, end in
         (("stare-images", ""), ("labels-ah", ".ah"), ("labels-vk", ".vk"))],
        {f"im{i:04}": (["ah", "vk"], None) for i in (1, 44, 324)},
    ),
    "QUBIQ": (
        [f"{part}/case{i:02}/{file}.nii.gz" for part, i in (("Training", 1), ("Training", 2), ("Validation", 3))
         for file in ("image", "task01_seg01", "task01_seg02", "task01_seg10")],
        {f"{part}/case{i:02}": (["01", "02", "10"], split)
         for part, i, split in (("Training", 1, "train"), ("Training", 2, "train"), ("Validation", 3, "val"))},
    ),
    "DRIVE": (
        [f"test/{file}" for i in (1, 2) for file in (f"images/{i:02}_test.tif", f"1st_manual/{i:02}_manual1.gif",
         f"2nd_manual/{i:02}_manual2.gif", f"mask/{i:02}_test_mask.gif")]
        + ["training/images/21_training.tif", "training/1st_manual/21_manual1.gif"],
        {"test/01": (["1st", "2nd"], "test"), "test/02": (["1st", "2nd"], "test"), "training/21": (["1st"], "train")},
    ),
}  # fmt: skip


def touched(root: Path, files: list[str]) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def documented(layout: str) -> dict[str, str]:
    """The paths of docs/folder.md."""
    page = (REPOSITORY / "docs" / "folder.md").read_text(encoding="utf-8")
    row = re.search(rf'^\| {layout} \| `{{"image_path": "(.+?)", "mask_path": "(.+?)"}}` \|$', page, re.MULTILINE)
    assert row is not None
    return {"image_path": row[1], "mask_path": row[2]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documented_paths_find_all(layout: str, tmp_path: Path) -> None:
    files, expected = LAYOUTS[layout]
    listing = list_paths(touched(tmp_path, files), FolderSettings.model_validate(documented(layout)))
    assert {e.name: ([m.reader for m in e.masks], e.split) for e in listing.entries} == expected
    assert not [problem for problem in listing.problems if problem.severity != "hint"]


@pytest.mark.parametrize("layout", ["CHASE_DB1", "STARE", "QUBIQ"])
def test_paths_are_suggested(layout: str, tmp_path: Path) -> None:
    touched(tmp_path, LAYOUTS[layout][0])
    assert suggest_paths(tmp_path) == documented(layout)
    with pytest.raises(FileError) as refused:
        Folder(tmp_path)
    assert documented(layout)["mask_path"] in refused.value.problem.remedy


@pytest.mark.parametrize(
    "files", [["a.png"], ["a.png", "b.png", "c.png"], ["x/a.png", "y/b.png"], ["notes.txt", "a_1.png", "b_1.png"]]
)
def test_nothing_is_suggested_where_nothing_fits(files: list[str], tmp_path: Path) -> None:
    assert suggest_paths(touched(tmp_path, files)) is None


def test_a_reader_may_have_separators_in_the_name(tmp_path: Path) -> None:
    """Of all ways to divide a name, the one that fits an image counts."""
    files = ["a_1.png", "a_1_dr_bob.png", "a_1_eve.png", "b.png", "b_dr_bob.png"]
    settings = FolderSettings(image_path="{name}.png", mask_path="{name}_{reader}.png")
    listing = list_paths(touched(tmp_path, files), settings)
    found = {entry.name: [mask.reader for mask in entry.masks] for entry in listing.entries}
    assert found == {"a_1": ["dr_bob", "eve"], "b": ["dr_bob"]}


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    files = ["a/image.png", "a/ann.png", "b/image.png", "c/ann.png", "a/scan.webp"]
    settings = FolderSettings(image_path="{name}/image.png", mask_path="{name}/{reader}.png")
    listing = list_paths(touched(tmp_path, files), settings)
    assert [(p.code, Path(p.file).relative_to(tmp_path).as_posix()) for p in listing.problems if p.code != "H107"] == [
        ("E101", "b/image.png"),
        ("W102", "c/ann.png"),
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"image_path": "{name}.png"}, "mask_path: expected it together with image_path"),
        ({"image_path": "image.png", "mask_path": "{name}.png"}, "image_path: expected a path with {name}"),
        ({"image_path": "{name}.png", "mask_path": "{name}_{expert}.png"}, "mask_path: expected a path with {name}"),
        ({"image_path": "{name}_{reader}.png", "mask_path": "{name}.png"}, "image_path: expected a path with {name}"),
    ],
)
def test_a_template_that_cannot_be_is_refused(said: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "ambiseg.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=re.escape(message)):
        Folder(tmp_path)


def test_cases_are_read(tmp_path: Path) -> None:
    """From a JPEG and two masks in formats of old data sets, declared in ambiseg.json."""
    Image.fromarray(np.full((6, 8, 3), 90, np.uint8)).save(tmp_path / "1L.jpg")
    Image.fromarray(np.eye(6, 8, dtype=np.uint8) * 255).save(tmp_path / "1L_a.gif")
    Image.fromarray(np.zeros((6, 8), np.uint8)).save(tmp_path / "1L_b.gif")
    (tmp_path / "ambiseg.json").write_text('{"image_path": "{name}.jpg", "mask_path": "{name}_{reader}.gif"}')
    case = Folder(tmp_path, labels="binary")[0]
    assert (case.name, case.readers) == ("1L", ("a", "b"))
    assert np.array_equal(case.labels, [np.eye(6, 8), np.zeros((6, 8))])


def test_a_film_is_no_picture(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (0, 90, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(FileError, match="expected one picture, found a film of several frames"):
        open_source(tmp_path / "a.gif")
