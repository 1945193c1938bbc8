"""Manifests and settings: what their owners may say, and where they are told that they may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ambiseg.data.check.check import check
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.settings import FolderSettings
from tests.files import disc, made, make, picture, refusal, save


def settings(root: Path, **said) -> None:
    (root / "ambiseg.json").write_text(json.dumps(said))


# -- manifests ---------------------------------------------------------------------------------------------------------


def test_csv_and_json_say_the_same(tmp_path):
    make(tmp_path / "data files")
    rows = ["image,mask,reader,weight,patient,split"]
    cases = []
    for name, patient, split in (("a", "p1", "train"), ("b", "p1", "train"), ("c", "p2", "test")):
        image = f"data files/images/{name}.png"
        masks = {reader: f"data files/masks/{reader}/{name}.png" for reader in ("Ann", "Bob")}
        rows += [f'"{image}","{masks[r]}",{r},{w},{patient},{split}' for r, w in (("Ann", 3), ("Bob", 1))]
        weights = {"Ann": 3, "Bob": 1}
        cases.append({"image": image, "masks": masks, "weights": weights, "patient": patient, "split": split})
    (tmp_path / "manifest.csv").write_text("\ufeff" + "\r\n".join(rows))
    (tmp_path / "other.json").write_text(json.dumps(cases))
    one, other = Folder(tmp_path), Folder(tmp_path / "other.json")
    assert one.names == [f"data files/images/{n}" for n in "abc"]
    assert one.patients == ["p1", "p1", "p2"]
    assert one.declared == ["train", "train", "test"]
    assert one[0].mass.tolist() == [0.75, 0.25]
    assert [one.digest(i) for i in range(3)] == [other.digest(i) for i in range(3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "manifest.csv: expected a first row of image, mask"),
        ("image,mask,raeder\n", "found 'raeder'; did you mean reader? Known: image, mask, reader"),
        ("image,reader\n", "manifest.csv: expected one column 'mask', found image, reader"),
        ("image,mask\nimages/a.png\n", "manifest.csv, row 2: expected 2 cells, found 1"),
        ("image,mask\n,masks/Ann/a.png\n", "manifest.csv, row 2: expected the path of an image, found none"),
        ("image,mask\nimages/z.png,masks/Ann/a.png\n", "images/z.png: expected the file that manifest.csv names"),
        (
            "image,mask\nimages/a.png,masks/z.png\n",
            "masks/z.png: expected the mask of reader_1 that manifest.csv names",
        ),
        ("image,mask\nimages/a.png,\n", "images/a.png: expected at least one mask in manifest.csv, found none"),
        ("image,mask,weight\nimages/a.png,masks/Ann/a.png,x\n", "row 2: expected a number as weight, found 'x'"),
        ("image,mask,weight\nimages/a.png,masks/Ann/a.png,-1\n", "row 2: expected a weight of 0 or more, found -1"),
        ("image,mask,weight\nimages/a.png,masks/Ann/a.png,0\n", "images/a.png: expected a weight above 0"),
        ("image,mask,split\nimages/a.png,masks/Ann/a.png,tset\n", "expected split train, val or test, found 'tset'"),
        (
            "image,mask,reader\nimages/a.png,masks/Ann/a.png,A\nimages/a.png,masks/Bob/a.png,A\n",
            "row 3: expected one mask of reader 'A' for images/a.png, found a second",
        ),
        (
            "image,mask,patient\nimages/a.png,masks/Ann/a.png,1\nimages/a.png,masks/Bob/a.png,2\n",
            "row 3: expected one patient per image, found '1' and '2'",
        ),
        (
            "image,mask,split\nimages/a.png,masks/Ann/a.png,train\nimages/b.png,masks/Ann/b.png,\n",
            "images/b.png: expected a split for all cases or none, found 1 case without",
        ),
    ],
)
def test_manifests_that_are_wrong(tmp_path, text, message):
    make(tmp_path)
    (tmp_path / "manifest.csv").write_text(text)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "manifest.json: expected JSON, found"),
        ("{}", "expected a list with an object for each image"),
        ('[{"image": "images/a.png", "mask": "x"}]', "image 1: expected known keys, found 'mask'; did you mean masks?"),
        ('[{"image": "images/a.png"}]', "image 1: expected masks, and weights if any, as two lists or two objects"),
        (
            '[{"image": "images/a.png", "masks": ["masks/Ann/a.png"], "weights": [1, 2]}]',
            "image 1: expected a mask for each weight, found none for 'reader_2'",
        ),
    ],
)
def test_json_manifests_that_are_wrong(tmp_path, text, message):
    make(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    assert message in refusal(tmp_path)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_arguments_win_over_settings_and_both_over_the_file(tmp_path):
    settings(make(tmp_path), title="from the file", classes=["nothing", "disc"], void=3)
    cases = Folder(tmp_path, void=4, settings=FolderSettings(void=5, title="from settings"))
    assert (cases.title, cases.classes, cases.settings.void) == ("from settings", ("nothing", "disc"), 4)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"clases": 2}, "clases: no such setting; did you mean classes?"),
        ({"classes": 1}, "classes: expected names of two classes or more, or their number, found 1"),
        ({"classes": ["a", "a"]}, "classes: expected different names"),
        ({"labels": "colour"}, "labels: expected auto, ids, binary, a table or null, found 'colour'"),
        ({"labels": {"x": 1}}, "labels: expected values of a mask"),
        ({"labels": {"1": "empty"}}, "labels: expected a class id below 65536 or \"void\" for each, found 'empty'"),
        ({"colours": {"#ff0000": 2}, "classes": 2}, "colours: expected a class id below 2"),
        ({"colours": {"red": 1}}, "colours: expected six hexadecimal digits"),
        ({"colours": {"#ff0000": 1}, "labels": "ids"}, "colours: expected either labels or colours, found both"),
        ({"void": "255"}, "void: expected a whole number or null, found '255'"),
        ({"patient": "("}, "patient: expected a regular expression, found '('"),
        ({"mask_name": "seg"}, "mask_name: expected {name} in it once"),
        ({"intensity": {"lo": 1}}, "intensity.lo: no such setting; did you mean intensity.low?"),
        ({"intensity": {"low": 2, "high": 1}}, "intensity.low: expected low < high, found 2 and 1"),
        ({"channels": 2}, "channels: expected 1, 3 or null, found 2"),
        ([], "expected one object of settings, found a list"),
    ],
)
def test_settings_that_are_wrong_are_named_with_their_file(tmp_path, said, message):
    (make(tmp_path) / "ambiseg.json").write_text(json.dumps(said))
    assert f"{tmp_path}/ambiseg.json: " in refusal(tmp_path)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("template", ["{name}_seg", "seg-{name}", "{name}_{reader}", "{reader}/{name}"])
def test_names_of_masks_are_described_by_a_template(tmp_path, template):
    make(tmp_path)
    for reader in ("Ann", "Bob"):
        for path in sorted((tmp_path / "masks" / reader).glob("*.png")):
            name = template.replace("{name}", path.stem).replace("{reader}", reader)
            path.rename(made(path.parent / f"{name}.png"))
    assert "expected masks named as the images" in refusal(tmp_path)
    assert [case.readers for case in Folder(tmp_path, mask_name=template)] == [("Ann", "Bob")] * 3


def test_readers_told_apart_by_file_names_alone(tmp_path):
    for name in ("img_1", "img_2"):
        save(tmp_path / f"images/{name}.png", picture())
        for reader in ("A", "B") if name == "img_1" else ("B",):
            save(tmp_path / f"masks/{name}_{reader}.png", disc(16, 20))
    cases = Folder(tmp_path, mask_name="{name}_{reader}")
    assert [case.readers for case in cases] == [("A", "B"), ("B",)]


def test_readers_who_lack_masks_are_named(tmp_path):
    """They may all keep their masks in one folder, and lack the same image."""
    make(tmp_path, readers=("Ann", "Bob", "Cid"))
    rows = [f"images/{n}.png,masks/{r}/{n}.png,{r}x" for n in "abc" for r in ("Ann", "Bob", "Cid")]
    (tmp_path / "manifest.csv").write_text("\n".join(["image,mask,reader", *rows[:-2]]))
    found = [p.line for p in check(tmp_path).problems if p.code == "H108"]
    assert found == [f"reader {r}x: expected a mask for each of 3 images, found none for c.png" for r in ("Bob", "Cid")]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"image": ["a.png"], "masks": ["b.png"]}, "expected the path of the image as text, found a list"),
        ({"image": "a.png", "masks": ["b.png", 5]}, "expected the path of the mask of reader_2 as text, found 5"),
        ({"image": "a.png", "masks": {"Ann": None}}, "expected the path of the mask of Ann as text, found none"),
        ({"image": "a.png", "masks": ["b.png"] * 2, "weights": [1]}, "expected a weight for each of 2 masks, found 1"),
    ],
)
def test_json_with_other_things_than_paths(tmp_path, case, message):
    (tmp_path / "manifest.json").write_text(json.dumps([case]))
    assert refusal(tmp_path) == f"{tmp_path / 'manifest.json'}, image 1: {message}"


def test_json_that_is_no_list(tmp_path):
    (tmp_path / "manifest.json").write_text('{"cases": []}')
    assert refusal(tmp_path).endswith(
        "expected a list with an object for each image, found an object with the keys cases"
    )
