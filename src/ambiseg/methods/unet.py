"""A deterministic U-Net: one mask per image, the baseline of every method that predicts several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ambiseg.masks import MaskDistribution, Masks, at_least_float32
from ambiseg.methods.base import Noise, PublishedConfig
from ambiseg.methods.pixelwise import Pixelwise, PointPredictive
from ambiseg.methods.predictive import Numbers, placed_noise
from ambiseg.methods.targets import Target, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.likelihood import pixel_ce
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.places import new_seeds

Sampling = Literal["point", "pixelwise"]


class UNetConfig(PublishedConfig):
    """A U-Net that predicts one mask."""

    method: Literal["unet"] = "unet"
    sampling: Sampling = Field(
        default="point",
        description="point: all masks are the most likely one; pixelwise: every pixel draws its class by itself, which "
        "makes masks of noise",
    )


class UNetMethod(Pixelwise):
    """A backbone and a pixel network, fitted to one annotation per image and step by the cross-entropy:

        p = softmax(F(x)),     loss = −Σ_pixels log p[y],     y ~ annotations

    Its minimum is the mean of the annotations at every pixel; it says nothing about which pixels go together.

    >>> model = UNetMethod.build(UNetConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(5)
    MaskDistribution(1 image of 32×32, 5 masks, equal weights, soft marginal)
    """

    Config: ClassVar = UNetConfig
    idea = "one mask per image, from the class probabilities of a U-Net; all that is drawn from it is the same"
    reference = (
        "Ronneberger et al., U-Net: Convolutional Networks for Biomedical Image Segmentation, MICCAI 2015; "
        "the network of Baumgartner et al., PHiSeg: Capturing Uncertainty in Medical Image Segmentation, MICCAI 2019"
    )
    year = 2015
    annotations = ("random", "once", "all")
    terms = {"pixel": "the cross-entropy per pixel"}  # noqa: RUF012 - declared as a class variable in Method

    def __init__(self, config: UNetConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        trunk = config.trunk(backbone)
        self.config, self.classes, self.backbone = config, classes, trunk.build_dense(in_channels)
        self.head = PixelMLP(self.backbone.dense_channels, classes, norm=True, momentum=trunk.momentum)

    def predictive(self, dense: Tensor) -> PixelPredictive:
        probs = at_least_float32(self.head(dense)[:, 0]).softmax(1)
        return PixelPredictive(probs, self.config.sampling)

    def loss(
        self, images: Tensor, annotations: Masks, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The cross-entropy with one annotation per image, summed over its pixels; the mean over images.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of the draw among them.
        """
        target = one_each(annotations, self.classes, generator)
        return cross_entropy(self.head(self.backbone(images).dense)[:, 0], target)


def cross_entropy(logits: Tensor, target: Target) -> dict[str, Tensor]:
    """``total``, the cross-entropy summed over pixels and averaged over images, and ``pixel``, that of a pixel.

    >>> cross_entropy(torch.zeros(1, 2, 2, 2), Target(torch.zeros(1, 2, 2, dtype=torch.long), None))
    {'total': tensor(2.7726), 'pixel': tensor(0.6931)}
    """
    cost = pixel_ce(logits, target.labels, target.valid)
    pixels = cost.numel() if target.valid is None else target.valid.sum().clamp_min(1)
    return {"total": target.mean(cost.sum((1, 2))), "pixel": cost.detach().sum() / pixels}


@dataclass(frozen=True, eq=False)
class PixelPredictive(PointPredictive):
    """Class probabilities of every pixel: one mask, or masks whose pixels know nothing of each other.

    Attributes:
        of_pixels: ``[B, C, H, W]``.
        sampling: ``point`` gives the most likely mask, however many are asked for, and its marginal is ``of_pixels``.
            ``pixelwise`` draws the class of every pixel by itself.
    """

    of_pixels: Tensor
    sampling: Sampling = "point"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.of_pixels.shape[1]

    @property
    def size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.of_pixels.shape[2], self.of_pixels.shape[3]

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        B, device = self.of_pixels.shape[0], self.of_pixels.device
        seeds = None if self.sampling == "point" else new_seeds(B, n, generator, device)
        return Noise(torch.zeros(B, n, 1, device=device), seeds=seeds)

    @property
    def seeded(self) -> bool:  # type: ignore[override]
        return self.sampling != "point"

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        """A mask that nothing decides is there once."""
        return placed_noise(numbers) if self.seeded else self.noise(1)

    def probs(self, noise: Noise) -> Tensor:
        if self.sampling == "point":
            return self.of_pixels[:, None].expand(-1, noise.count, -1, -1, -1)
        return F.one_hot(self._drawn(noise), self.classes).movedim(-1, 2).to(self.of_pixels.dtype)

    def _drawn(self, noise: Noise) -> Tensor:
        """How many of the classes before the last have a cumulative probability below the noise, ``[B, N, H, W]``."""
        below = self.of_pixels.cumsum(1)[:, None, :-1]
        return (noise.uniform(0, 1, self.size) > below).sum(2)

    def render(self, noise: Noise) -> MaskDistribution:
        if self.sampling != "point":
            return super().render(noise)
        weights = None if noise.weights is None else noise.weights.detach()
        labels = self.point().to(label_dtype(self.classes))[:, None].expand(-1, noise.count, -1, -1)
        return MaskDistribution(labels, weights, marginal=self.of_pixels.detach())

    def point(self) -> Tensor:
        """The most likely class of every pixel, ``[B, H, W]``."""
        return self.of_pixels.argmax(1)
