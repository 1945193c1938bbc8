"""The Hierarchical Probabilistic U-Net: its size, its levels of codes, the bound on its error, and its draws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ambiseg._util.errors import ConfigError
from ambiseg.config import parse
from ambiseg.masks import MaskDistribution
from ambiseg.methods import HPUNet, HPUNetConfig, ParameterGroup
from ambiseg.methods.targets import Target
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.gaussian import Gaussian, kl
from ambiseg.nn.ladder import CodeLevel
from ambiseg.nn.likelihood import hardest, pixel_ce
from ambiseg.nn.windows import plan
from ambiseg.training.module import TrainingModule
from tests.conftest import SHARED, TINY

FOUR = BackboneConfig(channels=[3, 4, 5, 6], convs=1)


def model(backbone: BackboneConfig = FOUR, classes: int = 3, **settings) -> HPUNet:
    torch.manual_seed(0)
    return HPUNet.build(HPUNetConfig(**{"blocks": 1, **settings}), backbone, 1, classes)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared(name: str) -> Path:
    path = SHARED / "golden" / "zoo" / name
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{name}")
    return path


@pytest.fixture(scope="module")
def hpu():
    return {key: torch.from_numpy(np.asarray(array)) for key, array in np.load(shared("hpu.npz")).items()}


# -- the authors' numbers ----------------------------------------------------------------------------------------------


def test_the_published_network_has_the_golden_size():
    """The stage of the posterior that nobody reads is not built; the paper's count has it."""
    counts = json.loads(shared("param_counts.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        built = HPUNet.build(HPUNetConfig(published=True), FOUR, 1, 2)
    own = sum(p.numel() for name, p in built.named_parameters() if name != "constraint.rho")
    assert own + counts["hpu_unused_posterior_stage"]["parameters"] == counts["hpu"]["parameters"]
    stage = built.prior.levels[len(built.latents) - 1]
    assert isinstance(stage, CodeLevel)
    assert stage.up is not None
    dead = sum(p.numel() for p in stage.up.parameters())
    assert dead == counts["hpu_unused_posterior_stage"]["parameters"]
    assert built.multiple == 128


def test_golden_pixels_are_chosen_and_summed(hpu):
    logits, labels, valid = hpu["logits"], hpu["target"].long(), hpu["valid"].bool()
    cost, share = pixel_ce(logits, labels), (int(hpu["k"]) + 0.5) / labels.numel()
    torch.testing.assert_close(cost, hpu["pixel_ce"], rtol=1e-5, atol=1e-6)
    assert math.floor(0.02 * labels.numel()) == int(hpu["k"])
    uniform = hpu["uniform"].view(labels.shape)
    masks = {
        "deterministic": hardest(cost, share),
        "sampled": hardest(cost, share, uniform),
        "sampled_valid": hardest(pixel_ce(logits, labels, valid), share, uniform, valid),
    }
    for name, mask in masks.items():
        assert torch.equal(mask.to(torch.uint8), hpu[f"mask_{name}"]), name
        total = (cost * mask).sum((1, 2)).mean()
        torch.testing.assert_close(total.double(), hpu[f"rec_sum_{name}"], rtol=1e-5, atol=0)
        torch.testing.assert_close(
            (total / mask.sum((1, 2)).mean()).double(), hpu[f"rec_mean_{name}"], rtol=1e-5, atol=0
        )
        assert mask.sum((1, 2)).mean().item() == hpu[f"n_selected_{name}"].item()


def test_golden_fit_of_the_method(hpu, monkeypatch):
    """The method's own choice of pixels, with the stored noise in the place of its generator's."""
    logits, labels, valid = hpu["logits"], hpu["target"].long(), hpu["valid"].bool()
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: hpu["uniform"].view(labels.shape))
    cases = {"sampled": ({}, None), "sampled_valid": ({}, valid), "deterministic": ({"drawn": False}, None)}
    for name, (settings, seen) in cases.items():
        fit, chosen = model(classes=2, **settings).fit(logits, Target(labels, seen), None)
        torch.testing.assert_close(fit.double(), hpu[f"rec_sum_{name}"], rtol=1e-5, atol=0)
        assert chosen.item() == hpu[f"n_selected_{name}"].item()
    fit, chosen = model(classes=2, share=1.0).fit(logits, Target(labels, None), None)
    torch.testing.assert_close(fit.double(), hpu["rec_sum_all"], rtol=1e-5, atol=0)
    assert chosen.item() == labels[0].numel()


def test_golden_kl_of_every_level(hpu):
    total, level = torch.zeros((), dtype=torch.double), 0
    while f"kl{level}" in hpu:
        q, p = (Gaussian(hpu[f"mu_{x}{level}"].double(), hpu[f"log_sigma_{x}{level}"].double().exp()) for x in "qp")
        found = kl(q, p).mean()
        torch.testing.assert_close(found, hpu[f"kl{level}"], rtol=1e-10, atol=0)
        total, level = total + found, level + 1
    torch.testing.assert_close(total, hpu["kl_sum"], rtol=1e-10, atol=0)
    cost = pixel_ce(hpu["logits"], hpu["target"].long())
    fit = (cost * hardest(cost, 0.02, hpu["uniform"].view(cost.shape))).sum((1, 2)).mean().double()
    torch.testing.assert_close(fit + total, hpu["elbo_loss_beta1"], rtol=1e-5, atol=0)


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("latents", "used"), [([1, 1, 1, 1], (1, 1, 1)), ([2, 3], (2, 3)), ([5], (5,))])
def test_codes_are_at_the_coarsest_levels(latents, used):
    built = model(latents=latents)
    assert built.latents == used
    images = torch.randn(2, 1, 13, 10)  # padded to 16×16
    predictive = built.predict(images)
    walked = built.prior.walked(predictive.bottom, lambda _, p: p.mean)
    assert [tuple(z.shape) for z in walked.codes] == [(2, c, 2 << i, 2 << i) for i, c in enumerate(used)]
    assert [built.stride(i) for i in range(len(used))] == [8 >> i for i in range(len(used))]
    assert predictive.sample(2).labels.shape == (2, 2, 13, 10)


def test_the_posterior_sees_the_annotation_and_the_prior_its_codes():
    """The ELBO, step by step, from the parts of the network."""
    built = model(objective="elbo", beta=2.0, share=1.0, classes=2).double()
    images, labels = torch.randn(2, 1, 16, 16, dtype=torch.double), torch.randint(2, (2, 1, 16, 16))
    terms = built.loss(images, MaskDistribution(labels), generator=seeded())
    g, one_hot = seeded(), torch.nn.functional.one_hot(labels[:, 0], 2).movedim(-1, 1).double()
    state, skips = built.posterior(torch.cat([one_hot, images], 1)), built.prior(images)
    total = torch.zeros((), dtype=torch.double)
    for q, p in zip(built.posterior.levels, built.prior.levels, strict=True):
        assert isinstance(q, CodeLevel)
        assert isinstance(p, CodeLevel)
        ours, theirs = q.distribution(state), p.distribution(skips)
        z = ours.mean + ours.sigma * torch.randn(ours.mean.shape, generator=g, dtype=torch.double)
        total = total + kl(ours, theirs).mean()
        state, skips = q.onward(state, z), p.onward(skips, z)
    assert q.up is None  # pyright: ignore[reportPossiblyUnboundVariable]
    fit = pixel_ce(built.logits(skips, (16, 16)), labels[:, 0]).sum((1, 2)).mean()
    torch.testing.assert_close(terms["total"], fit + 2 * total)
    torch.testing.assert_close(terms["kl"], total.detach())
    torch.testing.assert_close(sum(terms[f"kl_{level}"] for level in range(3)), total.detach())
    assert built.loss(images, labels, generator=seeded(), beta=0.0)["total"].item() == pytest.approx(fit.item())
    assert {"slack", "multiplier"}.isdisjoint(terms)


def test_the_loss_of_geco_is_that_of_its_terms():
    built = model(classes=2, kappa=0.5)
    images, labels = torch.randn(2, 1, 16, 16), torch.randint(2, (2, 1, 16, 16))
    first = built.loss(images, labels, generator=seeded(1))
    k = math.floor(0.02 * 2 * 256)
    assert first["slack"].item() == pytest.approx(first["fit"].item() - 0.5 * k / 2, rel=1e-5)
    assert first["multiplier"].item() == pytest.approx(1)
    assert first["total"].item() == pytest.approx((first["slack"] + first["kl"]).item(), rel=1e-5)
    second = built.loss(images, labels, generator=seeded(2))
    average = 0.99 * first["fit"] + 0.01 * second["fit"]
    assert second["slack"].item() == pytest.approx(average.item() - 0.5 * k / 2, rel=1e-5)
    state = {name: value.clone() for name, value in built.state_dict().items()}
    built.eval().loss(images, labels, generator=seeded(3))
    assert all(torch.equal(value, state[name]) for name, value in built.state_dict().items())


@pytest.mark.parametrize("objective", ["geco", "elbo"])
def test_void_images_count_nothing(objective):
    """A second image without a valid pixel leaves fit, KL and their gradients as they are without it."""
    images, labels = torch.randn(2, 1, 16, 16), torch.randint(2, (2, 1, 16, 16))
    valid = torch.stack([torch.rand(16, 16) < 0.5, torch.zeros(16, 16, dtype=torch.bool)])
    settings = {"objective": objective, "drawn": False, "latents": [1]}
    with_it, alone = model(classes=2, share=0.25, **settings), model(classes=2, share=0.5, **settings)
    noise = torch.randn(2, 1, 2, 2)
    for built in (with_it, alone):
        for level in built.posterior.levels:
            level.distribution = lambda state, level=level: _Fixed(*level.head(state.features), noise)  # type: ignore
    both = with_it.loss(images, MaskDistribution(labels, valid=valid))
    one = alone.loss(images[:1], MaskDistribution(labels[:1], valid=valid[:1]))
    for name in one:
        torch.testing.assert_close(both[name], one[name], rtol=1e-5, atol=1e-6)
    nothing = with_it.loss(images, MaskDistribution(labels, valid=torch.zeros_like(valid)))
    nothing["total"].backward()
    assert nothing["fit"].item() == nothing["kl"].item() == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in with_it.parameters())


class _Fixed(Gaussian):
    """A Gaussian that draws with given noise."""

    def __new__(cls, mean, sigma, noise):
        self = super().__new__(cls, mean, sigma)
        self.given = noise  # type: ignore[attr-defined]
        return self

    def sample(self, generator=None):
        return self.at(self.given[: len(self.mean)])  # type: ignore[attr-defined]


def test_half_precision_keeps_codes_and_their_distances_exact():
    built = model(classes=2)
    images, labels = 100 * torch.randn(2, 1, 16, 16), torch.randint(2, (2, 1, 16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        terms = built.loss(images, labels, generator=seeded())
        state = built.prior(images)
        p = built.prior.levels[0].distribution(state)  # type: ignore[operator]
    assert {terms[name].dtype for name in terms} == {torch.float32}
    assert all(value.isfinite() for value in terms.values())
    assert p.mean.dtype == p.sigma.dtype == torch.float32


def test_images_may_be_taken_coarser():
    built = model(BackboneConfig(channels=[3, 4], convs=1, scale=3))
    assert (built.multiple, built.stride(0)) == (6, 6)
    assert built.predict(torch.randn(1, 1, 20, 13)).sample(2).labels.shape == (1, 2, 20, 13)
    built.loss(torch.randn(2, 1, 20, 13), torch.randint(3, (2, 2, 20, 13)))["total"].backward()


def test_settings_that_cannot_be_used_are_refused():
    with pytest.raises(ConfigError, match=r"backbone\.name: expected unet or unet-light"):
        model(BackboneConfig(name="deeplabv3plus"))
    with pytest.raises(ConfigError, match=r"model\.pinned: expected levels from 0 to 0, as the network has, found"):
        model(BackboneConfig(channels=[4, 8]), pinned=[1])
    with pytest.raises(ConfigError, match=r"model\.pinned: expected levels from 0 to 1, as latents has"):
        parse(["--model.method=hpunet", "--model.latents=[1, 1]", "--model.pinned=[2]"])
    with pytest.raises(ConfigError, match="expected levels from 0 to 2, as the network has, found"):
        model().predict(torch.zeros(1, 1, 8, 8)).pinned(3)


# -- training ----------------------------------------------------------------------------------------------------------


def test_weight_decay_leaves_the_multiplier_alone():
    built = model()
    assert built.constraint is not None
    config = parse([*TINY, "--model.method=hpunet", "--optimizer.weight_decay=0.125"])
    (optimizer,) = TrainingModule(built, config, (1,)).configure_optimizers()
    rest, spared = optimizer.param_groups
    assert (rest["weight_decay"], spared["weight_decay"]) == (0.125, 0)
    assert (rest["lr"], spared["lr"]) == (0.003, 0.003)
    assert [id(p) for p in spared["params"]] == [id(built.constraint.rho)]
    assert len(rest["params"]) + 1 == len(list(built.parameters()))
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = built.constraint.rho.item(), built.last.weight.clone()
    optimizer.step()
    assert built.constraint.rho.item() == before[0]
    assert not torch.equal(built.last.weight, before[1])


def test_a_group_without_such_parameters_is_one():
    own = ParameterGroup([torch.nn.Parameter(torch.zeros(1))])
    assert own.decayed(0.25) == [{"params": own.parameters, "weight_decay": 0.25}]
    own = ParameterGroup(own.parameters, weight_decay=0.5)
    assert own.decayed(0.25) == [{"params": own.parameters, "weight_decay": 0.5}]


# -- draws -------------------------------------------------------------------------------------------------------------


def test_pinned_levels_have_their_mean():
    built = model()
    for level in built.prior.levels:
        torch.nn.init.normal_(level.head.conv.weight)  # type: ignore[union-attr]
    images = torch.randn(2, 1, 16, 16)
    predictive = built.predict(images)
    noise = predictive.noise(4, seeded())
    with torch.no_grad():
        free = predictive.probs(noise)
        first, rest, every = (predictive.pinned(*levels).probs(noise) for levels in ((0,), (1, 2), (0, 1, 2)))
    assert all(not torch.allclose(a, b) for a, b in ((free, first), (free, rest), (first, rest), (first, every)))
    assert torch.equal(every, every[:, :1].expand_as(every))
    means = built.prior.walked(predictive.bottom, lambda _, p: p.mean).state
    torch.testing.assert_close(every[:, 0], built.logits(means, (16, 16)).softmax(1))
    # The noise says so as well, so that windows of a large image, which know of nothing else, follow it.
    pinned = predictive.pinned(1, 2).noise(4, seeded())
    with torch.no_grad():
        torch.testing.assert_close(predictive.probs(pinned), rest)
        by_hand = predictive.noise(4, seeded())
        by_hand.codes[..., 1:] = 0  # as for windows, whose predictive has no levels
        torch.testing.assert_close(predictive.probs(by_hand), rest)
    setting = model(pinned=[1, 2])
    setting.load_state_dict(built.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(setting.predict(images).probs(noise), rest)
    assert predictive.pinned(0).pinned().levels == frozenset()


def test_pinned_levels_are_pinned_in_windows():
    built = model(BackboneConfig(channels=[3, 4], convs=1), pinned=[0])
    image = torch.randn(1, 1, 20, 100)
    windows = plan((20, 100), built.multiple, window=64, overlap=32)
    assert windows is not None
    parts = built.predict_windows(image, windows)
    labels = parts.sample(3, seeded()).labels
    assert torch.equal(labels, built.predict(image).sample(3, seeded()).labels)
    assert torch.equal(labels, labels[:, :1].expand_as(labels))


def test_every_level_has_noise_of_its_own(monkeypatch):
    """Codes at the first place of two levels are drawn apart, each from a standard normal distribution."""
    built, drawn = model(latents=[1, 1]), []
    predictive = built.predict(torch.randn(1, 1, 8, 8))
    for level in built.prior.levels:
        distribution, onward = level.distribution, level.onward
        monkeypatch.setattr(level, "distribution", lambda s, d=distribution: _standard(d(s)))  # type: ignore
        monkeypatch.setattr(level, "onward", lambda s, z, onward=onward: (drawn.append(z), onward(s, z))[1])  # type: ignore
    with torch.no_grad():
        predictive.logits(predictive.noise(500, seeded()))
    codes = torch.stack([z[:, 0, 0, 0] for z in drawn])
    assert codes.shape == (2, 500)
    assert (codes.mean(1).abs() < 0.2).all()
    assert ((codes.std(1) - 1).abs() < 0.2).all()
    assert torch.corrcoef(codes)[0, 1].abs() < 0.2


def _standard(p: Gaussian) -> Gaussian:
    return Gaussian(torch.zeros_like(p.mean), torch.ones_like(p.sigma))


def test_draws_come_from_the_prior(monkeypatch):
    """The first code of many draws has the mean and the deviation that the network says."""
    built = model(latents=[1])
    predictive = built.predict(torch.randn(1, 1, 8, 8))
    seen = []
    level = built.prior.levels[0]
    onward = level.onward
    monkeypatch.setattr(level, "onward", lambda state, z: (seen.append(z), onward(state, z))[1])  # type: ignore
    with torch.no_grad():
        predictive.logits(predictive.noise(2000, seeded()))
    p = level.distribution(predictive.bottom)  # type: ignore[operator]
    assert seen[0].shape == (2000, 1, 1, 1)
    assert abs((seen[0].mean() - p.mean) / p.sigma).item() < 0.1
    assert seen[0].std().item() == pytest.approx(p.sigma.item(), rel=0.1)


def test_memory_is_bounded_and_the_way_down_runs_once(monkeypatch):
    """Whatever number of masks is drawn, the decoder never runs for more than so many pixels of them."""
    monkeypatch.setattr("ambiseg.methods.hpunet._AT_ONCE", 2 * 3 * 16 * 16)
    built = model()
    down, up = [], []
    built.prior.down[0].register_forward_hook(lambda *_: down.append(1))
    built.last.register_forward_hook(lambda module, args, out: up.append(len(out)))
    predictive = built.predict(torch.randn(2, 1, 16, 16))
    noise = predictive.noise(7, seeded())
    masks = predictive.render(noise)
    assert (down, up) == ([1], [6, 6, 2])
    with torch.no_grad():
        probs = predictive.probs(noise)
    assert up == [6, 6, 2, 6, 6, 2]
    assert torch.equal(masks.labels.long(), probs.argmax(2))
    up.clear()
    assert predictive.pinned(0, 1, 2).render(noise).labels.shape == (2, 7, 16, 16)
    assert up == [2, 2, 2]  # one pass per part: all its draws are the same
