"""Large images: features by windows, one gate, one draw, and no seams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ambiseg import MoSE
from ambiseg._util.errors import DataError
from ambiseg.data.sets.shapes import Shapes
from ambiseg.nn import Adapter, DeepLabV3Plus, Experts, Gate, UNet, windows
from ambiseg.nn.features import Features
from ambiseg.nn.windows import blended, cuts, plan, stitched, tiles
from ambiseg.prediction import Options, Predictor, predict
from ambiseg.prediction.inputs import array_source
from ambiseg.runs import load
from tests.drop_ins import Latent, TwoHeads
from tests.test_prediction import dropped_in, fresh


@pytest.fixture(scope="module")
def mosaic() -> np.ndarray:
    """``[1, 192, 224]``: many shapes side by side, cut where windows will not be."""
    shapes = Shapes(count=60, size=32)
    rows = [np.concatenate([shapes[8 * r + c].image[0] for c in range(8)], 1) for r in range(7)]
    return np.concatenate(rows, 0)[None, 13 : 13 + 192, 9 : 9 + 224]


def both(backbone, image: Tensor, window: int, overlap: int) -> tuple[Features, Features]:
    """Features of the whole image, and by windows."""
    planned = plan((image.shape[2], image.shape[3]), backbone.multiple, window, overlap)
    assert planned is not None
    with torch.no_grad():
        return backbone(image), stitched(backbone, image, planned)


@given(
    length=st.integers(1, 60),
    window=st.integers(1, 30),
    overlap=st.integers(0, 15),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_windows_are_a_partition_of_unity(length, window, overlap, multiple):
    overlap, length = min(overlap, window // 2), length * multiple
    total, seen = torch.zeros(length), 0
    for at, weights in cuts(length, window, overlap, multiple):
        assert at % multiple == 0
        assert at + len(weights) <= length
        assert (weights >= 0).all()
        quarter = overlap // 4
        assert at == 0 or (weights[:quarter] == 0).all()
        assert at + len(weights) == length or (weights[len(weights) - quarter :] == 0).all()
        total[at : at + len(weights)] += weights
        assert at <= seen  # no gap
        seen = at + len(weights)
    assert seen == length
    assert torch.allclose(total, torch.ones(length))


def reach(backbone: UNet, size: int = 96) -> int:
    """How far a pixel is seen."""
    image = torch.zeros(1, 1, size, size)
    moved = image.clone()
    moved[0, 0, size // 2, size // 2] = 50
    with torch.no_grad():
        change = (backbone(moved).dense - backbone(image).dense).abs().amax((0, 1))
    return int((change.nonzero() - size // 2).abs().max())


@pytest.mark.parametrize("size", [(150, 203), (64, 230), (331, 40)])
def test_with_enough_overlap_features_are_those_of_the_whole_image(size):
    backbone, image = UNet(1, (4, 8)).eval(), torch.rand(1, 1, *size)
    assert 8 < reach(backbone) <= 16
    whole, parts = both(backbone, image, window=128, overlap=64)  # the outer 16 of an overlap count nothing
    assert parts.dense.shape == whole.dense.shape
    assert torch.allclose(parts.dense, whole.dense, atol=1e-5)
    assert torch.allclose(parts.gate.mean((2, 3)), whole.gate.mean((2, 3)), atol=1e-5)
    whole, parts = both(backbone, image, window=128, overlap=8)  # less than it sees: the borders of windows show
    assert not torch.allclose(parts.dense, whole.dense, atol=1e-2)


@pytest.mark.parametrize("pooling", ["average", "attention", "both"])
@pytest.mark.parametrize("scales", [1, "all"])
def test_gates_of_every_kind_weigh_windows_as_they_weigh_the_whole_image(pooling, scales):
    torch.manual_seed(0)
    model = MoSE(1, 2, UNet(1, (4, 8), gate_scales=scales), gate_pooling=pooling).eval()
    for name, weights in model.gate.named_parameters():
        if "scores" in name:
            torch.nn.init.normal_(weights, std=3.0)
    image = torch.rand(1, 1, 150, 203)
    image[..., :40] *= 4  # what is looked at is in one place
    planned = plan((150, 203), model.backbone.multiple, 128, 64)
    assert planned is not None
    whole, parts = model.predict(image), model.predict_windows(image, planned)
    assert torch.allclose(whole.weights, parts.weights, atol=1e-5)  # type: ignore[attr-defined]
    mean = model.gate.of(
        whole.features.gate.mean((2, 3)).repeat(1, model.gate.pooling.out_channels // model.backbone.gate_channels)
    )
    assert torch.allclose(mean, whole.weights, atol=1e-3) == (pooling == "average")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masks_have_no_seams(tiny_run, mosaic):
    model = load(tiny_run)
    whole, parts = (predict(model, mosaic, merge=False, window=window)[0] for window in (0, 64))
    assert (whole.windows, parts.windows) == (1, 20)  # 64 pixels, of which 16 overlap: 4 down and 5 across
    for mine, theirs in zip(parts.draws, whole.draws, strict=True):
        assert mine.stratum == theirs.stratum
    drawn = [one.masks.labels[0, [draw.mask for draw in one.draws]] for one in (whole, parts)]
    assert (drawn[0] != drawn[1]).float().mean() < 0.002
    assert drawn[0].float().std() > 0.1  # there is something to disagree about
    assert whole.strata is not None
    assert parts.strata is not None
    assert torch.allclose(whole.strata.weights, parts.strata.weights, atol=1e-3)
    # Where one window gives way to the next, masks change from a pixel to its neighbour as often as they do anyway.
    seams = [at for at in (*range(48, 192, 48), *range(64, 224, 48)) if at < 190]
    for axis in (1, 2):
        jumps = [(one.diff(dim=axis) != 0).float().mean(tuple({0, 1, 2} - {axis}))[seams].mean() for one in drawn]
        assert abs(jumps[1] / jumps[0] - 1) < 0.05


def test_features_fade_from_window_to_window():
    backbone, image = UNet(1, (8, 16, 16, 16)).eval(), torch.rand(1, 1, 64, 320)
    assert reach(backbone) > 40  # far more than windows overlap
    starts = [cut.start for cut in plan((64, 320), backbone.multiple, 128, 32)[1]]  # type: ignore[index]
    assert starts == [0, 96, 192]

    def jump(features: Features, columns: list[int]) -> float:
        return float(features.dense.diff(dim=3).abs().mean((0, 1, 2))[columns].mean())

    whole, parts = both(backbone, image, 128, 32)
    blend = [start + c for start in starts[1:] for c in range(32)]
    assert jump(parts, blend) < 1.05 * jump(whole, blend)
    whole, parts = both(backbone, image, 128, 0)  # without overlap the seams are there
    cut = [127, 255]
    assert jump(parts, cut) > 1.5 * jump(whole, cut)


def test_one_gate_and_one_draw_for_all_windows(tiny_run, mosaic, monkeypatch):
    calls: dict[str, list[tuple[int, ...]]] = {"gate": [], "draw": [], "backbone": []}
    gate, draw, forward = Gate.of, Experts.of, UNet.forward

    def counted(name, function):
        def wrapped(self, x, *more):
            calls[name].append(tuple(x.shape))
            return function(self, x, *more)

        return wrapped

    monkeypatch.setattr(Gate, "of", counted("gate", gate))
    monkeypatch.setattr(Experts, "of", counted("draw", draw))
    monkeypatch.setattr(UNet, "forward", counted("backbone", forward))
    steps: list[tuple[int, int]] = []
    predictor = Predictor(tiny_run)
    source = array_source(mosaic.repeat(2, 1).repeat(4, 2)[:, :, :800], "large")
    monkeypatch.setattr(windows, "WHOLE", 300 * 800)
    monkeypatch.setattr(windows, "WINDOW", 256)
    one = predictor(source, progress=lambda done, total: steps.append((done, total)))
    assert one.windows == 2 * 4
    assert calls["backbone"] == [(1, 1, 256, 256)] * 8
    assert calls["gate"] == [(1, 16)]
    assert calls["draw"] == [(1, 16)]
    assert steps == [(i + 1, 8) for i in range(8)]
    assert one.masks.spatial == (384, 800)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("window", [64, 96])
def test_features_that_are_not_kept_are_made_again_part_by_part(tiny_run, mosaic, monkeypatch, window):
    steps: list[tuple[int, int]] = []
    source, options = array_source(mosaic[:, :190], "large"), Options(merge=False, window=window)
    kept = Predictor(tiny_run, options)(source)
    monkeypatch.setattr(windows, "_KEPT", 0)
    parts = Predictor(tiny_run, options)(source, progress=lambda done, total: steps.append((done, total)))
    assert torch.allclose(kept.masks.marginal, parts.masks.marginal, atol=1e-6)  # type: ignore[arg-type]
    assert (kept.masks.labels != parts.masks.labels).float().mean() < 1e-4
    assert parts.strata is not None
    assert kept.strata is not None
    assert torch.equal(kept.strata.weights, parts.strata.weights)
    assert (kept.strata.centres != parts.strata.centres).float().mean() < 1e-4
    assert steps[-1] == (2 * parts.windows, 2 * parts.windows)  # once for the gate, once for all masks


@given(height=st.integers(1, 40), width=st.integers(1, 40), window=st.integers(4, 20), multiple=st.sampled_from([1, 4]))
def test_blocks_cover_an_image_once_with_the_sums_of_all_windows(height, width, window, multiple):
    planned = plan((height, width), multiple, window, window // 2)
    if planned is None:
        return
    image = torch.rand(1, 3, height, width)
    parts = [(tile, torch.rand_like(tile.image[0])) for tile in tiles(image, planned, multiple)]
    expected, found, times = torch.zeros(3, height, width), torch.zeros(3, height, width), torch.zeros(height, width)
    for tile, maps in parts:
        values = tile.weighted(maps)
        expected[:, tile.y : tile.y + values.shape[1], tile.x : tile.x + values.shape[2]] += values
    for block in blended(parts, planned, (height, width)):
        found[block.place] = block.maps
        times[block.place] += 1
    assert (times == 1).all()
    assert torch.equal(found, expected)  # the same sums in the same order


def test_which_images_are_cut():
    multiple = MoSE(1, 2).multiple
    assert multiple == 64
    assert plan((1024, 1024), multiple, None, None) is None
    assert plan((4000, 4000), multiple, 0, None) is None
    assert plan((300, 200), multiple, 512, None) is None  # one window holds it
    planned = plan((2048, 2000), multiple, None, None)
    assert planned is not None
    assert [cut.start for cut in planned[0]] == [0, 384, 768, 1152, 1536]
    assert len(planned[0][0].weights) == 512
    with pytest.raises(DataError, match=r"^overlap: expected 0 to 256, half of the window, found 300"):
        plan((2048, 2048), multiple, 512, 300)


def early_noise():
    """Noise enters before the last features, so the rest of the decoder runs for every draw."""
    return fresh(classes=3, backbone=UNet(1, (4, 8), inject_level=0.5))


@pytest.mark.parametrize("made", [lambda: dropped_in(Latent), lambda: dropped_in(TwoHeads), fresh, early_noise])
def test_one_draw_is_coherent_over_all_windows_with_any_method(mosaic, made):
    model, image = made(), mosaic[:, :100, :203]
    whole, parts, apart = (predict(model, image, merge=False, window=w, overlap=o)[0] for w, o in WINDOWS)
    assert (whole.windows, parts.windows) == (1, 3)
    drawn = [one.masks.labels[0, [draw.mask for draw in one.draws]] for one in (whole, parts, apart)]
    assert len(drawn[0].unique(dim=0)) > 1
    # The outer 16 pixels of an overlap do not count, which is more than the network reaches.
    assert (drawn[0] != drawn[1]).float().mean() < 1e-4
    moved = 0.0  # gates that read windows one by one weigh strata slightly differently
    if whole.strata is not None and parts.strata is not None:
        moved = float((whole.strata.weights - parts.strata.weights).abs().sum())
        assert moved < 0.02
        assert (whole.strata.centres != parts.strata.centres).float().mean() < 1e-4
    assert torch.allclose(whole.masks.marginal, parts.masks.marginal, atol=moved + 1e-4)  # type: ignore[arg-type]
    assert not torch.equal(drawn[0], drawn[2])  # without overlap the borders of windows show


WINDOWS = (0, None), (128, 64), (64, 0)


@pytest.mark.parametrize("other", ["deeplab", "adapter"])
def test_other_backbones(other):
    backbone = (
        DeepLabV3Plus(1, depth=18, width=8)
        if other == "deeplab"
        else Adapter(torch.nn.Sequential(torch.nn.Conv2d(1, 6, 5, padding=2, stride=2)), dense=6)
    )
    image = torch.rand(1, 1, 150, 130)
    whole, parts = both(backbone.eval(), image, 128, 32)
    assert parts.dense.shape == whole.dense.shape
    assert parts.gate.shape == (1, backbone.gate_channels, 1, 1)
    assert torch.cosine_similarity(parts.gate.flatten(), whole.gate.mean((0, 2, 3)), 0) > 0.98
