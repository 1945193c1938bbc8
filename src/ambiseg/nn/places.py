"""Random numbers that belong to places: computed from a seed and a place, never stored.

A draw of a large image is made window by window. Numbers from a generator would be other numbers in every window;
these are a hash of (seed, key, channel, row, column), the same on every device and in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def new_seeds(images: int, n: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for each of ``n`` draws per image, ``[images, n]`` int32."""
    return torch.randint(-(2**31), 2**31, (images, n), generator=generator, device=device).to(torch.int32)


def uniform_at(seeds: Tensor, key: int, channels: int, size: tuple[int, int], origin: tuple[int, int]) -> Tensor:
    """Numbers in (0, 1) with 23 random bits,  ``[B, N] -> [B, N, channels, h, w]``.

    Args:
        seeds: int32.
        key: which numbers; others are independent of these.
        size: (h, w) of the map.
        origin: place of its first row and column.

    >>> seeds = torch.tensor([[5]], dtype=torch.int32)
    >>> whole = uniform_at(seeds, key=0, channels=2, size=(8, 8), origin=(0, 0))
    >>> torch.equal(uniform_at(seeds, 0, 2, (3, 4), (5, 2)), whole[..., 5:, 2:6])
    True
    """

    def axis(start: int, length: int) -> Tensor:
        return torch.arange(start, start + length, dtype=torch.int32, device=seeds.device)

    drawn = _mixed(seeds + _mixed(torch.full_like(seeds, key)))[..., None]
    planes = _mixed(drawn + axis(0, channels))[..., None]
    rows = _mixed(planes + axis(origin[0], size[0]))[..., None]
    bits = _mixed(rows + axis(origin[1], size[1]))  # one hash per number: the others are of rows
    # 24 bits and a half would be rounded, the largest of them to 1, which is no number of a normal distribution.
    return bits.bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)


def as_normal_(uniform: Tensor) -> Tensor:
    """Numbers in (0, 1) -> those of a standard normal distribution with the same ranks, in place."""
    centred = uniform.mul_(2).sub_(1)
    if torch.compiler.is_exporting():  # ONNX has no erfinv
        return _erfinv(centred) * math.sqrt(2)
    return centred.erfinv_().mul_(math.sqrt(2))


# Of Giles, Approximating the erfinv function (2011), single precision: in w − 2.5 where w < 5, in √w − 3 elsewhere.
_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164)
_NEAR = (*_NEAR, 0.246640727, 1.50140941)
_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047)
_FAR = (*_FAR, 1.00167406, 2.83297682)


def _erfinv(x: Tensor) -> Tensor:
    """The inverse of erf in (−1, 1) by polynomials, to some 1e-6 of its value.

    >>> _erfinv(torch.tensor([-0.5, 0.0, 0.999]))
    tensor([-0.4769,  0.0000,  2.3268])
    """
    w = -((1 - x) * (1 + x)).log()
    near, far = w - 2.5, w.clamp_min(5).sqrt() - 3
    p, q = torch.full_like(x, _NEAR[0]), torch.full_like(x, _FAR[0])
    for a, b in zip(_NEAR[1:], _FAR[1:], strict=True):
        p, q = a + p * near, b + q * far
    return torch.where(w < 5, p, q) * x


def _mixed(x: Tensor) -> Tensor:
    """A hash of int32 in which every bit of the result depends on every bit (lowbias32); products wrap."""
    x = x + 0x2545F491  # 0 would stay 0
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)
