"""Bombs are refused by their headers, quickly and in little memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambiseg._util import limits
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.files import read_npy
from ambiseg.data.sets.street.camvid import CamVid
from ambiseg.io.errors import FileError
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from ambiseg.masks import MaskDistribution
from tests.bombs import BOMBS, npy, zipped
from tests.files import make, save


def refused(path: Path, **options: Any) -> str:
    """The refusal of a file as one line, or nothing if it is read."""
    try:
        source = open_source(path, ReadOptions(**options))
        pixels = source.read(0)
    except FileError as error:
        return str(error)
    assert pixels.shape == (source.channels, *source.size)
    return ""


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_headers(tmp_path, name, capfd):
    suffix, content, expected = BOMBS[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content(tmp_path))
    as_mask = refused(path, mask=True)  # imports and caches are not the bomb's
    tracemalloc.start()
    said, (_, peak) = refused(path), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6, f"{peak:,} bytes"
    for line in (said, as_mask):
        assert "\n" not in line
        assert line.startswith(f"{path}: expected") or not (expected or line)
        assert re.search(expected, line)
    assert capfd.readouterr() == ("", "")


def test_memory_outside_of_python_stays_small_too(tmp_path):
    """Decoders in C allocate where tracemalloc does not look: all bombs in one process, by its resident memory."""
    for name, (suffix, content, _) in BOMBS.items():
        (tmp_path / f"{list(BOMBS).index(name)}{suffix}").write_bytes(content(tmp_path))
    (tmp_path / "made.dcm").unlink()
    code = """if True:
        import resource, sys
        from pathlib import Path
        from ambiseg.io.errors import FileError
        from ambiseg.io.open import open_source
        import PIL.Image, nibabel, pydicom, tifffile, pydicom.pixels
        paths = sorted(Path(sys.argv[1]).iterdir())
        def most():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = most()
        for path in paths:
            try:
                open_source(path).read(0)
            except FileError:
                pass
            print(most() - before, path.name, flush=True)
    """
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    last, name = ran.stdout.splitlines()[-1].split()
    assert int(last) < 150_000, f"{last} kB after {name}: {ran.stdout}"


def test_more_is_read_where_it_is_allowed(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", np.zeros((40, 50), np.uint8))
    np.save(tmp_path / "a.npy", np.zeros((30, 8, 8), np.uint8))
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", "1999")
    assert "at most 1,999 pixels per slice (--max-pixels), found 2,000" in refused(path)
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", "200")
    with pytest.raises(FileError) as caught:
        open_source(tmp_path / "a.npy")
    assert caught.value.problem.code == "E210"
    assert caught.value.problem.remedy.endswith("--max-pixels 240 or AMBISEG_MAX_PIXELS=240")
    for name, least in (("a.png", "2000"), ("a.npy", "240")):
        with limits.limited(least):
            assert not open_source(tmp_path / name).read(0).any()
    assert os.environ["AMBISEG_MAX_PIXELS"] == "200"


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e6", "9" * 30, "٣"])
def test_a_limit_that_is_none_is_one_line(text):
    with pytest.raises(ConfigError, match=r"^--max-pixels: expected a whole number of pixels"), limits.limited(text):
        pass


# -- whole data sets and predictions in one file -----------------------------------------------------------------------


def test_archives_of_arrays_are_judged_as_well(tmp_path):
    names = ("format", "image", "masks", "labels", "train_image")
    for number, content in enumerate((npy((10**6, 10**6)), npy((8, 8), "|O"), npy((-8, 8)))):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(zipped({f"{name}.npy": content for name in names}))
        for read in (Arrays, MaskDistribution.load, CamVid):
            tracemalloc.start()
            with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 40e6
            tracemalloc.stop()
            assert "\n" not in str(caught.value)
    array = tmp_path / "a.npy"
    array.write_bytes(npy((10**6, 10**6)))
    with pytest.raises(DataError, match=r"a.npy: expected at most .* pixels per slice \(--max-pixels\)"):
        read_npy(array)


# -- commands ----------------------------------------------------------------------------------------------------------

CHOSEN = ["npz of 10⁶ × 10⁶", "TIFF of 200000²", "nii.gz of 32000² × 100", "DICOM of 100,000 frames", "PNG of 13000²"]


def test_commands_refuse_bombs_in_one_line(tmp_path, monkeypatch, capfd):
    """The checker names all of them; prediction, training and evaluation each say one line, with the remedy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMBISEG_CACHE", str(tmp_path / "cache"))
    data, masks = make(tmp_path / "data", ("a",), ("Ann",)), tmp_path / "masks"
    masks.mkdir()
    for name in CHOSEN:
        suffix, content, _ = BOMBS[name]
        file = f"bomb{CHOSEN.index(name)}{suffix}"
        for folder in ("images", "masks/Ann"):
            (data / folder / file).write_bytes(content(tmp_path))
    (masks / "a.png").write_bytes(BOMBS["PNG of 13000²"][1](tmp_path))
    assert main(["data", "check", str(data), "--quiet"]) == 1
    told = capfd.readouterr()
    assert all(re.search(f"bomb{number}.*--max-pixels", told.out) for number in range(len(CHOSEN)))
    assert told.err == ""
    single = make(tmp_path / "single", ("a",), ("Ann",))
    shutil.copy(data / "images/bomb4.png", single / "images/a.png")
    out = str(tmp_path / "out")
    for command in (
        ["predict", "demo", str(single / "images/a.png"), "--out", out, "--quiet"],
        ["train", "demo", "--data.name", "folder", "--data.root", str(single), "--out", out, "--quiet"],
        ["evaluate", "--predictions", str(masks), "--truth", str(make(tmp_path / "t", ("a",), ("Ann",))), "--quiet"],
        ["data", "export", str(single), "--out", out, "--quiet"],
    ):
        assert main(command) == 2, command
        told = capfd.readouterr()
        assert told.out == ""
        assert re.fullmatch(r"ambiseg: .*a\.png: expected at most .*\(--max-pixels\), found .*\n", told.err), told.err
