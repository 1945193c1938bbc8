"""A small network that runs pixel by pixel: features and a latent code in, logits out."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.nn.pixelhead import Folded
from ambiseg.nn.unet import BatchNorm


class PixelMLP(nn.Module):
    """1×1 convolutions on the features and a code that is the same at every pixel (f_comb of Kohl et al. 2018):

        h₁ = relu(W_u u + W_z z + a₁),   h₂ = relu(W₂ h₁ + a₂),   …,   logits = W h + a

    Only a₁ + W_z z depends on the draw, so that W_u u is computed once per image.

    Args:
        channels: F, of the features.
        classes: C.
        latent: L, dimension of the code; 0 for a head without.
        hidden: channels of the hidden layers.
        layers: how many hidden layers.
        norm: batch norm after each hidden layer, as the PHiSeg authors have it; its layers then have no bias.

    >>> mlp = PixelMLP(channels=8, classes=2, latent=6)
    >>> mlp(torch.randn(1, 8, 16, 16), torch.randn(1, 5, 6)).shape
    torch.Size([1, 5, 2, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        latent: int = 0,
        hidden: int = 32,
        layers: int = 3,
        norm: bool = False,
        momentum: float = 0.01,
    ) -> None:
        super().__init__()
        self.channels, self.latent, self.classes = channels, latent, classes
        sizes = [channels + latent, *[hidden] * layers, classes]
        last = len(sizes) - 2
        self.layers = nn.ModuleList(
            nn.Linear(i, o, bias=not norm or k == last) for k, (i, o) in enumerate(pairwise(sizes))
        )
        self.norms = nn.ModuleList(BatchNorm(hidden, eps=1e-3, momentum=momentum) for _ in range(layers * norm))
        for layer in self._linears():
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    @property
    def foldable(self) -> bool:
        """Whether :meth:`fold` describes this network in its present mode; it has no batch statistics of training."""
        return not (self.training and len(self.norms))

    def hidden(self, dense: Tensor, codes: Tensor | None = None) -> Tensor:
        """The last hidden layer:  features ``[B, F, H, W]`` and codes ``[B, N, L] -> [B·N, hidden, H, W]``."""
        first, *rest = self._linears()[:-1]
        x = F.conv2d(dense, first.weight[:, : self.channels, None, None], first.bias)
        if codes is not None:
            shift = F.linear(codes.to(first.weight.dtype), first.weight[:, self.channels :])
            x = (x[:, None] + shift[..., None, None].to(x.dtype)).flatten(0, 1)
        x = self._norm(0, x).relu()
        for k, layer in enumerate(rest, 1):
            x = self._norm(k, F.conv2d(x, layer.weight[..., None, None], layer.bias)).relu()
        return x

    def forward(self, dense: Tensor, codes: Tensor | None = None) -> Tensor:
        """Logits ``[B, N, C, H, W]`` of every code; without codes N is 1."""
        last, draws = self._linears()[-1], 1 if codes is None else codes.shape[1]
        logits = F.conv2d(self.hidden(dense, codes), last.weight[..., None, None], last.bias)
        return logits.unflatten(0, (dense.shape[0], draws))

    def of_rows(self, rows: Tensor, codes: Tensor) -> Tensor:
        """The same of a network without norms on features of one pixel a row, which may be those of a draw.

        Args:
            rows: ``[B, N, P, F]``, or ``[B, 1, P, F]`` where draws differ by their codes alone.
            codes: ``[B, N, L]``.

        Returns:
            Logits ``[B, N, P, C]``.
        """
        if len(self.norms):
            raise ValueError("expected a network without norms, found one with")
        first, *rest = self._linears()
        shift = F.linear(codes.to(first.weight.dtype), first.weight[:, self.channels :], first.bias)
        x = F.linear(rows, first.weight[:, : self.channels]) + shift[:, :, None]
        for layer in rest:
            x = layer(x.relu())
        return x

    def fold(self, codes: Tensor) -> Folded:
        """The same with the codes ``[B, N, L]`` in the first bias, and batch norm of evaluation in the layers."""
        layers = [(layer.weight, layer.bias) for layer in self._linears()]
        for k, norm in enumerate(self.norms):
            layers[k] = _normed(layers[k][0], norm)  # type: ignore[arg-type]
        (weight, bias), *rest = layers
        shift = F.linear(codes.to(weight.dtype), weight[:, self.channels :], bias)
        first = weight[:, : self.channels].expand(codes.shape[0], 1, -1, -1)
        return Folded(first, shift, tuple(rest))

    def _norm(self, k: int, x: Tensor) -> Tensor:
        return self.norms[k](x) if len(self.norms) else x

    def _linears(self) -> list[nn.Linear]:
        return list(self.layers)  # type: ignore[arg-type]


def _normed(weight: Tensor, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """A layer without bias and the batch norm of evaluation after it, as one layer."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return weight * scale[:, None], norm.bias - scale * norm.running_mean
