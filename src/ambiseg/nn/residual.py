"""Levels of residual blocks without normalisation, as the Hierarchical Probabilistic U-Net has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A pre-activation residual block that works at half its width:

        x ──► ReLU, 3×3 ──► ReLU, 3×3 ──► … ──► 1×1 ──► + ──►
        └──────────────────── (1×1) ────────────────────┘

    The 3×3 convolutions have half of the output's channels, and the 1×1 after them follows the last one directly. The
    input is added as it is, through a 1×1 convolution where the number of channels changes.

    Args:
        in_channels: of what it reads.
        out_channels: of what it gives.
        convs: 3×3 convolutions.

    >>> Residual(4, 6)(torch.zeros(2, 4, 5, 7)).shape
    torch.Size([2, 6, 5, 7])
    """

    def __init__(self, in_channels: int, out_channels: int, convs: int = 3) -> None:
        super().__init__()
        width = max(out_channels // 2, 1)
        before = [in_channels, *[width] * (convs - 1)]
        self.convs = nn.ModuleList(nn.Conv2d(channels, width, 3, padding=1) for channels in before)
        self.widen = nn.Identity() if width == out_channels else nn.Conv2d(width, out_channels, 1)
        self.skip = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, in_channels, h, w] -> [B, out_channels, h, w]``."""
        inner = x
        for number, conv in enumerate(self.convs):
            inner = conv(F.relu(inner, inplace=number > 0))  # x itself is still needed
        return self.skip(x) + self.widen(inner)


def residual_level(in_channels: int, out_channels: int, blocks: int = 3, convs: int = 3) -> nn.Sequential:
    """The blocks of one level of a U-Net."""
    before = [in_channels, *[out_channels] * (blocks - 1)]
    return nn.Sequential(*(Residual(channels, out_channels, convs) for channels in before))


@torch.no_grad()
def orthogonal(module: nn.Module) -> None:
    """Fresh weights for all convolutions of a network: orthogonal ones, and biases of a deviation of 0.001.

    >>> level = residual_level(2, 4)
    >>> orthogonal(level)
    >>> first = level[0].convs[0].weight.flatten(1)
    >>> torch.allclose(first @ first.T, torch.eye(2), atol=1e-5)
    True
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.orthogonal_(part.weight)
            assert part.bias is not None
            nn.init.trunc_normal_(part.bias, std=0.001, a=-0.002, b=0.002)
