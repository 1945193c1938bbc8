"""Runs whose files are damaged: one line that names the file and the part, before anything is changed."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ambiseg import history
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.runs import Run, build_model, load
from ambiseg.training import checkpoint, train
from ambiseg.training.module import TrainingModule
from ambiseg.training.trainer import trainer_of
from tests.conftest import TINY
from tests.test_runs import FILES


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def refused(capsys, *arguments: str) -> str:
    assert main([*arguments, "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# -- checkpoints -------------------------------------------------------------------------------------------------------

MOVING = [*TINY, "--optimizer.decay=plateau", "--model.capacity={kind: linear, values: [0.5, 1.0], epochs: 3}"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict[str, Any], TrainingModule, Any]:
    """The content of a checkpoint, and what it is to be read into."""
    folder = tmp_path_factory.mktemp("moving") / "run"
    config = parse([*MOVING, "--trainer.epochs=1", "--data.options={count: 24, size: 32}"])
    run = train(config, folder, quiet=True)
    module = TrainingModule(build_model(config, 1, len(run.card.classes)), config, run.card.evaluated)
    trainer = trainer_of(config, "32-true", folder, [checkpoint_free()], [])
    return checkpoint.read(folder / "last.ckpt"), module, trainer


def checkpoint_free() -> Any:
    from lightning.pytorch.callbacks import Checkpoint

    return Checkpoint()


def at(content: Any, *path: Any) -> Any:
    for part in path:
        content = content[part]
    return content


WEIGHT = "model.backbone.down.0.0.weight"
ADAM = ("optimizer_states", 0, "state", 0)
LOOPS = ("loops", "fit_loop")
WRONG = [
    (("state_dict", WEIGHT), None, f"no '{WEIGHT}'"),
    (("state_dict", WEIGHT), torch.zeros(3), "[3] for"),
    (("state_dict", WEIGHT), 3.0, "float in place of a tensor"),
    (("state_dict", WEIGHT), torch.full((8, 1, 3, 3), torch.nan), f"nan or infinite values in '{WEIGHT}'"),
    (("state_dict", WEIGHT), torch.zeros((8, 1, 3, 3), dtype=torch.long), "torch.int64"),
    (("state_dict", WEIGHT), torch.zeros((8, 1, 3, 3)).to_sparse(), "in place of a tensor"),
    (("state_dict", WEIGHT), torch.zeros((8, 1, 3, 3), dtype=torch.complex64), "in place of a tensor"),
    (("state_dict", "model.more"), torch.zeros(3), "'model.more' as well"),
    (("state_dict",), [], "list in place of a table"),
    (("optimizer_states",), None, "no states of 1 optimisers"),
    (("optimizer_states",), [], "no states of 1 optimisers"),
    (("optimizer_states", 0), 3, "int in place of a table"),
    (("optimizer_states", 0, "state"), [], "list in place of a table"),
    (("optimizer_states", 0, "state", "x"), {}, "str for a parameter"),
    (("optimizer_states", 0, "state", 10**6), {}, "the optimiser of 1000001 parameters"),
    ((*ADAM, "exp_avg"), None, "nothing in place of a tensor"),
    ((*ADAM, "exp_avg_sq"), torch.zeros(2), "[2] for exp_avg_sq of parameter 0"),
    ((*ADAM, "step"), torch.tensor(torch.inf), "nan or infinite values in 'step of parameter 0'"),
    (("loops",), None, "nothing in place of a table"),
    ((*LOOPS, "epoch_progress"), 7, "int in place of a table"),
    ((*LOOPS, "epoch_progress", "current", "ready"), "1", "str for ready"),
    ((*LOOPS, "epoch_progress", "current", "processed"), 3, "3 epochs, of which 1 are in the history"),
    ((*LOOPS, "epoch_loop.batch_progress", "current", "completed"), 0, "an epoch that is not finished"),
    ((*LOOPS, "epoch_loop.batch_progress", "total", "ready"), -1, "int for ready"),
    (("ambiseg",), [], "list in place of a table"),
    (("ambiseg", "history"), None, "no history of epochs"),
    (("ambiseg", "history"), [], "no history of epochs"),
    (("ambiseg", "history", 0), 3, "int in place of a table"),
    (("ambiseg", "history", 0, "loss"), "small", "str in the history of epoch 1"),
    (("ambiseg", "history", 0, "epoch"), 2, "no epoch 1"),
    (("ambiseg", "history", 0, "step"), None, "no epoch 1 with its step and loss"),
    (("ambiseg", "steps"), -1, "int for steps"),
    (("ambiseg", "steps"), 1.5, "float for steps"),
    (("ambiseg", "schedules"), None, "nothing in place of a table"),
    (("ambiseg", "schedules", "capacity"), {}, "no epoch of capacity"),
    (("ambiseg", "schedules", "capacity", "epoch"), "1", "str for epoch of capacity"),
    (("ambiseg", "rate"), None, "nothing in place of a table"),
    (("ambiseg", "rate", "index"), 99, "a place beyond the last value of rate"),
    (("ambiseg", "rate", "best"), "x", "str for best of rate"),
]


@pytest.mark.parametrize(("path", "value", "found"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_a_checkpoint_that_does_not_fit_is_named(saved, path, value, found):
    content, module, trainer = saved
    content = copy.deepcopy(content)
    if value is None:
        del at(content, *path[:-1])[path[-1]]
    else:
        at(content, *path[:-1])[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        checkpoint.fitted(content, Path("r/last.ckpt"), module, trainer)
    assert str(error.value).startswith("r/last.ckpt: expected ")
    assert found in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_not_needed_may_be_anything(saved):
    content, module, trainer = saved
    odd = {"callbacks": 3, "lr_schedulers": None, "pytorch-lightning_version": [], "epoch": "x", "hparams_name": {}}
    whole = checkpoint.fitted(content, Path("r/last.ckpt"), module, trainer)
    again = checkpoint.fitted({**content, **odd}, Path("r/last.ckpt"), module, trainer)
    assert again.keys() == whole.keys()
    assert all(again[key] == whole[key] for key in ("loops", "ambiseg", "callbacks", "pytorch-lightning_version"))


def test_a_flipped_bit_and_a_compressed_archive_are_damage(run):
    path = run / "last.ckpt"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entry = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
        start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", whole, entry.header_offset + 26))
        content = {one.filename: archive.read(one) for one in archive.infolist()}
    path.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    with pytest.raises(ConfigError, match=r"last\.ckpt: .* found a damaged file \(the checksum of "):
        checkpoint.read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in content.items():
            archive.writestr(name, part)
    with pytest.raises(ConfigError, match=r"found a damaged file \(.* is compressed\)"):
        checkpoint.read(path)


def test_a_key_that_takes_for_ever_is_not_hashed(run):
    """Forty tuples, each of the one before, twice: 2⁴⁰ steps to hash."""
    key = b")" + b"".join(b"q%ch%c\x86" % (k, k) for k in range(40))
    bomb = b"\x80\x02}(" + key + b"K\x01u."
    with zipfile.ZipFile(run / "last.ckpt") as archive:
        content = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(run / "last.ckpt", "w") as archive:
        for name, part in content.items():
            archive.writestr(name, bomb if name.endswith("data.pkl") else part)
    with pytest.raises(ConfigError, match=r"found a damaged file .*a key that is not plain in its structure"):
        checkpoint.read(run / "last.ckpt")


@pytest.mark.parametrize("content", [[], {"ambiseg": 1}, {"state_dict": {}, "epoch": 3}])
def test_another_programs_checkpoint_is_named(tmp_path, content):
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match="found another program's"):
        checkpoint.read(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match="found a damaged file"):
        checkpoint.read(tmp_path / "last.ckpt")


def test_a_damaged_run_is_left_as_it_was(run, capsys):
    content = torch.load(run / "last.ckpt", weights_only=True)
    del content["optimizer_states"]
    torch.save(content, run / "last.ckpt")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    line = refused(capsys, "train", "--resume", str(run), "--trainer.epochs=3")
    assert line == f"ambiseg: {run / 'last.ckpt'}: expected a checkpoint of this run, found no states of 1 optimisers"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_fewer_epochs_than_were_done_are_refused(run, capsys):
    before = (run / "config.yaml").read_bytes()
    line = refused(capsys, "train", "--resume", str(run), "--trainer.epochs=1")
    assert line == f"ambiseg: {run}: expected at least 2 for trainer.epochs, which the run has done, found 1"
    assert (run / "config.yaml").read_bytes() == before


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_refused(run, capsys):
    state = load_file(run / "best.safetensors")
    name = next(name for name, tensor in state.items() if tensor.is_floating_point())
    state[name].view(-1)[0] = torch.nan
    save_file(state, run / "best.safetensors")
    line = refused(capsys, "evaluate", str(run))
    assert f"{run / 'best.safetensors'}: expected finite weights, found nan or infinite values in {name!r}" in line
    state[name] = torch.zeros_like(state[name], dtype=torch.long)
    save_file(state, run / "best.safetensors")
    with pytest.raises(ConfigError, match="expected numbers of the kind of this configuration, found I64"):
        load(run)


def test_equal_weights_are_equal_bytes(run, tmp_path):
    from ambiseg.weights import write_weights

    method, about = Run(run).model().method, {"epoch": "2", "val_ged": "0.5", "a": "1", "b": "2", "é": "±"}
    files = []
    for k in range(8):  # safetensors puts metadata in another order each time
        with open(tmp_path / f"{k}.safetensors", "wb") as file:
            write_weights(method, file, dict(reversed(about.items())) if k % 2 else about)
        files.append((tmp_path / f"{k}.safetensors").read_bytes())
    assert len(set(files)) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == {"format": "ambiseg.Weights/1", **about}
    loaded = load_file(tmp_path / "0.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in method.state_dict().items())


# -- run.json and metrics.csv ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda about: [], "expected a run, found []"),
        (lambda about: None, "expected a run, found null"),
        (lambda about: {}, "format: expected a value in a run, found none"),
        (lambda about: {**about, "data": 3}, "data: expected a table"),
        (lambda about: {**about, "data": {**about["data"], "channels": 10**9}}, "channels of data: 1000000000"),
        (lambda about: {**about, "data": {**about["data"], "channels": 0}}, "channels of data: 0"),
        (lambda about: {**about, "data": {**about["data"], "classes": []}}, "classes of data: ()"),
        (lambda about: {**about, "data": {**about["data"], "evaluated": [7]}}, "evaluated of data: (7,)"),
        (lambda about: {**about, "data": {**about["data"], "size": [0, 5]}}, "size of data: (0, 5)"),
        (lambda about: {**about, "data": {**about["data"], "intensity": {"mean": [1, 2, 3]}}}, "intensity of data"),
        (lambda about: {**about, "data": {**about["data"], "intensity": {"std": 0}}}, "std > 0"),
        (lambda about: {**about, "warnings": 3}, "warnings: expected a list, found 3"),
        (lambda about: {**about, "warnings": [{}]}, "warnings.0: expected a text"),
        (lambda about: {**about, "command": "x"}, "command: expected a list"),
        (lambda about: {**about, "reasons": []}, "reasons: expected a table"),
        (lambda about: {**about, "reasons": {"a": 3}}, "reasons.a: expected a text"),
        (lambda about: {**about, "precision": []}, "precision: expected a text"),
        (lambda about: {**about, "started": {}}, "started: expected a text"),
        (lambda about: {key: value for key, value in about.items() if key != "data"}, "data: expected a value"),
    ],
)
def test_a_damaged_record_is_named(run, change, found):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(change(about)))
    with pytest.raises(ConfigError) as error:
        Run(run)
    assert str(error.value).startswith(f"{run / 'run.json'}: ")
    assert found in str(error.value)


def test_a_folder_in_place_of_a_file_is_named(run, capsys):
    for name in sorted(FILES):
        (run / name).rename(run / "aside")
        (run / name).mkdir()
        line = refused(capsys, "train", "--resume", str(run), "--trainer.epochs=3")
        assert str(run / name) in line or f"{run}: expected the folder of a run, found no {name}" in line
        (run / name).rmdir()
        (run / "aside").rename(run / name)


def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(run, capsys):
    (run / "last.ckpt").unlink()
    os.mkfifo(run / "last.ckpt")
    line = refused(capsys, "train", "--resume", str(run), "--trainer.epochs=3")
    assert f"{run / 'last.ckpt'}: expected a file of a run, found none" in line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "expected columns with epoch and loss among them, found ''"),
        ("epoch,lr\n1,2\n", "expected columns with epoch and loss among them, found 'epoch,lr'"),
        ("epoch,loss,loss\n1,2,3\n", "expected columns"),
        ("epoch,loss\n1,small\n", "line 2: loss: expected a number, found 'small'"),
        ("epoch,loss\n1,2,3\n", "line 2: expected 2 cells, found 3"),
        ("epoch,loss\n1,2\n1,2\n", "line 3: expected epoch 2 and its loss, found '1,2'"),
        ("epoch,loss\n1,\n", "line 2: expected epoch 1 and its loss, found '1,'"),
        ("epoch,loss\n\n", "line 2: expected 2 cells, found 0"),
        ('epoch,loss\n1,"2\n', "expected CSV"),
        ("epoch,loss\n1,\udcff\n", "UTF-8"),
        ("epoch,loss\n1,\0\n", "null"),
    ],
)
def test_a_damaged_history_is_named(tmp_path, text, found):
    path = tmp_path / "metrics.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as error:
        history.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert found in str(error.value)


# -- disks -------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_leaves_the_last_epoch(run, tmp_path, monkeypatch, capsys):
    """A real limit, of the size of files: the checkpoint is the first that does not fit."""
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        line = refused(capsys, "train", "--resume", str(run), "--trainer.epochs=3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == f"ambiseg: {run / 'last.ckpt'}: {os.strerror(errno.EFBIG)}"
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"config.yaml"}


def test_the_temporary_folder_is_not_used(run, monkeypatch):
    import tempfile

    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda *_: pytest.fail("the temporary folder was asked for"))
    assert main(["train", "--resume", str(run), "--trainer.epochs=3", "--quiet"]) == 0
    assert os.path.samefile(run / "best.ckpt", run / "last.ckpt") or len(Run(run).history) == 3


def test_a_file_system_without_links(run, monkeypatch):
    def none(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", none)
    (run / "best.ckpt").unlink()  # so that it is written again
    assert main(["train", "--resume", str(run), "--trainer.epochs=3", "--quiet"]) == 0
    assert (run / "best.ckpt").read_bytes() == (run / "last.ckpt").read_bytes()
    assert {path.name for path in run.iterdir()} == FILES
