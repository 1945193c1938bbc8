"""Images whose modes and probabilities are known exactly: small, so that a test can train on them."""

from __future__ import annotations

import torch
from torch import Tensor

from ambiseg import MaskDistribution, pairwise_iou

SIZE = 15
PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2], [0.15, 0.25, 0.6]])  # of images on dark and on light ground


def modes(images: int, generator: torch.Generator) -> tuple[Tensor, MaskDistribution]:
    """Images ``[B, 1, 15, 15]`` of three bars, grey, bright and brightest, in any order. A reader marks one of them:
    which one is a matter of chance, with other probabilities on dark ground than on light."""
    light = torch.randint(2, (images,), generator=generator)
    order = torch.rand(images, 3, generator=generator).argsort(1)  # which bar stands left, middle, right
    columns = torch.arange(SIZE)
    bar = torch.where(columns % 5 < 3, order[:, columns // 5], -1)[:, None].expand(-1, SIZE, -1)  # -1: ground
    picture = torch.where(bar >= 0, bar.float() + 1, -light[:, None, None].float())
    picture = picture + 0.05 * torch.randn(picture.shape, generator=generator)
    return picture[:, None], MaskDistribution(torch.stack([bar == m for m in range(3)], 1), PROBABILITIES[light])


def recovered(predicted: MaskDistribution, truth: MaskDistribution) -> tuple[Tensor, Tensor]:
    """The weight that predictions give each mode, each sample counted for its nearest, and how near it is, [B, M]."""
    iou = pairwise_iou(predicted, truth)
    mass = torch.zeros(len(truth), truth.count).scatter_add(1, iou.argmax(2), predicted.mass)
    return mass, iou.amax(1)
