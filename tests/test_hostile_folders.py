"""Folders, settings and manifests of any content: a data set, or one line."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ambiseg._util import patterns, walking
from ambiseg._util.errors import DataError
from ambiseg._util.patterns import check_pattern, first_groups
from ambiseg._util.walking import walk
from ambiseg.data.check.check import check
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.manifest import COLUMNS, KEYS
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.prediction.inputs import find_inputs
from tests.mutations import survives

TEXTS = [
    "", " ", "a.png", "images/a.png", "masks/Ann/a.png", "../a.png", "/etc/passwd", "/dev/zero", "a\nb", "x" * 300,
    "x/" * 3000, "[/b]", "\x1b[2J", "train", "ids", "auto", "HW", "(a+)+$", "*" * 40, "C:\\a", "{name}",
    "{name}_{reader}", "images/{name}.png", "masks/{reader}/{name}.png", "#ff0000", "void", "(",
]  # fmt: skip
NUMBERS = st.integers(-3, 300) | st.sampled_from([2**40, -1, 10**18, 0.5, 1e300])
ODD = st.none() | st.booleans() | NUMBERS | st.sampled_from(TEXTS) | st.text(max_size=6)
ANY = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def make(root: Path, names: tuple[str, ...] = ("a", "b")) -> Path:
    for part in ("images", "masks/Ann", "masks/Bob"):
        (root / part).mkdir(parents=True)
        for name in names:
            Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(root / part / f"{name}.png")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data"))


def look(root: Path) -> None:
    """Open a folder as every command does; anything but a DataError is raised."""
    for read in (lambda: [case.labels for case in Folder(root, quiet=True)], lambda: check(root, quiet=True).as_dict()):
        with suppress(DataError):
            read()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*FolderSettings.model_fields, "clases", "zzz", "", "\n"]), ANY, max_size=3))
def test_any_settings(root, said):
    (root / "ambiseg.json").write_text(json.dumps(said))
    try:
        look(root)
    finally:
        (root / "ambiseg.json").unlink()


ROW = st.fixed_dictionaries({}, optional={key: ANY for key in (*KEYS, "mask", "", "qqqq")})
GOOD = {"image": "images/a.png", "masks": {"Ann": "masks/Ann/a.png"}}


@settings(max_examples=60, deadline=None)
@given(ANY | st.lists(ROW | ROW.map(lambda row: {**GOOD, **row}) | ANY, max_size=3))
def test_any_manifest_of_json(root, said):
    (root / "manifest.json").write_text(json.dumps(said))
    try:
        look(root)
    finally:
        (root / "manifest.json").unlink()


CELL = st.one_of(
    ODD.map(str), st.sampled_from(["images/a.png", "masks/Ann/a.png", '"', "\0", "nan", "inf", "1e999", "-1"])
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*COLUMNS, "imgae", "qqqq", "", " "]) | st.text(max_size=3), max_size=7),
    st.lists(st.lists(CELL, max_size=7), max_size=3),
    st.sampled_from([",", ";", "\t"]),
)
def test_any_manifest_of_csv(root, columns, rows, mark):
    text = "\n".join(mark.join(row) for row in [columns, *rows])
    (root / "manifest.csv").write_text(text, "utf-8", "surrogatepass")
    try:
        look(root)
    finally:
        (root / "manifest.csv").unlink()


def test_damaged_settings_and_manifests(root):
    contents: dict[str, Any] = {
        "ambiseg.json": {"classes": ["a", "b"], "labels": {"0": 0, "255": 1}, "patient": "(.)", "evaluated": [1]},
        "manifest.json": [
            {
                "image": f"images/{name}.png",
                "masks": {"Ann": f"masks/Ann/{name}.png"},
                "weights": {"Ann": 2},
                "split": "val",
            }
            for name in "ab"
        ],
    }
    for name, content in contents.items():
        (root / name).write_text(json.dumps(content))
        try:
            survives(root / name, lambda: list(Folder(root, quiet=True)), 60)
        finally:
            (root / name).unlink()


def test_a_name_is_not_endless(root):
    (root / "manifest.json").write_text(json.dumps([{**GOOD, "name": "n" * 1000}]))
    try:
        with pytest.raises(DataError, match="expected a name of at most 500 characters, found"):
            Folder(root)
    finally:
        (root / "manifest.json").unlink()


# -- regular expressions ----------------------------------------------------------------------------------------------


def test_an_expression_that_takes_years_is_given_up(root, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    for pattern in ("(a+)+$", "(a|aa)+$", "(a*)*b", "a*a*a*a*a*a*a*a*a*b"):
        started = time.monotonic()
        with pytest.raises(DataError, match="expected a regular expression that is found within 1 seconds"):
            first_groups(pattern, ["a" * 200 + "!"])
        assert time.monotonic() - started < 20
    (root / "ambiseg.json").write_text(json.dumps({"patient": "(a|b|ab)*c"}))
    try:
        with pytest.raises(DataError):
            Folder(root)
    finally:
        (root / "ambiseg.json").unlink()


@given(
    st.text(alphabet="ab1_/", max_size=12), st.sampled_from([r"(\d+)", "a+b*", "(a|b)+", "^(?P<x>a)?b", r"(a)\1", "a"])
)
@settings(max_examples=20, deadline=None)
def test_expressions_find_the_same_in_any_process(text, pattern):
    found = re.search(pattern, text)
    expected = found and (found[1] if found.re.groups and found[1] else found[0])
    assert first_groups(pattern, [text]) == [expected]


def test_what_is_no_expression():
    for pattern in ("(", "a{99999999999}", "(" * 900, "x" * 1001, "[", "(?P<a"):
        with pytest.raises(ValueError, match="expected a regular expression"):
            check_pattern(pattern)
    check_pattern("[[a]")  # of which Python warns


def test_templates_of_many_parts_are_refused():
    with pytest.raises(ValueError, match="expected at most three"):
        FolderSettings(image_path="*a*a*a*a{name}", mask_path="{name}")


# -- links, pipes, many files ------------------------------------------------------------------------------------------


def test_links_lead_round_in_no_circles(tmp_path):
    for a in range(12):
        (tmp_path / f"images/{a}").mkdir(parents=True)
    for a in range(12):
        for b in range(12):
            (tmp_path / f"images/{a}/to{b}").symlink_to(tmp_path / f"images/{b}")
        (tmp_path / f"images/{a}/up").symlink_to(tmp_path)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / f"images/{a}/x.png")
    assert len(list(walk(tmp_path))) == 14
    assert len(find_inputs([tmp_path / "images"])) == 12
    (tmp_path / "masks").symlink_to(tmp_path / "images")
    look(tmp_path)


def test_more_files_than_a_data_set_has(tmp_path, monkeypatch):
    make(tmp_path, tuple(map(str, range(20))))
    monkeypatch.setattr(walking, "MOST", 10)
    with pytest.raises(DataError, match="expected a folder of at most 10 files, found more"):
        list(walk(tmp_path, most=10))


def test_pipes_devices_and_names_that_are_no_text(tmp_path):
    make(tmp_path)
    os.mkfifo(tmp_path / "images/pipe.png")
    (tmp_path / "masks/Ann/pipe.png").symlink_to("/dev/zero")
    (tmp_path / "images/loop.png").symlink_to(tmp_path / "images/loop.png")
    for part in ("images", "masks/Ann"):
        Path(os.fsdecode(os.fsencode(tmp_path / part) + b"/\xff.png")).touch()
    found = {problem.message for problem in check(tmp_path, quiet=True).problems}
    assert "expected a name in UTF-8, found other bytes" in found
    with pytest.raises(DataError, match="expected a name in UTF-8"):
        Folder(tmp_path)
    for name in ("ambiseg.json", "manifest.json", "manifest.csv"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError):
            Folder(tmp_path)
        (tmp_path / name).unlink()
