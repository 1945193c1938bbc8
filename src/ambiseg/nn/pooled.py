"""What a network says about an image as a whole, and how that is found when the image is taken by windows."""

from __future__ import annotations

import math
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from ambiseg.nn.features import Backbone, Features, coarser
from ambiseg.nn.latent import LatentEncoder

Found = TypeVar("Found", covariant=True)


class PooledHead(Protocol[Found]):
    """A head that averages maps over the image: :class:`~ambiseg.nn.gaussian.GaussianHead` and the like.

    Attributes:
        averaged: channels of the statistics.
    """

    @property
    def averaged(self) -> int: ...

    def statistics(self, maps: Tensor) -> Tensor:
        """What is averaged, ``[B, channels, h, w] -> [B, averaged, h, w]``."""
        ...

    def of(self, means: Tensor) -> Found:
        """What follows from the means ``[B, averaged]``."""
        ...


class Pooled(nn.Module, Generic[Found]):
    """An encoder whose last map is averaged to one distribution per image: prior and posterior of a latent code.

        found = head(mean over the map of statistics(encoder(x)))

    Args:
        encoder: of images, or of images and masks.
        head: what is averaged, and what follows.
        scale: work on images this many times coarser, like the backbone beside it.

    >>> import torch
    >>> from ambiseg.nn.gaussian import GaussianHead
    >>> encoder = LatentEncoder(1, classes=0, channels=(4, 8))
    >>> prior = Pooled(encoder, GaussianHead(8, latent=6))
    >>> prior(torch.zeros(2, 1, 16, 16)).mean.shape
    torch.Size([2, 6])
    """

    def __init__(self, encoder: LatentEncoder, head: PooledHead[Found], scale: int = 1) -> None:
        super().__init__()
        self.encoder, self.head, self.scale = encoder, head, scale
        self.multiple = scale * encoder.multiple

    def statistics(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        """The maps that are averaged, ``[B, averaged, h, w]``."""
        masks = None if masks is None else coarser(masks, self.scale)
        return self.head.statistics(self.encoder(coarser(images, self.scale), masks)[-1])

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Found:
        """Images ``[B, in_channels, H, W]`` and masks ``[B, C, H, W]`` -> what the head finds."""
        return self.head.of(self.statistics(images, masks).mean((2, 3)))


class Beside(Backbone):
    """A trunk, and a :class:`Pooled` network beside it in the place of what a gate reads.

    :func:`ambiseg.nn.windows.stitched` then gives the features of a large image and the mean of the statistics over all
    of it, in one pass over its windows. Where windows show what the networks see, both are those of the whole image.

    Args:
        trunk: gives the features.
        pooled: ``None`` for the trunk alone.
        multiple: that windows start at, at least.

    >>> import torch
    >>> from ambiseg.nn.gaussian import GaussianHead
    >>> from ambiseg.nn.unet import UNet
    >>> prior = Pooled(LatentEncoder(1, classes=0, channels=(4, 8)), GaussianHead(8, latent=6))
    >>> features = Beside(UNet(1, (4, 8)), prior)(torch.zeros(1, 1, 16, 16))
    >>> prior.head.of(features.gate.mean((2, 3))).mean.shape
    torch.Size([1, 6])
    """

    def __init__(self, trunk: Backbone, pooled: Pooled[Any] | None, multiple: int = 1) -> None:
        super().__init__()
        self.trunk, self.pooled = trunk, pooled
        self.dense_channels = trunk.dense_channels
        self.gate_channels = trunk.gate_channels if pooled is None else pooled.head.averaged
        self.multiple = math.lcm(multiple, trunk.multiple, 1 if pooled is None else pooled.multiple)

    def forward(self, images: Tensor) -> Features:
        features = self.trunk(images)
        return features if self.pooled is None else features._replace(gate=self.pooled.statistics(images))
