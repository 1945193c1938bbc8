"""A bound on a part of the loss, kept by a multiplier that is learned with the weights (GECO, Rezende & Viola 2018)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Constrained(NamedTuple):
    """A constraint in one training step.

    Attributes:
        term: λ · slack, to be added to the loss.
        slack: how far the average is above its bound; negative where the bound is kept. Detached.
        multiplier: λ. Detached.
    """

    term: Tensor
    slack: Tensor
    multiplier: Tensor


class Constraint(nn.Module):
    """The demand that a value, on average over the last batches, stays below a bound:

        λ · (average − bound),     average ← decay · average + (1 − decay) · value,     λ = softplus(ρ)²

    The average starts at the first value. The gradient passes it as if it were the present value, so that weights get
    λ · d value. ρ, which the same optimiser steps, gets its gradient times −``rate``: λ grows while the average is
    above the bound, and falls while it is below. λ starts at 1. Adam divides the rate out again.

    ρ is a parameter, and the average a buffer: a checkpoint has both. Weight decay would pull λ to softplus(0)²: leave
    ``rho`` out of it. The average moves in training mode only, once for each batch that is seen:

    - where gradients are accumulated over A batches, it remembers 1 / (1 − decay) of these smaller batches. The value
      is a mean over images, so its expectation is that of a large batch; the average is noisier, and A times shorter
      in steps of the optimiser.
    - in several processes each has the average of its own values. Gradients are averaged, so that all step the same ρ;
      and as averages are linear, what moves it is the average of the values of all processes. Where a trainer makes
      buffers agree (DDP before a step, :class:`~ambiseg.training.module.TrainingModule` at the end of an epoch), all go
      on from that of the first process, whose images are a random part of each batch. No process waits here.

    Args:
        decay: of the average.
        rate: of ρ's gradient.

    >>> bound = Constraint(decay=0.5)
    >>> [round(bound(torch.tensor(value), bound=3.0).slack.item(), 2) for value in (4.0, 2.0)]
    [1.0, 0.0]
    """

    average: Tensor
    seen: Tensor

    def __init__(self, decay: float = 0.99, rate: float = 0.01) -> None:
        super().__init__()
        self.decay, self.rate = decay, rate
        self.rho = nn.Parameter(torch.tensor(math.log(math.e - 1)))  # softplus(ρ) = 1
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    @property
    def multiplier(self) -> Tensor:
        """λ, with the reversed gradient."""
        fixed = self.rho.detach()
        return F.softplus(fixed - self.rate * (self.rho - fixed)).square()

    def averaged(self, value: Tensor) -> Tensor:
        """The average with this value in it, whose gradient is that of the value."""
        now = value.detach()
        average = torch.where(self.seen == 0, now, torch.lerp(self.average.to(now.dtype), now, 1 - self.decay))
        if self.training:
            self.average.copy_(average)
            self.seen.add_(1)
        return average + (value - now)

    def forward(self, value: Tensor, bound: Tensor | float) -> Constrained:
        """A scalar and its bound, neither of them nan, in this step."""
        slack, multiplier = self.averaged(value) - bound, self.multiplier
        return Constrained(multiplier * slack, slack.detach(), multiplier.detach())
