"""The slices of an image or a volume, one after the other through the network, with as few kept as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ambiseg.data.values import thinned
from ambiseg.io.source import Source
from ambiseg.methods.base import Predictive, Stratified
from ambiseg.nn.windows import Windows
from ambiseg.prediction.network import Network

_KEPT = 1 << 30  # bytes of features of a volume's slices that are kept between the two passes over them

Progress = Callable[[int, int], None]


class Slices:
    """The predictive distributions of an image's slices.

    Attributes:
        tiles: windows per slice; 1 is whole.
        seen: some pixels of each slice, in the units of the training data.
        ready: the distribution of an image that went through the network already.
        away: how far each slice is from the training images; None where that is not known.
    """

    def __init__(self, network: Network, source: Source, windows: Windows | None, progress: Progress | None):
        self.network, self.source, self.windows, self.progress = network, source, windows, progress
        self.tiles = len(windows[0]) * len(windows[1]) if windows else 1
        self.seen: dict[int, np.ndarray] = {}
        self.ready: Predictive | None = None
        self.away: dict[int, float | None] = {}
        self._kept: dict[int, Predictive] = {}
        self._steps = self.tiles * (network.method.views if windows else 1)
        self._done, self._total = 0, source.slices * self._steps

    def weighted(self) -> tuple[Predictive, Tensor | None]:
        """The first slice, with the mean weights of all of them; and the weights ``[D, K]`` of each, if any."""
        first, D = self._compute(0), self.source.slices
        self._steps = self._done
        if not isinstance(first, Stratified):
            self._kept[0] = first
            return first, None
        keeps, weights = D == 1 or D * held_bytes(first) <= _KEPT, []
        for k in range(D):
            predictive: Any = self._compute(k) if k else first
            weights.append(predictive.weights)
            if keeps:
                self._kept[k] = predictive
            del predictive  # before the next one takes its memory
        found = torch.cat(weights)
        return first.reweighted(found.mean(0, keepdim=True)), found.cpu()

    def expect(self, passes: int) -> None:
        """Count what is left to do: slices that were not kept, and passes over all windows to render each slice."""
        slices = self.source.slices
        self._total = self._done + (slices - len(self._kept)) * self._steps + slices * passes * self.tiles

    def take(self, k: int) -> Predictive:
        """A slice, computed again unless it was kept; asked for once."""
        return self._kept.pop(k) if k in self._kept else self._compute(k)

    def put(self, maps: Tensor, k: int, values: Tensor) -> Tensor:
        """The maps ``[…, D, H, W]`` with slice ``k`` set to ``[…, H, W]``; of an image, the values themselves."""
        if self.source.slices == 1:
            return values.cpu()
        if k == 0:
            maps = torch.empty(*values.shape[:-2], self.source.slices, *values.shape[-2:], dtype=values.dtype)
        maps[..., k, :, :] = values
        return maps

    def image(self, k: int) -> Tensor:
        """The network's input, ``[1, C, H, W]``."""
        image, raw = self.network.prepared(self.source, k)
        self.seen[k] = thinned(raw)
        return image

    def _compute(self, k: int) -> Predictive:
        if self.ready is not None:
            return self.ready
        image, method, windows = self.image(k), self.network.method, self.windows
        cut = None if windows is None else partial(method.predict_windows, image, windows, self._step)
        work = cut or partial(method.predict, image)
        predictive, (self.away[k],) = self.network.lookout.predict(image, work)
        if windows is None:
            self._step()
        return predictive

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)


def held_bytes(value: object) -> int:
    """Memory of the tensors that an object holds, at any depth; weights of networks are left out.

    >>> held_bytes({"dense": torch.zeros(2, 8), "skips": (torch.zeros(4),), "network": nn.Linear(9, 9)})
    80
    """
    storages, seen, todo = {}, set(), [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | nn.Parameter):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            todo.extend(item)
        else:
            todo.extend((item if isinstance(item, Mapping) else getattr(item, "__dict__", {})).values())
    return sum(storages.values())
