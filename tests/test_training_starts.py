"""A training that cannot start says so in one line and leaves nothing; the corrected command works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ambiseg import training
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.files import LOCK, Lock
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.runs import Run
from ambiseg.training import train
from ambiseg.training.module import TrainingModule
from tests.conftest import TINY
from tests.test_runs import FILES

ONE = [*TINY, "--trainer.epochs=1", "--data.options={count: 24, size: 32}"]


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that fails."""
    assert main(["train", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("precision=64-true", "--trainer.precision: expected one of auto, 32-true, bf16-mixed, 16-mixed"),
        ("precision=bf16-true", "found 'bf16-true'"),
        ("precision=16-true", "found '16-true'"),
        ("precision=transformer-engine", "found 'transformer-engine'"),
        ("precision=", "found ''"),
        ("strategy=fsdp", "--trainer.strategy: expected auto, ddp"),
        ("strategy=ddp_spawn", "found 'ddp_spawn'"),
        ("strategy=deepspeed", "found 'deepspeed'"),
        ("devices=0", "--trainer.devices: expected how many"),
        ("devices=-2", "found '-2'"),
        ("devices=two", "found 'two'"),
        ("devices=0,3", "trainer.devices 0,3: expected what Lightning can start on this machine"),
        ("devices=99999", "trainer.devices: expected at most"),
        ("accelerator=gpu", "trainer.accelerator gpu: expected what Lightning can start on this machine"),
        ("accelerator=mps", "trainer.accelerator mps: "),
        ("accelerator=tpu", "trainer.accelerator tpu: "),
        ("accelerator=abacus", "trainer.accelerator abacus: "),
        ("accelerator=", "invalid accelerator name"),
        ("num_nodes=2", "trainer.num_nodes: expected 1, or a start by SLURM or torchrun"),
        ("num_nodes=0", "--trainer.num_nodes: expected at least 1"),
        ("threads=99999999999999999999", "--trainer.threads: expected at least 1 and at most"),
        ("epochs=99999999999999999999", "--trainer.epochs: expected at least 1 and at most"),
        ("tensorboard=maybe", "--trainer.tensorboard: expected true or false"),
    ],
)
def test_a_setting_that_the_machine_has_not(tmp_path, monkeypatch, capsys, setting, found):
    for name in ("cuda", "mps"):
        monkeypatch.setattr(f"torch.{'backends.mps' if name == 'mps' else name}.is_available", lambda: False)
    monkeypatch.delenv("NODE_RANK", raising=False)
    out = tmp_path / "runs" / "new"
    assert found in refused(capsys, "demo", *ONE, f"--trainer.{setting}", "--out", str(out), "--quiet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["32", "bf16", "16", "32-true", "bf16-mixed", "16-mixed", "auto"])
def test_precisions_that_training_knows_have_one_name(given):
    known = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    assert parse([f"--trainer.precision={given}"]).trainer.precision == known.get(given, given)


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning.pytorch.loggers.TensorBoardLogger", _missing)
    line = refused(capsys, "demo", *ONE, "--trainer.tensorboard=true", "--out", str(tmp_path / "a" / "b"), "--quiet")
    assert line == "ambiseg: trainer.tensorboard: expected the package tensorboard, found none: pip install it"
    assert list(tmp_path.iterdir()) == []


def _missing(*_args, **_kwargs):
    raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")


def test_data_without_a_training_part(tmp_path, capsys):
    out = str(tmp_path / "a" / "b")
    line = refused(capsys, "demo", *ONE, "--data.fractions={val: 0.5, test: 0.5}", "--out", out, "--quiet")
    assert "'train'" in line
    assert list(tmp_path.iterdir()) == []


# -- the folder of a new run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DataError("a.png: expected an image, found none"), OSError(28, "No space left")])
@pytest.mark.parametrize("before", [False, True])
def test_nothing_is_left_of_a_run_that_fails_in_its_first_epoch(tmp_path, monkeypatch, error, before):
    out = tmp_path / "runs" / "new"
    if before:
        out.mkdir(parents=True)

    def fails(*_):
        assert {LOCK, "run.json"} < {path.name for path in out.iterdir()}
        raise error

    monkeypatch.setattr(TrainingModule, "training_step", fails)
    with pytest.raises(type(error)):
        train(parse(ONE), out, quiet=True)
    assert list(out.iterdir() if before else tmp_path.iterdir()) == []
    monkeypatch.undo()
    train(parse(ONE), out, quiet=True)
    assert {path.name for path in out.iterdir()} == FILES


def test_a_new_folder_appears_with_all_that_is_in_it(tmp_path, monkeypatch):
    out, seen = tmp_path / "new", []
    plain = os.rename

    def rename(source, target):
        if Path(target) == out:
            seen.append((out.exists(), {path.name for path in Path(source).iterdir()}))
        plain(source, target)

    monkeypatch.setattr(os, "rename", rename)
    train(parse(ONE), out, quiet=True)
    assert seen == [(False, {LOCK, "config.yaml", "split.json", "run.json"})]


def test_what_killed_processes_left_is_no_content(tmp_path):
    (tmp_path / ".ambiseg-0123456789abcdef").write_text("half a file")
    (tmp_path / ".ambiseg-0").touch()
    (tmp_path / ".ambiseg-00ff00ff00ff00ff").mkdir()
    (tmp_path / LOCK).touch()
    (tmp_path / "config.yaml").write_text("half")
    train(parse(ONE), tmp_path, quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_link_to_a_folder_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(parse(ONE), tmp_path / "run", quiet=True)
    assert (tmp_path / "run").is_symlink()
    assert {path.name for path in (tmp_path / "disk").iterdir()} == FILES


HOLDER = """
import sys, time
from ambiseg._util.files import Lock
with Lock(sys.argv[1], 'training'):
    print(1, flush=True)
    time.sleep(60)
"""


def test_one_process_trains_in_a_folder(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        line = refused(capsys, "--resume", str(run), "--trainer.epochs=3", "--quiet")
        assert f"{run}: expected no other process at work there, found training by process {other.pid}" in line
        other.kill()
    assert main(["train", "--resume", str(run), "--trainer.epochs=3", "--quiet"]) == 0  # the lock died with it
    assert {path.name for path in run.iterdir()} == FILES


def test_two_that_begin_at_once_are_one(tmp_path, monkeypatch):
    plain = Run.begin

    def late(folder, *arguments, **more):  # another process was faster
        Path(folder).mkdir()
        (Path(folder) / "run.json").write_text("{}")
        return plain(folder, *arguments, **more)

    monkeypatch.setattr(training.Run, "begin", late)
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        train(parse(ONE), tmp_path / "new", quiet=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_an_empty_folder_is_locked_before_anything_is_written(tmp_path):
    with Lock(tmp_path, "training"), pytest.raises(ConfigError, match="found training by process"):
        train(parse(ONE), tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_reads_ends_no_training(tmp_path, monkeypatch):
    class Broken:
        def isatty(self) -> bool:
            return False

        def write(self, _: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            self.write("")

    monkeypatch.setattr(sys, "stderr", Broken())
    run = train(parse(TINY), tmp_path / "run", command=[])
    assert len(run.history) == 2
    monkeypatch.setattr(sys, "stderr", None)
    assert len(train(parse([*TINY, "--trainer.epochs=3"]), tmp_path / "run", resume=True).history) == 3
