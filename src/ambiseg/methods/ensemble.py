"""A deep ensemble of deterministic U-Nets (Lakshminarayanan et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ambiseg.masks import MaskDistribution, Masks
from ambiseg.methods.base import Method, Noise, ParameterGroup, Predictive, PublishedConfig, Stratified, evaluation
from ambiseg.methods.dense import DensePredictive, in_parts
from ambiseg.methods.predictive import Numbers, mean_of
from ambiseg.methods.unet import UNetConfig, UNetMethod
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import Backbone, Features
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.windows import Step, Windows, stitched
from ambiseg.settings import validate


class EnsembleConfig(PublishedConfig):
    """Deterministic U-Nets that differ in their first weights and in the annotations that they see."""

    method: Literal["ensemble"] = "ensemble"
    members: int = Field(default=5, ge=1, le=64, description="E, number of U-Nets, each with a backbone of its own")


class Ensemble(Method):
    """E deterministic U-Nets of equal weight, each trained as if it were alone; a draw is one of their masks.

        y = argmax softmax(F_e(x)),     e ~ uniform on 1 … E

    Every member has an optimiser of its own, and draws its own annotation of every image in every step. They are
    trained one after the other within a step, so that a step takes the memory of one.

    Args:
        config: how many members, and of what size.
        members: the U-Nets.

    >>> model = Ensemble.build(EnsembleConfig(members=3), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> predictive = model.predict(torch.rand(1, 1, 32, 32))
    >>> predictive.compact(per_stratum=1)
    MaskDistribution(1 image of 32×32, 3 masks, weighted, soft marginal)
    """

    Config: ClassVar = EnsembleConfig
    idea = "several deterministic U-Nets that began with other weights and saw other annotations; a draw is one's mask"
    reference = (
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, "
        "NeurIPS 2017"
    )
    year = 2017
    stratum = "member"
    annotations = ("all", "random", "once")  # with the others all members see the one that was drawn for them
    terms = {"loss": "the cross-entropy of one member, or of all, summed over pixels"}  # noqa: RUF012 - as in Method

    def __init__(self, config: EnsembleConfig, members: Sequence[UNetMethod]) -> None:
        super().__init__()
        self.config, self.classes = config, members[0].classes
        self.members = nn.ModuleList(members)

    @classmethod
    def build(cls, config: EnsembleConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> Ensemble:
        own = UNetConfig(published=config.published)
        return cls(config, [UNetMethod.build(own, backbone, in_channels, classes) for _ in range(config.members)])

    @classmethod
    def of(cls, members: Sequence[UNetMethod]) -> Ensemble:
        """An ensemble of U-Nets of one backbone that were trained alone.

        >>> unets = [UNetMethod.build(UNetConfig(), BackboneConfig(channels=[4, 8]), 1, 2) for _ in range(3)]
        >>> Ensemble.of(unets).config.members
        3
        """
        settings = {"members": len(members), "published": members[0].config.published}
        return cls(validate(EnsembleConfig, settings, prefix="model."), members)

    def _unets(self) -> Iterator[UNetMethod]:
        yield from self.members  # type: ignore[misc]

    @property
    def multiple(self) -> int:
        return next(self._unets()).multiple

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """A group per member, so that clipping looks at one of them at a time."""
        if len(self.members) == 1:
            return super().parameter_groups()
        return {f"member_{k}": ParameterGroup(list(unet.parameters())) for k, unet in enumerate(self._unets(), 1)}

    def forward(self, images: Tensor) -> EnsemblePredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution: a soft mask of every member."""
        return self._predictive(self._soft(images).dense, (images.shape[2], images.shape[3]))

    def predict(self, images: Tensor) -> EnsemblePredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    @property
    def _soft(self) -> _SoftMasks:
        return _SoftMasks(list(self._unets()))

    def _predictive(self, dense: Tensor, size: tuple[int, int]) -> EnsemblePredictive:
        E = len(self.members)
        weights = torch.full((dense.shape[0], E), 1 / E, device=dense.device, dtype=dense.dtype)
        return EnsemblePredictive(dense.unflatten(1, (E, self.classes)), weights, size)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """The soft masks of every member by windows, blended once for all draws."""
        with evaluation(self), torch.no_grad():
            soft = self._soft
            dense = stitched(soft, image, windows, step).dense
            predictive = self._predictive(dense, (image.shape[2], image.shape[3]))
            return predictive if dense.numel() else in_parts(self, predictive, soft, image, windows, step)

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        phase: str | None = None,
    ) -> dict[str, Tensor]:
        """The cross-entropy of one member with one annotation per image, as the deterministic U-Net has it.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of the draw among them, one for every member.
            phase: the member, as :meth:`parameter_groups` names it; ``None``: the sum over all of them.
        """
        chosen = dict(zip(self.parameter_groups(), self._unets(), strict=True))
        members = list(chosen.values()) if phase is None else [chosen[phase]]
        totals = [unet.loss(images, annotations, generator=generator)["total"] for unet in members]
        return {"total": torch.stack(totals).sum()}


class _SoftMasks(Backbone):
    """The soft masks of all members as if they were features, ``[B, E·C, H, W]``."""

    def __init__(self, members: Sequence[UNetMethod]) -> None:
        super().__init__()
        self.members = members  # not registered: they are the method's
        self.dense_channels = sum(member.classes for member in members)
        self.gate_channels, self.multiple = 1, members[0].multiple

    def forward(self, images: Tensor) -> Features:
        dense = torch.cat([member(images).of_pixels for member in self.members], 1)
        return Features(dense, dense[:, :1])


@dataclass(frozen=True, eq=False)
class EnsemblePredictive(DensePredictive, Stratified):
    """What an ensemble predicts for a batch of images; its strata are the members, and a member has one mask.

    Attributes:
        of_members: class probabilities ``[B, E, C, H, W]``, computed once for all draws.
        weights: ``[B, E]``.
        size: (H, W) of the images.
    """

    of_members: Tensor
    weights: Tensor
    size: tuple[int, int]

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.of_members.shape[2]

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        """The member of every draw: nothing else is random."""
        return Noise(strata[..., None], strata=strata)

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        assert numbers.strata is not None
        return self.noise_of(numbers.strata)

    def centre_noise(self) -> Noise:
        E = self.weights.shape[1]
        strata = torch.arange(E, device=self.weights.device).expand(len(self.weights), -1)
        return Noise(strata[..., None], self.weights.detach(), strata)

    def probs(self, noise: Noise) -> Tensor:
        return self._chosen(self.of_members, noise)

    def render(self, noise: Noise) -> MaskDistribution:
        mass = torch.zeros_like(self.weights).scatter_add(1, noise.codes[..., 0], noise.mass.to(self.weights.dtype))
        marginal = mean_of(self.of_members.detach(), mass)
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(self._chosen(self._labels, noise), weights, marginal=marginal)

    @cached_property
    def _labels(self) -> Tensor:
        """The mask of every member, ``[B, E, H, W]``."""
        dtype = label_dtype(self.classes)
        return torch.stack([probs.argmax(1).to(dtype) for probs in self.of_members.unbind(1)], 1)

    def _chosen(self, of_members: Tensor, noise: Noise) -> Tensor:
        image = torch.arange(of_members.shape[0], device=of_members.device)[:, None]
        return of_members[image, noise.codes[..., 0]]

    def of_part(self, dense: Tensor) -> EnsemblePredictive:
        """The same for a part of the image."""
        members = dense.unflatten(1, self.of_members.shape[1:3])
        return replace(self, of_members=members, size=(dense.shape[2], dense.shape[3]))
