"""What every method offers, so that training, evaluation and prediction need not know which one they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ambiseg.masks import MaskDistribution, Masks


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every part is back in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


class Predictive(ABC):
    """The predicted distribution of masks of a batch of images: features computed once, nothing sampled yet."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """``n`` equally likely masks an image, with the mean of their soft predictions as ``marginal``."""

    @abstractmethod
    def marginal(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Pixel-wise class probabilities ``[B, C, H, W]``, estimated from ``n`` soft samples."""


class Method(nn.Module, ABC):
    """A way of learning to predict distributions of masks.

    ``forward`` never sees labels. ``loss`` returns a dictionary of scalars whose ``total`` is what to minimise.
    """

    classes: int

    @abstractmethod
    def forward(self, images: Tensor) -> Predictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution, in the module's present mode."""

    @abstractmethod
    def loss(
        self, images: Tensor, annotations: Masks, *, generator: torch.Generator | None = None, **settings: Any
    ) -> dict[str, Tensor]:
        """Scalars to log, and ``total`` to minimise."""

    def predict(self, images: Tensor) -> Predictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        with evaluation(self), torch.no_grad():
            return self(images)

    def parameter_groups(self) -> dict[str, Iterator[nn.Parameter]]:
        """Parameters by optimiser. One group unless a method trains parts of it against each other."""
        return {"main": self.parameters()}
