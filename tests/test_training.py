"""Half a minute of training on data whose truth is known."""

from __future__ import annotations

from typing import Any

import torch

from ambiseg import MaskDistribution, MoSE, ged
from ambiseg.nn import UNet
from tests import toy


def train(steps: int, **settings: Any) -> MoSE:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    backbone = UNet(1, (8, 16, 32), momentum=0.1)
    model = MoSE(1, 2, experts=4, samples=2, latent=2, backbone=backbone, **settings)
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(steps):
        warm_up = step < steps // 4  # every sample is made to explain something, every mode counts alike
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, 2.5 * (1 - step / steps))
        images, truth = toy.modes(16, g)
        schedule = {"capacity": 1 / 8, "annealing": 0.0} if warm_up else {}
        terms = model.loss(images, truth, generator=g, **schedule)  # type: ignore[arg-type]
        optimiser.zero_grad()
        terms["total"].backward()
        optimiser.step()
    return model


def held_out(model: MoSE) -> tuple[MaskDistribution, MaskDistribution]:
    images, truth = toy.modes(64, torch.Generator().manual_seed(99))
    return model.predict(images).compact(4, torch.Generator().manual_seed(1)), truth


def test_every_mode_is_recovered_with_its_probability():
    predicted, truth = held_out(train(600, cost="ce"))
    mass, near = toy.recovered(predicted, truth)
    assert near.min() > 0.95  # every mode of every image, drawn whole
    assert (mass - truth.mass).abs().max() < 0.05  # and as likely as it is, on dark and on light ground
    assert ged(predicted, truth).mean() < 0.01


def test_the_plain_loss_over_all_pairs_does_not():
    """The paper's first ablation, all else equal: the same network averages its annotations away."""
    predicted, truth = held_out(train(600, cost="ce", objective="all-pairs"))
    mass, near = toy.recovered(predicted, truth)
    assert near.amin(1).mean() < 0.5  # in the mean image some mode is nowhere near any prediction
    assert (mass - truth.mass).abs().amax(1).mean() > 0.2
    assert ged(predicted, truth).mean() > 0.2
