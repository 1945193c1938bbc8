"""Patients from the names of files: schemes of real data sets, and what is assumed is said wherever it matters."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.data.config import DataConfig
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.persons import find_persons
from ambiseg.data.splits import LeakageError, Rule, Split, check_leakage

SIDES = "are taken as the two sides of one patient"
NUMBER = "names that differ in their last number"


def grouped(names) -> dict[str, list[str]]:
    found, groups = find_persons(names), {}
    for name in names:
        fits = None if found is None else re.match(found.pattern, name)
        patient = fits[1] if fits else name
        groups.setdefault(patient, []).append(name)
    return groups


def product(template: str, *values) -> list[str]:
    names = [template]
    for choices in values:
        names = [name.replace("*", str(choice), 1) for name in names for choice in choices]
    return names


@pytest.mark.parametrize(
    ("names", "patients", "text"),
    [
        (product("Image_*L", ["01", "02", "03"]) + product("Image_*R", ["01", "02", "03"]), 3, "L and R"),  # CHASE_DB1
        (
            product("Image_*", ["01L", "01R", "02L", "02R", "03L", "03R", "04L", "04R", "05L", "05R", "06"]),
            6,
            "L and R",
        ),
        (product("im*_*", ["0001", "0002", "0003"], ["left", "right"]), 3, "left and right"),
        (product("*_*", range(10, 15), ["LEFT", "RIGHT"]), 5, "LEFT and RIGHT"),
        (product("*-*-*", "NG", range(1, 5), "LR"), 8, "L and R"),  # RIM-ONE
        ([*product("P*_OD", range(6)), *product("P*_OS", range(4, 9))], 9, "OD and OS"),
        (product("patient*_slice*", ["003", "004", "010"], range(5)), 3, NUMBER),
        (product("P*_t*", range(8, 12), (1, 2)), 4, NUMBER),
        (product("case_*_slice_*", ["01", "02", "03"], ["001", "002"]), 3, NUMBER),
        (product("LIDC-IDRI-*_slice*", ["0001", "0002", "0003"], (7, 8)), 3, NUMBER),
        (product("sub-*_ses-*_run-*", range(4), (1, 2), (1, 2)), 4, NUMBER),
        (product("P*_*_v*", range(4), ["OD", "OS"], (1, 2)), 4, SIDES),
        (product("p*s*", ["003", "004", "005"], (11, 12)), 3, NUMBER),
        (product("*_*", range(6), range(3)), 6, NUMBER),
        (product("site*_*_slice*", range(3), range(6), range(2)), 18, NUMBER),  # not the sites
        (product("images/p*/*", range(4), range(3)), 4, NUMBER),
        (product("**", ["01", "02", "03", "04", "05"], "ab"), 5, "last letter"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_names_that_tell_a_patient(names, patients, text):
    found = find_persons(names)
    assert found is not None
    assert text in found.text
    groups = grouped(names)
    assert len(groups) == patients
    assert find_persons(names[::-1]) == found


@pytest.mark.parametrize(
    "names",
    [
        product("*_test", ["01", "02", "03", "04"]),  # DRIVE
        product("training/*_training", range(21, 41)) + product("test/*_test", range(1, 21)),
        product("im*", ["0001", "0002", "0044", "0077"]),  # STARE
        product("case*", ["01", "02", "03", "04"]),  # QUBIQ
        product("case_*", ["01", "02", "03", "04"]),
        product("ISIC_*", ["0000000", "0000001", "0024306"]),
        product("ISIC*_*", range(2016, 2020), range(5)),
        product("P*", range(10, 36)),  # BU-BIL
        product("*_*", ["01", "02", "03", "04", "05"], ["h", "dr", "g"]),  # HRF: kinds, not images, of a number
        product("* (*)", ["benign", "malignant", "normal"], range(1, 9)),  # BUSI
        product("*_*", ["benign", "malignant", "normal"], range(9)),
        product("set*_*", range(6), range(9)),
        product("center*_patient*", range(6), range(9)),
        product("IMG_2019031*_*", range(8), range(3)),
        product("BraTS19_2013_*_1", range(9)),
        product("TCGA-*-5442-01Z-00-DX1", range(18, 29)),
        product("*_*", range(3), range(9)),  # three of anything are too few to conclude from a number
        product("lung_*_*", "LR", range(9)),
        ["control", "normal", "tumor", "color", "all", "star"],
        product("LIDC-IDRI-*", ["0001", "0002", "0003"]),
        product("shape-*", range(20)),
        ["a"],
        [],
    ],
    ids=lambda names: names[0] if names else "none",
)
def test_names_that_tell_nobody(names):
    assert find_persons(names) is None


tokens = st.sampled_from(["P", "1", "2", "03", "_", "-", "L", "R", "left", "slice", "img", "a", "b", "/", "x"])
some_names = st.lists(st.lists(tokens, min_size=1, max_size=6).map("".join), min_size=1, max_size=40, unique=True)


@given(some_names, st.randoms(use_true_random=False))
def test_any_names_leave_enough_patients_in_any_order(names, rng):
    found = find_persons(names)
    shuffled = rng.sample(names, len(names))
    assert find_persons(shuffled) == found
    groups = grouped(names)
    assert found is None or 3 <= len(groups) < len(names)
    assert sum(map(len, groups.values())) == len(names)
    if len(groups) >= 3:
        assert set(Rule({"train": 0.7, "val": 0.1, "test": 0.2}, ranked=True).divide(groups).values()) == {
            "train",
            "val",
            "test",
        }


# -- in a folder -----------------------------------------------------------------------------------------------


def write(root, names, settings=None):
    noise = np.random.default_rng(0)
    for name in names:
        mask = np.zeros((16, 16), np.uint8)
        mask[4:9, 4:9] = 255
        for part, pixels in (("images", noise.integers(0, 256, (16, 16), np.uint8)), ("masks/Ann", mask)):
            path = root / part / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    if settings:
        (root / "ambiseg.json").write_text(json.dumps(settings))
    return root


EYES = product("Image_**", [f"{i:02}" for i in range(1, 11)], "LR")


def test_eyes_of_one_person_are_not_divided_and_that_is_said(tmp_path, capsys):
    root = write(tmp_path / "eyes", EYES)
    cases = Folder(root)
    assert cases.patients[:3] == ["Image_01", "Image_01", "Image_02"]
    split = Split.by_hash(cases)
    assert f"names that end in L and R {SIDES}" in str(split.rule)
    split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json") == split
    assert all(name[:-1] + other in names for names in split.parts.values() for name in names for other in "LR")
    assert main(["data", "check", str(root)]) == 0
    text = capsys.readouterr().out
    assert f"20 images of 10 patients: names that end in L and R {SIDES}" in text
    assert '".+" keeps each image on its own' in text
    assert Folder(root, patient=".+").patients == EYES
    assert Folder(root, patient=".+").state() != cases.state()


def test_training_says_what_it_assumes_and_the_cache_knows_it(tmp_path, capsys):
    pytest.importorskip("lightning")
    from ambiseg.data.module import DataModule
    from ambiseg.training import _assumed

    root = write(tmp_path / "eyes", EYES)
    for _ in range(2):  # decoded, then from the cache
        module = DataModule(DataConfig(name="folder", root=str(root), cache=str(tmp_path / "cache")))
        module.setup()
        assert module.split.rule.assumed.endswith(SIDES)
        assert _assumed(module.cases).startswith("20 images of 10 patients: names that end in L and R")


def test_a_split_from_before_fails_with_the_setting(tmp_path):
    root = write(tmp_path / "eyes", EYES)
    before = Split.by_hash(Folder(root, patient=".+"))
    now = Folder(root)
    message = r'two sides of one patient, which the split was made without: "patient": "\.\+" in ambiseg.json keeps'
    with pytest.raises(LeakageError, match=message):
        check_leakage(now, before)
    for names in (None, [EYES[0]]):
        with pytest.raises(DataError, match=message):
            before.verify(now, names)
    with pytest.raises(DataError, match=message):
        before.extended(now)
    before.verify(Folder(root, patient=".+"))
    with pytest.raises(DataError, match="the split was made with another setting of patient: names that end in L"):
        Split.by_hash(now).verify(Folder(root, patient=".+"))


def test_folders_are_patients_where_there_are_several(tmp_path):
    several = Folder(write(tmp_path / "several", ["p1/a", "p1/b", "p2/a", "p3/a"]))
    assert several.patients == ["p1", "p1", "p2", "p3"]
    assert several.patients_assumed == "each folder of images is taken as one patient"
    one = Folder(write(tmp_path / "one", ["all/im1", "all/im2", "all/im3"]))
    assert one.patients == ["all/im1", "all/im2", "all/im3"]
    assert one.patients_assumed == ""


def test_a_manifest_that_names_patients_is_believed(tmp_path):
    root = write(tmp_path, EYES)
    rows = [{"image": f"images/{name}.png", "masks": [f"masks/Ann/{name}.png"]} for name in EYES]
    (root / "manifest.json").write_text(json.dumps(rows))
    assert len(set(Folder(root).patients)) == 10
    (root / "manifest.json").write_text(json.dumps([{**row, "patient": str(i)} for i, row in enumerate(rows)]))
    assert len(set(Folder(root).patients)) == 20
