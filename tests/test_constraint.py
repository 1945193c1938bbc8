"""A bound on a part of the loss and its multiplier."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.nn.constraint import Constraint
from tests.conftest import SHARED


@pytest.fixture(scope="module")
def hpu():
    path = SHARED / "golden" / "zoo" / "hpu.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    return {key: torch.from_numpy(np.asarray(array)) for key, array in np.load(path).items()}


class Tf1Adam:
    """TensorFlow 1's Adam, whose ε is not divided by the correction of the second moment."""

    def __init__(self, parameters, lr):
        (self.parameter,), self.lr, self.m, self.v, self.t = parameters, lr, 0.0, 0.0, 0

    def step(self):
        g, self.t = self.parameter.grad, self.t + 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        rate = self.lr * math.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        with torch.no_grad():
            self.parameter -= rate * self.m / (self.v.sqrt() + 1e-8)


OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adam_tf1": Tf1Adam}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_golden_trace(hpu, name):
    """λ, loss and gradients step by step; TensorFlow's Adam and PyTorch's differ in where ε stands."""
    values, apart = hpu["geco_rec"], hpu["geco_kl"]
    constraint = Constraint(hpu["geco_decay"].item(), hpu["geco_rate"].item()).double()
    torch.nn.init.constant_(constraint.rho, hpu["geco_rho0"].item())
    optimiser = OPTIMISERS[name](constraint.parameters(), lr=hpu[f"geco_{name}_lr"].item())
    found = {key: [] for key in ("ema", "constraint", "rho", "lambda", "loss", "grad_rho", "dloss_drec")}
    for value, extra in zip(values, apart, strict=True):
        value = value.clone().requires_grad_()
        bound = hpu["geco_kappa"] * hpu["geco_n_selected"]
        rho = constraint.rho.detach().clone()
        constrained = constraint(value, bound)
        loss = constrained.term + extra
        constraint.zero_grad()
        loss.backward()
        assert constraint.rho.grad is not None
        seen = (
            constraint.average,
            constrained.slack,
            rho,
            constrained.multiplier,
            loss,
            constraint.rho.grad,
            value.grad,
        )
        for key, number in zip(found, seen, strict=True):
            assert number is not None
            found[key].append(number.detach().clone())
        optimiser.step()
    keys = ["geco_ema", "geco_constraint", *(f"geco_{name}_{key}" for key in ("rho", "lambda", "loss"))]
    keys += [] if name == "adam_tf1" else [f"geco_{name}_{key}" for key in ("grad_rho", "dloss_drec")]
    for key in keys:
        numbers = torch.stack(found[key.removeprefix("geco_").removeprefix(f"{name}_")])
        torch.testing.assert_close(numbers, hpu[key], rtol=1e-10, atol=1e-13)


def test_golden_average_of_another_decay(hpu):
    constraint = Constraint(decay=0.5).double()
    found = torch.stack([constraint.averaged(value) for value in hpu["geco_rec"]])
    torch.testing.assert_close(found, hpu["geco_ema_decay05"], rtol=1e-10, atol=0)


def test_two_steps_by_hand():
    constraint = Constraint(decay=0.75, rate=0.5)
    value = torch.tensor(3.0, requires_grad=True)
    constraint(value, 1.0).term.backward()
    assert value.grad is not None
    assert constraint.rho.grad is not None
    assert value.grad.item() == pytest.approx(1)  # λ
    slope = 2 * (1 - 1 / math.e)  # dλ/dρ = 2 softplus(ρ) sigmoid(ρ), with softplus(ρ) = 1
    assert constraint.rho.grad.item() == pytest.approx(-0.5 * 2 * slope)
    second = torch.tensor(7.0, requires_grad=True)
    constrained = constraint(second, 1.0)
    assert constrained.slack.item() == pytest.approx(0.75 * 3 + 0.25 * 7 - 1)
    constrained.term.backward()
    assert second.grad is not None
    assert second.grad.item() == pytest.approx(1)  # not 1 − decay: as if the average were the value


def test_the_multiplier_goes_where_the_bound_is_broken():
    for value, way in ((5.0, 1), (0.1, -1)):
        constraint = Constraint()
        optimiser = torch.optim.Adam(constraint.parameters(), lr=0.01)
        for _ in range(5):
            optimiser.zero_grad()
            constraint(torch.tensor(value), 1.0).term.backward()
            optimiser.step()
        assert (constraint.multiplier.item() - 1) * way > 0


def test_it_stands_still_in_evaluation_and_goes_on_from_a_checkpoint():
    constraint, other = Constraint(), Constraint()
    assert constraint.eval()(torch.tensor(4.0), 0.0).slack.item() == 4  # nothing was seen: the value itself
    assert constraint.seen.item() == 0
    constraint.train()(torch.tensor(2.0), 0.0)
    constraint.eval()(torch.tensor(100.0), 0.0)
    assert (constraint.average.item(), constraint.seen.item()) == (2, 1)
    other.load_state_dict(constraint.state_dict())
    assert other(torch.tensor(4.0), 0.0).slack.item() == constraint.train()(torch.tensor(4.0), 0.0).slack.item()


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20), st.floats(0, 0.999))
def test_the_average_is_among_the_values(values, decay):
    constraint = Constraint(decay)
    for value in values:
        constraint(torch.tensor(value), 0.0)
    assert min(values) * (1 - 1e-5) - 1e-30 <= constraint.average.item() <= max(values) * (1 + 1e-5) + 1e-30
    assert constraint.seen.item() == len(values)


def test_accumulated_batches_are_one_large_one_but_for_the_average():
    """Weights get λ times the mean gradient; ρ that of the mean of what the averages were."""
    weight = torch.nn.Parameter(torch.tensor(2.0))
    constraint = Constraint(decay=0.9)
    for factor in (1.0, 3.0):
        (constraint(factor * weight, 1.0).term / 2).backward()
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2)  # λ = 1, mean factor 2
    first, second = 2.0, 0.9 * 2.0 + 0.1 * 6.0
    assert constraint.rho.grad is not None
    slope = 2 * (1 - 1 / math.e)
    assert constraint.rho.grad.item() == pytest.approx(-0.01 * slope * ((first + second) / 2 - 1), rel=1e-5)
