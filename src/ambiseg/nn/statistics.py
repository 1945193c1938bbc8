"""What an image is like to a network: its input and the maps of its first convolutions as a few numbers each.

    input:  5 quantiles of each channel;  log mean |∂x|, |∂y| and |Δ| and the skewness of Δ at three scales
    maps:   mean and log standard deviation of every channel of the first half of the convolutions

Masks are made of the same maps: the statistics cost a sum over pixels that are there anyway. As means over pixels they
do not depend on the size of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32

CHANNELS = 64  # of a convolution that are looked at, at most
STATISTICS = 17  # of the input, of each channel
_LAYERS = 24  # convolutions that are looked at, at most
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SCALES, _LEAST, _PIXELS = 3, 1e-4, 1 << 18


def input_statistics(images: Tensor) -> Tensor:
    """Of prepared images ``[B, C, H, W]``, ``[B, C · 17]``.

    >>> input_statistics(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 17])
    """
    images = at_least_float32(images)
    flat = images.flatten(2)
    flat = flat[:, :, :: max(1, flat.shape[2] // _PIXELS)]
    found = [torch.quantile(flat, torch.tensor(_QUANTILES, device=flat.device, dtype=flat.dtype), 2).movedim(0, 2)]
    for _ in range(_SCALES):
        padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
        across, down = images.diff(dim=3), images.diff(dim=2)
        around = padded[..., 2:, 1:-1] + padded[..., :-2, 1:-1] + padded[..., 1:-1, 2:] + padded[..., 1:-1, :-2]
        curved = (4 * images - around).flatten(2)
        for part in (across, down, curved):
            sizes = part.flatten(2).abs()
            mean = sizes.sum(2) / max(1, sizes.shape[2])
            found.append((mean + _LEAST).log()[..., None])
        skew = curved.pow(3).mean(2) / (curved.square().mean(2).pow(1.5) + _LEAST)
        found.append(skew[..., None])
        images = F.avg_pool2d(images, 2) if min(images.shape[2:]) > 3 else images
    return torch.cat(found, 2).flatten(1)


class Collected:
    """Statistics of the maps that went by, by the names of their layers."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self._seen: dict[str, list[Tensor]] = {}

    def add(self, layer: str, maps: Tensor) -> None:
        """Maps ``[B, C, h, w]`` of a layer."""
        maps = at_least_float32(maps.detach()[:, :CHANNELS]).flatten(2)
        spread = (maps.std(2, correction=0) + _LEAST).log()
        self._seen.setdefault(layer, []).append(torch.cat([maps.mean(2), spread], 1))

    @property
    def names(self) -> list[str]:
        """Layers in the order in which they ran."""
        return list(self._seen)

    def statistics(self) -> Tensor | None:
        """``[B, D]``, the mean over the windows of an image; ``None`` if a layer did not run."""
        if not self.layers or any(layer not in self._seen for layer in self.layers):
            return None
        return torch.cat([torch.stack(self._seen[layer]).mean(0) for layer in self.layers], 1)


@contextmanager
def watching(network: nn.Module, layers: Sequence[str]) -> Iterator[Collected]:
    """Collects what the layers of these names give while the block runs."""
    found, modules = Collected(layers), dict(network.named_modules())
    hooks = []
    try:
        for name in layers:
            if name in modules:
                hook = lambda _, __, maps, name=name: found.add(name, maps)  # noqa: E731
                hooks.append(modules[name].register_forward_hook(hook))
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def watched_layers(network: nn.Module, images: Tensor) -> tuple[str, ...]:
    """The first half of the convolutions that run when a method predicts images, before anything is drawn.

    >>> network = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(4)))
    >>> watched_layers(network, torch.zeros(1, 1, 8, 8))
    ('0', '1')
    """
    wide = [name for name, one in network.named_modules() if isinstance(one, nn.Conv2d) and max(one.kernel_size) > 1]
    predict = getattr(network, "predict", network)
    with torch.no_grad(), watching(network, wide) as found:
        predict(images)
    ran = found.names[: -(-len(found.names) // 2)]
    step = -(-len(ran) // _LAYERS) or 1
    return tuple(ran[::step])
