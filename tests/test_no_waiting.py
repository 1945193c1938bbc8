"""Nothing in a training step or in drawing masks looks at a value: an accelerator would be waited for.

On the meta device tensors have shapes and no values, and any operation that needs one raises.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ambiseg import MaskDistribution, MoSE, metrics, regions
from ambiseg.data.loader import Batch
from ambiseg.data.module import DataModule
from ambiseg.nn.windows import plan
from ambiseg.regions import RegionMasks, partition
from ambiseg.transport import couple

SETTINGS = {
    "default": {},
    "two classes": {"classes": 2},
    "cross-entropy": {"cost": "ce"},
    "class weights": {"cost": "ce", "class_weights": [1, 1, 2]},
    "capacity": {"capacity": 0.5},
    "released solver": {"capacity": 0.5, "solver": "released"},
    "groups": {"group_threshold": 0.5},
    "groups, cross-entropy": {"group_threshold": 0.5, "cost": "ce"},
    "schedules": {
        "capacity": {"values": [0.25, 1.0]},
        "group_threshold": {"values": [1.0, 0.5]},
        "samples": {"values": [1, 2]},
        "annealing": {"values": [0.0, 1.0]},
    },
    "all pairs": {"objective": "all-pairs"},
    "annealing": {"annealing": 0.5},
    "released head": {"head": "released"},
    "released scaling": {"kl": "released"},
    "noise in the decoder": {"inject_level": 0.5},
    "points": {"stochastic": False},
    "diagonal": {"diagonal": True},
    "uniform weights": {"expert_weights": "uniform"},
}
MOVING = {"capacity": 0.3, "group_threshold": 0.7, "samples": 2.0, "annealing": 0.2}


def drawn_by_readers(classes: int, readers: int = 3) -> MaskDistribution:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (2, readers, 16, 16), generator=g, dtype=torch.uint8)
    weights = torch.full((2, readers), 1 / (readers - 1))
    weights[:, -1] = 0
    return MaskDistribution(labels, weights, torch.rand(2, 16, 16, generator=g) < 0.9)


def from_loader(masks: MaskDistribution, classes: int) -> RegionMasks:
    """As a batch of the loader has them, on the meta device."""
    made = RegionMasks.of(partition(masks, classes), masks.spatial, masks.weights, masks.valid)
    return Batch(torch.zeros(2, 1, 16, 16), made, ("a", "b"), ("a", "b")).to("meta").annotations


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_and_draws_need_no_value(name):
    settings: dict[str, Any] = {"classes": 3, "experts": 4, "samples": 2, **SETTINGS[name]}
    moving: dict[str, Any] = MOVING if name == "schedules" else {}
    classes = settings["classes"]
    model = MoSE(in_channels=1, backbone="unet-light", **settings).to("meta")
    images, masks = torch.zeros(2, 1, 16, 16, device="meta"), drawn_by_readers(classes)
    for given in (from_loader(masks, classes), masks.to("meta")):
        terms = model.loss(images, given, **moving)
        terms["total"].backward()
        assert all(p.grad is not None for p in model.experts.parameters())
    predictive = model.predict(images)
    assert predictive.sample(3).labels.shape == (2, 3, 16, 16)
    assert predictive.compact(2).labels.shape == (2, 8, 16, 16)
    assert predictive.marginal(3).shape == (2, classes, 16, 16)
    assert predictive.centres().shape == (2, 4, 16, 16)


def test_only_the_exact_solver_waits():
    """It is of POT and on the CPU, and fetches the costs; a cost of one's own needs no value either."""

    def mine(logits, masks):
        return logits.mean((2, 3, 4))[..., None].expand(-1, -1, masks.count)

    model = MoSE(1, 3, backbone="unet-light", cost=mine).to("meta")
    images, masks = torch.zeros(2, 1, 16, 16, device="meta"), from_loader(drawn_by_readers(3), 3)
    model.loss(images, masks)["total"].backward()
    with pytest.raises(NotImplementedError, match="meta tensor"):
        couple(torch.zeros(1, 4, 3, device="meta"), torch.zeros(1, 3, device="meta"), 0.5, "exact")


@pytest.mark.parametrize("inject", [1.0, 0.5])  # features that are stitched, and draws that are blended
def test_windows_need_no_value(inject):
    model = MoSE(1, 2, backbone="unet-light", experts=2, inject_level=inject).to("meta")
    image = torch.zeros(1, 1, 64, 200, device="meta")
    windows = plan((64, 200), model.multiple, 128, 64)
    assert windows is not None
    assert model.predict_windows(image, windows).sample(2).labels.shape == (1, 2, 64, 200)


def test_distances_need_no_value():
    drawn = MaskDistribution(torch.zeros(2, 4, 16, 16, dtype=torch.uint8, device="meta"))
    for truth in (from_loader(drawn_by_readers(3), 3), drawn_by_readers(3).to("meta")):
        pair = metrics.compare(drawn, truth, (1, 2))
        assert pair.ged(unbiased="both").shape == pair.diversity().shape == pair.truth_diversity().shape == (2,)


def test_regions_are_waited_for_once_and_only_if_there_may_be_many(monkeypatch):
    """Without looking, there are as many regions as there may be; those that do not occur are empty."""
    few, many = drawn_by_readers(3), drawn_by_readers(3, readers=6)
    assert partition(few.to("meta"), 3).count == 27
    with pytest.raises(RuntimeError, match="meta"):
        partition(many.to("meta"), 3)
    expected = [partition(few, 3), partition(many, 3)]
    monkeypatch.setattr(regions, "_looks", lambda labels: False)
    for masks, there in zip((few, many), expected, strict=True):
        found = partition(masks, 3)
        assert torch.equal(found.size[:, : there.count], there.size)
        assert int(found.size[:, there.count :].sum()) == 0
        assert torch.equal(found.labels[..., : there.count], there.labels)
        assert torch.equal(found.index == found.count, there.index == there.count)
        assert torch.equal(found.index[found.index < found.count], there.index[there.index < there.count])
    assert partition(many, 3).count == expected[1].count


@pytest.mark.parametrize(("kind", "expected"), [("cuda", True), ("cpu", False), ("mps", False)])
def test_batches_travel_while_a_gpu_computes(kind, expected):
    """Lightning itself sends what is not a plain tensor and waits for its arrival."""
    sent = []
    batch = SimpleNamespace(to=lambda device, non_blocking: sent.append((device.type, non_blocking)))
    DataModule.transfer_batch_to_device(None, batch, torch.device(kind), 0)  # type: ignore[arg-type]
    assert sent == [(kind, expected)]
