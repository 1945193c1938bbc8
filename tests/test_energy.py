"""The energy score: its distance, its weights of pairs, properness, and MoSE's fused version of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg import MaskDistribution, MoSE
from ambiseg._util.errors import ConfigError
from ambiseg.config import parse
from ambiseg.energy import energy_from_costs, energy_score, jaccard_distances, pair_weights
from ambiseg.methods import METHODS
from ambiseg.nn.config import BackboneConfig
from ambiseg.overlap import iou_cost


def slow_distance(s, t, valid):
    """[C, P] each, foreground classes, one pixel at a time."""
    values = []
    for c in range(1, len(s)):
        low = high = 1.0
        for p in range(s.shape[1]):
            if valid[p]:
                low += min(float(s[c, p]), float(t[c, p]))
                high += max(float(s[c, p]), float(t[c, p]))
        values.append(1 - low / high)
    return sum(values) / len(values)


def slow_score(soft, readers, u, v, strata, valid):
    """One image: soft [N, C, P], readers [M, C, P] one-hot."""
    N, S = len(soft), len(soft) // strata
    total = 2 * sum(
        float(u[i] * v[j]) * slow_distance(soft[i], readers[j], valid) for i in range(N) for j in range(len(readers))
    )
    share = [float(u[k * S : (k + 1) * S].sum()) for k in range(strata)]
    for k, m in itertools.product(range(strata), repeat=2):
        pairs = [(i, j) for i in range(k * S, k * S + S) for j in range(m * S, m * S + S) if i != j]
        if pairs:
            mean = sum(slow_distance(soft[i], soft[j], valid) for i, j in pairs) / len(pairs)
            total -= share[k] * share[m] * mean
    return total


def problem(seed, B=2, N=6, C=3, M=3, size=(3, 4)):
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(B, N, C, *size, generator=draw, dtype=torch.float64)
    readers = MaskDistribution(
        torch.randint(C, (B, M, *size), generator=draw),
        weights=torch.rand(B, M, generator=draw).softmax(1),
        valid=torch.rand(B, *size, generator=draw) > 0.2,
    )
    return logits, readers, torch.rand(B, N, generator=draw, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize(("C", "strata"), [(2, 1), (2, 3), (4, 2), (3, 6)])
def test_the_score_is_its_definition(C, strata):
    logits, readers, _ = problem(C + strata, C=C)
    assert readers.valid is not None
    shares = torch.rand(2, strata, dtype=torch.float64).softmax(1)
    u = (shares * strata / 6).repeat_interleave(6 // strata, 1)
    found = energy_score(logits, readers, u, strata=strata)
    assert torch.equal(found.total, 2 * found.distance - found.spread)
    for b in range(2):
        soft, said = logits[b].softmax(1).flatten(2), torch.nn.functional.one_hot(readers.labels[b], C)
        valid = readers.valid[b].flatten()
        expected = slow_score(soft, said.movedim(-1, 1).flatten(2), u[b], readers.mass[b], strata, valid)
        assert float(found.total[b]) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4))
def test_the_distance_is_0_for_equal_masks_and_the_iou_cost_against_hard_ones(seed, C):
    logits, readers, _ = problem(seed, N=2, C=C, M=1)
    assert readers.valid is not None
    hard = torch.nn.functional.one_hot(readers.labels[:, 0], C).movedim(-1, 1).double()
    soft = logits.softmax(2)
    stacked = torch.stack([soft[:, 0], soft[:, 0], hard], 1)[:, :, 1:].flatten(3).transpose(1, 2)
    same, first, second = jaccard_distances(stacked, readers.valid.flatten(1)).unbind(1)
    assert same.abs().max() == 0
    cost = iou_cost(soft[:, :1], readers, probs=True)[:, 0, 0]
    assert torch.allclose(first, cost)
    assert torch.allclose(second, cost)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 3))
def test_the_distance_is_of_negative_type(seed, C):
    """Σ a_i a_j d_ij ≤ 0 wherever Σ a = 0: without it the score would not be proper."""
    logits, _, _ = problem(seed, B=1, N=7, C=C)
    d = jaccard_distances(logits.softmax(2)[:, :, 1:].flatten(3).transpose(1, 2))[0]
    i, j = torch.triu_indices(7, 7, 1)
    a = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    a -= a.mean()
    assert float((a[i] * a[j] * d).sum()) <= 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_no_weights_score_better_than_those_that_annotations_are_drawn_with(seed):
    draw = torch.Generator().manual_seed(seed)
    modes = MaskDistribution(torch.randint(2, (1, 5, 4, 4), generator=draw), weights=torch.rand(1, 5).softmax(1))
    soft = torch.nn.functional.one_hot(modes.labels, 2).movedim(-1, 2).double()
    truth = modes.mass.double()
    other = torch.rand(1, 5, generator=draw, dtype=torch.float64).softmax(1)

    def score(u):
        return float(energy_score(soft, modes, u, strata=5, probs=True).total)

    assert score(truth) <= score(other) + 1e-12
    u = truth.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy_score(soft, modes, u, strata=5, probs=True).total.sum(), u)
    assert float((slope - slope.mean()).abs().max()) < 1e-6  # no direction within the simplex goes down


def test_the_expected_score_of_few_draws_is_that_of_the_distribution_itself():
    """Two strata of two equally likely masks; two draws from each, all 16 outcomes."""
    draw = torch.Generator().manual_seed(3)
    masks = torch.rand(4, 2, 3, 3, generator=draw, dtype=torch.float64).softmax(1)  # strata {0, 1} and {2, 3}
    readers = torch.randint(2, (1, 3, 3, 3), generator=draw)
    shares = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    whole = energy_score(masks[None], readers, (shares / 2).repeat_interleave(2, 1), strata=4, probs=True).total
    u, scores = (shares / 2).repeat_interleave(2, 1), []
    for outcome in itertools.product((0, 1), repeat=4):
        drawn = torch.stack([masks[outcome[0]], masks[outcome[1]], masks[2 + outcome[2]], masks[2 + outcome[3]]])
        scores.append(energy_score(drawn[None], readers, u, strata=2, probs=True).total)
    assert float(torch.stack(scores).mean()) == pytest.approx(float(whole))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(6, 1), (6, 2), (6, 3), (6, None), (5, None)]))
def test_weights_of_pairs_are_those_of_two_different_draws(seed, sizes):
    N, strata = sizes
    shares = torch.rand(1, strata or N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)
    u = (shares * shares.shape[1] / N).repeat_interleave(N // shares.shape[1], 1)
    found = pair_weights(u, strata)
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)


def test_bad_calls_are_refused():
    logits, readers, u = problem(0)
    with pytest.raises(ValueError, match="same number of samples in each of 4 strata, found 6"):
        energy_score(logits, readers, u, strata=4)
    with pytest.raises(ValueError, match=r"weights must be \[2, 6\]"):
        energy_score(logits, readers, u[:, :5])


def test_gradients_by_differences():
    logits, readers, u = problem(5, B=1, N=4, C=3)
    inputs = logits.requires_grad_(), u.detach()[:, :4].requires_grad_()

    def total(x, w):
        return energy_score(x, readers[:1] if len(readers) > 1 else readers, w, strata=2).total

    assert torch.autograd.gradcheck(total, inputs)


# -- MoSE --------------------------------------------------------------------------------------------------------------


def example(C=2, dtype=torch.float64, **more):
    torch.manual_seed(1)
    model = MoSE(1, C, backbone="unet-light", experts=3, samples=2, objective="energy", **more).to(dtype)
    images = torch.randn(2, 1, 16, 16, dtype=dtype)
    readers = MaskDistribution(
        torch.randint(C, (2, 4, 16, 16)), torch.rand(2, 4).softmax(1), valid=torch.rand(2, 16, 16) > 0.2
    )
    return model, images, readers


@pytest.mark.parametrize(
    "more",
    [{}, {"C": 4}, {"inject_level": 0.5}, {"head": "released"}, {"stochastic": False}, {"expert_weights": "uniform"}],
)
def test_the_fused_loss_and_its_gradients_are_those_of_the_plain_score(more):
    model, images, readers = example(**more)
    model.eval() if more.get("head") else model.train()
    found = model.loss(images, readers, generator=torch.Generator().manual_seed(2))
    assert set(found) == {"total", "distance", "spread"}
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = torch.autograd.grad(found["total"], parameters, allow_unused=True)
    predictive = model(images)
    noise = predictive.compact_noise(2, torch.Generator().manual_seed(2))
    plain = energy_score(predictive.logits(noise.codes), readers, noise.mass, strata=3).total.mean()
    assert float(found["total"].detach()) == pytest.approx(float(plain.detach()))
    for f, e in zip(fused, torch.autograd.grad(plain, parameters, allow_unused=True), strict=True):
        assert (f is None) == (e is None)
        assert f is None or torch.allclose(f, e, atol=1e-10)


def test_a_mixture_is_the_weighted_sum_of_both_losses():
    model, images, readers = example()

    def loss(share):
        return model.loss(images, readers, generator=torch.Generator().manual_seed(2), energy_share=share)

    whole, none, some = loss(1.0), loss(0.0), loss(0.25)
    assert set(none) == {"total", "transport", "kl"}
    assert set(some) == {"total", "transport", "kl", "distance", "spread"}
    expected = 0.25 * whole["total"] + 0.75 * none["total"]
    assert float(some["total"].detach()) == pytest.approx(float(expected.detach()))
    model.config.objective = "transport"
    assert float(loss(None)["total"].detach()) == pytest.approx(float(none["total"].detach()))
    model.config.objective = "energy"
    with pytest.raises(ValueError, match="energy_share in"):
        loss(1.5)


def test_the_loss_in_bfloat16_is_near():
    model, images, readers = example(dtype=torch.float32)
    exact = model.loss(images, readers, generator=torch.Generator().manual_seed(2))["total"]
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(images, readers, generator=torch.Generator().manual_seed(2))["total"]
    assert rough.dtype == torch.float32
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=0.02)


def test_an_image_without_a_valid_pixel_counts_nowhere():
    model, images, readers = example()
    assert readers.valid is not None
    model.eval()  # batch norm would let one image influence the other
    valid = readers.valid.clone()
    valid[1] = False
    both = model.loss(images, MaskDistribution(readers.labels, readers.weights, valid), generator=None)
    assert both["total"].isfinite()
    grads = torch.autograd.grad(both["total"], [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.stratum])
def test_any_method_with_strata_can_be_trained_by_it(method):
    torch.manual_seed(0)
    kind = METHODS[method]
    model = kind.build(kind.Config(), BackboneConfig(channels=[8, 16], momentum=0.1), 1, 2).train()
    images = torch.zeros(4, 1, 16, 16)
    images[:, :, 4:12, 4:12] = 1
    readers = torch.zeros(4, 2, 16, 16, dtype=torch.long)
    readers[:, 0, 4:12, 4:12] = 1
    readers[:, 1, 6:10, 6:10] = 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(40):
        score = model(images).energy(readers, 2, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        score.total.mean().backward()
        optimizer.step()
        losses.append(float(score.total.detach().mean()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--model.cost", "ce"], "expected cost iou and form weighted with energy, found cost ce"),
        (["--model.form", "gumbel"], "expected cost iou and form weighted with energy"),
        (["--model.samples", "1"], "samples: expected at least 2 with objective energy"),
        (["--model.energy_share", "2"], "energy_share: expected values from 0 to 1"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--model.objective", "energy", *settings])


def test_one_sample_is_enough_of_experts_that_are_single_masks():
    config = parse(["--model.objective", "energy", "--model.samples", "1", "--model.stochastic", "false"])
    assert config.model.model_dump()["samples"] == 1


def test_a_schedule_goes_from_transport_to_the_energy_score():
    share = "{kind: linear, values: [0, 1], epochs: 1, warm_up: 3}"
    config = parse(["--model.objective", "energy", "--model.energy_share", share])
    assert set(config.model.schedules) == {"energy_share"}


def test_a_cost_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="distance of its own"):
        MoSE(1, 2, backbone="unet-light", cost=lambda logits, annotations: logits, objective="energy")


def test_the_sum_of_terms_is_what_costs_say():
    cost, distances = torch.tensor([[[0.5], [1.0]]]), torch.tensor([[0.25]])
    found = energy_from_costs(cost, distances, torch.tensor([[0.5, 0.5]]), torch.ones(1, 1), strata=2)
    assert [float(x) for x in found] == [2 * 0.75 - 0.125, 0.75, 0.125]
