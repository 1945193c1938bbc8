"""Scenes beside those of new predictions: annotations alone, predictions with their readers, and saved predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field

from ambiseg._util.bands import counted
from ambiseg._util.errors import DataError
from ambiseg._util.reading import read_json
from ambiseg._util.text import shape_text
from ambiseg.data.case import Case, Cases
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.masks import MaskDistribution
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.result import Draw, Look, Options, Prediction, Strata
from ambiseg.serving.scene import PredictionScene, Scene
from ambiseg.viz.colours import class_colours, label_colours

WEIGHTS = "weights.json"
FORMATS = ("ambiseg.Prediction/1", "ambiseg.Prediction/2")


def small(labels: np.ndarray, classes: int) -> np.ndarray:
    """Class ids in the type that slices have."""
    return labels.astype(np.uint8 if classes <= 256 else np.uint16, copy=False)


def about_cases(cases: Cases) -> dict[str, Any]:
    """What a summary says of the classes of a data set: names, colours, and which are evaluated."""
    flips = [(flip.source, flip.target) for flip in cases.flips]
    colours = class_colours(cases.classes, cases.evaluated, flips)
    return {"classes": list(cases.classes), "evaluated": list(cases.evaluated), "colours": colours}


class ReadersScene(PredictionScene):
    """The annotations of one case, as masks of the readers' weights.

    >>> from ambiseg.data import Nodules
    >>> data = Nodules()
    >>> scene = ReadersScene(data[7], data)
    >>> [mask["name"] for mask in scene.summary()["masks"]], scene.slice(0)["masks"].shape[0]
    (['reader_1', 'reader_2', 'reader_3', 'reader_4'], 4)
    """

    def __init__(self, case: Case, cases: Cases) -> None:
        order = np.argsort(-case.mass, kind="stable")  # heaviest first, as other masks are
        valid = None if case.valid is None else torch.from_numpy(case.valid)[None]
        labels = torch.from_numpy(small(case.labels[order], len(cases.classes)))
        masks = MaskDistribution(labels[None], torch.from_numpy(case.mass[order])[None], valid)
        self.names = [case.readers[i] for i in order]
        source = replace(array_source(case.image, case.name), units=cases.units)
        draws = tuple(Draw(None, weight, i) for i, weight in enumerate(masks.mass[0].tolist()))
        classes, notes = tuple(cases.classes), (f"masks of {', '.join(self.names)}, in this order",)
        super().__init__(_prediction(case.name, masks, draws, classes, source, notes=notes))
        self.cases = cases

    def summary(self) -> dict[str, Any]:
        """As of a prediction, in the form ``readers``: masks have a ``name``."""
        found = super().summary()
        masks = [mask | {"name": name} for mask, name in zip(found["masks"], self.names, strict=True)]
        return found | {"form": "readers", "masks": masks, "notes": [], **about_cases(self.cases)}


def _prediction(
    name: str,
    masks: MaskDistribution,
    draws: tuple[Draw, ...],
    classes: tuple[str, ...],
    source: Source,
    strata: Strata | None = None,
    options: Options | None = None,
    **about: Any,
) -> Prediction:
    """Masks that no model made just now, in the form of those that one did."""
    soft = masks.marginal_probs(len(classes)).float()
    masks = replace(masks, marginal=soft)
    entropy, run = torch.special.entr(soft[0]).sum(0), about.pop("run", "")
    return Prediction(name, masks, draws, strata, entropy, classes, source, run, "", options or Options(), **about)


class WithReaders:
    """Another scene, with the annotations of the same image as one more array, ``readers [M, h, w]``.

    Args:
        scene: of a prediction of the case's image.
        case: the image with its annotations.
        cases: the data that it is from.
    """

    def __init__(self, scene: Scene, case: Case, cases: Cases) -> None:
        self.scene, self.case, self.slices, self.prediction = scene, case, scene.slices, scene.prediction
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


_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Mask(BaseModel):
    file: _Name
    weight: _Weight
    strata: list[Annotated[int, Field(ge=1)]] = []


class _Strata(BaseModel):
    name: str
    weights: list[_Weight]
    files: list[_Name]
    slice_weights: list[list[_Weight]] | None = None


class _Look(BaseModel):
    score: float
    unsure: float | None = None
    unlike: float | None = None
    is_unlike: bool | None = None
    needed: bool | None = None


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
    look: _Look | None = None
    notes: list[str] = []

    @property
    def draws(self) -> tuple[Draw, ...]:
        """One of each stratum of each mask, which share its weight."""
        found = []
        for i, mask in enumerate(self.masks):
            of = [k - 1 for k in mask.strata] or [None]
            found += [Draw(stratum, mask.weight / len(of), i) for stratum in of]
        return tuple(found)

    @staticmethod
    def read(folder: Path) -> Written:
        """Of a folder that ``ambiseg predict`` wrote; :class:`DataError` for any other."""
        path = folder / WEIGHTS
        found: Written = read_json(path, "a prediction", Written)
        if found.format not in FORMATS:
            raise DataError(f"{path}: expected a prediction of format {FORMATS[-1]}, found {found.format[:60]!r}")
        return found


class SavedScene(PredictionScene):
    """A saved prediction with its image, where that is still there.

    Where ``masks.npz`` is gone, the masks are read from their image files, and the marginal is theirs.
    """

    def __init__(self, folder: Path) -> None:
        about = Written.read(folder)
        image, notes = image_of(folder, about)
        self.pictured, self.notes = image is not None, [*about.notes, *notes]
        masks = _masks_of(folder, about)
        source = _placed(folder, about) if image is None else image
        samples = len(about.masks) if about.form == "standard" else None
        options = Options(samples=samples, seed=about.seed, symmetries=about.symmetries)
        more: dict[str, Any] = {"run": about.run, "windows": about.windows, "notes": tuple(self.notes)}
        more["look"] = None if about.look is None else Look(**about.look.model_dump())
        strata, classes = _strata_of(folder, about), tuple(about.classes)
        super().__init__(_prediction(about.name, masks, about.draws, classes, source, strata, options, **more), None)

    def summary(self) -> dict[str, Any]:
        """As of a new prediction, with what is known of its classes."""
        found, names = super().summary(), self.prediction.classes
        if not self.pictured:
            found |= {"range": [0.0, 1.0], "units": ""}
        evaluated = range(1, len(names)) if len(names) > 1 else range(1)
        colours = class_colours(names, evaluated) if len(names) < 3 else label_colours(len(names))
        return found | {"notes": self.notes, "evaluated": list(evaluated), "colours": colours}

    def slice(self, k: int) -> dict[str, np.ndarray]:
        """As of a new prediction; without ``image`` where it is gone."""
        found = super().slice(k)
        if not self.pictured:
            del found["image"]
        return found


def _masks_of(folder: Path, about: Written) -> MaskDistribution:
    """Those of ``masks.npz``, or of the masks' own files."""
    spatial = about.size if about.slices == 1 else (about.slices, *about.size)
    path = folder / "masks.npz"
    if not path.is_file():
        labels = torch.from_numpy(np.stack([_read_map(folder / mask.file, about) for mask in about.masks]))
        weights = torch.tensor([[mask.weight for mask in about.masks]])
        return MaskDistribution(labels[None], weights / (weights.sum() or 1))
    masks = MaskDistribution.load(path)
    if len(masks) != 1 or tuple(masks.spatial) != spatial or masks.count != len(about.masks):
        expected = f"expected {len(about.masks)} masks of {shape_text(spatial)}, as {WEIGHTS} says"
        raise DataError(f"{path}: {expected}, found {masks.count} of {shape_text(masks.spatial)}")
    try:
        masks.check_classes(len(about.classes))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return masks


def _strata_of(folder: Path, about: Written) -> Strata | None:
    """The strata with their typical masks, where all of those are there."""
    if about.strata is None or not all((folder / file).is_file() for file in about.strata.files):
        return None
    centres = np.stack([_read_map(folder / file, about) for file in about.strata.files])
    weights = torch.tensor(about.strata.weights)
    each = about.strata.slice_weights
    slices = weights.expand(about.slices, -1) if each is None else torch.tensor(each)
    if slices.shape != (about.slices, len(centres)) or len(weights) != len(centres):
        raise DataError(f"{folder / WEIGHTS}: expected weights of {len(centres)} strata for each slice, found others")
    return Strata(about.strata.name, weights, torch.from_numpy(centres), slices)


def _placed(folder: Path, about: Written) -> Source:
    """What has the form and the place of an image that is gone: a mask, which was written in the same place."""
    path = folder / about.masks[0].file
    if path.is_file():
        return replace(open_source(path, ReadOptions(mask=True)), units="")
    return array_source(np.zeros((about.slices, 1, *about.size), np.uint8), about.name)


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


def find_predictions(root: Path) -> Sequence[Path]:
    """The folders below ``root`` that ``ambiseg predict`` wrote, ``root`` itself among them, in order."""
    found = []
    for path in sorted(root.rglob(WEIGHTS)):
        content = read_json(path, "a prediction", Any)
        if isinstance(content, dict) and content.get("format") in FORMATS:
            found.append(path.parent)
    return found
