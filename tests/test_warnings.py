"""Whatever keeps a training from learning is said before it begins, with what to type instead."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ambiseg.cli import main
from ambiseg.config import Config, parse, recipes
from ambiseg.planning.rules import make
from ambiseg.planning.warnings import warnings
from tests.test_planning import USUAL, discs, write

FITS, _ = make({}, USUAL, 6)


def said(config: Config, **facts) -> list[str]:
    return [str(one) for one in warnings(config, replace(USUAL, **facts))]


@pytest.mark.parametrize(
    ("settings", "facts", "what", "remedy"),
    [
        ({"data.windows": 1}, {}, "steps in all", "--data.windows 3, or --trainer.epochs 58"),
        ({"optimizer.warm_up": 900}, {}, "rises over 900 steps", "--optimizer.warm_up 4"),
        ({"data.batch_size": 256}, {}, "batches of 256 from", "--data.batch_size 28"),
        ({"data.size": 256}, {}, "windows of 256×256 are larger", "--data.size 128"),
        ({"data.eval_size": 64}, {}, "the middle 64×64 of images of 128×128, 25 %", "--data.eval_size null"),
        ({"backbone.momentum": 0.001}, {}, "batch statistics", "--backbone.momentum 0.1"),
        ({"trainer.check_every": 99}, {}, "never runs", "--trainer.check_every"),
        ({"model.capacity": {"values": [0.5, 1], "epochs": 90}}, {}, "after 90 epochs", "--model.capacity.epochs"),
        ({}, {"shares": (1.0, 0.0)}, "no pixel of the training part is marked", "data check"),
        ({}, {"classes": ("bg", "cell", "rim"), "evaluated": (1, 2), "shares": (0.7, 0.3, 0.0)}, "rim", "split_seed 1"),
        ({}, {"readers": 1, "fewest": 1}, "one annotator", "masks/<reader>/"),
        ({}, {"identical": True}, "agree on every pixel", "data check"),
        ({}, {"val_patients": 1}, "the validation part has 1 patient", "--data.fractions"),
        ({}, {"patients": 3}, "3 patients in the training part", "more patients"),
    ],
)
def test_each_names_its_remedy(settings, facts, what, remedy):
    config = FITS.with_settings(settings)
    (line,) = [line for line in said(config, **facts) if what in line]
    assert remedy in line.partition(": ")[2]
    assert "\n" not in line


@pytest.mark.parametrize("remedy", [{"data.windows": 3}, {"trainer.epochs": 58}])
def test_what_is_advised_helps(remedy):
    config = FITS.with_settings({"data.windows": 1})
    assert len(said(config)) == 1
    assert said(config.with_settings(remedy)) == []


def test_a_plan_needs_no_warning():
    assert said(FITS) == []


# Images, patients and sizes as the data of each recipe have them.
LIDC71 = {"images": 1500, "patients": 500, "median": (71, 71), "readers": 4}
OWN = {
    "demo": {"images": 1466, "patients": 480, "median": (64, 64), "readers": 4},
    "lidc71": LIDC71,
    "lidc71-paper": LIDC71,
    "camvid": {"images": 367, "patients": 4, "median": (60, 80), "readers": 32},
    "cityscapes": {"images": 2500, "patients": 15, "median": (256, 512), "readers": 32},
    "cityscapes-extra": {"images": 2500, "patients": 15, "median": (256, 512), "readers": 32},
}


@pytest.mark.parametrize("recipe", list(recipes()))
def test_recipes_on_their_own_data_need_none(recipe):
    lidc = {"images": 9000, "patients": 500, "median": (128, 128), "readers": 4}
    own = {**OWN.get(recipe, lidc), "patients": 20}
    assert said(parse([], recipe), **own) == []


def test_a_recipe_of_other_data_is_warned_about_and_auto_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "scans", *discs(24, (150, 150)))
    command = [
        "train",
        "demo",
        "--data.name",
        "folder",
        "--data.root",
        "scans",
        "--out",
        "run",
        "--data.eval_size",
        "64",
    ]
    assert main([*command, "--trainer.epochs", "1", "--backbone.channels", "[2, 4]"]) == 0
    shown = capsys.readouterr().err
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    for words in ("the middle 64×64 of images of 150×150", "rises over 100 steps", "per epoch), too few to learn from"):
        assert any(words in line for line in about["warnings"])
        assert words in shown
    assert "ambiseg train auto --data.root scans" in shown
