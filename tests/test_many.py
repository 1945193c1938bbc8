"""Images of very many readers, or of very many classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.data.case import Case, partition
from ambiseg.data.check import statistics
from ambiseg.data.check.statistics import Statistics, pairwise_iou


@given(st.integers(0, 10_000))
def test_regions_and_table_give_back_the_maps(seed):
    rng = np.random.default_rng(seed)
    kinds = [np.uint8, np.uint16, np.int64, np.int32]
    maps = [
        rng.integers(0, rng.choice([1, 2, 20, 300, 60_000]), (5, 7)).astype(rng.choice(kinds)) % 200
        for _ in range(rng.integers(1, 6))
    ]
    regions, table = partition(maps)
    for m, labels in enumerate(maps):
        assert np.array_equal(table[regions, m], labels)
    assert np.array_equal(np.unique(table, axis=0), table)  # in order, each once
    assert np.array_equal(np.unique(regions), np.arange(len(table)))


def test_every_pixel_another_class_for_every_reader():
    rng = np.random.default_rng(0)
    maps = [rng.permutation(1 << 16).reshape(256, 256).astype(np.uint16) for _ in range(3)]
    regions, table = partition(maps)  # a table of all pairs that may occur would take 34 GB
    assert len(table) == 1 << 16
    assert np.array_equal(table[regions, 2], maps[2])
    counted = Statistics(tuple(map(str, range(1 << 16))), tuple(range(1, 1 << 16)), expected=1)
    counted.add(Case(np.zeros((1, 256, 256)), regions, table, "a", "a", ("x", "y", "z")))
    assert [counted.by_class[c].masks for c in (0, 1, 65535)] == [3, 3, 3]
    assert counted.iou == pytest.approx(0, abs=1e-4)


@given(st.integers(0, 10_000))
def test_pairs_are_compared_alike_by_classes_and_by_regions(seed):
    rng = np.random.default_rng(seed)
    table, area = rng.integers(0, 9, (12, 4)).astype(np.uint8), rng.integers(1, 50, 12).astype(float)
    classes = sorted(rng.choice(12, rng.integers(1, 9), replace=False).tolist())
    agree, marked = pairwise_iou(table, area, classes)
    before, statistics._MATRICES = statistics._MATRICES, 0
    try:
        also = pairwise_iou(table, area, classes)
    finally:
        statistics._MATRICES = before
    np.testing.assert_allclose(also[0], agree)
    np.testing.assert_allclose(also[1], marked)


def test_of_many_readers_some_are_compared():
    masks = np.random.default_rng(0).random((500, 16, 16)) > 0.5
    case = Case.of(np.zeros((1, 16, 16)), masks.astype(np.uint8), name="a", readers=[f"r{m}" for m in range(500)])
    counted = Statistics(("a", "b"), (1,), expected=1)
    counted.add(case)
    assert len(counted.by_reader) == counted.masks == 500
    assert sum(bool(reader.ious) for reader in counted.by_reader.values()) == 100
    assert len(counted.together) == 100 * 99 / 2
    assert counted.iou == pytest.approx(1 / 3, abs=0.02)
