"""`train auto`: plans that fit whatever the data are, follow what the user gives, and say why."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import ambiseg
from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.config import Config, dump, load, nested
from ambiseg.data.config import DataConfig
from ambiseg.data.loader import steps_per_epoch
from ambiseg.data.module import DataModule
from ambiseg.methods.facts import Facts
from ambiseg.planning.cost import RATE, operations_per_pixel, validation_seconds
from ambiseg.planning.facts import gather
from ambiseg.planning.rules import LEAST_EPOCHS, make
from ambiseg.runs import Run

USUAL = Facts(
    images=28, patients=28, val_images=4, val_patients=4, smallest=(128, 128), median=(128, 128), largest=(128, 128),
    channels=1, dtype="uint8", low=3, high=250, mean=(100.0,), std=(40.0,), own_mean=(0.4,), own_std=(0.2,),
    recommended=False, gain=1.1, upright=0.0, classes=("background", "cell"), evaluated=(1,), shares=(0.8, 0.2),
    fewest=3, readers=3, identical=False, iou=0.7, modes=2, marked=0.2, thickness=12.0, empty=0.0,
)  # fmt: skip


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    side = st.integers(8, 3000)
    median = draw(side), draw(side)
    channels, classes, modes = draw(st.sampled_from([1, 3, 4])), draw(st.integers(2, 12)), draw(st.integers(1, 40))
    shares = draw(st.lists(st.floats(0, 1), min_size=classes, max_size=classes))
    low = draw(st.floats(-2000, 1000))
    return Facts(
        images=draw(st.integers(1, 20_000)),
        patients=draw(st.integers(1, 50)),
        val_images=draw(st.integers(0, 40)),
        val_patients=draw(st.integers(0, 40)),
        smallest=(max(1, median[0] // 2), max(1, median[1] // 2)),
        median=median,
        largest=(median[0] * 2, median[1] * 2),
        channels=channels,
        dtype=draw(st.sampled_from(["uint8", "uint16", "int16", "float32"])),
        low=low,
        high=low + draw(st.floats(0, 5000)),
        mean=(100.0,) * channels,
        std=(40.0,) * channels,
        own_mean=(0.4,) * channels,
        own_std=(0.2,) * channels,
        recommended=draw(st.booleans()),
        gain=draw(st.floats(1, 20)),
        upright=draw(st.floats(0, 1)),
        classes=tuple(f"class {c}" for c in range(classes)),
        evaluated=tuple(range(1, classes)),
        shares=tuple(shares),
        fewest=1,
        readers=draw(st.integers(1, 32)),
        identical=draw(st.booleans()),
        iou=draw(st.floats(0, 1)),
        modes=modes,
        marked=draw(st.floats(1e-5, 1)),
        thickness=draw(st.floats(0.5, 500)),
        empty=draw(st.floats(0, 1)),
    )


def total_steps(config: Config, images: int) -> int:
    images = max(1, round(images * config.data.fraction))
    return config.trainer.epochs * steps_per_epoch(images, config.data.batch_size, config.data.windows)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # a failing plan needs no shrinking
@given(facts(), st.sampled_from([1.0, 6.0, 60.0]))
def test_every_plan_is_a_whole_that_fits(found: Facts, minutes: float) -> None:
    config, reasons = make({"data": {"name": "folder", "root": "scans"}}, found, minutes)
    assert load_text(dump(config, reasons)) == config  # comments are no settings
    data, scale = config.data, config.backbone.scale
    window = (data.size, data.size) if isinstance(data.size, int) else data.size
    assert window is not None
    assert data.eval_size is None
    multiple = scale * 2 ** (len(config.backbone.channels or ()) - 1)
    for side, length in zip(window, found.median, strict=True):
        assert side <= -(-length // multiple) * multiple
        assert side % multiple == 0
    steps = total_steps(config, found.images)
    assert steps >= 5 * config.optimizer.warm_up
    assert data.batch_size <= found.images * data.windows
    assert data.fraction == 1 or config.trainer.epochs >= min(LEAST_EPOCHS, steps)
    assert config.trainer.epochs % config.trainer.check_every == 0
    assert config.model.schedules["capacity"].warm_up < config.trainer.epochs
    spent = operations_per_pixel(config, found.channels, len(found.classes)) * math.prod(window) * data.batch_size
    assert spent * steps / RATE <= 60 * minutes * 1.1 or steps <= LEAST_EPOCHS  # a fraction is rounded
    assert all(reasons.values())


def load_text(text: str) -> Config:
    import yaml

    return Config.model_validate(yaml.safe_load(text))


def test_the_cost_is_counted_and_repeats():
    config = Config.model_validate({"backbone": {"channels": [8, 16], "convs": 2}})
    counted = operations_per_pixel(config, 1, 2)
    assert counted == operations_per_pixel(config, 1, 2)
    wider = Config.model_validate({"backbone": {"channels": [16, 32], "convs": 2}})
    coarser = Config.model_validate({"backbone": {"channels": [8, 16], "convs": 2, "scale": 2}})
    assert operations_per_pixel(coarser, 1, 2) < counted < operations_per_pixel(wider, 1, 2)
    assert validation_seconds(counted, replace(USUAL, val_images=0)) == 0


def test_what_is_given_holds_and_the_rest_follows():
    planned, _ = make({}, USUAL, 6)
    fewer, reasons = make(nested({"trainer.epochs": 3}), USUAL, 6)
    assert (fewer.trainer.epochs, reasons["trainer.epochs"]) == (3, "as given")
    assert fewer.data.windows == planned.data.windows  # an eighth of the time
    assert fewer.optimizer.warm_up < planned.optimizer.warm_up
    assert fewer.model.schedules["capacity"].warm_up == 1
    small, _ = make(nested({"data.size": 32, "data.augment.rotate": 5}), USUAL, 6)
    assert small.data.size == 32
    assert len(small.backbone.channels or ()) == 4
    assert small.data.batch_size == 16
    assert small.data.augment.rotate == 5
    assert small.data.augment.scale == (0.8, 1.25)
    assert small.data.focus > 0 == planned.data.focus
    whole, _ = make(nested({"data.size": None}), USUAL, 6)
    assert whole.data.size is None
    assert not whole.data.augment.warps
    longer, _ = make({}, USUAL, 60)
    assert total_steps(longer, 28) > 8 * total_steps(planned, 28)
    batch, _ = make(nested({"data.batch_size": 2}), USUAL, 6)
    assert total_steps(batch, 28) > 1.5 * total_steps(planned, 28)
    light, _ = make(nested({"backbone.name": "deeplabv3plus"}), USUAL, 6)
    assert light.backbone.channels is None


THREE = {"classes": ("ground", "rim", "cup"), "evaluated": (1, 2), "shares": (0.8, 0.1, 0.1)}


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"median": (960, 999), "largest": (960, 999), "thickness": 3.4}, "data.size", 128),
        ({"median": (960, 999), "largest": (960, 999), "thickness": 3.4}, "backbone.scale", 1),
        ({"median": (960, 999), "largest": (960, 999), "thickness": 80.0}, "backbone.scale", 3),
        ({"median": (960, 999), "largest": (960, 999), "thickness": 80.0}, "data.size", 384),
        ({"median": (100, 150)}, "data.size", (112, 160)),
        ({"median": (4000, 4000), "thickness": 900.0}, "backbone.scale", 8),
        ({"upright": 0.6}, "data.augment.flip", "horizontal"),
        ({"modes": 7, "images": 200, "patients": 200}, "model.experts", 7),
        ({"modes": 7}, "model.experts", 2),  # of 28 images
        ({"modes": 1}, "model.experts", 2),
        ({"classes": tuple("abcdefgh"), "shares": (0.125,) * 8}, "model.cost", "ce"),
        ({"dtype": "float32", "gain": 3.0}, "data.intensity.per_image", True),
        ({"dtype": "float32", "gain": 3.0, "low": -1000.0}, "data.intensity.per_image", False),  # Hounsfield units
        ({"dtype": "uint16", "high": 4000.0}, "data.intensity.high", 4000.0),
        ({"channels": 3, "mean": (1.0, 2.0, 3.0), "std": (4.0, 5.0, 6.0)}, "data.intensity.mean", (1.0, 2.0, 3.0)),
        ({"recommended": True}, "data.intensity", None),
        ({"images": 2}, "data.batch_size", 2),
        ({"images": 100_000}, "trainer.epochs", LEAST_EPOCHS),
        ({"empty": 0.1}, "evaluation.protocol", "mose"),
        ({"empty": 0.1, **THREE}, "evaluation.protocol", "phiseg"),  # mose would leave out images with empty masks
        ({"empty": 0.0, **THREE}, "evaluation.protocol", "mose"),
    ],
)
def test_rules(change, key, expected):
    config, _ = make({}, replace(USUAL, **change), 6)
    assert _at(config, key) == expected


# -- data on disk ------------------------------------------------------------------------------------------------------


def write(root: Path, images: list[np.ndarray], masks: list[list[np.ndarray]], suffix: str = "png") -> Path:
    """A folder of images and of the masks of the annotators A, B, …"""
    for i, (image, of_image) in enumerate(zip(images, masks, strict=True)):
        for part, pixels in [("images", image), *((f"masks/{chr(65 + m)}", x) for m, x in enumerate(of_image))]:
            (root / part).mkdir(parents=True, exist_ok=True)
            kind = "png" if part != "images" else suffix
            Image.fromarray(pixels).save(root / part / f"p{i:02d}.{kind}")
    return root


def discs(count: int, size: tuple[int, int] = (24, 24), classes: int = 1, readers: int = 2) -> tuple[list, list]:
    rng = np.random.default_rng(0)
    images, masks = [], []
    for _ in range(count):
        y, x = (rng.integers(s // 3, 2 * s // 3) for s in size)
        distance = np.hypot(*np.ogrid[-y : size[0] - y, -x : size[1] - x])
        images.append((60 + 120 * (distance < 7) + rng.integers(0, 20, size)).astype(np.uint8))
        rings = [sum((distance < 7 + m - 3 * c).astype(np.uint8) for c in range(classes)) for m in range(readers)]
        masks.append([np.asarray(ring * (255 if classes == 1 else 1), np.uint8) for ring in rings])
    return images, masks


def test_facts_are_of_the_training_part(tmp_path):
    images, masks = discs(20)
    root = write(tmp_path / "scans", images, masks)
    data = DataModule(DataConfig(name="folder", root=str(root), cache=None))
    data.setup()
    train = data.indices("train")
    found = gather(data.cases, data.split, train)
    assert found.images == len(train) < 20
    assert found.val_images == len(data.indices("val"))
    values = np.stack([data.cases[i].image for i in train])
    assert found.mean[0] == pytest.approx(values.mean())
    assert found.std[0] == pytest.approx(values.std())
    labels = np.stack([data.cases[i].labels for i in train])
    assert found.shares[1] == pytest.approx((labels == 1).mean())
    assert found.marked == pytest.approx((labels == 1).any(1).mean())
    assert 6 < found.thickness < 10  # the radius of discs of 7 and 8 pixels
    assert (found.readers, found.modes, found.identical, found.empty) == (2, 1, False, 0)
    brief = gather(data.cases, data.split, train, pixels=0)  # what warnings need
    assert brief.shares[1] > 0
    assert brief.marked == 0
    assert brief.median == found.median


def test_train_auto_from_folder_to_prediction(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write(tmp_path / "scans", *discs(24))
    quick = ["--data.windows", "1", "--trainer.epochs", "2", "--backbone.channels", "[4, 8]"]
    command = ["train", "auto", "--data.root", str(root), *quick]
    assert main([*command, "--print-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text(text)
    assert main([*command, "--out", "run"]) == 0
    shown = capsys.readouterr().err
    assert "data.size" in shown
    assert "whole images: 24×24" in shown
    assert "warning: " in shown
    run = Run("run")
    assert run.config == load(tmp_path / "recipe.yaml")
    assert (tmp_path / "run" / "config.yaml").read_text() == text
    assert "  # whole images: 24×24" in text
    assert any("too few to learn from" in line for line in run.about["warnings"])
    assert main(["train", "--resume", "run", "--trainer.epochs", "3", "--quiet"]) == 0
    resumed = (tmp_path / "run" / "config.yaml").read_text()
    assert "epochs: 3  # changed when the run was resumed" in resumed
    assert "  # whole images: 24×24" in resumed
    assert capsys.readouterr().err == ""
    assert load("run/config.yaml").trainer.epochs == 3
    assert ambiseg.load("run", "last").card.intensity.std == pytest.approx(run.config.data.intensity.std)  # type: ignore[union-attr]
    same = {"data.root": str(root), "data.windows": 1, "trainer.epochs": 2, "backbone.channels": [4, 8]}
    ambiseg.train("auto", "again", same, quiet=True)
    assert (tmp_path / "again" / "config.yaml").read_text() == text


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("sizes", 20, {"data.eval_batch_size": 32}),
        ("16-bit", 20, {"data.augment.flip": "both"}),
        ("classes", 20, {"model.cost": "iou"}),
        ("one reader", 20, {"model.experts": 2}),
        ("five", 5, {"data.batch_size": 3}),
    ],
)
def test_odd_folders_get_a_plan(kind, count, expected, tmp_path):
    classes, readers = (2 if kind == "classes" else 1), (1 if kind == "one reader" else 2)
    images, masks = discs(count, classes=classes, readers=readers)
    if kind == "sizes":
        images = [image[: 20 + i % 4, : 16 + i % 8] for i, image in enumerate(images)]
        masks = [[mask[: 20 + i % 4, : 16 + i % 8] for mask in of] for i, of in enumerate(masks)]
    if kind == "16-bit":
        images = [image.astype(np.uint16) * 200 for image in images]
    root = write(tmp_path / "scans", images, masks, "tif" if kind == "16-bit" else "png")
    made = ambiseg.plan(root, {"data.cache": None})
    assert len(made.facts.classes) == classes + 1
    for key, value in expected.items():
        assert _at(made.config, key) == value
    if kind == "16-bit":
        assert made.config.data.intensity is not None
        assert made.config.data.intensity.high > 30_000  # type: ignore[operator]


def test_empty_masks_are_told(tmp_path):
    images, masks = discs(20)
    root = write(tmp_path / "scans", images, [[mask * 0 for mask in of] for of in masks])
    with pytest.raises(DataError, match=r"scans|mask|class"):
        ambiseg.plan(root, {"data.cache": None})


def _at(config: Config, key: str) -> object:
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


# -- absurd data -------------------------------------------------------------------------------------------------------


def _arrays(path: Path, images: np.ndarray, masks: np.ndarray) -> Path:
    np.savez(path, image=images, masks=masks)
    return path


RNG = np.random.default_rng(0)
BITS = RNG.integers(0, 2, (12, 2, 16, 16)).astype(np.uint8)


@pytest.mark.parametrize(
    ("images", "masks", "options", "said"),
    [
        (RNG.random((1, 16, 16)), BITS[:1], {}, "expected at least 3 patients"),
        (RNG.random((12, 1, 1)), BITS[:, :, :1, :1] | 1, {}, None),
        (RNG.random((12, 1, 300)), np.ones((12, 1, 1, 300), np.uint8), {}, None),
        (RNG.random((12, 16, 16)), BITS * 0 + 9, {"void": 9}, "expected pixels of foreground in the training part"),
        (RNG.random((12, 16, 16)), BITS * 0, {}, "expected pixels of foreground in the training part, found none"),
        (RNG.random((12, 16, 16)), BITS.astype(np.uint16) * 300, {"classes": 301}, None),
        (
            RNG.random((12, 16, 16)),
            BITS.astype(np.uint16),
            {"classes": 65536},
            "expected at most 1,024 classes to plan",
        ),
        (RNG.random((12, 16, 16)) * 1e-38, BITS, {}, None),
        (RNG.choice([-3e38, 3e38], (12, 16, 16)), BITS, {}, "expected pixels of at most 1e+30"),
        (np.where(BITS[:, 0], np.nan, RNG.random((12, 16, 16))), BITS, {}, "found nan or infinite"),
        (RNG.random((12, 16, 16)), BITS, {"classes": 1 << 17}, "data.options.classes: expected at most 65,536"),
    ],
)
def test_absurd_data_give_a_plan_or_one_line(images, masks, options, said, tmp_path):
    root = _arrays(tmp_path / "absurd.npz", images.astype(np.float32), masks.astype(np.uint16))
    given = {"data.options": options, "data.cache": None}
    if said is None:
        made = ambiseg.plan(root, given)
        assert made.config.trainer.epochs >= 1
        assert load_text(str(made)) == made.config
    else:
        with pytest.raises(DataError) as refused:
            ambiseg.plan(root, given)
        assert said in str(refused.value)
        assert str(refused.value).isprintable()


def test_images_of_all_sizes_give_a_plan(tmp_path):
    for number, size in enumerate([(1, 1), (1, 900), (900, 1), (3, 7), (64, 64), (300, 200), (17, 17), (128, 90)]):
        for folder in ("images", "masks/a", "masks/b"):
            pixels = RNG.integers(0, 2 if folder != "images" else 255, size).astype(np.uint8)
            pixels[0, 0] = 1
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / folder / f"p{number}.png")
    made = ambiseg.plan(tmp_path, {"data.cache": None})
    assert made.facts.largest == (900, 900)
    assert made.config.data.size is not None
