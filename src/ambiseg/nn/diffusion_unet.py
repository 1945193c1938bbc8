"""The U-Net of diffusion models (Dhariwal and Nichol 2021, ADM): residual blocks that know the step, and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.features import check_images, crop, pad_to_multiple

ATTENTION = (8, 16, 32)
"""Strides of the levels that have self-attention, where there are such levels."""

EACH = 4
"""Channels of a group of the norms, at least."""

_BLOCKS = 2  # of each level on the way down
_GROUPS, _HEAD, _EMBEDDED = 32, 32, 32


class GroupNorm(nn.Module):
    """Group norm of 32 groups, or of as many as 32 and the channels have in common.

    PyTorch's own refuses a map of one pixel whose groups have one channel: the deepest map of a small image.

    Args:
        channels: of the maps.
        each: channels of a group, at least. A norm of single channels takes away what is the same at all pixels, such
            as an embedding of the step.
    """

    def __init__(self, channels: int, each: int = 1) -> None:
        super().__init__()
        self.groups = math.gcd(_GROUPS, channels)
        while self.groups > 1 and channels // self.groups < each:
            self.groups //= 2
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.group_norm(x, self.groups, self.weight, self.bias)


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + W silu(step)))), the last convolution 0 at first.

    Args:
        channels: of the input.
        out: of the output; where they differ, x goes through a 1×1 convolution.
        embedded: of the embedding of the step.
        each: channels of a group of the norms, at least.
    """

    def __init__(self, channels: int, out: int, embedded: int, each: int) -> None:
        super().__init__()
        self.first_norm, self.first = GroupNorm(channels, each), nn.Conv2d(channels, out, 3, padding=1)
        self.step = nn.Linear(embedded, out)
        self.second_norm, self.second = GroupNorm(out, each), zeroed(nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """``[B, channels, h, w]`` and ``[B, embedded] -> [B, out, h, w]``."""
        y = self.first(F.silu(self.first_norm(x)))
        y = y + self.step(F.silu(step))[..., None, None].to(y.dtype)
        return self.skip(x) + self.second(F.silu(self.second_norm(y)))


class Attention(nn.Module):
    """Self-attention over all pixels of a map, added to it; heads of 32 channels. Its last layer is 0 at first."""

    def __init__(self, channels: int, each: int) -> None:
        super().__init__()
        self.heads = 1 if channels % _HEAD else channels // _HEAD
        self.norm, self.all = GroupNorm(channels, each), nn.Conv2d(channels, 3 * channels, 1)
        self.out = zeroed(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.all(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1))  # [B, 3, heads, F, P]
        query, key, value = rows.transpose(3, 4).contiguous().unbind(1)  # strided ones would take the slow way
        seen = F.scaled_dot_product_attention(query, key, value)  # never all pairs of pixels in memory
        return x + self.out(seen.transpose(2, 3).reshape(x.shape))


class Level(nn.Module):
    """A residual block, and attention where its level has it."""

    def __init__(self, channels: int, out: int, embedded: int, each: int, attends: bool) -> None:
        super().__init__()
        self.block = ResidualBlock(channels, out, embedded, each)
        self.attention = Attention(out, each) if attends else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.attention(self.block(x, step))


class DiffusionUNet(nn.Module):
    """Maps and the number of a step -> maps. On the way down each level has two residual blocks and a convolution of
    stride 2; on the way up three blocks, each of which reads what one of the way down (or its convolution) gave, then
    nearest upsampling and a convolution. The last convolution is 0 at first.

    Images of any size: they are padded at the right and at the bottom by repeating their border, and cropped again.
    Group norm and attention see the whole map: what is said of a pixel depends on all others.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        channels: of each level, from the image's size down, at least one.
        scale: works on maps this many times coarser.
        each: channels of a group of the norms, at least; ADM has 1, and so 32 groups. At levels of 32 channels the
            embedding of the step is then taken away by the next norm, and networks of up to 32 channels know no step.

    >>> unet = DiffusionUNet(3, 2, channels=(4, 8))
    >>> unet(torch.zeros(5, 3, 13, 10), torch.arange(5)).shape
    torch.Size([5, 2, 13, 10])
    """

    def __init__(
        self, in_channels: int, out_channels: int, channels: Sequence[int], scale: int = 1, each: int = EACH
    ) -> None:
        super().__init__()
        self.in_channels, self.scale = in_channels, scale
        self.multiple = scale * 2 ** (len(channels) - 1)
        self.embedded = max(channels[0], _EMBEDDED)
        wide = 4 * self.embedded
        self.step = nn.Sequential(nn.Linear(self.embedded, wide), nn.SiLU(), nn.Linear(wide, wide))
        attends = [2**level in ATTENTION for level in range(len(channels))]

        self.down = nn.ModuleList([nn.Conv2d(in_channels, channels[0], 3, padding=1)])
        widths = [channels[0]]  # of what every part of the way down gives
        for level, width in enumerate(channels):
            if level:
                self.down.append(nn.Conv2d(widths[-1], widths[-1], 3, stride=2, padding=1))
                widths.append(widths[-1])
            for _ in range(_BLOCKS):
                self.down.append(Level(widths[-1], width, wide, each, attends[level]))
                widths.append(width)

        last = channels[-1]
        deep = 2 ** (len(channels) - 1) >= min(ATTENTION)  # over fine maps attention would take most of the time
        self.middle = nn.ModuleList([Level(last, last, wide, each, deep), Level(last, last, wide, each, False)])

        self.up = nn.ModuleList()
        here = last
        for level, width in reversed([*enumerate(channels)]):
            for _ in range(_BLOCKS + 1):
                self.up.append(Level(here + widths.pop(), width, wide, each, attends[level]))
                here = width
            if level:
                self.up.append(nn.Conv2d(here, here, 3, padding=1))
        self.norm, self.out = GroupNorm(here, each), zeroed(nn.Conv2d(here, out_channels, 3, padding=1))

    def forward(self, maps: Tensor, t: Tensor) -> Tensor:
        """``[B, in_channels, H, W]`` and the steps ``[B] -> [B, out_channels, H, W]``."""
        check_images(maps, self.in_channels)
        x, kept = pad_to_multiple(maps, self.multiple), []
        step = self.step(sinusoid(t, self.embedded).to(x.dtype))
        if self.scale > 1:
            x = F.avg_pool2d(x, self.scale)
        for part in self.down:
            x = part(x, step) if isinstance(part, Level) else part(x)
            kept.append(x)
        for part in self.middle:
            x = part(x, step)
        for part in self.up:
            if isinstance(part, Level):
                x = part(torch.cat([x, kept.pop()], 1), step)
            else:
                x = part(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.out(F.silu(self.norm(x)))
        if self.scale > 1:
            x = F.interpolate(x, scale_factor=float(self.scale), mode="bilinear", align_corners=False)
        return crop(x, maps.shape[2:])


def sinusoid(t: Tensor, channels: int) -> Tensor:
    """cos(t ω_i) and sin(t ω_i) with  ω_i = 10000^(−2 i / channels),  ``[B] -> [B, channels]`` float32.

    >>> sinusoid(torch.tensor([0, 3]), 4)
    tensor([[ 1.0000,  1.0000,  0.0000,  0.0000],
            [-0.9900,  0.9996,  0.1411,  0.0300]])
    """
    half = (channels + 1) // 2
    angles = t[:, None].float() * torch.exp(-math.log(10000) / half * torch.arange(half, device=t.device))
    return torch.cat([angles.cos(), angles.sin()], 1)[:, :channels]


def zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    """The same with all weights 0."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
