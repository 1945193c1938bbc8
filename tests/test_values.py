"""The distribution of raw values that a model was trained on, and images that do not fit it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ambiseg.data.config import DataConfig
from ambiseg.data.module import DataModule
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.data.values import LEVELS, Values, some_of
from ambiseg.runs import Run, open_run
from tests.conftest import SHARED
from tests.files import save

RNG = np.random.default_rng(0)


def scans(count: int, low: float = -1000, width: float = 1000, channels: int = 1) -> list[np.ndarray]:
    """Images of a few shades, brighter and darker ones."""
    return [low + width * RNG.beta(1 + i % 4, 3, (channels, 40, 30)) for i in range(count)]


def test_percentiles_are_those_of_all_pixels_and_of_single_images():
    images = [np.full((1, 4, 5), level, np.int16) + np.arange(20).reshape(1, 4, 5) for level in (0, 100, 200)]
    values = Values.of(images)
    assert values.pooled[0] == pytest.approx(np.percentile(np.stack(images), LEVELS), rel=1e-5)
    assert values.low[0][3] == pytest.approx(9.5 + 1)  # the 0.5th percentile of three medians, 100 apart
    assert values.high[0][3] == pytest.approx(209.5 - 1)
    assert values.span[0] == pytest.approx((17.1, 17.1))
    assert values.images == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x, None),
        (lambda x: x + 200, None),  # a little brighter
        (lambda x: (x + 1000) / 1000 * 255, "its values are mostly "),
        (lambda x: (x + 1000) / 1000, "its values are mostly "),
        (lambda x: x + 1024, "its values are mostly "),
        (lambda x: x * 0 - 500, "all its pixels are -500"),
        (lambda x: -500 + (x - x.mean()) / 20, "its values are mostly "),  # almost constant
        (lambda x: x * 10, "its values are mostly "),
    ],
)
def test_other_units_and_blank_images_are_found(change, problem):
    values = Values.of(scans(40))
    for image in scans(8):
        found = values.problem(change(image))
        assert found is None if problem is None else (found or "").startswith(problem)


def test_a_volume_is_judged_as_a_whole_and_a_channel_is_named():
    values = Values.of(scans(40, channels=2))
    blank = np.full((2, 40, 30), -900.0)
    assert values.problem(*scans(4, channels=2), blank) is None
    assert values.problem(blank) == "all its pixels of channel 0 are -900"
    odd = scans(1, channels=2)[0]
    odd[1] += 5000
    assert (values.problem(odd) or "").startswith("its values of channel 1 are mostly ")


def test_training_data_that_are_blank_make_no_alarm_of_blank_images():
    assert Values.of([np.zeros((1, 8, 8))] * 3).problem(np.zeros((1, 8, 8))) is None


def test_some_of_a_long_list_are_evenly_spaced():
    assert some_of(range(10)) == list(range(10))
    found = some_of(range(5000))
    assert len(found) == 512
    assert {b - a for a, b in pairwise(found)} == {9, 10}


def test_the_shipped_model_knows_its_units_and_accepts_its_test_images():
    run, nodules = open_run("demo"), Nodules()
    assert (run.card.units, run.card.size) == ("HU", (64, 64))
    values = run.card.values
    assert values is not None
    images = [nodules[nodules.names.index(name)].image for name in run.split.parts["test"][:60]]
    assert sum(values.problem(image) is not None for image in images) <= 1
    as_bytes = [np.clip((image + 1000.0) / 1400 * 255, 0, 255).round() for image in images]
    assert all(values.problem(image) for image in as_bytes)


def test_what_was_trained_on(tiny_run, tmp_path):
    """The training part's values, the largest size of training or validation; saved with the run."""
    run = Run(tiny_run)
    data = DataModule(run.config.data, split=run.split)
    data.setup()
    images = [data.cases[i].image for i in data.indices("train")]
    assert run.card.values == Values.of(images)
    assert run.card.units == "8-bit grey"
    data.config = DataConfig(**{**vars(run.config.data), "size": 16, "eval_size": (20, 24)})
    assert data.trained_on()[1] == (20, 24)


def test_a_run_of_an_earlier_version_has_none(tiny_run, tmp_path):
    for path in Path(tiny_run).iterdir():
        (tmp_path / path.name).symlink_to(path)
    about = json.loads((tmp_path / "run.json").read_text())
    for key in ("units", "values", "size", "reading", "extra"):
        del about["data"][key]
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").write_text(json.dumps(about))
    card = Run(tmp_path).card
    assert (card.units, card.values, card.size, card.extra) == ("", None, None, None)


def test_units_of_files(tmp_path):
    from ambiseg.data.sets.folder.cases import Folder

    for name, array in (("grey", np.zeros((8, 8), np.uint8)), ("deep", np.zeros((8, 8), np.uint16))):
        save(tmp_path / name / "images" / "a.png", array)
        save(tmp_path / name / "masks" / "r" / "a.png", np.eye(8, dtype=np.uint8))
    assert Folder(tmp_path / "grey").units == "8-bit grey"
    assert Folder(tmp_path / "deep").units == ""
    assert Folder(tmp_path / "deep", units="lux").units == "lux"


REAL = SHARED / "data" / "lidc71" / "lidc71.npz"


@pytest.mark.skipif(not REAL.is_file(), reason="lidc71 is not on this machine")
def test_real_scans_raise_few_alarms_and_bytes_always_do():
    with np.load(REAL) as file:
        images, parts = file["image"][:, None], file["split"]
    values = Values.of(images[some_of(np.flatnonzero(parts == "train").tolist())])
    test = images[parts == "test"]
    assert sum(values.problem(image) is not None for image in test) <= 0.02 * len(test)
    assert all(values.problem(np.clip((image + 1000.0) / 1400 * 255, 0, 255).round()) for image in test[::5])
