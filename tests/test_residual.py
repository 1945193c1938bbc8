"""Residual blocks of half width."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ambiseg.nn.residual import Residual, orthogonal, residual_level


def test_a_block_is_what_its_figure_says():
    block, x = Residual(4, 6, convs=2), torch.randn(2, 4, 5, 7)
    before = x.clone()
    first, second = block.convs
    inner = second(F.relu(first(F.relu(x))))
    assert inner.shape[1] == 3
    torch.testing.assert_close(block(x), block.skip(x) + block.widen(inner))
    assert torch.equal(x, before)  # rectified in a copy


def test_what_needs_no_convolution_has_none():
    assert isinstance(Residual(6, 6).skip, torch.nn.Identity)
    assert isinstance(Residual(6, 1).widen, torch.nn.Identity)  # half of one channel is one
    silent = Residual(6, 6)
    for parameter in silent.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.randn(1, 6, 4, 4)
    assert torch.equal(silent(x), x)


def test_fresh_weights_are_orthogonal_and_biases_small():
    level = residual_level(3, 8, blocks=2)
    orthogonal(level)
    for conv in (part for part in level.modules() if isinstance(part, torch.nn.Conv2d)):
        rows = conv.weight.flatten(1)
        rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert conv.bias is not None
        assert 0 < conv.bias.abs().max() <= 0.002
