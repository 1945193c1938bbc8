"""A convolution whose weights are a distribution, and a backbone that ends in one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32
from ambiseg.nn.features import Backbone, Features, crop, pad_to_multiple
from ambiseg.nn.gaussian import Gaussian
from ambiseg.overlap import full_precision

LARGEST = 1.0  # log σ counts as at most this where σ is used
_SMALLEST = 1e-8  # added to variances


class VariationalConv(nn.Conv2d):
    """A 3×3 convolution with Gaussian weights, of which every activation is known to be Gaussian:

        w ~ q(w) = N(m, σ²),     (w * x + b)(p) ~ N((m * x + b)(p), (σ² * x²)(p) + 1e-8)

    Drawing activations in place of weights is the local reparameterisation of Kingma et al. (2015): one draw per place
    and channel, independent of the others. Mean and scale do not depend on the draw.

    Args:
        channels: that it reads.
        out_channels: that it gives.
        log_sigma: log σ at the start, give or take 0.1. Where σ is used it is at most e; the KL takes it as it is.

    >>> layer = VariationalConv(4, 8)
    >>> activations = layer(torch.randn(2, 4, 16, 16))
    >>> activations.at(torch.randn(2, 5, 8, 16, 16)).shape          # five draws per image
    torch.Size([2, 5, 8, 16, 16])
    """

    def __init__(self, channels: int, out_channels: int, log_sigma: float = -5.0) -> None:
        super().__init__(channels, out_channels, 3, padding=1)
        self.log_sigma = nn.Parameter(torch.empty_like(self.weight))
        nn.init.normal_(self.log_sigma, log_sigma, 0.1)

    def forward(self, input: Tensor) -> Gaussian:  # type: ignore[override]
        """``[B, channels, H, W] -> `` Gaussian of ``[B, out_channels, H, W]``, in float32 at least."""
        mean = super().forward(input)
        with full_precision(input):
            squares, sigma = at_least_float32(input).square(), self.log_sigma.clamp(max=LARGEST).exp()
            variance = F.conv2d(squares, sigma.square(), padding=self.padding)  # type: ignore[arg-type]
            return Gaussian(at_least_float32(mean), (variance + _SMALLEST).sqrt())

    def kl(self) -> Tensor:
        """KL(q(w) ‖ N(0, 1)) = −½ Σ (1 + 2 log σ − m² − σ²), over weights; the bias has no distribution.

        >>> layer = VariationalConv(1, 1)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(2.0), layer.log_sigma.fill_(0.0)
        >>> layer.kl()                                              # nine weights of N(2, 1)
        tensor(18., grad_fn=<MulBackward0>)
        """
        with full_precision(self.weight):
            log_sigma = self.log_sigma
            return -0.5 * (1 + 2 * log_sigma - self.weight.square() - (2 * log_sigma).exp()).sum()


class VariationalEnd(Backbone):
    """A backbone with a :class:`VariationalConv` after its last features. Its dense features are mean and scale of the
    activations, one after the other: twice ``layer.out_channels``.

    They are maps like any others, so that large images are stitched from windows of them.

    Args:
        trunk: whose dense features the layer reads; U-Nets come without their last convolution, ``last=False``.
        out_channels: of the layer.
        pad: to a multiple of which the trunk pads images: the layer then sees the features of what was added, as the
            layers before it do.

    >>> from ambiseg.nn.unet import UNet
    >>> trunk = UNet(1, (4, 8), last=False)
    >>> end = VariationalEnd(trunk, trunk.head_channels, pad=trunk.multiple)
    >>> end(torch.zeros(1, 1, 15, 16)).dense.shape
    torch.Size([1, 8, 15, 16])
    """

    def __init__(self, trunk: Backbone, out_channels: int, pad: int = 1) -> None:
        super().__init__()
        if trunk.finishes:
            raise ValueError("expected a backbone whose last features are dense, found one that stops before them")
        self.trunk, self.layer, self.pad = trunk, VariationalConv(trunk.dense_channels, out_channels), pad
        self.dense_channels, self.gate_channels = 2 * out_channels, trunk.gate_channels
        self.multiple = trunk.multiple

    def forward(self, images: Tensor) -> Features:
        features = self.trunk(pad_to_multiple(images, self.pad))
        moments = torch.cat(self.layer(features.dense), 1)
        return features._replace(dense=crop(moments, images.shape[-2:]))


def as_activations(moments: Tensor) -> Gaussian:
    """The dense features of a :class:`VariationalEnd` as the distribution that they are of, ``[B, F, H, W]`` each."""
    return Gaussian(*moments.chunk(2, 1))
