"""What every method must do, whichever it is: one tester for the whole zoo."""

from __future__ import annotations

import copy

import pytest
import torch

from ambiseg import METHODS, MaskDistribution
from ambiseg.methods import Method, Predictive
from ambiseg.nn import UNet


def build(name: str, classes: int = 3) -> Method:
    torch.manual_seed(0)
    return METHODS[name](2, classes, backbone=UNet(2, (4, 8)))  # type: ignore[call-arg]


def batch(classes: int = 3) -> tuple[torch.Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(1)
    valid = torch.rand(2, 13, 10, generator=g) < 0.9
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    labels = torch.randint(classes, (2, 3, 13, 10), generator=g)
    return torch.randn(2, 2, 13, 10, generator=g), MaskDistribution(labels, weights, valid)


@pytest.mark.parametrize("name", METHODS)
def test_loss_is_scalars_with_a_total_that_reaches_every_parameter(name):
    model = build(name)
    terms = model.loss(*batch())
    assert all(value.ndim == 0 and value.isfinite() for value in terms.values())
    terms["total"].backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", METHODS)
def test_loss_repeats_with_a_generator_and_leaves_its_inputs_alone(name):
    model = build(name).eval()
    images, annotations = batch()
    before = images.clone(), annotations.labels.clone()
    losses = [
        model.loss(images, annotations, generator=torch.Generator().manual_seed(3))["total"].item() for _ in range(2)
    ]
    assert losses[0] == losses[1]
    assert torch.equal(images, before[0])
    assert torch.equal(annotations.labels, before[1])


@pytest.mark.parametrize("name", METHODS)
def test_predictions_are_distributions_of_the_images_size(name):
    model = build(name)
    images, _ = batch()
    predictive = model.predict(images)
    assert isinstance(predictive, Predictive)
    masks = predictive.sample(5, torch.Generator().manual_seed(0))
    assert masks.labels.shape == (2, 5, 13, 10)
    assert masks.weights is None
    assert int(masks.labels.max()) < model.classes
    assert masks.marginal is not None
    assert torch.allclose(masks.marginal.sum(1), torch.ones(2, 13, 10), atol=1e-5)
    again = predictive.sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(again.labels, masks.labels)
    assert torch.allclose(predictive.marginal(5, torch.Generator().manual_seed(0)), masks.marginal, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_predict_keeps_the_mode_and_the_statistics(name):
    model = build(name).train()
    state = copy.deepcopy(model.state_dict())
    assert not model.predict(batch()[0]).sample(1).marginal.requires_grad  # type: ignore[union-attr]
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("name", METHODS)
def test_a_step_learns(name):
    model = build(name)
    images, _ = batch()
    labels = torch.stack([images[:, 0] > 0, images[:, 0] > 0.5, images[:, 0] > 0], 1)
    annotations = MaskDistribution(labels.long())
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        terms = model.loss(images, annotations, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        terms["total"].backward()
        optimiser.step()
        losses.append(terms["total"].item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", METHODS)
def test_saved_weights_predict_the_same(name):
    model, other = build(name), build(name)
    torch.nn.init.normal_(next(other.parameters()))
    other.load_state_dict(model.state_dict())
    images, _ = batch()
    one, two = (m.predict(images).sample(3, torch.Generator().manual_seed(0)) for m in (model, other))
    assert torch.equal(one.labels, two.labels)
