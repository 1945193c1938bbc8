"""From one image, or one volume, to its weighted masks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.io.formats import stem_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Method, evaluation
from ambiseg.methods.mose.model import MoSE, MoSEPredictive
from ambiseg.nn import Features
from ambiseg.nn.pixelhead import as_rows, draw_masks, label_dtype
from ambiseg.nn.windows import Windows, plan, spacing, stitched
from ambiseg.prediction.inputs import read_pixels
from ambiseg.runs import Card, Run, Which, open_run

_KEPT = 1 << 30  # bytes of a volume's features that are kept between its two passes
_BAND = 1 << 18  # pixels that the head takes at a time: a stitched map in half precision is widened band by band
_FLAT = 0.02  # of the network's input, which is a few units wide: less than this shows nothing

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How masks are drawn, and how images are taken.

    Args:
        per_expert: masks of each expert, the compact form: a mask of expert k has weight π_k / per_expert.
        samples: the standard form instead, this many masks: for each an expert is drawn from π.
        seed: of the latent codes. Every image starts from it, so that an image's masks do not depend on the others.
        window: side of the windows of a large image; 0 never cuts, ``None`` cuts images of more than 1024² pixels into
            windows of 512.
        overlap: of neighbouring windows; a quarter of the window unless given.
        merge: make masks that are equal one, with their weights added.
        convert: read a grey image as colour for a model of three channels, and three equal channels as grey for one;
            always done for a model whose training data were read so.
    """

    per_expert: int = 4
    samples: int | None = None
    seed: int = 0
    window: int | None = None
    overlap: int | None = None
    merge: bool = True
    convert: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("per-expert", self.per_expert, 1),
            ("samples", self.samples, 1),
            ("window", self.window, 0),
            ("overlap", self.overlap, 0),
        ):
            if value is not None and value < least:
                raise DataError(f"--{name}: expected {least} or more, found {value}")
        spacing(self.window, self.overlap)

    @property
    def form(self) -> str:
        """``compact`` or ``standard``."""
        return "compact" if self.samples is None else "standard"


class Draw(NamedTuple):
    """One sample: which expert's latent code it was, its weight, and which of the masks it came out as."""

    expert: int
    weight: float
    mask: int


@dataclass(frozen=True, eq=False)
class Prediction:
    """The masks of one image, or of one volume.

    Attributes:
        name: of the image, and of the folder that its files go to.
        masks: one image of N masks ``[1, N, H, W]`` (``[1, N, D, H, W]``), from the heaviest to the lightest, with
            weights and the soft ``marginal``.
        draws: the samples that they came from, expert by expert. Merged masks came from several.
        expert_weights: π ``[K]``; of a volume the mean over its slices.
        expert_masks: ``[K, *spatial]``, what each expert says at the mean of its Gaussian: one mask a mode.
        entropy: ``[*spatial]`` in nats, of the marginal.
        classes: names of the class ids.
        source: the file, with its size and its place in space.
        run: the run that the model is from, as it was named, and
        which: of its weights.
        options: that it was made with.
        slice_weights: π of every slice of a volume, ``[D, K]``.
        windows: how many windows a slice was cut into; 1 is whole.
        notes: what is odd about the image.
    """

    name: str
    masks: MaskDistribution
    draws: tuple[Draw, ...]
    expert_weights: Tensor
    expert_masks: Tensor
    entropy: Tensor
    classes: tuple[str, ...]
    source: Source
    run: str
    which: str
    options: Options
    slice_weights: Tensor
    windows: int = 1
    notes: tuple[str, ...] = ()

    def experts_of(self, mask: int) -> list[int]:
        """The experts that drew a mask, the one with the most weight first."""
        mass: dict[int, float] = {}
        for draw in self.draws:
            if draw.mask == mask:
                mass[draw.expert] = mass.get(draw.expert, 0.0) + draw.weight
        return sorted(mass, key=lambda expert: -mass[expert])

    def __repr__(self) -> str:
        experts = ", ".join(f"{weight:.2f}" for weight in self.expert_weights.tolist())
        return f"Prediction({self.name!r}: {self.source.form}, {self.masks.count} masks, experts {experts})"


class Predictor:
    """A trained model, ready for images.

    Args:
        run: the folder of a run, ``"demo"``, an opened :class:`~ambiseg.runs.Run`, or a model that
            :func:`ambiseg.runs.load` returned.
        options: see :class:`Options`.
        which: weights of the ``best`` epoch or of the ``last``.
        device: to compute on; unless given, the CPU for a run, and where it is for a model.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Run | Method,
        options: Options | None = None,
        which: Which = "best",
        device: torch.device | str | None = None,
    ) -> None:
        self.options = options or Options()
        if isinstance(run, Method):
            self.device = next(run.parameters()).device if device is None else _device(device)
            self.run, self.which, model = "memory", "", run.to(self.device)
            trained_on: dict[str, Any] = {}
        else:
            opened = run if isinstance(run, Run) else open_run(run)
            self.device = _device("cpu" if device is None else device)
            self.run = str(opened.folder) if isinstance(run, Run) else os.fspath(run)
            self.which, model = which, opened.model(which, self.device)
            trained_on = opened.config.data.options
        if not isinstance(model, MoSE):
            raise ConfigError(f"{self.run}: expected a model of method mose, found {type(model).__name__}")
        if not isinstance(card := getattr(model, "card", None), Card):
            raise ConfigError(f"{self.run}: expected a model with a card, as ambiseg.load returns it, found none")
        self.model, self.card = model, card
        # Slices that were cut along one axis in training look like nothing known along another.
        self.axes, self.axis = trained_on.get("axes"), trained_on.get("axis", 2)
        self.convert = self.options.convert or trained_on.get("channels") == card.channels

    def open(self, path: Path, axes: str | None = None, axis: int | None = None) -> Source:
        """An image's header. What is not said about its axes is as it was in training."""
        return open_source(path, ReadOptions(axes=axes or self.axes, axis=self.axis if axis is None else axis))

    def steps(self, source: Source) -> int:
        """How many times progress will be called for an image."""
        windows = self._windows(source)
        passes = 1 if source.slices == 1 or self._keeps(source) else 2
        return source.slices * passes * (len(windows[0]) * len(windows[1]) if windows else 1)

    @torch.no_grad()
    def __call__(self, source: Source, name: str | None = None, progress: Progress | None = None) -> Prediction:
        """The masks of an image, or of a volume slice by slice.

            π = 1/D Σ_d gate(features of slice d),     k ~ π,  z ~ N(m_k, σ_k² I)  once for all slices

        A sample of a volume is one expert and one latent code, so that its slices belong together, and its weight is
        that of the volume.
        """
        name = stem_of(source.path) if name is None else name
        total, done = self.steps(source), 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        with evaluation(self.model), _fits(source):
            return self._predict(source, name, step)

    def _predict(self, source: Source, name: str, step: Callable[[], None]) -> Prediction:
        keeps, kept, gates, flats = self._keeps(source), {}, [], []
        for k in range(source.slices):
            features, flat = self._features(source, k, step)
            gates.append(self.model.gate(features.gate))
            flats.append(flat)
            if keeps:
                kept[k] = features
        slice_weights = torch.cat(gates)  # [D, K]
        weights = slice_weights.mean(0, keepdim=True)
        experts, latents, mass = self._draw(weights)
        modes = self.model.experts.mean[None]
        N, K, C = len(experts), len(weights[0]), self.model.classes
        shape = (source.slices, *source.size)
        labels = torch.empty(N, *shape, dtype=label_dtype(C))
        mode_labels = torch.empty(K, *shape, dtype=label_dtype(C))
        marginal, entropy = torch.empty(C, *shape), torch.empty(shape)
        for k in range(source.slices):
            features = kept.pop(k) if keeps else self._features(source, k, step)[0]
            self._decode(features, latents, mass, labels[:, k], marginal[:, k])
            self._decode(features, modes, weights, mode_labels[:, k])
            entropy[k] = torch.special.entr(marginal[:, k].clamp_min(0)).sum(0)
        if source.slices == 1:
            labels, mode_labels, marginal, entropy = (x.squeeze(-3) for x in (labels, mode_labels, marginal, entropy))
        order, groups = _heaviest_first(labels, mass[0].tolist(), self.options.merge)
        merged = torch.zeros(len(order), dtype=torch.float64).index_add_(0, groups, mass[0].cpu().double())
        windows = self._windows(source)
        return Prediction(
            name=name,
            masks=MaskDistribution(labels[order][None], merged[None].float(), marginal=marginal[None]),
            draws=tuple(map(Draw, experts.tolist(), mass[0].tolist(), groups.tolist())),
            expert_weights=weights[0].cpu(),
            expert_masks=mode_labels,
            entropy=entropy,
            classes=self.card.classes,
            source=source,
            run=self.run,
            which=self.which,
            options=self.options,
            slice_weights=slice_weights.cpu(),
            windows=len(windows[0]) * len(windows[1]) if windows else 1,
            notes=(_FLAT_NOTE,) * all(flats),
        )

    def _windows(self, source: Source) -> Windows | None:
        return plan(source.size, self.model.backbone, self.options.window, self.options.overlap)

    def _keeps(self, source: Source) -> bool:
        """Whether the features of all slices may stay between the pass of the gate and that of the masks."""
        pixels = source.slices * source.size[0] * source.size[1]
        return source.slices == 1 or 4 * self.model.backbone.dense_channels * pixels <= _KEPT

    def _features(self, source: Source, k: int, step: Callable[[], None]) -> tuple[Features, bool]:
        """Of one slice, and whether the model's intensity leaves nothing of it to see."""
        raw = read_pixels(source, k, self.card.channels, self.convert).to(self.device)
        image = self.card.prepare(raw)
        windows = self._windows(source)
        if windows is not None:
            return stitched(self.model.backbone, image, windows, step), _is_flat(image)
        features = self.model.backbone(image)
        step()
        return features, _is_flat(image)

    def _draw(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts ``[N]``, latent codes ``[1, N, L]`` and weights ``[1, N]``, as ``MoSEPredictive`` draws them."""
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        if self.options.samples is None:
            S = self.options.per_expert
            ids = torch.arange(weights.shape[1], device=self.device).repeat_interleave(S)[None]
            mass = (weights / S).repeat_interleave(S, 1)
        else:
            n = self.options.samples
            ids = torch.multinomial(weights, n, replacement=True, generator=generator)
            mass = torch.full((1, n), 1 / n, device=self.device)
        return ids[0], self.model.experts.of(ids, generator), mass

    def _decode(
        self, features: Features, latents: Tensor, mass: Tensor, labels: Tensor, marginal: Tensor | None = None
    ) -> None:
        """Fill in label maps ``[N, H, W]`` and their mean probability ``[C, H, W]``, a band of pixels at a time."""
        size = (labels.shape[1], labels.shape[2])
        if features.skips:  # noise enters before the decoder's end: a pass through the rest of it for each sample
            predictive = MoSEPredictive(self.model, features, mass, size, training=False)
            mean = torch.zeros((), device=self.device)
            for i in range(latents.shape[1]):
                logits = predictive.logits(latents[:, i : i + 1])[0, 0]
                labels[i] = logits.argmax(0).to(labels)
                mean = mean + mass[0, i] * logits.softmax(0)
            if marginal is not None:
                marginal.copy_(mean)
            return
        rows, head = as_rows(features.dense), self.model.head.fold(latents)
        found = torch.empty(labels.shape[0], size[0] * size[1], dtype=labels.dtype)
        probable = None if marginal is None else torch.empty(marginal.shape[0], size[0] * size[1])
        for start in range(0, rows.shape[1], _BAND):
            band = slice(start, start + _BAND)
            drawn, mean = draw_masks(rows[:, band], head, mass)
            found[:, band] = drawn[0].cpu()
            if probable is not None:
                probable[:, band] = mean[0].cpu()
        labels.copy_(found.unflatten(1, size))
        if marginal is not None and probable is not None:
            marginal.copy_(probable.unflatten(1, size))


_FLAT_NOTE = (
    "expected values in the units of the training data, found ones that the model's intensity makes all alike: "
    "the image is blank, or its values have another range"
)


def _is_flat(image: Tensor) -> bool:
    """Whether the middle 98 % of every channel's values are one, as far as a network can see."""
    some = image.flatten(2)[..., :: max(1, image[0, 0].numel() // 10_000)]
    low, high = torch.quantile(some, torch.tensor([0.01, 0.99], device=image.device), dim=2)
    return bool((high - low < _FLAT).all())


def _heaviest_first(labels: Tensor, mass: list[float], merge: bool) -> tuple[list[int], Tensor]:
    """One sample of each distinct mask, the heaviest first; and for each sample, which of these it is.

    >>> labels = torch.tensor([[[0]], [[1]], [[1]]], dtype=torch.uint8)
    >>> _heaviest_first(labels, [0.4, 0.3, 0.3], merge=True)
    ([1, 0], tensor([1, 0, 0]))
    """
    keys: list[object] = list(range(len(labels)))
    if merge:
        keys = [hashlib.blake2b(np.ascontiguousarray(one.numpy()).data).digest() for one in labels]
    first: dict[object, int] = {}
    total: dict[object, float] = {}
    for i, (key, weight) in enumerate(zip(keys, mass, strict=True)):
        first.setdefault(key, i)
        total[key] = total.get(key, 0.0) + weight
    ranked = sorted(total, key=lambda key: (-total[key], first[key]))
    rank = {key: place for place, key in enumerate(ranked)}
    return [first[key] for key in ranked], torch.tensor([rank[key] for key in keys])


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
        raise ConfigError(f"--device: expected a device of this machine, such as cpu, found {device!s:.40}") from None
    return found


_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def _fits(source: Source) -> Iterator[None]:
    """What runs out of memory becomes one line that names the image."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's own errors of memory are RuntimeErrors
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        hint = "smaller windows (--window 256) and fewer masks take less"
        message = f"expected an image that fits into memory, found {source.form}; {hint}"
        raise DataError(f"{source.path}: {message}") from None
