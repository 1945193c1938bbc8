"""The predicted distribution of masks of some images, what is random about its draws, and how they become masks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ambiseg._util.bands import bands
from ambiseg._util.errors import ConfigError
from ambiseg.energy import Energy, energy_score
from ambiseg.masks import MaskDistribution, Masks, at_least_float32
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.places import as_normal_, uniform_at
from ambiseg.nn.windows import Block
from ambiseg.overlap import full_precision

P = TypeVar("P", bound="Stratified")


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every part is back in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    if training:  # every mask that is drawn comes by here
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@dataclass(frozen=True, eq=False)
class Noise:
    """What is random about N draws per image. The same noise makes the same draw in every window and every slice.

    Noise that belongs to places of the image is not stored: :meth:`uniform` and :meth:`normal` compute it from the seed
    of a draw and the place, so that a window gets what the whole image has there.

    Attributes:
        codes: ``[B, N, L]`` numbers that hold for a whole image: latent codes, members.
        weights: ``[B, N]`` of the draws; ``None`` is equal.
        strata: ``[B, N]`` the stratum of each draw; ``None`` for methods without.
        seeds: ``[B, N]`` int32, of the noise that belongs to places; ``None`` for methods without. See
            :func:`ambiseg.nn.places.new_seeds`.
        origin: (y, x) of the window in its image.
        symmetries: N numbers, which symmetry of the image each draw is made in; ``None``: of the image as it is.
    """

    codes: Tensor
    weights: Tensor | None = None
    strata: Tensor | None = None
    seeds: Tensor | None = None
    origin: tuple[int, int] = (0, 0)
    symmetries: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def mass(self) -> Tensor:
        """The weights ``[B, N]``, written out when they are equal."""
        if self.weights is not None:
            return self.weights
        like = self.codes if self.codes.is_floating_point() else self.codes.float()
        return torch.full_like(like[:, :, 0], 1 / self.count)

    def __getitem__(self, draws: slice | list[int]) -> Noise:
        """Some of the draws, with the weights that they had."""
        weights, strata, seeds = (None if x is None else x[:, draws] for x in (self.weights, self.strata, self.seeds))
        turned = self.symmetries
        if turned is not None:
            turned = turned[draws] if isinstance(draws, slice) else tuple(turned[i] for i in draws)
        codes = self.codes[:, draws]
        return replace(self, codes=codes, weights=weights, strata=strata, seeds=seeds, symmetries=turned)

    def at(self, y: int, x: int) -> Noise:
        """The noise of a window at ``(y, x)``."""
        return replace(self, origin=(self.origin[0] + y, self.origin[1] + x))

    def uniform(self, key: int, channels: int, size: tuple[int, int], stride: int = 1) -> Tensor:
        """Numbers in (0, 1) that belong to places, ``[B, N, channels, *size]``; other keys give other numbers.

        Args:
            key: which numbers: of a layer, a level, a step.
            size: of the map.
            stride: pixels of the image per place of the map. Windows start at multiples of it.
        """
        if self.seeds is None:
            raise ValueError("expected noise with seeds, found none")
        return uniform_at(self.seeds, key, channels, size, (self.origin[0] // stride, self.origin[1] // stride))

    def normal(self, key: int, channels: int, size: tuple[int, int], stride: int = 1) -> Tensor:
        """The same, of a standard normal distribution."""
        return as_normal_(self.uniform(key, channels, size, stride))


class Numbers(NamedTuple):
    """Numbers that decide N draws per image, for those who draw them without a generator of PyTorch's.

    Attributes:
        normals: ``[B, N, L]`` of a standard normal distribution; ``None`` where L is 0.
        seeds: ``[B, N]`` int32, any; ``None`` for methods whose noise does not belong to places.
        strata: ``[B, N]`` int64, from 0 to K - 1; ``None`` for methods without strata.
    """

    normals: Tensor | None = None
    seeds: Tensor | None = None
    strata: Tensor | None = None


def mean_of(probs: Tensor, mass: Tensor) -> Tensor:
    """``Σ_n mass_n probs_n`` of ``[B, N, C, H, W]`` and ``[B, N]``, in 32 bits also under autocast: a mean over draws
    in 16 bits does not sum to 1 over the classes."""
    probs = at_least_float32(probs)
    with full_precision(probs):
        return torch.einsum("bn,bnchw->bchw", mass.to(probs.dtype), probs)


def placed_noise(numbers: Numbers, codes: Tensor | None = None) -> Noise:
    """Noise that seeds decide alone; ``codes`` are the same for all draws, ``[L]``, or say nothing."""
    seeds = numbers.seeds
    assert seeds is not None
    codes = torch.zeros(1, device=seeds.device) if codes is None else codes
    return Noise(codes.expand(*seeds.shape, len(codes)).clone(), seeds=seeds)


class Predictive(ABC):
    """The predicted distribution of masks of a batch of images: features computed once, nothing drawn yet.

    Attributes:
        classes: C, background included.
        size: (H, W) of the images.
        passes: how often networks run over all windows of a large image to render; 0 where features are kept.
        normals: L, standard normal numbers that decide a draw; 0 for none.
        seeded: whether a seed decides a draw, for noise that belongs to places.
    """

    classes: int
    size: tuple[int, int]
    passes: int = 0
    normals: int = 0
    seeded: bool = False

    @abstractmethod
    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """What is random about ``n`` equally likely draws per image."""

    @abstractmethod
    def probs(self, noise: Noise) -> Tensor:
        """Class probabilities of every draw, ``[B, N, C, H, W]``."""

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        """The noise that follows from numbers: how programs without PyTorch's generators draw masks."""
        kind = type(self).__name__
        raise ConfigError(f"model: expected a method whose draws follow from numbers, found {kind}, which does not say")

    def soft(self, noise: Noise) -> Tensor:
        """:meth:`probs` of all draws together, without a step that depends on sizes: what ``torch.export`` follows."""
        return self.probs(noise)

    def render(self, noise: Noise) -> MaskDistribution:
        """The masks of a noise, with its weights and the mean of their soft predictions as ``marginal``."""
        mass, labels, marginal = noise.mass, [], torch.zeros((), device=noise.codes.device)
        with torch.no_grad():
            for i in range(noise.count):  # one draw's probabilities in memory at a time
                probs = self.probs(noise[i : i + 1])[:, 0]
                marginal = marginal + mean_of(probs[:, None], mass[:, i : i + 1])
                labels.append(probs.argmax(1).to(label_dtype(self.classes)))
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.stack(labels, 1), weights, marginal=marginal)

    def render_with(self, noise: Noise, other: Noise) -> tuple[MaskDistribution, Tensor]:
        """:meth:`render`, and the labels ``[B, N, H, W]`` of another noise as well."""
        return self.render(noise), self.render(other).labels

    def sample(self, n: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The standard form: ``n`` equally likely masks per image."""
        if n < 1:
            raise ValueError(f"expected at least one sample, found {n}")
        return self.render(self.noise(n, generator))

    def marginal(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Pixel-wise class probabilities ``[B, C, H, W]``, the mean of ``n`` soft samples."""
        return self.sample(n, generator).marginal_probs(self.classes)


class Chunked(Predictive):
    """Draws that networks run for: some are made together, so that memory does not grow with their number."""

    @property
    @abstractmethod
    def at_once(self) -> int:
        """How many draws are made together, at least one."""

    @abstractmethod
    def soft(self, noise: Noise) -> Tensor:
        """:meth:`probs`, of all draws together."""

    def probs(self, noise: Noise) -> Tensor:
        return torch.cat([self.soft(noise[some]) for some in bands(noise.count, self.at_once)], 1)

    def render(self, noise: Noise) -> MaskDistribution:
        mass, labels, marginal = noise.mass, [], torch.zeros((), device=noise.codes.device)
        with torch.no_grad():
            for some in bands(noise.count, self.at_once):
                probs = self.soft(noise[some])
                marginal = marginal + mean_of(probs, mass[:, some])
                labels.append(probs.argmax(2).to(label_dtype(self.classes)))
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.cat(labels, 1), weights, marginal=marginal)


class PointPredictive(Predictive):
    """A predictive distribution that has one mask for all, without drawing."""

    @abstractmethod
    def point(self) -> Tensor:
        """The mask that is predicted if it has to be one, ``[B, H, W]``."""


class Stratified(Predictive):
    """Draws that fall into K strata of known probability.

    Attributes:
        weights: ``[B, K]`` the probability of each stratum.
    """

    weights: Tensor

    @abstractmethod
    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        """One draw from each of the strata named, ``[B, N]`` numbers from 0 to K - 1."""

    @abstractmethod
    def centre_noise(self) -> Noise:
        """The most typical draw of each stratum, N = K."""

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Strata drawn by their weights, and one draw from each."""
        if self.weights.is_cpu and not self.weights.isfinite().all():  # another device is not waited for
            found = "nan: images far from what the model was trained on, or a training that went astray"
            raise ConfigError(f"model: expected weights of its strata that are numbers, found {found}")
        strata = torch.multinomial(self.weights.detach(), n, replacement=True, generator=generator)
        return self.noise_of(strata, generator)

    def compact_noise(self, per_stratum: int, generator: torch.Generator | None = None) -> Noise:
        """``per_stratum`` draws from every stratum, side by side, each of weight ``weights / per_stratum``."""
        if per_stratum < 1:
            raise ValueError(f"expected at least one sample per stratum, found {per_stratum}")
        B, K = self.weights.shape
        strata = torch.arange(K, device=self.weights.device).repeat_interleave(per_stratum).expand(B, -1)
        weights = (self.weights / per_stratum).repeat_interleave(per_stratum, 1)
        return replace(self.noise_of(strata, generator), weights=weights)

    def compact(self, per_stratum: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The compact form: ``per_stratum`` masks of every stratum, side by side, with their weights."""
        return self.render(self.compact_noise(per_stratum, generator))

    def energy(self, annotations: Masks, per_stratum: int = 2, generator: torch.Generator | None = None) -> Energy:
        """The energy score of ``per_stratum`` draws from every stratum, a loss for any method with strata.

        Values ``[B]``, differentiable as far as the soft masks and ``weights`` are: made by ``method(images)``, not by
        ``method.predict``. Strata of more than one mask need at least two draws; see :mod:`ambiseg.energy`.
        """
        noise = self.compact_noise(per_stratum, generator)
        return energy_score(self.probs(noise), annotations, noise.mass, strata=self.weights.shape[1], probs=True)

    def centres(self) -> Tensor:
        """The most typical mask of every stratum, ``[B, K, H, W]``."""
        return self.render(self.centre_noise()).labels

    def reweighted(self: P, weights: Tensor) -> P:
        """The same with other weights ``[B, K]``, such as the mean over all slices of a volume."""
        other = copy.copy(self)
        object.__setattr__(other, "weights", weights)
        return other


# -- one of a batch ----------------------------------------------------------------------------------------------------


def part_of(predictive: Predictive, index: int, count: int) -> Predictive:
    """One image of a batch of ``count``: the same distribution with every tensor ``[count, …]`` cut to ``[1, …]``.

    Networks and their parameters are shared. A tensor of another meaning whose first axis has that length would be cut
    as well: who needs to be sure compares with the image alone, as ``ambiseg serve`` does once for every ``count``.
    """
    return _part(predictive, index, count, {})


def _part(value: Any, index: int, count: int, made: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        whole = isinstance(value, nn.Parameter) or value.ndim == 0 or len(value) != count
        return value if whole else value[index : index + 1]
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, list | tuple):
        parts = [_part(one, index, count, made) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _part(one, index, count, made) for key, one in value.items()}
    if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__") or callable(value):
        return value
    made[id(value)] = other = copy.copy(value)
    for name, one in vars(value).items():
        object.__setattr__(other, name, _part(one, index, count, made))
    return other


# -- large images ------------------------------------------------------------------------------------------------------


class Canvas:
    """The masks of one large image, which are filled in part by part.

    Args:
        noises: of the masks, of one image. The first has a marginal; of the others labels are enough.
        classes: C.
        size: (H, W) of the image.
    """

    def __init__(self, noises: Sequence[Noise], classes: int, size: tuple[int, int]) -> None:
        device, dtype = noises[0].codes.device, label_dtype(classes)
        self.noise = noises[0]
        self.labels = [torch.empty(1, noise.count, *size, dtype=dtype, device=device) for noise in noises]
        self.marginal = torch.empty(1, classes, *size, device=device)

    def put(self, which: int, block: Block, labels: Tensor, marginal: Tensor) -> None:
        """The masks of one of the noises in one part of the image."""
        self.labels[which][block.place] = labels
        if which == 0:
            self.marginal[block.place] = marginal

    @property
    def masks(self) -> MaskDistribution:
        """Those of the first noise."""
        weights = None if self.noise.weights is None else self.noise.weights.detach()
        return MaskDistribution(self.labels[0], weights, marginal=self.marginal)


class InParts(Predictive):
    """One image that is too large for features or soft masks of all of it: every rendering goes through the windows."""

    passes = 1

    @abstractmethod
    def fill(self, canvas: Canvas, noises: Sequence[Noise]) -> None:
        """Put the masks of all noises into the canvas."""

    def render(self, noise: Noise) -> MaskDistribution:
        return self._filled(noise).masks

    def render_with(self, noise: Noise, other: Noise) -> tuple[MaskDistribution, Tensor]:
        canvas = self._filled(noise, other)
        return canvas.masks, canvas.labels[1]

    def _filled(self, *noises: Noise) -> Canvas:
        canvas = Canvas(noises, self.classes, self.size)
        with torch.no_grad():
            self.fill(canvas, noises)
        return canvas
