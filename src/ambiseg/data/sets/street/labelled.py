"""Images with one class-id map each, brought to one size as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.text import shape_text
from ambiseg.data.case import Case, Cases, Extra, digest
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.files import file_state, read_npy
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions

_VOID, _UNKNOWN = 65535, 65534  # in a table of ids: void, and a number that no map may hold
_TOLERANCE = 0.01  # relative difference of the scales of the two sides


@dataclass(frozen=True)
class LabelledImage:
    """The files of one image, of its class-id map and, where there is one, of another model's prediction of it."""

    name: str
    patient: str
    part: str
    image: Path
    labels: Path
    extra: Path | None = None


class ClassIds:
    """The meaning of the numbers in a class-id map: ``{number: class id}``, ``None`` for void.

    >>> ClassIds({7: 0, 8: 1, 0: None})(np.array([[7, 8, 0]], np.uint8), Path("a.png"))
    (array([[0, 1, 0]], dtype=uint8), array([[False, False,  True]]))
    """

    def __init__(self, meaning: Mapping[int, int | None]) -> None:
        starts = [i for i in sorted(meaning) if i - 1 not in meaning]
        ends = [i for i in sorted(meaning) if i + 1 not in meaning]
        spans = (str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
        self.meaning, self.known = dict(meaning), " and ".join(spans)
        self._table = np.full(65536, _UNKNOWN, np.uint16)
        for number, label in meaning.items():
            self._table[number] = _VOID if label is None else label

    def __call__(self, numbers: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Class ids ``[H, W]``, 0 at void pixels; and True at void pixels."""
        if numbers.dtype.kind not in "bu" and not (numbers.dtype.kind == "i" and numbers.min() >= 0):
            raise DataError(f"{path}: expected class ids, found {numbers.dtype} from {numbers.min():g}")
        large = numbers > 65535 if numbers.dtype.itemsize > 2 else np.zeros((), bool)
        found = self._table[np.where(large, 65535, numbers).astype(np.uint16)]
        if (wrong := (found == _UNKNOWN) | large).any():
            raise DataError(f"{path}: expected ids of the classes, {self.known}, found {int(numbers[wrong][0])}")
        void = found == _VOID
        return np.where(void, 0, found).astype(np.uint8), void


class LabelledImages(Cases):
    """Images and class-id maps from files.

    Args:
        images: where the files are.
        title: of the data.
        classes: names of the class ids.
        ids: meaning of the numbers in the maps.
        size: height and width of all cases. Images are averaged over the pixels of the source, maps take the nearest
            one. ``None``: as they are.
        extra_ids: meaning of the numbers in predictions of another model, for images that have one. A prediction is
            appended to the image as one channel per class, 0 or 255 (or between, where it has probabilities). Where
            it is void, the class of the nearest pixel that has one is taken, so that no void mask is in the input.
    """

    group = "sequence"

    def __init__(
        self,
        images: Sequence[LabelledImage],
        *,
        title: str,
        classes: Sequence[str],
        ids: ClassIds,
        size: Sequence[int] | None = None,
        extra_ids: ClassIds | None = None,
    ) -> None:
        self.images, self._ids = list(images), ids
        self._size = None if size is None else (int(size[0]), int(size[1]))
        self.title, self.classes = title, tuple(classes)
        self.evaluated = tuple(range(len(self.classes)))
        self.channels, self.intensity, self.units = 3, Intensity.for_dtype(np.dtype(np.uint8)), "8-bit RGB"
        if extra_ids is not None:
            extra = len(self.classes)
            self.extra = Extra(extra, extra_ids.meaning)
            self.channels += extra
            self.intensity = Intensity(0, 255, (127.5,) * 3 + (0.0,) * extra, (127.5,) * 3 + (255.0,) * extra)
        self.names = [image.name for image in self.images]
        self.patients = [image.patient for image in self.images]
        self.declared = [image.part for image in self.images]

    def __getitem__(self, index: int) -> Case:
        files = self.images[index]
        image, numbers = self._pixels(index)
        if image.shape[0] != 3 or image.dtype != np.uint8:
            found = f"{image.shape[0]} of {image.dtype}"
            raise DataError(f"{files.image}: expected three channels of bytes, found {found}")
        if numbers.shape[0] != 1:
            raise DataError(f"{files.labels}: expected one class id per pixel, found {numbers.shape[0]} channels")
        if numbers.shape[1:] != image.shape[1:]:
            expected, found = shape_text(image.shape[1:]), shape_text(numbers.shape[1:])
            raise DataError(f"{files.labels}: expected {expected} as in {files.image.name}, found {found}")
        size = self._size or image.shape[1:]
        labels, void = self._ids(_resized_map(numbers[0], size, files.labels), files.labels)
        image = _resized_image(image, size, files.image)
        if self.extra is not None:
            assert files.extra is not None
            image = np.concatenate([image, read_extra(files.extra, self.extra, size)])
        return Case.of(image, labels[None], name=files.name, patient=files.patient, readers=("map",), valid=~void)

    def _pixels(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``[C, H, W]`` image and ``[1, H, W]`` numbers, as they are in the source."""
        return _read(self.images[index].image), _read(self.images[index].labels, mask=True)

    def state(self) -> str:
        files = [path for each in self.images for path in (each.image, each.labels, each.extra) if path]
        made = f"{self.classes} {self._size} {self.channels}"
        return digest("frames", self.title, made, *(each.part for each in self.images), *map(file_state, files))


def read_extra(path: Path, extra: Extra, size: Sequence[int]) -> np.ndarray:
    """Another model's prediction as ``[classes, H, W]`` bytes: of ids 0 or 255, of probabilities what is between."""
    C = extra.classes
    values = read_npy(path) if path.suffix == ".npy" else _read(path, mask=True)
    if values.ndim == 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim == 2:
        labels, void = ClassIds(extra.ids)(_resized_map(values, size, path), path)
        return (_filled(labels, void) == np.arange(C)[:, None, None]).astype(np.uint8) * np.uint8(255)
    if values.ndim == 3 and values.shape[-1] == C and values.shape[0] != C:
        values = np.moveaxis(values, -1, 0)
    if values.ndim != 3 or len(values) != C:
        found = shape_text(values.shape)
        raise DataError(f"{path}: expected ids [H, W] or probabilities [{C}, H, W] or [H, W, {C}], found {found}")
    values = values.astype(np.float32)
    if not (values.min() >= 0 and values.max() <= 1):  # also where there is a nan
        raise DataError(f"{path}: expected probabilities from 0 to 1, found {values.min():g} to {values.max():g}")
    planes = _resized_image(np.round(values * 255).astype(np.uint8), size, path)
    return _filled(planes, np.asarray(~planes.any(0)))


def _read(path: Path, mask: bool = False) -> np.ndarray:
    source = open_source(path, ReadOptions(mask=mask))
    if source.slices != 1:
        raise DataError(f"{path}: expected one picture, found {source.form}")
    return source.read(0)


def _resized_map(values: np.ndarray, size: Sequence[int], path: Path) -> np.ndarray:
    """``[H, W]`` at another size: each new pixel takes the old one in which its middle lies."""
    _check_ratio(values.shape, size, path)
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for old, new in zip(values.shape, size, strict=True)
    )
    return values[rows[:, None], columns]


def _resized_image(pixels: np.ndarray, size: Sequence[int], path: Path) -> np.ndarray:
    """``[C, H, W]`` bytes at another size: the mean over pixels of the source, or linear where it is enlarged."""
    from PIL import Image

    _check_ratio(pixels.shape[1:], size, path)
    if tuple(size) == pixels.shape[1:]:
        return np.ascontiguousarray(pixels)
    how = Image.Resampling.BOX if size[0] < pixels.shape[1] else Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(plane).resize((size[1], size[0]), how)) for plane in pixels])


def _check_ratio(found: Sequence[int], size: Sequence[int], path: Path) -> None:
    if abs(found[0] * size[1] / (found[1] * size[0]) - 1) > _TOLERANCE:
        raise DataError(f"{path}: expected sides in the ratio of {shape_text(size)}, found {shape_text(found)}")


def _filled(values: np.ndarray, void: np.ndarray) -> np.ndarray:
    """``[…, H, W]`` with the value of the nearest other pixel wherever ``void [H, W]`` holds."""
    if not void.any() or void.all():
        return values
    from scipy.ndimage import distance_transform_edt

    y, x = distance_transform_edt(void, return_distances=False, return_indices=True)  # type: ignore[misc]
    return values[..., y, x]
