"""What every method must do, whichever it is: one tester for the whole zoo. A method is one line in ``TESTED``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ambiseg.masks import MaskDistribution
from ambiseg.methods import METHODS, Method, Predictive, Stratified
from ambiseg.methods.drawing import draw, settings_of
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.windows import plan
from tests.drop_ins import DROP_INS

# The methods of the package, with the settings of a small one; and the three of the tests, which hold the tester to it.
TESTED: dict[str, dict[str, Any]] = {
    "mose": {},
    "unet": {},
    "ensemble": {"members": 2},
    "mc-dropout": {},
    "probunet": {},
    "probunet-gmm": {},
    "hpunet": {"blocks": 1, "decay": 0.9},  # windows overlap by what one block reaches
    "phiseg": {},
    "hu2019": {"train_images": 1000},
    "ssn": {},
    "car": {"width": 4, "levels": 3, "disc_width": 4},  # wider and deeper ones reach further than windows overlap
    "ccdm": {"steps": 2},
    **{name: {} for name in DROP_INS},
}
every_method = pytest.mark.parametrize("name", TESTED)
KNOWN = {**METHODS, **DROP_INS}


def build(name: str, classes: int = 3) -> Method:
    torch.manual_seed(0)
    method = KNOWN[name]
    return method.build(method.Config(method=name, **TESTED[name]), BackboneConfig(channels=[4, 8]), 2, classes)


def batch(classes: int = 3) -> tuple[torch.Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(1)
    valid = torch.rand(2, 13, 10, generator=g) < 0.9
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    labels = torch.randint(classes, (2, 3, 13, 10), generator=g)
    return torch.randn(2, 2, 13, 10, generator=g), MaskDistribution(labels, weights, valid)


def losses(model: Method, images: torch.Tensor, annotations: MaskDistribution, seed: int = 3) -> dict[str, dict]:
    """The terms of every phase of a step that has them all."""
    groups = model.parameter_groups()
    phases = max((tuple(model.phases(step)) for step in range(10)), key=len)
    extra: list[dict[str, Any]] = [{"phase": phase} if len(groups) > 1 else {} for phase in phases]
    g = torch.Generator().manual_seed(seed)
    return {
        phase: model.loss(images, annotations, generator=g, **more) for phase, more in zip(phases, extra, strict=True)
    }


def test_every_method_is_tested():
    assert TESTED.keys() == METHODS.keys() | DROP_INS.keys()
    for name, method in KNOWN.items():
        assert method.Config(method=name).method == name  # the key in METHODS, and no other
        with pytest.raises(ValueError, match="method"):
            method.Config(method="another")


@every_method
def test_loss_is_scalars_with_a_total_that_reaches_every_parameter(name):
    model = build(name)
    groups = model.parameter_groups()
    assert sorted(map(id, model.parameters())) == sorted(id(p) for g in groups.values() for p in g.parameters)
    for phase, terms in losses(model, *batch()).items():
        assert all(value.ndim == 0 and value.isfinite() for value in terms.values())
        assert not any(value.requires_grad for key, value in terms.items() if key != "total")
        model.zero_grad()
        terms["total"].backward()
        for parameter in groups[phase].parameters:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


@every_method
def test_loss_repeats_with_a_generator_and_leaves_its_inputs_alone(name):
    model = build(name).eval()
    images, annotations = batch()
    before = images.clone(), annotations.labels.clone()
    one, two = (
        {phase: terms["total"].item() for phase, terms in losses(model, images, annotations).items()} for _ in range(2)
    )
    assert one == two
    assert torch.equal(images, before[0])
    assert torch.equal(annotations.labels, before[1])


@every_method
def test_predictions_are_distributions_of_the_images_size(name):
    model = build(name)
    images, _ = batch()
    predictive = model.predict(images)
    assert isinstance(predictive, Predictive)
    assert (predictive.classes, tuple(predictive.size)) == (3, (13, 10))
    masks = predictive.sample(5, torch.Generator().manual_seed(0))
    assert masks.labels.shape == (2, 5, 13, 10)
    assert masks.weights is None
    assert int(masks.labels.max()) < model.classes
    assert masks.marginal is not None
    assert torch.allclose(masks.marginal.sum(1), torch.ones(2, 13, 10), atol=1e-5)
    again = predictive.sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(again.labels, masks.labels)
    assert torch.allclose(predictive.marginal(5, torch.Generator().manual_seed(0)), masks.marginal, atol=1e-6)
    with pytest.raises(ValueError, match="at least one sample, found 0"):
        predictive.sample(0)


@every_method
def test_probabilities_are_probabilities_under_autocast(name):
    model = build(name).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        predictive = model.predict(batch()[0])
        noise = predictive.noise(8, torch.Generator().manual_seed(2))
        probs, masks = predictive.probs(noise), predictive.render(noise)
        whole = model.predict_whole(torch.randn(1, 2, 13, 10, generator=torch.Generator().manual_seed(1)))
        compact = whole.sample(8, torch.Generator().manual_seed(2))
    for marginal in (masks.marginal, compact.marginal):
        assert marginal is not None
        assert marginal.dtype == torch.float32
        torch.testing.assert_close(marginal.sum(1), torch.ones(len(marginal), 13, 10), atol=1e-5, rtol=0)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(2), torch.ones(2, 8, 13, 10), atol=1e-5, rtol=0)
    # Heads that fold compute in 32 bits what `probs` has of products in 16.
    torch.testing.assert_close(masks.marginal, probs.mean(1), atol=1e-2, rtol=0)


@every_method
def test_masks_are_the_most_likely_classes_of_their_noise(name):
    predictive = build(name).predict(batch()[0])
    noise = predictive.noise(4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        probs = predictive.probs(noise)
    masks = predictive.render(noise)
    assert probs.shape == (2, 4, 3, 13, 10)
    assert torch.allclose(probs.sum(2), torch.ones(2, 4, 13, 10), atol=1e-5)
    assert torch.equal(masks.labels.long(), probs.argmax(2))
    assert torch.allclose(masks.marginal_probs(3), probs.mean(1), atol=1e-6)
    assert torch.equal(predictive.render(noise[1:3]).labels, masks.labels[:, 1:3])  # a draw does not know the others


@every_method
def test_one_noise_is_one_draw_in_every_window(name):
    """Windows that overlap by more than the network reaches show what the whole image shows."""
    model = build(name)
    if model.incoherent:
        pytest.skip(model.incoherent)
    image = torch.randn(1, 2, 44, 200, generator=torch.Generator().manual_seed(0))
    windows = plan((44, 200), model.multiple, window=128, overlap=64)  # a quarter is 16 pixels, 15 are seen
    assert windows is not None
    called = []
    whole, parts = model.predict(image), model.predict_windows(image, windows, lambda: called.append(1))
    noise = whole.noise(3, torch.Generator().manual_seed(1))
    assert torch.allclose(parts.noise(3, torch.Generator().manual_seed(1)).codes, noise.codes)
    with torch.no_grad():
        assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)
    masks, expected = parts.render(noise), whole.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert len(called) % (len(windows[0]) * len(windows[1])) == 0
    assert called
    if isinstance(whole, Stratified):
        assert isinstance(parts, Stratified)
        assert torch.allclose(parts.weights, whole.weights, atol=0.05)
        assert torch.equal(parts.centres(), whole.centres())


@every_method
def test_strata_are_drawn_side_by_side_with_their_weights(name):
    predictive = build(name).predict(batch()[0])
    forms = {form for form, _ in settings_of(predictive, ("standard", "compact"), (5,))}
    if not isinstance(predictive, Stratified):
        assert forms == {"standard"}
        with pytest.raises(ValueError, match="expected one of standard, compact that the method has"):
            draw(predictive, "compact", 5)
        return
    assert forms == {"standard", "compact"}
    assert KNOWN[name].stratum, "methods with strata say what they call one"
    K = predictive.weights.shape[1]
    assert torch.allclose(predictive.weights.sum(1), torch.ones(2))
    noise = predictive.compact_noise(2, torch.Generator().manual_seed(0))
    assert noise.strata is not None
    assert noise.strata[0].tolist() == [k for k in range(K) for _ in range(2)]
    masks = predictive.render(noise)
    assert torch.allclose(masks.mass.view(2, K, 2).sum(2), predictive.weights.detach())
    assert predictive.centres().shape == (2, K, 13, 10)
    drawing = draw(predictive, "compact", 2 * K, torch.Generator().manual_seed(0))
    assert drawing.strata == K
    assert torch.equal(drawing.masks.labels, masks.labels)
    certain = torch.nn.functional.one_hot(torch.tensor([1, 0]), K).float()
    drawn = predictive.reweighted(certain).noise(6, torch.Generator().manual_seed(0)).strata
    assert drawn is not None
    assert drawn.tolist() == [[1] * 6, [0] * 6]


@every_method
def test_predict_keeps_the_mode_and_the_statistics(name):
    model = build(name).train()
    state = copy.deepcopy(model.state_dict())
    assert not model.predict(batch()[0]).sample(1).marginal.requires_grad  # type: ignore[union-attr]
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@every_method
def test_a_step_learns(name):
    model = build(name)
    images, _ = batch()
    labels = torch.stack([images[:, 0] > 0, images[:, 0] > 0.5, images[:, 0] > 0], 1)
    annotations = MaskDistribution(labels.long())
    groups = model.parameter_groups()
    optimisers = {phase: torch.optim.Adam(group.parameters, lr=1e-2) for phase, group in groups.items()}
    first, totals = next(iter(groups)), []
    for step in range(60):
        for phase, optimiser in optimisers.items():
            extra = {"phase": phase} if len(groups) > 1 else {}
            terms = model.loss(images, annotations, generator=torch.Generator().manual_seed(step), **extra)
            optimiser.zero_grad()
            terms["total"].backward()
            optimiser.step()
            if phase == first:
                totals.append(terms["total"].item())
    assert sum(totals[-5:]) < 0.9 * sum(totals[:5])


@every_method
def test_saved_weights_predict_the_same(name):
    model, other = build(name), build(name)
    torch.nn.init.normal_(next(other.parameters()))
    other.load_state_dict(model.state_dict())
    images, _ = batch()
    one, two = (m.predict(images).sample(3, torch.Generator().manual_seed(0)) for m in (model, other))
    assert torch.equal(one.labels, two.labels)
