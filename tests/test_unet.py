"""The deterministic U-Net, and what methods that decide pixel by pixel share."""

from __future__ import annotations

import json

import pytest
import torch

from ambiseg.masks import MaskDistribution
from ambiseg.methods import UNetConfig, UNetMethod
from ambiseg.methods.predictive import Noise
from ambiseg.methods.targets import Target
from ambiseg.methods.unet import PixelPredictive, cross_entropy
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 8])


def model(classes: int = 3, **settings) -> UNetMethod:
    return UNetMethod.build(UNetConfig(**settings), SMALL, 1, classes)


def test_the_published_network_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))["unet_deterministic"]["parameters"]
    with torch.device("meta"):
        built = UNetMethod.build(UNetConfig(published=True), SMALL, 1, 2)
    assert sum(p.numel() for p in built.parameters()) == expected


def test_the_loss_is_a_sum_over_pixels_and_a_mean_over_images_that_have_one():
    logits = torch.tensor([0.0, 1.0, 3.0])[None, :, None, None].expand(3, -1, 2, 2)
    labels = torch.tensor([[[0, 1], [2, 2]]]).expand(3, -1, -1)
    valid = torch.tensor([[[True, True], [True, True]], [[True, False], [False, False]], [[False] * 2] * 2])
    log_p = torch.tensor([0.0, 1.0, 3.0]).log_softmax(0)
    first, second = -(log_p[0] + log_p[1] + 2 * log_p[2]), -log_p[0]
    terms = cross_entropy(logits, Target(labels, valid))
    assert torch.allclose(terms["total"], (first + second) / 2)
    assert torch.allclose(terms["pixel"], (first + second) / 5)


def test_one_annotation_is_drawn_with_the_weights():
    built = model(2).eval()
    images = torch.randn(1, 1, 8, 8)
    labels = torch.stack([torch.zeros(8, 8), torch.ones(8, 8)])[None].long()
    alone = [built.loss(images, MaskDistribution(labels[:, i : i + 1]))["total"] for i in (0, 1)]
    for i, weights in enumerate(([[1.0, 0.0]], [[0.0, 1.0]])):
        assert torch.equal(built.loss(images, MaskDistribution(labels, torch.tensor(weights)))["total"], alone[i])


def test_a_point_is_not_computed_again_for_every_mask():
    predictive = model().predict(torch.randn(2, 1, 8, 8))
    masks = predictive.sample(1000)
    assert masks.labels.stride(1) == 0  # one mask in memory
    assert torch.equal(masks.labels[:, 7].long(), predictive.point())
    assert isinstance(predictive, PixelPredictive)
    assert torch.allclose(masks.marginal_probs(3), predictive.of_pixels)


def test_pixelwise_masks_have_the_probabilities_of_each_pixel():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])[None, :, None, None].expand(1, -1, 20, 20)
    predictive = PixelPredictive(probs, "pixelwise")
    noise = predictive.noise(50, torch.Generator().manual_seed(0))
    drawn = predictive.probs(noise)
    assert torch.equal(drawn.sum(2), torch.ones(1, 50, 20, 20))
    assert torch.equal(drawn.amax(2), torch.ones(1, 50, 20, 20))
    assert torch.allclose(drawn.mean((0, 1, 3, 4)), probs[0, :, 0, 0], atol=0.02)  # 20,000 pixels: 6 deviations
    agree = (drawn[..., 1:] * drawn[..., :-1]).sum(2).mean()  # neighbours know nothing of each other
    assert torch.allclose(agree, probs[0, :, 0, 0].square().sum(), atol=0.02)
    assert torch.equal(predictive.render(noise).labels.long(), drawn.argmax(2))


@pytest.mark.parametrize("sampling", ["point", "pixelwise"])
@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(sampling, kept, monkeypatch):
    """Whether features are kept for all of it, or made again for every rendering; in bands of few rows."""
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    monkeypatch.setattr("ambiseg.methods.dense.BAND", 2000)
    built = model(sampling=sampling)
    image = torch.randn(1, 1, 45, 200)
    windows = nn_windows.plan((45, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    called = []
    parts, whole = built.predict_windows(image, windows, lambda: called.append(1)), built.predict(image)
    steps = len(called)
    noise = parts.noise(4, torch.Generator().manual_seed(0))
    assert isinstance(noise, Noise)
    masks, expected = parts.render(noise), whole.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)
    assert torch.equal(parts.point(), built.predict(image).point())
    assert len(called) == (steps if kept else 4 * steps)  # networks run again for the three renderings
    assert parts.passes == (0 if kept else 1)


def test_no_value_is_looked_at():
    built = model().to("meta")
    images = torch.zeros(2, 1, 16, 16, device="meta")
    annotations = MaskDistribution(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).to("meta")
    built.loss(images, annotations)["total"].backward()
    assert built.predict(images).sample(3).labels.shape == (2, 3, 16, 16)
