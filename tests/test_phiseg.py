"""PHiSeg: its loss, its levels, what depends on what, its published size."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.masks import MaskDistribution
from ambiseg.methods import Noise, PHiSeg, PHiSegConfig
from ambiseg.methods.phiseg import model as phiseg
from ambiseg.methods.phiseg.network import Finer, Likelihood, doubled
from ambiseg.methods.targets import Target
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import Gaussian, kl
from ambiseg.nn.unet import LIGHT, Convolutions
from tests.conftest import SHARED


def model(channels: tuple[int, ...] = (4, 8, 8), classes: int = 3, scale: int = 1, **settings) -> PHiSeg:
    return PHiSeg.build(PHiSegConfig(**settings), BackboneConfig(channels=list(channels), scale=scale), 1, classes)


# -- golden numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo() -> dict[str, Tensor]:
    path = SHARED / "golden" / "zoo" / "phiseg.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    arrays = {key: torch.from_numpy(np.asarray(value)) for key, value in np.load(path).items()}
    return {key: value.double() if value.is_floating_point() else value for key, value in arrays.items()}


def of_levels(zoo: dict[str, Tensor], name: str) -> list[Tensor]:
    return [zoo[f"{name}{level}"] for level in range(len(zoo["kl_per_level"]))]


def gaussians(zoo: dict[str, Tensor], which: str) -> list[Gaussian]:
    pairs = zip(of_levels(zoo, f"mu_{which}"), of_levels(zoo, f"sigma_{which}"), strict=True)
    return [Gaussian(mean, sigma) for mean, sigma in pairs]


def test_golden_cross_entropy_of_every_level_and_output(zoo):
    scores, target = of_levels(zoo, "s"), Target(zoo["target"].long(), None)
    assert torch.allclose(phiseg.level_ce(scores, target), zoo["ce_per_level"], rtol=1e-10)
    size = target.labels.shape[1], target.labels.shape[2]
    found = phiseg.sized(phiseg.summed(scores)[0], 0, size)
    assert torch.allclose(found, zoo["output_logits"], atol=1e-5)
    single = phiseg.level_ce([score.float() for score in scores], target)
    assert torch.allclose(single.double(), zoo["ce_per_level"], rtol=1e-5)


def test_golden_kl_of_every_level(zoo):
    target = Target(zoo["target"].long(), None)
    found = phiseg.level_kl(gaussians(zoo, "q"), gaussians(zoo, "p"), target)
    assert torch.allclose(found, zoo["kl_per_level"], rtol=1e-10)
    terms = phiseg.objective(torch.zeros_like(found), found)
    weighted = torch.stack([4.0**i * terms[f"kl_{i}"] for i in range(len(found))])
    assert torch.allclose(weighted, zoo["kl_weighted_per_level"], rtol=1e-10)
    assert torch.allclose(terms["kl"], zoo["kl_total"], rtol=1e-10)


def test_golden_kl_of_tiny_scales(zoo):
    q, p = (Gaussian(zoo[f"edge_mu_{which}"], zoo[f"edge_sigma_{which}"]) for which in "qp")
    target = Target(torch.zeros(len(q.mean), 1, 1, dtype=torch.long), None)
    assert torch.allclose(phiseg.level_kl([q], [p], target), zoo["edge_kl"], rtol=1e-10)
    assert not torch.allclose(kl(q, p).mean(), zoo["edge_kl"], rtol=1e-4)  # the constants matter here


def test_golden_loss(zoo):
    target = Target(zoo["target"].long(), None)
    apart = phiseg.level_kl(gaussians(zoo, "q"), gaussians(zoo, "p"), target)
    terms = phiseg.objective(phiseg.level_ce(of_levels(zoo, "s"), target), apart, PHiSegConfig().level_weight)
    assert torch.allclose(terms["fit"], zoo["ce_total"], rtol=1e-10)
    assert torch.allclose(terms["total"], zoo["loss"], rtol=1e-10)


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    counts = json.loads(path.read_text(encoding="utf-8"))
    with torch.device("meta"):
        built = PHiSeg.build(PHiSegConfig(published=True), BackboneConfig(channels=[4, 8]), 1, 2)
    assert (built.levels, built.gap, built.multiple) == (5, 2, 64)
    unused = counts["phiseg_unused_chains"]["parameters"]  # which are not built here
    assert sum(p.numel() for p in built.parameters()) + unused == counts["phiseg"]["parameters"]


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Two levels, 2×2 pixels of which one is void, an image without a valid pixel."""
    fine = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [2.0, 0.0]]])[None].repeat(2, 1, 1, 1)
    coarse = torch.tensor([0.5, 0.0])[None, :, None, None].repeat(2, 1, 1, 1)
    labels = torch.tensor([[[0, 0], [1, 0]]]).repeat(2, 1, 1)
    valid = torch.tensor([[[True, True], [True, False]], [[False] * 2] * 2])

    def ce(margin: float) -> float:  # of a class whose logit is so much above the other
        return float(F.softplus(torch.tensor(-margin)))

    expected = torch.tensor([ce(1.5) + ce(0.5) + ce(1.5), 2 * ce(0.5) + ce(-0.5)])
    found = phiseg.level_ce([fine, coarse], Target(labels, valid))
    assert torch.allclose(found, expected)
    q = [Gaussian(torch.full((2, 2, 1, 1), float(mean)), torch.ones(2, 2, 1, 1)) for mean in (1, 2)]
    p = [Gaussian(torch.zeros(2, 2, 1, 1), torch.ones(2, 2, 1, 1))] * 2
    apart = phiseg.level_kl(q, p, Target(labels, valid))
    assert torch.allclose(apart, torch.tensor([1.0, 4.0]))
    terms = phiseg.objective(found, apart, level_weight=3.0, beta=0.5)
    assert torch.allclose(terms["total"], expected.sum() + 0.5 * (1.0 + 3 * 4.0))
    assert torch.equal(terms["output"], found[0])


def test_beta_and_weights_reach_the_loss():
    built, images = model().eval(), torch.randn(2, 1, 16, 16)
    annotations = MaskDistribution(torch.randint(3, (2, 1, 16, 16)))

    def terms(**more) -> dict[str, Tensor]:
        return built.loss(images, annotations, generator=torch.Generator().manual_seed(0), **more)

    one, none = terms(), terms(beta=0.0)
    assert torch.allclose(one["total"], one["fit"] + one["kl"])
    assert torch.allclose(one["kl"], one["kl_0"] + 4 * one["kl_1"])
    assert torch.equal(none["total"], none["fit"])
    built.config = PHiSegConfig(level_weight=2.0, beta=3.0)
    assert torch.allclose(terms()["total"], one["fit"] + 3 * (one["kl_0"] + 2 * one["kl_1"]))


def test_the_prior_is_conditioned_on_codes_of_the_posterior():
    """The KL of a fine level is of one code above; when both networks and both inputs are one, it is 0."""
    built = model(classes=2).eval()
    key = "encoder.down.0.0.weight"
    state = built.posterior.state_dict()
    state[key][:, 1:] = 0  # the posterior no longer sees the mask
    built.prior.load_state_dict({**state, key: state[key][:, :1]})
    annotations = MaskDistribution(torch.randint(2, (2, 1, 16, 16)))
    terms = built.loss(torch.randn(2, 1, 16, 16), annotations)
    assert terms["kl_0"].abs() < 1e-3
    assert terms["kl_1"].abs() < 1e-3
    with torch.no_grad():
        built.posterior.get_parameter("coarsest.mean.bias").add_(3.0)  # moves the code above, which both see
    moved = built.loss(torch.randn(2, 1, 16, 16), annotations)
    assert moved["kl_1"] > 1
    assert moved["kl_0"].abs() < 1e-3


def test_the_posterior_reads_the_centred_mask():
    built, seen = model(classes=2), []
    built.posterior.encoder.register_forward_hook(lambda module, args, output: seen.append(args[1]))
    valid = torch.tensor([[[True, True], [True, False]]])
    built.loss(torch.randn(1, 1, 2, 2), MaskDistribution(torch.tensor([[[[0, 1], [1, 0]]]]), None, valid))
    assert seen[0].tolist() == [[[[0.5, -0.5], [-0.5, 0.0]], [[-0.5, 0.5], [0.5, 0.0]]]]


def test_scales_that_a_network_makes_tiny_or_huge_give_finite_losses():
    built, images = model(), torch.randn(2, 1, 16, 16)
    annotations = MaskDistribution(torch.randint(3, (2, 1, 16, 16)))
    for ours, theirs in ((-1e4, 1e4), (1e4, -1e4), (-1e4, -1e4)):
        for latents, bias in ((built.posterior, ours), (built.prior, theirs)):
            torch.nn.init.constant_(latents.get_parameter("coarsest.scale.bias"), bias)
        terms = built.loss(images, annotations)
        assert all(value.isfinite() for value in terms.values())
        built.zero_grad()
        terms["total"].backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


def test_codes_are_in_full_precision_under_autocast():
    built, images = model().eval(), torch.randn(2, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        predictive = built.predict(images)
        noise = predictive.noise(2)
        assert all(code.dtype == torch.float32 for code in predictive.codes(noise))
        assert predictive.logits(noise).dtype == torch.float32
        terms = built.loss(images, MaskDistribution(torch.randint(3, (2, 1, 16, 16))))
    assert all(value.dtype == torch.float32 for value in terms.values())


# -- the networks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resolutions", "levels", "gap"), [(2, 2, 0), (3, 2, 1), (4, 2, 2), (5, 3, 2), (7, 5, 2)])
def test_levels_lie_at_the_coarsest_resolutions(resolutions, levels, gap):
    built = model((4,) * resolutions).eval()
    assert (built.levels, built.gap) == (levels, gap)
    predictive = built.predict(torch.randn(1, 1, 64, 64))
    codes = predictive.codes(predictive.noise(2))
    assert [tuple(code.shape) for code in codes] == [(2, 2, *(64 >> level + gap,) * 2) for level in range(levels)]
    scores = built.likelihood(codes)
    assert [tuple(score.shape) for score in scores] == [(2, 3, *(64 >> level,) * 2) for level in range(levels)]


def test_levels_and_channels_of_latent_maps_are_settings():
    for levels in (1, 2, 3):
        built = model(levels=levels, latent=3)
        assert [code.shape[1] for code in built.predict(torch.zeros(1, 1, 8, 8)).codes(noise_of(1, 1))] == [3] * levels
    with pytest.raises(
        ConfigError, match=r"model.levels: expected at most one per resolution, found 4 with a backbone"
    ):
        model(levels=4)


def test_other_backbones_get_the_light_widths():
    built = PHiSeg.build(PHiSegConfig(), BackboneConfig(name="deeplabv3plus"), 1, 2)
    assert built.multiple == 2 ** (len(LIGHT) - 1)
    assert built.prior.encoder.out_channels == LIGHT[-1]


def test_a_level_is_the_network_of_the_concatenation():
    """What is split into a part of the image and a part of the code is one convolution of both."""
    network = Finer(encoded=5, width=4, latent=2, lifted=6, kind=Convolutions(2, bias=True)).eval()
    maps, above = torch.randn(2, 5, 8, 8), torch.randn(6, 2, 4, 4)
    found = network(network.of_image(maps), above)
    joined = torch.cat([maps.repeat_interleave(3, 0), network.lift(doubled(above))], 1)
    expected = network.head(network.join(joined))
    assert torch.allclose(found.mean, expected.mean, atol=1e-5)
    assert torch.allclose(found.sigma, expected.sigma, atol=1e-5)


def test_logits_of_a_level_depend_on_the_codes_from_it_upward():
    likelihood = Likelihood((4, 4, 8, 8), levels=3, latent=2, classes=2, kind=Convolutions()).eval()
    codes = [torch.randn(1, 2, 16 >> level, 16 >> level, requires_grad=True) for level in range(3)]
    for level, score in enumerate(likelihood(codes)):
        found = torch.autograd.grad(score.square().sum(), codes, retain_graph=True, allow_unused=True)
        assert [gradient is not None for gradient in found] == [k >= level for k in range(3)]


# -- draws -------------------------------------------------------------------------------------------------------------


def noise_of(images: int, n: int, seed: int = 0) -> Noise:
    seeds = torch.randint(-(2**31), 2**31, (images, n), generator=torch.Generator().manual_seed(seed)).int()
    return Noise(torch.zeros(images, n, 1), seeds=seeds)


def test_a_draw_is_ancestral():
    built = model().eval()
    images, noise = torch.randn(2, 1, 16, 16), noise_of(2, 3)
    predictive = built.predict(images)
    fine, coarse = (code.unflatten(0, (2, 3)) for code in predictive.codes(noise))
    top, below = predictive.prior
    p = top.distribution(None)
    assert torch.allclose(coarse, p.at(noise.normal(1, 2, (4, 4), stride=4)))
    given = below.distribution(coarse.flatten(0, 1))
    assert torch.allclose(fine.flatten(0, 1), given.at(noise.normal(0, 2, (8, 8), stride=2).flatten(0, 1)))


@pytest.mark.parametrize("scale", [1, 3])
def test_windows_have_the_noise_of_their_place(scale):
    """Latent maps of a window are those of the image there, away from its border."""
    built = model(scale=scale).eval()
    image, noise = torch.randn(1, 1, 24 * scale, 160 * scale), noise_of(1, 2)
    start = 64 * scale
    whole = built.predict(image).codes(noise)
    part = built.predict(image[..., start:]).codes(noise.at(0, start))
    assert built.gap == 1
    for level, (one, other) in enumerate(zip(whole, part, strict=True)):
        inside = other[..., 48 >> level + built.gap :]  # 37 pixels are seen
        assert torch.allclose(one[..., -inside.shape[-1] :], inside, atol=1e-5)


def test_images_of_any_size_and_scale():
    for size in ((1, 1), (5, 3), (13, 10)):
        for scale in (1, 3):
            built = model(scale=scale)
            annotations = MaskDistribution(torch.randint(3, (1, 2, *size)))
            assert built.loss(torch.randn(1, 1, *size), annotations)["total"].isfinite()
            masks = built.predict(torch.randn(1, 1, *size)).sample(2)
            assert masks.labels.shape == (1, 2, *size)


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_in_chunks_are_the_draws(weighted, monkeypatch):
    built = model()
    predictive, noise = built.predict(torch.randn(2, 1, 16, 16)), noise_of(2, 7)
    if weighted:
        noise = Noise(noise.codes, torch.rand(2, 7).softmax(1), seeds=noise.seeds)
    expected, probs = predictive.render(noise), predictive.probs(noise)
    monkeypatch.setattr(phiseg, "_ON_CPU", 2 * 2 * 256 * built.likelihood.peak)  # two draws at a time
    found, ran = predictive.render(noise), []
    assert torch.equal(found.labels, expected.labels)
    assert torch.allclose(found.marginal_probs(3), expected.marginal_probs(3), atol=1e-6)
    assert torch.allclose(found.marginal_probs(3), torch.einsum("bn,bnchw->bchw", noise.mass, probs), atol=1e-6)
    built.likelihood.register_forward_hook(lambda module, args, output: ran.append(len(output[0])))
    assert torch.allclose(predictive.probs(noise), probs, atol=1e-6)
    assert ran == [4, 4, 4, 2]


def test_the_encoder_runs_once_per_image():
    built, ran = model(), []
    built.prior.encoder.register_forward_hook(lambda *args: ran.append(1))
    built.posterior.encoder.register_forward_hook(lambda *args: ran.append(2))
    predictive = built.predict(torch.randn(1, 1, 16, 16))
    predictive.sample(5)
    predictive.sample(5)
    assert ran == [1]


def test_it_learns_a_mask_that_is_there_or_not():
    """Half of the annotations are empty, half are full: so are most draws, and both kinds occur."""
    built = PHiSeg.build(PHiSegConfig(), BackboneConfig(channels=[8, 8, 8], convs=1, momentum=0.1), 1, 2)
    image = torch.zeros(8, 1, 8, 8)
    labels = torch.stack([torch.zeros(8, 8, 8), torch.ones(8, 8, 8)], 1).long()
    optimiser, g = torch.optim.Adam(built.parameters(), lr=1e-2), torch.Generator().manual_seed(1)
    for _ in range(100):
        optimiser.zero_grad()
        built.loss(image, MaskDistribution(labels), generator=g)["total"].backward()
        optimiser.step()
    share = built.predict(image[:1]).sample(200, g).labels.float().mean((2, 3))
    assert 0.1 < share.mean() < 0.9
    assert ((share < 0.1) | (share > 0.9)).float().mean() > 0.7
