"""The files of a prediction, in the geometry of each kind of image."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from ambiseg import MaskDistribution, MoSE
from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.shapes import Shapes
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from ambiseg.methods import MoSEPredictive
from ambiseg.prediction import Prediction, predict
from ambiseg.prediction.inputs import find_inputs
from ambiseg.viz.colours import label_colours, palette
from tests.drop_ins import Latent, TwoHeads
from tests.files import save, save_dicom, save_nifti, save_series
from tests.test_prediction import dropped_in, fresh, noise, pixels


def read_mask(path: Path) -> np.ndarray:
    """``[D, H, W]`` as the library reads a mask itself."""
    source = open_source(path, ReadOptions(mask=True))
    return np.stack([source.read(k)[0] for k in range(source.slices)])


def per_stratum(one: Prediction) -> int:
    """Draws per stratum, or all of them in the standard form."""
    return len(one.draws) if one.strata is None or one.form == "standard" else len(one.draws) // len(one.strata.weights)


def check_folder(folder: Path, one: Prediction, suffix: str) -> dict:
    about = json.loads((folder / "weights.json").read_text())
    labels = one.masks.labels[0].reshape(one.masks.count, one.source.slices, *one.source.size)
    assert [mask["file"] for mask in about["masks"]] == [f"mask_{i:02}{suffix}" for i in range(one.masks.count)]
    if suffix != ".nii.gz":  # readers turn NIfTI to be looked at: compared voxel by voxel where it is tested
        for i, mask in enumerate(about["masks"]):
            assert np.array_equal(read_mask(folder / mask["file"]), labels[i])
    for i, mask in enumerate(about["masks"]):
        assert mask["weight"] == pytest.approx(float(one.masks.mass[0, i]))
        assert sum(mask["pixels"].values()) == labels[i].numel()
        assert mask.get("strata", []) == [k + 1 for k in one.strata_of(i)]  # counted from one
        assert [mask["stratum"]] == mask["strata"][:1] if one.strata else "stratum" not in mask
    assert sum(mask["weight"] for mask in about["masks"]) == pytest.approx(1)
    assert sum(mask["draws"] for mask in about["masks"]) == len(one.draws)
    assert about["format"] == "ambiseg.Prediction/2"
    assert (about["form"], about["samples" if one.form == "standard" else "per_stratum"]) == (
        one.form,
        per_stratum(one),
    )
    assert about["entropy"]["mean"] == pytest.approx(float(one.entropy.mean()))
    loaded = MaskDistribution.load(folder / "masks.npz")
    for mine, theirs in zip(loaded._tensors().values(), one.masks._tensors().values(), strict=True):
        assert torch.equal(mine, theirs)
    files = {*(mask["file"] for mask in about["masks"]), about["entropy"]["file"], "masks.npz", "weights.json"}
    if one.strata is None:
        assert about["strata"] is None
    else:
        assert about["strata"]["name"] == one.strata.name
        assert about["strata"]["weights"] == pytest.approx(one.strata.weights.tolist())
        assert ("slice_weights" in about["strata"]) == (one.source.slices > 1)
        centres = [f"{one.strata.name}_{k + 1}{suffix}" for k in range(len(one.strata.weights))]
        assert about["strata"]["files"] == centres
        files.update(centres)
        if suffix != ".nii.gz":
            shape = one.source.slices, *one.source.size
            assert np.array_equal(read_mask(folder / centres[-1]), one.strata.centres[-1].reshape(shape))
    assert files == set(os.listdir(folder)) - {"entropy.png", "overview.png"}
    assert not [name for name in os.listdir(folder.parent) if name.startswith(".")]
    return about


def test_png(tmp_path, tiny_run):
    picture = save(tmp_path / "in" / "a.png", Shapes(count=4, size=32)[1].image[0])
    [one] = predict(tiny_run, picture, tmp_path / "out")
    about = check_folder(tmp_path / "out" / "a", one, ".png")
    assert about["classes"] == ["ground", "shape"]
    assert (about["form"], about["seed"], about["run"], about["image"]) == ("compact", 0, str(tiny_run), str(picture))
    with Image.open(tmp_path / "out" / "a" / "mask_00.png") as image:
        assert (image.mode, image.size) == ("P", (32, 32))
        assert np.array_equal(
            np.asarray(image.convert("RGB")), palette(label_colours(2))[one.masks.labels[0, 0].numpy()]
        )
    entropy = tifffile.imread(tmp_path / "out" / "a" / "entropy.tif")
    assert np.array_equal(entropy, one.entropy.numpy())
    shown = pixels(tmp_path / "out" / "a" / "entropy.png")
    assert np.abs(shown / 255 * np.log(2) - entropy).max() < 0.002
    assert pixels(tmp_path / "out" / "a" / "overview.png").shape[1] > 600


def test_colour_png_with_many_classes(tmp_path):
    path = save(tmp_path / "c.png", noise(20, 30, 3), dpi=(200, 200))
    [one] = predict(fresh(3, classes=5), path, tmp_path)
    check_folder(tmp_path / "c", one, ".png")
    assert one.masks.labels.max() > 1
    with Image.open(tmp_path / "c" / "mask_00.png") as image:
        assert round(image.info["dpi"][0]) == 200


def test_tiff_of_16_bits_keeps_its_scale_and_its_place_on_the_ground(tmp_path):
    tags = [(33550, "d", 3, (2.0, 2.0, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 4e6, 0.0), True)]
    tifffile.imwrite(
        tmp_path / "t.tif",
        noise(21, 33, dtype=np.uint16) * 200,
        resolution=(300, 150),
        resolutionunit=3,
        extratags=tags,
    )
    [one] = predict(fresh(intensity=Intensity(0, 60000, 30000, 10000)), tmp_path / "t.tif", tmp_path, overview=False)
    assert one.source.dtype == np.uint16
    check_folder(tmp_path / "t", one, ".tif")
    for name in ("mask_00.tif", "entropy.tif"):
        with tifffile.TiffFile(tmp_path / "t" / name) as file:
            found = file.pages.first.tags
            assert (found[282].value, found[283].value, found[296].value) == ((300, 1), (150, 1), 3)
            assert (found[33550].value, found[33922].value[3]) == ((2.0, 2.0, 0.0), 5e5)
    content = bytearray((tmp_path / "t.tif").read_bytes())
    content[content.index(b"\x28\x01\x03\0\x01\0\0\0") + 8] = 255  # a unit that is none: its masks have no scale
    (tmp_path / "u.tif").write_bytes(content)
    predict(fresh(intensity=Intensity(0, 60000, 30000, 10000)), tmp_path / "u.tif", tmp_path, overview=False)
    with tifffile.TiffFile(tmp_path / "u" / "mask_00.tif") as file:
        assert 33550 not in file.pages.first.tags
    tifffile.imwrite(tmp_path / "s.tif", noise(4, 12, 14), photometric="minisblack")
    [one] = predict(fresh(), tmp_path / "s.tif", tmp_path, overview=False)
    check_folder(tmp_path / "s", one, ".tif")
    assert one.masks.spatial == (4, 12, 14)


@pytest.mark.parametrize("axis", [0, 2])
def test_nifti_comes_back_in_its_own_voxels(tmp_path, axis, monkeypatch):
    affine = np.array(
        [[0, -0.7, 0, 30], [0.8, 0, 0, -20], [0, 0, 2.5, 7], [0, 0, 0, 1.0]]
    )  # columns swapped, one flipped
    volume = noise(10, 12, 6, dtype=np.int16)
    path = save_nifti(tmp_path / "v.nii.gz", volume, affine)
    header: Any = nibabel.load(path).header  # type: ignore[attr-defined]
    header["descrip"] = b"JANE DOE"
    nibabel.save(nibabel.Nifti1Image(volume, affine, header), path)
    model = fresh()
    [one] = predict(model, path, tmp_path, axis=axis, overview=False)
    check_folder(tmp_path / "v", one, ".nii.gz")
    image = nibabel.load(tmp_path / "v" / "mask_00.nii.gz")
    assert np.array_equal(image.affine, nibabel.load(path).affine)  # type: ignore[attr-defined]
    assert (image.shape, image.get_data_dtype()) == (volume.shape, np.uint8)  # type: ignore[attr-defined]
    assert b"JANE" not in image.header.binaryblock  # type: ignore[attr-defined]
    assert image.header.get_xyzt_units() == header.get_xyzt_units()  # type: ignore[attr-defined]
    # A method that marks what is bright: it must be bright in the file as well.
    monkeypatch.setattr(MoSEPredictive, "render", _mark_bright)
    monkeypatch.setattr(MoSE, "predict", _with_image)
    predict(model, path, tmp_path / "bright", axis=axis, overview=False)
    marked = nibabel.load(tmp_path / "bright" / "v" / "mask_00.nii.gz")
    assert np.array_equal(np.asanyarray(marked.dataobj), volume > 127)  # type: ignore[attr-defined]
    entropy = nibabel.load(tmp_path / "bright" / "v" / "entropy.nii.gz")
    assert entropy.get_data_dtype() == np.float32  # type: ignore[attr-defined]


def test_voxels_whose_order_is_unknown_are_refused(tmp_path):
    affine = np.eye(4)
    affine[:3, 1] = affine[:3, 0]  # two axes in one direction
    path = save_nifti(tmp_path / "v.nii.gz", noise(4, 5, 6, dtype=np.int16), affine)
    with pytest.raises(DataError, match=r"v.nii.gz: expected an affine that can be inverted, found \[\["):
        predict(fresh(), path, tmp_path / "out", overview=False)
    assert os.listdir(tmp_path / "out") == []


def _with_image(self, images):
    predictive = self(images)
    object.__setattr__(predictive, "bright", images[:, :1] > 0)
    return predictive


def _mark_bright(self, noise):
    labels = self.bright.to(torch.uint8).expand(-1, noise.count, -1, -1)
    return MaskDistribution(labels, noise.weights, marginal=torch.full((1, 2, *self.size), 0.5))


@pytest.mark.parametrize("method", [Latent, TwoHeads])
def test_files_of_other_methods(tmp_path, method):
    picture = save(tmp_path / "in" / "a.png", noise(20, 24))
    volume = save_nifti(tmp_path / "in" / "v.nii.gz", noise(10, 12, 5, dtype=np.int16), np.diag([1.0, 1, 2, 1]))
    for one, suffix in zip(predict(dropped_in(method), [picture, volume], tmp_path), (".png", ".nii.gz"), strict=True):
        check_folder(tmp_path / one.name, one, suffix)
        assert pixels(tmp_path / one.name / "overview.png").shape[1] > 600
        text = (tmp_path / one.name / "weights.json").read_text()
        assert "expert" not in text + repr(one)
        assert ("head_2" in text) == (method is TwoHeads)


def test_dicom(tmp_path):
    model = fresh(intensity=Intensity(-1000, 1000, 0, 500))
    path = save_dicom(
        tmp_path / "in" / "one.dcm", noise(16, 20, dtype=np.int16) * 4 - 500, RescaleSlope=1, RescaleIntercept=-10
    )
    [one] = predict(model, path, tmp_path / "out", overview=False)
    check_folder(tmp_path / "out" / "one", one, ".png")
    volume = noise(5, 16, 20, dtype=np.int16)
    series = save_series(tmp_path / "ct", volume)
    [one] = predict(model, series, tmp_path / "out", overview=False)
    assert one.name == "ct"
    about = check_folder(tmp_path / "out" / "ct", one, ".nii.gz")
    assert np.array(about["strata"]["slice_weights"]).shape == (5, 3)
    image = nibabel.load(tmp_path / "out" / "ct" / "mask_00.nii.gz")
    assert image.shape == (20, 16, 5)  # type: ignore[attr-defined]
    corner = image.affine @ [0, 0, 0, 1]  # type: ignore[attr-defined]
    assert corner[:3].tolist() == [10, 20, 5]  # the first slice's position, in millimetres right, front and up
    assert np.allclose(np.abs(np.diag(image.affine))[:3], [0.75, 0.5, 2])  # type: ignore[attr-defined]
    labels = np.asanyarray(image.dataobj)  # type: ignore[attr-defined]
    assert np.array_equal(labels.transpose(2, 1, 0), one.masks.labels[0, 0])
    alone = predict(model, series, dicom="files")
    assert [one.name for one in alone] == ["000", "001", "002", "003", "004"]


def test_numpy_arrays(tmp_path):
    np.save(tmp_path / "n.npy", noise(12, 14, 3))
    [one] = predict(fresh(3), tmp_path / "n.npy", tmp_path / "out", axes="HWC", overview=False)
    check_folder(tmp_path / "out" / "n", one, ".npy")
    model, grey = fresh(), noise(12, 14)
    [flat], [stacked] = predict(model, grey), predict(model, grey[None])
    assert torch.equal(flat.masks.labels, stacked.masks.labels)
    with pytest.raises(DataError, match=r"image_0: expected an array of numbers .*, found uint8 \[12\]"):
        predict(model, grey[:, 0])


def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    for name in ("a.png", "b/c.png"):
        save(tmp_path / name, noise(8, 8))
    scandir = os.scandir

    def guarded(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(DataError, match="b: expected a folder that may be read, found: Permission denied"):
        find_inputs([tmp_path])
