"""Pixels that cost most, or are drawn by what they cost."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.nn.likelihood import hardest


def test_pixels_are_drawn_without_replacement_by_their_cost():
    """Two of three pixels, against the probabilities of drawing one after the other."""
    cost = torch.tensor([1.0, 2.0, 5.0])
    p = cost / cost.sum()
    expected = torch.stack([p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)])
    g = torch.Generator().manual_seed(0)
    masks = torch.stack([hardest(cost[None, None], 0.7, torch.rand(1, 1, 3, generator=g)) for _ in range(5000)])
    assert torch.equal(masks.sum((1, 2, 3)), torch.full((5000,), 2.0))
    assert torch.allclose(masks.mean((0, 1, 2)), expected, atol=0.03)  # four deviations


def test_the_batch_is_chosen_from_as_a_whole():
    cost = torch.stack([torch.ones(4, 4), torch.full((4, 4), 9.0)])
    assert hardest(cost, 0.25).sum((1, 2)).tolist() == [0, 8]


@given(st.integers(1, 4), st.integers(1, 6), st.floats(1e-6, 1), st.integers(0, 2**31), st.booleans())
def test_void_and_free_pixels_do_no_harm(images, side, share, seed, drawn):
    """As many as asked for, none of them void, whatever is 0 or void."""
    g = torch.Generator().manual_seed(seed)
    shape = images, side, side
    valid = torch.rand(shape, generator=g) < torch.rand((), generator=g)
    cost = torch.randn(shape, generator=g).relu()
    uniform = (torch.rand(shape, generator=g) - 0.3).clamp(0, 1 - 2**-24) if drawn else None  # with exact zeros
    mask = hardest(cost, share, uniform, valid)
    k = max(1, int(share * cost.numel()))
    assert ((mask == 0) | (mask == 1)).all()
    assert not mask[~valid].any()
    assert min(k, int((valid & (cost > 0)).sum())) <= int(mask.sum()) <= k
    if not drawn and mask.any():
        left = cost[valid & (mask == 0)]
        assert left.numel() == 0 or cost[mask == 1].min() >= left.max()
