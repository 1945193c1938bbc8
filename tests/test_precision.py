"""The precision of a training: chosen by hardware, recorded, and kept when a run is resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file

from ambiseg import cli
from ambiseg._util.processes import program
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.runs import Run, build_model
from ambiseg.training import precision, train
from ambiseg.training.module import TrainingModule
from tests.conftest import TINY

AUTO = [*TINY, "--trainer.precision=auto"]


@pytest.mark.parametrize(
    ("found", "fast"),
    [({"avx512_f": True, "avx512_bf16": False}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)],
)
def test_a_cpu_that_would_emulate_bfloat16_computes_in_32_bits(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert precision.fast_bf16("cpu") is fast
    assert precision.resolve("auto", "cpu")[0] == ("bf16-mixed" if fast else "32-true")
    assert precision.resolve("32-true", "cpu")[0] == "32-true"  # what is asked for is not questioned
    assert precision.resolve("bf16-mixed", "cpu")[0] == "bf16-mixed"
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # PyTorch before 2.10
    assert not precision.fast_bf16("cpu")


def test_a_gpu_that_would_emulate_it_does_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for native in (False, True):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert precision.fast_bf16("auto") is precision.fast_bf16("gpu") is native
    assert not precision.fast_bf16("mps")


def test_a_run_goes_on_in_the_precision_that_it_began_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precision, "fast_bf16", lambda accelerator: True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(parse(AUTO), whole, quiet=True)
    run = train(parse([*AUTO, "--trainer.epochs=1", "--optimizer.decay=constant"]), parts, command=[])
    assert (
        "precision bf16-mixed: this device computes with bfloat16; --trainer.precision 32-true"
        in capsys.readouterr().err
    )
    assert (run.config.trainer.precision, run.precision) == ("auto", "bf16-mixed")
    assert json.loads((parts / "run.json").read_text())["precision"] == "bf16-mixed"
    monkeypatch.setattr(precision, "fast_bf16", lambda accelerator: False)  # another machine
    assert main(["train", "--resume", str(parts), "--trainer.epochs=2"]) == 0
    assert "precision bf16-mixed: as the run began; this device has no instructions" in capsys.readouterr().err
    first, second = (load_file(folder / "last.safetensors") for folder in (parts, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)
    asked = precision.resolve("32-true", "cpu", begun="bf16-mixed")
    assert asked == ("32-true", "as asked; the run began with bf16-mixed")


@pytest.mark.parametrize(("clip", "expected"), [(2.0, 2.0), (100.0, 10.0), (None, 10.0)])
def test_the_norm_that_is_clipped_does_not_depend_on_the_scale_of_16_mixed(clip, expected):
    config = parse([*TINY, f"--optimizer.clip={'null' if clip is None else clip}"])
    module = TrainingModule(build_model(config, 1, 2), config, (1,))

    class Scaled:
        precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))  # pyright: ignore[reportPrivateImportUsage]

    module._trainer = Scaled()  # type: ignore[assignment]
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = Scaled.precision_plugin.scaler
    assert scaler is not None
    scaler.scale((5 * parameter).sum()).backward()
    Scaled.precision_plugin.clip_gradients(optimizer, module._largest_norm() or 0)
    scaler.unscale_(optimizer)
    assert parameter.grad is not None
    assert parameter.grad.norm().item() == pytest.approx(expected, rel=1e-4)


def test_runs_from_before_precision_was_recorded(tiny_run, tmp_path):
    about = json.loads((tiny_run / "run.json").read_text())
    del about["precision"]
    (tmp_path / "config.yaml").write_text((tiny_run / "config.yaml").read_text())
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert Run(tmp_path).precision == "32-true"


# -- the command ---------------------------------------------------------------------------------------------------


def test_waiting_threads_spin_briefly_unless_the_user_has_decided(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ):
        monkeypatch.setattr(os, "environ", dict(given))
        cli._spin_briefly()
        assert os.environ == expected
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "torch", torch)  # too late: it has read them
    cli._spin_briefly()
    assert os.environ == {}


def test_suggested_commands_can_be_typed_in_the_same_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bin = tmp_path / "a venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "ambiseg").write_text("#!/bin/sh\n")
    (bin / "ambiseg").chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["a venv/bin/ambiseg", "demo"])
    assert program() == "'a venv/bin/ambiseg'"
    monkeypatch.setenv("PATH", str(bin))
    assert program() == "ambiseg"
    monkeypatch.setattr(sys, "argv", ["ambiseg/__main__.py"])
    assert program() == "ambiseg"
    monkeypatch.setenv("PATH", "/nowhere")
    assert program().endswith(" -m ambiseg")
