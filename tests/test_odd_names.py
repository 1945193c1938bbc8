"""Names that a terminal, rich, HTML or JSON could take for more than a name."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from ambiseg._util import terminal
from ambiseg._util.files import write_text
from ambiseg._util.progress import _Bar
from ambiseg._util.tables import table
from ambiseg._util.text import printable
from ambiseg.cli import main

ODD = ["[/b]", "[red]x", "a\x1b[31mb", "new\nline", ":smile:", "<b>&amp;", "\u202eab", "[bold"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("[red]"), np.random.default_rng(0)
    for name in ODD:
        for part in ("images", "masks/[red]", "masks/x\ty"):
            path = root / part / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((rng.random((16, 16)) > 0.5).astype(np.uint8) * 255).save(path)
    (root / "ambiseg.json").write_text(json.dumps({"classes": ["[/b]", "\x1b[2J"], "labels": "binary"}))
    return root


def test_a_console_prints_what_it_is_given():
    console = terminal.console(file=io.StringIO(), width=200)
    for name in ODD:
        console.print(name, soft_wrap=True)
        console.print(table([name], [[name]]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for name in ODD:
        said = printable(name)
        assert sum(line.strip() == said for line in lines) >= 2, name
    assert not any("\x1b" in line for line in lines)


def test_a_bar_shows_what_it_is_given():
    bar = _Bar("[/b] \x1b[2J")
    try:
        bar._show()
        assert bar.shown is not None
        assert bar.shown.tasks[0].description == "[/b] \\x1b[2J"
        bar.shown.console.print(bar.shown.get_renderable())  # rich would look for a tag that [/b] ends
    finally:
        bar.stop()


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_check_prints_names_as_they_are(folder, tmp_path, capsys, quiet):
    (folder / "masks/[red]/[blue]\x1b[2J.png").write_bytes(b"no picture")
    try:
        targets = ["--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")]
        assert main(["data", "check", str(folder), *targets, *quiet]) in (0, 1)
    finally:
        (folder / "masks/[red]/[blue]\x1b[2J.png").unlink()
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert "[blue]\\x1b[2J" in out
    assert quiet or ("[red]" in out and "x\\ty" in out and "[/b]" in out)
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "<b>&amp;" not in page
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))


def test_errors_are_one_line(folder, capsys):
    (folder / "ambiseg.json").rename(folder / "kept")
    (folder / "ambiseg.json").write_text(json.dumps({"a\nb\x1b[2J[/b]": 1}))
    try:
        assert main(["data", "check", str(folder)]) == 2
    finally:
        (folder / "kept").rename(folder / "ambiseg.json")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_what_is_no_text_is_written_as_json_escapes_it(tmp_path):
    write_text(tmp_path / "a.json", json.dumps({"name": "a\udcffb"}, ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {"name": "a\udcffb"}
