"""MC-dropout: a U-Net whose dropout stays on when it predicts (Gal and Ghahramani, ICML 2016)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.masks import Masks, at_least_float32
from ambiseg.methods.base import Method, Noise, PublishedConfig, evaluation
from ambiseg.methods.predictive import Chunked, Numbers, placed_noise
from ambiseg.methods.targets import one_each
from ambiseg.methods.unet import cross_entropy
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.places import new_seeds

# Numbers of the largest map of the decoder, of all draws that networks run for at a time. On CPUs more is slower.
_AT_ONCE = 1 << 22


class MCDropoutConfig(PublishedConfig):
    """A U-Net with dropout that stays on when it predicts."""

    method: Literal["mc-dropout"] = "mc-dropout"
    rate: float = Field(default=0.5, ge=0, lt=1, description="the probability that a number is dropped")
    depth: int = Field(
        default=2,
        ge=1,
        le=16,
        description="numbers are dropped before the first convolution of so many of the deepest blocks on the way down "
        "and as many on the way up; at most all but those of the image's size",
    )


class MCDropout(Method):
    """A U-Net in which numbers are dropped at random before its deepest blocks, in training and in prediction:

        p(y | x) = E_m softmax(F(x, m)),     h ← h m / (1 − rate),     m ~ Bernoulli(1 − rate) at every number

    Fitted like the deterministic U-Net, with the cross-entropy of one annotation per image and step. A draw is a draw
    of m. In prediction batch norm has the statistics of training, and only what comes after the first dropout runs
    again for every draw.

    >>> model = MCDropout.build(MCDropoutConfig(), BackboneConfig(channels=[4, 8, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(5)
    MaskDistribution(1 image of 32×32, 5 masks, equal weights, soft marginal)
    """

    Config: ClassVar = MCDropoutConfig
    idea = "a U-Net with dropout in its deepest blocks that stays on in prediction; each draw drops other numbers"
    reference = (
        "Gal and Ghahramani, Dropout as a Bayesian Approximation, ICML 2016; for segmentation Kendall et al., "
        "Bayesian SegNet, BMVC 2017"
    )
    year = 2016
    annotations = ("random", "once", "all")
    terms = {"pixel": "the cross-entropy per pixel"}  # noqa: RUF012 - declared as a class variable in Method

    def __init__(self, config: MCDropoutConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        trunk = config.trunk(backbone)
        self.config, self.classes, self.backbone = config, classes, trunk.build_dense(in_channels)
        levels = self.backbone.block_levels
        if not levels:
            raise ConfigError(f"backbone.name: expected unet or unet-light for mc-dropout, found {trunk.name}")
        depth = min(config.depth, levels - 1)
        self.blocks = range(levels - depth, levels + depth)  # before which numbers are dropped
        self.head = PixelMLP(self.backbone.dense_channels, classes, norm=True, momentum=trunk.momentum)

    def forward(self, images: Tensor) -> DropoutPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution: the levels above the first dropout."""
        maps = self.backbone.start(images, self.blocks[0])
        return DropoutPredictive(self, tuple(maps), (images.shape[2], images.shape[3]), self.training)

    def predict(self, images: Tensor) -> DropoutPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def loss(
        self, images: Tensor, annotations: Masks, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The cross-entropy with one annotation per image, summed over its pixels; the mean over images.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of the draw among them, and of what is dropped.
        """
        target = one_each(annotations, self.classes, generator)

        def drop(block: int, x: Tensor) -> Tensor:
            if block not in self.blocks:
                return x
            return x * self._scaled(torch.rand(x.shape, generator=generator, device=x.device), x.dtype)

        dense = self.backbone.resume(self.backbone.start(images, self.blocks[0]), images.shape[2:], drop)
        return cross_entropy(self.head(dense)[:, 0], target)

    def logits(self, maps: tuple[Tensor, ...], size: tuple[int, int], noise: Noise) -> Tensor:
        """Logits of every draw, ``[B, N, C, H, W]``, of the maps that :meth:`forward` keeps."""
        draws = maps[0].shape[0], noise.count

        def drop(block: int, x: Tensor) -> Tensor:
            if block not in self.blocks:
                return x
            shape, stride = (x.shape[2], x.shape[3]), self.backbone.stride(block)
            kept = self._scaled(noise.uniform(block, x.shape[1], shape, stride), x.dtype)
            return (x.unflatten(0, (draws[0], -1)) * kept).flatten(0, 1)

        return self.head(self.backbone.resume(maps, size, drop))[:, 0].unflatten(0, draws)

    def _scaled(self, uniform: Tensor, dtype: torch.dtype) -> Tensor:
        """0 for what is dropped, and else what keeps the mean, 1 / (1 − rate)."""
        return (uniform >= self.config.rate).to(dtype) / (1 - self.config.rate)


@dataclass(frozen=True, eq=False)
class DropoutPredictive(Chunked):
    """What MC-dropout predicts for a batch of images: a draw runs the network from its first dropout on.

    Attributes:
        maps: of the encoder's levels above the first dropout.
        size: (H, W) of the images.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards;
            made in training, what is left to compute follows the model.
    """

    model: MCDropout
    maps: tuple[Tensor, ...]
    size: tuple[int, int]
    training: bool

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """A seed for each draw; what is dropped at a place follows from it."""
        B, device = self.maps[0].shape[0], self.maps[0].device
        return Noise(torch.zeros(B, n, 1, device=device), seeds=new_seeds(B, n, generator, device))

    seeded = True

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        return placed_noise(numbers)

    def soft(self, noise: Noise) -> Tensor:
        with self._mode():
            logits = self.model.logits(self.maps, self.size, noise)
        return at_least_float32(logits).softmax(2)

    @property
    def at_once(self) -> int:
        """Draws that fit into so much memory as is allowed; the largest map is what enters the last block."""
        numbers = self.maps[0].numel() + self.maps[0][:, 0].numel() * self.model.backbone.dense_channels
        return max(1, _AT_ONCE // numbers)

    def _mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.training else evaluation(self.model)
