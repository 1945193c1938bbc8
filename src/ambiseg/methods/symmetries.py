"""Predictions averaged over flips and quarter turns of the image, for any method.

A network sees an image and its mirror image differently, although their masks are mirror images too. Their mean is a
better prediction than either, for as many passes of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Method
from ambiseg.methods.predictive import Noise, Predictive, Stratified
from ambiseg.nn.windows import Step, Windows


class Symmetry(NamedTuple):
    """A flip from left to right, or none, and then quarter turns."""

    flipped: bool
    turns: int

    def of(self, maps: Tensor) -> Tensor:
        """Maps ``[…, H, W]`` as they look after it; H and W change places at odd turns."""
        return torch.rot90(maps.flip(-1) if self.flipped else maps, self.turns, (-2, -1))

    def undone(self, maps: Tensor) -> Tensor:
        """The inverse of :meth:`of`.

        >>> maps, one = torch.arange(6).view(2, 3), Symmetry(flipped=True, turns=1)
        >>> torch.equal(one.undone(one.of(maps)), maps)
        True
        """
        maps = torch.rot90(maps, -self.turns, (-2, -1))
        return maps.flip(-1) if self.flipped else maps


_ALL = tuple(Symmetry(flipped, turns) for turns in (0, 2, 1, 3) for flipped in (False, True))
COUNTS = (1, 2, 4, 8)
"""How many symmetries there may be: the image; and its mirror image; both upside down; all of these on their side."""


def symmetries(count: int) -> tuple[Symmetry, ...]:
    """The first ``count`` symmetries; each of :data:`COUNTS` is a group.

    >>> [len(symmetries(count)) for count in COUNTS], symmetries(1)
    ([1, 2, 4, 8], (Symmetry(flipped=False, turns=0),))
    """
    if count not in COUNTS:
        raise ConfigError(f"symmetries: expected one of {', '.join(map(str, COUNTS))}, found {count!r:.40}")
    return _ALL[:count]


def symmetric(method: Method, count: int) -> Method:
    """A method that predicts the mean over ``count`` symmetries of the image; the method itself for one.

        p̄(y | x) = 1/S Σ_s p(s(y) | s(x))

    Masks are turned back. With strata, those of all symmetries are the same ones:

        π̄_k = 1/S Σ_s π_k(s(x)),     p̄_k(y | x) = 1/S Σ_s p_k(s(y) | s(x))

    Draws take the symmetries in turn, so that ``count`` draws have seen all of them. Centres of strata are those of the
    image as it is.

    Args:
        method: of any kind, trained; its weights are shared.
        count: S, one of :data:`COUNTS`.

    >>> from ambiseg.methods.unet import UNetConfig, UNetMethod
    >>> from ambiseg.nn.config import BackboneConfig
    >>> method = UNetMethod.build(UNetConfig(), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> symmetric(method, 8).predict(torch.rand(1, 1, 32, 48)).sample(8)
    MaskDistribution(1 image of 32×48, 8 masks, equal weights, soft marginal)
    """
    used = symmetries(count)
    return method if count == 1 else _SymmetricMethod(method, used)


class _SymmetricMethod(Method):
    """See :func:`symmetric`."""

    def __init__(self, method: Method, used: Sequence[Symmetry]) -> None:
        super().__init__()
        self.method, self.used, self.classes = method, used, method.classes
        # What users see of a method, and what decides how images are taken, is the method's own.
        self.stratum, self.incoherent = method.stratum, method.incoherent  # type: ignore[misc]
        self.views = len(used) * method.views  # type: ignore[misc]

    def forward(self, images: Tensor) -> Predictive:
        return self._mean(self.method, images)

    def predict(self, images: Tensor) -> Predictive:
        return self._mean(self.method.predict, images)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """Every turned image by windows; those of one on its side are turned with it."""
        sides = iter(self.used)

        def predict(turned: Tensor) -> Predictive:
            where = windows[::-1] if next(sides).turns % 2 else windows
            return self.method.predict_windows(turned, where, step)  # type: ignore[arg-type]

        return self._mean(predict, image)

    def loss(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The method's own: what is averaged is a prediction."""
        return self.method.loss(*args, **kwargs)

    @property
    def multiple(self) -> int:
        return self.method.multiple

    def _mean(self, predict: Callable[[Tensor], Predictive], images: Tensor) -> Predictive:
        parts = [predict(symmetry.of(images)) for symmetry in self.used]
        size, strata = (images.shape[2], images.shape[3]), [part for part in parts if isinstance(part, Stratified)]
        return _SymmetricStrata(strata, self.used, size) if strata else _Symmetric(parts, self.used, size)


class _Symmetric(Predictive):
    """The predictive distributions of all turned images, as one of the image."""

    def __init__(self, parts: Sequence[Predictive], used: Sequence[Symmetry], size: tuple[int, int]) -> None:
        self.parts, self.used, self.size, self.classes = parts, used, size, parts[0].classes
        self.passes = sum(part.passes for part in parts)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return self._in_turn(self.parts[0].noise(n, generator))

    def _in_turn(self, noise: Noise) -> Noise:
        """The noise, whose draws take the symmetries in turn."""
        return replace(noise, symmetries=tuple(i % len(self.used) for i in range(noise.count)))

    def _groups(self, noise: Noise) -> Iterator[tuple[list[int], Symmetry, Predictive, Noise]]:
        """The draws of every symmetry that has some: which they are, and their noise."""
        chosen = noise.symmetries
        assert chosen is not None
        for s, (symmetry, part) in enumerate(zip(self.used, self.parts, strict=True)):
            if which := [i for i, one in enumerate(chosen) if one == s]:
                yield which, symmetry, part, noise[which]

    def probs(self, noise: Noise) -> Tensor:
        found: list[Tensor] = [torch.empty(0)] * noise.count
        for which, symmetry, part, some in self._groups(noise):
            for i, probs in zip(which, symmetry.undone(part.probs(some)).unbind(1), strict=True):
                found[i] = probs
        return torch.stack(found, 1)

    def render(self, noise: Noise) -> MaskDistribution:
        labels: list[Tensor] = [torch.empty(0)] * noise.count
        mass, marginal = noise.mass.detach(), torch.zeros((), device=noise.codes.device)
        for which, symmetry, part, some in self._groups(noise):
            own = mass[:, which]
            total = own.sum(1, keepdim=True)
            shares = torch.where(total > 0, own / total.clamp_min(torch.finfo(own.dtype).tiny), 1 / len(which))
            drawn = part.render(replace(some, weights=shares))
            soft = drawn.marginal_probs(self.classes) if drawn.marginal is None else drawn.marginal
            marginal = marginal + total[..., None, None] * symmetry.undone(soft)
            for i, one in zip(which, symmetry.undone(drawn.labels).unbind(1), strict=True):
                labels[i] = one
        weights = None if noise.weights is None else noise.weights.detach()
        return MaskDistribution(torch.stack(labels, 1), weights, marginal=marginal)


class _SymmetricStrata(_Symmetric, Stratified):
    """The same with strata; their weights are the mean over the symmetries."""

    parts: Sequence[Stratified]  # type: ignore[assignment]

    def __init__(self, parts: Sequence[Stratified], used: Sequence[Symmetry], size: tuple[int, int]) -> None:
        super().__init__(parts, used, size)
        self.weights = torch.stack([part.weights for part in parts]).mean(0)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return Stratified.noise(self, n, generator)

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        return self._in_turn(self.parts[0].noise_of(strata, generator))

    def centre_noise(self) -> Noise:
        noise = self.parts[0].reweighted(self.weights).centre_noise()
        return replace(noise, symmetries=(0,) * noise.count)
