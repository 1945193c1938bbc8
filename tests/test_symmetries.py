"""Predictions averaged over symmetries: of every method, in every form, of images, windows and volumes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ambiseg.cli.options import SYMMETRIES
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.methods import Stratified
from ambiseg.methods.symmetries import COUNTS, symmetric, symmetries
from ambiseg.nn.windows import plan
from ambiseg.prediction import Predictor, predict
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.result import Options
from tests.test_methods import batch, build, every_method


def test_the_options_are_those_of_the_library():
    assert SYMMETRIES == COUNTS
    with pytest.raises(ValueError, match=r"symmetries: expected one of 1, 2, 4, 8, found 3"):
        symmetries(3)


@pytest.mark.parametrize("count", COUNTS)
def test_every_count_is_a_group(count):
    maps = torch.arange(12).view(3, 4)
    seen = {tuple(s.of(maps).flatten().tolist()) + tuple(s.of(maps).shape) for s in symmetries(count)}
    assert len(seen) == count
    for one in symmetries(count):
        assert torch.equal(one.undone(one.of(maps)), maps)
        for other in symmetries(count):
            both = one.of(other.of(maps))
            assert tuple(both.flatten().tolist()) + tuple(both.shape) in seen


def test_one_symmetry_is_the_method_itself():
    model = build("mose")
    assert symmetric(model, 1) is model


@every_method
def test_draws_are_those_of_the_turned_images_turned_back(name):
    model, (images, _) = build(name), batch()
    mean, used = symmetric(model, 8).predict(images), symmetries(8)
    noise = mean.noise(11, torch.Generator().manual_seed(0))
    assert noise.symmetries == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2)
    with torch.no_grad():
        probs = mean.probs(noise)
        for i, s in enumerate(noise.symmetries or ()):
            alone = model.predict(used[s].of(images)).probs(noise[i : i + 1])
            assert torch.allclose(probs[:, i], used[s].undone(alone[:, 0]), atol=1e-6)
    masks = mean.render(noise)
    assert masks.labels.shape == (2, 11, 13, 10)
    assert torch.equal(masks.labels.long(), probs.argmax(2))
    assert masks.marginal is not None
    assert torch.allclose(masks.marginal, probs.mean(1), atol=1e-5)
    assert torch.equal(mean.render(noise[3:5]).labels, masks.labels[:, 3:5])
    again = mean.sample(11, torch.Generator().manual_seed(0))
    assert torch.equal(again.labels, masks.labels)


@every_method
def test_strata_keep_their_place_and_have_the_mean_of_the_weights(name):
    model, (images, _) = build(name), batch()
    mean = symmetric(model, 4).predict(images)
    if not model.stratum:
        assert not isinstance(mean, Stratified)
        return
    assert isinstance(mean, Stratified)
    parts = [model.predict(s.of(images)) for s in symmetries(4)]
    assert torch.allclose(mean.weights, sum(part.weights for part in parts) / 4)  # type: ignore[union-attr]
    noise = mean.compact_noise(3, torch.Generator().manual_seed(0))
    masks = mean.render(noise)
    assert torch.allclose(masks.mass.view(2, -1, 3).sum(2), mean.weights.detach())
    with torch.no_grad():
        weighted = torch.einsum("bn,bnchw->bchw", noise.mass, mean.probs(noise))
    assert torch.allclose(masks.marginal_probs(3), weighted, atol=1e-5)
    assert torch.equal(mean.centres(), model.predict(images).centres())  # type: ignore[union-attr]
    certain = torch.nn.functional.one_hot(torch.tensor([1, 0]), mean.weights.shape[1]).float()
    only = mean.reweighted(certain).compact(1)  # a stratum of weight 0 in a group of its own is no division by 0
    assert only.marginal is not None
    assert only.marginal.isfinite().all()


def test_the_mean_is_the_same_whichever_way_the_image_lies():
    images = torch.randn(1, 2, 16, 24, generator=torch.Generator().manual_seed(0))
    pixels, gate = symmetric(build("unet"), 8), symmetric(build("mose"), 8)
    marginal, weights = pixels.predict(images).marginal(8), gate.predict(images).weights  # type: ignore[attr-defined]
    alone = build("unet").predict(images).marginal(1)
    for turned in symmetries(8):
        there = turned.of(images)
        assert torch.allclose(turned.undone(pixels.predict(there).marginal(8)), marginal, atol=1e-5)
        assert torch.allclose(gate.predict(there).weights, weights, atol=1e-5)  # type: ignore[attr-defined]
    upside_down = symmetries(4)[2]
    assert not torch.allclose(upside_down.undone(build("unet").predict(upside_down.of(images)).marginal(1)), alone)


@every_method
def test_windows_are_turned_with_the_image(name):
    model = build(name)
    if model.incoherent:
        pytest.skip(model.incoherent)
    image = torch.randn(1, 2, 44, 200, generator=torch.Generator().manual_seed(0))
    windows = plan((44, 200), model.multiple, window=128, overlap=64)
    assert windows is not None
    called = []
    turned = symmetric(model, 8)
    whole, parts = turned.predict(image), turned.predict_windows(image, windows, lambda: called.append(1))
    assert turned.views == 8
    assert len(called) % 8 == 0
    noise = whole.noise(9, torch.Generator().manual_seed(1))
    assert torch.equal(parts.render(noise).labels, whole.render(noise).labels)
    with torch.no_grad():
        assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)


def test_files_volumes_and_progress(tmp_path):
    image = Nodules(size=64)[7].image[:, 4:].astype(np.float32)  # not square
    (plain,) = predict("demo", [image], per_stratum=8, merge=False)
    (mean,) = predict("demo", [image], tmp_path / "out", per_stratum=8, merge=False, symmetries=8)
    assert not torch.equal(plain.masks.labels, mean.masks.labels)
    written = json.loads((tmp_path / "out" / "image_0" / "weights.json").read_text())
    assert written["symmetries"] == 8
    assert mean.strata is not None
    (turned,) = predict("demo", [image[:, ::-1].copy()], per_stratum=8, merge=False, symmetries=8)
    assert turned.strata is not None
    assert torch.allclose(mean.strata.weights, turned.strata.weights, atol=1e-5)
    volume = np.repeat(image[None], 2, 0)
    (both,) = predict("demo", [volume], per_stratum=8, merge=False, symmetries=8)
    assert torch.equal(both.masks.labels[:, :, 0], both.masks.labels[:, :, 1])
    steps = []
    predictor = Predictor("demo", Options(symmetries=4, window=64))
    large = np.random.default_rng(0).integers(-1000, 400, (1, 100, 130)).astype(np.float32)
    predictor(array_source(large, "large"), progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1]
    assert all(done <= total for done, total in steps)
