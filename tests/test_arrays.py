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
        ({"image": IMAGE.astype("U1")}, "expected numbers and class ids, found <U1 and uint8"),
        ({"masks": MASKS.astype("U1")}, "expected numbers and class ids, found uint8 and <U1"),
        ({"image": np.zeros((5, 6, 4), "u1,f4")}, "expected numbers and class ids, found "),
        ({"image": IMAGE[:0], "masks": MASKS[:0]}, r"found \[0, 6, 4\] and \[0, 3, 6, 4\]"),
        ({"image": IMAGE[:, :0], "masks": MASKS[:, :, :0]}, r"found \[5, 0, 4\] and \[5, 3, 0, 4\]"),
        ({"image": np.array(1)}, r"found \[\] and \[5, 3, 6, 4\]"),
        ({"masks": MASKS.astype(np.int64) - 1}, "case 'case-0': expected class ids below 2, found -1"),
        ({"name": np.array(["a\nb", *"bcde"])}, "name: expected one plain text per case, found others in <U3"),
        ({"patient": np.array([b"\xff", *[b"x"] * 4])}, "patient: expected one plain text per case"),
        ({"patient": np.zeros(5, complex)}, "patient: expected one plain text per case"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    path = write(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=rf"d\.npz: .*{message}"):
        Arrays(path)


def test_values_that_are_not_finite_are_named(tmp_path):
    images = np.where(np.arange(5)[:, None, None] == 2, np.nan, IMAGE / 255)
    cases = Arrays(write(tmp_path / "d.npz", image=images))
    assert cases[1].image.shape == (1, 6, 4)
    with pytest.raises(DataError, match=r"d\.npz: case 'case-2': expected finite numbers, found nan"):
        cases[2]


def test_order_and_names_of_bytes(tmp_path):
    plain = Arrays(write(tmp_path / "d.npz"))
    other = Arrays(
        write(tmp_path / "e.npz", image=np.asfortranarray(IMAGE), name=np.array([b"a", b"b", b"c", b"d", b"e"]))
    )
    assert np.array_equal(plain[3].image, other[3].image)
    assert other.names[3] == "d"


def test_mutated_archives_are_read_or_refused(tmp_path):
    rng, path = np.random.default_rng(1), write(tmp_path / "d.npz", name=np.array(list("abcde")))
    written, told = path.read_bytes(), []
    for _ in range(150):
        content = bytearray(written)
        for at in rng.integers(len(content), size=rng.integers(1, 4)):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        try:
            assert all(case.image.shape == (1, 6, 4) for case in Arrays(path))
        except DataError as error:
            told.append(str(error))
    assert told
    assert all(text.isprintable() and text.startswith(f"{path}: ") for text in told)


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
