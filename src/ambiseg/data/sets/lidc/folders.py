"""Folders with a file for every image: the npy files of the MoSE authors' code, and the PNG files of LIDC v2."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ambiseg._util import limits
from ambiseg._util.errors import DataError
from ambiseg._util.text import shape_text
from ambiseg.data.case import Progress
from ambiseg.data.sets.files import finished_files, paired_files, read_npy
from ambiseg.data.sets.lidc.crops import BYTES, PARTS, READERS, Crop, Crops, patient_in, shift_of, unit_image
from ambiseg.io.source import decoding_at_most


def part_folders(source: Path) -> dict[str, Path]:
    """The folders of train, val and test: ``train``, or a longer name that ends so, such as ``lidc_crops_train``."""
    found: dict[str, Path] = {}
    for folder in (source, *sorted(source.glob("*/")), *sorted(source.glob("*/*/"))):
        part = next((part for part in PARTS if re.fullmatch(rf"(.*[_-])?{part}", folder.name)), None)
        if part is None or not (folder / "images").is_dir():
            continue
        if part in found:
            raise DataError(f"{source}: expected one folder for {part}, found {found[part].name} and {folder.name}")
        found[part] = folder
    if not found and (source / "images").is_dir():
        return {"": source}
    return {part: found[part] for part in PARTS if part in found}


class _Files(Crops):
    """Every case is an image file and one or more files of masks: ``place = (image, *masks)``."""

    def files(self) -> list[Path]:
        return [path for crop in self.crops for path in crop.place]


class Npy(_Files):
    """``train/images/0.npy`` ``[H, W]`` beside ``train/labels/0.npy`` ``[H, W, 4]`` (or ``[4, H, W]``), and so on.

    Images are in [0, 1] or shifted by -0.5; the shift is undone. The files do not tell which patient or series they
    show, so the parts that the folders are is the only split there can be.
    """

    form = "v1 npy folders"

    def index(self, progress: Progress | None) -> list[Crop]:
        crops = []
        for part, folder in part_folders(self.source).items():
            if not (folder / "labels").is_dir():
                raise DataError(f"{folder / 'labels'}: expected a folder of labels beside images, found none")
            folders = folder / "images", folder / "labels"
            for image, labels in paired_files(folders, ("", ""), hint=": half-downloaded?").values():
                name = f"{part}-{image.stem}" if part else image.stem
                origin = {"file": image.relative_to(self.source).as_posix()}
                crops.append(Crop(name, (image, labels), part=part or None, origin=origin))
        self._shift = shift_of(len(crops), lambda i: read_npy(crops[i].place[0]))
        return crops

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        path, labels = self.crops[index].place
        image, masks = read_npy(path), read_npy(labels)
        if image.ndim == 3 and 1 in image.shape:
            image = image.reshape([n for n in image.shape if n != 1])
        if masks.ndim == 3 and masks.shape == (*image.shape, READERS):
            masks = np.moveaxis(masks, -1, 0)
        return unit_image(image, str(path), self._shift), masks


class Png(_Files):
    """LIDC v2, of the hierarchical probabilistic U-Net: ``train/images/LIDC-IDRI-0001/z-105.0_c0.png``, 180 × 180, and
    its masks ``train/gt/LIDC-IDRI-0001/z-105.0_c0_l0.png`` to ``_l3.png``.
    """

    form = "v2 PNG folders"
    from_v1 = False
    intensity = BYTES
    units = "8-bit grey"

    def index(self, progress: Progress | None) -> list[Crop]:
        return [crop for part, folder in part_folders(self.source).items() for crop in self._part(part, folder)]

    def _part(self, part: str, folder: Path) -> list[Crop]:
        truth = next((folder / name for name in ("gt", "lesions") if (folder / name).is_dir()), None)
        if truth is None:
            raise DataError(f"{folder}: expected the folders images and gt, found no gt")
        crops, unused = [], set(finished_files(truth.rglob("*")))
        for path in finished_files((folder / "images").rglob("*")):
            place = path.relative_to(folder / "images")
            if path.suffix.lower() != ".png":
                raise DataError(f"{path}: expected PNG files alone, found another")
            masks = [truth / place.with_name(f"{place.stem}_l{m}.png") for m in range(READERS)]
            if lost := [mask for mask in masks if mask not in unused]:
                raise DataError(f"{lost[0]}: expected a mask of {path.name}, found none: half-downloaded?")
            unused.difference_update(masks)
            name = "-".join(filter(None, (part, *place.parent.parts, place.stem)))
            patient = patient_in(place.as_posix()) or (place.parts[0] if len(place.parts) > 1 else None)
            origin = {"file": path.relative_to(self.source).as_posix()}
            if z := re.match(r"z(-?\d+(?:\.\d+)?)", place.stem):
                origin["z"] = z.group(1)
            crops.append(Crop(name, (path, *masks), patient=patient, part=part or None, origin=origin))
        if unused:
            raise DataError(f"{min(unused)}: expected an image for every mask, found none: half-downloaded?")
        return crops

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        paths = self.crops[index].place
        image, *masks = map(_picture, paths)
        for path, mask in zip(paths[1:], masks, strict=True):
            if mask.shape != image.shape:
                raise DataError(
                    f"{path}: expected {shape_text(image.shape)} as its image, found {shape_text(mask.shape)}"
                )
            if len(set(np.unique(mask)) - {0}) > 1:
                raise DataError(f"{path}: expected a mask of two values, found {len(np.unique(mask))}")
        return image, np.stack(masks) != 0


def _picture(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with decoding_at_most(limits.max_pixels()), Image.open(path, formats=("PNG",)) as picture:
            if picture.mode in ("L", "1", "P", "RGB", "RGBA", "LA"):
                return np.asarray(picture.convert("L"))
            mode = picture.mode
    except Exception as error:  # a PNG that is damaged is a SyntaxError to Pillow, or anything else
        raise DataError(f"{path}: expected a whole PNG file, found: {' '.join(str(error).split())}") from None
    raise DataError(f"{path}: expected a grey picture of 8 bits, found mode {mode}")
