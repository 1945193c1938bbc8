"""Random numbers that belong to places."""

from __future__ import annotations

import pytest
import torch

from ambiseg.nn import places


@pytest.mark.parametrize(("bits", "expected"), [(0, 2.0**-24), (-1, 1 - 2.0**-24), (1 << 22, 0.5 + 2.0**-24)])
def test_the_ends_are_inside(bits, expected, monkeypatch):
    """Whatever the hash is: one number in 17 million was 1, and of a normal distribution infinite."""
    monkeypatch.setattr(places, "_mixed", lambda x: torch.full_like(x, bits))
    found = places.uniform_at(torch.zeros(1, 1, dtype=torch.int32), 0, 1, (1, 1), (0, 0))
    assert found.item() == expected
    normal = places.as_normal_(found.clone())
    assert abs(normal.item()) < 5.5
    assert places.as_normal_(1 - found).item() == -normal.item()


def test_numbers_are_uniform_and_normal():
    seeds = places.new_seeds(2, 3, torch.Generator().manual_seed(0), torch.device("cpu"))
    found = places.uniform_at(seeds, 0, 4, (50, 60), (0, 0))  # 72,000 numbers
    counts = torch.histc(found, 10, 0, 1) / found.numel()
    assert torch.allclose(counts, torch.full((10,), 0.1), atol=0.006)
    normal = places.as_normal_(found.clone())
    assert normal.mean().abs() < 0.02
    assert (normal.std() - 1).abs() < 0.02
    draws = normal.flatten(2).flatten(0, 1)  # 3,000 places of each draw
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.1
