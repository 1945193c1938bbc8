"""Scenes beside those of new predictions: annotations alone, predictions with their readers, and saved predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from ambiseg._util.bands import counted
from ambiseg._util.errors import DataError
from ambiseg._util.reading import read_json
from ambiseg._util.text import shape_text
from ambiseg.data.case import Case, Cases
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.masks import MaskDistribution
from ambiseg.serving.scene import Scene, spacing
from ambiseg.viz.colours import class_colours, label_colours

WEIGHTS = "weights.json"
FORMATS = ("ambiseg.Prediction/1", "ambiseg.Prediction/2")


def of_byte(shares: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 as 0 to 255.

    >>> of_byte(np.array([0, 0.5, 1]))
    array([  0, 128, 255], dtype=uint8)
    """
    return np.clip(np.round(shares * 255), 0, 255).astype(np.uint8)


def shares_of(labels: np.ndarray, weights: np.ndarray, classes: int) -> np.ndarray:
    """The probability of each class at each pixel,  p[c] = Σ_m weights[m] · [labels[m] = c]:  ``[C, *spatial]``.

    >>> shares_of(np.array([[[0, 1]], [[1, 1]]]), np.array([0.25, 0.75]), 2)[1]
    array([[0.75, 1.  ]])
    """
    found = np.zeros((classes, *labels.shape[1:]))
    for one, weight in zip(labels, weights, strict=True):
        for c in np.flatnonzero(counted(one, classes)):
            found[c] += weight * (one == c)
    return found


def entropy_of(shares: np.ndarray) -> np.ndarray:
    """Of class probabilities ``[C, *spatial]``, as a share of its largest value log C: ``[*spatial]``.

    >>> entropy_of(np.array([[[0.5, 1.0]], [[0.5, 0.0]]]))
    array([[1., 0.]])
    """
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.abs((shares * logs).sum(0)) / math.log(max(len(shares), 2))


def small(labels: np.ndarray, classes: int) -> np.ndarray:
    """Class ids in the type that slices have."""
    return labels.astype(np.uint8 if classes <= 256 else np.uint16, copy=False)


def about_cases(cases: Cases) -> dict[str, Any]:
    """What a summary says of the classes of a data set: names, colours, and which are evaluated."""
    flips = [(flip.source, flip.target) for flip in cases.flips]
    colours = class_colours(cases.classes, cases.evaluated, flips)
    return {"classes": list(cases.classes), "evaluated": list(cases.evaluated), "colours": colours}


class ReadersScene:
    """The annotations of one case, as masks of the readers' weights.

    >>> from ambiseg.data import Nodules
    >>> data = Nodules()
    >>> scene = ReadersScene(data[7], data)
    >>> [mask["name"] for mask in scene.summary()["masks"]], scene.slice(0)["masks"].shape[0]
    (['reader_1', 'reader_2', 'reader_3', 'reader_4'], 4)
    """

    slices = 1

    def __init__(self, case: Case, cases: Cases) -> None:
        self.case, self.classes = case, len(cases.classes)
        self.order = np.argsort(-case.mass, kind="stable")  # heaviest first, as other masks are
        self.labels = case.labels[self.order]
        self.nbytes = case.image.nbytes + self.labels.nbytes
        weights = case.mass[self.order]
        masks = [
            {"weight": float(weight), "strata": [], "pixels": counted(one, self.classes).tolist(), "name": name}
            for one, weight, name in zip(self.labels, weights, self.names, strict=True)
        ]
        self._summary = {
            "name": case.name,
            "model": None,
            "form": "readers",
            "size": list(case.size),
            "slices": 1,
            "spacing": None,
            "units": cases.units,
            "range": _range(case.image),
            "strata": None,
            "masks": masks,
            "entropy_max": math.log(max(self.classes, 2)),
            "notes": [],
            **about_cases(cases),
        }

    @property
    def names(self) -> list[str]:
        """Of the readers, in the order of the masks."""
        return [self.case.readers[i] for i in self.order]

    def summary(self) -> dict[str, Any]:
        """As of a prediction, in the form ``readers``: masks have a ``name``."""
        return self._summary

    def slice(self, k: int) -> dict[str, np.ndarray]:
        """The arrays of the only slice."""
        shares = shares_of(self.labels, self.case.mass[self.order], self.classes)
        return {
            "image": self.case.image.astype(np.float32),
            "masks": small(self.labels, self.classes),
            "marginal": of_byte(shares),
            "entropy": of_byte(entropy_of(shares)),
        }

    def header(self, k: int) -> dict[str, Any]:
        """Nothing."""
        return {}


class WithReaders:
    """Another scene, with the annotations of the same image as one more array, ``readers [M, h, w]``.

    Args:
        scene: of a prediction of the case's image.
        case: the image with its annotations.
        cases: the data that it is from.
    """

    def __init__(self, scene: Scene, case: Case, cases: Cases) -> None:
        self.scene, self.case, self.slices = scene, case, scene.slices
        self.labels = small(case.labels, len(cases.classes))
        self.nbytes = scene.nbytes + self.labels.nbytes
        readers = [
            {"name": name, "pixels": counted(one, len(cases.classes)).tolist(), "weight": float(weight)}
            for name, one, weight in zip(case.readers, self.labels, case.mass, strict=True)
        ]
        self._summary = {**scene.summary(), "readers": readers, **about_cases(cases)}
        self._summary["units"] = self._summary["units"] or cases.units

    def summary(self) -> dict[str, Any]:
        """That of the prediction, and ``readers``."""
        return self._summary

    def slice(self, k: int) -> dict[str, np.ndarray]:
        """The arrays of the prediction, and ``readers``."""
        return {**self.scene.slice(k), "readers": self.labels}

    def header(self, k: int) -> dict[str, Any]:
        """That of the prediction, and the readers' names."""
        return {**self.scene.header(k), "readers": list(self.case.readers)}


_Name = Annotated[str, Field(pattern=r"^[^/\\]*[^./\\][^/\\]*$", max_length=1000)]  # a file in the same folder


class _Mask(BaseModel):
    file: _Name
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    strata: list[Annotated[int, Field(ge=1)]] = []


class _Strata(BaseModel):
    name: str
    weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    files: list[_Name]


class Written(BaseModel):
    """``weights.json`` of a saved prediction."""

    format: str
    name: str
    image: str
    size: tuple[int, int]
    slices: Annotated[int, Field(ge=1)]
    run: str = ""
    form: str = "standard"
    seed: int = 0
    symmetries: int = 1
    windows: int = 1
    classes: Annotated[list[str], Field(min_length=1, max_length=1 << 16)]
    strata: _Strata | None = None
    masks: Annotated[list[_Mask], Field(min_length=1)]
    notes: list[str] = []

    @staticmethod
    def read(folder: Path) -> Written:
        """Of a folder that ``ambiseg predict`` wrote; :class:`DataError` for any other."""
        path = folder / WEIGHTS
        found: Written = read_json(path, "a prediction", Written)
        if found.format not in FORMATS:
            raise DataError(f"{path}: expected a prediction of format {FORMATS[-1]}, found {found.format[:60]!r}")
        return found


def saved_scene(folder: Path) -> Scene:
    """A saved prediction with its image, where that is still there.

    Where ``masks.npz`` is gone, the masks are read from their image files, and the marginal is theirs.
    """
    about = Written.read(folder)
    spatial = about.size if about.slices == 1 else (about.slices, *about.size)
    distribution = folder / "masks.npz"
    if distribution.is_file():
        masks = MaskDistribution.load(distribution)
        if len(masks) != 1 or tuple(masks.spatial) != spatial or masks.count != len(about.masks):
            expected = f"expected {len(about.masks)} masks of {shape_text(spatial)}, as {WEIGHTS} says"
            raise DataError(f"{distribution}: {expected}, found {masks.count} of {shape_text(masks.spatial)}")
        try:
            masks.check_classes(len(about.classes))
        except ValueError as error:
            raise DataError(f"{distribution}: {error}") from None
        labels = masks.labels[0].numpy()
        soft = None if masks.marginal is None else masks.marginal[0].clamp(0, 1).double().numpy()
    else:
        labels, soft = np.stack([_read_map(folder / mask.file, about) for mask in about.masks]), None
    centres = None
    if about.strata is not None and all((folder / file).is_file() for file in about.strata.files):
        centres = np.stack([_read_map(folder / file, about) for file in about.strata.files])
    return _Saved(folder, about, labels, soft, centres)


class _Saved:
    def __init__(
        self, folder: Path, about: Written, labels: np.ndarray, soft: np.ndarray | None, centres: np.ndarray | None
    ) -> None:
        classes = len(about.classes)
        self.slices, self.classes, self._labels, self._centres = about.slices, classes, labels, centres
        weights = np.array([mask.weight for mask in about.masks])
        self._soft = shares_of(labels, weights / (weights.sum() or 1), classes) if soft is None else soft
        self.source, notes = image_of(folder, about)
        parts = [labels, self._soft] + ([] if centres is None else [centres])
        self.nbytes = sum(part.nbytes for part in parts) + (0 if self.source is None else self.source.nbytes)
        masks = [
            {"weight": mask.weight, "strata": mask.strata, "pixels": counted(one, classes).tolist()}
            for mask, one in zip(about.masks, labels, strict=True)
        ]
        ends = [_range(self.source.read(k)) for k in range(self.slices)] if self.source is not None else [[0.0, 1.0]]
        placed = self._placed(folder, about)
        strata = about.strata if centres is not None else None
        self._summary = {
            "name": about.name,
            "model": None,
            "form": about.form,
            "size": list(about.size),
            "slices": about.slices,
            "spacing": None if placed is None else spacing(placed),
            "units": "" if self.source is None else self.source.units,
            "range": [min(low for low, _ in ends), max(high for _, high in ends)],
            "strata": None if strata is None else {"name": strata.name, "weights": strata.weights},
            "masks": masks,
            "entropy_max": math.log(max(classes, 2)),
            "notes": [*about.notes, *notes],
            "seed": about.seed,
            "symmetries": about.symmetries,
            "windows": about.windows,
            "classes": about.classes,
            "evaluated": list(range(1, classes)) or [0],
            "colours": class_colours(about.classes, range(1, classes)) if classes < 3 else label_colours(classes),
        }

    def _placed(self, folder: Path, about: Written) -> Source | None:
        """What says how large pixels are: the image, or a mask, which was written in the same place."""
        if self.source is not None:
            return self.source
        path = folder / about.masks[0].file
        return open_source(path, ReadOptions(mask=True)) if path.is_file() else None

    def summary(self) -> dict[str, Any]:
        return self._summary

    def slice(self, k: int) -> dict[str, np.ndarray]:
        def of(maps: np.ndarray) -> np.ndarray:
            return maps if self.slices == 1 else maps[:, k]

        soft = of(self._soft)
        arrays = {} if self.source is None else {"image": self.source.read(k).astype(np.float32)}
        arrays["masks"] = small(of(self._labels), self.classes)
        if self._centres is not None:
            arrays["centres"] = small(of(self._centres), self.classes)
        return arrays | {"marginal": of_byte(soft), "entropy": of_byte(entropy_of(soft))}

    def header(self, k: int) -> dict[str, Any]:
        return {}


def _read_map(path: Path, about: Written) -> np.ndarray:
    """The class ids of a mask's file, ``[H, W]`` or ``[D, H, W]``."""
    source = open_source(path, ReadOptions(mask=True))
    if (source.size, source.slices) != (tuple(about.size), about.slices):
        wanted = shape_text(about.size) if about.slices == 1 else f"{about.slices} slices of {shape_text(about.size)}"
        raise DataError(f"{path}: expected a mask of {wanted}, as {WEIGHTS} says, found {source.form}")
    found = np.stack([source.read(k)[0] for k in range(source.slices)]).astype(np.int64)
    if found.min() < 0 or found.max() >= len(about.classes):
        raise DataError(f"{path}: expected class ids below {len(about.classes)}, found {found.min()} to {found.max()}")
    return small(found if about.slices > 1 else found[0], len(about.classes))


def image_of(folder: Path, about: Written) -> tuple[Source | None, list[str]]:
    """The image of a saved prediction, by the path that it was predicted from; or why there is none."""
    given = Path(about.image)
    tried = [given] if given.is_absolute() else [given, *(above / given for above in folder.resolve().parents[:3])]
    path = next((path for path in tried if path.exists()), None)
    if path is None:
        return None, [f"its image {about.image} is not there any more: masks are shown on grey"]
    found: Source | None = None
    problem = f"expected {shape_text(about.size)}"
    for axis in (2, 0, 1):  # NIfTI: weights.json does not say along which the volume was cut
        try:
            source = open_source(path, ReadOptions(axis=axis))
        except DataError as error:
            problem = str(error)
            break
        if (source.size, source.slices) == (tuple(about.size), about.slices):
            found = source
            break
        problem = f"expected {shape_text(about.size)}, found {source.form}"
    return found, [] if found is not None else [f"its image is not shown: {problem}"]


def _range(pixels: np.ndarray) -> list[float]:
    """Smallest and largest finite value."""
    finite = pixels[np.isfinite(pixels)] if pixels.dtype.kind == "f" else pixels
    return [float(finite.min()), float(finite.max())] if finite.size else [0.0, 1.0]


def find_predictions(root: Path) -> Sequence[Path]:
    """The folders below ``root`` that ``ambiseg predict`` wrote, ``root`` itself among them, in order."""
    found = []
    for path in sorted(root.rglob(WEIGHTS)):
        content = read_json(path, "a prediction", Any)
        if isinstance(content, dict) and content.get("format") in FORMATS:
            found.append(path.parent)
    return found
