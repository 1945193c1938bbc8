"""The gate: how likely each expert's mode is for this image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32

Kind: TypeAlias = Literal["average", "attention", "both"]
"""How the gate pools the maps that it reads."""

HEADS = 4
"""Of attention pooling."""


class Pooling(nn.Module):
    """Maps of an image -> one vector for all of it, by one of

        average      f̄ = 1/P Σ_p f_p
        attention    [a_1, …, a_H],  a_h = Σ_p α_hp f_p,  α_hp = exp(w_h · f_p) / Σ_q exp(w_h · f_q)
        both         [f̄, max_p f_p, a_1, …, a_H]

    with the features f_p of the P places of the maps, and a learned w_h for each of H heads. Every w_h starts at 0,
    where a_h is the average.

    Args:
        channels: G, of the maps.
        kind: ``average`` as in the paper, ``attention`` or ``both``.
        heads: H.

    >>> pooling = Pooling(8, "both")
    >>> pooling(torch.randn(2, 8, 5, 5)).shape, pooling.out_channels
    (torch.Size([2, 48]), 48)
    """

    def __init__(self, channels: int, kind: Kind = "average", heads: int = HEADS) -> None:
        super().__init__()
        if kind not in get_args(Kind):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Kind))}, found {kind!r}")
        self.kind: Kind = kind
        self.out_channels = channels * {"average": 1, "attention": heads, "both": 2 + heads}[kind]
        if kind != "average":
            self.scores = nn.Parameter(torch.zeros(heads, channels))

    def forward(self, maps: Tensor) -> Tensor:
        """``[B, G, h, w] -> [B, out_channels]``."""
        if self.kind == "average":
            return maps.mean((2, 3))
        places = maps.flatten(2)
        attention = at_least_float32(self._scored(places)).softmax(2).to(maps.dtype)
        attended = (attention @ places.transpose(1, 2)).flatten(1)
        return attended if self.kind == "attention" else torch.cat([maps.mean((2, 3)), places.amax(2), attended], 1)

    def over_windows(self) -> Running:
        """The same for one image that is seen window by window."""
        return _Parts(self) if self.kind != "average" else Mean()

    def _scored(self, places: Tensor) -> Tensor:
        return self.scores.to(places.dtype) @ places


class Running(Protocol):
    """Collects the maps of the windows of one image to one vector."""

    def add(self, maps: Tensor, down: Tensor, across: Tensor) -> None:
        """Maps ``[1, G, h, w]`` of a window, and how much its rows ``[h]`` and columns ``[w]`` count, on the CPU."""
        ...

    def result(self) -> Tensor:
        """``[1, out_channels]``."""
        ...


class Mean:
    """:class:`Running` average:  Σ_i Σ_p w_i(p) f_i(p) / Σ_i Σ_p w_i(p), the windows i of an image."""

    def __init__(self) -> None:
        self._sums: Tensor | float = 0.0
        self._mass = 0.0

    def add(self, maps: Tensor, down: Tensor, across: Tensor) -> None:
        weights = down.to(maps.device), across.to(maps.device)
        self._sums = self._sums + torch.einsum("gyx,y,x->g", maps[0].float(), *weights)
        self._mass += float(down.sum() * across.sum())  # of the CPU's: nobody waits for the device

    def result(self) -> Tensor:
        assert isinstance(self._sums, Tensor)
        return (self._sums / self._mass)[None]


class _Parts:
    """:class:`Running` pooling with attention: exp(w_h · f) of all windows is summed relative to the largest so far."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling, self._mean = pooling, Mean()
        self._sums: Tensor | None = None  # [H, G + 1]: of α f, and of α alone
        self._top: Tensor | None = None  # [H] the logarithm that they are relative to
        self._largest: Tensor | None = None  # [G]

    def add(self, maps: Tensor, down: Tensor, across: Tensor) -> None:
        self._mean.add(maps, down, across)
        weights = (down[:, None] * across).flatten().to(maps.device)
        places = maps[0].float().flatten(1)[:, weights > 0]  # [G, P]
        if not places.shape[1]:
            return
        scores = self._pooling._scored(places) + weights[weights > 0].log()
        top, largest = scores.amax(1), places.amax(1)
        if self._sums is None or self._top is None or self._largest is None:
            self._sums, self._top, self._largest = scores.new_zeros(len(scores), len(places) + 1), top, largest
        highest = torch.maximum(self._top, top)
        found = (scores - highest[:, None]).exp() @ F.pad(places, (0, 0, 0, 1), value=1.0).T
        self._sums = self._sums * (self._top - highest).exp()[:, None] + found
        self._top, self._largest = highest, torch.maximum(self._largest, largest)

    def result(self) -> Tensor:
        assert self._sums is not None
        assert self._largest is not None
        attended = (self._sums[:, :-1] / self._sums[:, -1:]).flatten()[None]
        if self._pooling.kind == "attention":
            return attended
        return torch.cat([self._mean.result(), self._largest[None], attended], 1)


class Gate(nn.Module):
    """π(x) = softmax(MLP(pooled features of the backbone)), three layers, the paper's gating network.

    Args:
        channels: G, channels of the features it reads.
        experts: K, how many there are.
        weights: ``learned`` by the network; ``uniform``, 1/K for every image (the paper's ablation); or K fixed
            probabilities.
        pooling: of the features: ``average`` as in the paper, ``attention`` or ``both``, see :class:`Pooling`.
        hidden: width of the first two layers; G unless given.

    >>> Gate(8, experts=4)(torch.randn(2, 8, 5, 5)).shape
    torch.Size([2, 4])
    """

    fixed: Tensor | None

    def __init__(
        self,
        channels: int,
        experts: int,
        weights: str | Sequence[float] = "learned",
        pooling: Kind = "average",
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        fixed = None
        if isinstance(weights, str):
            if weights not in ("learned", "uniform"):
                raise ValueError(f"expert weights must be learned, uniform or {experts} numbers, found {weights!r}")
            if weights == "uniform":
                fixed = torch.full((experts,), 1 / experts)
        else:
            fixed = torch.tensor(list(weights), dtype=torch.float32)
            if fixed.shape != (experts,) or (fixed < 0).any() or abs(float(fixed.sum()) - 1) > 1e-4:
                raise ValueError(f"expected {experts} expert weights that sum to 1, found {fixed.tolist()}")
        self.register_buffer("fixed", fixed)
        self.layers = nn.Sequential()
        self.pooling = Pooling(channels, pooling if fixed is None else "average")  # fixed weights read nothing
        if fixed is None:
            width = channels if hidden is None else hidden
            first = [nn.Linear(self.pooling.out_channels, width), nn.Linear(width, width)]
            for layer in first:  # PyTorch's own start would shrink what the gate reads, layer by layer
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
            last = nn.Linear(width, experts, bias=False)
            self.layers = nn.Sequential(first[0], nn.ReLU(), first[1], nn.ReLU(), last)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, G, h, w] -> [B, K]``, in float32 at least: weights are compared with logarithms."""
        return self.of(self.pooling(features))

    def of(self, pooled: Tensor) -> Tensor:
        """The same of what is already pooled, ``[B, pooling.out_channels] -> [B, K]``."""
        if self.fixed is not None:
            fixed = at_least_float32(self.fixed)  # a cast of the model rounds it
            return (fixed / fixed.sum()).expand(pooled.shape[0], -1)
        return at_least_float32(self.layers(pooled)).softmax(1)
