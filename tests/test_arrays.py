"""A whole data set in one .npz."""

from __future__ import annotations

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.arrays import Arrays
from tests.conftest import SHARED

RNG = np.random.default_rng(0)
IMAGE, MASKS = RNG.integers(0, 255, (5, 6, 4)).astype(np.uint8), RNG.integers(0, 2, (5, 3, 6, 4)).astype(np.uint8)


def write(path, **arrays):
    np.savez(path, **{"image": IMAGE, "masks": MASKS, **arrays})  # type: ignore[arg-type]
    return path


def test_cases_are_the_arrays(tmp_path):
    names, patients = np.array([f"n{i}" for i in range(5)]), np.array(list("aabbc"))
    path = write(tmp_path / "d.npz", name=names, patient=patients, split=np.array(["train"] * 5), z=IMAGE)
    cases = Arrays(path)
    assert len(cases) == 5
    assert np.array_equal(cases[3].image[0], IMAGE[3])
    assert np.array_equal(cases[3].labels, MASKS[3])
    assert (cases[3].name, cases[3].patient, cases.declared) == ("n3", "b", ["train"] * 5)
    assert (cases.classes, cases.channels, cases.intensity) == (
        ("background", "foreground"),
        1,
        Intensity(0, 255, 127.5, 127.5),
    )


def test_colour_void_and_intensity(tmp_path):
    masks = MASKS.copy()
    masks[:, 1, 0, 0] = 9
    path = write(tmp_path / "d.npz", image=np.repeat(IMAGE[..., None], 3, -1), masks=masks)
    cases = Arrays(path, classes=("sky", "road"), void=9, intensity={"low": 0, "high": 10})
    assert cases[0].image.shape == (3, 6, 4)
    valid = cases[0].valid
    assert valid is not None
    assert valid.sum() == 23
    assert not valid[0, 0]
    assert cases.intensity.high == 10
    assert cases.names[0] == "case-0"


def test_an_intensity_that_is_wrong_is_named(tmp_path):
    with pytest.raises(DataError, match=r"^intensity\.lo: no such setting; did you mean low\?$"):
        Arrays(write(tmp_path / "d.npz"), intensity={"lo": 0})


def test_state_changes_with_the_file(tmp_path):
    path = write(tmp_path / "d.npz")
    before = Arrays(path).state()
    assert Arrays(path).state() == before
    assert Arrays(path, classes=3).state() != before
    write(path, name=np.array(list("vwxyz")))
    assert Arrays(path).state() != before


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"masks": MASKS[:4]}, r"expected image \[N, H, W\(, C\)\] and masks .* found \[5, 6, 4\] and \[4, 3, 6, 4\]"),
        ({"masks": MASKS[:, :, :, :3]}, r"found \[5, 6, 4\] and \[5, 3, 6, 3\]"),
        ({"masks": MASKS / 2}, "expected numbers and class ids, found uint8 and float64"),
        ({"masks": np.where(np.arange(5)[:, None, None, None] == 2, 7, MASKS)}, r"case 'case-2': expected .* found 7"),
        ({"name": np.array(["a"] * 5)}, "found some twice"),
        ({"patient": np.array(["a"])}, r"expected one patient for each of 5 cases, found \[1\]"),
        ({"split": np.array([{}], dtype=object)}, "expected an .npz file of plain arrays"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    path = write(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=rf"d\.npz: .*{message}"):
        Arrays(path)


def test_files_that_are_no_arrays_are_named(tmp_path):
    with pytest.raises(DataError, match="found no such file"):
        Arrays(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match=r"text\.npz: expected an \.npz file"):
        Arrays(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", IMAGE)
    with pytest.raises(DataError, match="found a single array"):
        Arrays(tmp_path / "one.npy")
    np.savez(tmp_path / "other.npz", image=IMAGE)
    with pytest.raises(DataError, match="found no masks"):
        Arrays(tmp_path / "other.npz")
    half = write(tmp_path / "half.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(half[: len(half) // 2])
    with pytest.raises(DataError, match=r"half\.npz: expected"):
        Arrays(tmp_path / "half.npz")


def test_real_nodules_are_read():
    path = SHARED / "data" / "lidc71" / "lidc71.npz"
    if not path.exists():
        pytest.skip("lidc71.npz absent: set AMBISEG_SHARED to the folder that holds data/lidc71")
    cases = Arrays(path)
    assert len(cases) == 2095
    assert cases.declared is not None
    assert sorted(set(cases.declared)) == ["test", "train", "val"]
    assert cases[0].labels.shape == (4, 71, 71)
    assert cases[0].image.dtype == np.int16
