"""What a path holds that is no folder of images and masks, and the command that reads it."""

from __future__ import annotations

import shlex
import zipfile
from pathlib import Path

from ambiseg._util.errors import DataError
from ambiseg._util.npz import open_npz
from ambiseg.data.sets.lidc import detect

_CITYSCAPES = ("leftImg8bit", "gtFine")


def other_data(path: Path) -> tuple[str, str] | None:
    """The public data set that a path is, and what to do with it; ``None`` for anything else."""
    if path.is_dir():
        return _cityscapes(path) or _camvid(path) or _lidc(path)
    if path.suffix.lower() == ".npz" and zipfile.is_zipfile(path):
        with path.open("rb") as handle, open_npz(handle) as file:
            return _use("CamVid", "camvid", path) if "train_image" in file.names else None
    return _lidc(path) if path.suffix.lower() in (".pickle", ".pkl") else None


def _use(title: str, name: str, root: Path) -> tuple[str, str]:
    at = f"--data.root {shlex.quote(str(root))}"
    return title, f"this is {title}: use `ambiseg train {name} {at}`, or --data.name {name} {at} with any other recipe"


def _cityscapes(path: Path) -> tuple[str, str] | None:
    root = path.resolve().parent if path.name in _CITYSCAPES else path
    below = sorted(folder for folder in path.iterdir() if folder.is_dir())
    for place in (root, *below):
        there = [name for name in _CITYSCAPES if (place / name).is_dir()]
        if there == list(_CITYSCAPES):
            return _use("Cityscapes", "cityscapes", place)
        if there:
            (lacking,) = set(_CITYSCAPES) - set(there)
            return "half of Cityscapes", f"this is Cityscapes: put {lacking}/ beside {place / there[0]}/"
    return None


def _camvid(path: Path) -> tuple[str, str] | None:
    return _use("CamVid", "camvid", path) if (path / "trainannot").is_dir() else None


def _lidc(path: Path) -> tuple[str, str] | None:
    try:
        form, _ = detect(path)
    except DataError:
        return None
    named = any("lidc" in part.name.lower() for part in (path.resolve(), *(path.iterdir() if path.is_dir() else ())))
    outlines = form == "dicom" and next(path.rglob("*.xml"), None) is not None
    if not (form == "pickle" or outlines or (form in ("dicom", "hdf5") and named)):
        return None  # PNG and npy folders are of many data sets
    command = f"ambiseg data prepare lidc {shlex.quote(str(path))} --out lidc/"
    return f"LIDC as {form}", f"if this is LIDC: `{command}`, then `ambiseg train lidc --data.root lidc/`"
