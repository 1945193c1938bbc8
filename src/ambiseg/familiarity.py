"""How unlike the training images a new image is, and how much more disagreement it shows than usual.

``ambiseg look RUN`` writes ``look.npz`` into the folder of a run: mean, scales and 64 principal axes of the statistics
of :mod:`ambiseg.nn.statistics` over training images, and distances and scores of validation images, which were not
trained on. The distance of an image is that of Mahalanobis, with one variance for all directions beyond the axes:

    d² = Σ_i z_i² / λ_i + ‖z − Σ_i z_i e_i‖² / λ_rest,     z_i = e_i · (x − mean) / scale
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.files import atomic_write
from ambiseg._util.npz import open_npz
from ambiseg._util.progress import reporting
from ambiseg._util.reading import Unreadable, open_regular
from ambiseg.config import Config
from ambiseg.data.config import NEEDS_ROOT
from ambiseg.data.loader import seed_of
from ambiseg.data.values import some_of
from ambiseg.decisions.looking import area_disagreement, expected_disagreement
from ambiseg.methods.base import Method
from ambiseg.nn.statistics import CHANNELS, STATISTICS, Collected, input_statistics, watched_layers, watching
from ambiseg.runs import Run, Which, is_shipped, open_run
from ambiseg.settings import validate

if TYPE_CHECKING:
    from ambiseg.data.module import DataModule

FILE = "look.npz"
_FORMAT = "ambiseg.Look/1"
FEWEST = 20  # images of each part, without which there is nothing to compare with
_AXES, _PIXELS, _SAMPLES = 64, 1 << 25, 16
_AT_ONCE = 1 << 16  # pixels of a batch
_UNLIKE, _OFTEN = (
    0.99,
    0.8,
)  # shares of the validation images: beyond the first an image is odd, beyond the other unsure
_Score = Literal["pairs", "areas"]


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What images of the training are like, and how validation images compare.

    Attributes:
        layers: whose maps are looked at.
        mean, scale: of each of D statistics, ``[D]``.
        axes, variances: principal axes of the scaled statistics, ``[r, D]``, and the variance along each, ``[r]``.
        rest: the variance along all other directions.
        distances: of validation images, ascending.
        scores: their expected disagreement, ascending.
        score: ``pairs`` or ``areas``: which score that is.
        weights: hash of the weights that it belongs to.
        images: how many training images it is made of.
    """

    layers: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray
    axes: np.ndarray
    variances: np.ndarray
    rest: float
    distances: np.ndarray
    scores: np.ndarray
    score: _Score
    weights: str
    images: int

    @staticmethod
    def of(
        train: np.ndarray, others: np.ndarray, scores: np.ndarray, layers: tuple[str, ...], score: _Score, weights: str
    ) -> Familiarity:
        """From statistics ``[n, D]`` of training images, and those and the scores of images not trained on."""
        train = train.astype(np.float64)
        mean, scale = train.mean(0), train.std(0)
        scale = np.where(scale > 1e-6 * np.abs(mean) + 1e-9, scale, 1.0)
        z = (train - mean) / scale
        _, singular, axes = np.linalg.svd(z, full_matrices=False)
        variances = np.maximum(singular**2 / len(z), 1e-6)
        count = max(1, min(_AXES, len(z) // 8, len(variances)))
        beyond = z.shape[1] - count
        rest = max(float((singular[count:] ** 2).sum()) / len(z) / beyond, 1e-3) if beyond else 1.0
        axes = axes[:count].astype(np.float16)  # as they are in the file
        numbers = {"mean": mean, "scale": scale, "axes": axes, "variances": variances[:count]}
        plain = {name: value.astype(np.float32) for name, value in numbers.items()}
        made = Familiarity(layers, **plain, rest=rest, distances=np.zeros(0), scores=np.sort(scores),
                           score=score, weights=weights, images=len(train))  # fmt: skip
        object.__setattr__(made, "distances", np.sort(made.distance(others)))
        return made

    def distance(self, statistics: np.ndarray) -> np.ndarray:
        """d of statistics ``[n, D]``, ``[n]``."""
        z = (np.asarray(statistics, np.float64) - self.mean) / self.scale
        along = z @ self.axes.T.astype(np.float64)
        beyond = np.maximum((z**2).sum(1) - (along**2).sum(1), 0) / self.rest
        return np.sqrt((along**2 / self.variances).sum(1) + beyond)

    def unlike(self, distance: float) -> float:
        """Share of the validation images that are nearer to the training images than an image at this distance."""
        return _rank(self.distances, distance)

    def unsure(self, score: float) -> float:
        """Share of the validation images of which less disagreement is expected."""
        return _rank(self.scores, score)

    def is_unlike(self, distance: float) -> bool:
        """Whether an image is farther from the training images than 99 % of the validation images."""
        return distance > float(np.quantile(self.distances, _UNLIKE))

    def is_unsure(self, score: float) -> bool:
        """Whether more disagreement is expected than in 80 % of the validation images."""
        return score > float(np.quantile(self.scores, _OFTEN))

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """An ``.npz`` of plain arrays, which appears whole or not at all."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays["layers"] = np.array(json.dumps(self.layers))
        arrays["axes"] = self.axes.astype(np.float16)
        with atomic_write(path) as file:
            np.savez_compressed(file, allow_pickle=False, format=np.array(_FORMAT), **arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Familiarity:
        """Read what :meth:`save` wrote; :class:`DataError` for anything else. Nothing in the file is executed."""
        names = [field.name for field in fields(Familiarity)]
        try:
            with open_regular(path) as handle, open_npz(handle) as file:
                found = str(file.read("format")) if "format" in file.names and not file.header("format").shape else ""
                if found != _FORMAT or {*file.names} != {*names, "format"}:
                    raise ValueError(f"expected an npz of {_FORMAT}, found another kind of file")
                arrays: dict[str, Any] = {name: file.read(name) for name in names}
            made = Familiarity(**{
                **{name: np.asarray(arrays[name], np.float32) for name in ("mean", "scale", "axes", "variances")},
                **{name: np.asarray(arrays[name], np.float64) for name in ("distances", "scores")},
                "layers": tuple(str(one) for one in json.loads(str(arrays["layers"]))),
                "rest": float(arrays["rest"]), "score": str(arrays["score"]), "weights": str(arrays["weights"]),
                "images": int(arrays["images"]),
            })  # fmt: skip
            made._check()
            return made
        except (FileNotFoundError, Unreadable):
            raise
        except Exception as error:  # a damaged archive fails in more ways than can be listed
            said = " ".join(str(error).split())
            raise DataError(f"{os.fspath(path)}: cannot be read as what `ambiseg look` wrote: {said}") from None

    def _check(self) -> None:
        r, D = self.axes.shape
        shapes = {"mean": (D,), "scale": (D,), "variances": (r,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"expected {name} of shape {list(shape)}, found {list(getattr(self, name).shape)}")
        numbers = [self.mean, self.scale, self.axes, self.variances, self.distances, self.scores, np.array(self.rest)]
        if not all(np.isfinite(part).all() for part in numbers) or self.distances.ndim != 1 or self.scores.ndim != 1:
            raise ValueError("expected finite numbers, found others")
        if not (self.scale > 0).all() or not (self.variances > 0).all() or self.rest <= 0:
            raise ValueError("expected scales and variances above 0, found others")
        if not len(self.distances) or not len(self.scores) or self.score not in ("pairs", "areas"):
            raise ValueError("expected distances and scores of validation images, found none")


def _rank(ascending: np.ndarray, value: float) -> float:
    return float(np.searchsorted(ascending, value) / len(ascending))


def joined(images: Tensor, maps: Tensor | None) -> Tensor:
    """Statistics of the input, and those of the maps where there are any."""
    own = input_statistics(images).cpu()
    return own if maps is None else torch.cat([own, maps.cpu()], 1)


def statistics_or_none(familiarity: Familiarity, images: Tensor, seen: Collected) -> np.ndarray | None:
    """Those of images whose maps were collected, ``[B, D]``; ``None`` if a layer did not run."""
    maps = seen.statistics()
    if familiarity.layers and maps is None:
        return None
    return joined(images, maps).double().numpy()


def fits(familiarity: Familiarity, method: Method, channels: int) -> bool:
    """Whether it was made of this network: the layers are there, and have as many channels."""
    modules, count = dict(method.named_modules()), STATISTICS * channels
    for name in familiarity.layers:
        if not isinstance(conv := modules.get(name), nn.Conv2d):
            return False
        count += 2 * min(conv.out_channels, CHANNELS)
    return count == len(familiarity.mean)


def saved_familiarity(run: Run, which: Which = "best") -> Familiarity | None:
    """That of a run; ``None`` if there is none, or if the weights have changed since."""
    path = run.folder / FILE
    if not path.is_file():
        return None
    found = Familiarity.load(path)
    return found if found.weights == run.digest(which) else None


def look(
    run: str | os.PathLike[str] | Run,
    which: Which = "best",
    *,
    data: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Familiarity:
    """Prepare a run to say when a person must look at an image, and write ``look.npz`` into its folder.

    At most 512 images of the training part and as many of the validation part go through the network, fewer where they
    are large. Predictions of the run then say how much disagreement is expected beside that of validation images, and
    warn of images unlike those of the training.

    Args:
        run: the folder of a run.
        which: weights of the ``best`` epoch or of the ``last``.
        data: settings of the run's data to change, such as ``{"root": …}`` for data that have moved.
        out: the file; ``None``: in the run's folder.
        quiet: no progress.
    """
    opened = run if isinstance(run, Run) else open_run(run)
    if out is None and not isinstance(run, Run) and is_shipped(run):
        raise ConfigError(f"{os.fspath(run)}: expected the folder of a run to write into, found a model of the package")
    made = look_at(opened, data_of(opened, data, quiet), which, quiet=quiet)
    made.save(opened.folder / FILE if out is None else Path(out))
    return made


def look_at(
    run: Run,
    module: DataModule,
    which: Which = "best",
    *,
    most: int = 512,
    device: torch.device | str = "cpu",
    quiet: bool = False,
) -> Familiarity:
    """The same with the data of the run at hand; nothing is written.

    Args:
        run: whose weights are taken.
        module: the run's data, with its split.
        which: weights.
        most: images of each part, at most.
        device: that the network runs on.
        quiet: no progress.
    """
    evaluated, method = run.card.evaluated, run.model(which, device).method
    whole = [module.indices(part) if part in module.split.parts else [] for part in ("train", "val")]
    if min(map(len, whole)) < FEWEST:
        found = f"{len(whole[0])} and {len(whole[1])}"
        raise ConfigError(f"{run.folder}: expected at least {FEWEST} images of training and validation, found {found}")
    train, others = (_some(module, indices, most) for indices in whole)
    rows, scores = list[np.ndarray](), list[Tensor]()
    with reporting("looking at images", quiet) as report:
        first = module.batch_of(train[0]).to(device)
        layers = () if method.incoherent else watched_layers(method, first.images[..., :64, :64])
        for indices in [*_batches(module, train), *_batches(module, others)]:
            batch = module.batch_of(*indices).to(device)
            with watching(method, layers) as seen:
                predictive = method.predict_whole(batch.images)
            if len(rows) >= len(train):
                generator = torch.Generator(device).manual_seed(seed_of(0, "look", batch.names[0]))
                masks = predictive.sample(_SAMPLES, generator)
                both = expected_disagreement(masks, evaluated), area_disagreement(masks, evaluated)
                scores.append(torch.stack(both).cpu())
            rows.extend(joined(batch.images, seen.statistics()).double().numpy())
            report(len(rows), len(train) + len(others))
    table = np.stack(rows)
    pairs, areas = torch.cat(scores, 1).numpy()
    score: _Score = "pairs" if pairs.any() else "areas"
    chosen = pairs if score == "pairs" else areas
    return Familiarity.of(table[: len(train)], table[len(train) :], chosen, layers, score, run.digest(which))


def data_of(run: Run, data: Mapping[str, Any] | None, quiet: bool) -> DataModule:
    """The data that a run was made with, with its split; ``data`` are settings to change, such as ``root``."""
    require("train")
    from ambiseg.data.module import DataModule

    card = run.card
    changed = {**vars(run.config.data), "intensity": card.intensity, **(data or {})}
    config = validate(Config, {**dict(run.config), "data": changed}).data
    if config.name in NEEDS_ROOT and config.root is None:
        raise ConfigError(f"{run.folder}: expected the place of its data ({card.title}), found none; give --root")
    with reporting("preparing data", quiet) as progress:
        module = DataModule(config, split=run.split, progress=progress)
        try:
            module.prepare_data()
            module.setup()
            run.split.verify(module.cases)
        except DataError as error:
            raise ConfigError(f"{run.folder}: the data must be those that the run began with: {error}") from None
    return module


def _some(module: DataModule, indices: list[int], most: int) -> list[int]:
    """Images of a part, fewer where they are large."""
    height, width = module.eval_window.size or module.cases.size_of(indices[0])
    return some_of(indices, min(most, max(FEWEST, _PIXELS // (height * width))))


def _batches(module: DataModule, indices: list[int]) -> Iterator[list[int]]:
    """Images that lie side by side and are of one size, so many that a network's calls do not count."""
    size = module.eval_window.size
    for (height, width), group in groupby(indices, lambda index: size or module.cases.size_of(index)):
        alike, count = list(group), max(1, _AT_ONCE // (height * width))
        yield from (alike[start : start + count] for start in range(0, len(alike), count))
