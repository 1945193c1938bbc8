"""What a training costs, counted and not timed: the same plan on every machine."""

from __future__ import annotations

import torch

from ambiseg.config import Config
from ambiseg.methods import Method
from ambiseg.methods.facts import Facts
from ambiseg.runs import build_model

RATE = 50e9  # operations per second of one core, as a core of a server of 2024 reaches in convolutions of few channels
VALIDATION = 0.5  # of a training step, per pixel: one pass forward, and the drawing of 16 masks


def operations_per_pixel(config: Config, channels: int, classes: int) -> float:
    """Multiplications and additions of one training step, forward and backward, per pixel of its windows.

    They are counted while a step is made on one small image with two annotators, by whatever method and network the
    configuration names.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(config, channels, classes)
        side = max(model.multiple, 16)
        images = torch.rand(2, channels, side, side)
        masks = torch.zeros(2, 2, side, side, dtype=torch.long)
        masks[:, :, : side // 2] = 1
        masks[:, 1, :, : side // 2] = 1
        with FlopCounterMode(display=False) as counter:
            _step(model, images, masks)
    return counter.get_total_flops() / (2 * side * side)


def _step(model: Method, images: torch.Tensor, masks: torch.Tensor) -> None:
    several = len(model.parameter_groups()) > 1
    for phase in model.phases(0):
        model.loss(images, masks, **({"phase": phase} if several else {}))["total"].backward()


def seconds(operations: float) -> float:
    """The time that one core is expected to take."""
    return operations / RATE


def validation_seconds(per_pixel: float, facts: Facts) -> float:
    """One validation on whole images."""
    height, width = facts.median
    return seconds(VALIDATION * per_pixel * facts.val_images * height * width)
