"""The gate: how likely each expert's mode is for this image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ambiseg.masks import at_least_float32


class Gate(nn.Module):
    """π(x) = softmax(MLP(average pool of the backbone's features)), three layers, the paper's gating network.

    Args:
        channels: G, channels of the features it reads.
        experts: K, how many there are.
        weights: ``learned`` by the network; ``uniform``, 1/K for every image (the paper's ablation); or K fixed
            probabilities.

    >>> Gate(8, experts=4)(torch.randn(2, 8, 5, 5)).shape
    torch.Size([2, 4])
    """

    fixed: Tensor | None

    def __init__(self, channels: int, experts: int, weights: str | Sequence[float] = "learned") -> None:
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
        if fixed is None:
            hidden = [nn.Linear(channels, channels), nn.Linear(channels, channels)]
            for layer in hidden:  # PyTorch's own start would shrink what the gate reads, layer by layer
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
            last = nn.Linear(channels, experts, bias=False)
            self.layers = nn.Sequential(hidden[0], nn.ReLU(), hidden[1], nn.ReLU(), last)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, G, h, w] -> [B, K]``, in float32 at least: weights are compared with logarithms."""
        if self.fixed is not None:
            fixed = at_least_float32(self.fixed)  # a cast of the model rounds it
            return (fixed / fixed.sum()).expand(len(features), -1)
        return at_least_float32(self.layers(features.mean((2, 3)))).softmax(1)
