"""Methods that are not in the package go through every command, and their runs mention no other method."""

from __future__ import annotations

import json
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

from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.data.sets.shapes import Shapes
from ambiseg.evaluation import evaluate
from ambiseg.methods import METHODS
from ambiseg.prediction import predict
from ambiseg.reporting import report
from ambiseg.runs import Run, load
from ambiseg.training import train
from tests.conftest import REPOSITORY, TINY
from tests.drop_ins import DROP_INS

FOREIGN = ("mose", "expert", "capacity", "γ", "kl", "transport", "annealing", "gate_level")


@pytest.fixture(autouse=True)
def _dropped_in(monkeypatch):
    for name, method in DROP_INS.items():
        monkeypatch.setitem(METHODS, name, method)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run of each, after two epochs."""
    folder, found = tmp_path_factory.mktemp("drop-ins"), {}
    METHODS.update(DROP_INS)
    try:
        for name in DROP_INS:
            found[name] = folder / name
            moving = ["--model.sharpness={values: [0.5, 1], epochs: 1}"] * (name == "two-heads")
            train(parse([*TINY, f"--model.method={name}", *moving]), found[name], quiet=True, command=[])
    finally:
        for name in DROP_INS:
            del METHODS[name]
    return found


def mentions(text: str) -> list[str]:
    words = text.lower().replace("_", " ").replace('"', " ").split()
    return [foreign for foreign in FOREIGN if any(word.strip(".,:;()'") in (foreign, f"{foreign}s") for word in words)]


@pytest.mark.parametrize("name", DROP_INS)
def test_a_run_holds_what_its_method_has_and_nothing_else(runs, name):
    run = Run(runs[name])
    content = yaml.safe_load((runs[name] / "config.yaml").read_text())
    assert content["model"].keys() == DROP_INS[name].Config.model_fields.keys()
    terms = {
        "latent": set(),
        "two-heads": {"fit", "sharpness"},
        "adversarial": {"generator_loss", "generator_fit", "generator_fooled", "judge_loss"},
    }[name]
    common = {"epoch", "step", "lr", "loss", "val_ged", "val_ged_unbiased", "val_masks", "val_matched_iou"}
    assert run.history[-1].keys() == common | terms
    for path in runs[name].glob("*.[cyj]*"):
        if path.suffix in (".csv", ".json", ".yaml"):
            text = path.read_text().replace("protocol: mose", "")  # how GED is computed, not a method
            assert not mentions(text), (path.name, mentions(text))


@pytest.mark.parametrize("name", DROP_INS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_evaluated_predicted_and_reported(runs, name, tmp_path):
    strata = name == "two-heads"
    found = evaluate(runs[name], samples=(4,), accelerator="cpu", quiet=True)
    assert {setting.form for setting in found.settings} == ({"standard", "compact"} if strata else {"standard"})
    assert (found.strata is not None) == strata
    found.save(runs[name] / "evaluation-test.json")
    page = report(runs[name], out=tmp_path / "report.html", cases=1, quiet=True)
    text = page.read_text().replace("protocol: mose", "").replace("differ in: mose", "")  # how GED is computed
    assert not mentions(text)

    image = Shapes(count=60, size=32)[0].image
    Image.fromarray(image[0]).save(tmp_path / "a.png")
    same = np.repeat(image[0].T[..., None], 5, -1)  # a volume whose slices are all the same
    nibabel.save(nibabel.Nifti1Image(same, np.eye(4)), tmp_path / "v.nii.gz")
    one, volume = predict(runs[name], [tmp_path / "a.png", tmp_path / "v.nii.gz"], tmp_path / "out")
    assert (one.strata is not None) == strata
    assert torch.equal(volume.masks.labels, volume.masks.labels[:, :, :1].expand_as(volume.masks.labels))
    about = json.loads((tmp_path / "out" / "a" / "weights.json").read_text())
    assert not mentions(json.dumps(about))
    assert (tmp_path / "out" / "a" / "head_1.png").is_file() == strata
    assert sum(mask["weight"] for mask in about["masks"]) == pytest.approx(1)
    assert (tmp_path / "out" / "v" / "mask_00.nii.gz").is_file()


@pytest.mark.parametrize("name", DROP_INS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_large_images_are_coherent(runs, name):
    """One draw over all windows of an image of 2048 × 2048: no seam, and the same as in a window of its middle."""
    tile = Shapes(count=60, size=32)[0].image
    image = np.tile(tile, (1, 64, 64))
    options: dict[str, Any] = {"per_stratum": 1} if name == "two-heads" else {"samples": 2}
    (one,) = predict(load(runs[name]), [image], overview=False, merge=False, **options)
    assert one.windows > 1
    labels = one.masks.labels[0]
    inner = labels[:, 64:1984, 64:1984]  # the image repeats every 32 pixels, so the masks do, across every window
    assert torch.equal(inner[:, 32:], inner[:, :-32])
    assert torch.equal(inner[:, :, 32:], inner[:, :, :-32])


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.drop_ins", *arguments], cwd=REPOSITORY, env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_two_optimisers_resume_to_the_bit(tmp_path):
    """Stopped after its second epoch and made longer, it is what it would have been without a stop."""
    settings = [*TINY, "--model.method=adversarial", "--trainer.accumulate=2", "--optimizer.clip=1"]
    train(parse([*settings, "--trainer.epochs=4"]), tmp_path / "whole", quiet=True)
    train(parse([*settings, "--trainer.epochs=2"]), tmp_path / "parts", quiet=True)
    assert main(["train", "--resume", str(tmp_path / "parts"), "--trainer.epochs=4", "--quiet"]) == 0
    one, two = (load_file(tmp_path / run / "last.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "parts" / "metrics.csv").read_text()
    steps = int(Run(tmp_path / "whole").history[-1]["step"])
    batches = 0
    loader = -(-len(Run(tmp_path / "whole").split.parts["train"]) // 8)
    for epoch in range(4):
        done = sum(-(-loader // 2) for _ in range(epoch))
        batches += sum(1 for i in range(loader) if (done + i // 2) % 3)
    assert one["judged"].item() == batches  # the discriminator had its turn in two of three steps
    assert steps == 4 * -(-loader // 2)


def test_a_terminal_and_a_log_show_the_terms_of_the_method(tmp_path):
    (tmp_path / "tiny.yaml").write_text("seed: 0\n")
    done = command(
        "train", str(tmp_path / "tiny.yaml"), *TINY, "--model.method=two-heads", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    assert all("loss" in line and "fit" in line and "val GED" in line for line in lines)
    assert not mentions(done.stderr + done.stdout)
