"""Folders as people have them: what is read, and one line for what cannot be."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.io.errors import FileError
from tests.files import RNG, disc, made, make, picture, refusal, save, save_dicom, save_nifti, save_series

# -- what works --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 7])
def test_readers_in_folders(tmp_path, count):
    readers = [f"reader {m}" for m in range(count)]
    cases = Folder(make(tmp_path / "my data", readers=readers))
    assert cases.title == "my data"
    assert (cases.names, cases.patients, cases.declared) == (["a", "b", "c"], ["a", "b", "c"], None)
    assert (cases.classes, cases.evaluated, cases.channels) == (("background", "foreground"), (1,), 1)
    assert cases.intensity == Intensity.for_dtype(np.dtype(np.uint8))
    case = cases[1]
    assert case.readers == tuple(readers)
    for m, mask in enumerate(case.labels):
        assert np.array_equal(mask, disc(16, 20, 4 + m, 8, 9))
    assert case.weights is None
    assert case.valid is None


def test_colour_photographs_with_unequal_readers(tmp_path):
    for i in range(3):
        save(tmp_path / f"images/p{i}.JPG", picture(channels=3), format="JPEG")
        for m in range(i + 1):
            mask = disc(16, 20) * 255
            grey_as_colour = np.stack([mask] * 3, -1)
            save(tmp_path / f"masks/r{m}/p{i}.png", grey_as_colour if m == 1 else mask)
    cases = Folder(tmp_path)
    assert cases.channels == 3
    assert [case.readers for case in cases] == [("r0",), ("r0", "r1"), ("r0", "r1", "r2")]
    assert all((case.labels == disc(16, 20)).all() for case in cases)


def test_one_reader_needs_no_folder(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"images/{name}.png", picture())
        save(tmp_path / f"masks/{name}.tif", disc(16, 20))
    assert Folder(tmp_path)[0].readers == ("reader_1",)


def test_sub_folders_are_patients_and_may_be_mirrored_in_the_masks(tmp_path):
    for name in ("p1/a", "p1/b", "p2/a"):
        save(tmp_path / f"images/{name}.png", picture())
        save(tmp_path / f"masks/{name}.png", disc(16, 20))
    cases = Folder(tmp_path)
    assert cases.names == ["p1/a", "p1/b", "p2/a"]
    assert cases.patients == ["p1", "p1", "p2"]
    assert Folder(tmp_path, patient=r"[^/]+$").patients == ["a", "b", "a"]
    message = f"{tmp_path}/images/p1/a.png: expected 'case' to find the patient in 'p1/a', found nothing"
    assert refusal(tmp_path, patient="case") == message


def test_splits_in_folders(tmp_path):
    for part in ("train", "Valid", "test"):
        make(tmp_path / part, names=("a",))
    cases = Folder(tmp_path)
    assert cases.names == ["train/a", "Valid/a", "test/a"]
    assert cases.declared == ["train", "val", "test"]
    assert len(set(cases.patients)) == 3


def test_nothing_is_decoded_to_list_a_folder(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setattr("ambiseg.data.sets.folder.reading.open_source", lambda *_: pytest.fail("a file was opened"))
    assert len(Folder(tmp_path)) == 3


def test_declared_labels_need_no_look_through_the_masks(tmp_path):
    make(tmp_path)
    (tmp_path / "masks/Ann/c.png").write_bytes(b"")
    assert Folder(tmp_path, labels="binary")[0].labels.max() == 1
    with pytest.raises(DataError, match=r"c\.png: expected PNG, found an empty file"):
        Folder(tmp_path)[0]


def test_what_systems_leave_behind_is_ignored(tmp_path):
    make(tmp_path)
    for name in (".DS_Store", "._a.png", "Thumbs.db", "readme.txt"):
        (tmp_path / "images" / name).write_text("x")
        (tmp_path / "masks" / name).write_text("x")
        (tmp_path / "masks/Ann" / name).write_text("x")
    assert len(Folder(tmp_path)) == 3


def test_names_in_composed_and_decomposed_unicode_are_the_same(tmp_path):
    save(tmp_path / "images" / (unicodedata.normalize("NFC", "Käfer 1") + ".png"), picture())
    save(tmp_path / "masks/Jürgen" / (unicodedata.normalize("NFD", "Käfer 1") + ".png"), disc(16, 20))
    assert len(Folder(tmp_path)) == 1


def test_links_are_followed_but_not_round_in_circles(tmp_path):
    make(tmp_path / "far away")
    (tmp_path / "near").mkdir()
    (tmp_path / "near/images").symlink_to(tmp_path / "far away/images")
    (tmp_path / "near/masks").symlink_to(tmp_path / "far away/masks")
    (tmp_path / "far away/images/back").symlink_to(tmp_path / "far away/images")
    assert len(Folder(tmp_path / "near")) == 3
    make(tmp_path / "elsewhere", names=["d"])
    for part in ("images", "masks/Ann"):
        (tmp_path / f"far away/{part}/p1").symlink_to(tmp_path / f"elsewhere/{part}")
    assert Folder(tmp_path / "near").names == ["a", "b", "c", "p1/d"]


def test_a_folder_can_be_sent_to_a_worker(tmp_path):
    save_nifti(tmp_path / "images/v.nii.gz", RNG.normal(size=(6, 5, 4)))
    save_nifti(tmp_path / "masks/v.nii.gz", np.ones((6, 5, 4), np.uint8))
    cases = Folder(tmp_path)
    there = pickle.loads(pickle.dumps((cases[0].name, cases)))[1]
    assert np.array_equal(there[3].labels, cases[3].labels)
    assert there.digest(2) == cases.digest(2)


def test_state_follows_files_and_settings(tmp_path):
    make(tmp_path)
    before = Folder(tmp_path).state()
    assert Folder(tmp_path).state() == before
    assert Folder(tmp_path, void=7).state() != before
    save(tmp_path / "masks/Ann/a.png", np.zeros((16, 20), np.uint8))
    assert Folder(tmp_path).state() != before


def test_importing_data_imports_no_decoder():
    modules = "ambiseg.data.sets.folder.cases, ambiseg.data.check.check"
    code = f"import sys, {modules}; print({{m.split('.')[0] for m in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("PIL", "tifffile", "nibabel", "pydicom", "rich", "matplotlib", "lightning", "scipy", "monai"):
        assert f"'{heavy}'" not in loaded, heavy


# -- volumes -----------------------------------------------------------------------------------------------------------


def test_slices_of_a_volume_have_one_patient(tmp_path):
    volume = RNG.normal(0, 300, (8, 9, 12)).astype(np.int16)
    marks = np.zeros(volume.shape, np.uint8)
    marks[2:5, 3:6, 4:7] = 1
    for name in ("s1", "s2"):
        save_nifti(tmp_path / f"images/{name}.nii.gz", volume)
        save_nifti(tmp_path / f"masks/Ann/{name}.nii.gz", marks)
        save_nifti(tmp_path / f"masks/Bob/{name}.nii", marks)
    cases = Folder(tmp_path)
    assert len(cases) == 24
    assert (cases.names[0], cases.names[-1]) == ("s1#000", "s2#011")
    assert set(cases.patients) == {"s1", "s2"}
    assert cases[4].labels.sum() == 2 * 9
    assert Folder(tmp_path, slices="marked").names == [f"{s}#{k:03}" for s in ("s1", "s2") for k in (4, 5, 6)]
    assert Folder(tmp_path, axis=0)[2].size == (12, 9)


def test_a_mask_on_another_grid_is_refused(tmp_path):
    save_nifti(tmp_path / "images/s.nii", np.zeros((8, 9, 4), np.int16))
    moved = np.eye(4)
    moved[0, 3] = 5
    save_nifti(tmp_path / "masks/s.nii", np.ones((8, 9, 4), np.uint8), moved)
    expected = f"{tmp_path}/masks/s.nii: expected the grid of s.nii, found corners 5 mm away from its own"
    assert refusal(tmp_path) == expected
    assert Folder(tmp_path, geometry="ignore")[0].labels.all()
    save_nifti(tmp_path / "masks/s.nii", np.ones((8, 9, 5), np.uint8))
    expected = f"{tmp_path}/masks/s.nii: expected 4 slices of 9×8 as its image s.nii, found 5 slices of 9×8"
    assert refusal(tmp_path) == expected


def test_dicom_series_and_dicom_files(tmp_path):
    stack = RNG.integers(0, 1000, (4, 6, 5), dtype=np.int16)
    save_series(tmp_path / "images/p1", stack)
    tifffile.imwrite(made(tmp_path / "masks/p1.tif"), (stack > 500).astype(np.uint8), photometric="minisblack")
    cases = Folder(tmp_path)
    assert cases.names == [f"p1#{k:03}" for k in range(4)]
    assert all(np.array_equal(case.labels[0], case.image[0] > 500) for case in cases)
    single = tmp_path / "single"
    for name in ("x", "y"):
        save_dicom(single / f"images/{name}.dcm", stack[0])
        save_dicom(single / f"masks/Ann/{name}.dcm", (stack[0] > 500).astype(np.uint8))
    assert Folder(single).names == ["x", "y"]


def test_slices_are_read_in_any_order_alike(tmp_path):
    tifffile.imwrite(made(tmp_path / "images/s.tif"), RNG.integers(0, 9, (5, 6, 7)).astype(np.uint8))
    tifffile.imwrite(made(tmp_path / "masks/s.tif"), RNG.integers(0, 2, (5, 6, 7)).astype(np.uint8))
    cases = Folder(tmp_path)
    forward = [cases.digest(i) for i in range(5)]
    assert [cases.digest(i) for i in reversed(range(5))] == forward[::-1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_folders_that_are_none(tmp_path):
    missing = tmp_path / "no such thing"
    assert refusal(missing) == f"{missing}: expected a folder or a manifest, found nothing of that name"
    expected = f"{tmp_path}: expected images/ and masks/, or a manifest.csv, found an empty folder"
    assert refusal(tmp_path) == expected
    (tmp_path / "imgs").mkdir()
    assert refusal(tmp_path) == expected.replace("an empty folder", "imgs/")
    (tmp_path / "images").mkdir()
    assert refusal(tmp_path) == f"{tmp_path}/images: expected pictures, found nothing"
    save(tmp_path / "images/a.png", picture())
    assert refusal(tmp_path) == f"{tmp_path}/masks: expected a folder of masks, found imgs/ beside images/"
    (tmp_path / "masks").mkdir()
    assert refusal(tmp_path) == f"{tmp_path}/masks: expected masks, found an empty folder"


def test_a_mask_of_another_size(tmp_path):
    path = save(make(tmp_path) / "masks/Bob/b.png", disc(16, 19) * 255)
    assert refusal(tmp_path) == f"{path}: expected 16×20 as its image b.png, found 16×19"


def test_a_class_beyond_the_declared_ones(tmp_path):
    mask = disc(16, 20)
    mask[:2, :2] = 7
    path = save(make(tmp_path, foreground=1) / "masks/Bob/b.png", mask)
    assert refusal(tmp_path, classes=2) == f"{path}: expected class ids 0 … 1, found value 7 in 4 pixels"
    undeclared = "expected class ids 0, 1, 2 … or 0 and 255 in all masks, found values 0, 1, 7 in them, "
    assert refusal(tmp_path) == f"{path}: {undeclared}7 in this mask alone"


def test_a_corrupted_picture(tmp_path):
    path = make(tmp_path) / "images/b.png"
    path.write_bytes(path.read_bytes()[:200])
    assert re.fullmatch(rf"{path}: expected PNG that can be decoded, found damage: .*truncated.*", refusal(tmp_path))


def test_an_image_without_any_mask(tmp_path):
    for reader in ("Ann", "Bob"):
        (make(tmp_path) / f"masks/{reader}/b.png").unlink()
        if reader == "Ann":
            assert [len(case.readers) for case in Folder(tmp_path)] == [2, 1, 2]
            (tmp_path / "masks/Bob/b.png").unlink()
    (tmp_path / "masks/Ann/b.png").unlink()
    line = f"{tmp_path}/images/b.png: expected a mask of at least one reader in masks/, found none"
    assert refusal(tmp_path) == line
    assert Folder(tmp_path, missing="skip").names == ["a", "c"]


def test_two_files_of_one_name(tmp_path):
    path = save(make(tmp_path) / "images/b.tif", picture())
    assert refusal(tmp_path) == f"{path}: expected one file named 'b', found b.png as well"


def test_files_beside_readers(tmp_path):
    save(make(tmp_path) / "masks/a.png", disc(16, 20))
    message = f"{tmp_path}/masks: expected files or a folder for each reader, found 1 file beside Ann/, Bob/"
    assert refusal(tmp_path) == message


def test_jpeg_masks(tmp_path):
    make(tmp_path)
    (tmp_path / "masks/Ann/a.png").unlink()
    path = save(tmp_path / "masks/Ann/a.jpg", disc(16, 20) * 255)
    assert refusal(tmp_path) == f"{path}: expected a mask without loss, found JPEG, whose values are not class ids"
    assert np.mean(Folder(tmp_path, labels={"threshold": 128})[0].labels[0] == disc(16, 20)) > 0.95


def test_images_that_differ_in_kind(tmp_path):
    path = save(make(tmp_path) / "images/b.png", picture(channels=3))
    assert refusal(tmp_path) == f"{path}: expected 1 channel as a.png, found 3"
    assert Folder(tmp_path, channels=3)[0].image.shape == (3, 16, 20)
    assert "expected a grey image, found" in refusal(tmp_path, channels=1)
    save(path, np.stack([picture()] * 3, -1))
    assert [len(case.image) for case in Folder(tmp_path, channels=1)] == [1, 1, 1]
    save(path, picture().astype(np.uint16))
    assert refusal(tmp_path) == f"{path}: expected uint8 as a.png, found uint16"
    assert len([*Folder(tmp_path, intensity=Intensity(0, 255))]) == 3


def test_values_that_are_no_numbers(tmp_path):
    make(tmp_path)
    for name in "abc":
        (tmp_path / f"images/{name}.png").unlink()
        np.save(tmp_path / f"images/{name}.npy", np.where(disc(16, 20) & (name == "b"), np.nan, 1.0))
    found = f"expected finite values, found {disc(16, 20).sum()} values nan or infinite"
    assert refusal(tmp_path) == f"{tmp_path}/images/b.npy: {found}"


def test_arrays_whose_axes_are_not_said(tmp_path):
    np.save(made(tmp_path / "images/a.npy"), picture(channels=3))
    np.save(made(tmp_path / "masks/a.npy"), disc(16, 20))
    with pytest.raises(FileError, match=r"expected 16 slices of 20×3 as its image a\.npy, found 16×20") as caught:
        _ = Folder(tmp_path)[0]
    assert caught.value.problem.remedy == 'if the last axis of the image is colour, declare "axes": "HWC"'
    assert Folder(tmp_path, axes="HWC")[0].image.shape == (3, 16, 20)


# -- files that are none, and folders that may not be read -------------------------------------------------------------


def test_a_damaged_slice_of_a_series_is_named(tmp_path):
    save_series(tmp_path / "images/p1", RNG.integers(0, 99, (4, 16, 20), dtype=np.int16))
    np.save(made(tmp_path / "masks/p1.npy"), np.stack([disc(16, 20)] * 4))
    path = tmp_path / "images/p1/002.dcm"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])  # the header is there
    assert refusal(tmp_path).startswith(f"{path}: expected DICOM that can be decoded, found damage: ")
    path.write_bytes(whole[:200])
    assert (
        refusal(tmp_path)
        == f"{path}: expected DICOM that can be decoded, found damage: its header ends before the image"
    )


def test_pipes_links_to_nothing_and_folders_without_slices(tmp_path):
    make(tmp_path)
    mask = tmp_path / "masks/Bob/b.png"
    mask.unlink()
    mask.symlink_to("gone.png")
    assert refusal(tmp_path) == f"{mask}: expected a file, found a link to gone.png, which does not exist"
    mask.unlink()
    os.mkfifo(mask)
    assert refusal(tmp_path) == f"{mask}: expected a file, found a pipe or a device"  # and does not wait for it
    mask.unlink()
    (tmp_path / "images/b.png").unlink()
    (tmp_path / "images/b").mkdir()
    (tmp_path / "manifest.csv").write_text("image,mask\nimages/b,masks/Ann/b.png\n")
    found = f"{tmp_path / 'images/b'}: expected the DICOM files of one series, found none in this folder"
    assert refusal(tmp_path) == found


def test_a_readers_folder_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    make(tmp_path)
    scandir = os.scandir

    def guarded(path):
        if Path(path) == tmp_path / "masks/Bob":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    found = f"{tmp_path / 'masks/Bob'}: expected a folder that may be read, found: Permission denied"
    assert refusal(tmp_path) == found


def test_settings_and_manifests_that_may_not_be_read(tmp_path, monkeypatch):
    make(tmp_path)

    def guarded(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "ambiseg.json").write_text("{}")
    monkeypatch.setattr("ambiseg._util.reading.open_regular", guarded)
    found = f"{tmp_path / 'ambiseg.json'}: expected a file that may be read, found: Permission denied"
    assert refusal(tmp_path) == found


def test_a_mask_without_an_image_is_compared_with_images_that_lack_one(tmp_path):
    make(tmp_path, names=("cell_1", "cell_2", "cell_3"))
    (tmp_path / "masks/Ann/cell_2.png").rename(tmp_path / "masks/Ann/Cell_2.png")  # Bob has marked cell_2
    folder = Folder(tmp_path, quiet=True, strict=False)
    [problem] = [problem for problem in folder.problems if problem.code == "W102"]
    assert problem.message == "expected an image named 'Cell_2', found none; the nearest is cell_2.png"
    (tmp_path / "images/cell_2.png").rename(tmp_path / "images/cell_2.webp")
    codes = [problem.code for problem in Folder(tmp_path, quiet=True, strict=False).problems]
    assert codes == ["E105", "W102"]  # Bob's mask has an image, which is not read


def test_masks_of_a_photo_that_its_exif_turns(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    save(tmp_path / "images/a.jpg", picture(), exif=exif)
    save(tmp_path / "masks/a.png", disc(16, 20))
    with pytest.raises(FileError, match=r"expected 20×16 as its image a\.jpg, found 16×20") as caught:
        Folder(tmp_path)[0]
    assert "EXIF" in caught.value.problem.remedy
