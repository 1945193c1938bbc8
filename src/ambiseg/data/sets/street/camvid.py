"""CamVid: street scenes, and the flips that give each of them 32 known modes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Cases, digest
from ambiseg.data.sets.arrays import load_npz
from ambiseg.data.sets.files import file_state, paired_files
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.street.flips import Flips, FlipTable
from ambiseg.data.sets.street.labelled import ClassIds, LabelledImage, LabelledImages
from ambiseg.settings import Sides

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
VOID = len(CLASSES)
FLIPS: FlipTable = {
    "pavement": ("pavement2", "8/17"),
    "pedestrian": ("pedestrian2", "7/17"),
    "car": ("car2", "6/17"),
    "tree": ("tree2", "5/17"),
    "road": ("road2", "4/17"),
}
_PARTS = ("train", "val", "test")
_BLOCK = 900  # frames of the film, half a minute: neighbours in the film are alike
_IDS = ClassIds({**{i: i for i in range(len(CLASSES))}, VOID: None})


class CamVid(Flips):
    """CamVid, whose pavements, pedestrians, cars, trees and roads flip, 32 modes per image.

    11 classes and 11 for void. Where the official test frames are missing, ``val`` is the test set, and validation is
    made on frames that are taken out of ``train`` by half minutes of film, as on Cityscapes.

    Args:
        root: an .npz with ``train_image [N, H, W, 3]``, ``train_label [N, H, W]``, ``train_name`` and the same of
            ``val`` and ``test``; a folder with ``train/``, ``trainannot/``, ``val/`` …, a PNG of the same name in
            each; or a folder as :class:`~ambiseg.data.sets.folder.cases.Folder` has them, with one reader.
        size: height and width of all frames, for the first two; ``None``: as they are.
        flips: {class: (new class, probability)} instead of the five of the paper.
    """

    def __init__(self, root: str | os.PathLike[str], size: Sides | None = None, flips: FlipTable | None = None) -> None:
        path = Path(root)
        annotated = [part for part in _PARTS if (path / part).is_dir() and (path / f"{part}annot").is_dir()]
        cases: Cases
        if annotated:
            frames = [frame for part in annotated for frame in _list(path, part)]
            cases = LabelledImages(_with_test(frames), title="CamVid", classes=CLASSES, ids=_IDS, size=size)
        elif not path.is_dir():
            cases = _Film(path, size)
        elif size is not None:
            raise DataError(f"{path}: size is for an .npz or a folder with train/ and trainannot/, found other data")
        else:
            cases = Folder(path, classes=CLASSES, void=VOID, labels="ids")
        super().__init__(cases, FLIPS if flips is None else flips, "CamVid, 32 modes" if flips is None else None)
        self.group = "sequence"


class _Film(LabelledImages):
    """The frames of one .npz."""

    def __init__(self, path: Path, size: Sequence[int] | None) -> None:
        self._path = path
        keys = [f"{part}_{key}" for part in _PARTS for key in ("image", "label", "name")]
        arrays = load_npz(path, ("train_image",), keys)
        images, labels, frames = [], [], []
        for part in (part for part in _PARTS if f"{part}_image" in arrays):
            image, label = arrays[f"{part}_image"], arrays.get(f"{part}_label")
            if label is None:
                raise DataError(f"{path}: expected {part}_label with {part}_image, found none")
            if image.ndim != 4 or image.shape[3] != 3 or image.dtype != np.uint8 or image.shape[:3] != label.shape:
                found = f"{image.dtype} {list(image.shape)} and {list(label.shape)}"
                raise DataError(f"{path}: expected {part}_image [N, H, W, 3] of bytes and {part}_label, found {found}")
            names = arrays.get(f"{part}_name", np.array([f"{part}_{i:06d}" for i in range(len(image))]))
            if names.shape != (len(image),):
                raise DataError(f"{path}: expected one {part}_name per frame, found {list(names.shape)}")
            places = {str(name): Path(f"{path}: {name}") for name in names}
            if len(places) < len(names) or not places.keys().isdisjoint(frame.name for frame in frames):
                raise DataError(f"{path}: expected a name of its own for every frame, found some twice")
            frames += [_frame(name, part, place, place) for name, place in places.items()]
            images.append(image)
            labels.append(label)
        if len({image.shape[1:] for image in images}) > 1:
            raise DataError(f"{path}: expected frames of one size, found {' and '.join(str(i.shape) for i in images)}")
        self._arrays = np.concatenate(images), np.concatenate(labels)
        size = images[0].shape[1:3] if size is None else size
        super().__init__(_with_test(frames), title="CamVid", classes=CLASSES, ids=_IDS, size=size)

    def _pixels(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self._arrays
        return np.moveaxis(images[index], -1, 0), labels[index][None]

    def state(self) -> str:
        return digest("camvid", f"{file_state(self._path)} {self._size}")


def _list(root: Path, part: str) -> list[LabelledImage]:
    """The frames of one part, by name."""
    pairs = paired_files((root / part, root / f"{part}annot"), (".png", ".png"))
    if not pairs:
        raise DataError(f"{root / part}: expected PNG pictures, found none")
    return [_frame(name, part, *pair) for name, pair in sorted(pairs.items())]


def _frame(name: str, part: str, image: Path, labels: Path) -> LabelledImage:
    return LabelledImage(name, f"{part}-{sequence(name)}", part, image, labels)


def _with_test(frames: list[LabelledImage]) -> list[LabelledImage]:
    """Without official test frames, those of ``val`` are the test set."""
    if any(frame.part == "test" for frame in frames):
        return frames
    return [replace(frame, part="test") if frame.part == "val" else frame for frame in frames]


def sequence(name: str) -> str:
    """The half minute of film that a frame is from.

    >>> sequence("0016E5_07959"), sequence("0006R0_f00930"), sequence("somewhere")
    ('0016E5-8', '0006R0-1', 'somewhere')
    """
    found = re.fullmatch(r"(.+?)_\D*(\d+)", name)
    return f"{found[1]}-{int(found[2]) // _BLOCK}" if found else name
