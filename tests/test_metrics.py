from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import (
    PROTOCOLS,
    MaskDistribution,
    bootstrap,
    ece,
    ged,
    matched_iou,
    pixel_entropy,
    reliability_curve,
    sample_diversity,
)
from tests import reference


def pair(seed: int, B=2, N=4, M=3, C=3, spatial=(4, 4), weighted=True, void=True):
    g = torch.Generator().manual_seed(seed)

    def side(count: int, valid: torch.Tensor | None) -> MaskDistribution:
        weights = (torch.randn(B, count, generator=g, dtype=torch.float64)).softmax(1) if weighted else None
        return MaskDistribution(torch.randint(C, (B, count, *spatial), generator=g), weights, valid)

    valid = torch.rand(B, *spatial, generator=g) < 0.8 if void else None
    return side(N, None), side(M, valid)


# -- GED -----------------------------------------------------------------------------------------------------


def test_ged_hand_case():
    """Two readers disagree wholly (d = 1). One of them predicted: 2·½ − 0 − ½. Both predicted: 0."""
    readers = torch.tensor([[[[1, 1]], [[0, 0]]]])
    assert ged(readers[:, :1], readers).item() == 0.5
    assert ged(readers, readers).item() == 0.0
    skewed = MaskDistribution(readers, torch.tensor([[0.75, 0.25]]))
    # 2(¾·½ + ¼·½) − 2·¾·¼ − ½
    assert ged(skewed, readers).item() == pytest.approx(0.125)


@given(
    st.integers(0, 10**6),
    st.sampled_from([(1,), (1, 2)]),
    st.sampled_from(["mose", "kohl2018", "phiseg", "ccdm"]),
    st.booleans(),
    st.sampled_from([(3, 3), (2, 2, 3)]),
)
def test_ged_equals_its_definition(seed, classes, protocol, weighted, spatial):
    pred, truth = pair(seed, C=3, weighted=weighted, spatial=spatial)
    assert truth.valid is not None
    absent = PROTOCOLS[protocol].absent(classes)
    expected = []
    for b, valid in enumerate(truth.valid.numpy()):
        samples, annotations, u, v = (x[b].numpy() for x in (pred.labels, truth.labels, pred.mass, truth.mass))
        expected.append(reference.ged(samples, annotations, u, v, classes, absent, valid))
    assert np.allclose(ged(pred, truth, classes, protocol).numpy(), expected, equal_nan=True, atol=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_ged_is_symmetric_non_negative_and_zero_for_equals(seed, N):
    pred, truth = pair(seed, N=N, void=False)
    forward, backward = ged(pred, truth), ged(truth, pred)
    assert torch.allclose(forward, backward)
    assert (forward >= -1e-12).all()  # 1 − IoU is a metric of negative type
    assert torch.allclose(ged(pred, pred), torch.zeros_like(forward), atol=1e-12)


@given(st.integers(0, 10**6))
def test_a_repeated_mask_is_the_same_as_its_weight(seed):
    labels = torch.randint(2, (2, 3, 4, 4), generator=torch.Generator().manual_seed(seed))
    repeated = MaskDistribution(labels[:, [0, 0, 1, 2]])
    weighted = MaskDistribution(labels, torch.tensor([[0.5, 0.25, 0.25]]).repeat(2, 1))
    truth = torch.randint(2, (2, 3, 4, 4), generator=torch.Generator().manual_seed(seed + 1))
    assert torch.allclose(ged(repeated, truth), ged(weighted, truth))
    assert torch.allclose(matched_iou(repeated, truth), matched_iou(weighted, truth))
    assert torch.allclose(sample_diversity(repeated), sample_diversity(weighted))


@pytest.mark.parametrize("name", ["lidc", "city"])
@pytest.mark.parametrize("weights", ["uniform", "weighted"])
def test_golden_metrics_of_the_released_code(golden, name, weights):
    def get(key):
        return golden(f"metric_{name}_{weights}_{key}")

    classes = golden(f"metric_{name}_class_ids").tolist()
    pred = MaskDistribution(get("samples"), get("sample_weights"))
    truth = MaskDistribution(get("annotations"), get("annotation_weights"))
    assert torch.allclose(ged(pred, truth, classes), get("ged"), atol=1e-5, rtol=0)
    assert torch.allclose(matched_iou(pred, truth, classes), get("matched_iou"), atol=1e-5, rtol=0)
    found = ece(get("marginal_pred")[None], get("marginal_annotation")[None], classes)
    assert found == pytest.approx(get("ece").item(), abs=1e-5)


def test_a_perfect_sampler_has_unbiased_ged_zero_and_biased_ged_diversity_over_n():
    """Samples drawn from the annotations. In expectation: unbiased 0, as published E[d]/N, whatever N is."""
    g = torch.Generator().manual_seed(0)
    truth = MaskDistribution(torch.randint(2, (1, 4, 6, 6), generator=g), torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    diversity = sample_diversity(truth).item()
    trials = 4000
    for N in (2, 8, 16):
        drawn = torch.multinomial(truth.mass[0], trials * N, replacement=True, generator=g).view(trials, N)
        samples = MaskDistribution(truth.labels[0][drawn])
        everywhere = MaskDistribution(truth.labels.expand(trials, -1, -1, -1), truth.mass.expand(trials, -1))
        for unbiased, expected in ((True, 0.0), (False, diversity / N)):
            values = ged(samples, everywhere, unbiased=unbiased)
            error = values.std().item() / math.sqrt(trials)
            assert values.mean().item() == pytest.approx(expected, abs=4 * error)
        assert diversity / N > 8 * error  # the two expectations are told apart


def test_unbiased_weighted_by_hand_and_its_limits():
    a, b = torch.ones(1, 1, 2, 2).long(), torch.zeros(1, 1, 2, 2).long()
    pred = MaskDistribution(torch.cat([a, b], 1), torch.tensor([[0.9, 0.1]]))
    # E[d(S,S′)] without self-pairs: 2·.9·.1·1 / (1 − .81 − .01) = 1;   2·(.9·0 + .1·1) − 1 − 0
    assert ged(pred, a, unbiased=True).item() == pytest.approx(0.2 - 1)
    assert sample_diversity(pred, unbiased=True).item() == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 2 samples an image, found 1"):
        ged(a, b, unbiased=True)


# -- matched IoU ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6), st.sampled_from([(1,), (1, 2)]))
def test_matched_iou_equals_hungarian_matching_after_repetition(seed, N, M, classes):
    """Optimal transport of equal weights = one-to-one matching of N·r copies against M·s, at the common multiple."""
    pred, truth = pair(seed, N=N, M=M, C=3, weighted=False, void=False)
    expected = [
        reference.hungarian_iou(s.numpy(), t.numpy(), classes, "agree")
        for s, t in zip(pred.labels, truth.labels, strict=True)
    ]
    assert np.allclose(matched_iou(pred, truth, classes, "ccdm").numpy(), expected, atol=1e-9)


@given(st.integers(0, 10**6))
def test_matched_iou_of_weighted_masks_is_optimal_transport(seed):
    pred, truth = pair(seed, void=False)
    found = matched_iou(pred, truth)
    for b in range(2):
        samples, annotations = pred.labels[b].numpy(), truth.labels[b].numpy()
        d = [[1 - reference.iou(s, t, (1,), "agree") for t in annotations] for s in samples]
        expected = 1 - reference.transport_value(d, pred.mass[b], truth.mass[b])
        assert found[b].item() == pytest.approx(expected, abs=1e-9)


def test_rectangular_matching_forgets_the_other_samples():
    truth = torch.tensor([[[[1, 1, 0, 0]], [[0, 0, 1, 1]]]])
    noise = torch.tensor([[[[0, 1, 1, 0]], [[0, 1, 1, 0]]]])
    pred = torch.cat([truth, noise], 1)
    assert matched_iou(pred, truth, protocol="rectangular").item() == 1.0
    assert matched_iou(pred, truth).item() == pytest.approx((1 + 1 / 3) / 2)
    padded = MaskDistribution.concat([MaskDistribution(truth), MaskDistribution(pred)])  # two readers and four
    twice = MaskDistribution.concat([MaskDistribution(pred)] * 2)
    assert matched_iou(twice, padded, protocol="rectangular").tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no weighted form, found unequal weights of the annotations"):
        matched_iou(pred, MaskDistribution(truth, torch.tensor([[0.3, 0.7]])), protocol="rectangular")


# -- the protocols, each pinned ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "both_empty", "absent_class"),
    [
        ("mose", 0.0, 0.5),
        ("kohl2018", math.nan, 0.5),
        ("phiseg", 0.0, 0.25),
        ("ccdm", 0.0, 0.25),
        ("rectangular", 0.0, 0.5),
    ],
)
def test_protocols_on_empty_masks_and_absent_classes(protocol, both_empty, absent_class):
    empty = torch.zeros(1, 1, 2, 2, dtype=torch.long)
    assert ged(empty, empty, protocol=protocol).item() == pytest.approx(both_empty, nan_ok=True)
    assert matched_iou(empty, empty, protocol=protocol).item() == pytest.approx(1 - both_empty, nan_ok=True)
    # class 1 has IoU ½; class 3 is in neither mask and is left out or counts as 1
    a, b = torch.tensor([[[[1, 1]]]]), torch.tensor([[[[1, 2]]]])
    d = 1 - matched_iou(a, b, (1, 3), protocol).item()
    assert d == pytest.approx(absent_class)
    assert ged(a, b, (1, 3), protocol).item() == pytest.approx(2 * absent_class)


def test_a_pair_with_none_of_the_classes_makes_an_image_undefined_where_classes_are_skipped():
    pred = torch.tensor([[[[1, 2]], [[0, 0]]]])
    truth = torch.tensor([[[[0, 0]]]])
    assert ged(pred, truth, (1, 2)).isnan().all()
    assert matched_iou(pred, truth, (1, 2)).isnan().all()
    assert not ged(pred, truth, (1, 2), "phiseg").isnan().any()
    only_first = MaskDistribution(pred, torch.tensor([[1.0, 0.0]]))  # an absent mask cannot undefine anything
    assert matched_iou(only_first, truth, (1, 2)).item() == 0.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_image_without_valid_pixels_has_no_score(protocol):
    labels = torch.randint(2, (2, 3, 4, 4))
    valid = torch.ones(2, 4, 4, dtype=torch.bool)
    valid[1] = False
    truth = MaskDistribution(labels, valid=valid)
    for values in (
        ged(labels, truth, protocol=protocol),
        matched_iou(labels, truth, protocol=protocol),
        sample_diversity(truth, protocol=protocol),
        pixel_entropy(truth),
    ):
        assert values.isnan().tolist() == [False, True]


def test_padded_annotators_never_count():
    pred, truth = pair(3, B=1, N=4, M=3, void=False)
    wide = MaskDistribution.concat([truth, MaskDistribution(torch.zeros(1, 5, 4, 4, dtype=torch.long))])[0]
    assert wide.count == 5
    for metric in (ged, matched_iou):
        assert torch.allclose(metric(pred, wide), metric(pred, truth))
    assert torch.allclose(sample_diversity(wide), sample_diversity(truth))


@pytest.mark.parametrize("metric", [ged, matched_iou])
def test_bad_metric_inputs_are_refused(metric):
    a = torch.zeros(1, 2, 4, 4, dtype=torch.long)
    for pred, truth, kwargs, message in (
        (a, a[..., :3], {}, "same size"),
        (a, a.repeat(2, 1, 1, 1), {}, "same images"),
        (a[0], a, {}, r"found shape \[2, 4, 4\]"),
        (a, a, {"classes": ()}, "at least one class id"),
        (a, a, {"protocol": "mine"}, "one of mose, kohl2018, phiseg, ccdm, rectangular, found 'mine'"),
        (a.float(), a, {}, "integer class ids"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(pred, truth, **kwargs)


@given(st.data())
def test_any_input_is_scored_or_refused_with_a_value_error(data):
    """Random ranks, sizes, dtypes, weights and voids: a finite or documented nan value, or a ValueError. No crash."""

    def draw_side() -> MaskDistribution:
        shape = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=6))
        dtype = data.draw(st.sampled_from([torch.uint8, torch.int64, torch.bool, torch.float32]))
        labels = torch.randint(-1 if data.draw(st.booleans()) else 0, 3, shape).to(dtype)
        weights = torch.rand(shape[:2]) if data.draw(st.booleans()) else None
        if weights is not None and data.draw(st.booleans()):
            weights = weights / weights.sum(1, keepdim=True)
        valid = torch.rand([*shape[:1], *shape[2:]]) < 0.5 if data.draw(st.booleans()) else None
        return MaskDistribution(labels, weights, valid)

    classes = data.draw(st.lists(st.integers(-1, 3), max_size=3))
    protocol = data.draw(st.sampled_from([*PROTOCOLS, "none"]))
    try:
        pred, truth = draw_side(), draw_side()
        scores = [ged(pred, truth, classes, protocol), matched_iou(pred, truth, classes, protocol)]
    except ValueError:
        return
    for values in scores:
        assert values.shape == (len(pred),)
        assert (values.isnan() | ((values > -1e-9) & (values < 2 + 1e-9))).all()


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


@pytest.mark.parametrize(
    ("pred", "truth", "kwargs", "message"),
    [
        (torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 3), {}, "one shape, found"),
        (torch.zeros(2, 2), torch.zeros(2, 2), {}, r"\[B, C, \*spatial\]"),
        (torch.zeros(0, 2, 2), torch.zeros(0, 2, 2), {}, "must not be empty"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"classes": (2,)}, "below 2, found"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"bins": 0}, "at least 1, found 0"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), {"valid": torch.ones(1, 2)}, r"valid must be bool \[1, 2\]"),
        (torch.full((1, 2, 2), 1.5), torch.zeros(1, 2, 2), {}, "probabilities up to 1, found 1.5"),
        (torch.full((1, 2, 2), math.nan), torch.zeros(1, 2, 2), {}, "probabilities up to 1, found nan"),
    ],
)
def test_bad_marginals_are_refused(pred, truth, kwargs, message):
    with pytest.raises(ValueError, match=message):
        ece(pred, truth, **kwargs)


# -- diversity, entropy, intervals ---------------------------------------------------------------------------


def test_diversity_is_the_self_term_of_ged():
    pred, truth = pair(5, void=False)
    cross = ged(pred, truth) + sample_diversity(pred) + sample_diversity(truth)
    both = MaskDistribution(torch.cat([pred.labels, truth.labels], 1), torch.cat([pred.mass, truth.mass], 1) / 2)
    # E over the half-half mixture = ¼ (SS + YY + 2 SY)
    expected = (sample_diversity(pred) + sample_diversity(truth) + cross) / 4
    assert torch.allclose(sample_diversity(both), expected)


def test_entropy_is_averaged_over_valid_pixels_only():
    labels = torch.tensor([[[[0, 1, 1]], [[1, 1, 0]]]])
    assert pixel_entropy(labels).item() == pytest.approx(2 / 3 * math.log(2))
    valid = torch.tensor([[[True, True, False]]])
    assert pixel_entropy(MaskDistribution(labels, valid=valid)).item() == pytest.approx(math.log(2) / 2)


def test_bootstrap_resamples_patients_not_images():
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(20), 10)
    values = rng.normal(size=20)[patients]  # all images of a patient alike
    by_patient, by_image = bootstrap(values, patients), bootstrap(values)
    assert by_patient.mean == pytest.approx(values.mean())
    width = by_patient.high - by_patient.low
    assert width == pytest.approx((by_image.high - by_image.low) * math.sqrt(10), rel=0.15)
    assert width == pytest.approx(2 * 1.96 * values.std() / math.sqrt(20), rel=0.15)


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
    assert bootstrap(torch.tensor([1.0, 1.0])) == bootstrap([1.0, 1.0])
    assert str(bootstrap([1.0, 1.0])) == "1.0000 [1.0000, 1.0000]"


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([],), {}, "one number an image"),
        (([[1.0]],), {}, r"found shape \[1, 1\]"),
        (([1.0, 2.0], ["a"]), {}, "each of 2 images, found 1"),
        (([1.0, 2.0],), {"baseline": [1.0]}, "found 1 against 2"),
        (([1.0],), {"level": 95}, "level must be in"),
    ],
)
def test_bad_bootstrap_inputs_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(*args, **kwargs)
