"""A study that is run: killed and started again, in parts, by two processes, with members that fail."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ambiseg
from ambiseg.cli import main
from ambiseg.runs import Run
from ambiseg.studies.definition import Column
from ambiseg.studies.experiment import Study
from ambiseg.studies.results import Row
from ambiseg.studies.running import Runner, cores
from tests.pages import Reader

RECIPE = """\
# toy
data: {name: shapes, options: {count: 40, size: 16}, batch_size: 8}
backbone: {channels: [4, 8], momentum: 0.1}
trainer: {epochs: 25, accelerator: cpu, precision: 32-true}
"""
STUDY = """\
title: A <b>toy</b> & its "parts"
question: Does it run?
base: {small: {recipe: RECIPE}}
members:
  one:
  two: {settings: {model.latent: 2}}
  broken: {settings: {data.options: {count: 1, size: 16}}}
seeds: 1
columns: [ged@4, ece@4, parameters]
reference: {member: one}
plot: {x: model.latent, y: ged@4}
paper:
  - {member: one, source: tab:toy, values: {ged@4: .2 ± .1, ece@4: .5}}
"""


def command(*words: object, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "ambiseg", "study", *map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def state(folder: Path) -> dict[str, int]:
    """When each file of the runs was written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted((folder / "members").rglob("*")) if path.is_file()}


def logged(folder: Path, member: str) -> list[str]:
    """The commands of a member, without their arguments."""
    (log,) = (folder / "logs").glob(f"{member}-s0-*.log")
    lines = [line for line in log.read_text().splitlines() if line.startswith("$ ")]
    return [" ".join(line.split()[2 : 4 if "--resume" in line else 3]) for line in lines]


def mean(row: Row, one: Column) -> float:
    cell = row.cells[one]
    assert cell is not None
    assert cell.mean is not None
    return cell.mean


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A study that was killed in the middle and run again: ``toy.yaml`` and ``out`` are in the folder."""
    folder = tmp_path_factory.mktemp("my studies")
    (folder / "toy base.yaml").write_text(RECIPE)
    (folder / "toy.yaml").write_text(STUDY.replace("RECIPE", str(folder / "toy base.yaml")))
    first = command("toy.yaml", "--out", "out", "--jobs", 1, folder=folder)
    until = time.monotonic() + 120
    while not list(folder.glob("out/members/one-*/metrics.csv")):
        assert time.monotonic() < until
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)  # nothing can be put in order
    first.communicate()
    second = command("toy.yaml", "--out", "out", "--jobs", 2, folder=folder)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 1, said  # a member failed
    assert "one seed 0: training goes on" in said
    assert "broken seed 0: failed after " in said
    return folder


def test_an_interrupted_training_goes_on_and_is_the_same_as_a_whole_one(folder):
    assert logged(folder / "out", "one") == ["train", "train --resume", "evaluate"]
    assert logged(folder / "out", "two") == ["train", "evaluate"]
    (run,) = (folder / "out" / "members").glob("one-*")
    assert len(Run(run).history) == 25
    assert not Run(run).config.trainer.look  # its scores do not need it
    assert Run(run).about["command"][:2] == ["ambiseg", "train"]
    assert json.loads((run / "evaluation-test.json").read_text())["which"] == "last"


def test_nothing_finished_is_repeated(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = state(folder / "out")
    assert main(["study", "toy.yaml", "--out", "out"]) == 1  # the failure is still there
    assert state(folder / "out") == before
    assert "broken: seed 0 failed: shapes: expected at least 3 patients" in capsys.readouterr().out
    assert main(["study", "toy.yaml", "--out", "out", "--only", "one", "two", "--quiet"]) == 0
    assert state(folder / "out") == before
    assert capsys.readouterr() == ("", "")


def test_tables_have_everything(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = Study("toy.yaml", out="out")
    rows = {(row.member, row.form): row for row in found.rows}
    assert set(rows) == {
        ("one", "standard"),
        ("one", "compact"),
        ("two", "standard"),
        ("two", "compact"),
        ("broken", ""),
    }
    ged, ece, parameters = found.definition.table_columns
    one, two, broken = rows["one", "standard"], rows["two", "standard"], rows["broken", ""]
    assert (one.reference, one.seeds, one.epochs, one.status) == (True, 1, 25, "")
    assert one.minutes is not None
    assert one.minutes > 0
    difference: Any = two.differences[ged]
    assert mean(two, ged) - mean(one, ged) == pytest.approx(difference.mean)
    assert difference.low <= difference.mean <= difference.high
    assert mean(one, parameters) == pytest.approx(0.00411)
    assert broken.failed
    assert "expected at least 3 patients" in broken.status
    with open("out/toy/table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 5 * 3
    ours = next(line for line in lines if (line["member"], line["form"], line["metric"]) == ("one", "standard", "ece"))
    assert float(ours["mean"]) == pytest.approx(mean(one, ece), abs=1e-5)
    assert float(ours["paper"]) == 0.005  # per cent in the YAML, a fraction here
    markdown = Path("out/toy/table.md").read_text()
    assert markdown.startswith("| member | masks | seeds | epochs | CPU min | GED (4) | ECE, % (4) | parameters, M | Δ")
    assert "- broken: seed 0 failed: " in markdown
    assert r"\begin{tabular}" in Path("out/toy/table.tex").read_text()
    content = json.loads(Path("out/toy/study.json").read_text())
    assert content["command"] == "ambiseg study toy.yaml --out out"
    assert [one["state"] for one in content["trainings"]] == ["done", "done", "failed"]


def test_the_page(folder):
    page = (folder / "out" / "toy" / "index.html").read_text()
    read = Reader(page)  # whose tags match
    assert not read.all("script", "link", "img")
    for text in ("A &lt;b&gt;toy&lt;/b&gt;", "paper, LIDC 128×128: other data", "tab:toy", ".200 ± .100", "<svg"):
        assert text in page
    for text in (
        "What failed",
        "expected at least 3 patients",
        "ambiseg study toy.yaml --out out",
        "by rank of the hash",
    ):
        assert text in page


def test_commands_of_the_list_run_one_member_each(folder, tmp_path, monkeypatch, capsys):
    """In a folder where one member is not scored yet: that one is, nothing else happens, and the table is the same."""
    shutil.copytree(folder / "out", tmp_path / "out")
    shutil.copytree(folder / "out" / "toy", tmp_path / "before")
    for path in (tmp_path / "out" / "members").glob("two-*/evaluation-test.*"):
        path.unlink()
    for name in ("toy.yaml", "toy base.yaml"):
        shutil.copy(folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "toy.yaml", "--out", "out", "--table", "--json"]) == 0
    states = {one["member"]: one["state"] for one in json.loads(capsys.readouterr().out)["trainings"]}
    assert states == {"one": "done", "two": "trained", "broken": "failed"}
    assert main(["study", "toy.yaml", "--out", "out", "--list"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[-2:] for words in lines] == [["--only", name] for name in ("one", "two", "broken")]
    given = lines[1][lines[1].index("study") :]
    done = subprocess.run([sys.executable, "-m", "ambiseg", *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "two seed 0: evaluating (1 of 1)\ntwo seed 0: done\n"
    assert (tmp_path / "out/toy/table.csv").read_text() == (tmp_path / "before" / "table.csv").read_text()


def test_two_processes_never_train_the_same_member(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    found = Study("toy.yaml", out=tmp_path / "out", settings={"trainer.epochs": 2})
    member = found.members["one"]
    assert member is not None
    monkeypatch.setattr("ambiseg.studies.running._PATIENCE", 0.0)
    started = []
    monkeypatch.setattr(Runner, "_start", lambda *more: started.append(more))
    with found.store.lock(member, 0):
        assert Runner(found.store, 1, True, lambda: None).run([(member, 0)]) == ["one seed 0"]
    assert started == []
    found.store.lock(member, 0).__enter__().__exit__()


def test_a_lock_outlives_a_killed_study_as_long_as_its_training(tmp_path):
    """The training inherits the lock: a study that is started at once does not meet a training that still ends."""
    from ambiseg._util.errors import ConfigError
    from ambiseg._util.files import Lock

    lock = Lock(tmp_path, "training").__enter__()
    with subprocess.Popen(["sleep", "30"], pass_fds=(lock.descriptor,)) as child:
        os.close(lock.descriptor)  # as if this process were killed
        with pytest.raises(ConfigError, match="expected no other process at work"):
            Lock(tmp_path, "training").__enter__()
        child.kill()
        child.wait()
    with Lock(tmp_path, "training"):
        pass


def test_runs_of_the_plain_command_are_adopted(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (run,) = (folder / "out" / "members").glob("two-*")
    shutil.copytree(run, tmp_path / "plain")
    before = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir() if path.is_file()}
    words = ["study", "toy.yaml", "--out", str(tmp_path / "out")]
    assert main([*words, "--adopt", str(tmp_path / "plain")]) == 0
    assert "two seed 0: " in capsys.readouterr().out
    (new,) = (tmp_path / "out" / "members").iterdir()
    assert new.name == run.name
    assert {path.name: path.read_bytes() for path in new.iterdir() if path.is_file()} == before
    assert main([*words, "--only", "two", "--quiet"]) == 0  # nothing to do
    assert main([*words, "--adopt", str(tmp_path / "plain"), "--quiet"]) == 0  # again
    assert main([*words, "--trainer.epochs", "3", "--adopt", str(tmp_path / "plain")]) == 2
    assert (
        "nearest is two: trainer.check_every 25 instead of 3; trainer.epochs 25 instead of 3" in capsys.readouterr().err
    )


def test_a_failure_is_tried_again_only_when_asked(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "out", tmp_path / "out")
    found = Study("toy.yaml", out=tmp_path / "out")
    (trial,) = found.trials(["broken"])
    assert trial.state == "failed"
    asked = []
    monkeypatch.setattr(Runner, "run", lambda self, trials: asked.append([(m.name, seed) for m, seed in trials]))
    found.run(quiet=True)
    assert asked == []
    found.run(quiet=True, retry=True)
    assert asked == [[("broken", 0)]]
    assert found.trials(["broken"])[0].state == "missing"


def test_evaluations_that_lack_masks_are_made_again_with_those_of_other_studies(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    text = (folder / "toy.yaml").read_text().replace("columns: [", "columns: [ged@8, ")
    (folder / "more.yaml").write_text(text)
    found = Study("more.yaml", out="out")
    (trial,) = found.trials(["one"])
    assert trial.state == "trained"
    assert found.store.wanted(trial.folder, trial.member.samples) == [4, 8]


def test_a_folder_of_other_settings_is_never_taken_for_a_member(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "out", tmp_path / "out")
    (run,) = (tmp_path / "out" / "members").glob("one-*")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("latent: 1", "latent: 3"))
    (trial,) = Study("toy.yaml", out=tmp_path / "out").trials(["one"])
    assert trial.state == "failed"
    assert "expected the settings of one, found another model.latent" in trial.reason


def test_further_seeds_that_are_there_are_in_the_table(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "out", tmp_path / "out")
    (run,) = (tmp_path / "out" / "members").glob("one-*")
    shutil.copytree(run, run.with_name(run.name.replace("-s0-", "-s7-")))
    found = Study("toy.yaml", out=tmp_path / "out")
    assert [(t.member.name, t.seed) for t in found.trials()] == [("one", 0), ("two", 0), ("broken", 0), ("one", 7)]
    row = next(row for row in found.rows if row.member == "one")
    assert row.failed
    assert "found the same weights twice" in row.status  # a copy is no second training


def test_in_python(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    found = ambiseg.study("toy.yaml", out="out", only=["one"], quiet=True)
    assert found.to_markdown().startswith("| member |")
    assert [trial.state for trial in found.trials(["one"])] == ["done"]
    assert cores() >= 1


def test_ctrl_c_stops_what_runs(folder, tmp_path):
    for name in ("toy.yaml", "toy base.yaml"):
        shutil.copy(folder / name, tmp_path / name)
    running = command("toy.yaml", "--out", "out", "--only", "one", "--trainer.epochs", 2000, folder=tmp_path)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("out/members/one-*/metrics.csv")):
        assert time.monotonic() < until
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    (trial,) = Study(tmp_path / "toy.yaml", out=tmp_path / "out", settings={"trainer.epochs": 2000}).trials(["one"])
    assert trial.state == "begun"  # and no failure
    (run,) = (tmp_path / "out" / "members").glob("one-*")
    assert not (run / ".ambiseg-lock").exists()  # its process has ended, in good order
