"""Folders with a file for every image: the npy files of the MoSE authors' code, and the PNG files of LIDC v2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.crops import BYTES, PARTS, READERS, UNIT, Crops, Entry, Options, patient_in, unit_image

_LOOK = 64  # images that are looked at to tell whether a folder is shifted
_HALF = (".part", ".crdownload", ".tmp", ".download", ".aria2", ".partial")


def part_folders(source: Path) -> dict[str, Path]:
    """The folders of train, val and test: ``train``, or a longer name that ends so, such as ``lidc_crops_train``."""
    found: dict[str, Path] = {}
    places = [source, *sorted(source.glob("*/")), *sorted(source.glob("*/*/"))]
    for folder in places:
        for part in PARTS:
            if re.fullmatch(rf"(.*[_-])?{part}", folder.name) and (folder / "images").is_dir():
                if part in found:
                    raise DataError(
                        f"{source}: expected one folder for {part}, found {found[part].name} and {folder.name}"
                    )
                found[part] = folder
    if not found and (source / "images").is_dir():
        found[""] = source
    return {part: found[part] for part in ("", *PARTS) if part in found}


def _whole(files: Iterable[Path]) -> list[Path]:
    """The files in the order of their names, numbers by value; one that was still arriving is an error."""
    kept = []
    for path in files:
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in _HALF:
            raise DataError(f"{path}: expected a finished download, found a part of one")
        if path.is_file():
            kept.append(path)
    return sorted(
        kept, key=lambda path: [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", str(path))]
    )


def _pairs(images: Path, labels: Path) -> list[tuple[Path, Path]]:
    """Files of the same name in both folders; one without a partner is an error that names what is missing."""
    if not labels.is_dir():
        raise DataError(f"{labels}: expected a folder of labels beside {images.name}, found none")
    here, there = ({path.name: path for path in _whole(folder.iterdir())} for folder in (images, labels))
    for known, other, folder in ((here, there, labels), (there, here, images)):
        if alone := [name for name in known if name not in other]:
            found = f"none ({len(alone)} missing in all): half-downloaded?"
            raise DataError(f"{folder / alone[0]}: expected a file beside {known[alone[0]].parent}, found {found}")
    return [(path, there[name]) for name, path in here.items()]


class Npy(Crops):
    """``train/images/0.npy`` ``[H, W]`` beside ``train/labels/0.npy`` ``[H, W, 4]`` (or ``[4, H, W]``), and so on.

    Images are in [0, 1] or shifted by -0.5; the shift is undone. The files do not tell which patient or series they
    show, so the parts that the folders are is the only split there can be.
    """

    form = "v1 npy folders"

    def __init__(self, source: Path, options: Options) -> None:
        self.source = source
        entries, self._paths = [], []
        for part, folder in part_folders(source).items():
            for path, labels in _pairs(folder / "images", folder / "labels"):
                name = f"{part}-{path.stem}" if part else path.stem
                origin = {"file": path.relative_to(source).as_posix()}
                entries.append(Entry(name, part=part or None, origin=origin))
                self._paths.append((path, labels))
        steps = np.unique(np.linspace(0, max(len(entries) - 1, 0), _LOOK).astype(int)) if entries else []
        lows = [float(_load(self._paths[i][0]).min()) for i in steps]
        self._shift = 0.5 if lows and min(lows) < 0 else 0.0
        super().__init__(source, entries, UNIT, options)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, masks = (_load(path) for path in self._paths[index])
        if image.ndim == 3 and 1 in image.shape:
            image = image.reshape([n for n in image.shape if n != 1])
        if masks.ndim == 3 and masks.shape == (*image.shape, READERS):
            masks = np.moveaxis(masks, -1, 0)
        return unit_image(image, str(self._paths[index][0]), self._shift), masks

    def files(self) -> list[Path]:
        return [path for pair in self._paths for path in pair]


def _load(path: Path) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: expected a whole .npy file of numbers, found: {error or 'its end'}") from None
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: expected numbers, found {array.dtype}")
    return array


class Png(Crops):
    """LIDC v2, of the hierarchical probabilistic U-Net: ``train/images/LIDC-IDRI-0001/z-105.0_c0.png``, 180 × 180, and
    its masks ``train/gt/LIDC-IDRI-0001/z-105.0_c0_l0.png`` to ``_l3.png``.
    """

    form = "v2 PNG folders"

    def __init__(self, source: Path, options: Options) -> None:
        self.source = source
        entries, self._paths = [], []
        for part, folder in part_folders(source).items():
            truth = next((folder / name for name in ("gt", "lesions") if (folder / name).is_dir()), None)
            if truth is None:
                raise DataError(f"{folder}: expected the folders images and gt, found no gt")
            masks = {path.relative_to(truth).as_posix() for path in _whole(truth.rglob("*"))}
            for path in _whole((folder / "images").rglob("*")):
                place = path.relative_to(folder / "images")
                if path.suffix.lower() != ".png":
                    raise DataError(f"{path}: expected PNG files alone, found another")
                mine = [place.with_name(f"{place.stem}_l{m}.png").as_posix() for m in range(READERS)]
                if lost := [name for name in mine if name not in masks]:
                    raise DataError(f"{truth / lost[0]}: expected a mask of {path.name}, found none: half-downloaded?")
                masks.difference_update(mine)
                name = "-".join(filter(None, (part, *place.parent.parts, place.stem)))
                patient = patient_in(place.as_posix()) or (place.parts[0] if len(place.parts) > 1 else None)
                origin = {"file": path.relative_to(source).as_posix()}
                if z := re.match(r"z(-?\d+(?:\.\d+)?)", place.stem):
                    origin["z"] = z.group(1)
                entries.append(Entry(name, patient=patient, part=part or None, origin=origin))
                self._paths.append((path, [truth / mask for mask in mine]))
            if masks:
                raise DataError(f"{truth / min(masks)}: expected an image for every mask, found none: half-downloaded?")
        super().__init__(source, entries, BYTES, options)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, masks = self._paths[index]
        pixels, marked = _picture(image), [_picture(path) for path in masks]
        for path, mask in zip(masks, marked, strict=True):
            if mask.shape != pixels.shape:
                wanted, found = ("×".join(map(str, a.shape)) for a in (pixels, mask))
                raise DataError(f"{path}: expected {wanted} as its image, found {found}")
            if len(set(np.unique(mask)) - {0}) > 1:
                raise DataError(f"{path}: expected a mask of two values, found {len(np.unique(mask))}")
        return pixels, np.stack(marked) != 0

    def files(self) -> list[Path]:
        return [path for image, masks in self._paths for path in (image, *masks)]


def _picture(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if picture.mode not in ("L", "1", "P", "RGB", "RGBA", "LA"):
                raise DataError(f"{path}: expected a grey picture of 8 bits, found mode {picture.mode}")
            return np.asarray(picture.convert("L"))
    except (OSError, SyntaxError, ValueError) as error:  # a PNG that is damaged is a SyntaxError to Pillow
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected a whole PNG file, found: {error}") from None
