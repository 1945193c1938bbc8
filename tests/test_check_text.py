"""A check as the terminal and a browser show it."""

from __future__ import annotations

import numpy as np
import pytest

from ambiseg.data.check import check, run
from tests.files import disc, make, save


def test_what_is_cut_short_is_promised_only_where_it_is(tmp_path, capsys):
    make(tmp_path, names=tuple("abcdefgh"), readers=[f"r{m}" for m in range(7)])
    for m in range(7):
        (tmp_path / f"masks/r{m}/{'abcdefgh'[m]}.png").unlink()
    assert run(tmp_path, quiet=False) == 0
    printed = capsys.readouterr().out
    assert "  … and 2 more, all of them with --html or --json\n" in printed
    for name in "abcdefgh":
        save(tmp_path / f"masks/r0/{name}.png", disc(16, 19))
    assert run(tmp_path, quiet=False) == 1
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
