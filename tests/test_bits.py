"""Pixels that masks share, equal masks, and what is computed of masks once."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution, bits, pairwise_iou
from ambiseg._util.distinct import distinct
from ambiseg.decisions.compaction import compact
from ambiseg.decisions.consensus import consensus_each
from ambiseg.decisions.looking import expected_disagreement
from ambiseg.decisions.measure import measure_all

RULES = ["marginal", "majority", "union", "intersection", "iou", "dice"]
PARTS = {
    "rules": lambda masks: [(x.labels, x.expected_iou, x.expected_dice) for x in consensus_each(masks, RULES).values()],
    "measures": lambda masks: [(x.values, x.weights) for x in measure_all(masks, (1, 2))],
    "three": lambda masks: [(x.masks.labels, x.masks.mass, x.loss, x.chosen, x.nearest) for x in [compact(masks, 3)]],
    "look": lambda masks: [(expected_disagreement(masks, (1, 2)),)],
    "iou": lambda masks: [(pairwise_iou(masks, masks), pairwise_iou(masks, masks, (0, 1), "skip"))],
}


def drawn(seed, classes, void=False, images=1):
    """Masks that are often equal, some of weight 0."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(classes, (images, 6, 7, 9), generator=g, dtype=torch.uint8)
    labels = torch.stack([kind[torch.randint(6, (12,), generator=g)] for kind in kinds])
    weights = (
        torch.rand(images, 12, generator=g) * (torch.rand(images, 12, generator=g) < 0.7) + 1e-3 * torch.eye(12)[:1]
    )
    valid = torch.rand(images, 7, 9, generator=g) < 0.7 if void else None
    return MaskDistribution(labels, weights / weights.sum(1, keepdim=True), valid)


@given(st.integers(0, 10**6), st.integers(2, 4), st.booleans(), st.sampled_from([torch.uint8, torch.int64]))
def test_equal_masks_are_those_whose_pixels_are_that_count(seed, classes, void, dtype):
    g = torch.Generator().manual_seed(seed)
    valid = torch.rand(2, 1, 3, generator=g) < 0.6 if void else None
    masks = MaskDistribution(torch.randint(classes, (2, 9, 1, 3), generator=g).to(dtype), valid=valid)
    for b, (first, which) in enumerate(bits.equal(masks)):
        shown = [
            [int(x) for x, ok in zip(one.flatten(), counted(masks, b), strict=True) if ok] for one in masks.labels[b]
        ]
        for i, j in itertools.product(range(9), repeat=2):
            assert (shown[i] == shown[j]) == (which[i] == which[j])
        assert first.tolist() == [shown.index(shown[i]) for i in first]
        assert which[first].tolist() == list(range(len(first)))


def counted(masks, b):
    return torch.ones(masks.spatial, dtype=torch.bool).flatten() if masks.valid is None else masks.valid[b].flatten()


@pytest.mark.parametrize("block", [1, 2**26])
def test_equal_masks_are_found_in_blocks(monkeypatch, block):
    expected = [part.tolist() for part in bits.equal(drawn(0, 3))[0]]
    monkeypatch.setattr(bits, "_LABELS", block)
    assert [part.tolist() for part in bits.equal(drawn(0, 3))[0]] == expected


def test_long_rows_are_told_apart():
    rows = np.zeros((4, 100_000), np.uint8)
    rows[1, -1] = rows[3, -1] = 1
    assert [part.tolist() for part in distinct(rows)] == [[0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("n", "m", "words"), [(3, 4, 70), (40, 50, 3), (50, 40, 3), (33, 33, 1), (1, 1, 1), (5, 64, 64)]
)
def test_either_order_in_memory_counts_the_same(n, m, words):
    rng = np.random.default_rng(0)
    x, y = (torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, (2, k, words))) for k in (n, m))
    unpacked = [np.unpackbits(z.numpy().view(np.uint8), axis=2).astype(float) for z in (x, y)]
    for a, b, p, q in ((x, y, *unpacked), (x, x, unpacked[0], unpacked[0])):
        assert bits.intersections(a, b).tolist() == np.einsum("bnw,bmw->bnm", p, q).tolist()


@pytest.mark.parametrize(
    "order", [*list(itertools.permutations(["rules", "measures", "three"])), ("iou", "look", "rules")]
)
@pytest.mark.parametrize(("classes", "void", "images"), [(2, False, 1), (3, True, 1), (3, False, 2)])
def test_what_parts_share_changes_no_result(order, classes, void, images):
    one = drawn(1, classes, void, images)
    for name in [*order, *PARTS]:
        alone = PARTS[name](drawn(1, classes, void, images))
        for shared, expected in zip(PARTS[name](one), alone, strict=True):
            for x, y in zip(shared, expected, strict=True):
                assert torch.equal(x.nan_to_num(nan=9), y.nan_to_num(nan=9))


def test_results_are_not_what_is_kept():
    masks = drawn(2, 2)
    expected = pairwise_iou(masks, masks)
    pairwise_iou(masks, masks).zero_()
    pairwise_iou(masks, masks, absent="skip").zero_()
    assert torch.equal(pairwise_iou(masks, masks), expected)
    assert "_kept" not in vars(masks[0])
    assert "_kept" not in vars(masks.to("cpu"))
