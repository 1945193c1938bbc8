"""The whole life of every method: trained, stopped and resumed, in two processes, evaluated, used, reported."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from ambiseg.config import Config, parse
from ambiseg.data.loader import Batch
from ambiseg.data.sets.shapes import Shapes
from ambiseg.evaluation import evaluate
from ambiseg.masks import MaskDistribution
from ambiseg.methods import METHODS
from ambiseg.nn.config import BackboneConfig
from ambiseg.prediction import predict
from ambiseg.regions import RegionMasks, partition
from ambiseg.reporting import report
from ambiseg.runs import Run
from ambiseg.training import train
from ambiseg.training.module import TrainingModule
from tests.conftest import REPOSITORY, TINY
from tests.drop_ins import DROP_INS
from tests.test_methods import KNOWN, TESTED, every_method

SMALL = [*TINY, "--data.options={count: 40, size: 32}"]


@pytest.fixture(autouse=True)
def _dropped_in(monkeypatch):
    for name, method in DROP_INS.items():
        monkeypatch.setitem(METHODS, name, method)


def settings_of(name: str) -> list[str]:
    """A small training with the small version of a method."""
    own = [f"--model.{key}={json.dumps(value)}" for key, value in TESTED[name].items()]
    return [*SMALL, f"--model.method={name}", *own]


# So that all terms of the loss are there that a method explains.
EVERY_TERM = {"mose": ["--model.objective=energy", "--model.energy_share=0.5", "--model.usage_prior=0.01"]}


class Stopped(RuntimeError):
    """As a machine that goes down in the middle of an epoch."""


def stopped(run: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the middle of the second epoch."""
    plain = TrainingModule.training_step

    def step(self: TrainingModule, batch: Batch, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, 1):
            raise Stopped
        plain(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", step)
        with pytest.raises(Stopped):
            train(config, run, quiet=True)


@every_method
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whole_life(name, tmp_path, monkeypatch):
    config, whole, parts = (
        parse([*settings_of(name), *EVERY_TERM.get(name, [])]),
        tmp_path / "whole",
        tmp_path / "parts",
    )
    train(config, whole, quiet=True)
    content = yaml.safe_load((whole / "config.yaml").read_text())
    assert content["model"].keys() == KNOWN[name].Config.model_fields.keys()
    history = Run(whole).history
    assert [row["epoch"] for row in history] == [1, 2]
    assert all(math.isfinite(value) for row in history for value in row.values())
    terms = history[-1].keys() - {
        "epoch",
        "step",
        "lr",
        "loss",
        "val_ged",
        "val_ged_unbiased",
        "val_masks",
        "val_matched_iou",
    }
    assert all(any(term.endswith(known) for term in terms) for known in KNOWN[name].terms), "explained and absent"

    # Stopped and resumed, it is what it would have been.
    stopped(parts, config, monkeypatch)
    train(config, parts, resume=True, quiet=True)
    one, two = (load_file(run / "last.safetensors") for run in (whole, parts))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert (whole / "metrics.csv").read_text() == (parts / "metrics.csv").read_text()

    # Evaluated and reported.
    strata = bool(KNOWN[name].stratum)
    found = evaluate(whole, samples=(4,), accelerator="cpu", quiet=True)
    assert {setting.form for setting in found.settings} == ({"standard", "compact"} if strata else {"standard"})
    assert (found.strata is not None) == strata
    assert evaluate(whole, samples=(4,), accelerator="cpu", quiet=True).to_json() == found.to_json()
    turned = evaluate(whole, samples=(4,), symmetries=2, accelerator="cpu", quiet=True)
    assert (found.symmetries, turned.symmetries) == (1, 2)
    turned.save(whole / "evaluation-test.json")
    page = report(whole, out=tmp_path / "report.html", cases=1, quiet=True).read_text()
    assert all(text in page for text in KNOWN[name].terms.values())

    # An image, a volume whose slices are all the same, and an image by windows.
    image = Shapes(count=40, size=32)[0].image
    Image.fromarray(image[0]).save(tmp_path / "a.png")
    same = np.repeat(image[0].T[..., None], 3, -1)
    nibabel.save(nibabel.Nifti1Image(same, np.eye(4)), tmp_path / "v.nii.gz")
    one, volume = predict(whole, [tmp_path / "a.png", tmp_path / "v.nii.gz"], tmp_path / "out", samples=None)
    assert (one.strata is not None) == strata
    assert torch.equal(volume.masks.labels, volume.masks.labels[:, :, :1].expand_as(volume.masks.labels))
    about = json.loads((tmp_path / "out" / "a" / "weights.json").read_text())
    assert sum(mask["weight"] for mask in about["masks"]) == pytest.approx(1)
    assert (tmp_path / "out" / "v" / "mask_00.nii.gz").is_file()
    options: dict[str, Any] = {"per_stratum": 1} if strata else {"samples": 2}
    large = np.tile(image, (1, 3, 4))
    (wide,) = predict(whole, [large], window=64, overlap=32, merge=False, **options)
    assert wide.windows > 1
    assert wide.masks.labels.shape[2:] == (96, 128)
    (again,) = predict(whole, [large], window=64, overlap=32, merge=False, **options)
    assert torch.equal(wide.masks.labels, again.masks.labels)


IN_TWO = """
import json, sys
from ambiseg.config import parse
from ambiseg.methods import METHODS
from ambiseg.training import train
from tests.drop_ins import DROP_INS

if __name__ == "__main__":
    METHODS.update(DROP_INS)
    for name, settings in json.loads(sys.argv[2]).items():
        train(parse(settings), f"{sys.argv[1]}/{name}", quiet=True)
"""


def test_two_processes_train(tmp_path):
    """All methods in one command: most of its time is that of starting two processes."""
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.epochs=1"]
    script = tmp_path / "in_two.py"
    script.write_text(IN_TWO)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    given = json.dumps({name: [*settings_of(name), *two] for name in TESTED})
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), given], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in TESTED:
        (row,) = Run(tmp_path / name).history
        assert all(math.isfinite(value) for value in row.values()), name


@every_method
def test_ten_times_the_learning_rate_stays_finite(name):
    """200 steps on noise, which nobody can learn, with the gradient clipped as the method asks for."""
    method = KNOWN[name]
    torch.manual_seed(0)
    model = method.build(method.Config(method=name, **TESTED[name]), BackboneConfig(channels=[4, 8]), 1, 2)
    g = torch.Generator().manual_seed(1)
    images, labels = torch.randn(4, 1, 16, 16, generator=g), torch.randint(2, (4, 3, 16, 16), generator=g)
    clip, groups = parse([f"--model.method={name}"]).optimizer.clip, model.parameter_groups()
    optimisers = {key: torch.optim.Adam(group.parameters, lr=10 * (group.lr or 1e-3)) for key, group in groups.items()}
    for step in range(200):
        for phase in model.phases(step):
            extra = {"phase": phase} if len(groups) > 1 else {}
            total = model.loss(images, MaskDistribution(labels), generator=g, **extra)["total"]
            assert total.isfinite(), (step, phase)
            optimisers[phase].zero_grad()
            total.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(groups[phase].parameters, clip)
            optimisers[phase].step()
    assert all(value.isfinite().all() for value in model.state_dict().values())


@every_method
def test_steps_and_draws_need_no_value(name):
    """On the meta device tensors have no values: whatever looks at one, and would wait for an accelerator, raises."""
    if name in DROP_INS:
        pytest.skip("written for clarity")
    method = KNOWN[name]
    model = method.build(method.Config(method=name, **TESTED[name]), BackboneConfig(channels=[4, 8]), 1, 3).to("meta")
    g = torch.Generator().manual_seed(0)
    masks = MaskDistribution(
        torch.randint(3, (2, 3, 16, 16), generator=g), torch.tensor([[0.5, 0.5, 0.0]] * 2), torch.rand(2, 16, 16) < 0.9
    )
    loaded = RegionMasks.of(partition(masks, 3), masks.spatial, masks.weights, masks.valid)
    batch = Batch(torch.zeros(2, 1, 16, 16), loaded, ("a", "b"), ("a", "b")).to("meta")
    several = len(model.parameter_groups()) > 1
    for phase, group in model.parameter_groups().items():
        extra = {"phase": phase} if several else {}
        model.loss(batch.images, batch.annotations, **extra)["total"].backward()
        assert all(parameter.grad is not None for parameter in group.parameters)
    predictive = model.predict(batch.images)
    assert predictive.sample(3).labels.shape == (2, 3, 16, 16)
    assert predictive.marginal(2).shape == (2, 3, 16, 16)
