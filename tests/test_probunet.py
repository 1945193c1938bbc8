"""The Probabilistic U-Net: golden numbers of an implementation that others use, its size, and its large images."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ambiseg.masks import MaskDistribution
from ambiseg.methods.probunet import LatentPredictive, ProbUNet, ProbUNetConfig, negative_bound
from ambiseg.methods.schedules import Schedule
from ambiseg.methods.targets import Target
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import Gaussian, GaussianHead, Pool, Scale, kl
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import as_rows, pixel_logits
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 8])
FORMS = [pytest.param(torch.float32, id="float32"), pytest.param(torch.float64, id="float64")]
Numbers = dict[str, Tensor]


def model(classes: int = 3, backbone: BackboneConfig = SMALL, **settings: Any) -> ProbUNet:
    return ProbUNet(ProbUNetConfig(**settings), backbone, 1, classes)


@pytest.fixture(scope="module")
def zoo() -> Numbers:
    path = SHARED / "golden" / "zoo" / "probunet.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    return {key: torch.from_numpy(np.asarray(array)) for key, array in np.load(path).items()}


def same(found: Tensor, zoo: Numbers, key: str) -> None:
    """To 1e-5 in float32, to 1e-10 in float64 where the golden number is kept with so many digits."""
    exact = found.dtype == torch.float64 and f"{key}_f64" in zoo
    expected = zoo[f"{key}_f64" if exact else key].to(found.dtype)
    assert found.shape == expected.shape
    apart = (found.detach() - expected).abs().max() / expected.abs().max().clamp_min(1)
    assert float(apart) < (1e-10 if exact else 1e-5), key


def gaussians(zoo: Numbers, dtype: torch.dtype) -> tuple[Gaussian, Gaussian]:
    """q and p."""
    mu_q, log_q, mu_p, log_p = (zoo[key].to(dtype) for key in ("mu_q", "log_sigma_q", "mu_p", "log_sigma_p"))
    return Gaussian(mu_q, log_q.exp()), Gaussian(mu_p, log_p.exp())


def combined(zoo: Numbers, dtype: torch.dtype) -> PixelMLP:
    """f_comb with the golden weights, and a class 0 whose logit is 0: a softmax of two is then the golden sigmoid."""
    weights, biases = ([zoo[f"{name}{k}"].to(dtype) for k in range(4)] for name in "wb")
    features, latent = zoo["features"].shape[1], zoo["z"].shape[2]
    mlp = PixelMLP(features, 2, latent, hidden=len(weights[0]), layers=3).to(dtype)
    weights[3], biases[3] = (torch.cat([torch.zeros_like(x), x]) for x in (weights[3], biases[3]))
    with torch.no_grad():
        for layer, weight, bias in zip(mlp._linears(), weights, biases, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    return mlp


# -- golden numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMS)
def test_divergence_and_codes_are_the_golden_ones(zoo, dtype):
    q, p = gaussians(zoo, dtype)
    same(kl(q, p), zoo, "kl")
    same(kl(q, p).mean(), zoo, "kl_mean")
    z = q.at(zoo["eps_q"].to(dtype))
    same(z, zoo, "z_q")
    same(q.log_prob(z) - p.log_prob(z), zoo, "kl_one_sample")


@pytest.mark.parametrize("dtype", FORMS)
def test_the_last_network_has_the_golden_logits_also_when_folded(zoo, dtype):
    mlp, dense = combined(zoo, dtype), zoo["features"].to(dtype)
    codes = zoo["z"].to(dtype).transpose(0, 1)  # golden draws come first
    folded = pixel_logits(as_rows(dense), mlp.fold(codes)).unflatten(3, dense.shape[2:])
    for logits in (mlp(dense, codes), folded):
        assert not logits[:, :, 0].any()
        same(logits[:, :, 1:].transpose(0, 1), zoo, "fcomb_logits")
    same(mlp(dense, zoo["z_q"].to(dtype)[:, None])[:, 0, 1:], zoo, "rec_logits")


@pytest.mark.parametrize("dtype", FORMS)
def test_the_bound_is_the_golden_one_per_image(zoo, dtype):
    q, p = gaussians(zoo, dtype)
    logits = combined(zoo, dtype)(zoo["features"].to(dtype), q.at(zoo["eps_q"].to(dtype))[:, None])[:, 0]
    target = Target(zoo["target"][:, 0].long(), None)
    for beta in (1, 10):
        terms = negative_bound(logits, target, kl(q, p), beta)
        same(terms["fit"] * len(logits), zoo, "rec_sum")
        same(terms["fit"] / target.labels[0].numel(), zoo, "rec_mean")
        same(terms["total"], zoo, f"loss_per_image_beta{beta}")
    # That code sums the cross-entropy over the batch as well: β per image is its own, divided by the images.
    effective = negative_bound(logits, target, kl(q, p), 10 / len(logits))
    same(-effective["total"] * len(logits), zoo, "elbo_beta10")


@pytest.mark.parametrize(
    ("pool", "scale", "prefix"),
    [pytest.param("before", "exp", "head", id="Kohl"), pytest.param("after", "softplus", "head_ph", id="PHiSeg")],
)
def test_heads_are_the_golden_ones_in_both_orders(zoo, pool: Pool, scale: Scale, prefix: str):
    weight, maps = zoo["head_w"], zoo["head_features"]
    head = GaussianHead(weight.shape[1], len(weight) // 2, scale, pool)
    with torch.no_grad():
        head.conv.weight.copy_(weight[..., None, None])
        head.conv.bias.copy_(zoo["head_b"])  # type: ignore[union-attr]
    for found in (head(maps), head.of(head.statistics(maps).mean((2, 3)))):
        same(found.mean, zoo, f"{prefix}_mu")
        same(found.sigma, zoo, f"{prefix}_sigma")


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))["probunet_ph"]["parameters"]
    assert weights_of_published() == expected


def weights_of_published() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(2, published=True).parameters())


def test_the_published_network_has_the_megabytes_of_the_paper():
    assert weights_of_published() == 19_037_626
    assert round(weights_of_published() * 4 / 1e6, 2) == 76.15


# -- the loss ----------------------------------------------------------------------------------------------------------


def flat(classes: int, **settings: Any) -> ProbUNet:
    """q is N(1, I), p is N(0, I), and logits are 0, 1, 2, … at every pixel, whatever the image is."""
    built = model(classes, **settings)
    with torch.no_grad():
        for part in (built.prior.head, built.posterior.head, built.head):
            for parameter in part.parameters():  # type: ignore[union-attr]
                parameter.zero_()
        built.posterior.head.conv.bias[: built.config.latent] = 1.0  # type: ignore[union-attr]
        built.head._linears()[-1].bias.copy_(torch.arange(classes))
    return built


def test_the_loss_by_hand_with_void_pixels():
    """KL(N(1, I) ‖ N(0, I)) is half of the dimensions. Pixels that are void and images of them do not count."""
    built = flat(3, latent=4, beta=3.0)
    labels = torch.tensor([[[0, 1], [2, 2]]] * 3)[:, None]
    valid = torch.tensor([[[True, True], [True, True]], [[True, False], [False, False]], [[False] * 2] * 2])
    log_p = torch.arange(3.0).log_softmax(0)
    fit = -(log_p[0] + log_p[1] + 2 * log_p[2] + log_p[0]) / 2
    terms = built.loss(torch.randn(3, 1, 2, 2), MaskDistribution(labels, valid=valid))
    assert torch.allclose(terms["fit"], fit)
    assert torch.allclose(terms["kl"], torch.tensor(2.0))
    assert torch.allclose(terms["total"], fit + 6.0)


def test_beta_is_per_image_and_of_the_step():
    built = flat(2, latent=2, beta=Schedule(values=[0.0, 4.0])).eval()
    images, labels = torch.randn(2, 1, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.long)
    fit = 64 * math.log(1 + math.e)  # a sum over pixels
    for count in (1, 2):  # a mean over images
        some = images[:count], MaskDistribution(labels[:count])
        for beta, expected in ((None, 4.0), (0.0, 0.0), (0.5, 0.5)):
            assert built.loss(*some, beta=beta)["total"].item() == pytest.approx(fit + expected, rel=1e-5)
    with pytest.raises(ValueError, match="beta"):
        ProbUNetConfig(beta=-1.0)


def test_images_of_void_pixels_alone_count_in_no_term():
    target = Target(
        torch.zeros(3, 2, 2, dtype=torch.long), torch.tensor([True, False, True])[:, None, None].expand(3, 2, 2)
    )
    terms = negative_bound(torch.zeros(3, 4, 2, 2), target, torch.tensor([1.0, 100.0, 2.0]), beta=2.0)
    assert terms["kl"].item() == 1.5
    assert terms["total"].item() == pytest.approx(4 * math.log(4) + 3)


def test_the_posterior_reads_centred_masks_and_nothing_at_void_pixels():
    built = model().eval()
    images, valid = torch.randn(1, 1, 8, 8), torch.ones(1, 8, 8, dtype=torch.bool)
    valid[:, :4] = False
    labels = torch.randint(3, (1, 1, 8, 8))
    seen = []
    built.posterior.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    one, other = (
        built.loss(images, MaskDistribution(x, valid=valid), generator=torch.Generator().manual_seed(0))["total"]
        for x in (labels, torch.where(valid[:, None], labels, 2 - labels))
    )
    assert torch.equal(one, other)
    assert not seen[0][:, :, :4].any()
    for c in range(3):
        assert torch.equal(seen[0][0, c, 4:], (labels[0, 0, 4:] == c).float() - 0.5)


def test_one_annotation_is_drawn_with_the_weights():
    built = model(2).eval()
    images, labels = torch.randn(1, 1, 8, 8), torch.stack([torch.zeros(8, 8), torch.ones(8, 8)])[None].long()

    def fit(annotations: MaskDistribution, seed: int = 0) -> Tensor:
        return built.loss(images, annotations, generator=torch.Generator().manual_seed(seed))["fit"]

    with torch.no_grad():  # z is a draw as well: without spread both codes are the same
        built.posterior.head.conv.weight.zero_()  # type: ignore[union-attr]
        built.posterior.head.conv.bias.fill_(-10.0)  # type: ignore[union-attr]
    alone = [fit(MaskDistribution(labels[:, i : i + 1])) for i in (0, 1)]
    for i, weights in enumerate(([[1.0, 0.0]], [[0.0, 1.0]])):
        assert torch.allclose(fit(MaskDistribution(labels, torch.tensor(weights))), alone[i], rtol=1e-3)
    found = [fit(MaskDistribution(labels), seed) for seed in range(20)]
    assert all(any(torch.allclose(x, y, rtol=1e-3) for x in found) for y in alone)


def test_half_precision_does_not_reach_the_code():
    built = model(2)
    images, masks = torch.randn(2, 1, 16, 16), MaskDistribution(torch.randint(2, (2, 1, 16, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        terms = built.loss(images, masks)
        prior = built.prior(images)
    assert all(value.dtype == torch.float32 for value in (*terms.values(), *prior))
    terms["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


def test_scales_are_bounded():
    for scale, low, high in (("exp", math.exp(-10), math.exp(10)), ("softplus", 1e-4, 1e6)):
        head = GaussianHead(2, 1, scale)  # type: ignore[arg-type]
        with torch.no_grad():
            for value in (-1e5, 1e5):
                head.conv.bias.fill_(value)  # type: ignore[union-attr]
                sigma = head(torch.zeros(1, 2, 1, 1)).sigma
                assert low * 0.999 <= float(sigma) <= high * 1.001
                assert kl(head(torch.zeros(1, 2, 1, 1)), Gaussian(torch.zeros(1, 1), torch.ones(1, 1))).isfinite()


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_the_folded_network_is_the_unfolded_with_norms_too(classes):
    mlp = PixelMLP(5, classes, latent=3, hidden=7, layers=3, norm=True)
    dense, codes = torch.randn(2, 5, 6, 4), torch.randn(2, 4, 3)
    for _ in range(3):
        mlp(dense + 1, codes)  # statistics that are not those of the start
    with torch.no_grad():
        for norm in mlp.norms:
            norm.weight.uniform_(0.5, 2)  # type: ignore[union-attr,operator]
            norm.bias.normal_()  # type: ignore[union-attr,operator]
    assert not mlp.foldable
    mlp.eval()
    assert mlp.foldable
    folded = pixel_logits(as_rows(dense), mlp.fold(codes)).unflatten(3, (6, 4))
    assert torch.allclose(folded, mlp(dense, codes), atol=1e-5)


def test_draws_follow_the_prior_and_run_no_network_again(monkeypatch):
    built = model()
    predictive = built.predict(torch.randn(2, 1, 12, 12))
    assert isinstance(predictive, LatentPredictive)
    for network in (built.backbone, built.prior, built.posterior):
        monkeypatch.setattr(network, "forward", None)
    assert predictive.sample(200).labels.shape == (2, 200, 12, 12)
    codes = predictive.codes(predictive.noise(20_000, torch.Generator().manual_seed(0)))
    prior = predictive.prior  # type: ignore[attr-defined]
    assert torch.allclose(codes.mean(1), prior.mean, atol=float(5 * prior.sigma.max() / 20_000**0.5))
    assert torch.allclose(codes.std(1), prior.sigma, rtol=0.03)


def test_a_predictive_keeps_the_mode_it_was_made_in():
    built = model(2, BackboneConfig(channels=[4, 8], decoder="phiseg"), published=False)
    built.head = PixelMLP(built.backbone.dense_channels, 2, 6, norm=True)  # as published, in small
    images = torch.randn(2, 1, 8, 8)
    predictive = built.eval().predict(images)
    noise = predictive.noise(3)
    before = predictive.render(noise)
    built.train()
    assert torch.equal(predictive.render(noise).labels, before.labels)
    assert torch.allclose(predictive.marginal(3, torch.Generator()).sum(1), torch.ones(2, 8, 8), atol=1e-5)
    training = built(images)
    assert training.probs(training.noise(2)).shape == (2, 2, 2, 8, 8)  # with the statistics of the batch
    assert training.sample(2).labels.shape == (2, 2, 8, 8)


# -- large images ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["before", "after"])
@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(pool, kept, monkeypatch):
    """The prior too is that of the whole image. Features are kept, or made again; masks come in bands of few pixels."""
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    for name in ("probunet", "dense"):
        monkeypatch.setattr(f"ambiseg.methods.{name}.BAND", 2000)
    built = model(pool=pool)
    image = torch.randn(1, 1, 46, 200)
    windows = nn_windows.plan((46, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    called = []
    parts, whole = built.predict_windows(image, windows, lambda: called.append(1)), built.predict(image)
    steps = len(called)
    noise = parts.noise(4, torch.Generator().manual_seed(0))
    masks, expected = parts.render(noise), whole.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)
    assert len(called) == (steps if kept else 3 * steps)  # networks run again for the two renderings
    assert parts.passes == (0 if kept else 1)
    assert "_rows" not in vars(whole)  # a copy of its features, which is kept of small images alone
    if kept:
        found, prior = (p.prior for p in (parts, whole))  # type: ignore[attr-defined]
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, prior, strict=True))


def test_a_coarse_backbone_has_coarse_encoders():
    built = model(2, BackboneConfig(channels=[4, 8], scale=3))
    assert built.multiple == 6
    seen = []
    for encoder in (built.prior.encoder, built.posterior.encoder):
        encoder.register_forward_pre_hook(
            lambda module, given: seen.extend(x.shape[2:] for x in given if x is not None)
        )
    images = torch.randn(2, 1, 13, 10)
    built.loss(images, MaskDistribution(torch.randint(2, (2, 1, 13, 10))))["total"].backward()
    assert seen == [(5, 4)] * 3  # of images, and of images and masks
    assert built.predict(images).sample(2).labels.shape == (2, 2, 13, 10)


def test_any_backbone_has_encoders_of_a_light_unet():
    built = model(2, BackboneConfig(name="deeplabv3plus"))
    assert built.prior.encoder.out_channels == 192
