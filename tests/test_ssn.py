"""Stochastic Segmentation Networks: the low-rank normal, its likelihood in parts, and the masks that are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ambiseg.masks import MaskDistribution
from ambiseg.methods import SSN, SSNConfig
from ambiseg.methods.schedules import Schedule
from ambiseg.methods.ssn import SSNPredictive
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.lowrank import FLOOR, LowRankNormal, likelihood
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 8])


def model(classes: int = 3, **settings) -> SSN:
    return SSN.build(SSNConfig(**settings), SMALL, 1, classes)


def random_normal(classes: int = 3, rank: int = 2, images: int = 2, size=(3, 5), seed: int = 0) -> LowRankNormal:
    g = torch.Generator().manual_seed(seed)
    maps = torch.randn(images, (2 + rank) * classes, *size, generator=g, dtype=torch.float64, requires_grad=True)
    return LowRankNormal.split(maps, classes)


def plain(normal: LowRankNormal, labels: Tensor, valid: Tensor | None, codes: Tensor, pixels: Tensor) -> Tensor:
    """The definition, left to autograd: all logits of all draws in memory. ``[B, M]`` log p(y | η_m)."""
    deviation = torch.einsum("bmr,brkhw->bmkhw", codes, normal.factor) + normal.variance.sqrt()[:, None] * pixels
    logits = normal.mean[:, None] + deviation
    if logits.shape[2] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 2)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[2]).movedim(-1, 1)[:, None]
    each = (logits.log_softmax(2) * one_hot).sum(2)
    return (each if valid is None else each * valid[:, None]).sum((2, 3))


def nll(of_each: Tensor) -> Tensor:
    return math.log(of_each.shape[1]) - of_each.logsumexp(1)


# -- the authors' numbers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers() -> Callable[[str], Tensor]:
    path = SHARED / "golden" / "zoo" / "ssn.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    arrays = dict(np.load(path))
    return lambda key: torch.from_numpy(np.asarray(arrays[key]))


Parts = tuple[LowRankNormal, Tensor, tuple[Tensor, Tensor]]


def golden_parts(numbers: Callable[[str], Tensor], prefix: str, dtype: torch.dtype) -> Parts:
    """The distribution, the labels and the noise, draws second."""
    maps = [numbers(f"{prefix}_{name}").to(dtype) for name in ("mean", "log_diag", "factor")]
    noise = (numbers(f"{prefix}_eps_factor").to(dtype), numbers(f"{prefix}_eps_diag").to(dtype))
    codes, pixels = (x.transpose(0, 1) for x in noise)
    return LowRankNormal.of(*maps), numbers(f"{prefix}_target").long(), (codes, pixels)


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "suffix", "rtol"), [(torch.float32, "", 1e-5), (torch.float64, "_f64", 1e-10)]
)


@pytest.mark.parametrize("prefix", ["bin", "multi"])
def test_samples_are_the_golden_ones(numbers, prefix):
    normal, _, noise = golden_parts(numbers, prefix, torch.float32)
    expected = numbers(f"{prefix}_samples").transpose(0, 1)
    found = normal.at(*noise)[:, : expected.shape[1]]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@PRECISIONS
@pytest.mark.parametrize("prefix", ["bin", "multi"])
@pytest.mark.parametrize("at_once", [None, 1, 3000])
def test_the_likelihood_is_the_golden_one(numbers, prefix, at_once, dtype, suffix, rtol):
    normal, labels, noise = golden_parts(numbers, prefix, dtype)
    found = likelihood(normal, labels, samples=noise[0].shape[1], noise=noise, at_once=at_once)
    assert torch.allclose(found.of_each.T, numbers(f"{prefix}_loglik{suffix}"), rtol=rtol)
    assert torch.allclose(found.nll.mean(), numbers(f"{prefix}_nll{suffix}"), rtol=rtol)


@PRECISIONS
def test_the_margin_of_two_classes_has_the_golden_likelihood(numbers, dtype, suffix, rtol):
    """The noise of the margin that is that of both logits:  √(D₀ + D₁) ε = √D₁ ε₁ − √D₀ ε₀."""
    normal, labels, (codes, pixels) = golden_parts(numbers, "bin", dtype)
    each = normal.variance.sqrt()[:, None] * pixels
    margin = normal.margin()
    one = (each[:, :, 1:] - each[:, :, :1]) / margin.variance.sqrt()[:, None]
    found = likelihood(margin, labels, samples=codes.shape[1], noise=(codes, one))
    assert torch.allclose(found.of_each.T, numbers(f"bin_loglik{suffix}"), rtol=rtol)
    assert torch.allclose(found.nll.mean(), numbers(f"bin_nll{suffix}"), rtol=rtol)


@PRECISIONS
@pytest.mark.parametrize("prefix", ["bin", "multi"])
def test_antithetic_draws_have_the_golden_likelihood(numbers, prefix, dtype, suffix, rtol):
    normal, labels, (codes, pixels) = golden_parts(numbers, prefix, dtype)
    samples = codes.shape[1]
    half = codes[:, : samples // 2], pixels[:, : samples // 2]
    found = likelihood(normal, labels, samples=samples, mirrored=True, noise=half)
    assert torch.allclose(found.nll.mean(), numbers(f"{prefix}_nll_antithetic{suffix}"), rtol=rtol)
    if prefix == "multi":
        drawn = numbers("multi_samples_antithetic").transpose(0, 1).to(dtype)
        both = torch.cat([normal.at(*half), 2 * normal.mean[:, None] - normal.at(*half)], 1)
        assert torch.allclose(both, drawn, rtol=1e-5, atol=1e-5)


def test_gradients_are_the_golden_ones(numbers):
    maps = [numbers(f"multi_{name}").double().requires_grad_() for name in ("mean", "log_diag", "factor")]
    _, labels, noise = golden_parts(numbers, "multi", torch.float64)
    found = likelihood(LowRankNormal.of(*maps), labels, samples=noise[0].shape[1], noise=noise, at_once=5000)
    found.nll.mean().backward()
    for name, leaf in zip(("mean", "log_diag", "factor"), maps, strict=True):
        expected = numbers(f"multi_grad_{name}").double()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@PRECISIONS
def test_without_factors_the_likelihood_is_the_golden_diagonal_one(numbers, dtype, suffix, rtol):
    normal, labels, (codes, pixels) = golden_parts(numbers, "multi", dtype)
    normal = normal._replace(factor=normal.factor[:, :0])  # rank 0
    found = likelihood(normal, labels, samples=codes.shape[1], noise=(codes[:, :, :0], pixels))
    assert torch.allclose(found.nll.mean(), numbers(f"multi_nll_diagonal{suffix}"), rtol=rtol)


@PRECISIONS
def test_a_region_has_the_golden_variances_samples_and_likelihood(numbers, dtype, suffix, rtol):
    normal, labels, (codes, pixels) = golden_parts(numbers, "multi", dtype)
    normal, half = normal.within(numbers("multi_roi")), codes.shape[1] // 2
    assert torch.allclose(normal.variance.float(), numbers("multi_roi_diag"), rtol=1e-5)
    samples = numbers("multi_roi_samples").transpose(0, 1).to(dtype)
    found = normal.at(codes, pixels)[:, : samples.shape[1]]
    assert torch.allclose(found, samples, rtol=1e-5, atol=1e-5)
    terms = likelihood(normal, labels, samples=2 * half, mirrored=True, noise=(codes[:, :half], pixels[:, :half]))
    assert torch.allclose(terms.nll.mean(), numbers(f"multi_roi_nll_antithetic{suffix}"), rtol=rtol)


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    counts = {name: about["parameters"] for name, about in json.loads(path.read_text(encoding="utf-8")).items()}
    with torch.device("meta"):
        built = SSN.build(SSNConfig(published=True), SMALL, 1, 2)
        many = SSN.build(SSNConfig(published=True), SMALL, 1, 24)
    assert sum(p.numel() for p in built.parameters()) == counts["ssn_lidc"]
    heads = counts["ssn_heads_24_classes"] - counts["ssn_heads"]
    assert sum(p.numel() for p in many.parameters()) == counts["ssn_lidc"] + heads


# -- the likelihood ----------------------------------------------------------------------------------------------------


def test_a_likelihood_on_paper():
    """Two draws of one pixel with margins 1 + 1 and 1 − 1 of class 1:  −log ½ (σ(2) + σ(0))."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    normal = LowRankNormal(one, one[:, None], torch.zeros_like(one))
    noise = torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64), torch.zeros(1, 2, 1, 1, 1, dtype=torch.float64)
    found = likelihood(normal, torch.ones(1, 1, 1, dtype=torch.long), samples=2, noise=noise)
    expected = (1 / (1 + math.exp(-2)) + 0.5) / 2
    assert found.nll.item() == pytest.approx(-math.log(expected), rel=1e-12)
    assert found.of_each[0].tolist() == pytest.approx([-math.log(1 + math.exp(-2)), -math.log(2)], rel=1e-12)


@given(
    classes=st.integers(1, 4),
    rank=st.integers(0, 3),
    half=st.integers(1, 4),
    mirrored=st.booleans(),
    void=st.booleans(),
    at_once=st.sampled_from([1, 40, 200, None]),
    seed=st.integers(0, 1000),
)
def test_in_parts_it_is_the_plain_one(classes, rank, half, mirrored, void, at_once, seed):
    """Values and gradients, in float64, however few draws are in memory; one class is the margin of two."""
    normal = random_normal(classes, rank, seed=seed)
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(max(classes, 2), (2, 3, 5), generator=g)
    valid = torch.rand(2, 3, 5, generator=g) < 0.7 if void else None
    drawn = half if mirrored else 2 * half
    codes = torch.randn(2, drawn, rank, generator=g, dtype=torch.float64)
    pixels = torch.randn(2, drawn, *normal.mean.shape[1:], generator=g, dtype=torch.float64)
    both = (torch.cat([codes, -codes], 1), torch.cat([pixels, -pixels], 1)) if mirrored else (codes, pixels)
    of_each = plain(normal, labels, valid, *both)
    found = likelihood(normal, labels, valid, 2 * half, mirrored, noise=(codes, pixels), at_once=at_once)
    assert torch.allclose(found.of_each, of_each, rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.nll, nll(of_each), rtol=1e-12, atol=1e-12)
    of_images = torch.tensor([1.0, -0.3], dtype=torch.float64)
    one = torch.autograd.grad(found.nll @ of_images, normal, retain_graph=True)
    two = torch.autograd.grad(nll(of_each) @ of_images, normal, retain_graph=True)
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_drawn_noise_does_not_depend_on_what_is_held_but_on_the_generator():
    normal, labels = random_normal(), torch.zeros(2, 3, 5, dtype=torch.long)
    one, two, other = (
        likelihood(normal, labels, generator=torch.Generator().manual_seed(seed)).nll for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(likelihood(normal, labels, generator=torch.Generator().manual_seed(0)).nll, one)


def test_its_mean_over_draws_is_that_of_the_distribution():
    """Of one pixel, E σ(η₁ − η₀) by a sum over a fine grid; and so by the margin, whose noise is another."""
    normal = random_normal(2, 2, images=1, size=(1, 1))
    m = normal.margin()
    deviation = (m.variance.flatten() + m.factor.flatten().square().sum()).sqrt()
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = (-grid.square() / 2).exp()
    expected = ((m.mean.flatten() + deviation * grid).sigmoid() * density).sum() / density.sum()
    labels = torch.ones(1, 1, 1, dtype=torch.long)
    for one in (normal, m):
        for mirrored in (False, True):
            found = likelihood(one, labels, None, 200_000, mirrored, torch.Generator().manual_seed(0)).nll.neg().exp()
            assert torch.allclose(found, expected, atol=4e-3)  # 4 deviations of less than 0.4 / √200,000


def test_draws_in_pairs_need_an_even_number():
    with pytest.raises(ValueError, match="an even number if mirrored, found 3"):
        likelihood(random_normal(), torch.zeros(2, 3, 5, dtype=torch.long), samples=3, mirrored=True)
    with pytest.raises(ValueError, match="two classes, found 3"):
        random_normal(3).margin()


def test_variances_are_bounded_and_of_full_precision():
    maps = torch.tensor([-1e30, -1.0, 1e30], dtype=torch.bfloat16)[None, None, None]
    normal = LowRankNormal.of(maps, maps, maps[:, None])
    assert all(x.dtype == torch.float32 for x in normal)
    expected = torch.tensor([math.exp(-10) + FLOOR, math.exp(-1) + FLOOR, math.exp(10) + FLOOR])
    assert torch.allclose(normal.variance.flatten(), expected)


# -- training ----------------------------------------------------------------------------------------------------------


def annotated(classes: int = 3) -> tuple[Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 1, 8, 8, generator=g), MaskDistribution(torch.randint(classes, (2, 1, 8, 8), generator=g))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_is_the_likelihood_of_the_networks_distribution(classes):
    """With the noise that the generator gives: ε₁ of all images, then ε₂. Two classes have one ε₂ a pixel."""
    built = model(classes, samples=4, rank=3).eval()
    images, annotations = annotated(classes)
    terms = built.loss(images, annotations, generator=torch.Generator().manual_seed(1))
    normal, g = built(images).normal, torch.Generator().manual_seed(1)
    normal = normal.margin() if classes == 2 else normal
    codes = torch.randn(2, 4, 3, generator=g)
    pixels = torch.randn(2, 4, normal.mean[0].numel(), generator=g).view(2, 4, *normal.mean.shape[1:])
    of_each = plain(normal, annotations.labels[:, 0].long(), None, codes, pixels)
    assert torch.allclose(terms["total"], nll(of_each).mean())
    assert torch.allclose(terms["pixel"], nll(of_each).mean() / 64)
    shares = of_each.softmax(1)
    assert torch.allclose(terms["effective"], (1 / shares.square().sum(1)).mean())


def test_the_mean_alone_is_trained_while_nothing_is_spread():
    built = model(samples=6).eval()
    images, annotations = annotated()
    terms = built.loss(images, annotations, spread=0.0)
    expected = torch.nn.functional.cross_entropy(built(images).normal.mean, annotations.labels[:, 0].long())
    assert torch.allclose(terms["pixel"], expected)
    assert torch.allclose(terms["total"], 64 * expected)
    assert terms["effective"] == 6
    terms["total"].backward()
    last = built.head.layers[-1]
    assert isinstance(last, torch.nn.Linear)
    assert last.weight.grad is not None  # every parameter has one, as several processes need it
    assert last.weight.grad[:3].abs().sum() > 0
    assert last.weight.grad[3:].abs().sum() == 0
    near = built.loss(images, annotations, spread=1e-6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(near["total"], terms["total"], rtol=1e-4)


def test_half_the_spread_is_half_of_every_deviation():
    normal = random_normal()
    codes, pixels = torch.randn(2, 4, 2, dtype=torch.float64), torch.randn(2, 4, 3, 3, 5, dtype=torch.float64)
    mean = normal.mean[:, None]
    assert torch.allclose(normal.scaled(0.5).at(codes, pixels) - mean, 0.5 * (normal.at(codes, pixels) - mean))


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="even number"):
        SSNConfig(samples=3, antithetic=True)
    for spread in (0.5, Schedule(values=[1, 0]), Schedule(values=[0, 2])):
        with pytest.raises(ValueError, match=r"expected (0 to 1|1 at last)"):
            SSNConfig(spread=spread)
    assert SSNConfig(spread=Schedule(values=[0, 1], warm_up=4)).schedules


@pytest.mark.parametrize("settings", [{"rank": 0}, {"antithetic": True}, {"samples": 1}])
def test_its_variants_learn_and_draw(settings):
    built = model(2, **settings)
    images, annotations = annotated(2)
    terms = built.loss(images, annotations)
    terms["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
    assert built.predict(images).sample(3).labels.shape == (2, 3, 8, 8)


def test_under_autocast_the_distribution_is_of_full_precision():
    built = model(2)
    images, annotations = annotated(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(x.dtype == torch.float32 for x in built(images).normal)
        terms = built.loss(images, annotations)
    assert terms["total"].dtype == torch.float32
    terms["total"].backward()


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_masks_are_those_of_the_drawn_logits(classes, monkeypatch):
    """Of given noise, however many are made at a time."""
    normal = LowRankNormal(*(x.detach().float() for x in random_normal(classes, 3, size=(6, 7))))
    predictive = SSNPredictive(normal)
    noise = predictive.noise(9, torch.Generator().manual_seed(0))
    probs = predictive.probs(noise)
    deciding = normal.margin() if classes == 2 else normal
    scores = deciding.at(noise.codes, noise.normal(0, deciding.mean.shape[1], (6, 7)))
    logits = torch.cat([torch.zeros_like(scores), scores], 2) if classes == 2 else scores
    assert torch.allclose(probs, logits.softmax(2), atol=1e-6)
    for at_once in (2**18, 100):
        monkeypatch.setattr("ambiseg.methods.ssn.numbers_at_once", lambda like, n=at_once: n)
        masks = predictive.render(noise)
        assert torch.equal(masks.labels.long(), logits.argmax(2))
        assert torch.allclose(masks.marginal_probs(classes), probs.mean(1), atol=1e-6)
    assert torch.equal(predictive.point(), normal.mean.argmax(1))


@pytest.mark.parametrize("classes", [2, 3])
def test_draws_have_the_covariance(classes):
    """Of the differences of logits to the first, from the log-probabilities of 20,000 draws of two pixels."""
    normal = LowRankNormal(*(x.detach().float() for x in random_normal(classes, 2, images=1, size=(1, 2), seed=3)))
    normal = LowRankNormal(normal.mean, 0.5 * normal.factor, 0.1 * normal.variance)
    predictive, N = SSNPredictive(normal), 20_000
    log = predictive.probs(predictive.noise(N, torch.Generator().manual_seed(0)))[0].double().log()
    found = (log[:, 1:] - log[:, :1]).flatten(1)  # [N, (C − 1)·2]
    contrast = torch.cat([-torch.ones(classes - 1, 1), torch.eye(classes - 1)], 1)
    mix = torch.kron(contrast, torch.eye(2))
    factor = normal.factor[0].flatten(1)
    covariance = mix @ (factor.T @ factor + normal.variance.flatten().diag()) @ mix.T
    assert torch.allclose(found.mean(0).float(), mix @ normal.mean.flatten(), atol=0.05)
    assert torch.allclose(found.T.cov().float(), covariance, atol=0.05 * float(covariance.max()))


def test_weights_of_draws_count_in_the_marginal():
    predictive = model(2).predict(torch.randn(1, 1, 6, 6))
    noise = predictive.noise(3, torch.Generator().manual_seed(0))
    weighted = type(noise)(noise.codes, torch.tensor([[0.75, 0.0, 0.25]]), seeds=noise.seeds)
    masks, probs = predictive.render(weighted), predictive.probs(noise)
    assert masks.marginal is not None
    assert torch.allclose(masks.marginal, 0.75 * probs[:, 0] + 0.25 * probs[:, 2], atol=1e-6)


@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(kept, monkeypatch):
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    monkeypatch.setattr("ambiseg.methods.dense.BAND", 2000)
    built = model(2)
    image = torch.randn(1, 1, 45, 200)
    windows = nn_windows.plan((45, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    parts, whole = built.predict_windows(image, windows), built.predict(image)
    noise = parts.noise(4, torch.Generator().manual_seed(0))
    assert torch.equal(parts.render(noise).labels, whole.render(noise).labels)
    assert torch.equal(parts.point(), whole.point())


def test_draws_begin_near_the_mean():
    """The last layer starts within ±1/√32: with He's start the factor alone marks parts of most images."""
    last = SSN.build(SSNConfig(), BackboneConfig(channels=[4, 8]), 1, 2).head.layers[-1]
    assert isinstance(last, torch.nn.Linear)
    assert last.weight.abs().max() <= 32**-0.5
    assert last.weight.abs().max() > 0.9 * 32**-0.5
