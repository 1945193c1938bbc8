"""A code that shifts and scales the channels of a map: how CAR's refinement network takes its noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ambiseg.masks import at_least_float32
from ambiseg.overlap import full_precision

SMALLEST = 1e-5  # added to scales


class NoiseInjection(nn.Module):
    """A code z of the whole image, mixed into maps h of F channels (Kassapis et al. 2021):

        out = W [(h + A z + a) ⊙ (B z + b + 1e-5)] + c  =  W diag(s) h + W diag(s) (A z + a) + c,   s = B z + b + 1e-5

    The second form is computed: all draws of an image are one product of matrices with the same h, and no shifted and
    scaled copy of h is made.

    Args:
        channels: F, of the maps.
        latent: L, of the codes.
        out_channels: of what comes out.

    >>> injection = NoiseInjection(channels=8, latent=4, out_channels=2)
    >>> injection(torch.randn(3, 8, 16, 16), torch.randn(3, 5, 4)).shape  # five draws of each of three maps
    torch.Size([15, 2, 16, 16])
    """

    def __init__(self, channels: int, latent: int, out_channels: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Linear(latent, channels), nn.Linear(latent, channels)
        self.mix = nn.Linear(channels, out_channels)
        for linear in (self.shift, self.scale):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        nn.init.orthogonal_(self.mix.weight)
        nn.init.trunc_normal_(self.mix.bias, std=0.001, a=-0.002, b=0.002)

    def forward(self, maps: Tensor, codes: Tensor, drawn: bool | None = None) -> Tensor:
        """``[B·N, out_channels, h, w]``, the N draws of an image next to each other.

        Args:
            maps: ``[B, F, h, w]``, which all draws of an image share, or ``[B·N, F, h, w]``.
            codes: ``[B, N, L]``.
            drawn: whether there are maps for every draw; ``None``: their number says so.
        """
        B, N, _ = codes.shape
        with full_precision(codes):
            codes = codes.to(self.shift.weight.dtype)
            weight = self.mix.weight * (self.scale(codes) + SMALLEST)[:, :, None]  # [B, N, out, F]
            bias = (weight @ self.shift(codes)[..., None])[..., 0] + self.mix.bias
        drawn = maps.shape[0] == B * N if drawn is None else drawn
        shared = (0, 1) if drawn else (1, 2)  # a product per draw, or one for all draws of an image
        out = torch.bmm(weight.flatten(*shared).to(maps.dtype), maps.flatten(2))
        out = out.view(B * N, -1, *maps.shape[2:])
        return out + at_least_float32(bias).to(out.dtype).view(B * N, -1, 1, 1)
