"""Conditional categorical diffusion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg.config import parse
from ambiseg.masks import MaskDistribution
from ambiseg.methods import CCDM, ccdm
from ambiseg.methods.ccdm import WIDE, CCDMConfig
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.diffusion import Jump
from ambiseg.nn.diffusion_unet import GroupNorm
from ambiseg.nn.windows import plan
from tests.test_diffusion import fresh

SMALL = BackboneConfig(channels=[4, 8])


def model(classes: int = 3, backbone: BackboneConfig = SMALL, **settings) -> CCDM:
    built = CCDM.build(CCDMConfig(**{"steps": 3, **settings}), backbone, 1, classes)
    fresh(built.network)
    return built


def test_published_networks_and_those_of_the_backbone():
    with torch.device("meta"):
        published = CCDM.build(CCDMConfig(published=True), SMALL, 1, 2)
        wide = CCDM.build(CCDMConfig(published=True, multipliers=list(WIDE)), BackboneConfig(scale=4), 1, 2)
        own = CCDM.build(CCDMConfig(), BackboneConfig(channels=[16, 32, 64, 96], scale=2), 1, 2)
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (published, wide)]
    assert sizes == [5_699_138, 9_056_610]  # Zbinden et al., as counted in test_diffusion
    assert (published.multiple, wide.multiple, own.multiple) == (16, 16, 16)
    assert published.network.out.in_channels == 32
    assert own.network.out.in_channels == 16


def test_settings():
    assert parse(["--model.method=ccdm"]).optimizer.average == 0.9999
    assert parse(["--model.method=ccdm", "--optimizer.average=0.9"]).optimizer.average == 0.9
    with pytest.raises(ConfigError, match="steps: expected at most timesteps=10, found 11"):
        parse(["--model.method=ccdm", "--model.timesteps=10", "--model.steps=11"])
    with pytest.raises(ConfigError, match=r"backbone.name: expected unet or unet-light, .* found deeplabv3plus"):
        CCDM.build(CCDMConfig(), BackboneConfig(name="deeplabv3plus"), 1, 2)


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_a_sum_over_pixels_and_a_mean_over_images_that_have_one(monkeypatch):
    """With p̂_0 = 1/C and one step in all, a pixel costs log C."""
    built = model(3, timesteps=1, steps=1)
    monkeypatch.setattr(built, "guess", lambda images, xt, t: torch.full((len(xt), 3, 4, 4), 1 / 3))
    valid = torch.ones(3, 4, 4, dtype=torch.bool)
    valid[1, 1:], valid[2] = False, False
    terms = built.loss(torch.zeros(3, 1, 4, 4), MaskDistribution(torch.ones(3, 2, 4, 4).long(), valid=valid))
    cost = torch.tensor(3.0).log()
    assert torch.allclose(terms["total"], (16 + 4) / 2 * cost)
    assert torch.allclose(terms["pixel"], cost)


def test_what_void_pixels_are_labelled_says_nothing():
    built, g = model(3), torch.Generator()
    labels = torch.randint(3, (2, 1, 12, 9), generator=g)
    valid = torch.rand(2, 12, 9, generator=g) < 0.6
    other = torch.where(valid[:, None], labels, 2 - labels)
    images = torch.randn(2, 1, 12, 9, generator=g)
    one, two = (
        built.loss(images, MaskDistribution(masks, valid=valid), generator=torch.Generator().manual_seed(0))["total"]
        for masks in (labels, other)
    )
    assert torch.equal(one, two)


def test_every_step_is_trained_and_masks_are_as_noisy_as_their_step(monkeypatch):
    built, seen = model(2, timesteps=20), []

    def guess(images: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        seen.append((t, (xt != 1).float().mean((1, 2))))
        return torch.full((len(xt), 2, 40, 40), 0.5)

    monkeypatch.setattr(built, "guess", guess)
    built.loss(torch.zeros(200, 1, 40, 40), MaskDistribution(torch.ones(200, 1, 40, 40).long()))
    ((t, changed),) = seen
    assert set(t.tolist()) == set(range(1, 21))
    lost = torch.tensor(built.diffusion.schedule.lost_so_far)[t]
    assert torch.allclose(changed, lost / 2, atol=0.08)  # 1,600 pixels each: 6 deviations


def test_the_loss_is_in_full_precision_under_autocast():
    built, g = model(2), torch.Generator()
    images, masks = torch.randn(4, 1, 16, 16), MaskDistribution(torch.randint(2, (4, 2, 16, 16)))
    exact = built.loss(images, masks, generator=g.manual_seed(0))["total"]
    with torch.autocast("cpu", torch.bfloat16):
        total = built.loss(images, masks, generator=g.manual_seed(0))["total"]
        probs = built.predict(images).sample(2, g).marginal
    assert total.dtype == torch.float32
    assert torch.allclose(total, exact, rtol=0.1)
    assert probs is not None
    assert probs.dtype == torch.float32


# -- sampling ----------------------------------------------------------------------------------------------------------


def bayes(built: CCDM, prior: Tensor):
    """A network that knows all there is to know about pixels which are drawn by themselves:  p(x_0 | x_t)."""

    def guess(images: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        kept, lost = (torch.tensor(table)[t][:, None, None, None] for table in built.diffusion.schedule[2:])
        likely = kept * built.diffusion.one_hot(xt) + lost / built.classes  # q(x_t | x_0), as a function of x_0
        joint = likely * prior[:, None, None]
        return joint / joint.sum(1, keepdim=True)

    return guess


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_masks_have_the_right_distribution_in_any_number_of_steps(steps, monkeypatch):
    built, prior = model(3, steps=steps, timesteps=20), torch.tensor([0.7, 0.05, 0.25])
    monkeypatch.setattr(built, "guess", bayes(built, prior))
    marginal = built.predict(torch.zeros(1, 1, 100, 100)).marginal(4, torch.Generator().manual_seed(0))
    assert torch.allclose(marginal.mean((0, 2, 3)), prior, atol=0.015)  # 40,000 pixels: 6 deviations


def test_the_kernel_of_one_step_would_be_wrong_for_longer_ones(monkeypatch):
    """What the released code does: the test above can fail."""
    built, prior = model(3, steps=5, timesteps=20), torch.tensor([0.7, 0.05, 0.25])
    monkeypatch.setattr(built, "guess", bayes(built, prior))
    table = built.diffusion.schedule

    def short(t: int, s: int) -> Jump:
        return Jump(table.kept[t], table.lost[t], table.kept_so_far[t - 1], table.lost_so_far[t - 1])

    monkeypatch.setattr(built.diffusion, "jump", short)
    marginal = built.predict(torch.zeros(1, 1, 100, 100)).marginal(4, torch.Generator().manual_seed(0))
    assert (marginal.mean((0, 2, 3)) - prior).abs().max() > 0.03


def test_pixels_that_go_together_are_drawn_together(monkeypatch):
    """All pixels of a mask are one class or the other: a network that knows it draws no mixture."""
    built = model(2, steps=10, timesteps=20)

    def guess(images: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        kept, lost = (torch.tensor(table)[t][:, None] for table in built.diffusion.schedule[2:])
        agree = torch.stack([(xt == c).flatten(1).sum(1) for c in (0, 1)], 1)
        log = agree * (kept + lost / 2).log() + (64 - agree) * (lost / 2).log()
        return log.softmax(1)[:, :, None, None].expand(-1, -1, 8, 8)

    monkeypatch.setattr(built, "guess", guess)
    labels = built.predict(torch.zeros(1, 1, 8, 8)).sample(200, torch.Generator().manual_seed(0)).labels.flatten(2)
    assert torch.equal(labels.amin(2), labels.amax(2))
    assert 0.3 < labels.float().mean() < 0.7


def test_a_draw_does_not_depend_on_how_many_are_made_at_a_time(monkeypatch):
    built = model(3)
    predictive = built.predict(torch.randn(2, 1, 13, 10))
    noise = predictive.noise(5, torch.Generator().manual_seed(0))
    expected, probs = predictive.render(noise), predictive.probs(noise)
    assert expected.labels.unique().numel() == 3
    assert len({tuple(mask.flatten().tolist()) for mask in expected.labels[0]}) == 5
    calls, plain = [], built.guess
    monkeypatch.setattr(built, "guess", lambda images, xt, t: calls.append(len(xt)) or plain(images, xt, t))
    monkeypatch.setattr(ccdm, "_AT_ONCE", {"cpu": 2 * 2 * 130})
    found = predictive.render(noise)
    assert calls == [4] * 6 + [2] * 3
    assert torch.equal(found.labels, expected.labels)
    assert torch.allclose(found.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.allclose(predictive.probs(noise), probs, atol=1e-5)


# -- large images ------------------------------------------------------------------------------------------------------


def large(built: CCDM, overlap: int = 176):
    image = torch.randn(1, 1, 9, 500, generator=torch.Generator().manual_seed(0))
    windows = plan((9, 500), built.multiple, window=352, overlap=overlap)
    assert windows is not None
    return image, windows


def test_a_large_image_is_one_diffusion(monkeypatch):
    """Norms see a whole window; without them, where windows overlap by more than the network reaches, they show what
    the whole image shows, in every one of the steps. A quarter of the overlap is 44 pixels, and it reaches 43."""
    monkeypatch.setattr(GroupNorm, "forward", lambda self, x: x * self.weight[:, None, None])
    built, called = model(3), []
    image, windows = large(built)
    whole, parts = built.predict(image), built.predict_windows(image, windows, lambda: called.append(1))
    noise = parts.noise(3, torch.Generator().manual_seed(1))
    expected = whole.render(noise)
    assert expected.labels.unique().numel() > 1
    monkeypatch.setattr(ccdm, "_AT_ONCE", {"cpu": 2 * 10 * 352})  # two draws at a time, then one
    masks, other = parts.render_with(noise, noise[1:2])
    assert len(called) == len(windows[0]) * len(windows[1])
    assert torch.equal(masks.labels, expected.labels)
    assert torch.equal(other, expected.labels[:, 1:2])
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)


def test_with_norms_the_masks_of_a_large_image_are_still_one_draw():
    """They repeat, have no seam, and are near those of the whole image."""
    built = model(3)
    image, windows = large(built)
    whole, parts = built.predict(image), built.predict_windows(image, windows)
    noise = parts.noise(2, torch.Generator().manual_seed(1))
    masks = parts.render(noise)
    assert torch.equal(parts.render(noise).labels, masks.labels)
    assert torch.equal(parts.probs(noise).argmax(2), masks.labels.long())
    assert (masks.labels == whole.render(noise).labels).float().mean() > 0.9
    other = whole.render(whole.noise(2, torch.Generator().manual_seed(2))).labels
    assert (masks.labels == other).float().mean() < 0.9
