"""The encoder of a latent code: the way down of the trunk, on an image or on an image and a mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import pad_to_multiple
from ambiseg.nn.unet import Convolutions, encoded, encoder


class LatentEncoder(nn.Module):
    """The levels of a U-Net on their way down, with weights of their own.

    Args:
        in_channels: of the images.
        classes: C of the masks that it reads beside the image; 0 for an encoder of images alone.
        channels: of each level.
        kind: how a level is built.

    >>> posterior = LatentEncoder(1, classes=2, channels=(4, 8))
    >>> [tuple(x.shape) for x in posterior(torch.zeros(3, 1, 15, 16), torch.zeros(3, 2, 15, 16))]
    [(3, 4, 16, 16), (3, 8, 8, 8)]
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        channels: Sequence[int],
        kind: Convolutions = Convolutions(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.multiple, self.out_channels = 2 ** (len(channels) - 1), channels[-1]
        self.down = encoder(in_channels + classes, channels, kind)

    @classmethod
    def of(cls, backbone: BackboneConfig, in_channels: int, classes: int = 0) -> LatentEncoder:
        """With the levels of a backbone; those of the light U-Net where the backbone is none."""
        return cls(in_channels, classes, backbone.unet_levels, backbone.kind)

    def forward(self, images: Tensor, masks: Tensor | None = None) -> list[Tensor]:
        """Images ``[B, in_channels, H, W]`` and soft or one-hot masks ``[B, C, H, W]`` -> the maps of all levels."""
        x = images if masks is None else torch.cat([images, masks.to(images.dtype)], 1)
        return encoded(self.down, pad_to_multiple(x, self.multiple))
