"""Two processes that talk over gloo: they train, and what they evaluate is what one process evaluates."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ambiseg import cli
from ambiseg._util.files import LOCK
from ambiseg.data.loader import seed_of
from ambiseg.data.module import DataModule
from ambiseg.evaluation import evaluate
from ambiseg.methods.base import Stratified
from ambiseg.methods.drawing import unbiased_ged
from ambiseg.metrics import compare, ged
from ambiseg.runs import Run
from tests.conftest import TINY
from tests.files import save

TRAIN = """
import sys
from ambiseg.config import parse
from ambiseg.evaluation import evaluate
from ambiseg._util.processes import first_process
from ambiseg.training import train

if __name__ == "__main__":
    out, result, *settings = sys.argv[1:]
    train(parse(settings), out, quiet=True)
    found = evaluate(out, samples=(4,), accelerator="cpu", devices=2, quiet=True)
    if first_process():
        found.save(result)
"""


def run(*command: str, folder: Path, said: bool = False) -> None:
    """Run Python to its end; it says nothing unless ``said``. Whatever it started ends with it."""
    # Lightning then divides the cores among the processes, which must not change a digit.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"no end after 240 s:\n{text}")
    assert process.returncode == 0, text
    assert said or text == ""


def test_two_processes_evaluate_as_one_does(tiny_run, tmp_path):
    result = tmp_path / "two.json"
    options = ["--samples", "4", "6", "--batch-size", "3", "--accelerator", "cpu", "--devices", "2", "--quiet"]
    run("-m", "ambiseg", "evaluate", str(tiny_run), *options, "--out", str(result), folder=tmp_path)
    one = evaluate(tiny_run, samples=(4, 6), data={"eval_batch_size": 3}, accelerator="cpu", quiet=True)
    assert one.images > 2 * 3  # both processes had something to do
    assert result.read_text() == one.to_json()
    assert result.with_suffix(".csv").read_text() == one.to_csv()


def test_two_processes_train(tmp_path):
    """There is one batch to validate and one to test on, so that the second process has none."""
    (tmp_path / "train.py").write_text(TRAIN)
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    run("train.py", str(tmp_path / "run"), "two.json", *TINY, *two, folder=tmp_path)
    trained = Run(tmp_path / "run")
    assert [row["epoch"] for row in trained.history] == [1, 2]
    assert {path.name for path in trained.folder.iterdir()} == {
        "config.yaml", "run.json", "split.json", "metrics.csv", "cost.json",
        "best.safetensors", "last.safetensors", "best.ckpt", "last.ckpt",
    }  # fmt: skip
    assert trained.cost is not None
    assert (trained.cost.processes, trained.cost.epochs) == (2, 2)
    steps = -(-len(trained.split.parts["train"]) // (2 * trained.config.data.batch_size))
    assert trained.history[-1]["step"] == 2 * steps  # each process sees half of the images
    one = evaluate(tmp_path / "run", samples=(4,), accelerator="cpu", quiet=True)
    assert (tmp_path / "two.json").read_text() == one.to_json()

    data = DataModule(trained.config.data, split=trained.split)
    data.setup()
    (batch,) = data.val_dataloader()
    g = torch.Generator().manual_seed(seed_of(trained.config.seed, "validation", batch.names[0]))
    predicted, last = trained.model("last").predict(batch.images), trained.history[-1]
    assert isinstance(predicted, Stratified)
    again = ged(predicted.sample(16, g), batch.annotations).mean().item()
    assert last["val_ged"] == pytest.approx(again, rel=1e-7)  # the weights that were saved
    pair = compare(predicted.compact(4, g), batch.annotations)
    assert last["val_ged_unbiased"] == pytest.approx(unbiased_ged(pair, 4).mean().item(), rel=1e-6)
    assert last["val_masks"] == 16


def test_two_processes_predict_as_one_does(tmp_path):
    """Every process ends by itself, and all files are the same to the byte."""
    for k in range(3):
        save(tmp_path / "in" / f"{k}.png", np.random.default_rng(k).integers(0, 256, (24, 20), dtype=np.uint8))
    options = ["predict", "demo", str(tmp_path / "in"), "--quiet", "--out"]
    with contextlib.redirect_stderr(io.StringIO()):
        assert cli.main([*options, str(tmp_path / "one")]) == 0
    shutil.copytree(tmp_path / "one" / "1", tmp_path / "two" / "1")  # as an interrupted command leaves it
    two = ["--device", "cpu", "--devices", "2", "--skip-existing"]
    run("-m", "ambiseg", *options, str(tmp_path / "two"), *two, folder=tmp_path, said=True)
    files = [path.relative_to(tmp_path / "one") for path in sorted((tmp_path / "one").rglob("*.*"))]
    assert [path.relative_to(tmp_path / "two") for path in sorted((tmp_path / "two").rglob("*.*"))] == files
    assert len({path.parent for path in files}) == 3
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes(), path


KILLED = """
import os, signal, sys
from ambiseg.cli import _spin_briefly, main
_spin_briefly()
from ambiseg.training.module import TrainingModule
plain = TrainingModule.training_step
def step_or_die(self, batch, batch_idx):
    if (self.current_epoch, batch_idx, str(self.global_rank)) == (1, 1, sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, batch, batch_idx)
TrainingModule.training_step = step_or_die
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_of_two_is_killed_the_other_ends_with_one_line(tmp_path, rank):
    (tmp_path / "killed.py").write_text(KILLED)
    settings = [*TINY, "--trainer.devices=2", "--trainer.threads=1", "--quiet"]
    command = [sys.executable, "killed.py", str(rank), "train", "demo", *settings, "--out", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=240)  # which waits for the other one as well: it has the same stream
    if rank == 0:
        assert (process.returncode, said) == (-signal.SIGKILL, "")
    else:
        line = "ambiseg: process 2 of 2 was ended by signal 9; go on with: ambiseg train --resume run\n"
        assert (process.returncode, said) == (2, line)
        assert not (tmp_path / "run" / LOCK).exists()
    assert len(Run(tmp_path / "run").history) == 1
    one = ["--trainer.devices=1", "--quiet"]
    assert cli.main(["train", "--resume", str(tmp_path / "run"), *one]) == 0
    assert len(Run(tmp_path / "run").history) == 2
