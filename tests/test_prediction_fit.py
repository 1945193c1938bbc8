"""Images that do not fit a model, the sample image, models from memory, extra channels, and files written meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ambiseg import cli
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.data.case import Extra, Reading
from ambiseg.data.intensity import Intensity
from ambiseg.data.values import Values
from ambiseg.prediction import Options, Predictor, loop, predict
from ambiseg.prediction.inputs import array_source, find_inputs
from ambiseg.runs import TrainedModel, load
from tests.files import save, save_nifti
from tests.test_prediction import fresh, noise

RNG = np.random.default_rng(5)


def hounsfield(size: int = 24) -> np.ndarray:
    """``[1, H, W]`` of lung and soft tissue."""
    image = RNG.normal(-850, 40, (1, size, size))
    image[:, size // 3 :] += 800
    return image.round().astype(np.int16)


@pytest.fixture
def model() -> TrainedModel:
    """A model with a card of 24² pixels in Hounsfield units."""
    made = fresh(intensity=Intensity(-1000, 400, -300, 700))
    values = Values.of([hounsfield() for _ in range(20)])
    return TrainedModel(made.method, replace(made.card, units="HU", values=values, size=(24, 24)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_image_in_other_units_is_warned_of_everywhere(model, tmp_path, monkeypatch, capsys):
    image = hounsfield()
    shown = np.clip((image[0] + 1000.0) / 1400 * 255, 0, 255).round().astype(np.uint8)
    save(tmp_path / "shown.png", shown)
    [fits] = predict(model, image)
    assert fits.notes == ()
    [odd] = predict(model, tmp_path / "shown.png", tmp_path / "out")
    assert len(odd.notes) == 1
    assert odd.notes[0].startswith("its values are mostly ")
    assert "(HU); its masks may mean nothing" in odd.notes[0]
    assert odd.notes[0].endswith("give its window: --assume-window LOW HIGH")
    assert json.loads((tmp_path / "out/shown/weights.json").read_text())["notes"] == list(odd.notes)
    # On the picture, a line of red letters that the same prediction without the note does not have.
    with_note = np.asarray(Image.open(tmp_path / "out/shown/overview.png")).astype(int)
    assert ((with_note[..., 0] > 150) & (with_note[..., 1] < 80) & (with_note[..., 2] < 80)).sum() > 100
    monkeypatch.setattr("ambiseg.prediction.predictor.open_run", lambda run: _Run(model))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", "run", "shown.png", "--out", "two", "--no-overview"]) == 0
    said = capsys.readouterr()
    assert "ambiseg: warning: shown.png: its values are mostly" in said.err
    assert "1 predicted, 1 with warnings; written to two" in said.out
    assert cli.main(["predict", "run", "shown.png", "--out", "three", "--no-overview", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["notes"] == list(odd.notes)
    window = ["--assume-window", "-1000", "400"]
    assert cli.main(["predict", "run", "shown.png", "--out", "four", "--no-overview", *window]) == 0
    assert "warning" not in capsys.readouterr().err


class _Run:
    """An opened run of a model from memory."""

    folder = Path("run")

    def __init__(self, model: TrainedModel) -> None:
        self.made = model

    def model(self, which: str, device: object) -> TrainedModel:
        return self.made


def test_a_larger_image_than_was_validated_is_warned_of(model):
    assert predict(model, hounsfield(26))[0].notes == ()  # a tenth larger
    with pytest.warns(UserWarning, match="^image_0: it is 32×32"):
        [large] = predict(model, hounsfield(32))
    assert large.notes == (
        "it is 32×32, and the largest image that the model was validated on 24×24; "
        "masks and their weights may be worse than on such images",
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_volume_is_judged_as_a_whole(model):
    volume = np.stack([hounsfield(), hounsfield(), np.full((1, 24, 24), -900, np.int16)])
    assert predict(model, volume)[0].notes == ()
    assert len(predict(model, volume + 2000)[0].notes) == 1


def test_a_picture_for_the_screen_is_mapped_back(model, tmp_path):
    image = hounsfield()
    deep = np.round((image[0] + 1000.0) / 1400 * 65535).clip(0, 65535).astype(np.uint16)
    save(tmp_path / "deep.png", deep)
    [mapped] = predict(model, tmp_path / "deep.png", assume_window=(-1000, 400))
    [original] = predict(model, image.clip(-1000, 400))
    assert mapped.notes == ()
    assert mapped.masks.marginal is not None
    assert original.masks.marginal is not None
    assert torch.allclose(mapped.masks.marginal, original.masks.marginal, atol=1e-3)
    with pytest.raises(DataError, match="expected an image of 8 or 16 bits for assume_window, found int16"):
        predict(model, image, assume_window=(-1000, 400))
    with pytest.raises(DataError, match="assume_window: expected two numbers, low < high, found 4 and 4"):
        Options(assume_window=(4, 4))


def test_the_sample_comes_with_the_package_unless_a_file_has_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", "demo", "sample"]) == 0
    assert "sample" in capsys.readouterr().out
    about = json.loads((tmp_path / "predictions/sample/weights.json").read_text())
    assert about["notes"] == []
    assert 0.05 < about["masks"][0]["weight"] < 0.6
    assert {tuple(mask["pixels"].values())[1] for mask in about["masks"]} > {0}  # readers disagree whether it is one
    save(tmp_path / "sample" / "mine.png", noise(8, 8))
    assert [one.name for one in find_inputs(["sample"])] == ["mine"]


def test_a_method_from_memory_needs_no_card():
    made = fresh(classes=3)
    image = torch.rand(1, 16, 16)
    [bare] = predict(made.method, image)
    assert bare.classes == ("background", "class 1", "class 2")
    [same] = predict(TrainedModel(made.method, replace(made.card, intensity=Intensity())), image)
    assert torch.equal(bare.masks.labels, same.masks.labels)
    [carded] = predict(made.method, noise(1, 16, 16), card=made.card)
    assert carded.classes == made.card.classes
    with pytest.raises(ConfigError, match="card: expected None beside a run or a trained model"):
        predict(made, image, card=made.card)


def test_a_loaded_model_reads_files_as_its_training_data(tmp_path):
    made = fresh()
    reading = Reading(axes="HWC", axis=0, convert=True)
    model = TrainedModel(made.method, replace(made.card, reading=reading))
    np.save(tmp_path / "a.npy", noise(8, 12, 1))
    assert predict(model, tmp_path / "a.npy")[0].source.size == (8, 12)
    save_nifti(tmp_path / "v.nii.gz", noise(3, 8, 10))
    assert predict(model, tmp_path / "v.nii.gz")[0].source.slices == 3
    save(tmp_path / "grey.png", np.repeat(noise(8, 8)[..., None], 3, 2))
    assert predict(model, tmp_path / "grey.png")[0].source.channels == 3


def test_a_loaded_run_knows_what_its_folder_declared(tiny_run):
    assert load(tiny_run).card.reading == Reading()


@pytest.fixture
def street() -> TrainedModel:
    """A model of colour images with another model's prediction of two classes."""
    made = fresh(channels=5)
    return TrainedModel(made.method, replace(made.card, extra=Extra(2, {0: 0, 1: 1, 255: None})))


def test_extra_channels_come_from_files_of_the_same_stem(street, tmp_path):
    image, ids = noise(8, 12, 3), np.zeros((8, 12), np.uint8)
    ids[:, 6:] = 1
    save(tmp_path / "in" / "a.png", image)
    save(tmp_path / "extra" / "a.png", ids)
    [one] = predict(street, tmp_path / "in" / "a.png", extra=tmp_path / "extra")
    stacked = np.concatenate([np.moveaxis(image, -1, 0), 255 * np.stack([1 - ids, ids])])
    [same] = predict(street, stacked)
    assert torch.equal(one.masks.labels, same.masks.labels)
    needs = "a.png: expected 5 channels, 3 of the image and 2 of another model's prediction, whose folder extra names"
    with pytest.raises(DataError, match=needs):
        predict(street, tmp_path / "in" / "a.png")
    save(tmp_path / "in" / "b.png", image)
    with pytest.raises(DataError, match=r"b\.png: expected one file b\.png or \.npy in .*extra, found none"):
        predict(street, tmp_path / "in" / "b.png", extra=tmp_path / "extra")
    frame = save(tmp_path / "in" / "ulm_000001_000019_leftImg8bit.png", image)
    np.save(tmp_path / "extra" / "ulm_000001_000019_probs.npy", np.full((2, 8, 12), 0.5, np.float32))
    assert predict(street, frame, extra=tmp_path / "extra")[0].source.channels == 5
    with pytest.raises(ConfigError, match="extra: expected None for a model that takes no further channels"):
        Predictor(fresh(), Options(extra=str(tmp_path)))


def test_images_are_predicted_in_order_and_failures_are_outcomes(tmp_path):
    images = [(f"i{k}", array_source(noise(1 if k != 2 else 3, 8, 8), f"i{k}")) for k in range(6)]
    done: list[float] = []
    found = list(loop.predict_each(Predictor(fresh()), images, tmp_path, progress=lambda now, of: done.append(now)))
    assert [one.number for one in found] == list(range(6))
    assert [one.error is not None for one in found] == [False, False, True, False, False, False]
    assert [one.folder for one in found if one.folder] == [tmp_path / f"i{k}" for k in (0, 1, 3, 4, 5)]
    assert all((tmp_path / f"i{k}" / "overview.png").is_file() for k in (0, 5))
    assert done == sorted(done)
    half = loop.predict_each(Predictor(fresh()), images, part=slice(1, None, 2))
    assert [one.number for one in half] == [1, 3, 5]


def test_a_folder_that_cannot_be_written_stops_the_loop(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "a")

    monkeypatch.setattr(loop, "write", full)
    images = [(f"i{k}", array_source(noise(1, 8, 8), f"i{k}")) for k in range(6)]
    with pytest.raises(OSError, match="No space left"):
        list(loop.predict_each(Predictor(fresh()), images, tmp_path))
