"""Large images in bounded memory, one process per folder, and images of odd forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from ambiseg import cli
from ambiseg._util.errors import DataError
from ambiseg._util.files import LOCK, Lock
from ambiseg.io.source import Source
from ambiseg.prediction import Options, Predictor, loop, predictor
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.memory import check_memory
from ambiseg.prediction.merging import ordered
from ambiseg.prediction.predictor import _entropy
from tests.drop_ins import Latent
from tests.test_prediction import dropped_in, fresh, noise


def header(slices: int, size: tuple[int, int], channels: int = 1) -> Source:
    """What a file says of itself; nothing of it may be read."""

    def read(k: int) -> np.ndarray:
        raise AssertionError("read before its size was judged")

    return Source(Path("ct.nii.gz"), "NIfTI", slices, size, channels, np.dtype(np.int16), read)


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, r"12 masks, which take about 4.8 GB; per_stratum=\d"), ({"samples": 100}, r"100 masks, .* GB; samples=\d+")],
)
def test_masks_that_would_not_fit_are_refused_before_anything_is_read(options, found):
    expected = rf"^ct.nii.gz: expected masks that fit into 4.0 GB, found 550 slices of 512×512 with {found} fits, or"
    with pytest.raises(DataError, match=expected):
        Predictor(fresh(), Options(**options))(header(550, (512, 512)))


def test_what_fits_by_default(monkeypatch):
    made, without = Predictor(fresh()), Predictor(dropped_in(Latent, classes=2))
    for one in (made, without):
        check_memory(one, header(1, (8192, 8192)))  # the largest image that is read unless the limit is raised
        check_memory(one, header(1, (8192, 8192), channels=3))  # another error says that these do not fit the model
    with pytest.raises(DataError, match=r"samples=\d+ fits, or allow more: --max-pixels \d+$"):
        check_memory(without, header(600, (512, 512)))
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", str(4 * 8192**2))
    check_memory(without, header(600, (512, 512)))


def test_masks_are_ordered_in_place_and_entropy_is_computed_in_bands(monkeypatch):
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 9):
        labels = torch.from_numpy(rng.integers(0, 99, (9, 2, 3)))
        order = rng.permutation(9)[:count].tolist()
        expected, place = labels[order], labels.data_ptr()
        found = ordered(labels, order)
        assert torch.equal(found, expected)
        assert found.data_ptr() == place
    soft = torch.rand(3, 17, 5).softmax(0)
    whole = _entropy(soft)
    monkeypatch.setattr(predictor, "_AT_ONCE", 16)
    assert torch.equal(_entropy(soft), whole)


def test_large_predictions_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """With no room for bytes that wait, every image is written before the next one is predicted."""
    monkeypatch.setattr(loop, "_BYTES", 0)
    made, seen = Predictor(fresh()), []

    def predict(image, name, step):
        seen.append((name, sorted(path.name for path in tmp_path.iterdir())))
        return made(image, name, step)

    images = [(f"i{k}", array_source(noise(1, 16, 16), f"i{k}")) for k in range(3)]
    for one in loop.predict_each(predict, images, tmp_path):  # type: ignore[arg-type]
        assert one.folder is not None
    assert seen == [("i0", []), ("i1", ["i0"]), ("i2", ["i0", "i1"])]


def run(*arguments: str | Path) -> int:
    return cli.main(["predict", *map(str, arguments), "--quiet"])


def picture(path: Path) -> Path:
    Image.fromarray(noise(24, 20).astype(np.uint8)).save(path)
    return path


def test_a_second_process_is_refused_in_one_line(tmp_path, tiny_run, capfd):
    image, out = picture(tmp_path / "a.png"), tmp_path / "out"
    out.mkdir()
    with Lock(out, "prediction"):
        code = "import sys; from ambiseg.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "predict", str(tiny_run), str(image), "--out", str(out)]
        second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert "expected no other process at work there, found prediction by process" in second.stderr
    assert os.listdir(out) == []
    (out / LOCK).touch()  # what a killed process leaves holds nobody up
    assert run(tiny_run, image, "--out", out) == 0
    assert os.listdir(out) == ["a"]


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path, tiny_run, capfd):
    image, broken = picture(tmp_path / "a.png"), tmp_path / "b.png"
    broken.write_bytes(b"no picture")
    out = tmp_path / "deep" / "out"
    assert run(tmp_path / "no run", image, "--out", out) == 2
    assert run(tiny_run, broken, "--out", out) == 2
    assert run(tiny_run, tmp_path / "nothing.png", "--out", out) == 2
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png"]
    assert run(tiny_run, image, broken, "--out", out) == 1
    assert os.listdir(out) == ["a"]
    kept = tmp_path / "kept"
    kept.mkdir()
    assert run(tiny_run, broken, "--out", kept) == 2
    assert kept.is_dir()  # which was there before


def test_odd_images_are_predicted_or_one_line(tmp_path, tiny_run, capfd):
    images = tmp_path / "images"
    images.mkdir()
    good = {"one": (1, 1), "wide": (1, 5000), "tall": (2000, 3), "plain": (40, 40)}
    for name, size in good.items():
        values = np.zeros(size) if name == "plain" else noise(*size)
        tifffile.imwrite(images / f"{name}.tif", values.astype(np.float32))
    np.save(images / "empty.npy", np.zeros((0, 5), np.float32))
    np.save(images / "nan.npy", np.full((4, 4), np.nan, np.float32))
    np.save(images / "colour.npy", np.zeros((3, 8, 8), np.uint8).transpose(1, 2, 0))
    code = run(tiny_run, images, "--out", tmp_path / "out", "--json", tmp_path / "found.json")
    assert code == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["name"] for row in found["predictions"]} >= set(good)
    failed = [Path(row["image"]).stem for row in found["failures"]]
    assert {"empty", "nan"} <= set(failed)
    lines = [line for line in capfd.readouterr().err.splitlines() if "warning" not in line]
    assert len(lines) == len(failed)
    assert all(line.startswith("ambiseg: ") for line in lines)
