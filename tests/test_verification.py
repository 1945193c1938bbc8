"""Distributions of measurements against the readers': loops over values, the randomised transform, known truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg.decisions.measure import Measurement
from ambiseg.decisions.verification import covered, crps, crps_of_readers, pit


def made(values, weights=None):
    values = torch.as_tensor(values, dtype=torch.float64)
    weights = torch.ones_like(values) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    return Measurement("size", 1, "", values, weights)


@st.composite
def pairs(draw):
    """Predicted and readers' values with ties, weights with zeros, two images."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n, m = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    weights = rng.integers(0, 4, (2, n)) + (np.arange(n) == 0), rng.integers(0, 3, (2, m)) + (np.arange(m) == 0)
    return made(rng.integers(0, 6, (2, n)), weights[0]), made(rng.integers(-1, 7, (2, m)), weights[1])


def slow_crps(x, w, y, v):
    """By the definition as an integral of squared differences of distribution functions, which are steps."""
    total = 0.0
    for value, share in zip(y, v, strict=True):
        places = sorted({*x, value})
        for a, b in itertools.pairwise(places):
            F = sum(weight for one, weight in zip(x, w, strict=True) if one <= a)
            total += share * (F - (value <= a)) ** 2 * (b - a)
    return total


@settings(max_examples=80, deadline=None)
@given(pairs())
def test_crps_is_its_integral_and_others_are_their_loops(case):
    predicted, readers = case
    scores, alone = crps(predicted, readers), crps_of_readers(readers)
    inside, bins = covered(predicted, readers, 0.8), pit(predicted, readers, 4)
    for b in range(2):
        x, w, y, v = (
            part[b].tolist() for part in (predicted.values, predicted.weights, readers.values, readers.weights)
        )
        assert float(scores[b]) == pytest.approx(slow_crps(x, w, y, v), abs=1e-9)
        low, high = predicted.interval(0.8)[b].tolist()
        assert float(inside[b]) == pytest.approx(sum(s for one, s in zip(y, v, strict=True) if low <= one <= high))
        present = [(one, share) for one, share in zip(y, v, strict=True) if share > 0]
        if len(present) > 1:
            each = []
            for j, (one, share) in enumerate(present):
                others = [pair for i, pair in enumerate(present) if i != j]
                rest = sum(s for _, s in others)
                each.append(share * slow_crps([o for o, _ in others], [s / rest for _, s in others], [one], [1.0]))
            assert float(alone[b]) == pytest.approx(sum(each), abs=1e-9)
        else:
            assert math.isnan(alone[b])
        # The transform with a thousand equally spaced V in place of a uniform one.
        found = np.zeros(4)
        for one, share in zip(y, v, strict=True):
            below = sum(weight for value, weight in zip(x, w, strict=True) if value < one)
            at = sum(weight for value, weight in zip(x, w, strict=True) if value <= one)
            u = below + (np.arange(1000) + 0.5) / 1000 * (at - below)
            found += share * np.bincount(np.clip((u * 4 + 1e-9).astype(int), 0, 3), minlength=4) / 1000
        assert bins[b].tolist() == pytest.approx(found.tolist(), abs=2e-3)


def test_a_calibrated_prediction_has_a_flat_histogram_and_its_coverage():
    """Readers and masks drawn alike: within three standard errors of the nominal values."""
    rng = np.random.default_rng(0)
    images, n = 3000, 200
    places = rng.normal(size=(images, 1)) * 5
    predicted, readers = made(places + rng.normal(size=(images, n))), made(places + rng.normal(size=(images, 1)))
    share = pit(predicted, readers, 10).mean(0)
    assert (share - 0.1).abs().max() < 3 * math.sqrt(0.09 / images) + 1 / n
    for level in (0.5, 0.9):
        error = 3 * math.sqrt(level * (1 - level) / images) + 2 / n
        assert abs(float(covered(predicted, readers, level).mean()) - level) < error
    narrow = made(places + 0.5 * (predicted.values.numpy() - places))
    assert float(covered(narrow, readers, 0.9).mean()) < 0.7
    assert pit(narrow, readers, 10).mean(0)[[0, 9]].sum() > 0.35
    assert crps(predicted, readers).mean() < crps(narrow, readers).mean()


def test_images_without_a_value_are_nan():
    empty, one = made([[math.nan, math.nan]]), made([[1.0]])
    for score in (crps, covered, pit):
        assert score(empty, one).isnan().all()
        assert score(one, empty).isnan().all()
    with pytest.raises(ValueError, match="same images"):
        crps(one, made([[1.0], [2.0]]))
