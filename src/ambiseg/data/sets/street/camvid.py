"""CamVid: street scenes, and the flips that give each of them 32 known modes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, digest
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.arrays import load_npz
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.street.flips import Flips, FlipTable
from ambiseg.data.sets.street.frames import Frame, Frames, Ids, averaged, nearest

CLASSES = (*("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"),)
VOID = len(CLASSES)
FLIPS: FlipTable = {
    "pavement": ("pavement2", "8/17"),
    "pedestrian": ("pedestrian2", "7/17"),
    "car": ("car2", "6/17"),
    "tree": ("tree2", "5/17"),
    "road": ("road2", "4/17"),
}
_PARTS = ("train", "val", "test")
_BLOCK = 900  # frames of the film, half a minute: what is next to each other there is alike

_ids = Ids({**{i: i for i in range(len(CLASSES))}, VOID: None})


class CamVid(Flips):
    """CamVid, whose pavements, pedestrians, cars, trees and roads flip, 32 modes an image.

    11 classes and 11 for void. Where the official test frames are missing, ``val`` is the test set, and validation is
    made on frames that are taken out of ``train`` by half minutes of film, as on Cityscapes.

    Args:
        root: an .npz with ``train_image [N, H, W, 3]``, ``train_label [N, H, W]``, ``train_name`` and the same of
            ``val`` and ``test``; a folder with ``train/``, ``trainannot/``, ``val/`` …, a PNG of the same name in
            each; or a folder as :class:`~ambiseg.data.sets.folder.cases.Folder` has them, with one reader.
        size: height and width that frames are brought to, of the first two; ``None`` leaves them as they are.
        flips: {class: (new class, probability)} instead of the five of the paper.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: Sequence[int] | None = None,
        flips: FlipTable | None = None,
    ) -> None:
        path = Path(root)
        shape = None if size is None else (int(size[0]), int(size[1]))
        annotated = [part for part in _PARTS if (path / part).is_dir() and (path / f"{part}annot").is_dir()]
        if annotated:
            frames = _declared([frame for part in annotated for frame in _frames(path, part)])
            cases: Cases = Frames(frames, title="CamVid", classes=CLASSES, ids=_ids, size=shape)
        elif not path.is_dir():
            cases = _Film(path, shape)
        elif size is not None:
            raise DataError(f"{path}: size is for an .npz or a folder with train/ and trainannot/, found other data")
        else:
            cases = Folder(path, classes=CLASSES, void=VOID, labels="ids")
        super().__init__(cases, FLIPS if flips is None else flips, "CamVid, 32 modes" if flips is None else None)


class _Film(Cases):
    """The arrays of one .npz."""

    def __init__(self, path: Path, size: tuple[int, int] | None) -> None:
        self._path = path
        arrays = load_npz(
            path, ("train_image",), [f"{p}_{what}" for p in _PARTS for what in ("image", "label", "name")]
        )
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
                raise DataError(f"{path}: expected one {part}_name a frame, found {list(names.shape)}")
            frames += [Frame(str(name), f"{part}-{sequence(str(name))}", part, path, path) for name in names]
            images.append(image)
            labels.append(label)
        frames = _declared(frames)
        if len({image.shape[1:] for image in images}) > 1:
            raise DataError(f"{path}: expected frames of one size, found {' and '.join(str(i.shape) for i in images)}")
        self._images, self._labels = np.concatenate(images), np.concatenate(labels)
        self._size = self._images.shape[1:3] if size is None else size
        self.names, self.patients, self.declared = (
            [getattr(f, key) for f in frames] for key in ("name", "patient", "part")
        )
        if len(set(self.names)) < len(self.names):
            raise DataError(f"{path}: expected a name of its own for every frame, found some twice")
        self.title, self.classes, self.channels = "CamVid", CLASSES, 3
        self.evaluated = tuple(range(len(CLASSES)))
        self.intensity = Intensity.for_dtype(np.dtype(np.uint8))

    def __getitem__(self, index: int) -> Case:
        path = Path(f"{self._path}: {self.names[index]}")
        labels, void = _ids(nearest(self._labels[index], self._size, path), path)
        return Case.of(
            averaged(np.moveaxis(self._images[index], -1, 0), self._size, path),
            labels[None],
            name=self.names[index],
            patient=self.patients[index],
            readers=("map",),
            valid=~void,
        )

    def state(self) -> str:
        about = self._path.stat()
        return digest("camvid", f"{self._path.resolve()} {about.st_size} {about.st_mtime_ns} {self._size}")


def sequence(name: str) -> str:
    """The half minute of film that a frame is from.

    >>> sequence("0016E5_07959"), sequence("0006R0_f00930"), sequence("somewhere")
    ('0016E5-8', '0006R0-1', 'somewhere')
    """
    found = re.fullmatch(r"(.+?)_\D*(\d+)", name)
    return f"{found[1]}-{int(found[2]) // _BLOCK}" if found else name


def _frames(root: Path, part: str) -> list[Frame]:
    pictures, labels = ({p.stem: p for p in (root / name).glob("*.png")} for name in (part, f"{part}annot"))
    for have, need, folder in ((pictures, labels, f"{part}annot"), (labels, pictures, part)):
        if lacking := sorted(have.keys() - need.keys()):
            more = f", and of {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
            wanted = root / folder / have[lacking[0]].name
            belongs = have[lacking[0]].relative_to(root)
            raise DataError(f"{wanted}: expected the file that belongs to {belongs}, found none{more}")
    if not pictures:
        raise DataError(f"{root / part}: expected PNG pictures, found none")
    return [Frame(n, f"{part}-{sequence(n)}", part, pictures[n], labels[n]) for n in sorted(pictures)]


def _declared(frames: list[Frame]) -> list[Frame]:
    """Without official test frames, those of ``val`` are the test set."""
    if any(frame.part == "test" for frame in frames):
        return frames
    return [Frame(**{**f.__dict__, "part": "test" if f.part == "val" else f.part}) for f in frames]
