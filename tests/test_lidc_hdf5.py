"""HDF5 files of LIDC that are damaged or hostile: one line, no other file is read, and nothing waits for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc import Options, hdf5, hdf5_process, open_form, prepare
from tests import lidc_fakes as fakes
from tests.lidc_fakes import crops, refused

h5py = pytest.importorskip("h5py")
PARTS, IDS = ["train", "val", "test"], ["series_uid", "uids"]


def described(path: Path) -> str:
    """What is refused, found in this process: it is not damaged, and another one takes long to start."""
    with h5py.File(path) as file, pytest.raises(hdf5_process.Refused) as caught:
        hdf5_process.describe(file, PARTS, IDS)
    return str(caught.value)


def _virtual(group: Any, name: str) -> None:
    layout = h5py.VirtualLayout((6, 24, 24), "f8")
    layout[:] = h5py.VirtualSource("other.hdf5", "images", (6, 24, 24))
    group.create_virtual_dataset(name, layout)


HOSTILE: dict[str, tuple[Any, str]] = {
    "link": (lambda g: g.__setitem__("images", h5py.SoftLink("/val/images")), "itself, found a link: copy it"),
    "link to itself": (lambda g: g.__setitem__("images", h5py.SoftLink("/train/images")), "found "),
    "link to nothing": (lambda g: g.__setitem__("images", h5py.SoftLink("/nothing")), "found "),
    "link to a file": (lambda g: g.__setitem__("images", h5py.ExternalLink("other.hdf5", "images")), "found "),
    "other file": (
        lambda g: g.create_dataset("images", (6, 24, 24), "f8", external=[("/etc/hostname", 0, 10**6)]),
        "/train/images: expected data in the file itself, found that it is kept in other files",
    ),
    "virtual": (lambda g: _virtual(g, "images"), "found that it is kept in other files"),
    "objects": (lambda g: g.create_dataset("images", (6,), h5py.ref_dtype), "expected numbers, found object"),
    "lists": (lambda g: g.create_dataset("images", (6,), h5py.vlen_dtype("f4")), "expected numbers, found object"),
    "records": (lambda g: g.__setitem__("images", np.zeros(6, "f4,i4")), "expected numbers, found [("),
    "texts": (lambda g: g.__setitem__("images", np.full(6, b"x")), "expected numbers, found |S1"),
    "group": (lambda g: g.create_group("images"), "/train/images: expected an array, found a group"),
    "number": (lambda g: g.__setitem__("images", 5), "/train/images: expected an array, found a single value"),
    "nothing": (lambda g: g.__setitem__("images", h5py.Empty("f4")), "expected an array, found a single value"),
    "a million million": (
        lambda g: g.create_dataset("images", (10**12, 24, 24), "f4", chunks=(1, 24, 24)),
        "expected all of [1000000000000, 24, 24], found 0 bytes of it",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_in_the_file_itself_is_refused(tmp_path, kind):
    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops())
    (change, message) = HOSTILE[kind]
    with h5py.File(path, "r+") as file:
        del file["train/images"]
        change(file["train"])
    assert message in described(path)


def test_ids_are_texts_or_numbers(tmp_path):
    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops(), ids="series_uid")
    texts = {"texts that are none": ["a\nb"] * 6, "S2000": np.full(6, b"x" * 2000), "float64": np.zeros(6)}
    for message, ids in {**texts, "one for each image, found [6, 1]": np.full((6, 1), b"x")}.items():
        with h5py.File(path, "r+") as file:
            del file["train/series_uid"]
            file["train/series_uid"] = ids
        assert message in described(path)
    with h5py.File(path, "r+") as file:
        del file["train/series_uid"]
        file.create_dataset("train/series_uid", data=["é"] * 6, dtype=h5py.string_dtype())
    with h5py.File(path) as file:
        assert hdf5_process.describe(file, PARTS, IDS)["train"]["ids"]["values"] == ["é"] * 6


def test_hostile_files_end_in_one_line(tmp_path, monkeypatch):
    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops())
    with h5py.File(path, "r+") as file:
        del file["train"]
        file["train"] = h5py.SoftLink("/train")
    assert "expected data in the file itself, found a link" in refused(path) or "found no" in refused(path)
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", "500")
    path = fakes.write_hdf5(tmp_path / "large.hdf5", crops())
    assert "group 'train': expected at most 500 pixels per slice (--max-pixels), found 24×24" in refused(path)


def test_damaged_pixels_are_named(tmp_path):
    path = tmp_path / "data_lidc.hdf5"
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", data=np.random.default_rng(0).random((3, 8, 8)), compression="gzip")
        file["labels"] = np.zeros((3, 8, 8, 4), np.uint8)
        images.id.write_direct_chunk((0, 0, 0), b"no such thing")
    assert refused(path).startswith(f"{path}: expected a whole HDF5 file, found: ")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import time; time.sleep(60)", "found damage in which the HDF5 library finds no end within 1 s"),
        ("import os; os.abort()", "found damage which the HDF5 library does not survive"),
        ("print('not an answer')", "found damage which the HDF5 library does not survive"),
    ],
)
def test_a_library_that_hangs_or_crashes_is_one_line(tmp_path, monkeypatch, program, message):
    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops())
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(hdf5, "_PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(hdf5, "_PATIENCE", 1.0 if "sleep" in program else 20.0)
    start = time.monotonic()
    assert message in refused(path)
    assert time.monotonic() - start < 15


def test_mutated_files_are_read_or_refused(tmp_path):
    rng, path = np.random.default_rng(3), fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops(12, 8), ids="series_uid")
    written = path.read_bytes()
    for _ in range(3):
        content = bytearray(written)
        for at in rng.integers(len(content), size=20):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        try:
            assert all(case.image.shape == (1, 8, 8) for case in open_form("hdf5", path, Options()))
        except DataError as error:
            told = str(error)
            assert told.startswith(f"{path}: ")


def test_the_rest_of_a_file_is_read_when_few_images_fit_into_memory(tmp_path, monkeypatch):
    path = fakes.write_hdf5(tmp_path / "data_lidc.hdf5", crops())
    whole, _ = prepare(path, tmp_path / "whole")
    monkeypatch.setattr(hdf5, "_BLOCK_BYTES", 1)
    single, _ = prepare(path, tmp_path / "single")
    assert single.fingerprint == whole.fingerprint
