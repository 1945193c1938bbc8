"""PHiSeg's U-Net, the default backbone, and what every convolutional backbone here needs: padding, norms, loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg.nn.features import Backbone, Enter, Features, check_images, coarser, crop, pad_to_multiple, repeated

FULL = (32, 64, 128, 192, 192, 192, 192)
"""Channels of the paper's U-Net, level by level from the image's size down."""

LIGHT = (32, 64, 128, 192)
"""Channels of the paper's light U-Net."""

Decoder: TypeAlias = Literal["released", "phiseg"]
"""Width of the step up from level i to i − 1: channels[i − 1] in the released code of MoSE, channels[i] in PHiSeg."""


class UNet(Backbone):
    """PHiSeg's U-Net (Baumgartner et al. 2019), which MoSE uses on LIDC and on Cityscapes.

    Each level is ``convs`` × (3×3 convolution, batch norm, ReLU). Between levels 2×2 averages go down; bilinear
    upsampling goes up, where the encoder's map of that level is concatenated. Images of any size: they are padded at
    the right and at the bottom by repeating their border, and the features are cropped again.

    Args:
        in_channels: channels of the images.
        channels: channels of each level, from the image's size down: :data:`FULL`, :data:`LIGHT` or any other two
            or more.
        decoder: the width of the decoder, see :data:`Decoder`. Released checkpoints need ``released``.
        bias: whether convolutions have a bias (the norm after them makes it redundant). By default as in the code
            that each decoder comes from: ``released`` has them, ``phiseg`` does not.
        convs: convolutions per level.
        norm: batch norm after each convolution; without it convolutions always have a bias.
        last: whether the very last convolution is there. A method that has a layer of its own in its place leaves it
            out, with its norm and ReLU; ``dense`` is then what that layer reads, and it gives ``head_channels``.
        gate_level: which encoder map the gate reads, as a fraction of the way down; 1 is the bottom.
        gate_scales: how many encoder maps the gate reads, that of ``gate_level`` and those above it, or ``all``. The
            finer ones are averaged over the places of the coarsest, and all are concatenated.
        inject_level: where noise enters, as a fraction of the way up; 1 is the last features. Below 1, ``forward``
            stops there and :meth:`finish` does the remaining steps, once for each sample.
        momentum: of the running statistics. PHiSeg's 0.01 looks hundreds of steps back: a run of a few hundred
            steps wants 0.1, or it is evaluated with statistics of networks it no longer is.

    >>> unet = UNet(in_channels=1, channels=(4, 8, 16))
    >>> features = unet(torch.zeros(2, 1, 30, 41))
    >>> features.dense.shape, features.gate.shape           # the gate's map is that of 32×44 pixels
    (torch.Size([2, 4, 30, 41]), torch.Size([2, 16, 8, 11]))

    Noise after the first of two steps up, here for three samples per image:

    >>> unet = UNet(in_channels=1, channels=(4, 8, 16), inject_level=1 / 2)
    >>> features = unet(torch.zeros(2, 1, 30, 41))
    >>> noisy = features.dense.repeat_interleave(3, 0)
    >>> noisy.shape, unet.finish(noisy, features, (30, 41)).shape
    (torch.Size([6, 8, 16, 22]), torch.Size([6, 4, 30, 41]))

    Two variants of what enters the bottom, block 2 of 5; the levels above it are computed once:

    >>> unet = UNet(in_channels=1, channels=(4, 8, 16))
    >>> maps = unet.start(torch.zeros(1, 1, 30, 41), levels=2)
    >>> unet.resume(maps, (30, 41), lambda block, x: torch.cat([x, -x]) if block == 2 else x).shape
    torch.Size([2, 4, 30, 41])
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int] = FULL,
        decoder: Decoder = "released",
        bias: bool | None = None,
        convs: int = 3,
        gate_level: float = 1.0,
        inject_level: float = 1.0,
        momentum: float = 0.01,
        norm: bool = True,
        last: bool = True,
        gate_scales: int | Literal["all"] = 1,
    ) -> None:
        super().__init__()
        if decoder not in get_args(Decoder):
            raise ValueError(f"decoder must be one of {', '.join(get_args(Decoder))}, found {decoder!r}")
        if len(channels) < 2 or min(channels) < 1 or in_channels < 1 or convs < 1:
            raise ValueError(
                "expected at least two levels, and at least one channel and one convolution in each, "
                f"found in_channels={in_channels}, channels={tuple(channels)}, convs={convs}"
            )
        bias = decoder == "released" if bias is None else bias
        kind = Convolutions(convs, bias or not norm, momentum, norm)
        steps = len(channels) - 1
        self.in_channels = in_channels
        self.gate_step = _step(gate_level, steps, "gate_level")
        self.inject_step = _step(inject_level, steps, "inject_level")

        self.down = encoder(in_channels, channels, kind)
        skips = channels[-2::-1]  # of the maps that the decoder meets on its way up
        widths = [channels[-1], *(skips if decoder == "released" else channels[:0:-1])]  # after 0, 1, 2, … steps up
        self.up = nn.ModuleList(
            kind.block(below + skip, width) for below, skip, width in zip(widths[:-1], skips, widths[1:], strict=True)
        )
        self._head_channels = widths[-1]
        if not last:
            end, per_conv = self.up[-1], 2 + norm
            assert isinstance(end, nn.Sequential)
            read, self.up[-1] = end[-per_conv].in_channels, end[:-per_conv]
            widths = [*widths[:-1], read]
        levels = self.gate_step + 1
        scales = levels if gate_scales == "all" else gate_scales
        if not 1 <= scales <= levels:
            raise ConfigError(f"gate_scales: expected 1 to {levels} levels at gate_level, or all, found {gate_scales}")
        self.gate_scales = tuple(channels[levels - scales : levels])
        self.gate_channels = sum(self.gate_scales)
        self.dense_channels = widths[self.inject_step]
        self.multiple = 2**steps
        self.finishes = self.inject_step < steps
        self.block_levels = 0 if self.finishes else len(channels)

    @property
    def head_channels(self) -> int:
        return self._head_channels

    def forward(self, images: Tensor) -> Features:
        """Images ``[B, in_channels, H, W]`` -> features; ``dense`` is ``[B, F, H, W]`` unless ``inject_level`` < 1."""
        check_images(images, self.in_channels)
        maps = encoded(self.down, pad_to_multiple(images, self.multiple))
        x, skips = maps[-1], maps[-2::-1]
        for step in range(self.inject_step):
            x = self._climb(step, x, skips[step])
        left = tuple(skips[self.inject_step :])
        return Features(x if left else crop(x, images.shape[-2:]), self._read(maps), left)

    def _read(self, maps: Sequence[Tensor]) -> Tensor:
        """What the gate reads. Averages of averages are the averages of whole maps: all sides are powers of 2 apart."""
        deepest = maps[self.gate_step]
        if len(self.gate_scales) == 1:
            return deepest
        above = range(self.gate_step + 1 - len(self.gate_scales), self.gate_step)
        finer = [F.avg_pool2d(maps[level], 2 ** (self.gate_step - level)) for level in above]
        return torch.cat([*finer, deepest], 1)

    def finish(self, dense: Tensor, features: Features, size: tuple[int, int]) -> Tensor:
        samples, remainder = divmod(dense.shape[0], features.gate.shape[0])
        if remainder:
            raise ValueError(
                f"expected the same number of maps for each of {features.gate.shape[0]} images, "
                f"found {dense.shape[0]} maps"
            )
        for step, skip in enumerate(features.skips, self.inject_step):
            dense = self._climb(step, dense, repeated(skip, samples))
        return crop(dense, size)

    def start(self, images: Tensor, levels: int) -> list[Tensor]:
        check_images(images, self.in_channels)
        return encoded(self.down[:levels], pad_to_multiple(images, self.multiple))

    def resume(self, maps: Sequence[Tensor], size: Sequence[int], enter: Enter) -> Tensor:
        maps = list(maps)
        for level in range(len(maps), len(self.down)):
            maps.append(self.down[level](enter(level, F.avg_pool2d(maps[-1], 2))))
        x = maps[-1]
        for step, skip in enumerate(maps[-2::-1]):
            variants = x.shape[0] // skip.shape[0]
            x = self._climb(step, x, repeated(skip, variants), enter)
        return crop(x, size)

    def stride(self, block: int) -> int:
        levels = len(self.down)
        return 2 ** (block if block < levels else 2 * levels - 2 - block)

    def _climb(self, step: int, x: Tensor, skip: Tensor, enter: Enter | None = None) -> Tensor:
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)  # as the released code does
        x = torch.cat([x, skip], 1)
        return self.up[step](x if enter is None else enter(len(self.down) + step, x))


def unet_weights(channels: Sequence[int], convs: int, in_channels: int = 1, decoder: Decoder = "released") -> int:
    """How many weights the convolutions of a U-Net have, without making one.

    >>> unet = UNet(1, (4, 8, 16), convs=2)
    >>> unet_weights((4, 8, 16), 2) == sum(w.numel() for w in unet.parameters() if w.ndim == 4)
    True
    >>> unet_weights(FULL, 3, decoder="phiseg")  # 10.3 million with batch norm
    10303776
    """
    blocks = [*zip([in_channels, *channels[:-1]], channels, strict=True)]
    widths = channels[:-1] if decoder == "released" else channels[1:]  # of the steps up, the last one first
    below = [*widths[1:], channels[-1]]
    blocks += [(under + skip, width) for under, skip, width in zip(below, channels[:-1], widths, strict=True)]
    return sum(9 * (first * out + (convs - 1) * out * out) for first, out in blocks)


def unet_kept(channels: Sequence[int], convs: int) -> float:
    """Numbers that a training step keeps for its way back, at least, per pixel of a padded image: of each convolution
    its output, and what norm and ReLU make of it.

    >>> unet_kept((4, 8), convs=1)
    20.0
    """
    down = sum(width / 4**level for level, width in enumerate(channels))
    up = sum(width / 4**level for level, width in enumerate(channels[:-1]))
    return 2 * convs * (down + up)


class Scaled(Backbone):
    """A backbone that works on images ``scale`` times coarser, whose features are brought back to the image's size.

    Pixels are averaged over squares of ``scale`` × ``scale`` before the network, and its last features interpolated
    bilinearly after it: for images so large that a window of them would show too little of what is to be segmented.

    >>> backbone = Scaled(UNet(in_channels=1, channels=(4, 8)), scale=3)
    >>> backbone(torch.zeros(1, 1, 50, 64)).dense.shape, backbone.multiple
    (torch.Size([1, 4, 50, 64]), 6)
    """

    def __init__(self, network: Backbone, scale: int) -> None:
        super().__init__()
        if scale < 1:
            raise ValueError(f"expected a scale of at least 1, found {scale}")
        self.network, self.scale = network, scale
        self.dense_channels, self.gate_channels = network.dense_channels, network.gate_channels
        self.gate_scales = network.gate_scales
        self.multiple, self.finishes = scale * network.multiple, network.finishes
        self.block_levels = network.block_levels

    @property
    def head_channels(self) -> int:
        return self.network.head_channels

    def forward(self, images: Tensor) -> Features:
        features = self.network(coarser(images, self.scale))
        return features if features.skips else features._replace(dense=self._fine(features.dense, images.shape[-2:]))

    def finish(self, dense: Tensor, features: Features, size: tuple[int, int]) -> Tensor:
        return self._fine(self.network.finish(dense, features, self._coarse_size(size)), size)

    def start(self, images: Tensor, levels: int) -> list[Tensor]:
        return self.network.start(coarser(images, self.scale), levels)

    def resume(self, maps: Sequence[Tensor], size: Sequence[int], enter: Enter) -> Tensor:
        return self._fine(self.network.resume(maps, self._coarse_size(size), enter), size)

    def stride(self, block: int) -> int:
        return self.scale * self.network.stride(block)

    def _coarse_size(self, size: Sequence[int]) -> tuple[int, int]:
        height, width = (-(-length // self.scale) for length in size)
        return height, width

    def _fine(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return crop(F.interpolate(x, scale_factor=self.scale, mode="bilinear", align_corners=False), size)


def from_official(state: Mapping[str, Tensor]) -> UNet:
    """The U-Net of a checkpoint of MoSE's released code, with its weights.

    Args:
        state: the entries of the checkpoint whose keys start with ``backbone.``, without the ``module.`` in front that
            data-parallel training adds. Widths, levels and convolutions per level are read off the shapes. The
            counters ``num_batches_tracked`` may be missing.

    Raises:
        ValueError: naming the first keys that are missing, unexpected, or of another shape than the released U-Net's.

    >>> state = {_official(key): weights for key, weights in UNet(1, (2, 3)).state_dict().items()}
    >>> sorted(state)[0]
    'backbone.contracting_path.0.layers.0.bias'
    >>> from_official(state).dense_channels
    2
    """
    first: list[Tensor] = []  # the first convolution of each level
    while (weight := state.get(_official(f"down.{len(first)}.0.weight"))) is not None:
        first.append(weight)
    if not first:
        found = _some(list(state)) or "an empty one"
        raise ValueError(f"expected a checkpoint with key {_official('down.0.0.weight')}, found {found}")
    top = "backbone.contracting_path.0."
    convs = sum(key.startswith(top) and weight.ndim == 4 for key, weight in state.items())
    unet = UNet(first[0].shape[1], [weight.shape[0] for weight in first], decoder="released", convs=convs)
    load_weights(unet, state, "released U-Net", _official)
    return unet


def _official(key: str) -> str:
    """The released code's name of one of our weights. There, pooling is layer 0 of every level but the first."""
    path, level, layer, name = key.split(".")
    if path == "up":
        return f"backbone.upsampling_path.{level}.conv_block.layers.{layer}.{name}"
    return f"backbone.contracting_path.{level}.layers.{int(layer) + (level != '0')}.{name}"


# -- parts ---------------------------------------------------------------------------------------------------


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that also trains on one value per channel, as in the bottom map of one 64×64 image, 7 levels deep.

    One value has no variance: PyTorch refuses it, and normalising it by itself would always give 0. The running
    statistics are used for it instead, and are left as they are. Weights have the names of ``nn.BatchNorm2d``.

    >>> BatchNorm(3)(torch.full((1, 3, 1, 1), 2.0)).flatten()
    tensor([2.0000, 2.0000, 2.0000], grad_fn=<ViewBackward0>)
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.shape[1]:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


class Convolutions(NamedTuple):
    """How a level is built: ``convs`` × (3×3 convolution, batch norm, ReLU)."""

    convs: int = 3
    bias: bool = False
    momentum: float = 0.01
    norm: bool = True

    def block(self, in_channels: int, out_channels: int) -> nn.Sequential:
        """One level."""
        layers: list[nn.Module] = []
        for i in range(self.convs):
            conv = nn.Conv2d(out_channels if i else in_channels, out_channels, 3, padding=1, bias=self.bias)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            if conv.bias is not None:
                nn.init.trunc_normal_(conv.bias, std=0.001, a=-0.002, b=0.002)
            norm = [BatchNorm(out_channels, eps=1e-3, momentum=self.momentum)] if self.norm else []
            layers += [conv, *norm, nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)


def encoder(in_channels: int, channels: Sequence[int], kind: Convolutions) -> nn.ModuleList:
    """The levels on the way down; :func:`encoded` runs them."""
    above = [in_channels, *channels[:-1]]
    return nn.ModuleList(kind.block(i, o) for i, o in zip(above, channels, strict=True))


def encoded(levels: nn.ModuleList, images: Tensor) -> list[Tensor]:
    """The maps of all levels, from the image's size down; its sides are multiples of 2^(levels − 1)."""
    maps: list[Tensor] = []
    for level, block in enumerate(levels):
        images = block(F.avg_pool2d(images, 2) if level else images)
        maps.append(images)
    return maps


def _step(fraction: float, steps: int, name: str) -> int:
    """The step nearest to a fraction of the way, at least the first: the zeroth would be no way at all."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{name} must be a fraction above 0 and at most 1, found {fraction}")
    return max(1, round(fraction * steps))


def load_weights(
    module: nn.Module, state: Mapping[str, Tensor], source: str, rename: Callable[[str], str] = str
) -> None:
    """Load all weights of ``module`` from ``state``, and nothing else, or raise a ``ValueError`` that names them.

    Args:
        source: what the error calls the weights.
        rename: our key -> its key in ``state``.
    """
    ours = {rename(key): (key, weight) for key, weight in module.state_dict().items()}
    missing = [key for key in ours if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in ours]
    misshapen = [
        f"{key} (expected {list(weight.shape)}, found {list(state[key].shape)})"
        for key, (_, weight) in ours.items()
        if key in state and state[key].shape != weight.shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    if any(problems.values()):
        found = (f"{problem}: {_some(keys)}" for problem, keys in problems.items() if keys)
        raise ValueError(f"{source}: weights {'; '.join(found)}")
    # Not strict: counters of batches are absent from files that are old enough.
    module.load_state_dict({key: state[theirs] for theirs, (key, _) in ours.items() if theirs in state}, strict=False)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
