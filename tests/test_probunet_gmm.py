"""The Probabilistic U-Net with a mixture of Gaussians as prior."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D

from ambiseg.masks import MaskDistribution
from ambiseg.methods import Noise
from ambiseg.methods.probunet_gmm import MixturePredictive, ProbUNetGMM, ProbUNetGMMConfig
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import FLOOR, Gaussian, Mixture, MixtureHead, kl, kl_of_draws
from tests import test_methods
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 8])
either_prior = pytest.mark.parametrize("prior", ["conditional", "free"])
either_pool = pytest.mark.parametrize("pool", ["before", "after"])


def model(classes: int = 3, **settings: Any) -> ProbUNetGMM:
    return ProbUNetGMM(ProbUNetGMMConfig(**settings), SMALL, 1, classes)


def head_of(built: ProbUNetGMM) -> MixtureHead:
    head = built.prior.head
    assert isinstance(head, MixtureHead)
    return head


def mixture(K: int, L: int, B: int = 2, dtype: torch.dtype = torch.float64) -> Mixture:
    weights = torch.randn(B, K, dtype=dtype).log_softmax(1)
    return Mixture(weights, torch.randn(B, K, L, dtype=dtype), torch.rand(B, K, L, dtype=dtype) + 0.5)


def gaussian(L: int, B: int = 2) -> Gaussian:
    return Gaussian(torch.randn(B, L, dtype=torch.float64), torch.rand(B, L, dtype=torch.float64) + 0.5)


# -- its size ----------------------------------------------------------------------------------------------------------


def weights_of_published(prior: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(2, published=True, prior=prior).parameters())


@either_prior
def test_the_published_network_has_the_golden_size(prior):
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))[f"probunet_gmm_{prior}"]["parameters"]
    assert weights_of_published(prior) == expected


@pytest.mark.parametrize(
    ("prior", "weights", "megabytes"), [("conditional", 19_045_346, 76.18), ("free", 19_036_130, 76.14)]
)
def test_the_published_network_has_the_megabytes_of_the_paper(prior, weights, megabytes):
    assert weights_of_published(prior) == weights
    assert round(weights * 4 / 1e6, 2) == megabytes


# -- the divergence ----------------------------------------------------------------------------------------------------


def test_a_mixture_of_one_has_the_golden_divergence_of_one_code():
    path = SHARED / "golden" / "zoo" / "probunet.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    zoo = {key: torch.from_numpy(np.asarray(array)) for key, array in np.load(path).items()}
    for dtype, suffix, tolerance in ((torch.float32, "", 1e-5), (torch.float64, "_f64", 1e-10)):
        mu_q, log_q, mu_p, log_p, eps = (
            zoo[key].to(dtype) for key in ("mu_q", "log_sigma_q", "mu_p", "log_sigma_p", "eps_q")
        )
        q = Gaussian(mu_q, log_q.exp())
        one = Mixture(torch.zeros(len(mu_p), 1, dtype=dtype), mu_p[:, None], log_p.exp()[:, None])
        expected = zoo[f"kl_one_sample{suffix}"]
        found = kl_of_draws(q, one, q.at(eps)[:, None])
        assert float((found - expected).abs().max() / expected.abs().max().clamp_min(1)) < tolerance


def test_log_probabilities_are_those_of_another_library():
    prior, z = mixture(4, 3), torch.randn(2, 5, 3, dtype=torch.float64)
    for b in range(2):
        components = D.Independent(D.Normal(prior.mean[b], prior.sigma[b]), 1)
        expected = D.MixtureSameFamily(D.Categorical(logits=prior.log_weights[b]), components).log_prob(z[b])
        assert torch.allclose(prior.log_prob(z)[b], expected)
    assert torch.allclose(prior.log_prob(z[:, 2]), prior.log_prob(z)[:, 2])
    q = gaussian(3)
    assert torch.allclose(q.log_prob(z)[:, 1], q.log_prob(z[:, 1]))


def test_many_codes_have_the_divergence_of_two_gaussians():
    q, p = gaussian(6), mixture(1, 6)
    noise = torch.randn(2, 100_000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = q.at(noise)
    each = q.log_prob(z) - p.log_prob(z)
    error = 5 * each.std(1) / 100_000**0.5
    expected = kl(q, Gaussian(p.mean[:, 0], p.sigma[:, 0]))
    assert ((kl_of_draws(q, p, z) - expected).abs() < error).all()
    assert (each < 0).any()  # one code alone may say less than nothing


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_components_that_are_all_alike_are_one(K, L, seed):
    torch.manual_seed(seed)
    p, q = mixture(K, L), gaussian(L)
    alike = p._replace(mean=p.mean[:, :1].expand(-1, K, -1), sigma=p.sigma[:, :1].expand(-1, K, -1))
    z = q.at(torch.randn(2, 3, L, dtype=torch.float64))
    one = Gaussian(p.mean[:, 0], p.sigma[:, 0])
    assert torch.allclose(kl_of_draws(q, alike, z), kl_of_draws(q, one, z))
    order = torch.randperm(K)
    permuted = Mixture(*(x[:, order] for x in p))
    assert torch.allclose(kl_of_draws(q, permuted, z), kl_of_draws(q, p, z))  # components have no order


# -- the loss ----------------------------------------------------------------------------------------------------------


def flat(**settings: Any) -> ProbUNetGMM:
    """q is the first of components that are far apart and have weights 0.4, 0.3, 0.2, 0.1; logits are 0."""
    built = model(2, latent=3, **settings)
    head, far = head_of(built), 100.0 * torch.arange(4.0)[:, None].expand(4, 3)
    with torch.no_grad():
        for parameter in (*built.posterior.head.parameters(), *built.head.parameters()):  # type: ignore[union-attr]
            parameter.zero_()
        head.conv.weight.zero_()
        bias = head.conv.bias
        assert bias is not None
        bias[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        zero = torch.tensor(1 - FLOOR).log()  # σ is then 1
        if head.free:
            head.mean.copy_(far)
            head.raw_sigma.fill_(zero)
        else:
            bias[4:16] = far.flatten()
            bias[16:] = zero
    return built


@either_prior
@either_pool
@pytest.mark.parametrize("kl_samples", [1, 5])
def test_the_loss_by_hand_with_void_pixels(prior, pool, kl_samples):
    """log q − log(0.4 q) is the same for every code. Void pixels and images of nothing else do not count."""
    built = flat(prior=prior, pool=pool, kl_samples=kl_samples, beta=3.0)
    labels, valid = torch.zeros(3, 1, 4, 4, dtype=torch.long), torch.ones(3, 4, 4, dtype=torch.bool)
    valid[1, 1:], valid[2] = False, False
    terms = built.loss(torch.randn(3, 1, 4, 4), MaskDistribution(labels, valid=valid))
    assert terms["fit"].item() == pytest.approx((16 + 4) / 2 * math.log(2), rel=1e-5)
    assert terms["kl"].item() == pytest.approx(-math.log(0.4), rel=1e-4)
    assert terms["total"].item() == pytest.approx(10 * math.log(2) - 3 * math.log(0.4), rel=1e-4)


def test_more_codes_estimate_the_same_divergence_better():
    images, masks = torch.randn(2, 1, 8, 8), MaskDistribution(torch.randint(3, (2, 1, 8, 8)))
    fits, spread, means = [], [], []
    for kl_samples in (1, 64):
        torch.manual_seed(0)
        built = model(components=1, kl_samples=kl_samples).eval()
        with torch.no_grad():
            found = [built.loss(images, masks, generator=torch.Generator().manual_seed(i)) for i in range(60)]
            q = built.posterior(images, torch.nn.functional.one_hot(masks.labels[:, 0], 3).movedim(-1, 1) - 0.5)
            p = built.prior(images)
        expected = kl(q, Gaussian(p.mean[:, 0], p.sigma[:, 0])).mean()
        each = torch.stack([terms["kl"] for terms in found])
        fits.append([terms["fit"].item() for terms in found])
        spread.append(float(each.std()))
        means.append(float((each.mean() - expected).abs()))
        assert means[-1] < 5 * spread[-1] / 60**0.5
    assert fits[0] == fits[1]  # the first code is the one that is decoded
    assert spread[1] < spread[0] / 4  # 8 times less, but for chance


@either_prior
@either_pool
def test_gradients_reach_weights_means_and_scales(prior, pool):
    built = model(prior=prior, pool=pool, latent=5, components=3)
    head, K = head_of(built), 3
    masks = MaskDistribution(torch.randint(3, (2, 1, 8, 8)))
    built.loss(torch.randn(2, 1, 8, 8), masks)["total"].backward()
    bias = head.conv.bias
    assert bias is not None
    assert bias.grad is not None
    assert (bias.grad[:K] != 0).all()
    if prior == "free":
        assert len(bias) == K
        parts = [head.mean.grad, head.raw_sigma.grad]
    else:
        parts = list(bias.grad[K:].view(2, K, 5))
    for part in parts:
        assert part is not None
        assert part.shape == (K, 5)
        assert (part != 0).all()
        assert part.isfinite().all()
    assert all(p.grad is not None and p.grad.any() for p in built.prior.encoder.parameters() if p.ndim == 4)


def test_components_find_the_modes_of_codes_unless_they_start_alike():
    """Codes around −3 and 3: two components take one each, two that are the same never part."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(400, 1, generator=g) * 0.5 + torch.tensor([-3.0, 3.0]).repeat(200)[:, None]
    nats = []
    for alike in (False, True):
        head = MixtureHead(1, latent=1, components=2, free=True)
        with torch.no_grad():
            head.conv.bias.zero_()  # type: ignore[union-attr]
            head.mean.copy_(torch.tensor([[0.2], [0.2 if alike else -0.3]]))
        optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(300):
            loss = -head(torch.zeros(400, 1, 1, 1)).log_prob(codes).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        nats.append(loss.item())  # pyright: ignore[reportPossiblyUnboundVariable]
        assert torch.equal(head.mean[0], head.mean[1]) == alike
        if not alike:
            assert torch.allclose(head.mean.detach().sort(0).values, torch.tensor([[-3.0], [3.0]]), atol=0.2)
    assert nats[0] < math.log(2) + 0.5 * math.log(2 * math.pi * math.e * 0.25) + 0.05  # entropy of the codes
    assert nats[1] > nats[0] + 0.5


# -- the head ----------------------------------------------------------------------------------------------------------


@either_prior
@either_pool
@pytest.mark.parametrize("scale", ["exp", "softplus"])
def test_components_start_apart_with_scales_of_one_and_keep_a_floor(prior, pool, scale):
    head = MixtureHead(8, 6, 4, prior == "free", scale, pool)
    found = head(torch.zeros(1, 8, 3, 3))
    assert torch.allclose(found.log_weights.exp(), torch.full((1, 4), 0.25))
    assert torch.allclose(found.sigma, torch.full((1, 4, 6), 1 + FLOOR))
    apart = torch.cdist(found.mean[0], found.mean[0]) + 10 * torch.eye(4)
    assert float(apart.detach().min()) > 0.5
    raw = head.raw_sigma if prior == "free" else head.conv.bias
    assert raw is not None
    with torch.no_grad():
        raw[-24:] = -1e6
        head.conv.weight.mul_(1e6)
    maps = torch.randn(2, 8, 3, 3)
    lowest = head(maps)
    assert float(lowest.sigma.detach().min()) >= FLOOR
    assert all(x.isfinite().all() for x in lowest)
    assert lowest.log_prob(torch.zeros(2, 6)).isfinite().all()


@either_prior
@either_pool
def test_what_is_averaged_can_be_averaged_in_parts(prior, pool):
    head = MixtureHead(8, 6, 4, prior == "free", "softplus", pool)
    maps = torch.randn(2, 8, 4, 4)
    statistics = head.statistics(maps)
    assert statistics.shape == (2, head.averaged, 4, 4)
    halves = (statistics[..., :2].mean((2, 3)) + statistics[..., 2:].mean((2, 3))) / 2
    for x, y in zip(head.of(halves), head(maps), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_the_order_of_averaging_matters_for_scales_alone():
    before, after = (MixtureHead(8, 6, 4, False, "softplus", pool) for pool in ("before", "after"))
    after.load_state_dict(before.state_dict())
    maps = torch.randn(2, 8, 4, 4)
    one, other = before(maps), after(maps)
    assert torch.allclose(one.log_weights, other.log_weights, atol=1e-5)
    assert torch.allclose(one.mean, other.mean, atol=1e-5)
    assert (one.sigma < other.sigma - 1e-4).all()  # softplus is convex


# -- draws -------------------------------------------------------------------------------------------------------------


@either_prior
def test_draws_follow_the_mixture_and_run_no_network_again(prior, monkeypatch):
    built = model(prior=prior)
    predictive = built.predict(torch.randn(2, 1, 12, 12))
    assert isinstance(predictive, MixturePredictive)
    for network in (built.backbone, built.prior, built.posterior):
        monkeypatch.setattr(network, "forward", None)
    assert predictive.sample(200).labels.shape == (2, 200, 12, 12)
    count = 40_000
    noise = predictive.noise(count, torch.Generator().manual_seed(0))
    codes, strata = predictive.codes(noise), noise.strata
    assert strata is not None
    mean, sigma = predictive.prior.mean, predictive.prior.sigma
    assert torch.equal(mean[0], mean[1]) == (prior == "free")  # the same for every image, or of each
    assert not torch.allclose(predictive.weights[0], predictive.weights[1])
    for b in range(2):
        share = strata[b].bincount(minlength=4) / count
        assert torch.allclose(share, predictive.weights[b], atol=5 * 0.5 / count**0.5)
        for k in range(4):
            some = codes[b, strata[b] == k]
            error = float(6 * sigma[b, k].max() / len(some) ** 0.5)
            assert torch.allclose(some.mean(0), mean[b, k], atol=error)
            assert torch.allclose(some.std(0), sigma[b, k], atol=error)


def test_the_centre_of_a_component_is_its_mean():
    predictive = model().predict(torch.randn(2, 1, 8, 8))
    assert isinstance(predictive, MixturePredictive)
    noise = predictive.centre_noise()
    assert torch.equal(predictive.codes(noise), predictive.prior.mean)
    assert torch.equal(predictive.logits(predictive.prior.mean).argmax(2), predictive.centres().long())
    with pytest.raises(ValueError, match="component of every draw, found none"):
        predictive.codes(Noise(noise.codes))


def test_one_noise_has_the_component_of_each_slice():
    """Slices of a volume have one component and one ε each draw, and every slice its own mean and scale."""
    predictive = model().predict(torch.randn(3, 1, 8, 8))
    assert isinstance(predictive, MixturePredictive)
    noise = predictive.reweighted(predictive.weights.mean(0, keepdim=True).expand(3, -1)).compact_noise(2)
    codes = predictive.codes(noise)
    assert noise.strata is not None
    for b in range(3):
        for n, k in enumerate(noise.strata[b].tolist()):
            expected = predictive.prior.mean[b, k] + predictive.prior.sigma[b, k] * noise.codes[b, n]
            assert torch.allclose(codes[b, n], expected)


def test_half_precision_does_not_reach_the_code():
    built = model(2)
    images, masks = torch.randn(2, 1, 16, 16), MaskDistribution(torch.randint(2, (2, 1, 16, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        terms, prior = built.loss(images, masks), built.prior(images)
    assert all(value.dtype == torch.float32 for value in (*terms.values(), *prior))
    terms["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


# -- large images ------------------------------------------------------------------------------------------------------


@either_prior
@either_pool
@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(prior, pool, kept, monkeypatch):
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    for name in ("probunet", "dense"):
        monkeypatch.setattr(f"ambiseg.methods.{name}.BAND", 2000)
    built = model(prior=prior, pool=pool)
    image = torch.randn(1, 1, 46, 200)
    windows = nn_windows.plan((46, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    parts, whole = built.predict_windows(image, windows), built.predict(image)
    assert isinstance(whole, MixturePredictive)
    assert torch.allclose(parts.weights, whole.weights, atol=1e-5)  # type: ignore[attr-defined]
    noise = parts.noise(4, torch.Generator().manual_seed(0))
    masks, expected = parts.render(noise), whole.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.equal(parts.centres(), whole.centres())  # type: ignore[attr-defined]
    assert parts.passes == (0 if kept else 1)


# -- the other prior does what every method does -----------------------------------------------------------------------

ASKED = [
    value
    for name, value in vars(test_methods).items()
    if name.startswith("test_") and name != "test_every_method_is_tested"
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda test: test.__name__)
@pytest.mark.parametrize("settings", [{"prior": "free", "pool": "after", "scale": "softplus", "components": 2}])
def test_the_free_prior_does_what_every_method_does(asked, settings, monkeypatch):
    monkeypatch.setitem(test_methods.TESTED, "probunet-gmm", settings)
    asked("probunet-gmm")
