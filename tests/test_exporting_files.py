"""An exported file in a process that has neither ambiseg nor, for ONNX, PyTorch: its masks are scored like others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ambiseg
from ambiseg.cli import main
from ambiseg.data import Nodules
from ambiseg.data.export import export as write_folder
from ambiseg.exporting.weights import kept_in
from tests.conftest import REPOSITORY

WITHOUT = "import runpy, sys; sys.modules.update(dict.fromkeys({absent}, None)); sys.argv[:] = sys.argv[1:]; {do}"
EXAMPLE = "runpy.run_path(sys.argv[0], run_name='__main__')"
PT2 = """
import numpy, torch
module = torch.export.load(sys.argv[0]).module()
given = {key: torch.from_numpy(value) for key, value in numpy.load(sys.argv[1]).items()}
weights, probs = module(given.pop("image"), **given)
numpy.savez(sys.argv[2], weights=weights.numpy(), probs=probs.numpy())
""".replace("\n", "; ").strip("; ")


def without(absent: tuple[str, ...], do: str, *arguments: str | Path) -> None:
    """Run code where packages cannot be imported."""
    code = WITHOUT.format(absent=absent, do=do)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some nodules as a data folder."""
    folder = tmp_path_factory.mktemp("exported") / "nodules"
    write_folder(Nodules(), folder, 6)
    return folder


def test_masks_of_the_example_are_scored_like_those_of_predict(cases, demo_onnx, tmp_path):
    """The same numbers: those that ``predict`` draws with seed 0."""
    images = sorted((cases / "images").rglob("*.tif"))
    assert len(images) == 6
    normals = torch.randn(1, 16, 1, generator=torch.Generator().manual_seed(0))
    strata = np.arange(4).repeat(4)[None]
    np.savez(tmp_path / "numbers.npz", normals=normals.numpy(), strata=strata)
    numbers = ("--numbers", tmp_path / "numbers.npz")
    example = REPOSITORY / "examples" / "onnx_masks.py"
    without(("ambiseg", "torch"), EXAMPLE, example, demo_onnx, tmp_path / "theirs", *images, *numbers)
    ambiseg.predict("demo", images, tmp_path / "ours", overview=False)
    theirs, ours = (ambiseg.evaluate_files(tmp_path / name, cases, quiet=True) for name in ("theirs", "ours"))
    found, expected = (one.settings[0].metrics["ged"].mean for one in (theirs, ours))
    assert found == pytest.approx(expected, abs=1e-3)
    weights = json.loads((tmp_path / "theirs" / "weights.json").read_text())
    assert all(len(by) == 16 and sum(by.values()) == pytest.approx(1) for by in weights.values())


def test_example_draws_by_itself(cases, demo_onnx, tmp_path):
    import onnx

    (tmp_path / "demo.onnx").write_bytes(kept_in(onnx.load(demo_onnx), "8").SerializeToString())
    image = next((cases / "images").rglob("*.tif"))
    example = REPOSITORY / "examples" / "onnx_masks.py"
    without(("ambiseg", "torch"), EXAMPLE, example, tmp_path / "demo.onnx", tmp_path / "out", image, "--draws", "9")
    (by,) = json.loads((tmp_path / "out" / "weights.json").read_text()).values()
    assert len(by) == 8  # two of every stratum


def test_pt2_of_the_command_runs_without_ambiseg(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "demo", "--format", "torch", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["inputs"] == ["image", "normals", "strata"]
    assert about["difference"] < 1e-4
    assert Path("demo.pt2").stat().st_size == about["bytes"]
    model = ambiseg.load("demo")
    raw = -1000 + 1400 * torch.rand(1, 1, 40, 56, generator=torch.Generator().manual_seed(0))
    normals, strata = torch.zeros(1, 4, 1), torch.arange(4)[None]
    np.savez(tmp_path / "in.npz", image=raw.numpy(), normals=normals.numpy(), strata=strata.numpy())
    without(("ambiseg",), PT2, tmp_path / "demo.pt2", tmp_path / "in.npz", tmp_path / "out.npz")
    found, predictive = np.load(tmp_path / "out.npz"), model.predict(model.card.prepare(raw))
    assert isinstance(predictive, ambiseg.Stratified)
    np.testing.assert_allclose(found["weights"], predictive.weights.numpy(), atol=1e-4)
    np.testing.assert_allclose(found["probs"], predictive.probs(predictive.centre_noise()).detach().numpy(), atol=1e-4)
