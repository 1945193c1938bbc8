"""A check as the terminal and a browser show it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from ambiseg.cli import main
from ambiseg.data.check.check import check
from tests.files import disc, make, picture, save


def test_what_is_cut_short_is_promised_only_where_it_is(tmp_path, capsys):
    make(tmp_path, names=tuple("abcdefgh"), readers=[f"r{m}" for m in range(7)])
    for m in range(7):
        (tmp_path / f"masks/r{m}/{'abcdefgh'[m]}.png").unlink()
    assert main(["data", "check", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "  … and 2 more, all of them with --html or --json\n" in printed
    for name in "abcdefgh":
        save(tmp_path / f"masks/r0/{name}.png", disc(16, 19))
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "  … and 3 more, all of them with --html, --json or --quiet\n" in capsys.readouterr().out


@pytest.mark.parametrize(("low", "high"), [(0.0705, 0.5882), (0.1, 0.7), (-906.0, 263.0)])
def test_a_suggested_window_has_no_rounding_dust(tmp_path, low, high):
    make(tmp_path)
    for path in tmp_path.glob("images/*.png"):
        np.save(path.with_suffix(".npy"), np.linspace(low, high, 320, dtype=np.float32).reshape(16, 20))
        path.unlink()
    window = check(tmp_path).suggestion["intensity"]
    assert isinstance(window, dict)
    assert all(len(str(number).strip("-")) <= 7 for number in window.values()), window


def test_the_image_that_is_unlike_the_others_is_named_even_if_it_is_the_first(tmp_path):
    make(tmp_path, names=tuple("abcd"))
    save(tmp_path / "images/a.png", picture(channels=3))
    result = check(tmp_path)
    [problem] = [p for p in result.problems if p.severity == "error"]
    assert result.relative(problem).line == "images/a.png: expected 1 channel as b.png, found 3"
    assert len(result.statistics.cases) == 3


def test_each_copy_of_a_reader_is_said_once(tmp_path):
    make(tmp_path, readers=("Ann",))
    for copy in ("Bob", "Cid", "Dan"):
        shutil.copytree(tmp_path / "masks/Ann", tmp_path / "masks" / copy)
    found = [p.line.split(" on ")[0] for p in check(tmp_path).problems if p.code == "W404"]
    assert found == [f"reader {copy}: expected masks of its own, found those of Ann" for copy in ("Bob", "Cid", "Dan")]


def test_a_picture_too_large_to_decode_is_not_called_damaged(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", "100")
    found = check(tmp_path).problems[0]
    assert found.code == "E210"
    assert found.message == "expected at most 100 pixels per slice (--max-pixels), found 320"
    assert "--max-pixels 320" in found.remedy
