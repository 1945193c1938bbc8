from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution
from ambiseg.nn import PixelHead, ReleasedHead, pixelhead
from ambiseg.nn.pixelhead import (
    Folded,
    _first_of_greatest,
    as_rows,
    draw_masks,
    mean_softmax,
    pixel_logits,
    region_sums,
)
from ambiseg.regions import partition


def problem(seed=0, B=2, N=4, C=3, F=5, L=2, hidden=6, size=(4, 5), dtype=torch.float64):
    torch.manual_seed(seed)
    head = PixelHead(F, L, C, hidden).to(dtype)
    for parameter in head.parameters():  # away from the kink that zero biases put at dead units
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    dense, latents = torch.randn(B, F, *size, dtype=dtype), torch.randn(B, N, L, dtype=dtype)
    valid = torch.rand(B, *size) < 0.8
    return head, dense, latents, MaskDistribution(torch.randint(C, (B, 3, *size)), valid=valid)


def plain_sums(head, dense, latents, annotations, log):
    regions = partition(annotations, head.layers[-1].out_features)
    logits = head(dense, latents)
    return regions.sum((logits.log_softmax(2) if log else logits.softmax(2)).flatten(3))


@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 5), st.integers(1, 6), st.integers(1, 3)),
    st.sampled_from([None, 1, 7, 1000]),
)
def test_tiles_give_the_logits_of_the_plain_path(seed, sizes, tile):
    B, N, C, F, L = sizes
    head, dense, latents, _ = problem(seed, B, N, C, F, L)
    found = pixel_logits(as_rows(dense), head.fold(latents), tile).unflatten(3, (4, 5))
    assert torch.allclose(found, head(dense, latents))


@pytest.mark.parametrize("C", [2, 3, 7])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("tile", [None, 3])
def test_region_sums_and_all_their_gradients_are_those_of_the_plain_path(C, log, tile):
    head, dense, latents, annotations = problem(1, C=C)
    inputs = [dense.requires_grad_(), latents.requires_grad_(), *head.parameters()]
    regions = partition(annotations, C)
    fused, labels, _ = region_sums(as_rows(dense), head.fold(latents), regions, log=log, tile=tile)
    plain = plain_sums(head, dense, latents, annotations, log)
    assert labels is None
    assert torch.allclose(fused, plain)
    weights = torch.randn_like(plain)
    found = torch.autograd.grad((fused * weights).sum(), inputs)
    expected = torch.autograd.grad((plain * weights).sum(), inputs)
    for g, e in zip(found, expected, strict=True):
        assert torch.allclose(g, e)
        assert g.abs().sum() > 0


@pytest.mark.parametrize("C", [2, 3])
@pytest.mark.parametrize("log", [False, True])
def test_samples_without_gradient_are_left_out_and_change_nothing(C, log, monkeypatch):
    """A coupling reaches few samples; of the others, and of an image that none is reached in, gradients are 0."""
    head, dense, latents, annotations = problem(9, B=3, N=5, C=C)
    inputs = [dense.requires_grad_(), latents.requires_grad_(), *head.parameters()]
    regions = partition(annotations, C)
    weights = torch.randn(3, 5, C, regions.count, dtype=torch.float64)
    weights[0, [1, 3]] = 0
    weights[1] = 0

    def gradients():
        sums = region_sums(as_rows(dense), head.fold(latents), regions, log=log, tile=7)[0]
        return torch.autograd.grad((sums * weights).sum(), inputs)

    found = gradients()
    assert found[1][0, [1, 3]].abs().sum() == found[1][1].abs().sum() == found[0][1].abs().sum() == 0
    expected = torch.autograd.grad((plain_sums(head, dense, latents, annotations, log) * weights).sum(), inputs)
    monkeypatch.setattr(pixelhead, "_active", lambda grad: None)
    for g, e, everyone in zip(found, expected, gradients(), strict=True):
        assert torch.allclose(g, e)
        assert torch.allclose(g, everyone)


@pytest.mark.parametrize("C", [2, 3])
@pytest.mark.parametrize("log", [False, True])
def test_gradcheck_in_double_precision(C, log):
    head, dense, latents, annotations = problem(2, B=1, N=2, C=C, F=3, hidden=3, size=(2, 3))
    regions = partition(annotations, C)
    folded = head.fold(latents.detach())
    tensors = [as_rows(dense), folded.weight, folded.bias, *(t for pair in folded.rest for t in pair)]
    tensors = [t.detach().clone().requires_grad_() for t in tensors]

    def rebuild(*ts):
        return ts[0], Folded(ts[1], ts[2], ((ts[3], ts[4]), (ts[5], ts[6])))

    assert torch.autograd.gradcheck(lambda *ts: region_sums(*rebuild(*ts), regions, log=log, tile=2)[0], tensors)
    assert torch.autograd.gradcheck(lambda *ts: pixel_logits(*rebuild(*ts), tile=2), tensors)


def test_more_regions_than_pixels_in_a_tile():
    head, dense, latents, _ = problem(10, B=2, size=(12, 12))
    annotations = MaskDistribution(torch.randint(3, (2, 6, 12, 12)))  # nearly every pixel a region of its own
    for log in (False, True):
        fused = region_sums(as_rows(dense), head.fold(latents), partition(annotations, 3), log=log, tile=10)[0]
        assert torch.allclose(fused, plain_sums(head, dense, latents, annotations, log))


def test_float32_agrees_to_1e_5():
    head, dense, latents, annotations = problem(3, F=32, hidden=32, N=8, size=(16, 16), dtype=torch.float32)
    regions = partition(annotations, 3)
    for log in (False, True):
        fused = region_sums(as_rows(dense), head.fold(latents), regions, log=log)[0]
        plain = plain_sums(head, dense, latents, annotations, log)
        assert torch.allclose(fused, plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    logits = pixel_logits(as_rows(dense), head.fold(latents)).unflatten(3, (16, 16))
    assert torch.allclose(logits, head(dense, latents), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("C", [2, 4])
@pytest.mark.parametrize("log", [False, True])
def test_modes_are_the_argmax_of_each_experts_mean_output(C, log):
    head, dense, latents, annotations = problem(4, N=6, C=C)
    _, modes, _ = region_sums(as_rows(dense), head.fold(latents), partition(annotations, C), log=log, experts=3, tile=7)
    mean = head(dense, latents).softmax(2).unflatten(1, (3, 2)).mean(2)
    assert modes is not None
    assert torch.equal(modes.unflatten(2, (4, 5)).long(), mean.argmax(2))


@pytest.mark.parametrize("C", [2, 4, 300])
def test_masks_and_marginals_are_those_of_the_logits(C):
    head, dense, latents, _ = problem(5, N=5, C=C)
    weights = torch.rand(2, 5, dtype=torch.float64).softmax(1)
    labels, marginal = draw_masks(as_rows(dense), head.fold(latents), weights, tile=6)
    logits = head(dense, latents)
    assert torch.equal(labels.unflatten(2, (4, 5)).long(), logits.argmax(2))
    expected = (weights[:, :, None, None, None] * logits.softmax(2)).sum(1)
    assert torch.allclose(marginal.unflatten(2, (4, 5)), expected)
    assert torch.equal(mean_softmax(as_rows(dense), head.fold(latents), weights, tile=6), marginal)


@pytest.mark.parametrize("C", [3, 25, 255, 256])
def test_of_equal_scores_the_first_class_is_drawn(C):
    scores = torch.randint(3, (C, 50), generator=torch.Generator().manual_seed(0)).float() - 1
    assert torch.equal(_first_of_greatest(scores).long(), scores.argmax(0))


@pytest.mark.parametrize("log", [False, True], ids=["iou", "ce"])
@pytest.mark.parametrize(
    "shape",
    [{"C": 2, "F": 16, "N": 16, "size": (16, 16)}, {"C": 25, "F": 32, "N": 6, "size": (8, 24)}, {"B": 1, "N": 1}],
    ids=["two classes", "many classes", "one sample"],
)
def test_bfloat16_products_are_close_in_sums_and_in_all_gradients(shape, log):
    """Relative differences in the norm: a rounding of 2⁻⁹ per layer, and no more where thousands are added up."""
    given = {"hidden": 32, "size": (12, 12), "C": 3, **shape}
    head, dense, latents, annotations = problem(6, dtype=torch.float32, **given)
    inputs = [dense.requires_grad_(), latents.requires_grad_(), *head.parameters()]
    regions = partition(annotations, given["C"])

    def sums_and_gradients():
        sums = region_sums(as_rows(dense), head.fold(latents), regions, log=log)[0]
        weights = torch.linspace(-1, 2, sums.numel()).view_as(sums)
        return [sums, *torch.autograd.grad((sums * weights).sum(), inputs)]

    expected = sums_and_gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sums_and_gradients()
    bounds = [0.01, 0.06, *[0.03] * (len(inputs) - 1)]  # sums, pixels one by one, parameters
    for bound, ours, wide in zip(bounds, found, expected, strict=True):
        assert ours.dtype == torch.float32
        difference = float(((ours - wide).norm() / wide.norm()).detach())
        assert 0 < difference < bound


def test_what_is_not_finite_is_not_hidden_by_bfloat16():
    head, dense, latents, annotations = problem(6, dtype=torch.float32)
    first = dict(head.named_parameters())["layers.0.weight"]
    for broken in (dense, first.data):
        kept = float(broken.flatten()[3])
        for value in (-torch.nan, torch.nan, torch.inf):
            broken.view(-1)[3] = value
            with torch.autocast("cpu", dtype=torch.bfloat16):
                sums = region_sums(as_rows(dense), head.fold(latents), partition(annotations, 3))[0]
            assert sums.isnan().any()
        broken.view(-1)[3] = kept


def test_logits_never_exist_in_training():
    """The largest tensor alive between forward and backward is smaller than [N, C, P] logits."""
    head, dense, latents, annotations = problem(7, B=1, N=16, C=8, F=4, hidden=4, size=(32, 32))
    regions = partition(annotations, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        region_sums(as_rows(dense.requires_grad_()), head.fold(latents), regions)[0].sum().backward()
    assert max(kept) < 16 * 8 * 32 * 32 / 4


def test_the_plain_path_exports_without_the_fused_functions():
    head, dense, latents, _ = problem(8, dtype=torch.float32)
    exported = torch.export.export(head, (dense, latents))
    assert torch.allclose(exported.module()(dense, latents), head(dense, latents), atol=1e-5)


# -- the released head ---------------------------------------------------------------------------------------


def released():
    torch.manual_seed(0)
    head = ReleasedHead(6, latent=2, classes=3).double()
    dense, latents = torch.randn(2, 6, 5, 5, dtype=torch.float64), torch.randn(2, 4, 2, dtype=torch.float64)
    for _ in range(3):
        head(dense * 2 + 1, latents)  # running statistics that are not 0 and 1
    return head, dense, latents


def test_released_head_folds_in_evaluation_only():
    head, dense, latents = released()
    assert not head.foldable
    with pytest.raises(RuntimeError, match="in evaluation only"):
        head.fold(latents)
    head.eval()
    assert head.foldable
    found = pixel_logits(as_rows(dense), head.fold(latents)).unflatten(3, (5, 5))
    assert torch.allclose(found, head(dense, latents))


def test_released_head_ties_samples_together_in_training_only():
    head, dense, latents = released()
    alone = head(dense, latents[:, :1])
    assert not torch.allclose(alone, head(dense, latents)[:, :1])
    head.eval()
    assert torch.allclose(head(dense, latents[:, :1]), head(dense, latents)[:, :1])
