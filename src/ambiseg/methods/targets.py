"""What a training step of a method that looks at one annotation at a time is fitted to."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ambiseg.masks import Masks, as_masks

CLIP = 1000.0
"""The largest norm of gradients, for methods whose loss is a sum over pixels."""


class Target(NamedTuple):
    """One mask per image.

    Attributes:
        labels: ``[B, H, W]`` int64, 0 at void pixels.
        valid: ``[B, H, W]`` bool; ``None``: every pixel counts.
    """

    labels: Tensor
    valid: Tensor | None

    def one_hot(self, classes: int, centre: float = 0.0) -> Tensor:
        """``[B, C, H, W]`` float32, minus ``centre``; 0 at void pixels."""
        maps = F.one_hot(self.labels, classes).movedim(-1, 1).float() - centre
        return maps if self.valid is None else maps * self.valid[:, None]

    @property
    def counted(self) -> Tensor:
        """``[B]``: 1 for images that have a valid pixel, else 0."""
        if self.valid is None:
            return torch.ones(len(self.labels), device=self.labels.device)
        return self.valid.flatten(1).any(1).float()

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value per image ``[B]`` over the images that have a valid pixel."""
        counted = self.counted.to(values.dtype)
        return (values * counted).sum() / counted.sum().clamp_min(1)


def one_each(annotations: Masks, classes: int, generator: torch.Generator | None = None) -> Target:
    """One annotation per image, drawn with the weights as probabilities. It costs the same for any number of them."""
    annotations = as_masks(annotations)
    drawn = annotations if annotations.count == 1 else annotations.draw(1, generator)
    return Target(drawn.class_ids(classes)[:, 0], drawn.valid)
