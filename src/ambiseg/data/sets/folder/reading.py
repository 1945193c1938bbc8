"""The files of a folder: opened once, and checked against each other when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ambiseg._util.text import count
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.errors import FileError
from ambiseg.io.formats import format_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source, grid_distance

_BUDGET = 512 << 20  # bytes of decoded volumes that are kept; those of one case are kept whatever they take
_STACKS = ("TIFF", "NumPy", "NIfTI", "DICOM")  # files that may hold several slices


class Kind(NamedTuple):
    """What all images of a data set have in common with the one of this name."""

    name: str
    channels: int
    dtype: np.dtype
    units: str = ""

    @staticmethod
    def of(image: Source) -> Kind:
        return Kind(image.path.name, image.channels, image.dtype, image.units)


class Files:
    """Reads images and masks. Files that may hold several slices stay open, the last used longest.

    Args:
        settings: how files are read.
        most: files of one case.
    """

    def __init__(self, settings: FolderSettings, most: int) -> None:
        self._settings, self._most = settings, most
        self._lossy = isinstance(settings.labels, Mapping) and "threshold" in settings.labels  # JPEG will do for masks
        axis = 2 if settings.axis is None else settings.axis
        named = {"segments": settings.segments, "classes": settings.class_names}
        self._options = ReadOptions(coloured=settings.colours is not None, axes=settings.axes, axis=axis, **named)
        self._opened: dict[tuple[Path, bool], Source] = {}
        self._bytes = 0

    def open(self, path: Path, mask: bool = False, like: Source | None = None) -> Source:
        """An image, or a mask that is to lie on the grid of the image ``like``."""
        key = (path, mask)
        if key in self._opened:
            self._opened[key] = self._opened.pop(key)  # now the last used
            return self._opened[key]
        turned = None if self._settings.geometry == "ignore" else like
        source = open_source(path, replace(self._options, mask=mask, like=turned, image=like))
        if mask and source.format == "JPEG" and not self._lossy:
            message = "expected a mask without loss, found JPEG, whose values are not class ids"
            raise FileError.of("E205", path, message)
        if source.format in _STACKS:
            self._opened[key] = source
            self._bytes += source.nbytes
            while self._bytes > _BUDGET and len(self._opened) > self._most:
                self._bytes -= self._opened.pop(next(iter(self._opened))).nbytes
        return source

    def image(self, source: Source, k: int, first: Kind) -> np.ndarray:
        """One slice ``[C, H, W]``, of the channels and the number type of the first image, or as declared."""
        image = source.read(k)
        declared = self._settings.channels
        if declared == 3 and len(image) == 1:
            image = np.repeat(image, 3, 0)
        elif declared == 1 and len(image) == 3:
            if (tinted := int(((image[0] != image[1]) | (image[0] != image[2])).sum())) > 0:
                message = f"expected a grey image, found {count(tinted, 'pixel')} in colour"
                raise FileError.of("E308", source.path, message, 'declare "channels": 3')
            image = image[:1]
        if len(image) != (wanted := declared or first.channels):
            like = f"as {first.name}" if declared is None else "as declared"
            raise FileError.of("E308", source.path, f"expected {count(wanted, 'channel')} {like}, found {len(image)}")
        dtype = first.dtype
        if image.dtype != dtype and image.dtype.kind in "if" and dtype.kind in "if":
            same = image.astype(dtype)  # medical images of one unit come in several types; what fits is the same image
            image = same if np.array_equal(same, image) else image
        if self._settings.intensity is None and image.dtype != dtype:
            raise FileError.of("E309", source.path, f"expected {dtype} as {first.name}, found {image.dtype}")
        if image.dtype.kind == "f" and (wrong := int((~np.isfinite(image)).sum())):
            message = f"expected finite values, found {count(wrong, 'value')} nan or infinite"
            raise FileError.of("E206", source.path, message)
        return image

    def mask(self, path: Path, image: Source, k: int) -> np.ndarray:
        """One slice of a mask ``[C, H, W]`` as its file has it, on the grid of its image."""
        source = self.open(path, mask=True, like=image)
        if (source.slices, *source.size) != (image.slices, *image.size):
            message = f"expected {image.form} as its image {image.path.name}, found {source.form}"
            raise FileError.of("E301", path, message, self._size_advice(image, source))
        miss = None if self._settings.geometry == "ignore" else grid_distance(image, source)
        if miss is not None:
            message = f"expected the grid of {image.path.name}, found corners {miss:.3g} mm away from its own"
            raise FileError.of("E302", path, message)
        return source.read(k)

    def has_ids(self, path: Path) -> bool:
        """Whether a mask that was just read has class ids, whatever the numbers in other masks mean."""
        source = self._opened.get((path, True))
        return source is not None and source.ids

    def _size_advice(self, image: Source, mask: Source) -> str:
        if image.size == mask.size[::-1] and image.slices == mask.slices:
            if image.format == "JPEG":  # the mask may have been drawn on the picture as stored
                return "the image may be turned by its EXIF orientation: turn the mask the same way, or remove the tag"
            return "the mask seems to lie on its side: swap its rows and columns"
        if image.format == "NumPy" and image.size[1] in (3, 4) and self._settings.axes is None:
            return 'if the last axis of the image is colour, declare "axes": "HWC"'
        if image.format == "NumPy" and image.slices in (3, 4) and mask.slices == 1 and self._settings.axes is None:
            return 'if the first axis of the image is colour, declare "axes": "CHW"'
        return ""

    def __getstate__(self) -> dict[str, object]:
        """Without what is open: a worker process opens its own."""
        return {**self.__dict__, "_opened": {}, "_bytes": 0}


def may_be_stack(path: Path) -> bool:
    """Whether a file may hold several slices or have a place in space, by its format."""
    return path.is_dir() or format_of(path) in _STACKS
