"""Multimodal Cityscapes: the official folders, and the flips that give each frame 32 known modes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ambiseg._util.errors import DataError
from ambiseg.data.sets.files import paired_files
from ambiseg.data.sets.street.flips import Flips, FlipTable
from ambiseg.data.sets.street.labelled import ClassIds, LabelledImage, LabelledImages
from ambiseg.settings import Sides, Text

CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
"""The 19 classes by train id."""
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""Their numbers in ``_gtFine_labelIds.png``; other numbers, and 255 (licence plates), are void."""
FLIPS: FlipTable = {
    "sidewalk": ("sidewalk2", "8/17"),
    "person": ("person2", "7/17"),
    "car": ("car2", "6/17"),
    "vegetation": ("vegetation2", "5/17"),
    "road": ("road2", "4/17"),
}
VALIDATION = ("ulm", "darmstadt", "monchengladbach")
"""Cities of the official training set that validation is made on; the official validation set is the test set."""
_ENDINGS = "_leftImg8bit.png", "_gtFine_labelIds.png"

_IDS = {
    "train": ClassIds({**{i: i for i in range(len(CLASSES))}, 255: None}),
    "label": ClassIds({i: LABEL_IDS.index(i) if i in LABEL_IDS else None for i in (*range(34), 255)}),
}


class Cityscapes(Flips):
    """Cityscapes as it is downloaded, whose sidewalks, persons, cars, vegetation and roads flip, 32 modes per frame.

        ROOT/leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
        ROOT/gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png

    19 train ids, then the five new classes. The official validation set is ``test``, and Ulm, Darmstadt and
    Mönchengladbach of the official training set are ``val``. A sequence of a city is not divided.

    Args:
        root: the folder that holds ``leftImg8bit`` and ``gtFine``.
        size: height and width of all frames.
        extra: a folder with another model's prediction of every frame, named after it (``aachen_000000_000019.png``,
            or with anything after another ``_``): ids as PNG or npy, or probabilities of the 19 classes as npy. They
            are appended to the picture as 19 channels.
        extra_ids: the ids of those: ``train`` (0 to 18) or ``label`` (as in ``labelIds``).
        flips: {class: (new class, probability)} instead of the five of the paper.
        missing: ``skip`` leaves out frames that lack their picture, labels or prediction; else they are an error.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: Sides = (256, 512),
        extra: Text | os.PathLike[str] | None = None,
        extra_ids: Literal["train", "label"] = "train",
        flips: FlipTable | None = None,
        missing: Literal["error", "skip"] = "error",
    ) -> None:
        if extra_ids not in _IDS or missing not in ("error", "skip"):
            expected = "extra_ids train or label and missing error or skip"
            raise DataError(f"cityscapes: expected {expected}, found {extra_ids!r} and {missing!r}")
        if len(size) != 2 or min(size) < 1:
            raise DataError(f"cityscapes: expected size as height and width, found {size!r}")
        frames = list(_list(Path(root), missing == "skip"))
        if not frames:
            raise DataError(f"{root}: expected frames in leftImg8bit/train or leftImg8bit/val, found none with labels")
        if extra is not None:
            frames = _with_extra(frames, Path(extra), missing == "skip")
        if not frames:
            raise DataError(f"{root}: expected at least one frame with all its files, found none")
        read_as = None if extra is None else _IDS[extra_ids]
        cases = LabelledImages(
            frames, title="Cityscapes", classes=CLASSES, ids=_IDS["label"], size=size, extra_ids=read_as
        )
        super().__init__(cases, FLIPS if flips is None else flips)


def _list(root: Path, skip: bool) -> Iterator[LabelledImage]:
    """Every frame of the official training and validation sets, by name."""
    for folder in ("leftImg8bit", "gtFine"):
        if not (root / folder).is_dir():
            raise DataError(f"{root}: expected the folders leftImg8bit and gtFine, found no {folder}")
    for part in ("train", "val"):
        folders, hint = (root / "leftImg8bit" / part, root / "gtFine" / part), " (missing=skip leaves such frames out)"
        for name, (picture, labels) in sorted(paired_files(folders, _ENDINGS, "*/", hint, skip).items()):
            given = "test" if part == "val" else "val" if picture.parent.name in VALIDATION else "train"
            yield LabelledImage(name, name.rsplit("_", 1)[0], given, picture, labels)


def _with_extra(frames: Sequence[LabelledImage], folder: Path, skip: bool) -> list[LabelledImage]:
    """The frames with the files of their predictions."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of predictions, found none")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".png", ".npy"):
            name = "_".join(path.stem.split("_")[:3])  # a frame is named by city, sequence and number
            if name in found:
                raise DataError(f"{path}: expected one prediction per frame, found {found[name].name} as well")
            found[name] = path
    if not skip and (lacking := [frame.name for frame in frames if frame.name not in found]):
        raise DataError(f"{folder}: expected a prediction of {lacking[0]} as .png or .npy, found none")
    return [replace(frame, extra=found[frame.name]) for frame in frames if frame.name in found]
