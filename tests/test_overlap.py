from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution, bits, overlap, pairwise_iou
from ambiseg.overlap import COSTS, ce_cost, ce_from_sums, iou_cost, iou_from_sums, joint_iou, joint_overlap
from ambiseg.regions import RegionMasks, partition
from tests import reference

# -- hard masks ----------------------------------------------------------------------------------------------


def test_hand_case():
    a = torch.tensor([[[[1, 1, 0, 0]], [[0, 0, 0, 0]]]])
    b = torch.tensor([[[[1, 0, 0, 0]], [[0, 0, 0, 0]]]])
    assert pairwise_iou(a, b).tolist() == [[[0.5, 0.0], [0.0, 1.0]]]
    skipped = pairwise_iou(a, b, absent="skip")
    assert skipped[0, :, 0].tolist() == [0.5, 0.0]
    assert math.isnan(skipped[0, 1, 1])


def test_mean_over_classes_skips_or_counts_absent_ones():
    a, b = torch.tensor([[[[1, 1, 2, 0]]]]), torch.tensor([[[[1, 0, 2, 0]]]])  # IoU: class 1 1/2, class 2 1, class 3 -
    assert pairwise_iou(a, b, (1, 2, 3), "skip").item() == pytest.approx((0.5 + 1) / 2)
    assert pairwise_iou(a, b, (1, 2, 3), "agree").item() == pytest.approx((0.5 + 1 + 1) / 3)


@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([(1,), (1, 2), (0, 3, 5)]),
    st.sampled_from(["agree", "skip"]),
    st.sampled_from([(1, 1), (3, 5), (9, 8), (2, 3, 4)]),
)
def test_equals_counting_pixels_one_by_one(seed, sizes, classes, absent, spatial):
    g = torch.Generator().manual_seed(seed)
    B, N, M = sizes
    a, b = (torch.randint(4, (B, n, *spatial), generator=g) for n in (N, M))
    va, vb = (torch.rand(B, *spatial, generator=g) < 0.7 for _ in range(2))
    found = pairwise_iou(MaskDistribution(a, valid=va), MaskDistribution(b, valid=vb), classes, absent)
    expected = [
        [[reference.iou(x.numpy(), y.numpy(), classes, absent, (va[k] & vb[k]).numpy()) for y in b[k]] for x in a[k]]
        for k in range(B)
    ]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5))
def test_joint_iou_is_every_block_at_once(seed, N, M):
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(3, (2, n, 9, 9), generator=g) for n in (N, M))
    joint = joint_iou(a, b, (1, 2))
    assert torch.equal(joint[:, :N, N:], pairwise_iou(a, b, (1, 2)))
    assert torch.equal(joint[:, N:, N:], pairwise_iou(b, b, (1, 2)))
    assert torch.equal(joint, joint.transpose(1, 2))
    assert torch.equal(joint.diagonal(dim1=1, dim2=2), torch.ones(2, N + M, dtype=torch.float64))


@pytest.mark.parametrize("cached", [1, 64, 2**16])
def test_blocks_of_any_size_count_the_same(monkeypatch, cached):
    a, b = torch.randint(2, (5, 7, 30, 31)), torch.randint(2, (5, 3, 30, 31))
    expected = joint_iou(a, b)
    monkeypatch.setattr(bits, "_CACHED", cached)
    assert torch.equal(joint_iou(a, b), expected)
    assert torch.equal(pairwise_iou(a, b), expected[:, :7, 7:])


def test_more_pixels_than_the_narrow_counter_holds():
    for size in (256, 300):  # 2**16 pixels and more: one beyond what uint16 can count
        masks = torch.ones(1, 2, size, size, dtype=torch.uint8)
        masks[0, 1, 0, 0] = 0
        assert pairwise_iou(masks, masks)[0, 0].tolist() == [1.0, 1 - 1 / size**2]


def test_dot_products_of_accelerators_count_like_bits(monkeypatch):
    a = MaskDistribution(torch.randint(3, (3, 5, 11, 13)), valid=torch.rand(3, 11, 13) < 0.7)
    b = torch.randint(3, (3, 4, 11, 13))
    expected = joint_iou(a, b, (1, 2))
    for module in (bits, overlap):
        monkeypatch.setattr(module, "packs", lambda labels: False)
    assert torch.equal(joint_iou(a, b, (1, 2)), expected)


@pytest.mark.parametrize(
    ("readers", "spatial", "by_region"),
    [(3, (60, 71), True), (3, (4, 40, 33), True), (12, (40, 40), False)],  # the last: nearly a region for each pixel
)
@pytest.mark.parametrize("void", [None, "truth", "both", "everything"])
@pytest.mark.parametrize("absent", ["agree", "skip"])
def test_overlaps_from_regions_are_those_of_pixels(readers, spatial, by_region, void, absent):
    g = torch.Generator().manual_seed(0)
    share = {"everything": 0.0}.get(void or "", 0.7)
    valid = None if void is None else torch.rand(2, *spatial, generator=g) < share
    own = torch.rand(2, *spatial, generator=g) < 0.7 if void == "both" else None
    a = MaskDistribution(torch.randint(3, (2, 5, *spatial), generator=g, dtype=torch.uint8), valid=own)
    b = MaskDistribution(torch.randint(3, (2, readers, *spatial), generator=g), valid=valid)
    known = RegionMasks.of(partition(b, 3), spatial, valid=valid)
    assert (overlap._by_region(a, known, [1], overlap.common_valid(a, b)) is not None) == (
        by_region or void == "everything"
    )
    found, expected = (joint_overlap(a, x, (1, 2), absent) for x in (known, b))
    assert "labels" not in vars(known) or not by_region
    assert torch.equal(found.iou.nan_to_num(nan=9), expected.iou.nan_to_num(nan=9))
    assert torch.equal(found.marked, expected.marked)
    within = pairwise_iou(known, known, (1, 2), absent)
    assert torch.equal(within.nan_to_num(nan=9), pairwise_iou(b, b, (1, 2), absent).nan_to_num(nan=9))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1), (2, 0, 3, 1)])
def test_any_memory_layout_counts_the_same(order):
    """Readers last, [H, W, N], is how LIDC circulates in HDF5."""
    masks = torch.randint(2, (1, 4, 9, 17))
    inverse = [order.index(d) for d in range(4)]
    strided = masks.permute(order).contiguous().permute(inverse)
    assert torch.equal(pairwise_iou(strided, strided), pairwise_iou(masks, masks))
    assert torch.equal(pairwise_iou(strided.numpy(), masks), pairwise_iou(masks, masks))


@pytest.mark.parametrize(
    ("a", "b", "kwargs", "message"),
    [
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(2, 1, 2, 2).long(), {}, "same images, found 1 .* and 2"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 3).long(), {}, r"same size, found \(2, 2\) .* \(2, 3\)"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2, 2).long(), {}, "same size"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"classes": ()}, "at least one class"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"classes": (-1,)}, "at least 0"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"classes": (1, 1)}, "distinct"),
        (
            torch.zeros(1, 1, 2, 2).long(),
            torch.zeros(1, 1, 2, 2).long(),
            {"classes": 1},
            "sequence of integer class ids",
        ),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"classes": (1.5,)}, "sequence of integer"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"classes": "12"}, "sequence of integer"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long().to("meta"), {}, "same device"),
        (torch.zeros(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long(), {"absent": "maybe"}, "one of agree, skip"),
    ],
)
def test_bad_pairs_are_refused(a, b, kwargs, message):
    with pytest.raises(ValueError, match=message):
        pairwise_iou(a, b, **kwargs)


# -- soft costs ----------------------------------------------------------------------------------------------


def problem(seed: int, B=2, N=3, M=2, C=3, spatial=(4, 3), dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, N, C, *spatial, generator=g, dtype=dtype) * 3
    labels = torch.randint(C, (B, M, *spatial), generator=g)
    return logits, MaskDistribution(labels, valid=torch.rand(B, *spatial, generator=g) < 0.7)


@pytest.mark.parametrize("name", ["iou", "ce"])
@given(
    seed=st.integers(0, 10**6), C=st.integers(2, 5), M=st.integers(1, 4), spatial=st.sampled_from([(4, 3), (2, 3, 2)])
)
def test_costs_equal_their_definition(name, seed, C, M, spatial):
    logits, annotations = problem(seed, C=C, M=M, spatial=spatial)
    assert annotations.valid is not None
    slow = {"iou": reference.iou_cost, "ce": reference.ce_cost}[name]
    expected = [
        [[slow(s.numpy(), y.numpy(), v.numpy()) for y in ys] for s in ss]
        for ss, ys, v in zip(logits, annotations.labels, annotations.valid, strict=True)
    ]
    assert np.allclose(COSTS[name](logits, annotations).numpy(), expected)


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_gradients_are_those_of_the_naive_definition(name):
    logits, annotations = problem(7)
    assert annotations.valid is not None
    logits.requires_grad_()
    weights = torch.randn(2, 3, 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad((COSTS[name](logits, annotations) * weights).sum(), logits)

    truth = torch.nn.functional.one_hot(annotations.labels, 3).movedim(-1, 2).double()  # [B, M, C, *S]
    keep = annotations.valid[:, None, None, None]
    if name == "ce":
        picked = -(logits.log_softmax(2)[:, :, None] * truth[:, None] * keep).sum((3, 4, 5))
        naive = picked / annotations.valid.flatten(1).sum(1)[:, None, None]
    else:
        s, y = (logits.softmax(2)[:, :, None] * keep)[:, :, :, 1:], (truth[:, None] * keep)[:, :, :, 1:]
        i, total = (s * y).sum((4, 5)), s.sum((4, 5)) + y.sum((4, 5))
        naive = 1 - ((i + 1) / (total - i + 1)).mean(3)
    (expected,) = torch.autograd.grad((naive * weights).sum(), logits)
    assert torch.allclose(grad, expected)
    assert grad.abs().sum() > 0
    assert torch.autograd.gradcheck(lambda x: COSTS[name](x, annotations), (logits,))


@pytest.mark.parametrize(("name", "cost"), [("lidc", iou_cost), ("city", ce_cost)])
def test_golden_costs_of_the_released_code(golden, name, cost):
    annotations = golden(f"{name}_annotations")
    valid = torch.ones(len(annotations), *annotations.shape[2:], dtype=torch.bool)
    valid[:, 0, 0] = name == "lidc"  # the released cross-entropy drops the first pixel
    found = cost(golden(f"{name}_logits"), MaskDistribution(annotations, valid=valid))
    assert torch.allclose(found, golden(f"{name}_cost"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_probabilities_and_logits_give_the_same_cost(name):
    logits, annotations = problem(11)
    from_logits, from_probs = COSTS[name](logits, annotations), COSTS[name](logits.softmax(2), annotations, probs=True)
    assert torch.allclose(from_logits, from_probs)


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_large_images_keep_their_digits(name):
    logits, annotations = problem(17, B=1, N=1, M=2, spatial=(512, 512))
    found = COSTS[name](logits.float(), annotations)
    assert torch.allclose(found.double(), COSTS[name](logits, annotations), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_half_precision_neither_overflows_nor_rounds_the_sums(name):
    logits, annotations = problem(19, B=1, N=2, spatial=(300, 300), dtype=torch.float32)
    expected = COSTS[name](logits, annotations)
    assert torch.allclose(COSTS[name](logits.half(), annotations), expected, atol=2e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(COSTS[name](logits, annotations), expected)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.3, 7.0])])
def test_sums_keep_their_digits_under_autocast(weights):
    """The fused loss has sums over regions, whose cost it asks for while autocast is on."""
    logits, annotations = problem(21, B=2, N=5, spatial=(40, 50), dtype=torch.float32)
    classes = logits.shape[2]
    regions = partition(annotations.labels, classes)
    sums, said = regions.sum(logits.softmax(2).flatten(3)), regions.one_hot(classes, torch.float32)
    asked = [lambda: ce_from_sums(sums, said, regions, weights)]
    asked += [lambda: iou_from_sums(sums[:, :, 1:], said[:, :, 1:], regions)]
    for cost in asked:
        expected = cost()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(cost(), expected)


def test_a_class_ruled_out_by_minus_infinity_costs_nothing_where_nobody_marked_it():
    logits = torch.randn(1, 1, 3, 4, 4)
    logits[:, :, 2] = -math.inf
    labels = torch.randint(2, (1, 1, 4, 4))
    assert ce_cost(logits, labels).item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits[0], labels[0]).item()
    )


def test_regions_of_other_annotations_are_refused():
    logits, annotations = problem(3)
    with pytest.raises(ValueError, match="regions must be those of the 2 annotations of 12 pixels, found 1 of 12"):
        ce_cost(logits, annotations, regions=partition(annotations.labels[:, :1], 3))


def test_certain_mistakes_cost_much_but_stay_finite():
    probs = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1, 1).requires_grad_()
    cost = ce_cost(probs, torch.ones(1, 1, 1, 1, dtype=torch.long), probs=True)
    assert 80 < cost.item() < math.inf


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_ready_made_regions_change_nothing(name):
    logits, annotations = problem(3)
    assert torch.equal(
        COSTS[name](logits, annotations, regions=partition(annotations, 3)), COSTS[name](logits, annotations)
    )


@pytest.mark.parametrize("name", ["iou", "ce"])
def test_an_image_without_valid_pixels_costs_nothing(name):
    logits, annotations = problem(5)
    nothing = MaskDistribution(annotations.labels, valid=torch.zeros(2, 4, 3, dtype=torch.bool))
    logits.requires_grad_()
    cost = COSTS[name](logits, nothing)
    assert torch.equal(cost, torch.zeros_like(cost))
    (grad,) = torch.autograd.grad(cost.sum(), logits)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_empty_prediction_of_an_empty_annotation_is_free():
    background = torch.stack([torch.full((4, 4), 60.0), torch.full((4, 4), -60.0)]).view(1, 1, 2, 4, 4)
    assert iou_cost(background, torch.zeros(1, 1, 4, 4, dtype=torch.long)).item() == pytest.approx(0.0, abs=1e-6)
    one_pixel = torch.zeros(1, 1, 4, 4, dtype=torch.long)
    one_pixel[..., 0, 0] = 1
    assert iou_cost(background, one_pixel).item() == pytest.approx(0.5)


def test_iou_cost_of_chosen_classes():
    logits, annotations = problem(13, C=4)
    one, three = (iou_cost(logits, annotations, classes=(c,)) for c in (1, 3))
    assert torch.allclose(iou_cost(logits, annotations, classes=(1, 3)), (one + three) / 2)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (
            torch.zeros(1, 2, 3, 4),
            torch.zeros(1, 1, 4, 4).long(),
            r"\[B, N, C, \*spatial\] .* found shape \[1, 2, 3, 4\]",
        ),
        (torch.zeros(1, 2, 3, 4, 4).long(), torch.zeros(1, 1, 4, 4).long(), "floating point, found torch.int64"),
        (torch.zeros(2, 2, 3, 4, 4), torch.zeros(1, 1, 4, 4).long(), "same images, found 1 in annotations and 2"),
        (torch.zeros(1, 2, 3, 4, 5), torch.zeros(1, 1, 4, 4).long(), "same size"),
        (torch.zeros(1, 0, 3, 4, 4), torch.zeros(1, 1, 4, 4).long(), "at least one sample"),
        (torch.zeros(1, 2, 3, 4, 4), torch.full((1, 1, 4, 4), 3), "below classes=3, found 3"),
    ],
)
@pytest.mark.parametrize("cost", [iou_cost, ce_cost])
def test_bad_cost_inputs_are_refused(cost, logits, labels, message):
    with pytest.raises(ValueError, match=message):
        cost(logits, labels)


def test_a_single_class_has_no_foreground():
    with pytest.raises(ValueError, match="at least one foreground class"):
        iou_cost(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 2, 2).long())
    with pytest.raises(ValueError, match="at least 0 and below 2, found"):
        iou_cost(torch.zeros(1, 1, 2, 2, 2), torch.zeros(1, 1, 2, 2).long(), classes=(2,))
