"""Supervised uncertainty quantification: its layer, its loss, its draws, and how it learns the number of images."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg.config import parse
from ambiseg.masks import MaskDistribution
from ambiseg.methods.hu2019 import Graders, Hu, HuConfig, HuPredictive, Parts, Weights, objective, spread, sum_of_norms
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.features import Adapter
from ambiseg.nn.gaussian import Gaussian, kl
from ambiseg.nn.mlp import PixelMLP
from ambiseg.nn.pixelhead import as_rows
from ambiseg.nn.unet import UNet
from ambiseg.nn.variational import VariationalConv, VariationalEnd
from ambiseg.runs import Run
from ambiseg.training import train
from tests.conftest import SHARED, TINY

SMALL = BackboneConfig(channels=[4, 8])


def model(classes: int = 3, backbone: BackboneConfig = SMALL, **settings: Any) -> Hu:
    return Hu(HuConfig(**settings), backbone, 1, classes)


@pytest.fixture(scope="module")
def golden() -> Callable[[str], Tensor]:
    """Numbers of the authors' code, by key."""
    path = SHARED / "golden" / "zoo" / "hu.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    arrays = dict(np.load(path))
    return lambda key: torch.from_numpy(np.asarray(arrays[key]))


def layer_of(weight: Tensor, log_sigma: Tensor, bias: Tensor | None = None) -> VariationalConv:
    layer = VariationalConv(weight.shape[1], weight.shape[0]).to(weight.dtype)
    layer.weight.data, layer.log_sigma.data = weight, log_sigma
    if bias is not None:
        assert layer.bias is not None
        layer.bias.data = bias
    return layer


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    scale = expected.abs().max()
    return bool((found.to(expected.dtype) - expected).abs().max() <= tolerance * scale)


# -- golden numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["init", "wide"])
def test_the_layer_gives_the_golden_activations(golden, which):
    layer = layer_of(golden("layer_w"), golden(f"layer_log_sigma_{which}"), golden("layer_b"))
    activations = layer(golden("layer_x"))
    assert near(activations.mean, golden("layer_out_mean"))
    assert near(activations.at(golden("layer_eps")), golden(f"layer_out_{which}"))
    several = activations.at(golden("layer_eps")[:, None].expand(-1, 3, -1, -1, -1))
    assert near(several[:, 2], golden(f"layer_out_{which}"))


@pytest.mark.parametrize("which", ["init", "wide"])
def test_the_layer_has_the_golden_kl(golden, which):
    weight, log_sigma = golden("layer_w"), golden(f"layer_log_sigma_{which}")
    assert near(layer_of(weight, log_sigma).kl(), golden(f"layer_kl_{which}"))
    exact = layer_of(weight.double(), log_sigma.double()).kl()
    assert near(exact, golden(f"layer_kl_{which}_f64"), 1e-10)


def two_classes(logits: Tensor) -> Tensor:
    """One sigmoid as two classes, ``[…, 1, H, W] -> […, 2, H, W]``."""
    return torch.cat([torch.zeros_like(logits), logits], -3)


def test_one_step_has_the_golden_loss(golden):
    """Every term through the method's own functions, and what they add up to."""
    masks = golden("masks")  # [B, M, H, W]
    B, M = masks.shape[:2]
    graders = Graders.of(masks, classes=2)
    assert torch.equal(graders.share, torch.ones(B, M))
    fit = graders.ce(two_classes(golden("recon_logits").transpose(0, 1)))  # [B, M]
    assert near(fit.sum(0), golden("rec_sum"))
    q = Gaussian(golden("mu_q").flatten(0, 1), golden("sigma_q").flatten(0, 1))
    p = Gaussian(golden("mu_p").repeat(M, 1), golden("sigma_p").repeat(M, 1))
    apart = kl(q, p).view(M, B).T
    assert near(apart.mean(0), golden("kl_z"))
    assert near(-(fit.sum(0) + apart.mean(0)), golden("elbo"))
    between = spread(two_classes(golden("prior_logits").transpose(0, 1)), graders)
    assert near(between, golden("inter_grader_term"))
    weights = layer_of(golden("vd_weight"), golden("vd_log_sigma")).kl()
    assert near(weights, golden("kl_w"))
    parts = Parts(fit, apart, weights, between, golden("l2_sum"))
    config = HuConfig()
    assert isinstance(config.beta, float)
    by = Weights(config.beta, config.beta_weights / golden("n_train"), config.gamma, config.norm_penalty)
    assert near(objective(parts, graders, by), golden("loss"), 1e-6)


def golden_head(golden: Callable[[str], Tensor]) -> tuple[Hu, int]:
    """A model with the golden f_comb, and how many features that reads."""
    built, latent = model(2), golden("mu_p").shape[1]
    weights = [golden(f"fcomb_w{i}") for i in range(4)]
    features = weights[0].shape[1] - latent
    built.head = PixelMLP(features, 1, latent, len(weights[0]))
    for i, layer in enumerate(built.head.layers):
        assert isinstance(layer, nn.Linear)
        layer.weight.data, layer.bias.data = weights[i], golden(f"fcomb_b{i}")
    return built, features


def test_codes_of_the_prior_are_decoded_to_the_golden_logits(golden):
    built, _ = golden_head(golden)
    features, expected = golden("features_mean_weights"), golden("prior_logits").transpose(0, 1)
    z = Gaussian(golden("mu_p"), golden("sigma_p")).at(golden("eps_z_p").transpose(0, 1))
    logits = built.decoded(as_rows(features)[:, None], z).unflatten(3, features.shape[2:])
    assert torch.equal(logits[:, :, 0], torch.zeros_like(logits[:, :, 0]))
    assert near(logits[:, :, 1:], expected)


def test_the_norms_are_the_golden_ones(golden):
    """Of the networks, only the norms are known, and of the hidden layers of f_comb the weights as well."""
    norms = golden("l2_norms")
    parameters = nn.ParameterList(norm * nn.functional.normalize(torch.randn(7), dim=0) for norm in norms)
    assert near(sum_of_norms(parameters), golden("l2_sum"))
    built, _ = golden_head(golden)
    hidden = built.head.layers[:-1]
    assert near(sum_of_norms(*hidden), norms[-2 * len(hidden) :].sum())
    published = model(2, published=True)
    penalised = (published.prior, published.posterior, *published.head.layers[:-1])
    assert sum(len(list(module.parameters())) for module in penalised) == len(norms)


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))["hu"]
    with torch.device("meta"):
        built = model(2, published=True)

    def size(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    found = {"unet": built.backbone, "prior": built.prior, "posterior": built.posterior, "fcomb": built.head}
    assert {name: size(part) for name, part in found.items()}.items() <= expected["parts"].items()
    assert built.backbone.layer.log_sigma.numel() == expected["parts"]["of_which_log_sigma"]
    assert size(built) == expected["parameters"]


# -- the layer ---------------------------------------------------------------------------------------------------------


def test_activations_have_mean_and_spread_of_drawn_weights():
    layer = layer_of(torch.randn(2, 3, 3, 3), torch.randn(2, 3, 3, 3) * 0.3 - 1)
    x = torch.randn(1, 3, 5, 6)
    with torch.no_grad():
        drawn = torch.stack([nn.functional.conv2d(x, w, layer.bias, padding=1) for w in draws(layer, 20_000)])
        activations = layer(x)
    assert torch.allclose(drawn.mean(0), activations.mean, atol=0.05 * float(activations.sigma.max()))
    assert torch.allclose(drawn.std(0), activations.sigma, rtol=0.03)


def draws(layer: VariationalConv, n: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return layer.weight + layer.log_sigma.exp() * torch.randn(n, *layer.weight.shape, generator=g)


def test_scales_are_bounded_where_they_are_used_and_not_in_the_kl():
    layer = layer_of(torch.zeros(1, 1, 3, 3), torch.full((1, 1, 3, 3), 3.0), torch.zeros(1))
    x = torch.zeros(1, 1, 3, 3)
    x[0, 0, 1, 1] = 2.0
    sigma = layer(x).sigma
    assert torch.allclose(sigma, torch.full_like(sigma, 2 * np.e))
    (gradient,) = torch.autograd.grad(sigma.sum(), layer.log_sigma)
    assert torch.equal(gradient, torch.zeros(1, 1, 3, 3))
    assert torch.allclose(layer.kl(), 9 * torch.tensor(-0.5 - 3 + 0.5 * np.exp(6.0)).float())
    (gradient,) = torch.autograd.grad(layer.kl(), layer.log_sigma)
    assert (gradient > 0).all()


@pytest.mark.parametrize("convs", [1, 3])
@pytest.mark.parametrize("decoder", ["released", "phiseg"])
def test_the_layer_stands_where_the_last_convolution_of_the_u_net_was(convs, decoder):
    torch.manual_seed(0)
    whole = UNet(1, (4, 6, 8), decoder, convs=convs, norm=False)
    torch.manual_seed(0)
    trunk = UNet(1, (4, 6, 8), decoder, convs=convs, norm=False, last=False)
    end = VariationalEnd(trunk, trunk.head_channels, trunk.multiple)
    assert end.dense_channels == 2 * whole.dense_channels
    last = whole.up[-1][-2]  # type: ignore[index]
    end.layer.load_state_dict({**last.state_dict(), "log_sigma": torch.full_like(last.weight, -30.0)})
    images = torch.randn(2, 1, 13, 10)
    mean, sigma = end(images).dense.chunk(2, 1)
    assert torch.allclose(mean.relu(), whole(images).dense, atol=1e-6)
    assert (sigma < 2e-4).all()


# -- the loss ----------------------------------------------------------------------------------------------------------


def parts_of(fit: list[list[float]], apart: list[list[float]]) -> Parts:
    return Parts(torch.tensor(fit), torch.tensor(apart), *(torch.tensor(x) for x in (700.0, 0.25, 30.0)))


def test_terms_add_up_by_hand():
    """Two images, three annotators; the second image lacks one, and the first counts one of its own twice."""
    masks = MaskDistribution(
        torch.zeros(2, 3, 1, 1, dtype=torch.long), torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0]])
    )
    graders = Graders.of(masks, 2)
    assert graders.share.tolist() == [[1.5, 0.75, 0.75], [1, 1, 0]]
    parts = parts_of([[2.0, 4.0, 8.0], [1.0, 2.0, 1e9]], [[4.0, 8.0, 0.0], [1.0, 2.0, 1e9]])
    total = objective(parts, graders, Weights(2.0, 1 / 7, 4.0, 0.1))
    assert total.item() == pytest.approx((3 + 3 + 6 + 1 + 2) + 2 * (6 + 6 + 0 + 1 + 2) / 2 + 100 + 1 + 3)


def test_images_without_a_valid_pixel_count_nowhere():
    labels, valid = torch.randint(2, (2, 3, 4, 4)), torch.tensor([True, False])[:, None, None].expand(2, 4, 4)
    both, first = Graders.of(MaskDistribution(labels, valid=valid), 2), Graders.of(labels[:1], 2)
    logits = torch.randn(2, 3, 2, 4, 4)
    assert torch.equal(both.ce(logits)[:1], first.ce(logits[:1]))
    rest = torch.rand(2, 3), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0)
    ours = objective(Parts(both.ce(logits), *rest), both, Weights(1.0, 1.0, 1.0, 1.0))
    theirs = objective(Parts(first.ce(logits[:1]), rest[0][:1], *rest[1:]), first, Weights(1.0, 1.0, 1.0, 1.0))
    assert torch.allclose(ours, theirs)
    drawn = torch.randn(2, 3, 2, 4, 4)
    assert torch.allclose(spread(drawn, both), spread(drawn[:1], first))


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 4))
def test_the_spread_is_a_cross_entropy_and_skips_who_is_absent(seed, readers, classes):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (2, readers + 1, 3, 4), generator=g)
    weights = torch.rand(2, readers + 1, generator=g) + 0.1
    weights[:, -1] = 0
    masks = MaskDistribution(labels, weights / weights.sum(1, keepdim=True))
    logits = 5 * torch.randn(2, readers + 1, classes, 3, 4, generator=g)
    logits[:, -1] = 1e4 * torch.rand(2, classes, 3, 4, generator=g)
    found = spread(logits, Graders.of(masks, classes))
    p, y = logits[:, :-1].softmax(2).double().mean(1), masks.marginal_probs(classes).double()
    assert torch.allclose(found.double(), -(y * p.log2()).sum(1).mean(), rtol=1e-4)
    entropy = torch.special.entr(y).sum(1).mean() / np.log(2)
    assert found >= entropy - 1e-5  # Gibbs


def test_absent_annotators_change_nothing_but_the_noise():
    """Everything that is random is of present annotators alone when nothing is random."""
    built = model(2).eval()
    with torch.no_grad():
        built.backbone.layer.log_sigma.fill_(-40)
        for head in (built.prior.head, built.posterior.head):
            head.conv.weight[6:] = 0  # type: ignore[index]
            head.conv.bias[6:] = -10  # type: ignore[index]
    images, labels = torch.randn(2, 1, 9, 8), torch.randint(2, (2, 2, 9, 8))
    padded = MaskDistribution(torch.cat([labels, labels[:, :1]], 1), torch.tensor([[0.5, 0.5, 0.0]] * 2))
    one, two = (built.loss(images, masks)["total"] for masks in (MaskDistribution(labels), padded))
    assert torch.allclose(one, two, rtol=1e-3)


def test_the_spread_of_half_precision_is_computed_in_full():
    masks = MaskDistribution(torch.tensor([[0, 1, 1]])[..., None, None])
    logits = torch.zeros(1, 3, 2, 1, 1, dtype=torch.bfloat16)  # log 1/3 has other digits in 16 bits
    assert spread(logits, Graders.of(masks, 2)).item() == pytest.approx(1, abs=1e-6)


def test_random_weights_have_no_part_in_the_spread():
    built = model(2, beta_weights=0)
    images, labels = torch.randn(2, 1, 8, 8), torch.randint(2, (2, 3, 8, 8))
    before = built.loss(images, labels, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built.backbone.layer.log_sigma.fill_(1)
    after = built.loss(images, labels, generator=torch.Generator().manual_seed(0))
    assert torch.equal(before["spread"], after["spread"])
    assert not torch.allclose(before["fit"], after["fit"])


def test_half_precision_keeps_the_loss():
    built = model(3)
    images, labels = torch.randn(2, 1, 16, 16), torch.randint(3, (2, 3, 16, 16))
    exact = built.loss(images, labels, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        rough = built.loss(images, labels, generator=torch.Generator().manual_seed(0))
    assert all(value.dtype == torch.float32 for value in rough.values())
    assert torch.allclose(rough["total"], exact["total"], rtol=0.05)
    assert torch.equal(rough["weights_kl"], exact["weights_kl"])


def test_features_of_draws_are_decoded_as_maps_are():
    head = PixelMLP(5, 2, latent=3, hidden=4)
    maps, codes = torch.randn(2, 3, 5, 6, 7), torch.randn(2, 3, 3)
    rows = head.of_rows(maps.flatten(3).transpose(2, 3), codes).transpose(2, 3).unflatten(3, (6, 7))
    for i in range(3):
        assert torch.allclose(rows[:, i], head(maps[:, i], codes[:, i : i + 1])[:, 0], atol=1e-5)
    shared = head.of_rows(as_rows(maps[:, 0])[:, None], codes).transpose(2, 3).unflatten(3, (6, 7))
    assert torch.allclose(shared, head(maps[:, 0], codes), atol=1e-5)
    with pytest.raises(ValueError, match="without norms"):
        PixelMLP(5, 2, latent=3, norm=True).of_rows(rows, codes)


# -- the number of training images -------------------------------------------------------------------------------------


def test_the_kl_of_weights_is_shared_by_the_training_images():
    images, labels = torch.randn(2, 1, 8, 8), torch.randint(2, (2, 3, 8, 8))

    def total(built: Hu) -> tuple[float, float]:
        terms = built.loss(images, labels, generator=torch.Generator().manual_seed(0))
        return terms["total"].item(), terms["weights_kl"].item()

    built = model(2).eval().double()
    images = images.double()
    alone, weights = total(built)  # of a loop that says nothing: at least the images of the batch
    built.before_training(images=50)
    fifty, _ = total(built)
    assert alone - fifty == pytest.approx(weights * (1 / 2 - 1 / 50))
    other = model(2)
    other.load_state_dict(built.state_dict())
    assert int(other.train_images) == 50
    fixed = model(2, train_images=20)
    fixed.before_training(images=50)
    assert int(fixed.train_images) == 20


def test_training_tells_how_many_images_it_has(tmp_path):
    settings = [*TINY, "--model.method=hu2019", "--trainer.epochs=1", "--data.fraction=0.5", "--optimizer.average=0.9"]
    run = train(parse(settings), tmp_path / "run", quiet=True)
    assert isinstance(run, Run)
    trained = [name for name in run.split.parts["train"]]
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    counts = {key: int(value) for key, value in saved.items() if key.endswith("train_images")}
    assert set(counts) == {"model.train_images", "average.train_images"}
    assert set(counts.values()) == {len(trained) // 2}
    assert "train_images: null" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("policy", ["random", "once", "0"])
def test_one_annotation_at_a_time_is_refused(policy):
    with pytest.raises(ConfigError, match=f"expected one of all, found {policy} with hu2019"):
        parse([*TINY, "--model.method=hu2019", f"--data.annotations={policy}"])


# -- draws -------------------------------------------------------------------------------------------------------------


def test_networks_run_once_for_all_draws():
    built, called = model(), []
    for part in (built.backbone.trunk, built.backbone.layer, built.prior):
        part.register_forward_hook(lambda *_: called.append(1))
    predictive = built.predict(torch.randn(1, 1, 12, 12))
    predictive.sample(20)
    assert len(called) == 3


def test_draws_have_the_spread_of_codes_and_of_weights():
    built = model(2)
    with torch.no_grad():
        built.backbone.layer.log_sigma.fill_(-1)
    predictive = built.predict(torch.randn(1, 1, 12, 12))
    assert isinstance(predictive, HuPredictive)
    noise = predictive.noise(3, torch.Generator().manual_seed(0))
    assert noise.seeds is not None
    probs = predictive.probs(noise)
    assert not torch.allclose(probs[:, 0], probs[:, 1])
    # One code: what is left is the weights, independent from place to place.
    object.__setattr__(noise, "codes", torch.zeros_like(noise.codes))
    same = predictive.probs(noise)
    assert not torch.allclose(same[:, 0], same[:, 1])
    object.__setattr__(noise, "seeds", noise.seeds[:, :1].expand(-1, 3))
    alike = predictive.probs(noise)
    assert torch.allclose(alike[:, 0], alike[:, 1], atol=1e-6)
    still = HuPredictive(
        built, predictive.dense * torch.tensor([1.0] * 4 + [0.0] * 4)[:, None, None], (12, 12), predictive.prior
    )
    mean = built.decoded(as_rows(predictive.dense[:, :4].relu())[:, None], predictive.prior.mean[:, None])
    assert torch.allclose(still.probs(noise)[:, 0], mean[:, 0].softmax(1).unflatten(2, (12, 12)), atol=1e-6)


@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(kept, monkeypatch):
    """Of a size that is no multiple of the network's, whether moments are kept or made again, in bands of few rows."""
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    built = model()
    with torch.no_grad():
        built.backbone.layer.log_sigma.fill_(-1)
    image = torch.randn(1, 1, 45, 199)
    windows = nn_windows.plan((45, 199), built.multiple, window=128, overlap=64)
    assert windows is not None
    parts, whole = built.predict_windows(image, windows), built.predict(image)
    noise = whole.noise(4, torch.Generator().manual_seed(0))
    expected = whole.render(noise)
    monkeypatch.setattr("ambiseg.methods.hu2019.BAND", 2000)
    monkeypatch.setattr("ambiseg.methods.hu2019._AT_ONCE", 100)
    masks = parts.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)


# -- backbones ---------------------------------------------------------------------------------------------------------


class Plain(Adapter):
    """A network that is no U-Net."""

    def __init__(self, in_channels: int, width: int = 5) -> None:
        super().__init__(nn.Conv2d(in_channels, width, 3, padding=1), dense=width)


@pytest.mark.parametrize(
    "backbone",
    [
        BackboneConfig(name="tests.test_hu2019:Plain"),
        BackboneConfig(channels=[4, 8], scale=2),
        BackboneConfig(channels=[4, 8], convs=1),
        BackboneConfig(channels=[4, 8], decoder="phiseg"),
    ],
    ids=lambda backbone: f"{backbone.name}-{backbone.scale}-{backbone.convs}-{backbone.decoder}",
)
def test_any_backbone_ends_in_random_weights(backbone):
    built = model(3, backbone)
    images, labels = torch.randn(2, 1, 13, 10), torch.randint(3, (2, 3, 13, 10))
    total = built.loss(images, labels)["total"]
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
    assert built.predict(images).sample(2).labels.shape == (2, 2, 13, 10)


def test_one_class_is_refused():
    with pytest.raises(ConfigError, match="at least two classes with hu2019, found 1"):
        model(1)
