"""The pixel head as a module: its parameters, and how noise is folded into them for :mod:`ambiseg.nn.pixelhead`."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.pixelhead import Folded
from ambiseg.overlap import full_precision


class PixelHead(nn.Module):
    """The head of the paper: shift and scale from the latent code, then 1×1 convolutions without batch statistics.

    Args:
        channels: F, channels of the dense features.
        latent: L, dimension of the latent code z.
        classes: C, background included.
        hidden: channels of the two hidden layers.
        scale_bias: what the scale starts around. At 1 an untrained sample sees the features as they are; at 0, the
            paper's plain w₂z, it sees almost nothing of them.
        features: channels after the backbone's :meth:`finish`, when noise enters before the decoder's end.

    >>> import torch
    >>> head = PixelHead(channels=8, latent=1, classes=2)
    >>> head(torch.randn(1, 8, 16, 16), torch.randn(1, 5, 1)).shape
    torch.Size([1, 5, 2, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        latent: int,
        classes: int,
        hidden: int = 32,
        scale_bias: float = 1.0,
        features: int | None = None,
    ) -> None:
        super().__init__()
        self.shift = nn.Linear(latent, channels)
        self.scale = nn.Linear(latent, channels)
        sizes = [channels if features is None else features, hidden, hidden, classes]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        for noise in (self.shift, self.scale):
            nn.init.xavier_uniform_(noise.weight)
            nn.init.zeros_(noise.bias)
        nn.init.constant_(self.scale.bias, scale_bias)
        for layer in self._linears():
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    @property
    def foldable(self) -> bool:
        """Whether :meth:`fold` describes this head exactly in its present mode."""
        return True

    def modulate(self, dense: Tensor, latents: Tensor) -> Tensor:
        """(u + b_n) · s_n for every sample:  ``[B, F, h, w], [B, N, L] -> [B, N, F, h, w]``."""
        shift, scale = (noise(latents)[..., None, None] for noise in (self.shift, self.scale))
        return (dense[:, None] + shift) * scale

    def classify(self, maps: Tensor) -> Tensor:
        """The 1×1 convolutions:  ``[B, N, F, h, w] -> [B, N, C, h, w]``."""
        x = maps.movedim(2, -1)
        for layer in self._linears()[:-1]:
            x = layer(x).relu()
        return self._linears()[-1](x).movedim(-1, 2)

    def forward(self, dense: Tensor, latents: Tensor) -> Tensor:
        """The plain path, for export, compilation and tests:  logits ``[B, N, C, h, w]``."""
        return self.classify(self.modulate(dense, latents))

    def fold(self, latents: Tensor) -> Folded:
        """This head with the noise of ``latents [B, N, L]`` folded into its first layer."""
        first, *rest = self._linears()
        with full_precision(latents):  # small, and everything is made of it
            shift, scale = self.shift(latents), self.scale(latents)
            weight = first.weight * scale[:, :, None]
            bias = F.linear(shift * scale, first.weight, first.bias)
        return Folded(weight, bias, tuple((layer.weight, layer.bias) for layer in rest))

    def _linears(self) -> list[nn.Linear]:
        return list(self.layers)  # type: ignore[arg-type]
