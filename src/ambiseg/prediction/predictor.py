"""From one image or one volume to its weighted masks, with any method."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.io.formats import stem_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Noise, Predictive, Stratified, evaluation
from ambiseg.methods.drawing import draw_noise
from ambiseg.nn.windows import Windows, plan
from ambiseg.prediction.inputs import read_pixels
from ambiseg.prediction.result import Draw, Options, Prediction, Strata
from ambiseg.runs import Run, TrainedModel, Which, open_run

_KEPT = 1 << 30  # bytes of features of a volume's slices that are kept between the two passes over them
_FLAT = 0.02  # of the network's input, whose values span a few units: a smaller range shows no structure
_FLAT_NOTE = (
    "expected values in the units of the training data, found ones that the model's intensity maps to one value: "
    "the image is blank, or its values have another range"
)
_PER_STRATUM, _SAMPLES = 4, 16  # masks that are drawn unless the options say how many

Progress = Callable[[int, int], None]


class Predictor:
    """A trained model, ready for images.

    Args:
        run, which, device: see :func:`ambiseg.predict`.
        options: see :class:`Options`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Run | TrainedModel,
        options: Options | None = None,
        which: Which = "best",
        device: torch.device | str | None = None,
    ) -> None:
        self.options = options or Options()
        trained_on: Mapping[str, Any] = {}
        if isinstance(run, TrainedModel):
            model, self.run = run if device is None else run.to(_device(device)), run.run
        else:
            opened = run if isinstance(run, Run) else open_run(run)
            model = opened.model(which, _device("cpu" if device is None else device))
            self.run = str(opened.folder) if isinstance(run, Run) else os.fspath(run)
            trained_on = opened.config.data.options
        self.method, self.card, self.which, self.device = model.method, model.card, model.which, model.device
        if self.options.per_stratum is not None and not self.method.stratum:
            message = f"expected None for {type(self.method).__name__}, which has no strata"
            raise ConfigError(f"per_stratum: {message}, found {self.options.per_stratum}; set samples instead")
        # Slices are cut as in training: along another axis they look different.
        axis = trained_on.get("axis", 2) if self.options.axis is None else self.options.axis
        self._reading = ReadOptions(axes=self.options.axes or trained_on.get("axes"), axis=axis)
        self.convert = self.options.convert or trained_on.get("channels") == self.card.channels

    @torch.no_grad()
    def __call__(
        self, image: str | os.PathLike[str] | Source, name: str | None = None, progress: Progress | None = None
    ) -> Prediction:
        """The masks of an image, or of a volume slice by slice.

            weights = 1/D Σ_d weights(slice d),     noise ~ predictive(weights),     mask(slice d) = render(noise)

        The noise is drawn once, so all slices of a mask belong to the same draw.

        Args:
            image: a file, a folder of DICOM slices, or what :func:`~ambiseg.prediction.inputs.array_source` makes.
            name: None is that of the file.
            progress: called with the number of images or windows that went through the network, and how many will.
        """
        source = image if isinstance(image, Source) else open_source(Path(image), self._reading)
        windows = plan(source.size, self.method.multiple, self.options.window, self.options.overlap)
        if self.method.incoherent and (windows or source.slices > 1):
            found = f"{source.form} in windows (window=0 takes it whole)" if windows else source.form
            raise DataError(f"{source.path}: expected one image taken whole, found {found}: {self.method.incoherent}")
        with evaluation(self.method), _fits(source):
            return self._predict(_Slices(self, source, windows, progress), name or stem_of(source.path))

    def _predict(self, slices: _Slices, name: str) -> Prediction:
        first, weights = slices.weighted()
        noise = self._noise(first)
        centre = first.centre_noise() if isinstance(first, Stratified) else None
        slices.expect(first.passes(noise.count) + (first.passes(centre.count) if centre else 0))
        del first  # of a large volume, its features are computed again
        labels = marginal = centres = entropy = torch.empty(0)
        for k in range(slices.source.slices):
            predictive = slices.take(k)
            drawn = predictive.render(noise)
            soft = (drawn.marginal_probs(self.method.classes) if drawn.marginal is None else drawn.marginal)[0]
            labels, marginal = slices.put(labels, k, drawn.labels[0]), slices.put(marginal, k, soft)
            entropy = slices.put(entropy, k, torch.special.entr(soft.clamp_min(0)).sum(0))
            del drawn, soft
            if centre is not None:
                centres = slices.put(centres, k, predictive.render(centre).labels[0])
            del predictive
        mass = noise.mass[0].tolist()
        order, merged, groups = _heaviest_first(labels, mass, self.options.merge)
        masks = MaskDistribution(
            labels[order][None], torch.tensor([merged], dtype=torch.float32), marginal=marginal[None]
        )
        drawn_from = [None] * noise.count if noise.strata is None else noise.strata[0].tolist()
        draws = tuple(map(Draw, drawn_from, mass, groups))
        word = self.method.stratum or "stratum"
        strata = None if weights is None else Strata(word, weights.mean(0), centres, weights)
        made_with = self.card.classes, slices.source, self.run, self.which, self.options
        return Prediction(name, masks, draws, strata, entropy, *made_with, slices.tiles, (_FLAT_NOTE,) * slices.flat)

    def _noise(self, predictive: Predictive) -> Noise:
        options, generator = self.options, torch.Generator(self.device).manual_seed(self.options.seed)
        if isinstance(predictive, Stratified) and options.samples is None:
            draws = (options.per_stratum or _PER_STRATUM) * predictive.weights.shape[1]
            return draw_noise(predictive, "compact", draws, generator)
        return draw_noise(predictive, "standard", options.samples or _SAMPLES, generator)


class _Slices:
    """The predictive distributions of an image's slices.

    Attributes:
        tiles: windows per slice; 1 is whole.
        flat: whether all slices so far are blank as the network sees them.
    """

    def __init__(self, predictor: Predictor, source: Source, windows: Windows | None, progress: Progress | None):
        self.predictor, self.source, self.windows, self.progress = predictor, source, windows, progress
        self.tiles = len(windows[0]) * len(windows[1]) if windows else 1
        self.flat = True
        self._kept: dict[int, Predictive] = {}
        self._done, self._total, self._steps = 0, source.slices * self.tiles, self.tiles

    def weighted(self) -> tuple[Predictive, Tensor | None]:
        """The first slice, with the mean weights of all of them; and the weights ``[D, K]`` of each, if any."""
        first, D = self._compute(0), self.source.slices
        self._steps = self._done
        if not isinstance(first, Stratified):
            self._kept[0] = first
            return first, None
        keeps, weights = D == 1 or D * held_bytes(first) <= _KEPT, []
        for k in range(D):
            predictive: Any = self._compute(k) if k else first
            weights.append(predictive.weights)
            if keeps:
                self._kept[k] = predictive
            del predictive  # before the next one takes its memory
        found = torch.cat(weights)
        return first.reweighted(found.mean(0, keepdim=True)), found.cpu()

    def expect(self, passes: int) -> None:
        """Count what is left to do: slices that were not kept, and passes over all windows to render each slice."""
        slices = self.source.slices
        self._total = self._done + (slices - len(self._kept)) * self._steps + slices * passes * self.tiles

    def take(self, k: int) -> Predictive:
        """A slice, computed again unless it was kept; asked for once."""
        return self._kept.pop(k) if k in self._kept else self._compute(k)

    def put(self, maps: Tensor, k: int, values: Tensor) -> Tensor:
        """The maps ``[…, D, H, W]`` with slice ``k`` set to ``[…, H, W]``; of an image, the values themselves."""
        if self.source.slices == 1:
            return values.cpu()
        if k == 0:
            maps = torch.empty(*values.shape[:-2], self.source.slices, *values.shape[-2:], dtype=values.dtype)
        maps[..., k, :, :] = values
        return maps

    def _compute(self, k: int) -> Predictive:
        predictor = self.predictor
        raw = read_pixels(self.source, k, predictor.card.channels, predictor.convert).to(predictor.device)
        image = predictor.card.prepare(raw)
        self.flat = self.flat and _is_flat(image)
        if self.windows is not None:
            return predictor.method.predict_windows(image, self.windows, self._step)
        predictive = predictor.method.predict(image)
        self._step()
        return predictive

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)


def held_bytes(value: object) -> int:
    """Memory of the tensors that an object holds, at any depth; weights of networks are left out.

    >>> held_bytes({"dense": torch.zeros(2, 8), "skips": (torch.zeros(4),), "network": nn.Linear(9, 9)})
    80
    """
    storages, seen, todo = {}, set(), [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | nn.Parameter):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            todo.extend(item)
        else:
            todo.extend((item if isinstance(item, Mapping) else getattr(item, "__dict__", {})).values())
    return sum(storages.values())


def _is_flat(image: Tensor) -> bool:
    """Whether the middle 98 % of every channel's values lie within ``_FLAT``."""
    some = image.flatten(2)[..., :: max(1, image[0, 0].numel() // 10_000)]
    low, high = torch.quantile(some, torch.tensor([0.01, 0.99], device=image.device), dim=2)
    return bool((high - low < _FLAT).all())


def _heaviest_first(labels: Tensor, mass: list[float], merge: bool) -> tuple[list[int], list[float], list[int]]:
    """The first draw and the weight of each distinct mask, heaviest first; and for each draw, which of these it is.

    >>> labels = torch.tensor([[[0]], [[1]], [[1]]], dtype=torch.uint8)
    >>> _heaviest_first(labels, [0.5, 0.25, 0.5], merge=True)
    ([1, 0], [0.75, 0.5], [1, 0, 0])
    """
    keys: list[Any] = list(range(len(labels)))
    if merge:
        keys = [hashlib.blake2b(np.ascontiguousarray(one.numpy()).data).digest() for one in labels]
    total = defaultdict(float)
    for key, weight in zip(keys, mass, strict=True):
        total[key] += weight
    ranked = sorted(total, key=lambda key: -total[key])  # stable: of equal weights, the one drawn first
    return list(map(keys.index, ranked)), [total[key] for key in ranked], list(map(ranked.index, keys))


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
        raise ConfigError(f"device: expected a device of this machine, such as cpu, found {device!s:.40}") from None
    return found


@contextmanager
def _fits(source: Source) -> Iterator[None]:
    """Turns errors of memory into one line that names the image."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's own errors of memory are RuntimeErrors
        words = "out of memory|can't allocate memory|not enough memory"
        if isinstance(error, RuntimeError) and not re.search(words, str(error)):
            raise
        hint = "smaller windows (window=256) and fewer masks take less"
        message = f"expected an image that fits into memory, found {source.form}; {hint}"
        raise DataError(f"{source.path}: {message}") from None
