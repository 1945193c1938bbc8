"""The gate: what it reads, and how that is pooled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ambiseg.nn import Gate, UNet
from ambiseg.nn.gating import HEADS, Pooling
from ambiseg.nn.unet import Scaled

SEVEN = (3, 4, 5, 6, 6, 7, 8)


def drawn_pooling(kind, channels: int) -> Pooling:
    pooling = Pooling(channels, kind)
    for scores in pooling.parameters():
        torch.nn.init.normal_(scores, std=2.0)
    return pooling


@pytest.mark.parametrize("kind", ["average", "attention", "both"])
def test_pooling_against_a_loop_over_places(kind):
    maps, pooling = torch.randn(2, 3, 4, 5), drawn_pooling(kind, 3)
    found = pooling(maps)
    for image, vector in zip(maps, found, strict=True):
        places = [image[:, y, x] for y in range(4) for x in range(5)]
        average, largest = sum(places) / len(places), torch.stack(places).amax(0)
        attended = []
        for head in range(HEADS if kind != "average" else 0):
            score = [float((pooling.scores[head].detach() * place).sum().exp()) for place in places]
            attended.append(sum(s * place for s, place in zip(score, places, strict=True)) / sum(score))
        expected = {"average": [average], "attention": attended, "both": [average, largest, *attended]}[kind]
        assert torch.allclose(vector, torch.cat(expected), atol=1e-5)
    assert found.shape == (2, pooling.out_channels)


@pytest.mark.parametrize("kind", ["average", "attention", "both"])
def test_pooling_by_parts_is_pooling_of_the_whole(kind):
    maps, pooling = 5 * torch.randn(1, 3, 8, 12), drawn_pooling(kind, 3)
    rows, columns = [(0, 5), (3, 8)], [(0, 12)]  # rows 3 and 4 are in both parts
    half = {0: torch.tensor([1, 1, 1, 0.7, 0.2]), 3: torch.tensor([0.3, 0.8, 1, 1, 1])}
    running = pooling.over_windows()
    for top, bottom in rows:
        for left, right in columns:
            running.add(maps[:, :, top:bottom, left:right], half[top], torch.ones(12))
    assert torch.allclose(running.result(), pooling(maps), atol=1e-4)
    running = pooling.over_windows()  # places that count nothing may hold anything
    wild = torch.cat([maps, torch.full((1, 3, 2, 12), 1e4)], 2)
    running.add(wild, torch.tensor([1.0] * 8 + [0.0] * 2), torch.ones(12))
    assert torch.allclose(running.result(), pooling(maps), atol=1e-4)


@pytest.mark.parametrize("kind", ["average", "attention", "both"])
def test_gates_of_every_pooling_learn(kind):
    gate = Gate(8, 3, pooling=kind, hidden=5)
    features = torch.randn(5, 8, 3, 3)
    weights = gate(features)
    assert weights.shape == (5, 3)
    assert torch.allclose(weights.sum(1), torch.ones(5))
    assert torch.allclose(weights, gate.of(gate.pooling(features)))
    (weights * torch.randn(5, 3)).sum().backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not list(Gate(8, 3, "uniform", kind).parameters())
    assert gate.half()(features.half()).dtype == torch.float32


def test_attention_starts_as_the_average_and_the_average_has_no_weights():
    maps = torch.randn(2, 8, 3, 3)
    assert torch.allclose(Pooling(8, "attention")(maps), maps.mean((2, 3)).repeat(1, HEADS), atol=1e-6)
    assert not Pooling(8).state_dict()
    assert list(Gate(8, 3).state_dict()) == [
        f"layers.{i}" for i in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
    ]


@pytest.mark.parametrize(("scales", "level", "read"), [("all", 1, range(7)), (3, 1, (4, 5, 6)), (2, 1 / 3, (1, 2))])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_gate_may_read_several_levels(scales, level, read, scale):
    """The mean of what it reads is that of every level's map."""
    unet = UNet(1, SEVEN, gate_level=level, gate_scales=scales).eval()
    images = torch.randn(2, 1, 100, 70)
    backbone = Scaled(unet, scale)
    assert backbone.gate_scales == tuple(SEVEN[i] for i in read)
    gate, dense = backbone(images).gate, backbone(images).dense
    maps = unet.start(images if scale == 1 else F.avg_pool2d(images, 2), levels=7)
    assert gate.shape == (2, backbone.gate_channels, *maps[read[-1]].shape[2:])
    assert torch.allclose(gate.mean((2, 3)), torch.cat([maps[i].mean((2, 3)) for i in read], 1), atol=1e-5)
    assert torch.allclose(gate[:, -SEVEN[read[-1]] :], maps[read[-1]])
    alone = UNet(1, SEVEN).eval()
    alone.load_state_dict(unet.state_dict())
    assert torch.equal(Scaled(alone, scale)(images).dense, dense)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gate(8, 3, pooling="max"), "pooling must be one of average, attention, both, found 'max'"),  # type: ignore[arg-type]
        (lambda: UNet(1, SEVEN, gate_scales=0), "gate_scales: expected 1 to 7 levels at gate_level, or all, found 0"),
        (
            lambda: UNet(1, SEVEN, gate_level=1 / 3, gate_scales=4),
            "expected 1 to 3 levels at gate_level, or all, found 4",
        ),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
