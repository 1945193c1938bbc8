from __future__ import annotations

from typing import Any

import pytest
import torch

from ambiseg import MaskDistribution, MoSE, overlap, transport
from ambiseg._util.errors import ConfigError
from ambiseg.methods.mose.grouping import merge_alike
from ambiseg.methods.schedules import Schedule
from ambiseg.nn import Adapter, UNet
from ambiseg.regions import RegionMasks, partition

# -- size ----------------------------------------------------------------------------------------------------


def megabytes(module: torch.nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) * 4 / 1e6


def test_sizes_of_the_papers_table_in_its_unit():
    """The paper's "# param." columns are megabytes of float32."""
    light = MoSE(1, 2, backbone="unet-light")
    assert megabytes(light.backbone) == pytest.approx(9.06, abs=0.005)
    assert megabytes(light) - megabytes(light.backbone) <= 0.33
    for backbone, size in ((UNet(1), 36.97), (UNet(1, decoder="phiseg"), 41.26)):
        model = MoSE(1, 2, backbone=backbone)
        added = megabytes(model) - megabytes(backbone)
        assert megabytes(backbone) == pytest.approx(size, abs=0.005)
        assert added <= 0.35
        assert added / megabytes(backbone) < 0.01


# -- the loss, against the same thing written plainly --------------------------------------------------------


def small(classes: int = 3, **settings: Any) -> MoSE:
    torch.manual_seed(0)
    settings = {"experts": 3, "samples": 2, "latent": 2, "backbone": UNet(1, (4, 8)), **settings}
    return MoSE(1, classes, **settings).double()


def batch(classes: int = 3, M: int = 3) -> tuple[torch.Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(classes, (2, M, 8, 8), generator=g)
    weights = torch.rand(2, M, generator=g, dtype=torch.float64) + 0.1
    valid = torch.rand(2, 8, 8, generator=g) < 0.8
    images = torch.randn(2, 1, 8, 8, generator=g, dtype=torch.float64)
    return images, MaskDistribution(labels, weights / weights.sum(1, keepdim=True), valid)


@pytest.mark.parametrize("cost", ["iou", "ce"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("capacity", [0.25, 1.0])
@pytest.mark.parametrize("head", ["paper", "released"])
def test_loss_is_equation_6(cost, classes, capacity, head):
    model = small(classes, cost=cost, beta=2.0, head=head).eval()
    images, annotations = batch(classes)
    found = model.loss(images, annotations, capacity=capacity, generator=torch.Generator().manual_seed(5))

    latents = model.experts.each(2, 2, torch.Generator().manual_seed(5))
    features = model.backbone(images)
    logits = model.head(features.dense, latents)  # the plain path
    u = (model.gate(features.gate) / 2).repeat_interleave(2, 1)
    C = overlap.COSTS[cost](logits, annotations)
    P = transport.couple(C, annotations.mass, capacity)
    o = P.sum(2)
    kl = (torch.xlogy(o, o) - torch.xlogy(o, u)).sum(1).mean()
    moved = (P * C).sum((1, 2)).mean()
    assert found["transport"].item() == pytest.approx(moved.item())
    assert found["kl"].item() == pytest.approx(kl.item())
    assert found["total"].item() == pytest.approx((moved + 2 * kl).item())
    fused = torch.autograd.grad(found["total"], list(model.parameters()))
    plain = torch.autograd.grad(moved + 2 * kl, list(model.parameters()))
    for g, e in zip(fused, plain, strict=True):
        assert torch.allclose(g, e, atol=1e-10)


def test_a_custom_cost_is_any_callable():
    images, annotations = batch()
    named, called = small(cost="ce"), small(cost=overlap.ce_cost)
    values = [m.eval().loss(images, annotations, generator=torch.Generator().manual_seed(2)) for m in (named, called)]
    assert values[0]["total"].item() == pytest.approx(values[1]["total"].item())


def test_all_pairs_is_the_mean_over_every_pair():
    model = small(objective="all-pairs").eval()
    images, annotations = batch()
    found = model.loss(images, annotations, generator=torch.Generator().manual_seed(5))
    predictive = model(images)
    logits = predictive.logits(model.experts.each(2, 2, torch.Generator().manual_seed(5)))
    u = (predictive.weights / 2).repeat_interleave(2, 1)
    expected = torch.einsum("bn,bm,bnm->b", u, annotations.mass, overlap.iou_cost(logits, annotations)).mean()
    assert found["total"].item() == pytest.approx(expected.item())
    assert found["kl"].item() == 0


def test_gumbel_draws_experts_by_their_weights_and_reaches_the_gate():
    model = small(form="gumbel", experts=3, samples=2000, expert_weights=[0.2, 0.5, 0.3])
    predictive = model(batch()[0])
    drawn = model._draw(predictive, 2000, torch.Generator().manual_seed(0))
    means = model.experts.mean.detach()
    nearest = torch.cdist(drawn.latents.detach(), means.expand(2, -1, -1)).argmin(2)
    shares = torch.nn.functional.one_hot(nearest, 3).double().mean((0, 1))
    assert torch.allclose(shares, torch.tensor([0.2, 0.5, 0.3]).double(), atol=0.03)
    assert torch.allclose(drawn.weights, torch.full((2, 6000), 1 / 6000).double())
    learned = small(form="gumbel")
    learned.loss(*batch())["total"].backward()
    for parameter in learned.gate.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_annealing_moves_annotation_weights_from_uniform_to_their_own():
    model = small(cost="ce").eval()
    images, annotations = batch()
    padded = MaskDistribution(annotations.labels, torch.tensor([[0.9, 0.1, 0.0]] * 2).double(), annotations.valid)
    even = MaskDistribution(annotations.labels, torch.tensor([[0.5, 0.5, 0.0]] * 2).double(), annotations.valid)

    def value(masks, annealing):
        return model.loss(images, masks, annealing=annealing, generator=torch.Generator().manual_seed(1))["transport"]

    assert value(padded, 0.0).item() == pytest.approx(value(even, 1.0).item())
    middle = (value(padded, 0.0) + value(padded, 1.0)) / 2  # capacity 1: the transport term is linear in v
    assert value(padded, 0.5).item() == pytest.approx(middle.item())


def test_images_without_a_valid_pixel_are_left_out_of_the_mean():
    model = small().eval()
    images, annotations = batch()
    assert annotations.valid is not None
    void = annotations.valid.clone()
    void[1] = False
    partly = MaskDistribution(annotations.labels, annotations.weights, void)
    g = torch.Generator()
    both = model.loss(images, partly, generator=g.manual_seed(0))
    latents = model.experts.each(2, 2, g.manual_seed(0))
    cost = overlap.iou_cost(model(images).logits(latents), partly)[:1]
    plan = transport.couple(cost, partly.mass[:1])
    assert both["transport"].item() == pytest.approx((plan * cost).sum().item())
    nothing = MaskDistribution(annotations.labels, annotations.weights, torch.zeros_like(void))
    terms = model.loss(images, nothing)
    terms["total"].backward()
    assert terms["total"].item() == 0


# -- soft gradients ------------------------------------------------------------------------------------------


def strip(*lengths: int) -> torch.Tensor:
    """One image 1×12; expert k marks its first lengths[k] pixels."""
    return (torch.arange(12) < torch.tensor(lengths)[:, None])[None, :, None].long()


def test_merges_follow_chains_in_any_order():
    assert merge_alike(strip(10, 5), 2, 0.5).tolist() == [[0, 0]]
    assert merge_alike(strip(10, 5), 2, 0.51).tolist() == [[0, 1]]
    # 12–9 and 9–7 and 7–5 overlap at least .7; 12–7 and 9–5 do not: one chain, wherever its links stand
    assert merge_alike(strip(12, 9, 7, 5), 2, 0.7).tolist() == [[0, 0, 0, 0]]
    assert merge_alike(strip(12, 5, 9, 7), 2, 0.7).tolist() == [[0, 0, 0, 0]]
    assert merge_alike(strip(12, 5, 2, 9), 2, 0.7).tolist() == [[0, 1, 2, 0]]
    assert merge_alike(strip(0, 6, 0), 2, 0.9).tolist() == [[0, 1, 0]]  # two that see nothing are alike
    long_chain = strip(*range(12, 3, -1))  # neighbours overlap at least .8, ends 4/12
    assert merge_alike(long_chain, 2, 0.79).tolist() == [[0] * 9]


def test_experts_are_compared_where_pixels_count():
    modes = strip(4, 12)
    seen = (torch.arange(12) < 4)[None, None]  # where both say the same
    assert merge_alike(modes, 2, 0.9).tolist() == [[0, 1]]
    assert merge_alike(modes, 2, 0.9, seen).tolist() == [[0, 0]]


def test_merged_experts_share_one_target():
    """Two experts that say the same: which of them is nearest is a coin toss that must not move the gate."""
    model = small(cost="ce", experts=2, samples=1, latent=1, stochastic=False, group_threshold=0.9).eval()
    with torch.no_grad():
        model.experts.mean.copy_(torch.tensor([[0.0], [1e-9]]))
    images, annotations = batch()
    terms = model.loss(images, annotations)
    assert terms["kl"].item() == pytest.approx(0, abs=1e-9)  # one group holds all mass on both sides
    apart = model.loss(images, annotations, group_threshold=1.0)
    assert apart["kl"].item() > 0.01


def test_grouping_reaches_the_plain_path_too():
    images, annotations = batch()
    fused, plain = (small(cost=c, group_threshold=0.2) for c in ("ce", overlap.ce_cost))
    values = [m.eval().loss(images, annotations, generator=torch.Generator().manual_seed(2)) for m in (fused, plain)]
    assert values[0]["kl"].item() == pytest.approx(values[1]["kl"].item())


@pytest.mark.parametrize("cost", ["iou", "ce", overlap.iou_cost])
def test_mixed_precision_may_enclose_backward_and_end_before_sampling(cost):
    torch.manual_seed(0)
    model = MoSE(1, 2, backbone=UNet(1, (4, 8)), cost=cost)
    images, annotations = torch.randn(2, 1, 8, 8), torch.randint(2, (2, 3, 8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.loss(images, annotations)["total"].backward()
        predictive = model.predict(images)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert predictive.sample(3).labels.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("cost", ["iou", "ce"])
@pytest.mark.parametrize("class_weights", [None, [1.0, 3.0, 0.7]])
def test_mixed_precision_takes_weights_that_are_no_round_numbers(cost, class_weights):
    settings = {} if class_weights is None or cost == "iou" else {"class_weights": class_weights}
    model = MoSE(1, 3, backbone=UNet(1, (4, 8)), cost=cost, **settings)
    labels = torch.randint(3, (2, 32, 8, 8), generator=torch.Generator().manual_seed(0))
    annotations = MaskDistribution(labels, torch.rand(2, 32, generator=torch.Generator().manual_seed(1)).softmax(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = model.loss(torch.randn(2, 1, 8, 8), annotations, annealing=0.5)
    assert all(term.isfinite() and term.dtype == torch.float32 for term in terms.values())


@pytest.mark.parametrize("settings", [{"expert_weights": "uniform"}, {"form": "gumbel"}, {}])
def test_half_precision_models_run(settings):
    model = MoSE(1, 2, experts=3, backbone=UNet(1, (4, 8)), **settings).bfloat16()
    images = torch.randn(2, 1, 8, 8, dtype=torch.bfloat16)
    model.loss(images, torch.randint(2, (2, 3, 8, 8)))["total"].backward()
    assert model.predict(images).compact(2).count == 6


def test_regions_that_annotations_are_made_of_are_used():
    model = small().eval()
    images, annotations = batch()
    regions = partition(annotations, 3)
    ready = RegionMasks.of(regions, annotations.spatial, annotations.weights, annotations.valid)
    g = torch.Generator()
    with_them = model.loss(images, ready, generator=g.manual_seed(0))["total"]
    assert with_them.item() == model.loss(images, annotations, generator=g.manual_seed(0))["total"].item()
    assert "labels" not in vars(ready)  # nobody wrote the maps out


# -- predictions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"head": "released"}, {"backbone": UNet(1, (4, 8, 8), inject_level=0.5)}])
def test_masks_and_marginals_are_those_of_the_logits(settings):
    model = small(**settings).train()  # and what predict() gave stays in evaluation mode all the same
    predictive = model.predict(batch()[0])
    g = torch.Generator()
    masks = predictive.compact(2, g.manual_seed(0))
    logits = predictive.logits(model.experts.each(2, 2, g.manual_seed(0)))
    assert torch.equal(masks.labels.long(), logits.argmax(2))
    assert masks.weights is not None
    assert torch.allclose(masks.weights.view(2, 3, 2).sum(2), predictive.weights)
    assert masks.marginal is not None
    expected = (masks.weights[..., None, None, None] * logits.softmax(2)).sum(1)
    assert torch.allclose(masks.marginal, expected)
    assert torch.equal(predictive.render(predictive.centre_noise()).labels, predictive.centres())
    centre = predictive.logits(model.experts.mean.expand(2, -1, -1))
    assert torch.equal(predictive.centres().long(), centre.argmax(2))
    assert model.training
    with pytest.raises(ValueError, match="at least one sample, found 0"):
        predictive.sample(0)
    with pytest.raises(ValueError, match="at least one sample per stratum, found 0"):
        predictive.compact(0)


def test_both_forms_have_the_same_expectation():
    model = small(expert_weights=[0.6, 0.3, 0.1])
    with torch.no_grad():
        model.head.shift.weight.mul_(20)  # samples that differ visibly
    predictive = model.predict(batch()[0][:1])
    g = torch.Generator().manual_seed(0)
    standard, compact = predictive.marginal(6000, g), predictive.compact(2000, g).marginal_probs(3)
    assert torch.allclose(standard, compact, atol=0.02)
    one_expert = predictive.logits(model.experts.of(torch.zeros(1, 200, dtype=torch.long), g)).softmax(2).mean(1)
    assert not torch.allclose(one_expert, compact, atol=0.02)  # the mixture matters


# -- training ------------------------------------------------------------------------------------------------

EDGE_CASES: dict[str, dict[str, Any]] = {
    "one expert": {"experts": 1},
    "fewer experts than modes": {"experts": 2},
    "duplicate experts": {"experts": 6, "group_threshold": 0.8},
    "deterministic": {"stochastic": False},
    "uniform weights": {"expert_weights": "uniform"},
    "released head": {"head": "released"},
    "released scaling": {"kl": "released"},
    "exact coupling": {"solver": "exact", "capacity": 0.3},
    "gumbel": {"form": "gumbel"},
    "all pairs": {"objective": "all-pairs"},
    "ce": {"cost": "ce"},
    "early noise": {"backbone": lambda: UNet(1, (4, 8, 8), inject_level=0.5, gate_level=0.5)},
    "attention": {"gate_pooling": "attention"},
    "several levels": {"gate_pooling": "both", "backbone": lambda: UNet(1, (4, 8, 8), gate_scales="all")},
    "foreign network": {"backbone": lambda: Adapter(torch.nn.Conv2d(1, 6, 3, padding=1), dense=6)},
}


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize("kind", ["readers", "one annotation", "all empty", "one void", "all void", "batch of one"])
def test_trains_without_nan(name, kind):
    torch.manual_seed(0)
    settings = {"experts": 3, "samples": 2, "backbone": lambda: UNet(1, (4, 8)), **EDGE_CASES[name]}
    model = MoSE(1, 2, **{**settings, "backbone": settings["backbone"]()})
    if name == "duplicate experts":
        with torch.no_grad():
            model.experts.mean[1:] = model.experts.mean[0]
    images, labels, valid = torch.randn(3, 1, 8, 8), torch.randint(2, (3, 4, 8, 8)), torch.ones(3, 8, 8).bool()
    if kind == "one annotation":
        labels = labels[:, :1]
    elif kind == "all empty":
        labels = torch.zeros_like(labels)
    elif kind == "one void":
        valid[0] = False
    elif kind == "all void":
        valid[:] = False
    elif kind == "batch of one":
        images, labels, valid = images[:1], labels[:1], valid[:1]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        terms = model.loss(images, MaskDistribution(labels, valid=valid))
        optimiser.zero_grad()
        terms["total"].backward()
        optimiser.step()
        assert all(value.isfinite() for value in terms.values())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cost": "dice"}, "cost: expected iou or ce, found 'dice'"),
        ({"backbone": "resnet"}, "backbone.name: expected unet, unet-light, deeplabv3plus, smp:.* found 'resnet'"),
        ({"backbone": torch.nn.Conv2d(1, 1, 1)}, "wrap Conv2d as ambiseg.nn.Adapter"),
        ({"form": "soft"}, "form: expected weighted or gumbel, found 'soft'"),
        ({"solver": "simplex"}, "solver: expected greedy, exact or released, found"),
        ({"backbone": UNet(1, (4, 8)), "gate_level": 0.5}, "go to the backbone itself"),
        ({"backbone": "deeplabv3plus", "gate_scales": "all"}, "gate_scales: expected a U-Net, found deeplabv3plus"),
        ({"gate_scales": 5}, "gate_scales: expected 1 to 4 levels at gate_level, or all, found 5"),
        ({"gate_pooling": "max"}, "gate_pooling: expected average, attention or both, found 'max'"),
        ({"classes": 1}, "at least 2 classes"),
        ({"backbone": "deeplabv3plus", "gate_level": 0.5}, "expected a U-Net, found deeplabv3plus"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MoSE(**{"in_channels": 1, "classes": 2, "backbone": "unet-light", **settings})


def test_bad_calls_are_refused():
    model = small()
    images, annotations = batch()
    with pytest.raises(ValueError, match=r"images \[B, C, H, W\] of floats"):
        model(images[0])
    with pytest.raises(ValueError, match="annotations of 2 images"):
        model.loss(images, annotations[:1])
    with pytest.raises(ValueError, match="below classes=3, found 7"):
        model.loss(images, torch.full((2, 1, 8, 8), 7))
    with pytest.raises(ValueError, match=r"annealing and energy_share in \[0, 1\], found 2, 2 and 0"):
        model.loss(images, annotations, annealing=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'"):
        model.loss(images, annotations, gamma=0.5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="capacity must be at least"):
        model.loss(images, annotations, capacity=0.01)


def test_a_prior_on_usage_sends_annotations_to_experts_that_are_used():
    """Of two experts that draw alike, the one of more weight explains the annotation; without the prior the nearer."""
    model = MoSE(1, 2, "unet-light", experts=2, samples=1, stochastic=False)
    with torch.no_grad():
        model.experts.mean.copy_(torch.tensor([[0.0], [1e-4]]))
    images, readers = torch.rand(2, 1, 16, 16), torch.randint(2, (2, 1, 16, 16))
    weights = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    model.gate.forward = lambda pooled: weights  # type: ignore[method-assign]
    plain = model.loss(images, readers)
    costs = plain["kl"]
    for heavy in (0, 1):
        weights = weights if heavy == 0 else weights.flip(1)
        kl = model.loss(images, readers, usage_prior=10.0)["kl"]
        expected = -torch.tensor([0.9, 0.7]).log().mean()
        assert kl.item() == pytest.approx(expected.item(), rel=1e-4), (heavy, costs)


def test_a_prior_on_usage_charges_the_entropy_of_mean_weights_beside_the_energy_score():
    model = MoSE(1, 2, "unet-light", experts=3, samples=2, objective="energy")
    images, readers = torch.rand(2, 1, 16, 16), torch.randint(2, (2, 2, 16, 16))
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])
    model.gate.forward = lambda pooled: weights  # type: ignore[method-assign]
    plain, charged = (
        model.loss(images, readers, usage_prior=prior, generator=torch.Generator().manual_seed(0))
        for prior in (0.0, 2.0)
    )
    mean = torch.tensor([0.5, 0.25, 0.25])
    entropy = -(mean * mean.log()).sum().item()
    assert charged["usage"].item() == pytest.approx(entropy, rel=1e-5)
    assert (charged["total"] - plain["total"]).item() == pytest.approx(2 * entropy, rel=1e-4)
    with pytest.raises(ConfigError, match="usage_prior: expected 0 unless"):
        MoSE(1, 2, "unet-light", objective="all-pairs", usage_prior=0.1)


def test_beta_of_a_step_scales_the_kl_term_alone() -> None:
    model = MoSE(1, 2, "unet-light", beta=Schedule(values=[1.0, 5.0], epochs=2))
    images, readers = torch.rand(2, 1, 32, 32), torch.randint(2, (2, 4, 32, 32))

    def terms(**of_step: float) -> dict[str, torch.Tensor]:
        return model.loss(images, readers, generator=torch.Generator().manual_seed(0), **of_step)

    for beta, found in ((0.5, terms(beta=0.5)), (5.0, terms())):
        torch.testing.assert_close(found["total"], found["transport"] + beta * found["kl"])
    with pytest.raises(ConfigError, match=r"beta: expected values from 0 to 1e\+06, found"):
        MoSE(1, 2, "unet-light", beta=-1.0)
