from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution, regions
from ambiseg.regions import RegionMasks, partition


def random_annotations(seed: int, B: int, M: int, C: int, spatial=(4, 4)) -> MaskDistribution:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (B, M, *spatial), generator=g)
    valid = torch.rand(B, *spatial, generator=g) < 0.8
    return MaskDistribution(labels, valid=valid)


def test_hand_case():
    """Two readers, four pixels, one of them void: the tuples are (0,0), (1,0), (1,1) and nothing."""
    labels = torch.tensor([[[[0, 1], [1, 1]], [[0, 0], [1, 0]]]])
    regions = partition(MaskDistribution(labels, valid=torch.tensor([[[True, True], [True, False]]])), classes=2)
    assert regions.count == 3
    assert regions.labels[0].T.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert regions.size.tolist() == [[1, 1, 1]]
    assert regions.index.tolist() == [[0, 1, 2, 3]]


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.integers(1, 30))
def test_regions_are_exactly_the_sets_of_equal_tuples(seed, B, M, C):
    annotations = random_annotations(seed, B, M, C)
    regions = partition(annotations, C)
    assert annotations.valid is not None
    for b in range(B):
        tuples = [tuple(t) for t in annotations.labels[b].flatten(1).T.tolist()]
        valid = annotations.valid[b].flatten().tolist()
        seen: dict[tuple[int, ...], int] = {}
        for p, (labels, counts) in enumerate(zip(tuples, valid, strict=True)):
            u = int(regions.index[b, p])
            if not counts:
                assert u == regions.count
                continue
            assert seen.setdefault(labels, u) == u  # equal tuples, one region
            assert tuple(regions.labels[b, :, u].tolist()) == labels  # which remembers them
        assert len(set(seen.values())) == len(seen)  # different tuples, different regions
        assert int(regions.size[b].sum()) == sum(valid)
        for u in seen.values():
            assert int(regions.size[b, u]) == int((regions.index[b] == u).sum())


def test_the_number_of_regions_does_not_explode_with_annotators():
    """32 flips of five classes: as many regions as there were classes, where 2**32 tuples are possible."""
    base = torch.arange(16).view(1, 1, 4, 4) % 8
    flips = torch.arange(32).view(1, 32, 1, 1)
    switched = sum(((base == c) & ((flips >> c) & 1 == 1)) * (8 - c + c) for c in range(5))
    regions = partition(base + switched, classes=16)
    assert regions.count == 8


def test_padded_annotators_split_nothing():
    labels = torch.stack([torch.zeros(1, 4, 4), torch.randint(2, (1, 4, 4)).float()], 1).long()
    assert partition(MaskDistribution(labels, torch.tensor([[1.0, 0.0]])), 2).count == 1
    assert partition(MaskDistribution(labels), 2).count == 2


@pytest.mark.parametrize("few", [0, 64])
def test_sum_in_any_rank_equals_a_loop_over_pixels(few, monkeypatch):
    monkeypatch.setattr(regions, "_FEW", few)
    annotations = random_annotations(3, 2, 3, 2)
    part = partition(annotations, 2)
    values = torch.randn(2, 5, 4, 16, dtype=torch.float64)
    sums = part.sum(values)
    expected = torch.zeros(2, 5, 4, part.count + 1, dtype=torch.float64)
    for b in range(2):
        for p in range(16):
            expected[b, :, :, part.index[b, p]] += values[b, :, :, p]
    assert torch.allclose(sums, expected[..., :-1])
    assert torch.allclose(part.sum(values[:, 0, 0]), expected[:, 0, 0, :-1])


def test_matrix_products_of_accelerators_agree(monkeypatch):
    part = partition(random_annotations(5, 2, 3, 3, spatial=(40, 40)), 3)
    values = torch.randn(2, 4, 1600, dtype=torch.float64)
    expected, added = part.sum(values), torch.zeros(2, 7, dtype=torch.float64)
    rows, index = torch.randn(9, 7, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1])
    regions.add_rows(added, index, rows)
    monkeypatch.setattr(regions, "_FEW", 0)
    assert torch.allclose(part.sum(values), expected)
    monkeypatch.setattr(regions, "_scatters", lambda x: False)
    assert torch.allclose(part.sum(values), expected)
    again = torch.zeros(2, 7, dtype=torch.float64)
    regions.add_rows(again, index, rows)
    assert torch.allclose(again, added)


@pytest.mark.parametrize("few", [0, 64])
def test_sums_of_large_images_keep_their_digits(few, monkeypatch):
    """A running float32 sum of a million terms would lose four digits; blocks of pixels do not."""
    monkeypatch.setattr(regions, "_FEW", few)
    part = partition(torch.zeros(1, 1, 1024, 1024, dtype=torch.long), 1)
    values = torch.full((1, 1, 1024 * 1024), 0.1)
    assert part.sum(values).item() == pytest.approx(0.1 * 1024 * 1024, rel=5e-6)


def test_gradient_is_exact():
    regions = partition(random_annotations(1, 2, 3, 2), 2)
    values = torch.randn(2, 2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(regions.sum, (values,))
    weights = torch.randn(2, 2, regions.count, dtype=torch.float64)
    (regions.sum(values) * weights).sum().backward()
    padded = torch.cat([weights, torch.zeros(2, 2, 1, dtype=torch.float64)], 2)
    assert values.grad is not None
    assert torch.equal(values.grad, padded.gather(2, regions.index[:, None].expand(2, 2, 16)))


def test_volumes_and_bad_values():
    regions = partition(torch.randint(2, (1, 2, 3, 4, 5)), 2)
    assert regions.index.shape == (1, 60)
    with pytest.raises(ValueError, match=r"values must be \[1, …, 60\] to fit the regions, found \[1, 59\]"):
        regions.sum(torch.zeros(1, 59))
    with pytest.raises(ValueError, match="below classes=2, found 5"):
        partition(torch.full((1, 1, 2, 2), 5), 2)


def test_drawing_from_regions_is_drawing_from_masks():
    g = torch.Generator().manual_seed(0)
    valid = torch.rand(3, 6, 5, generator=g) < 0.8
    masks = MaskDistribution(
        torch.randint(3, (3, 4, 6, 5), generator=g), torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3), valid
    )
    regions = RegionMasks.of(partition(masks, 3), masks.spatial, masks.weights, masks.valid)
    one, two = (x.draw(6, torch.Generator().manual_seed(1)) for x in (masks, regions))
    assert torch.equal(one.class_ids(3), two.class_ids(3))
    assert two.valid is not None
    assert torch.equal(two.valid, valid)
    assert two.weights is None
    assert "labels" not in vars(regions)  # the masks that were not drawn are never written out
