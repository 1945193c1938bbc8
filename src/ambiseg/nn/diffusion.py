"""Diffusion of label maps: every pixel forgets its class step by step, and a network is asked what it was.

    q(x_t | x_{t−1}) = Cat(α_t x_{t−1} + (1 − α_t) / C),     q(x_t | x_0) = Cat(ᾱ_t x_0 + (1 − ᾱ_t) / C),

x one-hot over C classes, t = 1 … T, ᾱ_t = α_1 ⋯ α_t and ᾱ_0 = 1 (Hoogeboom et al. 2021; Zbinden et al. 2023).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = 1e-12  # probabilities whose logarithm is taken
_OFFSET, _MOST = 0.008, 0.999  # s of the cosine, and the largest 1 − α

Convention: TypeAlias = Literal["consistent", "released"]
"""Whether ᾱ_t is the product of α, or what the released code of CCDM has in its place: one step late."""


class Schedule(NamedTuple):
    """How much is kept, for t = 0 … T; what is lost is a table of its own, because 1 − ᾱ_1 is about 2e-4.

    Attributes:
        kept: α_t, of one step; 1 at t = 0.
        lost: 1 − α_t.
        kept_so_far: ᾱ_t, of all steps up to t; 1 at t = 0.
        lost_so_far: 1 − ᾱ_t.
    """

    kept: tuple[float, ...]
    lost: tuple[float, ...]
    kept_so_far: tuple[float, ...]
    lost_so_far: tuple[float, ...]

    @property
    def timesteps(self) -> int:
        """T."""
        return len(self.kept) - 1


def cosine(timesteps: int, convention: Convention = "consistent") -> Schedule:
    """α_t = f(t/T) / f((t − 1)/T),  at least 0.001,  with  f(u) = cos²((u + s)/(1 + s) · π/2),  s = 0.008.

    Args:
        timesteps: T.
        convention: ``consistent`` has ᾱ_t = α_1 ⋯ α_t. ``released`` has ᾱ_t = f((t − 1)/T), as the code of CCDM, which
            fits no α; it is here for comparison with it.

    >>> schedule = cosine(250)
    >>> print(*(f"{schedule.kept_so_far[t]:.4f}" for t in (0, 1, 125, 250)))
    1.0000 0.9998 0.4938 0.0000
    """

    def angle(t: float) -> float:
        return (t / timesteps + _OFFSET) / (1 + _OFFSET) * math.pi / 2

    kept, lost, so_far, lost_so_far = [1.0], [0.0], [1.0], [0.0]
    for t in range(1, timesteps + 1):
        now, before = angle(t), angle(t - 1)
        # 1 − cos² a / cos² b = sin(a − b) sin(a + b) / cos² b, without a difference of two numbers near 1.
        lost.append(min(math.sin(now - before) * math.sin(now + before) / math.cos(before) ** 2, _MOST))
        kept.append(1 - lost[-1])
        if convention == "released":
            so_far.append(math.cos(before) ** 2)
            lost_so_far.append(math.sin(before) ** 2)
        else:
            so_far.append(so_far[-1] * kept[-1])
            lost_so_far.append(lost_so_far[-1] + so_far[-2] * lost[-1])
    return Schedule(tuple(kept), tuple(lost), tuple(so_far), tuple(lost_so_far))


def visited(timesteps: int, steps: int) -> list[int]:
    """The steps t that sampling in ``steps`` goes through,  round(linspace(T, 1, steps)).

    >>> visited(250, 5)
    [250, 188, 126, 63, 1]
    """
    if not 1 <= steps <= timesteps:
        raise ValueError(f"expected 1 to {timesteps} steps, found {steps}")
    return torch.linspace(timesteps, 1, steps, dtype=torch.double, device="cpu").round().long().tolist()


class Jump(NamedTuple):
    """From t back to s < t: numbers, or one for each image ``[B, 1, 1, 1]``.

    Attributes:
        kept: ᾱ_t / ᾱ_s, of the class that was there at s.
        lost: 1 − ᾱ_t / ᾱ_s.
        kept_before: ᾱ_s.
        lost_before: 1 − ᾱ_s.
    """

    kept: float | Tensor
    lost: float | Tensor
    kept_before: float | Tensor
    lost_before: float | Tensor


class CategoricalDiffusion(nn.Module):
    """The forward process, its posterior, and what follows from a prediction of x_0.

    Args:
        classes: C.
        schedule: of α and ᾱ.
        dtype: in which training looks them up; they are computed in float64 in any case.

    >>> diffusion = CategoricalDiffusion(2, cosine(250))
    >>> x0, t = torch.tensor([[[0, 1]]]), torch.tensor([125])
    >>> diffusion.forward_probs(x0, t)
    tensor([[[[0.7469, 0.2531]],
    <BLANKLINE>
             [[0.2531, 0.7469]]]])
    """

    tables: Tensor

    def __init__(self, classes: int, schedule: Schedule, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.classes, self.schedule = classes, schedule
        self.register_buffer("tables", torch.tensor(list(schedule), dtype=dtype), persistent=False)

    def one_hot(self, labels: Tensor) -> Tensor:
        """``[B, H, W] -> [B, C, H, W]``."""
        return F.one_hot(labels.long(), self.classes).movedim(-1, 1).to(self.tables.dtype)

    def forward_probs(self, x0: Tensor, t: Tensor) -> Tensor:
        """q(x_t | x_0) = ᾱ_t x_0 + (1 − ᾱ_t) / C,  ``[B, C, H, W]``.

        Args:
            x0: labels ``[B, H, W]``.
            t: of each image, ``[B]``.
        """
        _, _, kept, lost = self._at(t)
        return kept * self.one_hot(x0) + lost / self.classes

    def one_step(self, t: Tensor) -> Jump:
        """From t to t − 1, of each image ``[B]``; ᾱ_0 = 1, so that at t = 1 the posterior is x_0 itself."""
        kept, lost, _, _ = self._at(t)
        return Jump(kept, lost, *self._at(t - 1)[2:])

    def jump(self, t: int, s: int) -> Jump:
        """From t to any s < t, for all images. It needs a schedule that is consistent.

        >>> diffusion = CategoricalDiffusion(2, cosine(250))
        >>> one, far = diffusion.jump(100, 99), diffusion.jump(100, 50)
        >>> f"{one.kept:.4f} {far.kept:.4f} {far.kept_before:.4f}"
        '0.9909 0.7205 0.8987'
        """
        if not 0 <= s < t <= self.schedule.timesteps:
            raise ValueError(f"expected 0 ≤ s < t ≤ {self.schedule.timesteps}, found s={s}, t={t}")
        so_far, lost_so_far = self.schedule.kept_so_far, self.schedule.lost_so_far
        lost = (lost_so_far[t] - lost_so_far[s]) / so_far[s]
        return Jump(so_far[t] / so_far[s], lost, so_far[s], lost_so_far[s])

    def posterior(self, xt: Tensor, x0: Tensor, jump: Jump) -> Tensor:
        """q(x_s | x_t, x_0) ∝ (a x_t + (1 − a) / C) (ᾱ_s x_0 + (1 − ᾱ_s) / C),  a = ᾱ_t / ᾱ_s,  ``[B, C, H, W]``.

        Args:
            xt: labels ``[B, H, W]`` at t.
            x0: labels ``[B, H, W]``.
            jump: from t to s.
        """
        before = jump.kept_before * self.one_hot(x0) + jump.lost_before / self.classes
        both = self._since(xt, jump) * before
        return both / both.sum(1, keepdim=True)

    def reverse(self, xt: Tensor, p0: Tensor, jump: Jump) -> Tensor:
        """p(x_s | x_t) = Σ_c q(x_s | x_t, x_0 = c) p0_c,  ``[B, C, H, W]``. At s = 0 it is p0.

        With  A = a x_t + (1 − a) / C  the posterior of x_0 = c has the sum  Z_c = ᾱ_s A_c + (1 − ᾱ_s) / C,  so that

            p(x_s = k | x_t) = A_k (ᾱ_s p0_k / Z_k + (1 − ᾱ_s) / C · Σ_c p0_c / Z_c),

        which takes C numbers per pixel, not C².

        Args:
            xt: labels ``[B, H, W]`` at t.
            p0: what a network takes x_0 for, probabilities ``[B, C, H, W]``.
            jump: from t to s.
        """
        since, even = self._since(xt, jump).to(p0.dtype), jump.lost_before / self.classes
        share = p0 / (jump.kept_before * since + even)
        return since * (jump.kept_before * share + even * share.sum(1, keepdim=True))

    def divergence(self, x0: Tensor, xt: Tensor, p0: Tensor, t: Tensor) -> Tensor:
        """KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) of every pixel, ``[B, H, W]``; at t = 1 it is −log p0[x_0].

        Logarithms are of probabilities of at least 1e-12.

        Args:
            x0: labels ``[B, H, W]``.
            xt: labels ``[B, H, W]`` at t.
            p0: probabilities ``[B, C, H, W]``.
            t: of each image, ``[B]``.
        """
        step = self.one_step(t)
        target, found = self.posterior(xt, x0, step), self.reverse(xt, p0, step)
        return (target * (target.clamp_min(LEAST).log() - found.clamp_min(LEAST).log())).sum(1)

    def _since(self, xt: Tensor, jump: Jump) -> Tensor:
        """q(x_t | x_s) as a function of x_s."""
        return jump.kept * self.one_hot(xt) + jump.lost / self.classes

    def _at(self, t: Tensor) -> Tensor:
        """The four tables at t, ``[4, B, 1, 1, 1]``."""
        return self.tables[:, t][..., None, None, None]


def drawn(probs: Tensor, uniform: Tensor) -> Tensor:
    """Labels of pixels with given probabilities, decided by one number each: how many cumulative ones lie below it.

    Args:
        probs: ``[B, C, H, W]``.
        uniform: ``[B, 1, H, W]`` in (0, 1).

    >>> drawn(torch.tensor([0.25, 0.5, 0.25])[None, :, None, None], torch.tensor([[[[0.2]]]])).item()
    0
    """
    return (uniform > probs.cumsum(1)[:, :-1]).sum(1)
