"""What the service asks its worker for, and what comes back: plain values and arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ambiseg.io.source import Source
from ambiseg.io.write import geometry
from ambiseg.masks import MaskDistribution
from ambiseg.prediction.result import Draw, Options, Prediction, Strata

_APART = ("name", "masks", "draws", "strata", "entropy", "source")  # what of a prediction has a form of its own here


@dataclass(frozen=True)
class Files:
    """An uploaded image in a folder of the service's own.

    Args:
        folder: that holds nothing else.
        names: of each file there, what the client called it; several are the slices of one DICOM series.
    """

    folder: str
    names: Mapping[str, str]

    @property
    def path(self) -> Path:
        """What is opened: the file, or the folder of a series."""
        return Path(self.folder) if len(self.names) > 1 else Path(self.folder, next(iter(self.names)))

    def plain(self, message: str, name: str) -> str:
        """A message in which files are called as the client called them."""
        for ours, theirs in self.names.items():
            message = message.replace(str(Path(self.folder, ours)), theirs)
        return message.replace(self.folder, name)


@dataclass(frozen=True, eq=False)
class Pixels:
    """A source that was read: every pixel, and what its file said of them.

    Args:
        pixels: ``[D, C, H, W]``.
        about: the other fields of the source; ``header`` is what writers need of a file that is gone.
    """

    pixels: np.ndarray
    about: dict[str, Any]

    @staticmethod
    def of(source: Source) -> Pixels:
        """Read all slices."""
        pixels = np.empty((source.slices, source.channels, *source.size), source.dtype)
        for k in range(source.slices):
            pixels[k] = source.read(k)
        about = {one.name: getattr(source, one.name) for one in fields(source) if one.name not in ("read", "geometry")}
        return Pixels(pixels, about | {"header": geometry(source)})

    def source(self, name: str = "") -> Source:
        """As a source, whose file need not be there any more.

        Args:
            name: instead of its path.
        """
        about: dict[str, Any] = {**self.about, "read": self.pixels.__getitem__}
        if name:
            about["path"] = Path(name)
        return Source(**about)


@dataclass(frozen=True)
class Task:
    """One image to predict."""

    number: int
    model: int
    name: str
    options: Options
    image: Files | Pixels


@dataclass(frozen=True, eq=False)
class Found:
    """A prediction without its pixels, in arrays of NumPy."""

    name: str
    labels: np.ndarray
    weights: np.ndarray
    marginal: np.ndarray
    entropy: np.ndarray
    draws: tuple[tuple[int | None, float, int], ...]
    strata: tuple[str, np.ndarray, np.ndarray, np.ndarray] | None
    about: dict[str, Any]

    @staticmethod
    def of(prediction: Prediction) -> Found:
        """What is needed to make it again beside its source."""
        masks, strata = prediction.masks, prediction.strata
        assert masks.weights is not None
        assert masks.marginal is not None
        arrays = masks.labels[0], masks.weights[0], masks.marginal[0], prediction.entropy
        parts = None
        if strata is not None:
            parts = strata.name, *(x.cpu().numpy() for x in (strata.weights, strata.centres, strata.slice_weights))
        about = {one.name: getattr(prediction, one.name) for one in fields(prediction) if one.name not in _APART}
        draws = tuple(map(tuple, prediction.draws))
        return Found(prediction.name, *(x.cpu().numpy() for x in arrays), draws, parts, about)  # type: ignore[arg-type]

    def prediction(self, source: Source) -> Prediction:
        """The prediction of ``source``."""
        labels, weights, marginal, entropy = map(
            torch.from_numpy, (self.labels, self.weights, self.marginal, self.entropy)
        )
        strata = None
        if self.strata is not None:
            name, *arrays = self.strata
            strata = Strata(name, *map(torch.from_numpy, arrays))
        return Prediction(
            self.name,
            MaskDistribution(labels[None], weights[None], marginal=marginal[None]),
            tuple(Draw(*draw) for draw in self.draws),
            strata,
            entropy,
            source=source,
            **self.about,
        )


def with_header(source: Source, folder: Path) -> Source:
    """The source beside a file of its header in ``folder``, for writers that look for its geometry: its own path is
    only what a client called it."""
    suffix = {"NIfTI": ".nii", "TIFF": ".tif"}.get(source.format, "")
    place = Path(tempfile.mkdtemp(dir=folder)) / f"header{suffix}"
    if source.header:
        place.write_bytes(source.header)
    return replace(source, geometry=place)
