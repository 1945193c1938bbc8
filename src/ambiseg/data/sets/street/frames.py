"""Pictures of the street with one class-id map each, brought to one size as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.text import shape_text
from ambiseg.data.case import Case, Cases, digest
from ambiseg.data.intensity import Intensity
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions

_NOWHERE, _UNKNOWN = 65535, 65534  # in a table of ids: void, and a number that no map may hold
_TILTED = 0.01  # how much the two sides may be scaled differently


@dataclass(frozen=True)
class Frame:
    """Where one picture, its class-id map and, where there is one, another model's prediction of it are."""

    name: str
    patient: str
    part: str
    image: Path
    labels: Path
    extra: Path | None = None


class Ids:
    """What the numbers in a class-id map mean: ``{number: class id}``, ``None`` for void.

    >>> Ids({7: 0, 8: 1, 0: None})(np.array([[7, 8, 0]], np.uint8), Path("a.png"))
    (array([[0, 1, 0]], dtype=uint8), array([[False, False,  True]]))
    """

    def __init__(self, meaning: Mapping[int, int | None]) -> None:
        starts = [i for i in sorted(meaning) if i - 1 not in meaning]
        ends = [i for i in sorted(meaning) if i + 1 not in meaning]
        spans = (str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
        self.known = " and ".join(spans)
        self._table = np.full(65536, _UNKNOWN, np.uint16)
        for number, label in meaning.items():
            self._table[number] = _NOWHERE if label is None else label

    def __call__(self, numbers: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Class ids ``[H, W]``, 0 where void, and where void is."""
        if numbers.dtype.kind not in "bu" and not (numbers.dtype.kind == "i" and numbers.min() >= 0):
            raise DataError(f"{path}: expected class ids, found {numbers.dtype} from {numbers.min():g}")
        large = numbers > 65535 if numbers.dtype.itemsize > 2 else np.zeros((), bool)
        found = self._table[np.where(large, 65535, numbers).astype(np.uint16)]
        if (wrong := (found == _UNKNOWN) | large).any():
            raise DataError(f"{path}: expected ids of the classes, {self.known}, found {int(numbers[wrong][0])}")
        void = found == _NOWHERE
        return np.where(void, 0, found).astype(np.uint8), void


class Frames(Cases):
    """Pictures and class-id maps from files.

    Args:
        frames: where everything is.
        title: what the data are.
        classes: names of the class ids.
        ids: what the numbers in the maps mean.
        size: height and width that pictures are brought to: by the mean over the pixels of the source, class-id maps
            by the nearest one. ``None`` leaves them as they are.
        extra_ids: what the numbers in predictions of another model mean, for frames that have one. It joins the
            picture as one channel a class, 0 or 255 (or in between, where it has probabilities). A prediction has a
            class everywhere: where a file says void, the class of the nearest pixel that has one is taken, so that
            no void mask gets into the input.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        *,
        title: str,
        classes: Sequence[str],
        ids: Ids,
        size: tuple[int, int] | None = None,
        extra_ids: Ids | None = None,
    ) -> None:
        self.frames, self._ids, self._extra_ids = list(frames), ids, extra_ids
        self._size = None if size is None else (int(size[0]), int(size[1]))
        self.title, self.classes = title, tuple(classes)
        self.evaluated = tuple(range(len(self.classes)))
        extra = 0 if extra_ids is None else len(self.classes)
        self.channels = 3 + extra
        colour = Intensity.for_dtype(np.dtype(np.uint8))
        if extra:
            colour = Intensity(0, 255, (127.5,) * 3 + (0.0,) * extra, (127.5,) * 3 + (255.0,) * extra)
        self.intensity = colour
        self.names = [frame.name for frame in self.frames]
        self.patients = [frame.patient for frame in self.frames]
        self.declared = [frame.part for frame in self.frames]

    def __getitem__(self, index: int) -> Case:
        frame = self.frames[index]
        image, numbers = _read(frame.image), _read(frame.labels, mask=True)
        if image.shape[0] != 3 or image.dtype != np.uint8:
            found = f"{image.shape[0]} of {image.dtype}"
            raise DataError(f"{frame.image}: expected three channels of bytes, found {found}")
        if numbers.shape[0] != 1:
            raise DataError(f"{frame.labels}: expected one class id a pixel, found {numbers.shape[0]} channels")
        if numbers.shape[1:] != image.shape[1:]:
            expected, found = shape_text(image.shape[1:]), shape_text(numbers.shape[1:])
            raise DataError(f"{frame.labels}: expected {expected} as in {frame.image.name}, found {found}")
        size = image.shape[1:] if self._size is None else self._size
        labels, void = self._ids(nearest(numbers[0], size, frame.labels), frame.labels)
        image = averaged(image, size, frame.image)
        if self._extra_ids is not None:
            image = np.concatenate([image, self._extra(frame, size)])
        return Case.of(image, labels[None], name=frame.name, patient=frame.patient, readers=("map",), valid=~void)

    def _extra(self, frame: Frame, size: tuple[int, int]) -> np.ndarray:
        """Another model's prediction as ``[classes, H, W]`` bytes."""
        path, C = frame.extra, len(self.classes)
        assert path is not None
        assert self._extra_ids is not None
        values = _read_array(path) if path.suffix == ".npy" else _read(path, mask=True)
        if values.ndim == 3 and values.shape[0] == 1:
            values = values[0]
        if values.ndim == 2:
            labels, void = self._extra_ids(nearest(values, size, path), path)
            return (_filled(labels, void) == np.arange(C)[:, None, None]).astype(np.uint8) * np.uint8(255)
        if values.ndim == 3 and values.shape[-1] == C and values.shape[0] != C:
            values = np.moveaxis(values, -1, 0)
        if values.ndim != 3 or len(values) != C:
            found = shape_text(values.shape)
            raise DataError(f"{path}: expected ids [H, W] or probabilities [{C}, H, W] or [H, W, {C}], found {found}")
        values = values.astype(np.float32)
        if not (values.min() >= 0 and values.max() <= 1):  # nan is neither
            raise DataError(f"{path}: expected probabilities from 0 to 1, found {values.min():g} to {values.max():g}")
        planes = averaged(np.round(values * 255).astype(np.uint8), size, path)
        return _filled(planes, np.asarray(~planes.any(0)))

    def state(self) -> str:
        paths = (path for frame in self.frames for path in (frame.image, frame.labels, frame.extra) if path)
        files = [(path, path.stat()) for path in paths]
        said = [f"{path.resolve()} {about.st_size} {about.st_mtime_ns}" for path, about in files]
        return digest(
            "frames",
            self.title,
            f"{self.classes} {self._size} {self.channels}",
            *(frame.part for frame in self.frames),
            *said,
        )


def nearest(values: np.ndarray, size: Sequence[int], path: Path) -> np.ndarray:
    """``[H, W]`` at another size: the pixel in whose square the middle of the new one lies."""
    _check_ratio(values.shape, size, path)
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for old, new in zip(values.shape, size, strict=True)
    )
    return values[rows[:, None], columns]


def averaged(pixels: np.ndarray, size: Sequence[int], path: Path) -> np.ndarray:
    """``[C, H, W]`` bytes at another size: the mean over the square of the source (between pixels when enlarged)."""
    from PIL import Image

    _check_ratio(pixels.shape[1:], size, path)
    if tuple(size) == pixels.shape[1:]:
        return np.ascontiguousarray(pixels)
    how = Image.Resampling.BOX if size[0] < pixels.shape[1] else Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(plane).resize((size[1], size[0]), how)) for plane in pixels])


def _check_ratio(found: Sequence[int], size: Sequence[int], path: Path) -> None:
    if abs(found[0] * size[1] / (found[1] * size[0]) - 1) > _TILTED:
        wanted = f"sides in the ratio of {shape_text(size)}"
        raise DataError(f"{path}: expected {wanted}, found {shape_text(found)}")


def _filled(values: np.ndarray, void: np.ndarray) -> np.ndarray:
    """``[…, H, W]`` with what the nearest pixel has wherever ``void [H, W]`` holds."""
    if not void.any() or void.all():
        return values
    from scipy.ndimage import distance_transform_edt

    y, x = distance_transform_edt(void, return_distances=False, return_indices=True)  # type: ignore[misc]
    return values[..., y, x]


def _read(path: Path, mask: bool = False) -> np.ndarray:
    source = open_source(path, ReadOptions(mask=mask))
    if source.slices != 1:
        raise DataError(f"{path}: expected one picture, found {source.form}")
    return source.read(0)


def _read_array(path: Path) -> np.ndarray:
    try:
        with open(path, "rb") as handle:
            values = np.load(handle, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: expected an array of numbers, found {' '.join(str(error).split())}") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "buif" or not values.size:
        raise DataError(f"{path}: expected an array of numbers, found another kind of file")
    return values
