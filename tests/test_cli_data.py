"""``ambiseg data …`` as it is typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.data.case import Case
from ambiseg.data.export import export
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.splits import Split
from ambiseg.data.store import Store
from tests.cases import Listed, random_cases


def failed(capsys, *arguments: str) -> str:
    assert main(["data", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1, error
    return error


def test_list_names_every_data_set(capsys):
    assert main(["data", "list"]) == 0
    text = capsys.readouterr().out
    for name in ("nodules", "shapes", "folder", "arrays", "store"):
        assert name in text


def test_split_freezes_a_split(tmp_path, capsys):
    out = tmp_path / "my split.json"
    arguments = ["split", "shapes", "--set", "count=100", "--set", "size=16", "--out", str(out)]
    assert main(["data", *arguments, "--fractions", "train=0.5", "test=0.5", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    split = Split.load(out)
    assert split.parts == Split.by_hash(Shapes(count=100, size=16), {"train": 0.5, "test": 0.5}, 3).parts
    assert str(len(split.parts["train"])) in text
    assert split.fingerprint in text
    extended = tmp_path / "more.json"
    arguments = ["split", "shapes", "--set", "count=120", "--set", "size=16", "--out", str(extended)]
    assert main(["data", *arguments, "--extend", str(out), "--quiet"]) == 0
    assert set(split.parts["train"]) <= set(Split.load(extended).parts["train"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["split", "nowhere", "--out", "x"], "nowhere: expected nodules, shapes or an existing folder, found neither"),
        (["split", "shapes", "--out", "x", "--fractions", "train"], "--fractions: expected PART=SHARE"),
        (["split", "shapes", "--out", "x", "--set", "count"], "--set: expected KEY=VALUE"),
        (["split", "shapes", "--out", "x", "--set", "cuont=3"], "data.options: expected some of"),
        (["split", "shapes", "--out", "x", "--declared"], "expected every case to have a declared split"),
        (["export", "shapes", "--out", "/proc/none/x"], "the folder /proc/none does not exist"),
        (["export", "shapes", "--out", ".", "--count", "3"], "expected a folder that does not exist yet"),
        (["check", "nowhere at all"], "nowhere at all: expected a folder or a manifest"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in failed(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", "split", "shapes", "--out", "x", "--sed", "3"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --sed 3" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["shapes", "weighted", "colour", "int16", "void"])
def test_an_exported_data_set_reads_back_the_same(tmp_path, kind, capsys):
    sources = {
        "shapes": Shapes(count=3, size=16),
        "weighted": Shapes(count=3, size=16, readers=None),
        "colour": Shapes(count=3, size=16, classes=3),
        "int16": random_cases(4, (7, 9), None),
        "void": random_cases(3, (7, 9), 2, void=True),
    }
    sources["int16"].units = "HU"
    source = sources[kind]
    count = export(source, tmp_path / "out")
    back = Folder(tmp_path / "out")
    assert (count, len(back)) == (len(source), len(source))
    assert (back.title, back.classes, back.evaluated) == (source.title, source.classes, source.evaluated)
    assert (back.channels, back.intensity) == (source.channels, source.intensity)
    assert not source.units or back.units == source.units
    numbers = {name: i for i, name in enumerate(back.names)}
    for case in source:
        found = back[numbers[case.name]]
        assert np.array_equal(found.image, case.image)
        assert found.image.dtype == case.image.dtype
        order = [found.readers.index(reader) for reader in case.readers]
        valid = np.ones(case.size, bool) if case.valid is None else case.valid
        assert np.array_equal(found.labels[order][:, valid], case.labels[:, valid])
        assert np.array_equal(np.ones(case.size, bool) if found.valid is None else found.valid, valid)
        np.testing.assert_allclose(found.mass[order], case.mass, rtol=1e-6)
        assert found.patient == case.patient
    assert main(["data", "check", str(tmp_path / "out"), "--quiet"]) == 0
    capsys.readouterr()


def test_export_command_and_check_read_each_other(tmp_path, capsys):
    out = tmp_path / "a folder"
    assert main(["data", "export", "shapes", "--set", "size=32", "--out", str(out), "--count", "6"]) == 0
    assert "6 cases" in capsys.readouterr().out
    page, numbers = tmp_path / "check.html", tmp_path / "check.json"
    assert main(["data", "check", str(out), "--html", str(page), "--json", str(numbers)]) == 0
    text = capsys.readouterr().out
    assert "6" in text
    assert page.read_text().lower().startswith("<!doctype html")
    assert isinstance(json.loads(numbers.read_text()), dict)


def test_a_failed_export_leaves_nothing(tmp_path):
    cases = Listed([Case.of(np.zeros((1, 4, 4), np.uint8), np.full((1, 4, 4), 300), name="x")], 301)
    with pytest.raises(DataError, match="x: expected class ids below 255 to write as PNG, found 300"):
        export(cases, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_a_data_set_for_every_command(tmp_path, capsys):
    Store.build(Shapes(count=40, size=16), tmp_path / "store")
    assert main(["data", "split", str(tmp_path / "store"), "--out", str(tmp_path / "s.json"), "--quiet"]) == 0
    assert sum(map(len, Split.load(tmp_path / "s.json").parts.values())) == 40


def test_check_tells_by_its_exit_code(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks" / "ann").mkdir(parents=True)
    for name, width in (("a", 5), ("b", 4)):
        Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(tmp_path / "images" / f"{name}.png")
        Image.fromarray(np.eye(4, width, dtype=np.uint8)).save(tmp_path / "masks" / "ann" / f"{name}.png")
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "masks/ann/a.png" in capsys.readouterr().out


def test_the_command_is_installed_and_pipes_end_quietly(tmp_path):
    command = [sys.executable, "-m", "ambiseg", "data", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def test_names_that_files_cannot_have_stay_inside_and_apart(tmp_path):
    """A manifest may call its cases and readers anything."""
    names, readers = ("a?", "a*", "../../out", "/tmp/out", "A_"), ("x:y", "x;y")
    image, masks = np.zeros((1, 4, 4), np.uint8), np.arange(2 * 16).reshape(2, 4, 4) % 2
    made = [Case.of(image + i, masks, name=name, readers=readers) for i, name in enumerate(names)]
    (tmp_path / "in").mkdir()
    export(Listed(made), tmp_path / "in" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    again = Folder(tmp_path / "in" / "out")
    assert again.names == list(names)
    assert [case.image.max() for case in again] == [0, 1, 2, 3, 4]
    assert again[0].readers == readers


def test_a_disk_that_is_full_is_named_by_what_was_asked_for(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left") as caught:
        export(Shapes(count=2, size=16), tmp_path / "shapes")
    assert caught.value.filename == str(tmp_path / "shapes")
    assert list(tmp_path.iterdir()) == []


def test_json_can_be_printed(tmp_path, capsys):
    main(["data", "export", "shapes", "--out", str(tmp_path / "s"), "--count", "3", "--quiet"])
    assert main(["data", "check", str(tmp_path / "s"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["statistics"]["images"] == 3
    (tmp_path / "empty").mkdir()
    assert main(["data", "check", str(tmp_path / "empty"), "--json", "-"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "E002"


def test_the_list_is_for_people(capsys):
    main(["data", "list"])
    assert not set(":`*") & set(capsys.readouterr().out.replace("files:", ""))


def test_an_empty_part_comes_with_a_seed_that_fills_it(tmp_path, capsys):
    arguments = ["split", "shapes", "--set", "count=120", "--set", "size=16", "--out", str(tmp_path / "s.json")]
    arguments += ["--fractions", "train=0.97", "val=0.01", "test=0.02"]
    found = re.search(r"--seed (\d+) fills all parts", failed(capsys, *arguments))
    assert found
    assert main(["data", *arguments, "--seed", found[1], "--quiet"]) == 0
    assert "expected at least 3 patients" in failed(capsys, *arguments[:3], "count=4", *arguments[4:])


def test_the_example_of_the_readme_can_be_split_and_trained_on(tmp_path, capsys):
    assert main(["data", "export", "nodules", "--out", str(tmp_path / "example"), "--count", "20", "--quiet"]) == 0
    split = Split.by_hash(cases := Folder(tmp_path / "example"))
    assert {part: len(names) for part, names in split.parts.items()} == {"train": 14, "val": 2, "test": 4}
    assert len(set(cases.patients)) == 20
