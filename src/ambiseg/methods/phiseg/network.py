"""The networks of PHiSeg: prior and posterior over latent maps in levels, and what latent maps say about the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32
from ambiseg.nn.gaussian import Gaussian, GaussianHead, positive
from ambiseg.nn.hierarchy import Level
from ambiseg.nn.latent import LatentEncoder
from ambiseg.nn.unet import Convolutions
from ambiseg.overlap import full_precision


class Coarsest(nn.Module):
    """The distribution of the coarsest latent map, of the last map of an encoder: μ reads 3×3 places, σ one."""

    def __init__(self, channels: int, latent: int) -> None:
        super().__init__()
        self.mean = nn.Conv2d(channels, latent, 3, padding=1)
        self.scale = nn.Conv2d(channels, latent, 1)
        for conv in (self.mean, self.scale):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Tensor) -> Gaussian:
        with full_precision(maps):
            maps = at_least_float32(maps)
            return Gaussian(self.mean(maps), positive(self.scale(maps), "softplus"))


class Finer(nn.Module):
    """The distribution of the latent map of a level, given the image and the latent map above it:

        h = two convolutions(up(z_{ℓ+1})),     (μ, σ) = 1×1(two convolutions([encoder map, h]))

    The first convolution after the concatenation is a sum of one of the encoder's map, computed once per image
    (:meth:`of_image`), and one of h, computed once per draw.

    Args:
        encoded: channels of the encoder's map.
        width: of the convolutions after the concatenation.
        latent: channels of z.
        lifted: channels of h.
        kind: of convolutions, two to a block.
    """

    def __init__(self, encoded: int, width: int, latent: int, lifted: int, kind: Convolutions) -> None:
        super().__init__()
        self.encoded = encoded
        self.lift = kind.block(latent, lifted)
        self.join = kind.block(encoded + lifted, width)
        self.head = GaussianHead(width, latent, "softplus", "none")

    def of_image(self, maps: Tensor) -> Tensor:
        """What the image contributes, ``[B, encoded, h, w] -> [B, width, h, w]``."""
        return F.conv2d(maps, self._first.weight[:, : self.encoded], self._first.bias, padding=1)

    def forward(self, of_image: Tensor, above: Tensor) -> Gaussian:
        """Of N draws per image, which stand next to each other:  ``[B, …]``, ``[B·N, latent, h/2, w/2]``."""
        of_code = F.conv2d(self.lift(doubled(above)), self._first.weight[:, self.encoded :], padding=1)
        joined = of_code.unflatten(0, (of_image.shape[0], -1)) + of_image[:, None]
        return self.head(self.join[1:](joined.flatten(0, 1)))

    @property
    def _first(self) -> nn.Conv2d:
        return self.join[0]  # type: ignore[return-value]


class AtTop(NamedTuple):
    """The coarsest level of given images."""

    gaussian: Gaussian

    def distribution(self, state: None) -> Gaussian:
        return self.gaussian

    def onward(self, state: None, z: Tensor) -> Tensor:
        return z


class AtFiner(NamedTuple):
    """A level below it, of given images."""

    network: Finer
    of_image: Tensor

    def distribution(self, state: Tensor) -> Gaussian:
        return self.network(self.of_image, state)

    def onward(self, state: Tensor, z: Tensor) -> Tensor:
        return z


class Latents(nn.Module):
    """The prior or the posterior: an encoder of its own, and the levels that :func:`ambiseg.nn.hierarchy.walk` takes.

    Args:
        encoder: of images, or of images and masks.
        channels: of its resolutions.
        levels: L; level ℓ is at resolution ℓ + len(channels) − L, level 0 is the finest.
        latent: channels of z.
        kind: of convolutions.
    """

    def __init__(
        self, encoder: LatentEncoder, channels: Sequence[int], levels: int, latent: int, kind: Convolutions
    ) -> None:
        super().__init__()
        gap, two = len(channels) - levels, kind._replace(convs=2)
        self.encoder = encoder
        self.coarsest = Coarsest(channels[-1], latent)
        self.finer = nn.ModuleList(
            Finer(channels[level + gap], channels[level], latent, latent * channels[0], two)
            for level in reversed(range(levels - 1))
        )

    def forward(self, images: Tensor, masks: Tensor | None = None) -> list[Level]:
        """The levels of given images, the coarsest first; what does not depend on a draw is computed."""
        *maps, last = self.encoder(images, masks)
        return [AtTop(self.coarsest(last)), *self._finer(maps)]

    def _finer(self, maps: list[Tensor]) -> Iterator[AtFiner]:
        for network, encoded in zip(self.finer, reversed(maps), strict=False):
            assert isinstance(network, Finer)
            yield AtFiner(network, network.of_image(encoded))


class Likelihood(nn.Module):
    """What latent maps say about the mask. It sees nothing of the image.

        a_ℓ = lifted z_ℓ, of 2^gap times its size,     c_ℓ = join([a_ℓ, conv(up(c_{ℓ+1}))]),     s_ℓ = 1×1(c_ℓ)

    Args:
        channels: of the resolutions of the encoders.
        levels: L.
        latent: channels of z.
        classes: C.
        kind: of convolutions.

    Attributes:
        peak: numbers per pixel of the finest level that one draw has in memory at most, about.
    """

    def __init__(self, channels: Sequence[int], levels: int, latent: int, classes: int, kind: Convolutions) -> None:
        super().__init__()
        gap, one, two = len(channels) - levels, kind._replace(convs=1), kind._replace(convs=2)
        joined = [*channels[gap:-1], channels[levels - 1]]  # channels of c, from fine to coarse
        self.lift = nn.ModuleList(
            nn.ModuleList([two.block(latent, width), *(one.block(width, width) for _ in range(gap))])
            for width in channels[:levels]
        )
        self.climb = nn.ModuleList(one.block(joined[level + 1], channels[level]) for level in range(levels - 1))
        self.join = nn.ModuleList(two.block(2 * channels[level], joined[level]) for level in range(levels - 1))
        self.score = nn.ModuleList(nn.Conv2d(width, classes, 1) for width in joined)
        for conv in self.score:
            assert isinstance(conv, nn.Conv2d)
            assert conv.bias is not None
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            nn.init.zeros_(conv.bias)
        self.peak = sum(joined[:2]) + joined[0] + 3 * channels[0]

    def forward(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Latent maps, the finest first -> logits s_ℓ of each level, each half the size of the one before."""
        scores: list[Tensor] = []
        below: Tensor | None = None
        for level in reversed(range(len(self.lift))):
            x = self._lifted(level, codes[level])
            if below is not None:
                x = self.join[level](torch.cat([x, self.climb[level](doubled(below))], 1))
            below = x
            scores.append(self.score[level](x))
        return scores[::-1]

    def _lifted(self, level: int, z: Tensor) -> Tensor:
        first, *rest = self.lift[level]  # type: ignore[misc]
        x = first(z)
        for block in rest:
            x = block(doubled(x))
        return x


def doubled(x: Tensor) -> Tensor:
    """Maps of twice the size, bilinearly."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
