"""Weighted masks of new images: what is drawn, the files, and the command."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ambiseg import MoSE, cli
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import predict as command_line
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.shapes import Shapes
from ambiseg.methods.base import Method, Stratified
from ambiseg.methods.drawing import draw as draw_masks
from ambiseg.nn import UNet
from ambiseg.nn.config import BackboneConfig
from ambiseg.prediction import Options, Predictor, predict, slices, writing
from ambiseg.prediction.inputs import find_inputs
from ambiseg.prediction.overview import draw_overview
from ambiseg.runs import Card, Run, TrainedModel, load
from ambiseg.settings import validate
from tests.drop_ins import Latent
from tests.files import save, save_series

RNG = np.random.default_rng(7)


def trained(method: Method, channels: int = 1, intensity: Intensity | None = None) -> TrainedModel:
    """A method with a card, as ``ambiseg.load`` returns it."""
    names = ("ground", *(f"class {c}" for c in range(1, method.classes)))
    evaluated, intensity = tuple(range(1, method.classes)), intensity or Intensity(0, 255, 127.5, 50)
    return TrainedModel(method.eval(), Card(names, evaluated, channels, intensity, "noise", method.stratum))


def dropped_in(method: type[Method], classes: int = 3, seed: int = 3) -> TrainedModel:
    """A method of tests/drop_ins.py on two levels, whose draws differ visibly."""
    torch.manual_seed(seed)
    made = method.build(validate(method.Config, {}), validate(BackboneConfig, {"channels": (4, 8)}), 1, classes)
    with torch.no_grad():
        for part in made.modules():
            if isinstance(part, torch.nn.Conv2d) and part.kernel_size == (1, 1):
                part.weight.mul_(5)
    return trained(made)


def fresh(channels: int = 1, classes: int = 2, intensity: Intensity | None = None, **settings) -> TrainedModel:
    """An untrained MoSE of two levels, whose experts disagree visibly."""
    torch.manual_seed(3)
    settings = {"experts": 3, "latent": 2, **settings}
    backbone = settings.pop("backbone", None) or UNet(channels, (4, 8))
    model = MoSE(channels, classes, backbone=backbone, **settings).eval()
    with torch.no_grad():
        model.head.shift.weight.mul_(5)
        model.head.scale.weight.mul_(5)
    return trained(model, channels, intensity)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image)


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(dtype)


@pytest.fixture
def run_command(monkeypatch) -> Callable[..., int]:
    """``ambiseg predict …`` -> exit code."""

    def run(*arguments: object) -> int:
        top = argparse.ArgumentParser(prog="ambiseg")
        command_line.add(top.add_subparsers(), cli.Help)
        monkeypatch.setattr(cli, "parser", lambda: top)
        return cli.main(["predict", *map(str, arguments)])

    return run


@pytest.fixture
def picture(tmp_path) -> Path:
    return save(tmp_path / "in" / "a.png", Shapes(count=4, size=32)[1].image[0])


# -- what is drawn -------------------------------------------------------------------------------------------------


def test_masks_are_those_of_the_model_itself(tiny_run, picture):
    model = load(tiny_run)
    image = model.card.prepare(torch.from_numpy(pixels(picture))[None, None])
    truth = model.predict(image)
    [ours] = predict(tiny_run, picture, per_stratum=3, seed=5, merge=False)
    assert isinstance(truth, Stratified)
    theirs = truth.compact(3, torch.Generator().manual_seed(5))
    drawn = ours.masks.labels[0, [draw.mask for draw in ours.draws]]
    assert (drawn != theirs.labels[0]).float().mean() < 1e-4
    assert torch.allclose(torch.tensor([draw.weight for draw in ours.draws]), theirs.mass[0])
    assert torch.allclose(ours.masks.marginal, theirs.marginal, atol=1e-5)  # type: ignore[arg-type]
    assert [draw.stratum for draw in ours.draws] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert ours.strata is not None
    assert torch.allclose(ours.strata.weights, truth.weights[0])
    [ours] = predict(tiny_run, picture, samples=9, seed=5, merge=False)
    theirs = truth.sample(9, torch.Generator().manual_seed(5))
    drawn = ours.masks.labels[0, [draw.mask for draw in ours.draws]]
    assert (drawn != theirs.labels[0]).float().mean() < 1e-4
    assert torch.allclose(ours.masks.mass, torch.full((1, 9), 1 / 9))


def test_a_run_is_its_folder_or_opened_or_a_loaded_model(tiny_run, picture):
    folder, run, model = (predict(one, picture)[0] for one in (tiny_run, Run(tiny_run), load(tiny_run, "last")))
    assert torch.equal(folder.masks.labels, run.masks.labels)
    assert (folder.run, folder.which) == (run.run, run.which) == (str(tiny_run), "best")
    assert (model.run, model.which) == (str(tiny_run), "last")
    alone = Predictor(tiny_run)(str(picture))
    assert (alone.name, alone.source.path) == (folder.name, picture)
    assert torch.equal(alone.masks.labels, folder.masks.labels)
    with pytest.raises(DataError, match="images: expected paths or arrays, found 1 and 1 in one list"):
        predict(tiny_run, [picture, noise(1, 8, 8)])


def test_centres_are_what_an_expert_predicts_at_its_mean():
    model = fresh(classes=3)
    image = noise(1, 20, 28)
    [one] = predict(model, image)
    noise_of_means = model.method.experts.mean[None]  # type: ignore[union-attr]
    logits = model.predict(model.card.prepare(torch.from_numpy(image)[None])).logits(noise_of_means)  # type: ignore[attr-defined]
    assert one.strata is not None
    assert (one.strata.centres != logits[0].argmax(1)).float().mean() < 1e-3
    assert torch.allclose(one.entropy, one.masks.entropy(3)[0], atol=1e-6)


def test_equal_masks_become_one_with_their_weights_added_and_the_heaviest_comes_first():
    model = fresh(classes=5, stochastic=False)  # every expert draws the same mask again and again
    image = noise(1, 16, 16)
    [merged], [apart] = predict(model, image), predict(model, image, merge=False)
    assert merged.masks.count == 3
    assert apart.masks.count == 12
    assert merged.strata is not None
    assert torch.allclose(merged.masks.mass[0], merged.strata.weights.sort(descending=True)[0])
    assert merged.masks.mass[0].tolist() == sorted(merged.masks.mass[0].tolist(), reverse=True)
    for one in (merged, apart):
        total = torch.zeros(one.masks.count)
        for draw in one.draws:
            total[draw.mask] += draw.weight
            assert torch.equal(one.masks.labels[0, draw.mask], one.strata.centres[draw.stratum])  # type: ignore[union-attr,index]
        assert torch.allclose(total, one.masks.mass[0])
    assert merged.strata_of(0) == [int(merged.strata.weights.argmax())]


def test_a_seed_decides_and_other_images_do_not():
    model, images = fresh(), [noise(1, 24, 24), noise(1, 16, 20)]
    together, [alone] = predict(model, images), predict(model, images[1])
    assert torch.equal(together[1].masks.labels, alone.masks.labels)
    [other] = predict(model, images[1], seed=1)
    assert not torch.equal(other.masks.marginal, alone.masks.marginal)  # type: ignore[arg-type]
    assert (together[0].name, together[1].name, alone.name) == ("image_0", "image_1", "image_0")


@pytest.mark.parametrize("kept", [1 << 30, 0])
def test_a_sample_of_a_volume_is_one_latent_code_for_all_slices(monkeypatch, kept):
    monkeypatch.setattr(slices, "_KEPT", kept)  # features of all slices kept, or computed again
    model, volume = fresh(), noise(5, 1, 12, 16)
    volume[3] = volume[0]
    [one] = predict(model, volume, merge=False)
    assert one.masks.labels.shape == (1, 12, 5, 12, 16)
    assert one.masks.marginal is not None
    assert torch.equal(one.masks.labels[:, :, 3], one.masks.labels[:, :, 0])  # another draw would differ
    singles = [predict(model, volume[k], merge=False)[0] for k in range(5)]
    strata = one.strata
    assert strata is not None
    assert torch.allclose(strata.slice_weights, torch.cat([s.strata.slice_weights for s in singles]))  # type: ignore[union-attr]
    assert torch.allclose(strata.weights, strata.slice_weights.mean(0))
    drawn = torch.tensor([draw.weight for draw in one.draws])
    assert torch.allclose(drawn, strata.weights.repeat_interleave(4) / 4, atol=1e-7)
    assert not torch.allclose(drawn, strata.slice_weights[0].repeat_interleave(4) / 4, atol=1e-6)
    for k, alone in enumerate(singles):
        for mine, theirs in zip(one.draws, alone.draws, strict=True):
            assert torch.equal(one.masks.labels[0, mine.mask, k], alone.masks.labels[0, theirs.mask])
    assert torch.allclose(one.entropy, one.masks.entropy(2)[0], atol=1e-6)


def test_noise_may_enter_before_the_last_features():
    model = fresh(backbone=UNet(1, (4, 8, 8), inject_level=0.5))
    image = noise(1, 18, 22)
    [one] = predict(model, image, merge=False)
    prepared = model.card.prepare(torch.from_numpy(image)[None])
    theirs = draw_masks(model.predict(prepared), "compact", 12, torch.Generator().manual_seed(0)).masks
    assert torch.equal(one.masks.labels[0, [draw.mask for draw in one.draws]], theirs.labels[0])
    assert torch.allclose(one.masks.marginal, theirs.marginal)  # type: ignore[arg-type]


def test_every_picture_is_opened_once(tmp_path, run_command, tiny_run, monkeypatch):
    for name in ("a.png", "b.jpg", "c.bmp"):
        save(tmp_path / "in" / name, noise(8, 8))
    opened: list[str] = []

    def counted(event: str, arguments: tuple) -> None:
        if watching and event == "open" and str(arguments[0]).startswith(str(tmp_path / "in")):
            opened.append(Path(arguments[0]).name)

    watching = True
    sys.addaudithook(counted)
    assert run_command(tiny_run, tmp_path / "in", "--out", tmp_path / "out", "--quiet") == 0
    watching = False
    assert sorted(opened) == ["a.png", "b.jpg", "c.bmp"]


# -- names, and results that are there already ---------------------------------------------------------------------


def test_names_tell_all_images_apart(tmp_path, monkeypatch):
    for name in (
        "x/a.png",
        "x/a.tif",
        "x/b.png",
        "x/b/c.png",
        "x/.hidden.png",
        "x/notes.txt",
        "y/a.png",
        "x/D.png",
        "y/d.png",
    ):
        save(tmp_path / name, noise(4, 4)) if "." in name and not name.endswith("txt") else (tmp_path / name).touch()
    paths = [tmp_path / "x", tmp_path / "y" / "a.png", tmp_path / "y" / "d.png", tmp_path / "x" / "a.png"]
    found = {one.name: one.path.relative_to(tmp_path).as_posix() for one in find_inputs(paths)}
    assert found == {
        "x/D.png": "x/D.png",
        "x/a.png": "x/a.png",
        "a.tif": "x/a.tif",
        "b.png": "x/b.png",
        "b/c": "x/b/c.png",
        "y/a.png": "y/a.png",
        "y/d.png": "y/d.png",
    }
    assert [one.name for one in find_inputs([tmp_path / "x" / "b"], skip=tmp_path)] == ["c"]
    assert len(find_inputs([tmp_path], skip=tmp_path / "x")) == 2
    series = save_series(tmp_path / "ct", noise(2, 4, 4, dtype=np.uint16))
    monkeypatch.chdir(series)
    assert [one.name for one in find_inputs(["."])] == ["ct"]
    monkeypatch.chdir(tmp_path / "x")
    assert [one.name for one in find_inputs(["../ct", "../x/b"])] == ["ct", "c"]


def test_earlier_results_are_refused_skipped_or_replaced(tmp_path, picture, monkeypatch):
    model, out = fresh(), tmp_path / "out"
    predict(model, picture, out, overview=False)
    before = (out / "a" / "weights.json").stat().st_ino
    with pytest.raises(DataError, match=r"out.a: expected no earlier prediction, found one; existing=\"skip\""):
        predict(model, picture, out)
    assert predict(model, picture, out, existing="skip") == []
    assert (out / "a" / "weights.json").stat().st_ino == before
    predict(model, picture, out, samples=3, existing="overwrite", overview=False)
    assert json.loads((out / "a" / "weights.json").read_text())["samples"] == 3

    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "draw_overview", full)
    with pytest.raises(OSError, match="No space"):
        predict(model, picture, out, existing="overwrite")
    assert json.loads((out / "a" / "weights.json").read_text())["samples"] == 3  # as it was, and nothing left over
    with pytest.raises(OSError, match="No space"):
        predict(model, picture, tmp_path / "new")
    assert (os.listdir(out), os.listdir(tmp_path / "new")) == (["a"], [])
    (tmp_path / "mine" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="expected a new folder or an earlier prediction, found something else"):
        predict(model, picture, tmp_path / "mine", existing="overwrite")


# -- one line for what is wrong ------------------------------------------------------------------------------------


def _no_memory(images: torch.Tensor):
    raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory for {list(images.shape)}")


def test_wrong_images_are_one_line(tmp_path, picture):
    colour = save(tmp_path / "rgb.png", noise(8, 8, 3))
    with pytest.raises(
        DataError, match=r"rgb.png: expected 1 channel, as the model was trained on, found 3; convert=True"
    ):
        predict(fresh(), colour)
    with pytest.raises(DataError, match=r"rgb.png: expected 1 channel, as the model was trained on, found 3$"):
        predict(fresh(), colour, convert=True)  # its channels are not equal
    with pytest.raises(
        DataError, match=r"a.png: expected 3 channels, as the model was trained on, found 1; convert=True"
    ):
        predict(fresh(3), picture)
    grey = save(tmp_path / "grey.png", np.repeat(noise(8, 8, 1), 3, 2))
    predict(fresh(), grey, convert=True)
    predict(fresh(3), picture, convert=True)
    np.save(tmp_path / "nan.npy", np.array([[0.0, np.nan]]))
    with pytest.raises(DataError, match=r"nan.npy: expected finite values, found 1 value nan"):
        predict(fresh(), tmp_path / "nan.npy")
    with pytest.raises(DataError, match="nowhere: expected an image or a folder of images, found nothing"):
        predict(fresh(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: expected images \(.png .*\), found an empty folder"):
        predict(fresh(), tmp_path / "empty")
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "masks").mkdir()
    with pytest.raises(DataError, match="expected images alone, found masks/ as well"):
        predict(fresh(), tmp_path / "set")
    with pytest.raises(DataError, match=r"^per_stratum: expected 1 or more, found 0"):
        Options(per_stratum=0)
    with pytest.raises(DataError, match=r"^samples: expected None beside per_stratum=2, found 3"):
        Options(per_stratum=2, samples=3)
    with pytest.raises(DataError, match=r"^axes: expected one of HW, HWC, CHW, DHW, DHWC, DCHW, found 'WH'"):
        Options(axes="WH")
    with pytest.raises(DataError, match=r"^overlap: expected 0 to 8, half of the window, found 9"):
        predict(fresh(), picture, window=16, overlap=9)
    with pytest.raises(ConfigError, match=r"^device: expected a device of this machine"):
        Predictor(fresh(), device="cuda:77")
    model = fresh()
    model.method.backbone.forward = _no_memory  # type: ignore[method-assign]
    with pytest.raises(
        DataError, match=r"a.png: expected an image that fits into memory, found 32×32; smaller windows"
    ):
        predict(model, picture)
    with pytest.raises(ConfigError, match=r"^per_stratum: expected None for Latent, which has no strata, found 2; set"):
        Predictor(dropped_in(Latent), Options(per_stratum=2))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_values_of_another_range_are_noted():
    [blank], [real] = predict(fresh(), np.full((1, 8, 8), 40000.0)), predict(fresh(), noise(1, 8, 8))
    assert "it is blank, or in other units" in blank.notes[0]
    assert real.notes == ()


# -- the command ---------------------------------------------------------------------------------------------------


def test_command(tmp_path, tiny_run, picture, run_command, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(tiny_run, picture) == 0
    said = capsys.readouterr()
    assert "1 predicted; written to predictions" in said.out
    assert "experts" in said.out
    assert said.err == ""
    assert (tmp_path / "predictions" / "a" / "overview.png").is_file()
    assert run_command(tiny_run, picture) == 2
    error = capsys.readouterr().err
    assert error.startswith("ambiseg: predictions/a: expected no earlier prediction, found one; --skip-existing leaves")
    assert "--overwrite replaces it" in error
    assert run_command(tiny_run, picture, "--skip-existing") == 0
    assert "0 predicted, 1 skipped; those in predictions stay" in capsys.readouterr().out
    assert run_command(tiny_run, picture, "--overwrite", "--json", "-", "--samples", 5, "--no-merge", "--quiet") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["predictions"][0]["masks"] == 5
    assert result["predictions"][0]["strata"]["name"] == "expert"
    assert len(result["predictions"][0]["strata"]["weights"]) == 4
    for options, message in [
        (("--window", 64, "--overlap", 40), "ambiseg: --overlap: expected 0 to 32, half of the window, found 40\n"),
        (("--device", "cuda:77"), "ambiseg: --device: expected a device of this machine, such as cpu, found cuda:77\n"),
    ]:
        assert run_command(tiny_run, picture, "--overwrite", *options) == 2
        assert capsys.readouterr().err == message


def test_a_bad_image_among_many_stops_nothing(tmp_path, tiny_run, picture, run_command, capsys):
    save(tmp_path / "in" / "rgb.png", noise(8, 8, 3))
    (tmp_path / "in" / "b.png").write_bytes(b"")
    (tmp_path / "in" / "c.nrrd").write_bytes(b"NRRD")
    shutil.copy(picture, tmp_path / "in" / "z.png")
    out = tmp_path / "out"
    assert run_command(tiny_run, tmp_path / "in", "--out", out, "--json", tmp_path / "all.json", "--no-overview") == 1
    said = capsys.readouterr()
    lines = sorted(said.err.splitlines())
    assert len(lines) == 3
    assert "b.png: expected PNG, found an empty file" in lines[0]
    assert "c.nrrd: expected one of" in lines[1]
    assert "rgb.png: expected 1 channel, as the model was trained on, found 3; --convert reads" in lines[2]
    assert sorted(os.listdir(out)) == ["a", "z"]
    assert "2 predicted, 3 failed" in said.out
    assert len(json.loads((tmp_path / "all.json").read_text())["failures"]) == 3
    assert not (out / "a" / "overview.png").exists()
    assert run_command(tiny_run, tmp_path / "in" / "rgb.png", "--out", tmp_path / "o2") == 2
    assert capsys.readouterr().out == "0 predicted, 1 failed\n"  # and nothing was written anywhere
    assert not (tmp_path / "o2").exists()
    assert run_command(tiny_run, picture, "--out", tmp_path / "all.json") == 2
    assert "all.json: expected a folder to write into, found a file" in capsys.readouterr().err
    assert run_command(tmp_path / "norun", picture, "--out", tmp_path / "o2") == 2
    assert "norun: expected the folder of a run, found none" in capsys.readouterr().err
    assert run_command(tiny_run, picture, "--out", tmp_path / "o2", "--axes", "WH") == 2
    assert "--axes: expected one of HW, HWC" in capsys.readouterr().err
    assert run_command(tiny_run, picture, "--out", tmp_path / "o2", "--json", tmp_path / "no" / "a.json") == 2
    assert "a.json: expected a folder to write into" in capsys.readouterr().err


# -- the overview --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_overview_of_an_image_that_is_shown_smaller(tmp_path):
    predict(fresh(), noise(1, 640, 500), tmp_path, per_stratum=1)
    assert (tmp_path / "image_0" / "overview.png").is_file()


def test_overview_of_odd_images_and_names():
    names = iter(("$\\frac_{$ is text, not mathematics", "名前", "long " * 40, "samples only"))
    models = fresh(), fresh(experts=11, classes=14), fresh(experts=1), dropped_in(Latent)
    for shape, model in zip([(1, 8, 90), (4, 1, 60, 9), (1, 30, 30), (3, 1, 20, 20)], models, strict=True):
        [one] = predict(model, noise(*shape), samples=3)
        file = io.BytesIO()
        draw_overview(replace(one, name=next(names)), file)
        assert np.asarray(Image.open(file)).std() > 5
