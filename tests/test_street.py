"""Cityscapes and CamVid: official layouts, void that leaks nowhere, other models' predictions, damaged downloads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.data.config import open_cases, open_split
from ambiseg.data.loader import BatchSpec, Loader, Window
from ambiseg.data.module import DataModule
from ambiseg.data.sets.street.camvid import CLASSES as CAMVID
from ambiseg.data.sets.street.camvid import CamVid
from ambiseg.data.sets.street.cityscapes import CLASSES, LABEL_IDS, Cityscapes
from ambiseg.methods.mose.config import MoSEConfig
from ambiseg.methods.schedules import values_of
from tests.conftest import SHARED
from tests.street import camvid, cityscapes, picture, scene

FRAMES = {
    "aachen_000000_000019": "train",
    "aachen_000001_000019": "train",
    "ulm_000003_000019": "train",
    "frankfurt_000000_000294": "val",
}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory) -> Path:
    return cityscapes(tmp_path_factory.mktemp("cityscapes"), FRAMES)


@pytest.fixture
def city(downloaded, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(downloaded, tmp_path / "city"))


def labels_of(root: Path, name: str = "aachen_000000_000019", part: str = "train") -> Path:
    return root / "gtFine" / part / name.split("_")[0] / f"{name}_gtFine_labelIds.png"


# -- Cityscapes -------------------------------------------------------------------------------------------------------


def test_the_official_layout_is_read(downloaded):
    cases = Cityscapes(downloaded, size=(16, 32))
    assert cases.title == "Cityscapes, 32 modes"
    assert cases.names == sorted(FRAMES, key=lambda name: (FRAMES[name], name))
    assert dict(zip(cases.names, cases.declared or [], strict=True)) == {
        "aachen_000000_000019": "train",
        "aachen_000001_000019": "train",
        "ulm_000003_000019": "val",
        "frankfurt_000000_000294": "test",
    }
    assert cases.patients[:2] == ["aachen_000000", "aachen_000001"]
    assert cases.classes[:19] == CLASSES
    assert cases.classes[19:] == ("sidewalk2", "person2", "car2", "vegetation2", "road2")
    assert [cases.classes[c] for c in cases.evaluated[:5]] == ["sidewalk", "person", "car", "vegetation", "road"]
    assert cases.evaluated[5:] == (19, 20, 21, 22, 23)
    assert [round(17 * flip.probability) for flip in cases.flips] == [8, 7, 6, 5, 4]
    split = open_split(cases, parse([]).data)
    assert set(split.parts) == {"train", "val", "test"}


def test_frames_are_resized_and_void_counts_nowhere(downloaded):
    case = Cityscapes(downloaded, size=(16, 32))[0]
    image = np.asarray(Image.open(downloaded / "leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png"))
    numbers = np.asarray(Image.open(labels_of(downloaded)))
    blocks = image.astype(float).reshape(16, 4, 32, 4, 3).mean((1, 3))
    assert case.image.dtype == np.uint8
    assert (
        np.abs(np.moveaxis(case.image, 0, -1) - blocks).max() <= 1
    )  # the mean over 4 × 4 pixels, rounded along rows and columns
    middle = numbers[2::4, 2::4]
    void = ~np.isin(middle, LABEL_IDS)
    assert void.any()
    assert case.valid is not None
    assert np.array_equal(case.valid, ~void)
    expected = np.array([LABEL_IDS.index(n) if n in LABEL_IDS else 0 for n in range(256)])[middle]
    assert np.array_equal(case.labels[0], expected)
    assert len(case.readers) == 2 ** sum(int((expected[~void] == c).any()) for c in (0, 1, 8, 11, 13))


def test_void_reaches_neither_the_input_nor_the_prediction(city):
    """The same frame with another void mask, all else equal: the network sees the same pixels."""
    cases = Cityscapes(city, size=(16, 32))
    numbers = np.asarray(Image.open(labels_of(city)))
    picture(labels_of(city), np.where(np.arange(128) < 64, 0, numbers).astype(np.uint8))
    loaders = [Loader(c, c.intensity, Window(None)) for c in (cases, Cityscapes(city, size=(16, 32)))]
    assert torch.equal(loaders[0][BatchSpec((0,), 0)].images, loaders[1][BatchSpec((0,), 0)].images)
    batch = loaders[1][BatchSpec((0,), 0)]
    assert batch.annotations.valid is not None
    assert not batch.annotations.valid[0, :, :16].any()
    assert not batch.annotations.labels[0, :, :, :16].any()
    assert batch.annotations.marginal_probs(24)[0, :, :, :16].sum() == 0
    assert batch.annotations.regions is not None
    assert batch.annotations.regions.size.sum() == batch.annotations.valid.sum()


def test_predictions_of_another_model_join_the_image(downloaded, tmp_path):
    plain, rng = Cityscapes(downloaded, size=(16, 32)), np.random.default_rng(2)
    ids = {name: rng.integers(0, 19, (64, 128)).astype(np.uint8) for name in FRAMES}
    (tmp_path / "pngs").mkdir()
    (tmp_path / "arrays").mkdir()
    for name, labels in ids.items():
        picture(tmp_path / "pngs" / name.split("_")[0] / f"{name}_leftImg8bit.png", labels)
        hot = (labels[..., None] == np.arange(19)).astype(np.float32)
        np.save(tmp_path / "arrays" / f"{name}.npy", hot if name < "b" else np.moveaxis(hot, -1, 0))
        picture(tmp_path / "ids" / f"{name}.png", np.array(LABEL_IDS, np.uint8)[labels])
    for options in ({"extra": tmp_path / "pngs"}, {"extra": tmp_path / "ids", "extra_ids": "label"}):
        cases = Cityscapes(downloaded, size=(16, 32), **options)
        assert cases.channels == 22
        case = cases[2]
        assert np.array_equal(case.image[:3], plain[2].image)
        hot = ids[cases.names[2]][2::4, 2::4] == np.arange(19)[:, None, None]
        assert np.array_equal(case.image[3:], 255 * hot)
        assert np.array_equal(case.table, plain[2].table)
    soft = Cityscapes(downloaded, size=(16, 32), extra=tmp_path / "arrays")
    for i in (0, 3):
        shares = (ids[soft.names[i]][..., None] == np.arange(19)).reshape(16, 4, 32, 4, 19).mean((1, 3))
        assert np.abs(np.moveaxis(soft[i].image[3:], 0, -1) / 255 - shares).max() < 0.01
    prepared = soft.intensity(torch.from_numpy(soft[0].image)[None])
    assert prepared[:, :3].min() < 0
    assert 0 <= prepared[:, 3:].min() <= prepared[:, 3:].max() <= 1
    assert soft.state() != plain.state()


def test_void_in_a_prediction_is_filled(downloaded, tmp_path):
    """Some keep predictions with the truth's void cut out, which would tell the network where it is."""
    for name in FRAMES:
        labels = np.full((64, 128), 5, np.uint8)
        labels[:, 64:] = 9
        labels[20:40, 20:90] = 255
        picture(tmp_path / f"{name}.png", labels)
    case = Cityscapes(downloaded, size=(64, 128), extra=tmp_path)[0]
    assert np.array_equal(case.image[3:].sum(0, dtype=int), np.full((64, 128), 255))
    assert case.image[3 + 5, 30, 30] == 255
    assert case.image[3 + 9, 30, 80] == 255


def test_extra_is_a_setting_of_the_data(downloaded, tmp_path):
    for name in FRAMES:
        picture(tmp_path / f"{name}.png", np.zeros((64, 128), np.uint8))
    given = ["--data.root", str(downloaded), "--data.options", "{size: [16, 32]}"]
    config = parse([*given, "--data.extra", str(tmp_path)], "cityscapes-extra")
    assert open_cases(config.data).channels == 22
    assert open_cases(parse(given, "cityscapes").data).channels == 3
    with pytest.raises(DataError, match=r"data\.options: expected some of .*, found 'extra'"):
        open_cases(config.data.changed(name="nodules", root=None, options={}))


def test_the_recipes_are_the_papers():
    for name, backbone in (("cityscapes", "unet"), ("cityscapes-extra", "unet-light")):
        config = parse([], name)
        model = config.model
        assert isinstance(model, MoSEConfig)
        assert (model.experts, model.latent, model.cost, model.beta) == (35, 5, "ce", 1.0)
        assert (values_of(model.samples), config.backbone.name) == ([1, 2], backbone)
        assert values_of(model.capacity) == [1 / 32, 1.0]
        assert values_of(model.group_threshold) == [1.0, 0.9]
        assert (values_of(model.annealing), config.trainer.epochs) == ([0.0, 1.0], 1000)
        assert (config.data.size, config.data.eval_size, config.data.batch_size) == (128, None, 12)
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 1e-5)


def expect(message: str, root: Path, **options) -> None:
    with pytest.raises(DataError) as caught:
        for _ in Cityscapes(root, **{"size": (16, 32), **options}):
            pass
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_damaged_downloads_are_named(city, tmp_path):
    expect(r"nowhere: expected the folders leftImg8bit and gtFine, found no leftImg8bit", tmp_path / "nowhere")
    (tmp_path / "empty/leftImg8bit").mkdir(parents=True)
    (tmp_path / "empty/gtFine").mkdir()
    expect(r"empty: expected frames in leftImg8bit/train", tmp_path / "empty")
    labels = labels_of(city)
    good = labels.read_bytes()
    labels.unlink()
    wanted = r"gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds\.png: expected the file that belongs to "
    expect(wanted + r"aachen/aachen_000000_000019_leftImg8bit\.png, found none \(missing=skip leaves", city)
    assert len(Cityscapes(city, missing="skip")) == 3
    labels.write_bytes(good)
    image = city / "leftImg8bit/train/aachen/aachen_000001_000019_leftImg8bit.png"
    kept = image.read_bytes()
    image.unlink()
    expect(r"aachen_000001_000019_leftImg8bit\.png: expected the file that belongs to aachen/.*_labelIds", city)
    image.write_bytes(kept[: len(kept) // 2])
    expect(r"aachen_000001_000019_leftImg8bit\.png: ", city)
    image.write_bytes(kept)
    numbers = np.asarray(Image.open(labels))
    for found, message in (
        (numbers[:, :64], r"labelIds\.png: expected 64×128 as in aachen_000000_000019_leftImg8bit\.png, found 64×64"),
        (
            np.where(numbers == 7, 99, numbers).astype(np.uint8),
            r"expected ids of the classes, 0 to 33 and 255, found 99",
        ),
        (np.stack([numbers] * 3, -1), r"expected one class id per pixel, found 3 channels"),
    ):
        picture(labels, found)
        expect(message, city)
    labels.write_bytes(b"not a picture")
    expect(r"labelIds\.png: ", city)
    labels.write_bytes(good)
    expect(r"leftImg8bit\.png: expected sides in the ratio of 16×16, found 64×128|labelIds", city, size=(16, 16))
    shutil.rmtree(city / "gtFine")
    expect("found no gtFine", city)


def test_damaged_predictions_are_named(downloaded, tmp_path):
    expect(r"nowhere: expected a folder of predictions, found none", downloaded, extra=tmp_path / "nowhere")
    for name in list(FRAMES)[1:]:
        np.save(tmp_path / f"{name}.npy", np.zeros((64, 128), np.int64))
    expect(r"expected a prediction of aachen_000000_000019 as .png or .npy, found none", downloaded, extra=tmp_path)
    assert len(Cityscapes(downloaded, extra=tmp_path, missing="skip")) == 3
    path = tmp_path / "aachen_000000_000019.npy"
    for array, message in (
        (np.full((64, 128), 19), r"000019\.npy: expected ids of the classes, 0 to 18 and 255, found 19"),
        (
            np.zeros((64, 128, 7)),
            r"expected ids \[H, W\] or probabilities \[19, H, W\] or \[H, W, 19\], found 64×128×7",
        ),
        (np.full((19, 64, 128), 2.0), r"expected probabilities from 0 to 1, found 2 to 2"),
        (np.full((19, 64, 128), np.nan), r"expected probabilities from 0 to 1, found nan"),
        (np.full((64, 128), -1), r"expected class ids, found int64 from -1"),
        (np.zeros((64, 64), int), r"expected sides in the ratio of 16×32, found 64×64"),
    ):
        np.save(path, array)
        expect(message, downloaded, extra=tmp_path)
    np.save(path, np.array([{}], object), allow_pickle=True)
    expect(
        r"000019\.npy: expected a whole \.npy file of numbers, found: Object arrays cannot be loaded",
        downloaded,
        extra=tmp_path,
    )
    np.save(path, np.zeros((64, 128), int))
    picture(tmp_path / "aachen_000000_000019_pred.png", np.zeros((64, 128), np.uint8))
    expect(r"expected one prediction per frame, found aachen_000000_000019\.npy as well", downloaded, extra=tmp_path)


# -- CamVid -----------------------------------------------------------------------------------------------------------


def test_camvid_from_one_file(tmp_path):
    cases = CamVid(camvid(tmp_path / "frames.npz"))
    assert (len(cases), cases.channels, len(cases.classes)) == (9, 3, 16)
    assert cases.classes[:11] == CAMVID
    assert cases.declared == ["train"] * 6 + ["test"] * 3  # the official test frames are not there
    assert len(set(cases.patients)) == 5
    case = cases[0]
    assert case.valid is not None
    assert not case.valid.all()
    assert set(np.unique(case.labels)) <= set(range(16))
    flipped = CamVid(tmp_path / "frames.npz", flips={"sky": ["sky2", "1/3"]})
    assert flipped.title == "CamVid, 2 modes"
    assert CamVid(tmp_path / "frames.npz", size=(12, 16))[0].size == (12, 16)
    assert flipped[0].mass.tolist() == pytest.approx([2 / 3, 1 / 3])


def test_camvid_from_folders(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for i in range(2):
            image, labels = scene(rng, (24, 32), tuple(range(12)))
            picture(tmp_path / part / f"0001TP_{part}{i:03d}.png", image)
            picture(tmp_path / f"{part}annot" / f"0001TP_{part}{i:03d}.png", labels)
    cases = CamVid(tmp_path, size=(12, 16))
    assert cases.declared == ["train", "train", "val", "val", "test", "test"]
    assert cases[0].size == (12, 16)
    assert CamVid(tmp_path)[0].size == (24, 32)
    (tmp_path / "valannot" / "0001TP_val001.png").unlink()
    with pytest.raises(DataError, match=r"valannot/0001TP_val001\.png: expected the file that belongs to val/0001TP"):
        CamVid(tmp_path)
    own = tmp_path / "own"
    image, labels = scene(rng, (24, 32), tuple(range(12)))
    picture(own / "images" / "a.png", image)
    picture(own / "masks" / "map" / "a.png", labels)
    case = CamVid(own)[0]
    assert case.valid is not None
    assert np.array_equal(case.valid, labels != 11)


def test_camvid_files_that_cannot_be_read(tmp_path):
    path = camvid(tmp_path / "frames.npz")
    arrays = dict(np.load(path))

    def refused(message: str, **changes) -> None:
        kept = {key: value for key, value in {**arrays, **changes}.items() if value is not None}
        np.savez(path, allow_pickle=False, **kept)
        with pytest.raises(DataError, match=message) as caught:
            CamVid(path)[0]
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)

    refused("expected the arrays train_image, found no train_image", train_image=None)
    refused("expected train_label with train_image, found none", train_label=None)
    refused(r"expected train_image \[N, H, W, 3\] of bytes", train_image=arrays["train_image"][..., 0])
    refused("expected one val_name per frame", val_name=arrays["val_name"][:1])
    refused("expected a name of its own", val_name=arrays["train_name"][:3])
    refused("expected ids of the classes, 0 to 11, found 40", train_label=np.full_like(arrays["train_label"], 40))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"expected an \.npz file of plain arrays"):
        CamVid(path)


def test_commands_know_street_data(downloaded, tmp_path, capsys):
    assert (
        main(
            [
                "data",
                "split",
                str(downloaded),
                "--set",
                "size=[16, 32]",
                "--declared",
                "--quiet",
                "--out",
                str(tmp_path / "s.json"),
            ]
        )
        == 0
    )
    assert main(["data", "list"]) == 0
    said = capsys.readouterr().out
    assert "cityscapes" in said
    assert "camvid" in said
    assert main(["data", "split", str(tmp_path / "x"), "--out", str(tmp_path / "t.json")]) == 2


@pytest.mark.skipif(
    not (SHARED / "data" / "camvid").is_dir(), reason="the CamVid frames are absent: set AMBISEG_SHARED"
)
def test_the_real_camvid():
    config = parse(
        ["--data.root", str(SHARED / "data" / "camvid" / "camvid_120x160.npz"), "--data.cache", "null"], "camvid"
    )
    module = DataModule(config.data)
    module.setup()
    assert {part: len(names) for part, names in module.split.parts.items()} == {"train": 325, "val": 42, "test": 101}
    counts = [len(module.cases[i].readers) for i in module.indices("test")]
    assert set(counts) == {32}  # all five classes are in every test frame
    assert {len(module.cases[i].readers) for i in module.indices("train")[:40]} <= {2, 4, 8, 16, 32}
    batch = next(iter(module.train_dataloader()))
    assert batch.annotations.count in (8, 16, 32)
    assert batch.images.abs().max() <= 2
