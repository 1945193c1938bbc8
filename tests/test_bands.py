"""Maps of many pixels, some at a time: the same numbers as NumPy's, whatever the size of a band."""

from __future__ import annotations

import numpy as np
import pytest

from ambiseg._util import bands as module
from ambiseg._util.bands import bands, counted, looked_up
from ambiseg.viz import pictures


@pytest.fixture(autouse=True)
def _small_bands(monkeypatch):
    monkeypatch.setattr(module, "PIXELS", 7)
    monkeypatch.setattr(bands, "__defaults__", (7,))
    monkeypatch.setattr(pictures, "_AT_ONCE", 50)


def test_bands_cover_everything_once():
    for length in (0, 1, 6, 7, 8, 50):
        parts = list(bands(length))
        assert [i for part in parts for i in range(length)[part]] == list(range(length))
        assert all(part.stop - part.start <= 7 for part in parts)


@pytest.mark.parametrize("shape", [(1, 1), (5, 9), (30,), (2, 3, 4)])
def test_counts_and_look_ups(shape):
    rng = np.random.default_rng(0)
    index = rng.integers(0, 5, shape).astype(np.uint8)
    assert np.array_equal(counted(index), np.bincount(index.reshape(-1)))
    assert np.array_equal(counted(index, 9), np.bincount(index.reshape(-1), minlength=9))
    for table in (rng.integers(0, 99, 5), rng.integers(0, 99, (5, 3))):
        assert np.array_equal(looked_up(table, index), table[index])


@pytest.mark.parametrize("size", [(64, 48), (200, 90), (1, 700), (333, 1)])
def test_pictures_do_not_depend_on_the_band(size, monkeypatch):
    rng = np.random.default_rng(1)
    images = [rng.normal(0, 99, (c, *size)).astype(dtype) for c in (1, 3) for dtype in (np.int16, np.float32)]
    labels = rng.integers(0, 4, size).astype(np.uint8)

    def drawn() -> list[np.ndarray]:
        return [pictures.photograph(image, side=30) for image in images] + [pictures.scaled(labels, 30)]

    small = drawn()
    monkeypatch.setattr(pictures, "_AT_ONCE", 1 << 20)
    monkeypatch.setattr(module, "PIXELS", 1 << 20)
    monkeypatch.setattr(bands, "__defaults__", (1 << 20,))
    assert all(np.array_equal(one, other) for one, other in zip(small, drawn(), strict=True))
