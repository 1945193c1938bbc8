"""MC-dropout: what is dropped, where, and how often networks run."""

from __future__ import annotations

import json

import pytest
import torch

from ambiseg._util.errors import ConfigError
from ambiseg.masks import MaskDistribution
from ambiseg.methods import mc_dropout
from ambiseg.methods.mc_dropout import MCDropout, MCDropoutConfig
from ambiseg.methods.unet import UNetConfig, UNetMethod
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.unet import Scaled, UNet
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 6, 8, 10])


def model(classes: int = 3, backbone: BackboneConfig = SMALL, **settings) -> MCDropout:
    torch.manual_seed(0)
    return MCDropout.build(MCDropoutConfig(**settings), backbone, 1, classes)


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))["unet_deterministic"]["parameters"]
    with torch.device("meta"):
        built = MCDropout.build(MCDropoutConfig(published=True), SMALL, 1, 2)
    assert sum(p.numel() for p in built.parameters()) == expected
    assert built.blocks == range(5, 9)  # of 7 levels: the last two down, the first two up


@pytest.mark.parametrize("scale", [1, 2])
def test_without_dropout_it_is_the_deterministic_unet(scale):
    backbone = SMALL.changed(scale=scale)
    built, unet = model(rate=0.0, backbone=backbone), UNetMethod.build(UNetConfig(), backbone, 1, 3)
    unet.load_state_dict(built.state_dict())
    images, labels = torch.randn(2, 1, 13, 10), torch.randint(3, (2, 1, 13, 10))
    predictive = built.predict(images)
    expected = unet.predict(images)
    noise = predictive.noise(3)
    assert torch.allclose(predictive.probs(noise), expected.probs(expected.noise(3)), atol=1e-6)
    one, two = (m.loss(images, MaskDistribution(labels)) for m in (built, unet))
    assert torch.allclose(one["total"], two["total"])


@pytest.mark.parametrize(("depth", "blocks"), [(1, [3, 4]), (2, [2, 3, 4, 5]), (16, [1, 2, 3, 4, 5, 6])])
def test_only_what_enters_the_deepest_blocks_is_dropped(depth, blocks, monkeypatch):
    """Half of it, element by element, and what is left is doubled."""
    built, seen = model(depth=depth), {}
    plain = UNet.resume

    def watched(self, maps, size, enter):
        def enter_and_look(block, x):
            out = enter(block, x)
            seen[block] = (x, out)
            return out

        return plain(self, maps, size, enter_and_look)

    monkeypatch.setattr(UNet, "resume", watched)
    images, labels = torch.randn(2, 1, 64, 64), torch.randint(3, (2, 1, 64, 64))
    predictive = built.predict(images)
    assert len(predictive.maps) == blocks[0]  # the levels above are computed once
    for run in (
        lambda: predictive.sample(1),
        lambda: built.loss(images, MaskDistribution(labels), generator=torch.Generator().manual_seed(0)),
    ):
        seen.clear()
        run()
        assert [block for block, (x, out) in seen.items() if not torch.equal(x, out)] == blocks
        x, out = seen[max(blocks)]
        kept = out != 0
        assert torch.allclose(out[kept], 2 * x[kept])
        assert abs(kept[x != 0].float().mean() - 0.5) < 0.05
        of_channel = (kept & (x != 0)).float().sum((2, 3)) / (x != 0).float().sum((2, 3)).clamp_min(1)
        assert ((of_channel > 0.2) & (of_channel < 0.8))[(x != 0).sum((2, 3)) > 100].all()  # not whole channels


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_what_is_kept_has_the_mean_of_all(rate):
    kept = model(rate=rate)._scaled(torch.rand(100_000, generator=torch.Generator().manual_seed(0)), torch.float32)
    assert torch.allclose(kept.mean(), torch.tensor(1.0), atol=0.05)
    assert torch.allclose((kept == 0).float().mean(), torch.tensor(rate), atol=0.01)


def test_draws_differ_by_their_seeds_alone():
    predictive = model().predict(torch.randn(1, 1, 16, 16))
    noise = predictive.noise(2, torch.Generator().manual_seed(0))
    one, two = predictive.probs(noise)[0]
    assert not torch.allclose(one, two)
    torch.manual_seed(5)
    assert torch.allclose(predictive.probs(noise)[0, 1], two)


def test_training_leaves_the_global_generator_alone():
    built = model()
    images, labels = torch.randn(2, 1, 16, 16), torch.randint(3, (2, 3, 16, 16))
    state = torch.random.get_rng_state()
    totals = [
        built.loss(images, MaskDistribution(labels), generator=torch.Generator().manual_seed(seed))["total"].item()
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert totals[0] == totals[1] != totals[2]


def test_the_memory_of_draws_is_bounded(monkeypatch):
    """They run in chunks, which change nothing; and the levels above the dropout do not run again."""
    built = model()
    images = torch.randn(2, 1, 16, 16)
    predictive = built.predict(images)
    noise = predictive.noise(7, torch.Generator().manual_seed(0))
    whole, together = predictive.render(noise), predictive.probs(noise)
    monkeypatch.setattr(mc_dropout, "_AT_ONCE", 3 * 2 * 16 * 16 * (4 + 4))  # three draws of two images
    sizes = []
    plain = MCDropout.logits

    def counted(self, maps, size, noise):
        sizes.append(noise.count)
        return plain(self, maps, size, noise)

    def refuse(*_: object) -> None:
        raise AssertionError("the encoder ran again")

    monkeypatch.setattr(MCDropout, "logits", counted)
    monkeypatch.setattr(UNet, "start", refuse)
    masks = predictive.render(noise)
    assert sizes == [3, 3, 1]
    assert torch.equal(masks.labels, whole.labels)
    assert torch.allclose(masks.marginal_probs(3), whole.marginal_probs(3), atol=1e-6)
    assert torch.allclose(predictive.probs(noise), together, atol=1e-6)


def test_a_prediction_stays_in_evaluation():
    """Whatever the model does afterwards: batch norm has the statistics of training, and they stay."""
    built = model()
    predictive = built.predict(torch.randn(1, 1, 16, 16))
    noise = predictive.noise(2)
    before = predictive.render(noise)
    state = {key: value.clone() for key, value in built.state_dict().items()}
    built.train()
    assert torch.equal(predictive.render(noise).labels, before.labels)
    assert built.training
    assert all(torch.equal(value, state[key]) for key, value in built.state_dict().items())


def test_places_of_blocks():
    unet = UNet(1, (2, 2, 2, 2))
    assert [unet.stride(block) for block in range(7)] == [1, 2, 4, 8, 4, 2, 1]
    assert Scaled(unet, 3).stride(4) == 12


def test_other_backbones_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^backbone.name: expected unet or unet-light for mc-dropout, found deeplab"):
        model(backbone=BackboneConfig(name="deeplabv3plus"))
