"""How unlike the training images an image is: statistics of features, their file, and what predictions say."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import ambiseg
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.data.values import some_of
from ambiseg.familiarity import FILE, Familiarity, data_of, fits, joined, look, saved_familiarity
from ambiseg.nn.statistics import STATISTICS, input_statistics, watched_layers, watching
from ambiseg.prediction import predict
from ambiseg.runs import Run, open_run
from tests.conftest import SHARED, TINY

RNG = np.random.default_rng(0)


def made(train: np.ndarray, others: np.ndarray, **more) -> Familiarity:
    options = {"scores": np.linspace(0, 1, 11), "layers": (), "score": "pairs", "weights": "w"} | more
    return Familiarity.of(train, others, **options)


def test_distances_are_those_of_mahalanobis_where_every_axis_is_kept():
    mixed = RNG.normal(size=(800, 5)) @ RNG.normal(size=(5, 5)) + 3
    found = made(mixed, mixed[:50])
    assert found.axes.shape == (5, 5)
    x = RNG.normal(size=(7, 5)) * 4
    away = x - mixed.mean(0)
    covariance = np.cov(mixed.T, bias=True)
    expected = np.sqrt([d @ np.linalg.solve(covariance, d) for d in away])
    assert found.distance(x) == pytest.approx(expected, rel=2e-3)


def test_ranks_and_limits():
    found = made(RNG.normal(size=(200, 3)), RNG.normal(size=(100, 3)))
    assert (found.unsure(-1), found.unsure(0.55), found.unsure(2)) == (0, 6 / 11, 1)
    assert found.is_unsure(0.81)
    assert not found.is_unsure(0.79)
    near, far = float(found.distances[50]), float(found.distances[-1]) + 1
    assert not found.is_unlike(near)
    assert found.is_unlike(far)
    assert (found.unlike(near), found.unlike(far)) == (0.5, 1)
    constant = made(np.ones((40, 3)), np.ones((30, 3)))  # a statistic without any spread
    assert np.isfinite(constant.distance(np.ones((1, 3)))).all()


def test_input_statistics_tell_brightness_gradients_and_nothing_of_size():
    image = torch.from_numpy(RNG.random((1, 2, 32, 32))).float()
    assert input_statistics(image).shape == (1, 2 * STATISTICS)
    assert input_statistics(image)[0, 2].item() == pytest.approx(image[0, 0].median().item(), abs=1e-2)
    tiled = image.tile(1, 1, 3, 3)
    assert (input_statistics(tiled) - input_statistics(image)).abs().max() < 0.35
    smooth = torch.nn.functional.avg_pool2d(image, 5, 1, 2)
    assert (input_statistics(image) - input_statistics(smooth))[0, 5] > 1  # log of gradients
    for odd in (torch.zeros(1, 1, 1, 1), torch.full((1, 1, 2, 9), 3.0)):
        assert input_statistics(odd).isfinite().all()


def test_layers_are_the_first_half_of_those_that_run_in_the_order_in_which_they_run():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 2, 3, padding=1)
            self.unused, self.point = nn.Conv2d(1, 1, 3), nn.Conv2d(2, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.point(self.first(x)))

    net, images = Net(), torch.rand(3, 1, 8, 8)
    assert watched_layers(net, images) == ("first",)
    with watching(net, ("first",)) as seen:
        net(images)
        net(images + 1)  # a second window
    found = seen.statistics()
    assert found is not None
    with torch.no_grad():
        maps = [net.first(images), net.first(images + 1)]
    assert torch.allclose(found[:, :2], (maps[0].mean((2, 3)) + maps[1].mean((2, 3))) / 2, atol=1e-6)
    assert found.shape == (3, 4)
    assert not net.first._forward_hooks
    with watching(net, ("unused",)) as seen:
        net(images)
    assert seen.statistics() is None


def test_files_hold_plain_arrays_and_others_are_refused(tmp_path):
    found = made(RNG.normal(size=(90, 4)), RNG.normal(size=(30, 4)), layers=("a.b", "c"))
    found.save(tmp_path / FILE)
    loaded = Familiarity.load(tmp_path / FILE)
    assert loaded.layers == found.layers
    x = RNG.normal(size=(5, 4))
    assert loaded.distance(x) == pytest.approx(found.distance(x), rel=1e-2)
    with np.load(tmp_path / FILE, allow_pickle=False) as file:
        arrays = dict(file)
    for change in (
        {"format": np.array("ambiseg.Look/9")},
        {"mean": np.zeros(3, np.float32)},
        {"axes": np.full_like(arrays["axes"], np.nan)},
        {"variances": -arrays["variances"]},
        {"distances": np.zeros(0)},
        {"score": np.array("other")},
        {"more": np.zeros(1)},
    ):
        np.savez(tmp_path / "bad.npz", **{**arrays, **change})
        with pytest.raises(DataError, match=r"bad.npz: cannot be read as what `ambiseg look` wrote"):
            Familiarity.load(tmp_path / "bad.npz")
    (tmp_path / "bad.npz").write_bytes((tmp_path / FILE).read_bytes()[:200])
    with pytest.raises(DataError, match=r"bad.npz"):
        Familiarity.load(tmp_path / "bad.npz")


@pytest.fixture(scope="module")
def looked_run(tmp_path_factory) -> Path:
    """A small training of enough images: what it leaves."""
    from ambiseg.config import parse
    from ambiseg.training import train

    folder = tmp_path_factory.mktemp("looked") / "run"
    more = ["--data.options={count: 260, size: 32}", "--trainer.epochs=1", "--data.batch_size=16"]
    train(parse([*TINY, *more]), folder, command=["ambiseg", "train"])
    return folder


def test_a_training_leaves_the_file_of_its_best_weights(looked_run):
    run = Run(looked_run)
    found = saved_familiarity(run)
    assert found is not None
    assert found.images == len(found.distances) == len(found.scores) == 20  # one epoch of small images affords no more
    before = (looked_run / FILE).read_bytes()
    again = look(looked_run, quiet=True)  # of all images
    assert (again.images, again.layers) == (len(run.split.parts["train"]), found.layers)
    assert again.distances.max() > 0
    (looked_run / FILE).write_bytes(before)


def test_a_resumed_training_renews_it_unless_it_is_off(looked_run, tmp_path, capsys):
    from ambiseg.training import train

    folder = tmp_path / "run"
    shutil.copytree(looked_run, folder)
    (folder / FILE).unlink()
    config = Run(folder).config
    train(config.with_settings({"trainer.look": False}), folder, resume=True, quiet=True)  # no epoch is left to do
    assert not (folder / FILE).exists()
    train(config, folder, resume=True, quiet=True)
    assert (folder / FILE).read_bytes() == (looked_run / FILE).read_bytes()
    train(config.with_settings({"trainer.epochs": 2}), folder, resume=True, quiet=True)
    assert (folder / FILE).read_bytes() != (looked_run / FILE).read_bytes()
    assert saved_familiarity(Run(folder)) is not None


def test_a_training_does_not_fail_where_it_cannot_be_made(tiny_run, tmp_path, capsys, monkeypatch):
    import ambiseg.training.looking as ending

    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    run = Run(folder)
    data = data_of(run, None, True)
    ending.leave_look(run, data, "cpu", True)
    start = f"note: no {FILE}, by which predictions say when a person must look: "
    assert start + "expected at least 20 images of training and validation, found" in capsys.readouterr().err
    monkeypatch.setattr(ending, "_LIMIT", 0)
    ending.leave_look(run, data, "cpu", True)
    assert f"{start}it would take long beside this training; `ambiseg look " in capsys.readouterr().err
    for error, said in ((OSError(28, "No space left on device"), "No space left on device"), (KeyError(), "KeyError")):
        monkeypatch.setattr(ending, "affordable", Mock(side_effect=error))
        ending.leave_look(run, data, "cpu", True)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(start)
        assert said in line
        ending.leave_look(run, data, "cpu", False)
        assert not capsys.readouterr().err
    assert not (folder / FILE).exists()


@pytest.mark.parametrize(
    ("epochs", "images", "size", "eval_size", "expected"),
    [
        (10, 2520, 64, 64, 512),
        (2, 1000, 64, 64, 150),
        (1, 128, 32, 32, 20),
        (1, 20, 64, 128, 0),
        (30, 100, 64, 4096, 0),
    ],
)
def test_what_a_training_affords_goes_by_pixels(epochs, images, size, eval_size, expected):
    from ambiseg.config import Config
    from ambiseg.training.looking import affordable

    config = Config(trainer={"epochs": epochs}, data={"size": size, "eval_size": eval_size})  # type: ignore[arg-type]
    data = SimpleNamespace(split=SimpleNamespace(parts={"train": 1, "val": 1}), indices=lambda part: range(images))
    assert affordable(config, data) == expected  # type: ignore[arg-type]
    data.split.parts.pop("val")
    assert affordable(config, data) == 20  # type: ignore[arg-type]


def test_a_run_without_the_file_predicts_as_before(tiny_run):
    image = (37 + 100 * RNG.random((1, 32, 32))).astype(np.float32)
    (found,) = predict(ambiseg.load(tiny_run), image, samples=8)
    assert found.look is not None
    assert 0 <= found.look.score <= 1
    assert found.look[1:] == (None, None, None, None)


def test_predictions_say_whether_to_look(looked_run, tmp_path, capsys):
    from ambiseg.data.config import open_cases

    run = Run(looked_run)
    known = saved_familiarity(run)
    assert known is not None
    assert fits(known, run.model().method, 1)
    assert known.layers
    cases = open_cases(run.config.data)
    own = cases[run.split.indices(cases, "train")[0]].image
    (usual,) = predict(run, own)
    assert usual.look is not None
    assert not usual.look.is_unlike
    odd = (own.astype(np.float32).max() - own) * 30 - 500 + RNG.normal(0, 100, own.shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (strange,) = predict(run, odd.astype(np.float32))
    text = "farther from those of the training images than in all of the validation images"
    assert any(text in str(one.message) for one in caught)
    assert strange.look is not None
    assert (strange.look.unlike, strange.look.is_unlike, strange.look.needed) == (1, True, True)
    np.save(tmp_path / "own.npy", own[0])
    assert main(["predict", str(looked_run), str(tmp_path / "own.npy"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    about = json.loads((tmp_path / "out" / "own" / "weights.json").read_text())["look"]
    assert about["score"] == pytest.approx(usual.look.score)
    assert about["needed"] == usual.look.needed
    volume = np.stack([own, own])
    (whole,) = predict(run, volume)
    assert whole.look is not None
    assert whole.look.unsure is None  # of a volume there is nothing to compare with
    assert whole.look.unlike == pytest.approx(usual.look.unlike)


def test_other_weights_and_another_network_are_noticed(looked_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(looked_run, folder)
    other = Run(folder)
    from safetensors.torch import load_file

    from ambiseg.weights import write_state

    state = {name: value.clone() for name, value in load_file(folder / "best.safetensors").items()}  # not of the map
    for value in state.values():
        if value.is_floating_point():
            value += 0.01
    with (folder / "best.safetensors").open("wb") as file:
        write_state(state, file, {})
    assert saved_familiarity(other) is None
    found = Familiarity.load(folder / FILE)
    assert not fits(found, nn.Identity(), 1)  # type: ignore[arg-type]
    assert not fits(found, other.model().method, 3)


def test_the_command(tiny_run, capsys):
    assert main(["look", "demo"]) == 2
    assert "expected the folder of a run to write into, found a model of the package" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at least 20 images of training and validation, found"):
        look(tiny_run, quiet=True)
    assert not (tiny_run / FILE).exists()


@pytest.mark.skipif(not (SHARED / "data/lidc71/lidc71.npz").exists(), reason="lidc71 absent: set AMBISEG_SHARED")
def test_inverted_ct_is_found():
    """By what is shipped with the CT model, on images of its test part."""
    run = open_run("nodule-ct")
    model, found = run.model(), saved_familiarity(run)
    assert found is not None
    module = data_of(run, {"root": str(SHARED / "data/lidc71/lidc71.npz")}, True)
    raw = np.stack([module.cases[i].image for i in some_of(module.indices("test"), 40)])[:, :, 3:67, 3:67]

    def distances(images: np.ndarray) -> np.ndarray:
        prepared = model.card.prepare(torch.from_numpy(images.astype(np.float32)))
        with watching(model.method, found.layers) as seen:
            model.predict(prepared)
        return found.distance(joined(prepared, seen.statistics()).numpy())

    low, high = (f(raw, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    shares = [np.mean([found.is_unlike(d) for d in distances(images)]) for images in (raw, low + high - raw)]
    assert shares[0] <= 0.1
    assert shares[1] > 0.7
