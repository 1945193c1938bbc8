"""NIfTI with four axes, and label maps with names: read back by nibabel."""

from __future__ import annotations

import json
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

import ambiseg
from ambiseg._util.errors import DataError
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from ambiseg.prediction import Options, write
from ambiseg.prediction.exchange import Exchange
from tests.dicom_fakes import enhanced, series
from tests.files import RNG, save, save_nifti
from tests.test_dicom_seg_writing import VOLUME, WEIGHTS, prediction

FORMS = Exchange(nifti_4d=True)
OBLIQUE = np.array([[0, -0.8, 0.6, 5], [0, 0.6, 0.8, -3], [2, 0, 0, 7], [0, 0, 0, 1.0]])


def nifti(path, shape=(7, 5, 4), affine=OBLIQUE):
    return save_nifti(path, RNG.integers(0, 99, shape).astype(np.int16), affine)


def load(folder, name):
    image: Any = nibabel.load(folder / name)
    return np.asanyarray(image.dataobj), image


def aligned(volume, affine, source):
    """A stored volume as ``[D, H, W, …]`` of the opened image."""
    turn = np.round(np.linalg.inv(affine) @ source.affine).astype(int)
    index = np.stack(np.meshgrid(*map(np.arange, (source.slices, *source.size)), indexing="ij"), -1)
    i, j, k = np.moveaxis(index @ turn[:3, :3].T + turn[:3, 3], -1, 0)
    return volume[i, j, k]


@pytest.mark.parametrize("kind", ["oblique", "series", "frames"])
def test_the_marginal_and_the_most_probable_class(tmp_path, kind):
    make = {"oblique": lambda: nifti(tmp_path / "a.nii.gz"), "series": lambda: series(tmp_path / "ct", VOLUME),
            "frames": lambda: enhanced(tmp_path / "e.dcm", VOLUME)}  # fmt: skip
    made = prediction(make[kind](), ("none", "liver", "lesion"))
    folder = write(made, tmp_path / "out", overview=False, exchange=FORMS)
    marginal, image = load(folder, "marginal.nii.gz")
    assert made.masks.marginal is not None
    assert (marginal.shape, marginal.dtype) == ((7, 5, 4, 3), np.float32)
    expected = made.masks.marginal[0].numpy()
    np.testing.assert_allclose(np.moveaxis(aligned(marginal, image.affine, made.source), -1, 0), expected, atol=1e-6)
    labels, labelled = load(folder, "labels.nii.gz")
    np.testing.assert_array_equal(aligned(labels, labelled.affine, made.source), expected.argmax(0))
    np.testing.assert_allclose(image.affine, labelled.affine)
    np.testing.assert_allclose(image.affine, load(folder, "mask_00.nii.gz")[1].affine)
    assert image.header.get_xyzt_units()[0] == ("mm" if kind != "oblique" else "unknown")
    if kind == "oblique":
        np.testing.assert_allclose(image.affine, OBLIQUE)


def test_the_strata_are_shares_of_their_draws(tmp_path):
    made = prediction(nifti(tmp_path / "a.nii.gz"))
    folder = write(made, tmp_path / "out", overview=False, exchange=FORMS)
    strata, image = load(folder, "strata.nii.gz")
    found = np.moveaxis(aligned(strata, image.affine, made.source), -1, 0)
    first, second, third = (made.masks.labels[0, i].numpy().astype(float) for i in range(3))
    np.testing.assert_allclose(found[0], (WEIGHTS[0] * first + WEIGHTS[2] * third) / 0.7, atol=1e-6)  # draws 0 and 2
    np.testing.assert_allclose(found[1], second, atol=1e-6)
    about = json.loads((folder / "volumes.json").read_text())
    assert [one["weight"] for one in about["strata.nii.gz"]] == [0.75, 0.25]
    assert about["strata.nii.gz"][1] == {
        "volume": 1,
        "way": 2,
        "weight": 0.25,
        "class": 1,
        "name": "nodule",
        "draws": True,
    }
    assert about["marginal.nii.gz"][1] == {"volume": 1, "class": 1, "name": "nodule"}
    listed = json.loads((folder / "weights.json").read_text())["nifti_4d"]
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.name in listed)
    assert len(listed) == 5


def test_a_stratum_without_a_draw_is_its_most_typical_mask(tmp_path):
    made = prediction(nifti(tmp_path / "a.nii.gz"))
    made = type(made)(**{**made.__dict__, "draws": made.draws[:1], "options": Options(samples=1)})
    folder = write(made, tmp_path / "out", overview=False, exchange=FORMS)
    strata, image = load(folder, "strata.nii.gz")
    assert made.strata is not None
    np.testing.assert_array_equal(aligned(strata, image.affine, made.source)[..., 1], made.strata.centres[1].numpy())
    assert [one["draws"] for one in json.loads((folder / "volumes.json").read_text())["strata.nii.gz"]] == [True, False]


def test_names_for_itk_snap(tmp_path):
    made = prediction(nifti(tmp_path / "a.nii.gz"), ("none", 'the "liver"', "Läsion"), strata=0)
    folder = write(made, tmp_path / "out", overview=False, exchange=FORMS)
    lines = [line.split(None, 7) for line in (folder / "labels.txt").read_text("utf-8").splitlines() if line[0] != "#"]
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert [line[7] for line in lines] == ['"none"', "\"the 'liver'\"", '"Läsion"']
    assert lines[0][1:7] == ["0", "0", "0", "0.00", "0", "0"]
    assert not (folder / "strata.nii.gz").exists()


def test_a_volume_of_one_slice_and_of_two_axes(tmp_path):
    for shape in ((7, 5, 1), (7, 5)):
        made = prediction(nifti(tmp_path / f"{len(shape)}.nii", shape), strata=2)
        folder = write(made, tmp_path / str(len(shape)), overview=False, exchange=FORMS)
        marginal, image = load(folder, "marginal.nii.gz")
        assert marginal.shape == (7, 5, 1, 2)
        assert made.masks.marginal is not None
        found = aligned(marginal, image.affine, made.source)[0]
        np.testing.assert_allclose(np.moveaxis(found, -1, 0), made.masks.marginal[0].numpy(), atol=1e-6)
        assert load(folder, "strata.nii.gz")[0].shape == (7, 5, 1, 2)


def test_the_library_reads_the_labels(tmp_path):
    path = nifti(tmp_path / "a.nii.gz")
    made = prediction(path)
    folder = write(made, tmp_path / "out", overview=False, exchange=FORMS)
    mask = open_source(folder / "labels.nii.gz", ReadOptions(mask=True, like=made.source))
    likely = made.masks.marginal_probs(2)[0].argmax(0)
    assert torch.equal(torch.from_numpy(np.concatenate([mask.read(k) for k in range(4)])).long(), likely)


def test_images_without_a_place(tmp_path):
    with pytest.raises(DataError, match=r"a\.png: expected an image with a position in space for NIfTI with four axes"):
        ambiseg.predict("demo", save(tmp_path / "a.png", np.zeros((8, 8), np.uint8)), tmp_path / "out", nifti_4d=True)
    made = prediction(enhanced(tmp_path / "e.dcm", VOLUME, (2, 0, 1, 3)))
    with pytest.raises(DataError, match="found DICOM without one"):
        write(made, tmp_path / "out", overview=False, exchange=FORMS)
    assert not (tmp_path / "out" / "scan").exists()
