"""CAR's networks: the calibration network F, in three kinds, and the refinement network G."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.injection import NoiseInjection
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.unet import BatchNorm

Generator = torch.Generator | None
_VGG19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # width and convolutions of each level


def dropped(x: Tensor, rate: float, generator: Generator = None) -> Tensor:
    """Dropout whose random numbers come from a generator, as all of a training step do.

    >>> dropped(torch.ones(8), 0.5, torch.Generator().manual_seed(0)).unique().tolist()
    [0.0, 2.0]
    """
    kept = torch.empty_like(x, requires_grad=False).bernoulli_(1 - rate, generator=generator)
    return x * kept.div_(1 - rate)


class Layer(nn.Module):
    """A convolution, batch norm, leaky ReLU and dropout.

    Args:
        conv: a convolution or a transposed one.
        slope: of the leaky ReLU below 0.
        rate: of dropout.
        early: dropout directly after the convolution.
    """

    def __init__(
        self, conv: nn.Conv2d | nn.ConvTranspose2d, slope: float = 0.0, rate: float = 0.1, early: bool = False
    ) -> None:
        super().__init__()
        self.conv, self.norm = conv, BatchNorm(conv.out_channels)
        self.slope, self.rate, self.early = slope, rate, early

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        return self.rest(self.conv(x), generator)

    def rest(self, x: Tensor, generator: Generator = None) -> Tensor:
        """All that follows the convolution."""
        if self.early:
            return F.leaky_relu(self.norm(self._dropped(x, generator)), self.slope)
        return self._dropped(F.leaky_relu(self.norm(x), self.slope), generator)

    def _dropped(self, x: Tensor, generator: Generator) -> Tensor:
        return dropped(x, self.rate, generator) if self.training and self.rate else x


# -- calibration networks ----------------------------------------------------------------------------------------------


class Trunk(nn.Module):
    """The backbone and a pixel network, as the deterministic U-Net has them."""

    def __init__(self, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone.build_dense(in_channels)
        self.head = PixelMLP(self.backbone.dense_channels, classes, norm=True, momentum=backbone.momentum)
        self.multiple = self.backbone.multiple

    def forward(self, images: Tensor, generator: Generator = None) -> Tensor:
        """Logits ``[B, C, H, W]``."""
        return self.head(self.backbone(images).dense)[:, 0]


class SegNet(nn.Module):
    """The authors' network for LIDC: VGG19 with batch norm, and a decoder of transposed convolutions with skips.

    Layers that the decoder repeats are one layer that runs several times, as in the authors' code: its weights and its
    batch statistics are shared. The authors start from weights of ImageNet; this starts from random ones.

    Args:
        in_channels: of the images, whose sides are multiples of 32.
        classes: C.
        rate: of dropout.
    """

    multiple: ClassVar[int] = 32

    def __init__(self, in_channels: int, classes: int, rate: float = 0.1) -> None:
        super().__init__()
        self.down, below = nn.ModuleList(), in_channels
        for width, convs in _VGG19:
            widths = [below, *[width] * convs]
            self.down.append(nn.ModuleList(_conv(i, o, rate, mode="fan_out") for i, o in pairwise(widths)))
            below = width
        self.up = nn.ModuleList(
            [
                _Step(512, [(512, 4)], rate),
                _Step(1024, [(512, 1), (512, 2), (256, 1)], rate),
                _Step(512, [(256, 1), (256, 2), (128, 1)], rate),
                _Step(256, [(128, 1), (64, 1)], rate),
                _Step(128, [(64, 1), (classes, 1)], rate),
            ]
        )
        self.out = _initialised(nn.Conv2d(classes, classes, 3))

    def forward(self, images: Tensor, generator: Generator = None) -> Tensor:
        """Logits ``[B, C, H, W]``."""
        x, skips = images, []
        for level in self.down:
            for layer in level:  # type: ignore[union-attr]
                x = layer(x, generator)
            x = F.max_pool2d(x, 2)
            skips.append(x)
        x = self.up[0](skips.pop(), generator)
        for step in self.up[1:]:
            x = step(torch.cat([skips.pop(), x], 1), generator)
        return self.out(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class _Step(nn.Module):
    """A step up: twice the size, then layers of which each runs a number of times."""

    def __init__(self, channels: int, layers: Sequence[tuple[int, int]], rate: float) -> None:
        super().__init__()
        self.spread = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        widths = [channels, *(width for width, _ in layers)]
        self.layers = nn.ModuleList(_conv(i, o, rate) for i, o in pairwise(widths))
        self.times = [times for _, times in layers]

    def forward(self, x: Tensor, generator: Generator) -> Tensor:
        x = self.spread(x)
        for layer, times in zip(self.layers, self.times, strict=True):
            for _ in range(times):
                x = layer(x, generator)
        return x


def _conv(in_channels: int, out_channels: int, rate: float, mode: str = "fan_in") -> Layer:
    return Layer(_initialised(nn.Conv2d(in_channels, out_channels, 3, padding=1), mode), rate=rate)


def _initialised(conv: nn.Conv2d, mode: str = "fan_in") -> nn.Conv2d:
    nn.init.kaiming_normal_(conv.weight, mode=mode, nonlinearity="relu")  # type: ignore[arg-type]
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


class FiveConvolutions(nn.Module):
    """The authors' network for Cityscapes, which corrects the prediction of another network that it reads as channels.

    Args:
        in_channels: of the images and that prediction.
        classes: C.
        width: of the hidden layers.
        rate: of dropout, which also falls on the logits.
    """

    multiple: ClassVar[int] = 2  # reflecting needs a second pixel

    def __init__(self, in_channels: int, classes: int, width: int = 64, rate: float = 0.2) -> None:
        super().__init__()
        widths, self.rate = [in_channels, *[width] * 4], rate
        self.layers = nn.ModuleList(
            Layer(nn.Conv2d(i, o, 3, padding=1, padding_mode="reflect"), 0.2, rate, early=True)
            for i, o in pairwise(widths)
        )
        self.out = nn.Conv2d(width, classes, 3, padding=1, padding_mode="reflect")

    def forward(self, images: Tensor, generator: Generator = None) -> Tensor:
        """Logits ``[B, C, H, W]``."""
        x = images
        for layer in self.layers:
            x = layer(x, generator)
        x = self.out(x)
        return dropped(x, self.rate, generator) if self.training and self.rate else x


# -- refinement network ------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """What the refinement network computes once for all draws of an image.

    Attributes:
        maps: ``[B, F, h, w]`` where the first code enters.
        skips: what the encoder adds to each step up that is left.
    """

    maps: Tensor
    skips: tuple[Tensor, ...]


class Refinement(nn.Module):
    """G, which makes a mask of image, class probabilities and a code:  ŷ = softmax(G(x, F(x), z)).

    Convolutions of stride 2 go down, transposed ones with skips go up. The code enters after the second and every
    further step up but the last, and at the output (:class:`~ambiseg.nn.injection.NoiseInjection`).

    Args:
        in_channels: of image and probabilities, whose sides are multiples of 2^levels.
        classes: C.
        latent: L, dimension of the code.
        width: of the first level; each further one has twice as many.
        levels: how often the size is halved; two or more.
        rate: of dropout.

    >>> G = Refinement(in_channels=3, classes=2, latent=8, width=4).eval()
    >>> G.decode(G.prepare(torch.randn(2, 3, 32, 32)), torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 2, 32, 32])
    """

    def __init__(
        self, in_channels: int, classes: int, latent: int, width: int = 32, levels: int = 4, rate: float = 0.1
    ) -> None:
        super().__init__()
        self.latent, self.multiple = latent, 2**levels
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            Layer(nn.Conv2d(i, o, 3, stride=2, padding=1), 0.2, rate) for i, o in pairwise([in_channels, *widths])
        )
        self.widths = [*widths[-2::-1], width]  # of the steps up
        read = [widths[-1], *(2 * width for width in self.widths)]  # from the second on, as many of the skip
        self.up = nn.ModuleList(
            Layer(nn.ConvTranspose2d(i, o, 2, stride=2), 0.2, rate) for i, o in zip(read, self.widths, strict=False)
        )
        self.inner = nn.ModuleList(NoiseInjection(width, latent, width) for width in self.widths[1:-1])
        self.out = NoiseInjection(width, latent, classes)

    def prepare(self, x: Tensor, generator: Generator = None) -> Prepared:
        """All that no code changes, of image and probabilities ``[B, in_channels, H, W]``."""
        maps = []
        for layer in self.down:
            x = layer(x, generator)
            maps.append(x)
        x = self.up[0](maps.pop(), generator)
        x = self.up[1](torch.cat([x, maps.pop()], 1), generator)
        # A convolution of two maps side by side is the sum of two: that of the skip is the same for all draws.
        left = zip(self.up[2:], self.widths[1:], maps[::-1], strict=False)
        skips = [
            F.conv_transpose2d(skip, layer.conv.weight[width:], layer.conv.bias, stride=2)  # type: ignore[union-attr]
            for layer, width, skip in left
        ]
        return Prepared(x, tuple(skips))

    def decode(self, prepared: Prepared, codes: Tensor, generator: Generator = None) -> Tensor:
        """Logits ``[B, N, C, H, W]`` of the codes ``[B, N, L]``."""
        x, (B, N) = prepared.maps, codes.shape[:2]
        parts = zip(self.inner, self.up[2:], prepared.skips, strict=True)
        for number, (inject, layer, skip) in enumerate(parts):
            x = F.leaky_relu(inject(x, codes, number > 0), 0.01)
            weight = layer.conv.weight[: x.shape[1]]  # type: ignore[union-attr]
            x = F.conv_transpose2d(x, weight, stride=2).unflatten(0, (B, N)) + skip[:, None]
            x = layer.rest(x.flatten(0, 1), generator)  # type: ignore[operator]
        return self.out(x, codes, len(self.inner) > 0).unflatten(0, (B, N))
