"""The model that comes with the package: small, made as it says, and of use on patients that it has not seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import ambiseg
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.prediction import predict
from ambiseg.runs import open_run
from tests.conftest import REPOSITORY


def test_it_is_small_and_says_how_it_was_made():
    run = open_run("demo")
    assert sum(path.stat().st_size for path in run.folder.iterdir()) <= 2_500_000
    command = run.about["command"]
    assert command[:3] == ["ambiseg", "train", "demo"]
    settings = [word for word in command[3:] if word not in ("--out", "runs/demo")]
    assert run.config == parse(settings, "demo")  # the recipe of today makes it again
    assert run.about["seed"] == run.config.seed
    assert {"standard-16", "compact-16"} <= run.about["scores"].keys()
    assert run.about["scores"]["images"] == len(run.split.parts["test"])


def test_its_weights_follow_the_readers_on_patients_it_has_not_seen():
    run, nodules = open_run("demo"), Nodules(size=64)
    model, unseen = run.model(), set(run.split.parts["test"])
    by_readers: dict[int, list[int]] = {1: [], 4: []}
    for i, name in enumerate(nodules.names):
        chosen = by_readers.get(nodules.marked(i))
        if name in unseen and chosen is not None and len(chosen) < 24:
            chosen.append(i)
    empty, distances = {}, []
    for readers, chosen in by_readers.items():
        cases = [nodules[i] for i in chosen]
        images = run.card.prepare(torch.stack([torch.from_numpy(case.image) for case in cases]))
        truth = torch.stack([torch.from_numpy(case.labels) for case in cases])
        masks = model.predict(images).compact(4, torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
        blank = (masks.labels == 0).flatten(2).all(2)
        empty[readers] = float((masks.mass * blank).sum(1).mean())
        # Beside the model: nothing at all, and the first reader's mask, which the model does not know.
        rivals = masks, torch.zeros_like(truth[:, :1]), truth[:, :1]
        distances.append([float(ambiseg.ged(rival, truth).mean()) for rival in rivals])
    assert empty[1] > empty[4] + 0.2
    own, nothing, first = (sum(column) / len(by_readers) for column in zip(*distances, strict=True))
    assert own < min(nothing, first) / 2


def test_it_predicts_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    hounsfield = Nodules()[7].image[0]
    Image.fromarray((hounsfield + 1024).clip(0).astype("uint16")).save("scan.png")
    assert main(["predict", "demo", "scan.png", "--out", "masks"]) == 0
    assert (tmp_path / "masks" / "scan" / "overview.png").stat().st_size > 10_000
    assert "1 predicted" in capsys.readouterr().out


def test_the_page_shows_what_the_shipped_model_predicts_of_the_sample():
    """``python tools/draw_prediction.py`` writes sample, picture and JSON again when the model has changed."""
    page = (REPOSITORY / "docs" / "predict.md").read_text(encoding="utf-8")
    shown = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    [found] = predict("demo", "sample")
    assert found.strata is not None
    assert found.notes == ()
    assert found.strata.weights.tolist() == pytest.approx(shown["strata"]["weights"], abs=0.02)
    assert found.masks.mass[0, 0].item() == pytest.approx(shown["masks"][0]["weight"], abs=0.05)
