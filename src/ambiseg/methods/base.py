"""What every method offers, so that training, evaluation, prediction and reports need not know which one they run.

    Method ──forward──► Predictive ──noise──► Noise ──render──► MaskDistribution

A method writes ``__init__``, ``forward`` and ``loss``. Its :class:`Predictive` writes ``noise``, what is random about N
draws, and ``probs``, the soft masks of a noise. Samples, marginals, volumes whose slices belong together and large
images by windows follow from these. A method whose draws fall into strata of known probability (experts, members,
components of a mixture) returns a :class:`Stratified` instead, which writes ``noise_of`` and ``centre_noise``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import did_you_mean
from ambiseg.masks import exact
from ambiseg.methods.facts import Choice, Facts
from ambiseg.methods.predictive import Canvas, InParts, Noise, Predictive, Stratified, evaluation, mean_of
from ambiseg.methods.schedules import Schedule
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import Backbone
from ambiseg.nn.windows import Block, Step, Tile, Windows, blended, plan, tiles
from ambiseg.settings import Settings

M = TypeVar("M", bound="Method")
_AT_ONCE = 16  # draws of a window that networks run for at a time


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


class PublishedConfig(MethodConfig):
    """Settings of a method whose network exists in the size of its paper as well."""

    published: bool = Field(
        default=False, description="the network of the paper, in its size; the backbone section is then not used"
    )

    def trunk(self, backbone: BackboneConfig) -> BackboneConfig:
        """The backbone section, or what most papers have in its place: PHiSeg's U-Net of seven levels."""
        return BackboneConfig(name="unet", decoder="phiseg") if self.published else backbone


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """The parameters of one optimiser. ``None`` takes the value of the run's ``optimizer`` section.

    Attributes:
        lr: learning rate.
        weight_decay: penalty on the squared weights.
        betas: of Adam.
        scale: what the learning rate of every step is multiplied with.
        milestones: after so many epochs the learning rate is halved, each time.
        undecayed: those of ``parameters`` that weight decay leaves alone, such as multipliers.
    """

    parameters: Sequence[nn.Parameter]
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    scale: float = 1.0
    milestones: tuple[int, ...] = ()
    undecayed: Sequence[nn.Parameter] = ()

    def decayed(self, weight_decay: float) -> list[dict[str, Any]]:
        """The parameters as an optimiser takes them, with the run's weight decay or that of the group."""
        weight_decay = weight_decay if self.weight_decay is None else self.weight_decay
        spared = {id(parameter) for parameter in self.undecayed}
        rest = [parameter for parameter in self.parameters if id(parameter) not in spared]
        groups = [{"params": rest, "weight_decay": weight_decay}]
        return [*groups, {"params": list(self.undecayed), "weight_decay": 0.0}] if spared else groups


class Method(nn.Module, ABC):
    """A way of learning to predict distributions of masks.

    Attributes:
        Config: its settings, a :class:`MethodConfig` whose ``method`` is the key in ``METHODS``.
        idea: what it does, in one sentence.
        reference: authors, title and place of its paper.
        year: of the paper.
        defaults: settings of other sections that it needs, by key, such as ``{"optimizer.clip": 1000.0}``: recipes and
            the command line come before them, the defaults of the library after.
        stratum: what a stratum is called in tables, pictures and file names; empty for methods without strata,
            required of those with.
        terms: what the terms of its loss are, by their names in ``metrics.csv``; the report shows it.
        annotations: which policies of ``data.annotations`` it can be trained with; the first is its default.
        uses_backbone: whether the ``backbone`` section says anything to it.
        incoherent: why one draw cannot be the same in all windows of an image and all slices of a volume, as one line;
            empty for methods whose noise decides a draw.
        views: how often networks see an image, or a window of it, before anything is drawn.
        classes: C, background included.
    """

    Config: ClassVar[type[MethodConfig]]
    idea: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    year: ClassVar[int | None] = None
    defaults: ClassVar[Mapping[str, Any]] = {}
    stratum: ClassVar[str] = ""
    terms: ClassVar[Mapping[str, str]] = {}
    annotations: ClassVar[tuple[str, ...]] = ("all", "random", "once")
    uses_backbone: ClassVar[bool] = True
    incoherent: ClassVar[str] = ""
    views: ClassVar[int] = 1
    classes: int

    @classmethod
    def build(cls: type[M], config: Any, backbone: BackboneConfig, in_channels: int, classes: int) -> M:
        """The network that settings describe, with fresh weights from PyTorch's global generator.

        Unless a method writes its own, ``__init__`` takes the same arguments.
        """
        return cls(config, backbone, in_channels, classes)

    def before_training(self, images: int) -> None:
        """Called once before a training begins, or goes on: it is on so many images.

        What a method keeps of it is a buffer, so that it is in the checkpoint.
        """

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

    def merged(self, groups: Sequence[Sequence[int]], usage: Sequence[float]) -> Method | None:
        """A method of one stratum per group, which begins with what its strata have in common; ``None``: it cannot.

        The new stratum draws what the most used of its group draws, and is as likely as all of them together, as far as
        its network can say. What a training has to settle then are :meth:`stratum_parameters`.

        Args:
            groups: the K strata, each in one group.
            usage: mean weight of each stratum, ``[K]``.
        """
        return None

    def stratum_parameters(self) -> list[nn.Parameter]:
        """What says where strata are and how likely they are, once images have become features."""
        return []

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
    if not isinstance(name, str) or name not in METHODS:
        known, found = ", ".join(METHODS), f"{name!r:.80}{did_you_mean(str(name), METHODS)}"
        raise ConfigError(f"model.method: expected one of {known}, found {found}")
    return METHODS[name]


# -- large images -----------------------------------------------------------------------------------------------------


class _Windowed(InParts):
    """One image by overlapping windows: every draw is rendered in all of them and blended,

        p_n(pixel) = Σ_i w_i(pixel) p_n,i(pixel),     Σ_i w_i = 1.

    Networks run again for every call, because the features of all windows together would not fit into memory.
    """

    def __init__(
        self, method: Method, first: Predictive, image: Tensor, windows: Windows, step: Step | None = None
    ) -> None:
        self.method, self.first, self.image, self.windows, self.step = method, first, image, windows, step
        self.classes, self.size = method.classes, (image.shape[2], image.shape[3])

    def _parts(self) -> Iterator[tuple[Tile, Predictive]]:
        for tile in tiles(self.image, self.windows, self.method.multiple):
            part = self.method.predict(tile.image)
            if self.step is not None:
                self.step()
            yield tile, part

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return self.first.noise(n, generator)

    def probs(self, noise: Noise) -> Tensor:
        canvas = torch.empty(1, noise.count, self.classes, *self.size, device=self.image.device)
        for block in self._blocks([noise]):
            canvas[block.place] = block.maps
        return canvas

    def _blocks(self, noises: Sequence[Noise]) -> Iterator[Block]:
        """Soft masks ``[1, N, C, h, w]`` of all noises, one after the other."""

        def parts() -> Iterator[tuple[Tile, Tensor]]:
            for tile, part in self._parts():
                here = [noise.at(tile.y, tile.x) for noise in noises]
                some = [noise[i : i + _AT_ONCE] for noise in here for i in range(0, noise.count, _AT_ONCE)]
                yield tile, torch.cat([part.probs(noise) for noise in some], 1)

        return blended(parts(), self.windows, self.size)

    def fill(self, canvas: Canvas, noises: Sequence[Noise]) -> None:
        for block in self._blocks(noises):
            of_each = block.maps.split([noise.count for noise in noises], 1)
            for which, (noise, probs) in enumerate(zip(noises, of_each, strict=True)):
                canvas.put(which, block, probs.argmax(2), mean_of(probs, noise.mass))


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

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return Stratified.noise(self, n, generator)

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        return self.first.noise_of(strata, generator)

    def centre_noise(self) -> Noise:
        return self.first.centre_noise()


def windowed(method: Method, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
    """The predictive distribution of one large image ``[1, C, H, W]``, window by window."""
    first = method.predict(next(tiles(image, windows, method.multiple)).image)
    kind = _WindowedStrata if isinstance(first, Stratified) else _Windowed
    return kind(method, first, image, windows, step)
