"""One mask of a distribution: every rule against a loop over pixels, masks and thresholds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg._util.errors import ConfigError
from ambiseg.data import Nodules
from ambiseg.decisions.consensus import CONSENSUS, LEVELS, consensus, consensus_each, copies_of
from ambiseg.masks import MaskDistribution
from tests import reference

PLAIN = [name for name in CONSENSUS if name != "staple"]
HAND = torch.tensor([[[[1, 1, 1, 0]], [[0, 1, 1, 0]], [[0, 0, 1, 0]], [[0, 0, 0, 0]]]])


@st.composite
def distributions(draw, classes=3):
    """Up to two images with weights, absent masks, void pixels and sometimes a marginal; 2D or 3D."""
    B, N = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    spatial = draw(st.sampled_from([(1, 5), (3, 4), (2, 2, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    top = draw(st.integers(2, classes))
    labels = torch.from_numpy(rng.integers(0, top, (B, N, *spatial)))
    counts = rng.integers(0, 4, (B, N))
    counts[:, 0] += 1
    weights = torch.from_numpy(counts / counts.sum(1, keepdims=True)) if draw(st.booleans()) else None
    valid = torch.from_numpy(rng.random((B, *spatial)) < 0.8) if draw(st.booleans()) else None
    marginal = None
    if draw(st.booleans()):
        marginal = torch.from_numpy(rng.dirichlet(np.ones(top), (B, *spatial))).movedim(-1, 1)
    return MaskDistribution(labels, weights, valid, marginal)


def votes(masks, b, p, classes):
    return [
        sum(float(w) for w, y in zip(masks.mass[b], masks.labels[b], strict=True) if y[p] == c) for c in range(classes)
    ]


def first_best(values):
    return next(i for i, value in enumerate(values) if value >= max(values) - 1e-6)


def valid_at(masks, b, p):
    return masks.valid is None or bool(masks.valid[b][p])


def by_pixel(how, masks, b, classes):
    """The rules that look at single pixels, as their definitions say."""
    found = np.zeros(tuple(masks.spatial), int)
    soft = masks.marginal_probs(classes)[b].double()
    for p in np.ndindex(found.shape):
        if not valid_at(masks, b, p):
            continue
        share = votes(masks, b, p, classes)
        drawn = [c for c, value in enumerate(share) if value > 0]
        if how == "marginal":
            found[p] = first_best([float(x) for x in soft[(slice(None), *p)]])
        elif how == "majority":
            found[p] = first_best(share)
        elif how == "union" and max(drawn) > 0:
            found[p] = 1 + first_best(share[1:])
        elif how == "intersection" and len(drawn) == 1:
            found[p] = drawn[0]
    return found


def expected(candidate, masks, b, ids):
    """Expected IoU and Dice, by the plain definitions of both."""
    valid = None if masks.valid is None else masks.valid[b].numpy()
    scores = np.zeros(2)
    for weight, mask in zip(masks.mass[b].tolist(), masks.labels[b].numpy(), strict=True):
        for c in ids if weight else ():
            iou = reference.class_iou(np.asarray(candidate), mask, c, valid)
            x, y = np.asarray(candidate) == c, mask == c
            if valid is not None:
                x, y = x & valid, y & valid
            dice = 2 * (x & y).sum() / (x.sum() + y.sum()) if x.any() or y.any() else 1.0
            scores += weight * np.array([1.0 if math.isnan(iou) else iou, dice]) / len(ids)
    return scores / float(masks.mass[b].sum())


def best_by_search(masks, b, ids, score, classes):
    """The largest expected overlap of all masks and of all thresholds."""
    candidates = [mask.numpy() for weight, mask in zip(masks.mass[b], masks.labels[b], strict=True) if weight > 0]
    soft = masks.marginal_probs(classes)[b].double()
    for k in range(1, LEVELS + 1):
        inside = (soft[1:].sum(0) + 1e-6 >= k / LEVELS).numpy()
        best = np.array([[first_best(column)] for column in soft[1:].flatten(1).T.tolist()]).reshape(inside.shape) + 1
        if not candidates or (best * inside != candidates[-1]).any():
            candidates.append(best * inside)
    return max(expected(one, masks, b, ids)[score] for one in candidates)


def test_hand_case():
    """Votes of 3/4, 2/4, 1/4 … : a half is not enough for the majority, and is for a threshold of one half."""
    found = consensus_each(HAND, PLAIN)
    assert {name: one.labels[0, 0].tolist() for name, one in found.items() if name not in ("iou", "dice")} == {
        "marginal": [0, 0, 1, 0],
        "majority": [0, 0, 1, 0],
        "union": [1, 1, 1, 0],
        "intersection": [0, 0, 0, 0],
    }
    assert consensus(HAND, "marginal", threshold=0.5).labels[0, 0].tolist() == [0, 1, 1, 0]
    # IoU of the second reader with all four: 2/3, 1, 1/2, 0; Dice: 4/5, 1, 2/3, 0
    assert found["iou"].mask.tolist() == [1]
    assert found["iou"].expected_iou.tolist() == pytest.approx([(2 / 3 + 1 + 1 / 2) / 4])
    assert found["dice"].expected_dice.tolist() == pytest.approx([(4 / 5 + 1 + 2 / 3) / 4])


def test_a_threshold_may_be_better_than_every_mask():
    """Each reader errs at a pixel of his own; the majority errs nowhere."""
    masks = 1 - torch.eye(5, dtype=torch.long)[None, :, None]
    found = consensus(masks, "iou")
    assert found.labels.flatten().tolist() == [1] * 5
    assert found.mask.tolist() == [-1]
    assert found.threshold.tolist() == pytest.approx([0.8], abs=1 / LEVELS)
    assert found.expected_iou.tolist() == pytest.approx([4 / 5])  # a mask itself: (1 + 4 · 3/5) / 5 = 0.68


@settings(max_examples=60, deadline=None)
@given(distributions(), st.sampled_from(PLAIN), st.booleans())
def test_every_rule_is_its_definition(masks, how, background):
    classes = masks.classes
    ids = list(range(0 if background else 1, max(2, classes)))
    found = consensus(masks, how, classes=ids)
    for b in range(len(masks)):
        labels = found.labels[b].numpy()
        if masks.valid is not None and not masks.valid[b].any():
            assert not labels.any()
            assert math.isnan(found.expected_iou[b])
            continue
        scores = expected(labels, masks, b, ids)
        assert float(found.expected_iou[b]) == pytest.approx(scores[0], abs=1e-6)
        assert float(found.expected_dice[b]) == pytest.approx(scores[1], abs=1e-6)
        if how in ("iou", "dice"):
            score = ("iou", "dice").index(how)
            assert scores[score] == pytest.approx(best_by_search(masks, b, ids, score, max(2, classes)), abs=1e-5)
            if found.mask[b] >= 0:
                mine = masks.labels[b, int(found.mask[b])].numpy()
                assert (labels == (mine if masks.valid is None else mine * masks.valid[b].numpy())).all()
        else:
            assert (labels == by_pixel(how, masks, b, max(2, classes))).all()


@settings(max_examples=25, deadline=None)
@given(distributions(), st.randoms(use_true_random=False))
def test_order_of_masks_and_split_weights_change_nothing(masks, random):
    """A mask of weight w is as good as two of w/2, in any order."""
    order = list(range(masks.count)) * 2
    random.shuffle(order)
    other = MaskDistribution(masks.labels[:, order], masks.mass[:, order] / 2, masks.valid, masks.marginal)
    for name, one in consensus_each(masks, PLAIN).items():
        again = consensus(other, name)
        assert torch.allclose(one.expected_iou, again.expected_iou, equal_nan=True, atol=1e-6)
        if name not in ("iou", "dice"):
            assert (one.labels == again.labels).all()


@settings(max_examples=25, deadline=None)
@given(distributions(classes=2))
def test_intersection_majority_union_are_nested(masks):
    found = consensus_each(masks, ("intersection", "majority", "union"))
    inner, middle, outer = (found[name].labels for name in ("intersection", "majority", "union"))
    assert (inner <= middle).all()
    assert (middle <= outer).all()


def test_bad_arguments_are_one_line():
    for arguments, said in (
        ({"how": "median"}, "consensus: expected one of marginal, .*, found 'median'"),
        ({"how": "union", "threshold": 0.5}, "threshold: expected None for union, found 0.5"),
        ({"how": "marginal", "threshold": 0.0}, r"threshold: expected a number in \(0, 1\] for marginal, found 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            consensus(HAND, **arguments)  # type: ignore[arg-type]


def test_uint16_labels_and_blank_images():
    masks = torch.zeros(2, 3, 4, 4, dtype=torch.uint16)
    found = consensus_each(masks, PLAIN)
    assert all(not one.labels.to(torch.long).any() and one.labels.dtype == torch.uint16 for one in found.values())
    assert all(one.expected_dice.tolist() == [1, 1] for one in found.values())


# -- STAPLE ------------------------------------------------------------------------------------------------------------


def em(raters, rounds=500):
    """STAPLE of binary raters ``[N, P]`` as in Warfield 2004, with the prior of ITK: the mean vote."""
    raters = raters.astype(float)
    prior = raters.mean()
    p = q = np.full(len(raters), 0.99999)
    weight = np.zeros(raters.shape[1])
    for _ in range(rounds):
        a = prior * np.prod(np.where(raters == 1, p[:, None], 1 - p[:, None]), 0)
        b = (1 - prior) * np.prod(np.where(raters == 0, q[:, None], 1 - q[:, None]), 0)
        weight = a / (a + b)
        p = (weight * raters).sum(1) / weight.sum()
        q = ((1 - weight) * (1 - raters)).sum(1) / (1 - weight).sum()
    return weight


def readers_of_nodules(count=4):
    cases = Nodules(size=32)
    chosen = [case for case in (cases[i] for i in range(60)) if case.labels.any((1, 2)).sum() >= 3][:count]
    assert len(chosen) == count
    return [torch.from_numpy(case.labels) for case in chosen]


def test_staple_is_that_of_warfield_and_of_simpleitk():
    sitk = pytest.importorskip("SimpleITK")
    for labels in readers_of_nodules():
        found = consensus(labels[None], "staple").labels[0]
        pictures = [sitk.GetImageFromArray(mask.numpy().astype(np.uint8)) for mask in labels]
        direct = sitk.GetArrayFromImage(sitk.STAPLE(pictures, 1.0)) >= 0.5
        assert (found.numpy() == direct).all()
        assert (found.flatten().numpy() == (em(labels.flatten(1).numpy()) >= 0.5)).all()


def test_staple_of_several_classes_is_that_of_simpleitk():
    sitk = pytest.importorskip("SimpleITK")
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(3), 40).reshape(10, 12)
    raters = np.where(rng.random((5, 10, 12)) < 0.15, rng.integers(0, 3, (5, 10, 12)), truth)
    found = consensus(raters[None], "staple").labels[0].numpy()
    pictures = [sitk.GetImageFromArray(mask.astype(np.uint8)) for mask in raters]
    direct = sitk.GetArrayFromImage(sitk.MultiLabelSTAPLE(pictures, 3))
    decided = direct < 3
    assert (found[decided] == direct[decided]).all()
    assert (found == truth).mean() > 0.95


def test_staple_of_weights_is_that_of_copies_and_does_not_see_void_pixels():
    pytest.importorskip("SimpleITK")
    [labels] = readers_of_nodules(1)
    assert len(labels) == 4
    copies = labels[[0, 0, 0, 1, 2, 3]]
    weights = torch.tensor([[3, 1, 1, 1]]) / 6
    weighted = consensus(MaskDistribution(labels[None], weights), "staple").labels
    assert (weighted == consensus(copies[None], "staple").labels).all()
    wide = torch.nn.functional.pad(labels, (0, 9), value=1)  # void pixels, which all call 1
    valid = torch.nn.functional.pad(torch.ones(1, 32, 32, dtype=torch.bool), (0, 9))
    void = consensus(MaskDistribution(wide[None], valid=valid), "staple").labels
    assert (void[..., :32] == consensus(labels[None], "staple").labels).all()
    assert not void[..., 32:].any()


def test_staple_of_agreement_is_what_all_say():
    pytest.importorskip("SimpleITK")
    mask = HAND[:, :1].expand(-1, 3, -1, -1)
    assert (consensus(mask, "staple").labels == mask[:, 0]).all()
    assert not consensus(torch.zeros_like(mask), "staple").labels.any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
def test_copies_keep_the_ratio(counts):
    total = sum(counts)
    copies = copies_of([count / total for count in counts])
    assert sum(copies) <= 100
    if total // math.gcd(*counts) <= 100:
        assert [n * total for n in copies] == [count * sum(copies) for count in counts]
    else:
        assert all(abs(n - 100 * count / total) < 1 for n, count in zip(copies, counts, strict=True))
