"""What README and the pages promise: snippets run, commands exist, and the map of files is that of the files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ambiseg
from ambiseg import config as configuration
from ambiseg.cli import parse
from ambiseg.studies.experiment import Study
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


SNIPPETS = [
    pytest.param(page, block, id=f"{page}-{i}")
    for page in ("README.md", "docs/quickstart.md", "docs/demo.md")
    for i, block in enumerate(blocks((REPOSITORY / page).read_text(encoding="utf-8"), "python"))
]


@pytest.mark.parametrize(("page", "block"), SNIPPETS)
def test_snippets_run_as_they_are(page, block):
    exec(compile(block, page, "exec"), {})


def test_the_method_of_the_guide_trains(tmp_path, monkeypatch):
    """CONTRIBUTING shows a method in one file; one line in ``METHODS`` is all that it needs besides."""
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = next(block for block in blocks(guide, "python") if "class LowRank(Method)" in block)
    (tmp_path / "low_rank.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ambiseg.METHODS, "low-rank", import_module("low_rank").LowRank)
    shown = ["--data.name=shapes", "--data.options={count: 60, size: 16}", "--backbone.channels=[4, 8]"]
    fast = ["--trainer.epochs=2", "--trainer.accelerator=cpu", "--model.method=low-rank", "--model.rank=2"]
    run = ambiseg.train(configuration.parse([*shown, *fast], "demo"), tmp_path / "run", quiet=True)
    assert run.history[1]["loss"] < run.history[0]["loss"]
    assert run.history[1]["nearest"] > 0
    predicted = run.model().predict(torch.zeros(1, 1, 16, 16))
    assert predicted.sample(3).labels.shape == (1, 3, 16, 16)
    assert not any(word in (tmp_path / "run" / "config.yaml").read_text() for word in ("expert", "capacity"))


def commands(path: Path) -> Iterator[list[str]]:
    """Every ``ambiseg …`` of the page's shell blocks, as the shell would divide it."""
    for block in blocks(path.read_text(encoding="utf-8"), "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and words[0] in ("srun", "time"):
                words = words[1:]
            if words[:1] == ["ambiseg"]:
                end = next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))
                yield words[1:end]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_are_there(path):
    for words in commands(path):
        if words == ["--help"]:
            continue
        chosen = parse(words)  # exits where a command or an option does not exist
        recipe = getattr(chosen, "recipe", None)
        own = recipe in (None, "auto") or recipe.endswith(".yaml")  # planned, or a file of the reader's own
        known = None if own else recipe
        configuration.parse(chosen.settings_given, known)  # an error where a recipe or a setting does not exist


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_recipes_are_valid(path, tmp_path):
    for block in blocks(path.read_text(encoding="utf-8"), "yaml"):
        (tmp_path / "recipe.yaml").write_text(block, encoding="utf-8")
        if "\nmembers:" in block:  # a study
            assert all(Study(tmp_path / "recipe.yaml", out=tmp_path).members.values())
        else:
            configuration.parse([], tmp_path / "recipe.yaml")


def test_readme_shows_every_command():
    typed = {words[0] for words in commands(REPOSITORY / "README.md")}
    assert typed >= {"train", "evaluate", "predict", "report", "data"}
    assert "make demo" in README
    assert len(blocks(README, "python")) >= 3


def test_make_targets_are_there():
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z]+)", "\n".join(blocks(README, "sh"))):
        assert target in targets


def test_the_map_has_every_module():
    rows = re.findall(r"^\| (`.*?) \|", README[README.index("## What is where") :], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    for path in sorted((REPOSITORY / "src" / "ambiseg").iterdir()):
        package = path.is_dir() and any(path.glob("*.py"))
        module = path.suffix == ".py" and not path.name.startswith("__")
        shown = f"src/ambiseg/{path.name}" + "/" * package
        assert not (package or module) or shown in named, f"{shown} is missing in README's map"
    for name in named:
        assert (REPOSITORY / name).exists() or (REPOSITORY / "src" / "ambiseg" / name).exists(), name


def test_the_example_runs(tmp_path):
    command = [sys.executable, "-W", "error", str(REPOSITORY / "examples" / "bare_loop.py")]
    arguments = ["--steps", "4", "--images", "32", "--out", str(tmp_path / "a picture.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step    4  total" in done.stdout
    assert re.search(r"GED\(16\) to the truth +\d\.\d{3}; a perfect model scores 0\.0\d\d", done.stdout)
    assert (tmp_path / "a picture.png").read_bytes().startswith(b"\x89PNG")
