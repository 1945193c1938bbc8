from __future__ import annotations

import pytest
import torch

from ambiseg.nn import Experts, Gate


def test_means_start_at_the_corners_and_sigma_at_an_eighth():
    experts = Experts(6, latent=2)
    assert experts.mean[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert ((experts.mean[4:] >= 0) & (experts.mean[4:] <= 1)).all()
    assert torch.allclose(experts.sigma, torch.full((6, 2), 1 / 8))


@pytest.mark.parametrize("diagonal", [False, True])
def test_codes_have_their_experts_mean_and_sigma(diagonal):
    experts = Experts(3, latent=2, diagonal=diagonal)
    with torch.no_grad():
        assert experts.log_sigma is not None
        experts.log_sigma.copy_(torch.tensor([-3.0, -2.0, -1.0])[:, None].expand_as(experts.log_sigma))
    assert experts.log_sigma.shape == (3, 2 if diagonal else 1)
    codes = experts.each(images=4000, samples=2, generator=torch.Generator().manual_seed(0)).detach()
    assert codes.shape == (4000, 6, 2)
    by_expert = codes.unflatten(1, (3, 2)).permute(1, 0, 2, 3).flatten(1, 2)  # the codes of one expert side by side
    assert torch.allclose(by_expert.mean(1), experts.mean, atol=0.02)
    assert torch.allclose(by_expert.std(1), experts.sigma, rtol=0.05)
    assert not torch.allclose(codes[:, 0], codes[:, 1])


def test_gradients_reach_mean_and_sigma_and_generators_repeat():
    experts = Experts(3, latent=1)
    g = torch.Generator()
    first, second = (experts.of(torch.tensor([[0, 2]]), g.manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    first.square().sum().backward()
    assert experts.mean.grad is not None
    assert experts.mean.grad.flatten().ne(0).tolist() == [True, False, True]
    assert experts.log_sigma is not None
    assert experts.log_sigma.grad is not None


def test_deterministic_experts_give_their_means():
    experts = Experts(2, latent=1, stochastic=False)
    assert experts.each(1, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert [name for name, _ in experts.named_parameters()] == ["mean"]


def test_gate_learns_weights_or_keeps_the_ones_it_was_given():
    features = torch.randn(5, 8, 3, 3)
    learned = Gate(8, 3)(features)
    assert torch.allclose(learned.sum(1), torch.ones(5))
    assert learned.std(0).min() > 0
    assert Gate(8, 4, "uniform")(features).tolist() == [[0.25] * 4] * 5
    assert Gate(8, 2, [0.75, 0.25])(features)[0].tolist() == [0.75, 0.25]
    assert not list(Gate(8, 2, "uniform").parameters())
    assert Gate(8, 3).half()(features.half()).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experts(0, 1), "at least one expert"),
        (lambda: Gate(8, 3, "even"), "learned, uniform or 3 numbers, found 'even'"),
        (lambda: Gate(8, 3, [0.5, 0.5]), "3 expert weights that sum to 1"),
        (lambda: Gate(8, 2, [1.5, -0.5]), "2 expert weights that sum to 1"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
