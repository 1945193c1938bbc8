"""DeepLabv3+ on a ResNet, the larger backbone."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.features import Backbone, Features, check_images, crop, pad_to_multiple
from ambiseg.nn.unet import BatchNorm, load_weights


class DeepLabV3Plus(Backbone):
    """DeepLabv3+ (Chen et al. 2018): a ResNet with dilated last stages, a pyramid of dilations, a light decoder.

    The gate reads the output of the pyramid, 256 channels. The dense features are the decoder's last ones, upsampled
    from a quarter of the image's size. Images of any size are padded and cropped as by
    :class:`~ambiseg.nn.unet.UNet`.

    Args:
        in_channels: channels of the images.
        depth: layers of the ResNet: 18, 50 or 101.
        width: channels of the decoder, and of the dense features.
        output_stride: how much smaller than the image the deepest map is: 8, 16 or 32.

    >>> deeplab = DeepLabV3Plus(in_channels=3, depth=18, width=16).eval()
    >>> features = deeplab(torch.zeros(2, 3, 30, 41))
    >>> features.dense.shape, features.gate.shape           # the gate's map is that of 32×48 pixels
    (torch.Size([2, 16, 30, 41]), torch.Size([2, 256, 2, 3]))
    """

    def __init__(self, in_channels: int, depth: int = 50, width: int = 256, output_stride: int = 16) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.multiple = output_stride
        self.dense_channels = width
        self.gate_channels = 256
        self.encoder = ResNet(in_channels, depth, output_stride)
        # Rates are for stride 16. They count in pixels of the deepest map, so a finer one needs larger rates.
        rates = [rate * 16 // output_stride for rate in (6, 12, 18)]
        self.pyramid = Pyramid(self.encoder.deep_channels, self.gate_channels, rates)
        self.project = _unit(self.encoder.low_channels, 48, 1)  # few channels, or they would outweigh the pyramid's
        self.decoder = nn.Sequential(_unit(self.gate_channels + 48, width, 3), _unit(width, width, 3))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Features:
        """Images ``[B, in_channels, H, W]`` -> features; ``dense`` is ``[B, width, H, W]``."""
        check_images(images, self.in_channels)
        padded = pad_to_multiple(images, self.multiple)
        low, deep = self.encoder(padded)
        gate = self.pyramid(deep)
        dense = self.decoder(torch.cat([_resize(gate, low), self.project(low)], 1))
        return Features(crop(_resize(dense, padded), images.shape[-2:]), gate)

    def load_imagenet(self, path: str | PathLike[str]) -> None:
        """Load the encoder from a file with torchvision's weights of the same ResNet, e.g. ``resnet50-0676ba61.pth``.

        The file is read as weights only: nothing in it is executed. The classifier ``fc`` is left out. If the images do
        not have three channels, each gets the mean of the first convolution's three, scaled so that an image with
        equal channels is answered alike.

        Raises:
            ValueError: if the file holds something else, or the weights of another network.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ValueError(f"{path}: expected a file of weights, found something else") from error
        if not isinstance(state, Mapping) or not all(isinstance(weight, Tensor) for weight in state.values()):
            raise ValueError(f"{path}: expected a state dict with one tensor for each name")
        state = {name: weight for name, weight in state.items() if not name.startswith("fc.")}
        first = state.get("conv1.weight")
        if first is not None and first.shape[1] == 3 != self.in_channels:
            mean = first.mean(1, keepdim=True) * (3 / self.in_channels)
            state["conv1.weight"] = mean.expand(-1, self.in_channels, -1, -1)
        load_weights(self.encoder, state, str(path))


class ResNet(nn.Module):
    """The convolutions of a ResNet (He et al. 2016), under torchvision's names. Stages beyond ``output_stride`` dilate.

    Maps images ``[B, in_channels, H, W]`` to the first stage's map, a quarter of their size, and the last stage's.
    A dilated map holds, at every other pixel, what the map of the ordinary network holds there: weights fit both.
    """

    def __init__(self, in_channels: int, depth: int, output_stride: int = 32) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(map(str, DEPTHS))}, found {depth}")
        if output_stride not in DILATED:
            raise ValueError(f"output_stride must be one of {', '.join(map(str, DILATED))}, found {output_stride}")
        block, blocks = DEPTHS[depth]
        third, fourth = DILATED[output_stride]
        self.low_channels, self.deep_channels = 64 * block.expansion, 512 * block.expansion
        self.conv1 = _conv(in_channels, 64, 7, stride=2)
        self.bn1 = BatchNorm(64)
        self.layer1 = _stage(block, 64, 64, blocks[0])
        self.layer2 = _stage(block, self.low_channels, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], *third)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], *fourth)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.bn1(self.conv1(images)))
        low = self.layer1(F.max_pool2d(x, 3, stride=2, padding=1))
        return low, self.layer4(self.layer3(self.layer2(low)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut; ``before`` and ``dilation`` are those before and after the stride."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int = 1, before: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride, before)
        self.bn1 = BatchNorm(width)
        self.conv2 = _conv(width, width, 3, dilation=dilation)
        self.bn2 = BatchNorm(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut; its only 3×3 convolution has the stride, as in torchvision."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int = 1, before: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = BatchNorm(width)
        self.conv2 = _conv(width, width, 3, stride, before)
        self.bn2 = BatchNorm(width)
        self.conv3 = _conv(width, 4 * width, 1)
        self.bn3 = BatchNorm(4 * width)
        self.downsample = _shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}
"""The ResNets by depth: their block, and how many of it each stage has."""

DILATED: dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    8: ((1, 1, 2), (1, 2, 4)),
    16: ((2, 1, 1), (1, 1, 2)),
    32: ((2, 1, 1), (2, 1, 1)),
}
"""(stride, dilation before it, dilation after it) of the last two stages, by output stride."""


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: one map looked at with several dilations, and as a whole; ``[B, ·, h, w]``."""

    def __init__(self, in_channels: int, width: int, rates: list[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [_unit(in_channels, width, 1), *(_unit(in_channels, width, 3, rate) for rate in rates)]
        )
        self.whole = _unit(in_channels, width, 1)
        self.project = _unit(width * (len(rates) + 2), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        views = [branch(x) for branch in self.branches]
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*views, whole], 1))


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    blocks: int,
    stride: int = 1,
    before: int = 1,
    dilation: int = 1,
) -> nn.Sequential:
    out_channels = width * block.expansion
    first = block(in_channels, width, stride, before, dilation)
    return nn.Sequential(
        first, *(block(out_channels, width, before=dilation, dilation=dilation) for _ in range(1, blocks))
    )


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), BatchNorm(out_channels))


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    padding = dilation * (kernel // 2)
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding, dilation, bias=False)


def _unit(in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    conv = _conv(in_channels, out_channels, kernel, dilation=dilation)
    return nn.Sequential(conv, BatchNorm(out_channels), nn.ReLU(inplace=True))


def _resize(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
