"""Latent codes in levels: each is drawn given those above it, from coarse to fine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ambiseg.nn.gaussian import Gaussian

Choose = Callable[[int, Gaussian], Tensor]
"""The code of a level, given its number (0 is the first that is drawn) and its distribution."""


class Level(Protocol):
    """One level of a hierarchy."""

    def distribution(self, state: Any) -> Gaussian:
        """p(z_l | what was drawn before, image)."""
        ...

    def onward(self, state: Any, z: Tensor) -> Any:
        """The state that the next level sees once z_l is known."""
        ...


class Walk(NamedTuple):
    """What a walk through the levels found, in the order in which they were drawn."""

    state: Any
    distributions: list[Gaussian]
    codes: list[Tensor]


def walk(levels: Sequence[Level], state: Any, choose: Choose) -> Walk:
    """Draw the codes of all levels:

        z_l = choose(l, p(z_l | z_<l, x)),     l = 0, 1, …

    Sampling chooses mean + σ ε, a mode the mean, and training gives the prior the codes of the posterior:
    ``walk(prior, state, lambda l, _: posterior.codes[l])``.
    """
    distributions: list[Gaussian] = []
    codes: list[Tensor] = []
    for number, level in enumerate(levels):
        distributions.append(level.distribution(state))
        codes.append(choose(number, distributions[-1]))
        state = level.onward(state, codes[-1])
    return Walk(state, distributions, codes)
