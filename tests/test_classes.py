"""Which classes metrics look at unless they are told: all of the foreground that occur, never silently the first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution, ece, ged, matched_iou, reliability_curve, sample_diversity
from ambiseg.overlap import joint_iou, occurring, pairwise_iou
from ambiseg.streaming import ECE, GED, MatchedIoU, SampleDiversity


def _masks(seed: int, top: int, count: int = 3) -> MaskDistribution:
    return MaskDistribution(torch.randint(top, (2, count, 5, 5), generator=torch.Generator().manual_seed(seed)))


def test_by_hand():
    """Class 1 is where it should be, class 2 is missed: looking at class 1 alone would call it perfect."""
    readers, guess = torch.tensor([[[[1, 1, 2, 2]]]]), torch.tensor([[[[1, 1, 0, 0]]]])
    assert ged(guess, readers, classes=(1,)).item() == 0
    assert ged(guess, readers).item() == 1  # twice the mean of 0 and 1
    assert matched_iou(guess, readers).item() == 0.5
    assert ged(guess, readers).item() == ged(guess, readers, classes=(1, 2)).item()


@given(st.integers(0, 1000), st.integers(2, 5), st.integers(2, 5))
def test_the_default_is_what_occurs(seed, pred_top, truth_top):
    pred, truth = _masks(seed, pred_top), _masks(seed + 1, truth_top)
    named = sorted(({*pred.labels.flatten().tolist()} | {*truth.labels.flatten().tolist()}) - {0}) or [1]
    assert occurring(pred, truth) == named
    for function in (ged, matched_iou, pairwise_iou, joint_iou):
        assert torch.equal(function(pred, truth), function(pred, truth, named))
    own = sorted({*pred.labels.flatten().tolist()} - {0}) or [1]
    assert torch.equal(sample_diversity(pred), sample_diversity(pred, own))
    p, t = pred.marginal_probs(6), truth.marginal_probs(6)
    assert ece(p, t) == ece(p, t, named)


def test_what_counts_nowhere_does_not_occur():
    labels = torch.tensor([[[[0, 1, 3]], [[0, 1, 2]]]])
    valid = torch.tensor([[[True, True, False]]])
    assert occurring(labels) == [1, 2, 3]
    assert occurring(MaskDistribution(labels, torch.tensor([[1.0, 0.0]]))) == [1, 3]
    assert occurring(labels, MaskDistribution(labels, valid=valid)) == [1]
    assert occurring(MaskDistribution(labels[:, :, None], valid=valid[:, None])) == [1]  # a volume
    assert occurring(torch.full((1, 1, 2, 2), 10**9)) == [10**9]
    p = MaskDistribution(labels, valid=valid).marginal_probs(4)
    assert (
        reliability_curve(p, p, valid=valid).count.tolist() == reliability_curve(p, p, (1,), valid=valid).count.tolist()
    )


def test_masks_without_foreground_agree():
    empty = torch.zeros(1, 2, 3, 3, dtype=torch.long)
    assert ged(empty, empty).item() == sample_diversity(empty).item() == 0
    assert matched_iou(empty, empty).item() == 1


def test_calibration_of_nothing_is_no_number():
    """A model that never predicts an evaluated class is not perfectly calibrated: nothing was measured."""
    sky = torch.zeros(1, 3, 2, 2)
    sky[:, 0] = 1
    truth = torch.full((1, 3, 2, 2), 1 / 3)
    curve = reliability_curve(sky, truth, classes=(1, 2))
    assert curve.share == 0
    assert torch.tensor(curve.ece).isnan()
    assert torch.tensor(ece(sky, truth, classes=(1,))).isnan()
    both = curve + reliability_curve(sky, truth, classes=range(3))
    assert both.share == 0.5
    assert both.ece == pytest.approx((1 - 1 / 3) / 2)


def test_streamed_metrics_fix_their_classes():
    """What occurs in one batch must not decide what the next is scored by."""
    pred, truth = _masks(1, 4), _masks(2, 4)
    pred, truth = (MaskDistribution(torch.cat([x.labels.clamp_max(1), x.labels])) for x in (pred, truth))
    for made, function in ((GED, ged), (MatchedIoU, matched_iou)):
        metric = made(num_classes=4)
        for i in range(4):
            metric.update(pred[i], truth[i])
        assert metric.compute().item() == pytest.approx(function(pred, truth, (1, 2, 3)).mean().item())
        binary = made()
        binary.update(pred[:2], truth[:2])
        assert binary.compute().item() == pytest.approx(function(pred[:2], truth[:2]).mean().item())
        with pytest.raises(ValueError, match=r"num_classes for masks of more than two classes, found class 3"):
            binary.update(pred[2:], truth[2:])
    with pytest.raises(ValueError, match="SampleDiversity: expected classes or num_classes"):
        SampleDiversity().update(pred)
    metric = ECE(4)
    metric.update(pred, truth)
    p, t = pred.marginal_probs(4), truth.marginal_probs(4)
    assert metric.compute().item() == pytest.approx(ece(p, t, (1, 2, 3)))
    with pytest.raises(ValueError, match="num_classes must be at least 2, found 1"):
        GED(num_classes=1)


def test_streamed_distance_can_be_unbiased_on_both_sides():
    pred, truth = _masks(3, 2), _masks(4, 2)
    metric = GED(unbiased="both")
    metric.update(pred, truth)
    assert metric.compute().item() == pytest.approx(ged(pred, truth, unbiased="both").mean().item())
    with pytest.raises(ValueError, match=r"unbiased must be False, True or 'both', found 'all'"):
        ged(pred, truth, unbiased="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 masks"):
        ged(pred, truth.labels[:, :1], unbiased="both")
