"""A network that tells drawn masks from those of annotators, given the image, and its penalty R1."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg.masks import at_least_float32
from ambiseg.overlap import full_precision

FLOOR = 1e-7  # of a score
_LEAST = 24  # pixels of a side, at least: of fewer nothing is left after the last convolution
_SLOPE = 0.2


def grid_of(size: tuple[int, int]) -> tuple[int, int]:
    """The last map of a :class:`Discriminator` for images of ``size``, as its authors count it.

    >>> grid_of((128, 128)), grid_of((256, 512))
    ((14, 14), (30, 62))
    """
    return max(size[0] // 8 - 2, 1), max(size[1] // 8 - 2, 1)


class Discriminator(nn.Module):
    """The probability that a mask is an annotator's (Kassapis et al. 2021): eight convolutions and one linear layer.

        score = max(sigmoid(w · average of the last map over a grid + b), 1e-7)

    Three 3×3 convolutions at full size, then five 4×4, of which the first three halve the map; leaky ReLU 0.2, no norm.
    The authors' linear layer reads every place of the last map: that is the ``grid`` of their images' size, to which
    the maps of other images are averaged. The grid (1, 1) is the mean over all places, and has no size of its own.

    Args:
        channels: of image and mask together.
        width: of the first convolutions; the widest has eight times as many.
        grid: (h, w) of what the linear layer reads.

    >>> judge = Discriminator(channels=3, width=4)
    >>> judge(torch.randn(5, 3, 40, 30)).shape
    torch.Size([5])
    """

    def __init__(self, channels: int, width: int = 64, grid: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.grid = grid
        self.fine = nn.ModuleList(nn.Conv2d(channels if i == 0 else width, width, 3) for i in range(3))
        self.coarse = nn.ModuleList(
            [
                nn.Conv2d(width, width, 4, stride=2, padding=1),
                nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
                nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1, bias=False),
                nn.Conv2d(4 * width, 8 * width, 4, padding=1, bias=False),
                nn.Conv2d(8 * width, width, 4, padding=1),
            ]
        )
        self.last = nn.Linear(width * grid[0] * grid[1], 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Scores ``[B]`` of images and masks side by side, ``[B, channels, H, W]``."""
        x = _at_least(pairs, _LEAST)
        for conv in self.fine:
            x = F.leaky_relu(conv(_reflected(x)), _SLOPE)
        x = _reflected(x)  # beside the zeros of the next convolution, as its authors have it
        for conv in self.coarse:
            x = F.leaky_relu(conv(x), _SLOPE)
        with full_precision(x):
            x = at_least_float32(x)
            if self.grid == (1, 1):
                x = x.mean((2, 3), keepdim=True)
            elif tuple(x.shape[2:]) != self.grid:
                x = F.adaptive_avg_pool2d(x, self.grid)
            return self.last(x.flatten(1)).sigmoid()[:, 0].clamp_min(FLOOR)


def scored_with_r1(judge: Callable[[Tensor], Tensor], pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``[B]`` of real pairs, and R1 of each (Mescheder et al. 2018):

        R1 = Σ (∂ score / ∂ input)²   over all pixels and channels, of image and mask

    Both are differentiable in the weights.

    >>> scores, r1 = scored_with_r1(lambda x: 3 * x[:, 0, 0, 0], torch.ones(2, 4, 1, 1))
    >>> scores.tolist(), r1.tolist()
    ([3.0, 3.0], [9.0, 9.0])
    """
    with torch.enable_grad():
        pairs = pairs.detach().requires_grad_()
        scores = judge(pairs)
        (gradient,) = torch.autograd.grad(scores.sum(), pairs, create_graph=True)
        return scores, gradient.square().flatten(1).sum(1)


def fooled(fake: Tensor) -> Tensor:
    """Cross-entropy of scores with "real", their mean:  −log score.

    >>> fooled(torch.tensor([0.5, 1.0]))
    tensor(0.3466)
    """
    return -_log(fake).mean()


def told_apart(real: Tensor, fake: Tensor) -> Tensor:
    """Cross-entropy of real scores with "real" and of fake ones with "fake", each its mean."""
    return -_log(real).mean() - _log(1 - fake).mean()


def accuracy(real: Tensor, fake: Tensor) -> Tensor:
    """The share of scores on the right side of one half.

    >>> accuracy(torch.tensor([0.9, 0.2]), torch.tensor([0.1, 0.5]))
    tensor(0.7500)
    """
    return torch.cat([real > 0.5, fake <= 0.5]).float().mean()


def _log(x: Tensor) -> Tensor:
    """The logarithm; at 0, where it has no gradient, −100 as in PyTorch's cross-entropy."""
    zero = x == 0
    return x.masked_fill(zero, 1).log().masked_fill(zero, -100)


def _reflected(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


def _at_least(x: Tensor, least: int) -> Tensor:
    """Maps with their last row and column repeated until both sides have ``least`` pixels."""
    bottom, right = (max(least - side, 0) for side in x.shape[2:])
    return F.pad(x, (0, right, 0, bottom), mode="replicate") if bottom or right else x
