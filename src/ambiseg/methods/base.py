"""What every method offers, so that training, evaluation, prediction and reports need not know which one they run.

    Method ──forward──► Predictive ──noise──► Noise ──render──► MaskDistribution

A method writes ``build``, ``forward`` and ``loss``. Its :class:`Predictive` writes ``noise``, what is random about N
draws, and ``probs``, the soft masks of a noise. Samples, marginals, volumes whose slices belong together and large
images by windows follow from these. A method whose draws fall into strata of known probability (experts, members,
components of a mixture) returns a :class:`Stratified` instead, which writes ``noise_of`` and ``centre_noise``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import did_you_mean
from ambiseg.masks import MaskDistribution, exact
from ambiseg.methods.facts import Choice, Facts
from ambiseg.methods.schedules import Schedule
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import Backbone
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.windows import Step, Tile, Windows, plan, tiles
from ambiseg.settings import Settings

P = TypeVar("P", bound="Stratified")
_CANVAS = 1 << 29  # bytes of soft masks of a large image that are blended at a time


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

    Attributes:
        codes: ``[B, N, L]`` numbers that hold for a whole image: latent codes, seeds, members.
        weights: ``[B, N]`` of the draws; ``None`` is equal.
        strata: ``[B, N]`` the stratum of each draw; ``None`` for methods without.
        fields: by name, ``[B, N, C, h, w]`` numbers that belong to places of the image, at its size or coarser.
    """

    codes: Tensor
    weights: Tensor | None = None
    strata: Tensor | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict)

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

    def __getitem__(self, draws: slice) -> Noise:
        """Some of the draws, with the weights that they had."""
        weights, strata = (None if x is None else x[:, draws] for x in (self.weights, self.strata))
        return Noise(self.codes[:, draws], weights, strata, {k: v[:, draws] for k, v in self.fields.items()})

    def crop(self, y: int, x: int, window: tuple[int, int], size: tuple[int, int]) -> Noise:
        """The noise of a window at ``(y, x)`` of an image of ``size``; coarser fields are cut at their own scale."""
        fields = {}
        for name, values in self.fields.items():
            sy, sx = (max(1, round(whole / own)) for whole, own in zip(size, values.shape[3:], strict=True))
            fields[name] = values[..., y // sy : (y + window[0]) // sy, x // sx : (x + window[1]) // sx]
        return replace(self, fields=fields)


class Predictive(ABC):
    """The predicted distribution of masks of a batch of images: features computed once, nothing drawn yet.

    Attributes:
        classes: C, background included.
        size: (H, W) of the images.
    """

    classes: int
    size: tuple[int, int]

    @abstractmethod
    def noise(self, n: int, generator: torch.Generator | None = None, size: tuple[int, int] | None = None) -> Noise:
        """What is random about ``n`` equally likely draws per image.

        Args:
            size: of the whole image, when this predictive is of one window of it: noise with ``fields`` covers it all.
        """

    @abstractmethod
    def probs(self, noise: Noise) -> Tensor:
        """Class probabilities of every draw, ``[B, N, C, H, W]``."""

    def render(self, noise: Noise) -> MaskDistribution:
        """The masks of a noise, with its weights and the mean of their soft predictions as ``marginal``."""
        mass, labels, marginal = noise.mass, [], torch.zeros((), device=noise.codes.device)
        with torch.no_grad():
            for i in range(noise.count):  # one draw's probabilities in memory at a time
                probs = self.probs(noise[i : i + 1])[:, 0]
                marginal = marginal + mass[:, i, None, None, None] * probs
                labels.append(probs.argmax(1).to(label_dtype(self.classes)))
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.stack(labels, 1), weights, marginal=marginal)

    def passes(self, n: int) -> int:
        """How often networks run over all windows of the image to render ``n`` draws; 0 where features are kept."""
        return 0

    def sample(self, n: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The standard form: ``n`` equally likely masks per image."""
        if n < 1:
            raise ValueError(f"expected at least one sample, found {n}")
        return self.render(self.noise(n, generator))

    def marginal(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Pixel-wise class probabilities ``[B, C, H, W]``, the mean of ``n`` soft samples."""
        return self.sample(n, generator).marginal_probs(self.classes)


class Stratified(Predictive):
    """Draws that fall into K strata of known probability.

    Attributes:
        weights: ``[B, K]`` the probability of each stratum.
    """

    weights: Tensor

    @abstractmethod
    def noise_of(
        self, strata: Tensor, generator: torch.Generator | None = None, size: tuple[int, int] | None = None
    ) -> Noise:
        """One draw from each of the strata named, ``[B, N]`` numbers from 0 to K - 1."""

    @abstractmethod
    def centre_noise(self) -> Noise:
        """The most typical draw of each stratum, N = K."""

    def noise(self, n: int, generator: torch.Generator | None = None, size: tuple[int, int] | None = None) -> Noise:
        """Strata drawn by their weights, and one draw from each."""
        strata = torch.multinomial(self.weights.detach(), n, replacement=True, generator=generator)
        return self.noise_of(strata, generator, size)

    def compact_noise(
        self, per_stratum: int, generator: torch.Generator | None = None, size: tuple[int, int] | None = None
    ) -> Noise:
        """``per_stratum`` draws from every stratum, side by side, each of weight ``weights / per_stratum``."""
        if per_stratum < 1:
            raise ValueError(f"expected at least one sample per stratum, found {per_stratum}")
        B, K = self.weights.shape
        strata = torch.arange(K, device=self.weights.device).repeat_interleave(per_stratum).expand(B, -1)
        weights = (self.weights / per_stratum).repeat_interleave(per_stratum, 1)
        return replace(self.noise_of(strata, generator, size), weights=weights)

    def compact(self, per_stratum: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The compact form: ``per_stratum`` masks of every stratum, side by side, with their weights."""
        return self.render(self.compact_noise(per_stratum, generator))

    def centres(self) -> Tensor:
        """The most typical mask of every stratum, ``[B, K, H, W]``."""
        return self.render(self.centre_noise()).labels

    def reweighted(self: P, weights: Tensor) -> P:
        """The same with other weights ``[B, K]``, such as the mean over all slices of a volume."""
        other = copy.copy(self)
        object.__setattr__(other, "weights", weights)
        return other


class MethodConfig(Settings):
    """Settings of a method. A field of type ``Scheduled`` may move while training; ``loss`` is then given its value."""

    method: Any = None  # in each method a Literal, its key in METHODS

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings that move, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Schedule)}

    @classmethod
    def planned(cls, facts: Facts, epochs: int) -> dict[str, Choice]:
        """Settings that suit the data of a training of so many epochs, by name; those left out keep their defaults."""
        return {}

    @classmethod
    def named(cls, value: Any) -> type[MethodConfig]:
        """The configuration of the method that a table of settings names."""
        return method_named(value.get("method") if isinstance(value, Mapping) else None).Config


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """The parameters of one optimiser. ``None`` takes the value of the run's ``optimizer`` section."""

    parameters: Sequence[nn.Parameter]
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)


class Method(nn.Module, ABC):
    """A way of learning to predict distributions of masks.

    Attributes:
        Config: its settings, a :class:`MethodConfig` whose ``method`` is the key in ``METHODS``.
        stratum: what a stratum is called in tables, pictures and file names; empty for methods without strata,
            required of those with.
        terms: what the terms of its loss are, by their names in ``metrics.csv``; the report shows it.
        annotations: which policies of ``data.annotations`` it can be trained with; the first is its default.
        uses_backbone: whether the ``backbone`` section says anything to it.
        incoherent: why one draw cannot be the same in all windows of an image and all slices of a volume, as one line;
            empty for methods whose noise decides a draw.
        classes: C, background included.
    """

    Config: ClassVar[type[MethodConfig]]
    stratum: ClassVar[str] = ""
    terms: ClassVar[Mapping[str, str]] = {}
    annotations: ClassVar[tuple[str, ...]] = ("all", "random", "once")
    uses_backbone: ClassVar[bool] = True
    incoherent: ClassVar[str] = ""
    classes: int

    @classmethod
    @abstractmethod
    def build(cls, config: Any, backbone: BackboneConfig, in_channels: int, classes: int) -> Method:
        """The network that settings describe, with fresh weights from PyTorch's global generator."""

    @abstractmethod
    def forward(self, images: Tensor) -> Predictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution, in the module's present mode."""

    @abstractmethod
    def loss(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """``loss(images, annotations, *, generator=None, …)``: scalars to log, and ``total`` to minimise.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image, which may be weighted, absent (weight 0) and partly void.
            generator: of all random draws.
            …: one keyword for each setting of type ``Scheduled``, its value in this epoch; and ``phase``, the name of a
                group, for methods of several parameter groups.
        """

    def predict(self, images: Tensor) -> Predictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        with evaluation(self), torch.no_grad():
            return self(images)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """The same for one image ``[1, C, H, W]`` that is too large to take whole; ``step`` is called per window.

        Unless a method knows better, the soft masks of one noise are blended over the windows.
        """
        return windowed(self, image, windows, step)

    def predict_whole(self, images: Tensor) -> Predictive:
        """:meth:`predict` for images of any size: one that is too large is taken by windows, as new images are.

        Images ``[B, C, H, W]`` that are cut into windows come one at a time.
        """
        windows = plan((images.shape[2], images.shape[3]), self.multiple)
        if windows is None:
            return self.predict(images)
        if self.incoherent:
            found = f"{images.shape[2]}×{images.shape[3]}, which is taken by windows"
            hint = "data.eval_size scores the middle of images"
            raise ConfigError(f"expected images that are taken whole, found {found}: {self.incoherent}; {hint}")
        return self.predict_windows(images, windows)

    @property
    def multiple(self) -> int:
        """What windows of a large image start at multiples of."""
        backbone = getattr(self, "backbone", None)
        return backbone.multiple if isinstance(backbone, Backbone) else 1

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Parameters by optimiser. One group unless parts are trained against each other."""
        return {"main": ParameterGroup(list(self.parameters()))}

    def phases(self, step: int) -> Iterable[str]:
        """The groups that are stepped in this training step, in order; ``loss`` is called for each of them."""
        return tuple(self.parameter_groups())


METHODS: dict[str, type[Method]] = {}
"""Every method by its name; :mod:`ambiseg.methods` fills it."""
DEFAULT = "mose"  # of a recipe that does not say


def method_named(name: str | None) -> type[Method]:
    """The class of a method by its key in ``METHODS``; ``None`` is the default."""
    name = DEFAULT if name is None else name
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(f"model.method: expected one of {known}, found {name!r}{did_you_mean(str(name), METHODS)}")
    return METHODS[name]


# -- large images -----------------------------------------------------------------------------------------------------


class _Windowed(Predictive):
    """One image by overlapping windows: every draw is rendered in all of them and blended,

        p_n(pixel) = Σ_i w_i(pixel) p_n,i(pixel),     Σ_i w_i = 1.

    Networks run again for every call, because the features of all windows together would not fit into memory.
    """

    def __init__(
        self, method: Method, first: Predictive, image: Tensor, windows: Windows, step: Step | None = None
    ) -> None:
        self.method, self.first, self.image, self.windows, self.step = method, first, image, windows, step
        self.classes, self.size = method.classes, (image.shape[2], image.shape[3])
        height, width = (-(-length // method.multiple) * method.multiple for length in self.size)
        self.padded = height, width

    def _parts(self) -> Iterator[tuple[Tile, Predictive]]:
        for tile in tiles(self.image, self.windows, self.method.multiple):
            yield tile, self.method.predict(tile.image)
            if self.step is not None:
                self.step()

    def noise(self, n: int, generator: torch.Generator | None = None, size: tuple[int, int] | None = None) -> Noise:
        return self.first.noise(n, generator, self.padded)

    def probs(self, noise: Noise) -> Tensor:
        canvas = torch.zeros(1, noise.count, self.classes, *self.size, device=self.image.device)
        for tile, part in self._parts():
            tile.add(canvas, part.probs(noise.crop(tile.y, tile.x, part.size, self.padded)))
        return canvas

    @property
    def _draws(self) -> int:
        """How many draws are blended at a time."""
        return max(1, _CANVAS // (4 * self.classes * self.size[0] * self.size[1]))

    def passes(self, n: int) -> int:
        return -(-n // self._draws)

    def render(self, noise: Noise) -> MaskDistribution:
        draws = self._draws
        mass, labels, marginal = noise.mass, [], torch.zeros((), device=self.image.device)
        with torch.no_grad():
            for start in range(0, noise.count, draws):
                probs = self.probs(noise[start : start + draws])
                marginal = marginal + torch.einsum("bn,bnchw->bchw", mass[:, start : start + draws], probs)
                labels.append(probs.argmax(2).to(label_dtype(self.classes)))
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.cat(labels, 1), weights, marginal=marginal)


class _WindowedStrata(_Windowed, Stratified):
    """The same with strata: their weights are the mean over the windows, by area."""

    first: Stratified

    def __init__(
        self, method: Method, first: Predictive, image: Tensor, windows: Windows, step: Step | None = None
    ) -> None:
        super().__init__(method, first, image, windows, step)
        total = area = torch.zeros((), device=image.device)
        for tile, part in self._parts():
            assert isinstance(part, Stratified)
            total, area = total + part.weights * tile.weights.sum(), area + exact(tile.weights.sum())
        self.weights = total / area.to(total.dtype)

    def noise(self, n: int, generator: torch.Generator | None = None, size: tuple[int, int] | None = None) -> Noise:
        return Stratified.noise(self, n, generator, self.padded)

    def noise_of(
        self, strata: Tensor, generator: torch.Generator | None = None, size: tuple[int, int] | None = None
    ) -> Noise:
        return self.first.noise_of(strata, generator, self.padded)

    def centre_noise(self) -> Noise:
        return self.first.centre_noise()


def windowed(method: Method, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
    """The predictive distribution of one large image ``[1, C, H, W]``, window by window."""
    first = method.predict(next(tiles(image, windows, method.multiple)).image)
    kind = _WindowedStrata if isinstance(first, Stratified) else _Windowed
    return kind(method, first, image, windows, step)
