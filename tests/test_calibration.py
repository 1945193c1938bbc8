from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import bootstrap, ece, reliability_curve
from tests import reference

# -- calibration ---------------------------------------------------------------------------------------------


def test_ece_hand_case_leaves_exact_zeros_in_no_bin():
    pred = torch.tensor([0.0, 0.05, 0.05, 1.0])
    truth = torch.tensor([1.0, 0.0, 0.5, 1.0])
    p, t = (torch.stack([1 - x, x]).view(1, 2, 2, 2) for x in (pred, truth))
    curve = reliability_curve(p, t)
    assert curve.count.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert curve.total.item() == 4
    assert ece(p, t) == pytest.approx(abs(0.1 - 0.5) / 4)
    assert curve.confidence[0].item() == pytest.approx(0.05)
    assert curve.accuracy[0].item() == pytest.approx(0.25)
    assert curve.accuracy[1].isnan()
    assert curve.edges[[0, 1, 10]].tolist() == pytest.approx([0.0, 0.1, 1.0])


@given(st.integers(0, 10**6), st.sampled_from([(1,), (0, 2), (0, 1, 2, 3)]), st.integers(1, 15), st.booleans())
def test_ece_equals_its_definition(seed, classes, bins, void):
    g = torch.Generator().manual_seed(seed)
    pred = (torch.randn(2, 4, 3, 5, generator=g) * 2).softmax(1)
    truth = torch.rand(2, 4, 3, 5, generator=g).softmax(1)
    valid = torch.rand(2, 3, 5, generator=g) < 0.7
    expected = reference.ece(
        pred.transpose(0, 1).flatten(1).numpy(),
        truth.transpose(0, 1).flatten(1).numpy(),
        list(classes),
        bins,
        valid.flatten().numpy() if void else None,
    )
    assert ece(pred, truth, classes, bins, valid if void else None) == pytest.approx(expected, abs=1e-6)


def test_curves_of_parts_add_up_to_the_curve_of_the_whole():
    pred, truth = torch.rand(4, 2, 8, 8).softmax(1), torch.rand(4, 2, 8, 8).softmax(1)
    whole = reliability_curve(pred, truth)
    parts = reliability_curve(pred[:1], truth[:1]) + reliability_curve(pred[1:], truth[1:])
    assert torch.equal(whole.count, parts.count)
    assert whole.ece == pytest.approx(parts.ece)
    with pytest.raises(ValueError, match="as many bins, found 10 and 5"):
        _ = whole + reliability_curve(pred, truth, bins=5)


def test_ece_of_perfect_calibration_is_zero_and_of_no_pixel_nan():
    truth = torch.rand(1, 3, 6, 6).softmax(1)
    assert ece(truth, truth) == pytest.approx(0)
    assert ece(truth, truth, classes=None) == pytest.approx(0)
    assert math.isnan(ece(truth, truth, valid=torch.zeros(1, 6, 6, dtype=torch.bool)))
    assert ece(truth.half(), truth) == pytest.approx(0, abs=1e-3)
    assert ece(truth.numpy(), truth.numpy(), valid=np.ones((1, 6, 6), bool)) == pytest.approx(0)
    assert reliability_curve(torch.full((1, 2, 1), 1.00001), torch.ones(1, 2, 1)).count[-1].item() == 1


@pytest.mark.parametrize(
    ("pred", "truth", "kwargs", "message"),
    [
        (torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 3), {}, "one shape, found"),
        (torch.zeros(2, 2), torch.zeros(2, 2), {}, r"\[B, C, \*spatial\]"),
        (torch.zeros(0, 2, 2), torch.zeros(0, 2, 2), {}, "must not be empty"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"classes": (2,)}, "below 2, found"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"bins": 0}, "at least 1, found 0"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"valid": torch.ones(1, 2)}, r"valid must be torch.bool \[1, 2\]"),
        (torch.full((1, 2, 2), 1.5), torch.zeros(1, 2, 2), {}, "predicted marginal must hold probabilities, found 1.5"),
        (torch.full((1, 2, 2), math.nan), torch.zeros(1, 2, 2), {}, "predicted marginal .* found nan"),
        (torch.zeros(1, 2, 2), torch.full((1, 2, 2), 7.0), {}, "true marginal must hold probabilities, found 7"),
        (torch.full((1, 2, 2), -0.5), torch.zeros(1, 2, 2), {}, "found -0.5 to -0.5"),
        (torch.zeros(1, 2, 2).bool(), torch.zeros(1, 2, 2), {}, "floating point, found torch.bool"),
    ],
)
def test_bad_marginals_are_refused(pred, truth, kwargs, message):
    with pytest.raises(ValueError, match=message):
        ece(pred, truth, **kwargs)


# -- intervals --------------------------------------------------------------------------------


def test_bootstrap_resamples_patients_not_images():
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(20), 10)
    values = rng.normal(size=20)[patients]  # all images of a patient alike
    by_patient, by_image = bootstrap(values, patients), bootstrap(values)
    assert by_patient.mean == pytest.approx(values.mean())
    width = by_patient.high - by_patient.low
    assert width == pytest.approx((by_image.high - by_image.low) * math.sqrt(10), rel=0.15)
    assert width == pytest.approx(2 * 1.96 * values.std() / math.sqrt(20), rel=0.15)


def test_bootstrap_averages_over_images_and_draws_every_block(monkeypatch):
    values, patients = [0.0, 1.0, 1.0, 1.0], ["a", "b", "b", "b"]
    found = bootstrap(values, patients)
    assert found.mean == 0.75  # not ½, the mean of the patients' means
    assert (found.low, found.high) == (0.0, 1.0)
    rng = np.random.default_rng(3)
    many = rng.normal(size=3000)  # 10,000 draws of 3,000 take several blocks
    interval = bootstrap(many, resamples=2000)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * many.std() / math.sqrt(3000), rel=0.1)
    alone = bootstrap([1.0, 2.0], ["a", "a"])
    assert alone.mean == 1.5
    assert math.isnan(alone.low)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        effect = rng.normal(size=40)
        groups = np.repeat(np.arange(40), 3)
        interval = bootstrap(effect[groups] + rng.normal(size=120), groups, resamples=400, seed=trial)
        hits += interval.low <= 0 <= interval.high
    assert 0.90 <= hits / 300 <= 0.99


def test_paired_differences_and_nan():
    rng = np.random.default_rng(2)
    difficulty = rng.normal(size=200)
    worse, better = difficulty + 0.1, difficulty + 0.05 * rng.normal(size=200)
    paired = bootstrap(better, baseline=worse)
    assert paired.high < 0  # told apart although each alone varies 20 times as much
    assert bootstrap(better).low < paired.low
    with_gap = better.copy()
    with_gap[0] = np.nan
    assert bootstrap(with_gap).mean == pytest.approx(better[1:].mean())
    assert math.isnan(bootstrap([math.nan]).mean)
    assert bootstrap(torch.ones(2, requires_grad=True).bfloat16()) == bootstrap([1.0, 1.0])
    assert str(bootstrap([1.0, 1.0])) == "1.0000 [1.0000, 1.0000]"


def test_bootstrap_resamples_seeds_as_well():
    """The variance over patients and that over seeds add up: two parts that are drawn independently."""
    rng = np.random.default_rng(4)
    patients, seeds = rng.normal(size=400), rng.normal(size=8) / 10
    found = bootstrap(patients + seeds[:, None])
    assert found.mean == pytest.approx(patients.mean() + seeds.mean())
    expected = math.sqrt(patients.var() / 400 + seeds.var() / 8)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(expected, rel=0.1)
    assert bootstrap(patients[None]) == bootstrap(patients)
    other = bootstrap(patients + seeds[:, None], baseline=np.stack([patients, patients + 1]))  # the patients cancel
    expected = math.sqrt(seeds.var() / 8 + 0.25 / 2)
    spread = np.std([seeds[rng.integers(8, size=8)].mean() - rng.integers(2, size=2).mean() for _ in range(20000)])
    assert spread == pytest.approx(expected, rel=0.05)
    assert (other.low, other.high) == pytest.approx((seeds.mean() - 1, seeds.mean()), abs=0.1)
    gap = np.stack([patients, patients])
    gap[1, 0] = np.nan  # an image counts where every seed has a value
    assert bootstrap(gap).mean == pytest.approx(patients[1:].mean())


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([],), {}, "one number an image"),
        (([[[1.0]]],), {}, r"found shape \[1, 1, 1\]"),
        (([1.0, 2.0], ["a"]), {}, "each of 2 images, found 1"),
        (([1.0, 2.0], ["a", None]), {}, "found None for image 1"),
        (([1.0, 2.0], [math.nan, 3.0]), {}, "found nan for image 0"),
        (([1.0, 2.0],), {"baseline": [1.0]}, r"each of 2 images, found shape \[1, 1\]"),
        (([1.0],), {"level": 95}, "level must be in"),
    ],
)
def test_bad_bootstrap_inputs_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(*args, **kwargs)
