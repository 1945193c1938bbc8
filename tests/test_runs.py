"""Runs: what is written, going on to the bit after any interruption, and one clear line for whatever is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ambiseg.training.callbacks as callbacks
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.config import Config, OptimizerConfig, dump, parse
from ambiseg.data.case import Case
from ambiseg.methods.schedules import Schedule, values_of
from ambiseg.runs import Card, Run, build_model, load
from ambiseg.training import train
from ambiseg.training.module import TrainingModule
from tests.cases import Listed, random_cases
from tests.conftest import TINY

FILES = {
    "config.yaml", "run.json", "split.json", "metrics.csv", "cost.json",
    "best.ckpt", "last.ckpt", "best.safetensors", "last.safetensors",
}  # fmt: skip
MOVING = [
    *TINY,
    "--trainer.epochs=4",
    "--optimizer.average=0.9",
    "--optimizer.decay=plateau",
    "--optimizer.patience=0",
    "--model.capacity={kind: linear, values: [0.5, 1.0], epochs: 3}",
    "--model.samples={kind: plateau, values: [1, 2, 3], patience: 0}",
    "--data.augment.rotate=30",
    "--data.size=24",
]


def same_weights(a: Path, b: Path) -> bool:
    one, two = load_file(a), load_file(b)
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# -- what a run leaves -------------------------------------------------------------------------------------------------


def test_a_run_has_everything_that_it_says(tiny_run):
    assert {path.name for path in tiny_run.iterdir()} == FILES  # and no draft is left over
    run = Run(tiny_run)
    assert run.config == parse(TINY)
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert run.history[0].keys() == {
        "epoch", "step", "lr", "loss", "transport", "kl", "val_ged", "val_ged_unbiased", "val_masks", "val_matched_iou"
    }  # fmt: skip
    assert run.about["split"]["fingerprint"] == run.split.fingerprint
    assert run.about["versions"]["torch"] == torch.__version__
    assert run.about["seed"] == 0


def test_a_loaded_model_predicts_what_was_validated(tiny_run):
    from ambiseg import ged
    from ambiseg.data.loader import seed_of
    from ambiseg.data.module import DataModule
    from ambiseg.history import best_row
    from ambiseg.methods.base import Stratified
    from ambiseg.metrics import compare

    run = Run(tiny_run)
    model = load(tiny_run)
    assert not model.method.training
    data = DataModule(run.config.data)
    data.setup()
    scores, unbiased = [], []
    for batch in data.val_dataloader():
        generator = torch.Generator().manual_seed(seed_of(0, "validation", batch.names[0]))
        predicted = model.predict(batch.images)
        assert isinstance(predicted, Stratified)
        scores.append(ged(predicted.sample(16, generator), batch.annotations))
        drawn = predicted.compact(4, generator)  # 16 of 4 experts
        d = 1 - compare(drawn, batch.annotations).iou[:, :16, :16]
        own = torch.stack([d[:, 4 * k : 4 * k + 4, 4 * k : 4 * k + 4].sum((1, 2)) / 16 for k in range(4)], 1)
        unbiased.append(ged(drawn, batch.annotations) - (predicted.weights.double().square() * own / 3).sum(1))
    best = best_row(run.history)
    assert best is not None
    assert best["val_ged_unbiased"] == min(row["val_ged_unbiased"] for row in run.history)
    assert best["val_masks"] == 16
    assert torch.cat(scores).mean().item() == pytest.approx(best["val_ged"], rel=1e-6)
    assert torch.cat(unbiased).mean().item() == pytest.approx(best["val_ged_unbiased"], rel=1e-5)


def test_the_card_prepares_raw_images(tiny_run):
    model = load(tiny_run)
    card: Card = model.card
    assert card.stratum == "expert"
    raw = torch.full((1, 1, 4, 4), 255.0)
    assert torch.equal(card.prepare(raw), torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"expected images \[B, 1, H, W\], found \[1, 3, 4, 4\]"):
        card.prepare(torch.zeros(1, 3, 4, 4))


def test_loading_leaves_the_callers_random_numbers_alone(tiny_run):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(tiny_run)
    assert torch.equal(torch.rand(3), expected)


def test_configurations_survive_their_file(tmp_path):
    config = parse(MOVING)
    (tmp_path / "c.yaml").write_text(dump(config))
    assert parse([], tmp_path / "c.yaml") == config


def test_tensorboard_gets_every_epoch(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(parse([*TINY, "--trainer.tensorboard=true"]), tmp_path / "run", quiet=True)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    for key in ("loss", "val_ged", "lr", "kl"):
        logged = [(event.step, event.value) for event in events.Scalars(key)]
        assert logged == [(row["epoch"], pytest.approx(row[key], rel=1e-6)) for row in run.history], key


# -- interruptions -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from ambiseg.cli import main
from ambiseg.training.module import TrainingModule
how, epoch, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plain = TrainingModule.training_step
def step_or_die(self, batch, batch_idx):
    if how != "no" and (self.current_epoch, batch_idx) == (epoch, step):
        os.kill(os.getpid(), getattr(signal, how))
    return plain(self, batch, batch_idx)
TrainingModule.training_step = step_or_die
sys.exit(main(["train", *sys.argv[4:]]))
"""


def run_script(how: str, epoch: int, step: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, how, str(epoch), str(step), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "moving.yaml").write_text(dump(parse(MOVING)))
    done = run_script("no", 0, 0, str(folder / "moving.yaml"), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder / "moving.yaml", folder / "run"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_run_goes_on_to_the_bit(uninterrupted, tmp_path, how):
    recipe, whole = uninterrupted
    out = tmp_path / "with a space"
    stopped = run_script(how, 2, 3, str(recipe), "--out", str(out))
    assert stopped.returncode != 0
    assert len(Run(out).history) == 2  # two epochs were finished, the third is lost
    if how == "SIGINT":
        assert stopped.returncode == 130
        assert f"go on with: ambiseg train --resume '{out}'" in stopped.stderr
        assert "Traceback" not in stopped.stderr
    resumed = run_script("no", 0, 0, "--resume", str(out))
    assert resumed.returncode == 0, resumed.stderr
    for name in ("last.safetensors", "best.safetensors"):
        assert same_weights(out / name, whole / name), name
    assert (out / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()
    assert {path.name for path in out.iterdir()} == FILES


def test_a_run_stopped_in_its_first_epoch_starts_again(uninterrupted, tmp_path):
    recipe, whole = uninterrupted
    stopped = run_script("SIGINT", 0, 1, str(recipe), "--out", str(tmp_path / "run"))
    assert stopped.returncode == 130
    assert "stopped before the first epoch was finished; go on with: ambiseg train --resume" in stopped.stderr
    resumed = run_script("no", 0, 0, "--resume", str(tmp_path / "run"))
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(tmp_path / "run" / "last.safetensors", whole / "last.safetensors")


def test_what_a_run_killed_in_its_first_moment_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "config.yaml").write_text("half")
    (tmp_path / "split.json").write_text("")
    assert Run.claim(tmp_path) == tmp_path


def test_data_that_are_not_there_leave_no_folder(tmp_path, capsys):
    out = tmp_path / "runs" / "new"
    line = refused(capsys, "lidc71", "--data.root", str(tmp_path / "nowhere.npz"), "--out", str(out))
    assert line == f"ambiseg: {tmp_path / 'nowhere.npz'}: expected an .npz file, found no such file"
    assert not list(tmp_path.iterdir())


def test_a_finished_run_can_be_made_longer(tiny_run, tmp_path):
    longer, whole = tmp_path / "longer", tmp_path / "whole"
    shutil.copytree(tiny_run, longer)
    assert main(["train", "--resume", str(longer), "--trainer.epochs=3", "--quiet"]) == 0
    train(parse([*TINY, "--trainer.epochs=3"]), whole, quiet=True)
    assert [row["epoch"] for row in Run(longer).history] == [1, 2, 3]
    assert Run(longer).config.trainer.epochs == 3
    assert same_weights(longer / "last.safetensors", whole / "last.safetensors")


# -- faults ------------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    return next(line for line in reversed(lines) if line.startswith("ambiseg: "))


def test_a_folder_with_files_is_not_written_into(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"expected a new or empty folder .* resume that run, or choose"):
        train(parse(TINY), tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a file", None])
def test_a_damaged_checkpoint_is_named(tiny_run, tmp_path, capsys, content):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    whole = (run / "last.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    line = refused(capsys, "--resume", str(run), "--trainer.epochs=3")
    assert str(run / "last.ckpt") in line
    assert "found a damaged file" in line


def test_a_checkpoint_of_another_program_is_named(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    torch.save({"state_dict": {}}, run / "last.ckpt")
    assert "found another program's" in refused(capsys, "--resume", str(run))


def test_a_checkpoint_that_would_run_code_does_not(tiny_run, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    torch.save({"ambiseg": Evil(), "state_dict": {}}, run / "last.ckpt")
    assert "found a damaged file" in refused(capsys, "--resume", str(run))
    assert not (tmp_path / "pwned").exists()


def test_weights_of_another_configuration_are_named(tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    config = Run(run).config
    config.backbone.channels = [8, 24]
    (run / "config.yaml").write_text(dump(config))
    with pytest.raises(
        ConfigError, match=r"best\.safetensors: expected the weights of this configuration, found .* for"
    ):
        load(run)
    (run / "best.safetensors").write_bytes((run / "best.safetensors").read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"best\.safetensors: expected weights as safetensors"):
        load(run)
    (run / "best.safetensors").unlink()
    with pytest.raises(ConfigError, match="found no such file"):
        load(run)


def test_a_run_of_another_version_is_named(tiny_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("  experts:", "  specialists:"))
    with pytest.raises(ConfigError, match=r"config\.yaml: .*specialists"):
        Run(run)
    (run / "config.yaml").write_text(text)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "format": "ambiseg.Run/0"}))
    with pytest.raises(ConfigError, match=r"run\.json: expected a run of format ambiseg\.Run/1, found ambiseg\.Run/0"):
        Run(run)


def test_resuming_with_other_settings_is_refused(tiny_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    line = refused(capsys, "--resume", str(run), "--model.experts=7")
    assert f"{run}: expected model.experts 4 as the run has it, found 7" in line
    assert "expected the folder of a run" in refused(capsys, "--resume", str(tmp_path))
    assert "expected a recipe" in refused(capsys)


def test_a_loss_that_is_not_finite_is_traced_to_its_batch(tmp_path, monkeypatch, capsys):
    cases = random_cases(30, (16, 16), patients=15, classes=2)
    bad = cases[7]
    image = bad.image.astype(np.float32)
    image[0, 3, 3] = np.nan
    listed = [
        Case(**{**c.__dict__, "image": image if c.name == bad.name else c.image.astype(np.float32)}) for c in cases
    ]
    monkeypatch.setattr("ambiseg.data.config.open_cases", lambda config: Listed(listed))
    monkeypatch.setattr("ambiseg.data.module.open_cases", lambda config: Listed(listed))
    arguments = [*TINY, "--data.split=hash", "--data.split_seed=1"]
    with pytest.raises(
        ConfigError, match=r"epoch 1, step \d+: the loss is not finite for .*case-7.*offending_batch\.npz"
    ):
        train(parse(arguments), tmp_path / "run", quiet=True)
    with np.load(tmp_path / "run" / "offending_batch.npz") as saved:
        assert "case-7" in saved["names"]
        assert np.isnan(saved["images"]).sum() == 1


def test_a_full_disk_costs_the_epoch_and_nothing_else(tiny_run, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(run / "last.safetensors"))

    monkeypatch.setattr(callbacks, "write_weights", full)
    line = refused(capsys, "--resume", str(run), "--trainer.epochs=3")
    assert line == f"ambiseg: {run / 'last.safetensors'}: No space left on device"
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    assert after.keys() == before.keys()
    assert Run(run).config.trainer.epochs == 3  # what was asked for is known before the first step
    assert {k for k in after if after[k] != before[k]} <= {"config.yaml"}
    monkeypatch.undo()
    assert main(["train", "--resume", str(run), "--trainer.epochs=3", "--quiet"]) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(tmp_path, capsys):
    tmp_path.chmod(0o500)
    line = refused(capsys, *TINY, "--out", str(tmp_path / "run"))
    assert str(tmp_path) in line


# -- schedules and rates -----------------------------------------------------------------------------------------------


def test_schedules_are_what_their_settings_say():
    linear = Schedule(values=[0.5, 1.0], epochs=2, warm_up=1).start()
    values = []
    for _ in range(5):
        values.append(linear.value)
        linear.update(1.0)
    assert values == [0.5, 0.5, 0.75, 1.0, 1.0]
    assert Schedule(kind="plateau", values=[0.3]).start().value == 0.3
    assert values_of(0.3) == [0.3]
    with pytest.raises(ValueError, match=r"expected two values for linear, found \[1\.0\]"):
        Schedule(values=[1.0])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (OptimizerConfig(lr=1.0, decay="constant"), [1, 1, 1]),
        (OptimizerConfig(lr=1.0, decay="linear", min_lr=0.2), [1, 0.5, 0.2]),
        (OptimizerConfig(lr=1.0, decay="cosine", min_lr=0.0), [1, 0.5, 0]),
        (OptimizerConfig(lr=1.0, decay="constant", warm_up=20), [1 / 20, 11 / 20, 1]),
    ],
)
def test_learning_rates_are_a_function_of_the_step(setting, expected):
    config = Config(optimizer=setting, trainer={"epochs": 4, "accumulate": 2})  # type: ignore[arg-type]
    module = TrainingModule(build_model(parse(TINY), 1, 2), config, (1,))

    class Ten:
        num_training_batches = 10  # five steps per epoch

    module._trainer = Ten()  # type: ignore[assignment]
    assert [module.rate_at(step) for step in (0, 10, 20)] == pytest.approx(expected)


def test_a_plateau_lowers_the_rate_to_its_smallest():
    setting = OptimizerConfig(lr=1.0, decay="plateau", factor=0.5, patience=0, min_lr=0.2)
    module = TrainingModule(build_model(parse(TINY), 1, 2), Config(optimizer=setting), (1,))
    assert module.rate is not None
    rates = []
    for _ in range(8):
        rates.append(module.rate_at(0))
        module.rate.update(1.0)
    assert rates[0] == 1.0
    assert rates[-1] == 0.2
    assert sorted(set(rates), reverse=True) == [1.0, 0.5, 0.25, 0.2]


def test_recipes_parse_and_build():
    from ambiseg.config import recipes

    assert "demo" in recipes()
    for name in recipes():
        config = parse([], name)
        build_model(config, 1, len(getattr(config.model, "class_weights", None) or "ab"))
        assert main(["train", name, "--print_config"]) == 0
