from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg import (
    PROTOCOLS,
    MaskDistribution,
    ece,
    ged,
    matched_iou,
    pixel_entropy,
    sample_diversity,
)
from ambiseg.metrics import compare
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
    with pytest.raises(ValueError, match="at least 2 masks per image, found 1"):
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
    found = matched_iou(pred, truth, classes=(1,))
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
    first_absent = MaskDistribution(torch.cat([noise[:, :1], truth], 1), torch.tensor([[0.0, 0.5, 0.5]]))
    assert matched_iou(pred, first_absent, protocol="rectangular").item() == 1.0
    assert matched_iou(first_absent, pred, protocol="rectangular").item() == 1.0  # N < M: the annotations' turn
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
    both = MaskDistribution(torch.tensor([[[[1, 2]], [[0, 0]]]]), torch.tensor([[1.0, 0.0]]))
    assert ged(both, only_first, (1, 2)).item() == 0.0


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


CORRUPTIONS = {
    "none": lambda d, g: d,
    "float labels": lambda d, g: {**d, "labels": d["labels"].float()},
    "negative label": lambda d, g: {**d, "labels": d["labels"].long() - 5},
    "missing axis": lambda d, g: {**d, "labels": d["labels"][0]},
    "extra axis": lambda d, g: {**d, "labels": d["labels"][None, None]},
    "no images": lambda d, g: {**d, "labels": d["labels"][:0]},
    "no masks": lambda d, g: {**d, "labels": d["labels"][:, :0]},
    "other size": lambda d, g: {"labels": torch.cat([d["labels"]] * 2, -1)},
    "other batch": lambda d, g: {"labels": torch.cat([d["labels"]] * 2)},
    "negative weight": lambda d, g: {**d, "weights": d["weights"] - 1},
    "unnormalised": lambda d, g: {**d, "weights": d["weights"] * 1.3},
    "nan weight": lambda d, g: {**d, "weights": d["weights"] * torch.nan},
    "wrong weights": lambda d, g: {**d, "weights": d["weights"][:, :1].expand(-1, d["weights"].shape[1] + 1)},
    "float valid": lambda d, g: {**d, "valid": d["valid"].float()},
    "all void": lambda d, g: {**d, "valid": torch.zeros_like(d["valid"])},
    "transposed": lambda d, g: {**d, "labels": d["labels"].transpose(-1, -2).contiguous().transpose(-1, -2)},
}
HARMLESS = ("none", "all void", "transposed")


@settings(max_examples=1500)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from([(3, 4), (1, 1), (2, 3, 2)]),
    st.sampled_from(list(CORRUPTIONS)),
    st.sampled_from(["pred", "truth"]),
    st.sampled_from([(1,), (1, 2), (0, 2, 7)]),
    st.sampled_from(["mose", "kohl2018", "phiseg", "ccdm"]),
)
def test_any_input_is_scored_or_refused_with_a_value_error(seed, sizes, spatial, corruption, side, classes, protocol):
    """A good pair, one thing wrong with one of them: a score in range (or nan, where documented), or a ValueError."""
    g = torch.Generator().manual_seed(seed)
    B, N, M = sizes

    def draw(count: int) -> dict[str, torch.Tensor]:
        weights = torch.rand(B, count, generator=g) * (torch.rand(B, count, generator=g) < 0.8) + 1e-3
        return {
            "labels": torch.randint(3, (B, count, *spatial), generator=g),
            "weights": weights / weights.sum(1, keepdim=True),
            "valid": torch.rand(B, *spatial, generator=g) < 0.8,
        }

    sides = {"pred": draw(N), "truth": draw(M)}
    sides[side] = CORRUPTIONS[corruption](sides[side], g)
    if corruption not in HARMLESS:
        with pytest.raises(ValueError, match=r"\w"):
            ged(MaskDistribution(**sides["pred"]), MaskDistribution(**sides["truth"]), classes, protocol)
        return
    pred, truth = (MaskDistribution(**x) for x in sides.values())
    for values in (ged(pred, truth, classes, protocol), matched_iou(pred, truth, classes, protocol)):
        assert values.shape == (B,)
        assert (values.isnan() | ((values > -1e-9) & (values < 2 + 1e-9))).all()
        if corruption == "all void":
            assert values.isnan().all()
        elif protocol in ("phiseg", "ccdm"):
            both = sides["pred"]["valid"] & sides["truth"]["valid"]
            assert torch.equal(values.isnan(), ~both.flatten(1).any(1))


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


@pytest.mark.parametrize("protocol", ["mose", "kohl2018"])
def test_one_comparison_has_all_that_the_metrics_have(protocol):
    pred, truth = pair(0, N=6)
    options = {"classes": (1, 2), "protocol": protocol}
    pred = replace(pred, valid=truth.valid)  # diversity looks at one distribution alone
    both = compare(pred, truth, **options)
    equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    equal(both.ged(), ged(pred, truth, **options))
    equal(both.ged(unbiased=True), ged(pred, truth, unbiased=True, **options))
    equal(both.matched_iou(), matched_iou(pred, truth, **options))
    equal(both.diversity(), sample_diversity(pred, **options))
    equal(both.truth_diversity(), sample_diversity(truth, **options))
    alone = [sample_diversity(MaskDistribution(x, valid=pred.valid), **options) for x in pred.labels.split(2, 1)]
    equal(both.diversity(strata=3), torch.stack(alone, 1))
    marked = [(x.class_ids(3) > 0).flatten(2).any(2) for x in (pred, truth)]
    assert torch.equal(both.marked, torch.cat(marked, 1))
