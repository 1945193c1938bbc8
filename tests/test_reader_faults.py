"""Files that cannot be read are named; none is opened or decoded twice."""

from __future__ import annotations

import ast
import builtins
import contextlib
import gzip
import io
import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.io.errors import FileError
from ambiseg.io.formats import FORMATS, stem_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from tests.conftest import REPOSITORY
from tests.files import save, save_deep_png, save_dicom, save_nifti
from tests.test_readers import DEEP_COLOUR, RNG, refusal

# -- files that cannot be read -----------------------------------------------------------------------------------------

LARGER = RNG.integers(0, 256, (40, 50), dtype=np.uint8)
WRITERS = {
    ".png": lambda path: save(path, LARGER),
    ".jpg": lambda path: save(path, LARGER),
    ".tif": lambda path: save(path, LARGER),
    ".bmp": lambda path: save(path, LARGER),
    ".npy": lambda path: np.save(path, LARGER),
    ".npz": lambda path: np.savez_compressed(path, LARGER),
    ".nii": lambda path: save_nifti(path, LARGER),
    ".nii.gz": lambda path: save_nifti(path, LARGER),
    ".dcm": lambda path: save_dicom(path, LARGER),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_picture_is_decoded_once_per_source(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    WRITERS[suffix](path)
    source = open_source(path)
    first = source.read(0)
    path.unlink()
    assert np.array_equal(source.read(0), first)


@pytest.mark.parametrize("name", ["a.png", "deep.png", "a.jpg", "a.bmp", "a.tif", "a.npz"])
def test_a_picture_is_opened_once(tmp_path, name, monkeypatch):
    path = tmp_path / name
    save_deep_png(path, DEEP_COLOUR) if name == "deep.png" else WRITERS[path.suffix](path)
    opened = []
    original = io.open

    def counted(file, *arguments, **options):
        opened.append(str(file))
        return original(file, *arguments, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", counted)
    open_source(path).read(0)
    assert opened.count(str(path)) == 1


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_named(tmp_path, suffix, keep, capfd):
    path = tmp_path / f"a{suffix}"
    WRITERS[suffix](path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert refusal(path).startswith(f"E201 expected {FORMATS[suffix]}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", WRITERS)
def test_other_content_than_the_name_promises_is_said(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    for content, found in (
        (b"", "an empty file (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (b"<!doctype html><html>", "a web page or XML"),
        (b"image,mask\na,b\n", "text"),
    ):
        path.write_bytes(content)
        assert refusal(path) == f"E201 expected {FORMATS[suffix]}, found {found}"


@given(st.sampled_from(sorted(WRITERS)), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_damage_never_gets_past_the_guard(tmp_path_factory, suffix, place, change):
    """Any byte changed: the file is read all the same, or refused; nothing else is raised."""
    path = tmp_path_factory.mktemp("damage") / f"a{suffix}"
    WRITERS[suffix](path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= change
    path.write_bytes(bytes(content))
    with contextlib.suppress(FileError):
        open_source(path).read(0)


EXTREMES = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 100_000]


def _mutated(content: bytes, chance: random.Random) -> bytes:
    """A few of: a bit, an extreme number, the end cut off, bytes moved, doubled or left out; mostly in the header."""
    made = bytearray(content)
    reach = chance.choice([64, 400, len(made)])
    for _ in range(chance.choice([1, 1, 2, 4])):
        at, other = (chance.randrange(max(min(n, len(made)), 1)) for n in (reach, len(made)))
        length, wide = chance.randrange(1, 17), chance.choice([1, 2, 4])
        number = chance.choice(EXTREMES) % (1 << 8 * wide)
        match chance.randrange(6):
            case 0:
                made[at : at + 1] = bytes(byte ^ 1 << chance.randrange(8) for byte in made[at : at + 1])
            case 1:
                made[at : at + wide] = number.to_bytes(wide, "little")
            case 2:
                made[at : at + wide] = number.to_bytes(wide, "big")
            case 3:
                del made[other:]
            case 4:
                made[at : at + length] = made[other : other + length]
            case 5:
                del made[at : at + length]
    return bytes(made)


def test_mutated_files_are_read_as_declared_or_refused_in_one_line(tmp_path, capfd):
    chance, refusals = random.Random(12), list[str]()
    for suffix, write in WRITERS.items():
        write(whole := tmp_path / f"whole{suffix}")
        path, content = tmp_path / f"a{suffix}", whole.read_bytes()
        for _ in range(60):
            inner = suffix == ".nii.gz" and chance.random() < 0.7
            path.write_bytes(
                gzip.compress(_mutated(gzip.decompress(content), chance)) if inner else _mutated(content, chance)
            )
            options = ReadOptions(mask=chance.random() < 0.5)
            try:
                source = open_source(path, options)
                pixels = source.read(source.slices - 1)
            except FileError as error:
                refusals.append(str(error))
            else:
                assert pixels.shape == (source.channels, *source.size)
    assert len(refusals) > 100
    assert not any("\n" in line for line in refusals)
    assert capfd.readouterr() == ("", "")


def test_what_is_missing_or_of_no_known_format(tmp_path):
    assert refusal(tmp_path / "a.png") == "E106 expected a file, found none"
    (tmp_path / "a.nrrd").write_bytes(b"NRRD")
    assert refusal(tmp_path / "a.nrrd").endswith("found NRRD")


def test_the_guard_leaves_loggers_as_they_were(tmp_path):
    tifffile_says = logging.getLogger("tifffile")
    before = tifffile_says.level, tifffile_says.disabled
    (tmp_path / "a.tif").write_bytes(b"II*\0 and nothing")
    refusal(tmp_path / "a.tif")
    assert (tifffile_says.level, tifffile_says.disabled) == before


@pytest.mark.parametrize(("suffix", "package"), [(".nii", "nibabel"), (".dcm", "pydicom")])
def test_a_package_that_is_missing_is_no_damage(tmp_path, suffix, package, monkeypatch):
    path = tmp_path / f"a{suffix}"
    WRITERS[suffix](path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        open_source(path)


def test_modules_of_files_form_layers():
    """Each module imports only those to its left; formats do not import each other."""
    layers = [{"errors", "formats", "planes"}, {"source"}, {"dicom_files", "rois"}, {"dicom_seg", "rtstruct"}]
    layers += [{"arrays", "pictures", "nifti", "dicom"}, {"tiff"}, {"open", "write"}, {"dicom_seg_writing"}]
    modules = {path.stem: ast.parse(path.read_text()) for path in (REPOSITORY / "src/ambiseg/io").glob("*.py")}
    assert modules.keys() <= set().union(*layers) | {"__init__"}
    below: set[str] = set()
    for layer in layers:
        for name in layer & modules.keys():
            imports = {node.module or "" for node in ast.walk(modules[name]) if isinstance(node, ast.ImportFrom)}
            imported = {module.rsplit(".", 1)[1] for module in imports if module.startswith("ambiseg.io.")}
            assert imported <= below, name
        below |= layer


@pytest.mark.parametrize("suffix", FORMATS)
def test_stems(suffix):
    assert stem_of(Path(f"x/scan.v2{suffix.upper()}")) == "scan.v2"
