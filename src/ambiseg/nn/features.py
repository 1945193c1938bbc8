"""What a backbone gives to the experts and the gate, and how any network becomes a backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Enter: TypeAlias = Callable[[int, Tensor], Tensor]
"""The number of a block and the maps ``[B, …]`` that are about to enter it -> what enters in their place: ``[B, …]``,
or ``[B·N, …]`` with the N variants of an image side by side."""


class Features(NamedTuple):
    """The features of a batch of images, computed once, whatever is sampled from them afterwards.

    Attributes:
        dense: ``[B, F, h, w]`` where the experts' noise enters: the image's own size, unless ``skips`` are left.
        gate: ``[B, G, h', w']`` what the gate pools and reads.
        skips: maps that :meth:`Backbone.finish` still needs when noise enters before the decoder's end.
    """

    dense: Tensor
    gate: Tensor
    skips: tuple[Tensor, ...] = ()


class Backbone(nn.Module):
    """A network that maps images ``[B, in_channels, H, W]`` to :class:`Features`.

    Attributes:
        dense_channels: channels of ``Features.dense``, F.
        gate_channels: channels of ``Features.gate``, G.
        gate_scales: how many of them each level of an encoder has, if they are of several; the deepest last.
        head_channels: channels of what :meth:`finish` returns; F unless noise enters before the decoder's end.
        multiple: how many times smaller than the image the deepest map is. Windows of large images start at multiples
            of it.
        finishes: whether ``forward`` stops before the last features, so that :meth:`finish` runs per sample.
        block_levels: levels of an encoder and decoder that :meth:`start` and :meth:`resume` run in two parts; 0: none.
            Its blocks are counted on the way down, then on the way up.
    """

    dense_channels: int
    gate_channels: int
    gate_scales: tuple[int, ...] = ()
    multiple: int = 64  # six halvings are as many as is usual
    finishes: bool = False
    block_levels: int = 0

    @property
    def head_channels(self) -> int:
        return self.dense_channels

    def finish(self, dense: Tensor, features: Features, size: tuple[int, int]) -> Tensor:
        """Run the rest of the decoder on maps with noise, ``[B·N, F, h, w] -> [B·N, head_channels, *size]``.

        The N samples of an image stand next to each other. Only called when ``features.skips`` is not empty.
        """
        raise NotImplementedError(f"{type(self).__name__} takes noise at its last features only")

    def start(self, images: Tensor, levels: int) -> list[Tensor]:
        """The maps of the first ``levels`` levels, from the image's size down."""
        raise NotImplementedError(f"{type(self).__name__} runs as a whole only")

    def resume(self, maps: Sequence[Tensor], size: Sequence[int], enter: Enter) -> Tensor:
        """From the maps of :meth:`start` to dense features ``[B·N, F, *size]``.

        Args:
            maps: of some images.
            size: (H, W) of the images.
            enter: is shown what enters each block that is left. After it has made N maps of one, all others are
                repeated as needed.
        """
        raise NotImplementedError(f"{type(self).__name__} runs as a whole only")

    def stride(self, block: int) -> int:
        """How many pixels of the image are one place of what enters a block."""
        raise NotImplementedError(f"{type(self).__name__} runs as a whole only")


class Adapter(Backbone):
    """Any network as a backbone.

    Args:
        network: maps images to dense features ``[B, dense, H, W]`` of the image's size (features of another size are
            resized bilinearly), or to a pair (dense, gate features).
        dense: how many channels the dense features have.
        gate: how many channels the gate's features have, when they are not the dense ones.
        gate_from: name of the submodule of ``network`` whose output the gate reads (the last one, if it returns
            several), as in ``dict(network.named_modules())``.
        multiple: the network takes images whose sides are multiples of this; others are padded by repeating their
            border, and the features are cropped again.

    >>> import torch
    >>> network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
    >>> features = Adapter(network, dense=8, gate=16, gate_from="0")(torch.zeros(2, 3, 32, 32))
    >>> features.dense.shape, features.gate.shape
    (torch.Size([2, 8, 32, 32]), torch.Size([2, 16, 32, 32]))
    """

    def __init__(
        self,
        network: nn.Module,
        dense: int,
        gate: int | None = None,
        gate_from: str | None = None,
        multiple: int = 1,
    ) -> None:
        super().__init__()
        self._padded_to = multiple
        if multiple > 1:
            self.multiple = multiple  # windows of large images start at multiples of it
        self.network, self.gate_from = network, gate_from
        self.dense_channels = dense
        self.gate_channels = dense if gate is None else gate
        self._seen: list[Any] = []
        if gate_from is not None:
            modules = dict(network.named_modules())
            if gate_from not in modules:
                some = ", ".join(name for name, _ in network.named_children())
                raise ValueError(f"gate_from={gate_from!r} is not a submodule of the network; its children are {some}")
            modules[gate_from].register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, args: Any, output: Any) -> None:
        self._seen[:] = [output]

    def forward(self, images: Tensor) -> Features:
        self._seen.clear()
        output = self.network(pad_to_multiple(images, self._padded_to))
        if self.gate_from is None:
            dense, gate = output if isinstance(output, tuple | list) else (output, output)
        elif not self._seen:
            raise RuntimeError(f"{type(self.network).__name__} did not call its submodule {self.gate_from!r}")
        else:
            dense, gate = output, self._seen.pop()
        dense = dense[0] if isinstance(dense, tuple | list) else dense
        gate = gate[-1] if isinstance(gate, tuple | list) else gate
        for name, features, channels in (("dense", dense, self.dense_channels), ("gate", gate, self.gate_channels)):
            if features.ndim != 4 or features.shape[1] != channels:
                raise ValueError(
                    f"expected {name} features [B, {channels}, h, w] from {type(self.network).__name__}, "
                    f"found {list(features.shape)}"
                )
        padded = [-(-side // self._padded_to) * self._padded_to for side in images.shape[2:]]
        if list(dense.shape[2:]) != padded:
            dense = F.interpolate(dense, padded, mode="bilinear", align_corners=False)
        return Features(crop(dense, images.shape[2:]), gate)


def repeated(maps: Tensor, times: int) -> Tensor:
    """Every map ``times`` times, side by side:  ``[B, C, h, w] -> [B · times, C, h, w]``."""
    if torch.compiler.is_exporting():  # a graph is for any number, and does not ask which
        return maps[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1)
    return maps if times == 1 else maps.repeat_interleave(times, 0)


def check_images(images: Tensor, channels: int) -> None:
    """A ``ValueError`` unless images are ``[B, channels, H, W]`` with at least one pixel."""
    if images.ndim != 4 or images.shape[1] != channels or 0 in images.shape[2:]:
        raise ValueError(f"expected images [B, {channels}, H, W], found {list(images.shape)}")


def pad_to_multiple(images: Tensor, multiple: int) -> Tensor:
    """Images ``[B, C, H, W]``, their last row and column repeated until H and W are multiples of ``multiple``."""
    height, width = images.shape[2:]
    if torch.compiler.is_exporting():  # a graph is for all sizes: sides are written as multiples, and nothing is asked
        if multiple == 1:
            return images
        sides = ((side + multiple - 1) // multiple * multiple for side in (height, width))
        down, across = (
            torch.arange(padded, device=images.device).clamp_max(side - 1)
            for padded, side in zip(sides, (height, width), strict=True)
        )
        return images.index_select(2, down).index_select(3, across)
    right, bottom = -width % multiple, -height % multiple
    return F.pad(images, (0, right, 0, bottom), mode="replicate") if right or bottom else images


def coarser(maps: Tensor, scale: int) -> Tensor:
    """Maps ``[B, C, H, W]`` this many times coarser, the means of squares of pixels; padded to a multiple of it.

    >>> import torch
    >>> coarser(torch.tensor([[[[1.0, 2.0, 5.0]]]]), 2)
    tensor([[[[1.5000, 5.0000]]]])
    """
    return maps if scale == 1 else F.avg_pool2d(pad_to_multiple(maps, scale), scale)


def crop(x: Tensor, size: Sequence[int]) -> Tensor:
    """The top left ``size`` pixels of maps ``[B, F, h, w]``: what :func:`pad_to_multiple` added is gone."""
    if torch.compiler.is_exporting():  # a view would be contiguous for some sizes and not for others
        rows, columns = (torch.arange(side, device=x.device) for side in size)
        return x.index_select(2, rows).index_select(3, columns)
    return x[:, :, : size[0], : size[1]]
