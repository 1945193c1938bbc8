"""A residual U-Net whose way up is interleaved with latent codes (the Hierarchical Probabilistic U-Net's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.features import repeated
from ambiseg.nn.gaussian import Gaussian, GaussianHead
from ambiseg.nn.hierarchy import Choose, Walk, walk
from ambiseg.nn.residual import residual_level


class State(NamedTuple):
    """A U-Net on its way up.

    Attributes:
        features: ``[B, F, h, w]`` or, once a code was drawn, ``[B·N, F, h, w]``, draws of an image side by side.
        skips: maps ``[B, …]`` of the way down that are still to come, the coarsest first.
    """

    features: Tensor
    skips: tuple[Tensor, ...]


def _as_many(maps: Tensor, like: Tensor) -> Tensor:
    """Maps of every image, repeated for the draws of ``like``."""
    return repeated(maps, like.shape[0] // maps.shape[0])


def climbed(blocks: nn.Module, state: State, z: Tensor | None = None) -> State:
    """One level up: the code joins the features, both are enlarged, and meet the map of the way down."""
    x, (skip, *left) = state
    if z is not None:
        x = torch.cat([_as_many(x, z), z.to(x.dtype)], 1)
    x = F.interpolate(x, scale_factor=2, mode="nearest")
    return State(blocks(torch.cat([x, _as_many(skip, x)], 1)), tuple(left))


class CodeLevel(nn.Module):
    """A level of the hierarchy: the features say how the code is distributed, and the code says how they go on.

    Args:
        channels: of the features.
        latent: of the code.
        up: the blocks of the level above, which read the code; ``None`` where nobody asks for what comes after.
    """

    def __init__(self, channels: int, latent: int, up: nn.Module | None) -> None:
        super().__init__()
        self.head, self.up = GaussianHead(channels, latent, scale="exp", pool="none"), up

    def distribution(self, state: State) -> Gaussian:
        return self.head(state.features)

    def onward(self, state: State, z: Tensor) -> State:
        return state if self.up is None else climbed(self.up, state, z)


class Ladder(nn.Module):
    """The way down of a residual U-Net, and its way up as far as there are codes.

    Args:
        in_channels: of what it reads.
        channels: of each level, from the image's size down.
        latents: channels of the codes, from the coarsest level up; fewer than levels.
        blocks: residual blocks per level.
        convs: convolutions per block.
        ends: without the blocks after the last code: a posterior is not asked for them.

    >>> ladder = Ladder(1, channels=(4, 8, 8), latents=(2, 1))
    >>> found = ladder.walked(ladder(torch.zeros(3, 1, 16, 16)), lambda level, p: p.mean)
    >>> [tuple(z.shape) for z in found.codes], found.state.features.shape
    ([(3, 2, 4, 4), (3, 1, 8, 8)], torch.Size([3, 4, 16, 16]))
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        latents: Sequence[int],
        blocks: int = 3,
        convs: int = 3,
        ends: bool = False,
    ) -> None:
        super().__init__()
        above = [in_channels, *channels[:-1]]
        self.down = nn.ModuleList(residual_level(i, o, blocks, convs) for i, o in zip(above, channels, strict=True))
        widths = channels[::-1]
        self.levels = nn.ModuleList()
        for number, latent in enumerate(latents):
            width, skip = widths[number], widths[number + 1]
            last = ends and number == len(latents) - 1
            up = None if last else residual_level(width + latent + skip, skip, blocks, convs)
            self.levels.append(CodeLevel(width, latent, up))

    def forward(self, images: Tensor) -> State:
        """``[B, in_channels, H, W]``, whose sides are multiples of 2^(levels − 1), to the state at the bottom."""
        maps: list[Tensor] = []
        for number, level in enumerate(self.down):
            images = level(F.avg_pool2d(images, 2) if number else images)
            maps.append(images)
        return State(maps[-1], tuple(maps[-2::-1]))

    def walked(self, bottom: State, choose: Choose) -> Walk:
        """From the bottom up, level by level, with the codes that are chosen."""
        return walk(self.levels, bottom, choose)  # type: ignore[arg-type]
