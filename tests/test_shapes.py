from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg import PROTOCOLS, MaskDistribution, ged, matched_iou, sample_diversity
from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.splits import Split, check_leakage, fingerprint

KINDS = [Shapes(count=12, size=24), Shapes(count=12, size=24, classes=4)]
KINDS_IDS = ["binary", "multi-class"]


def same(a: Case, b: Case) -> bool:
    return (
        np.array_equal(a.image, b.image)
        and np.array_equal(a.labels, b.labels)
        and np.array_equal(a.mass, b.mass)
        and (a.name, a.patient, a.readers) == (b.name, b.patient, b.readers)
    )


def draws(truth: MaskDistribution, count: int):
    """Every ordered way to draw ``count`` masks, with its probability: slow and obvious."""
    weights = truth.mass[0].tolist()
    for chosen in itertools.product(range(truth.count), repeat=count):
        yield math.prod(weights[k] for k in chosen), truth.labels[:, list(chosen)]


# -- what is drawn -------------------------------------------------------------------------------------------


def test_probabilities_by_hand():
    shapes = Shapes(count=20, jitter=2)
    for i in range(20):
        scene, outcomes = shapes.scene(i), shapes.outcomes(i)
        a = {"body": 1, "halo": 2 * scene.halo, "companion": 2 * scene.companion, "missed": 2 * scene.paleness}
        for mode, propensity in a.items():
            found = [(o.offset, o.probability) for o in outcomes if o.mode == mode]
            p = propensity / sum(a.values())
            if mode == "missed":
                assert found == [(0, pytest.approx(p))]
            else:
                assert found == [(j - 2, pytest.approx(p * share / 16)) for j, share in enumerate((1, 4, 6, 4, 1))]
        assert math.fsum(o.probability for o in outcomes) == pytest.approx(1, abs=1e-15)


def test_the_body_has_the_next_class_as_often_as_its_hue_is_on_the_way_there():
    shapes = Shapes(count=20, classes=5)
    seen = set()
    for i in range(20):
        scene, outcomes = shapes.scene(i), shapes.outcomes(i)
        seen |= {o.label for o in outcomes}
        drawn = [o for o in outcomes if o.mode != "missed"]
        following = math.fsum(o.probability for o in drawn if o.label == scene.body_class + 1)
        assert following / math.fsum(o.probability for o in drawn) == pytest.approx(scene.mix)
        assert math.fsum(o.probability for o in outcomes) == pytest.approx(1, abs=1e-15)
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("modes", [1, 2, 3, 4])
def test_fewer_modes_are_the_first_ones(modes):
    shapes = Shapes(modes=modes, jitter=0)
    assert [o.mode for o in shapes.outcomes(0)] == ["body", "halo", "companion", "missed"][:modes]


def inside(scene, y: float, x: float) -> bool:
    """Is a point in the body? By half-planes and by the equation of an ellipse."""
    y, x = y - scene.centre[0], x - scene.centre[1]
    along, across = (math.cos(scene.angle), math.sin(scene.angle)), (-math.sin(scene.angle), math.cos(scene.angle))
    u, v = x * along[0] + y * along[1], x * across[0] + y * across[1]
    if not scene.corners:
        return (u / scene.radius) ** 2 + (v / (scene.aspect * scene.radius)) ** 2 <= 1
    normals = [math.pi / scene.corners * (2 * k + 1) for k in range(scene.corners)]
    return all(u * math.cos(n) + v * math.sin(n) <= scene.radius * math.cos(math.pi / scene.corners) for n in normals)


def test_masks_against_plain_geometry():
    shapes = Shapes(count=16, size=40, jitter=0)
    for i in range(16):
        scene, masks = shapes.scene(i), shapes.distribution(i).labels[0]
        body = torch.tensor([[inside(scene, y, x) for x in range(40)] for y in range(40)])
        assert torch.equal(masks[0].bool(), body)
        companion = masks[2].bool() & ~body
        assert not (companion & masks[1].bool()).sum() > 2  # it touches the halo from outside, but for a pixel or two
        assert int(companion.sum()) == pytest.approx(math.pi * scene.size**2, abs=2 * math.pi * scene.size)
        assert not masks[3].any()
    assert {shapes.scene(i).corners for i in range(16)} == {0, 4, 5, 6}


@pytest.mark.parametrize("classes", [2, 3])
def test_shifts_are_nested_and_only_what_was_missed_is_empty(classes):
    for size, jitter in ((16, 1), (64, 3)):
        shapes = Shapes(count=60, size=size, classes=classes, jitter=jitter)
        for i in range(60):
            outcomes, masks = shapes.outcomes(i), shapes.distribution(i).labels[0]
            assert [k for k, o in enumerate(outcomes) if not masks[k].any()] == (
                [len(outcomes) - 1] if classes == 2 else []
            )
            for k, outcome in enumerate(outcomes[:-1]):
                if outcome.offset < jitter:
                    smaller, larger = masks[k] > 0, masks[k + 1] > 0
                    assert not (smaller & ~larger).any()
                    assert not torch.equal(smaller, larger)


def test_what_decides_the_probabilities_can_be_seen():
    shapes = Shapes(count=60, noise=0, jitter=0)
    seen, told = [], []
    for i in range(60):
        image, masks = shapes[i].image[0].astype(float), shapes.distribution(i).labels[0].numpy().astype(bool)
        body, halo, companion = masks[0], masks[1] & ~masks[0], masks[2] & ~masks[0]
        ground = np.median(image[~masks.any(0)])
        by_body = [(image[part].mean() - ground) / (image[body].mean() - ground) for part in (halo, companion)]
        seen.append([*by_body, ground - image[body].mean()])
        scene = shapes.scene(i)
        told.append([scene.halo, scene.companion, scene.paleness])
    for k in range(3):
        assert np.corrcoef(np.array(seen)[:, k], np.array(told)[:, k])[0, 1] > 0.9


@pytest.mark.parametrize("shapes", KINDS, ids=KINDS_IDS)
def test_a_case_depends_on_seed_and_number_only(shapes):
    again = Shapes(count=40, size=24, classes=len(shapes.classes))
    for i in (11, 3, 7, 3):
        assert same(shapes[i], again[i])
    assert same(shapes[-1], shapes[11])
    assert not np.array_equal(Shapes(size=24, classes=len(shapes.classes), seed=1)[0].image, shapes[0].image)
    assert len({shapes[i].image.tobytes() for i in range(12)}) == 12
    assert same(pickle.loads(pickle.dumps(shapes))[5], shapes[5])
    with pytest.raises(IndexError):
        shapes[12]


@pytest.mark.parametrize("shapes", KINDS, ids=KINDS_IDS)
def test_it_is_what_it_says_it_is(shapes):
    assert isinstance(shapes, Cases)
    case = shapes[0]
    assert case.image.dtype == np.uint8
    assert case.image.shape == (shapes.channels, 24, 24) == (1 if len(shapes.classes) == 2 else 3, 24, 24)
    assert (case.name, case.patient) == (shapes.names[0], shapes.patients[0]) == ("shape-00000", "patient-000")
    assert shapes.evaluated == tuple(range(1, len(shapes.classes)))
    assert max(int(case.labels.max()) for case in shapes) == len(shapes.classes) - 1
    prepared = shapes.intensity(torch.from_numpy(case.image)[None])
    assert -1 <= float(prepared.min()) < float(prepared.max()) <= 1


# -- annotations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_without_readers_a_case_holds_the_whole_distribution(classes):
    shapes = Shapes(count=5, size=24, classes=classes, readers=None)
    for i, case in enumerate(shapes):
        truth, outcomes = shapes.distribution(i), shapes.outcomes(i)
        assert np.array_equal(case.labels, truth.labels[0].numpy())
        assert case.mass == pytest.approx(truth.mass[0].numpy(), abs=1e-7)
        assert case.readers == tuple(f"{o.mode}-{o.label}{o.offset:+d}" for o in outcomes)
        assert np.array_equal(case.image, Shapes(size=24, classes=classes, readers=3)[i].image)


def test_readers_draw_with_the_exact_probabilities():
    shapes = Shapes(count=2, size=32, readers=2000)
    for i in range(2):
        truth, case = shapes.distribution(i), shapes[i]
        place = {mask.numpy().tobytes(): k for k, mask in enumerate(truth.labels[0])}
        assert len(place) == truth.count
        found = np.bincount([place[mask.tobytes()] for mask in case.labels], minlength=truth.count) / 2000
        p = truth.mass[0].numpy()
        assert (abs(found - p) <= 5 * np.sqrt(p * (1 - p) / 2000)).all()


def test_more_readers_are_the_same_and_others():
    few, many = Shapes(readers=3)[5], Shapes(readers=9)[5]
    assert np.array_equal(few.labels, many.labels[:3])
    assert np.array_equal(few.image, many.image)


# -- what a perfect model scores -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [name for name, rule in PROTOCOLS.items() if rule.matching == "transport"])
@pytest.mark.parametrize("classes", [2, 3])
def test_truth_against_every_possible_draw(classes, protocol):
    # Two empty masks have no IoU in kohl2018, so nothing may be missed there.
    modes = 2 if classes == 3 else 3 if protocol == "kohl2018" else 4
    shapes = Shapes(count=2, size=16, classes=classes, jitter=0, modes=modes)
    truth, evaluated = shapes.distribution(1), shapes.evaluated
    for readers in (None, MaskDistribution(torch.from_numpy(shapes[1].labels)[None])):
        against = truth if readers is None else readers
        for samples in (2, 3):
            expected = np.zeros(3)
            for p, masks in draws(truth, samples):
                published = ged(masks, against, evaluated, protocol)
                unbiased = ged(masks, against, evaluated, protocol, unbiased=True)
                matched = matched_iou(masks, against, evaluated, protocol)
                expected += p * torch.cat([published, unbiased, matched]).numpy()
            assert shapes.true_ged(1, samples, readers, protocol) == pytest.approx(expected[0], abs=1e-6)
            assert shapes.true_ged(1, None, readers, protocol) == pytest.approx(expected[1], abs=1e-6)
            assert shapes.true_matched_iou(1, samples, readers, protocol) == (pytest.approx(expected[2], abs=1e-6), 0.0)


def test_what_a_protocol_leaves_undefined_is_nan():
    shapes = Shapes(count=1, size=16, jitter=0)
    assert math.isnan(shapes.true_ged(0, 2, protocol="kohl2018"))
    assert math.isnan(shapes.true_matched_iou(0, 2, protocol="kohl2018").mean)
    assert math.isnan(shapes.best_single(0, protocol="kohl2018").ged)


def test_truth_against_simulation():
    shapes, samples, repeats = Shapes(count=2, size=16), 5, 4000
    truth = shapes.distribution(0)
    wide = MaskDistribution(truth.labels.expand(repeats, -1, -1, -1), truth.mass.expand(repeats, -1))
    drawn = wide.draw(samples, torch.Generator().manual_seed(0))
    for values, expected in (
        (ged(drawn, wide), shapes.true_ged(0, samples)),
        (ged(drawn, wide, unbiased=True), 0.0),
        (matched_iou(drawn[:500], wide[:500]), shapes.true_matched_iou(0, samples, draws=3000).mean),
    ):
        assert abs(float(values.mean()) - expected) < 5 * float(values.std()) / len(values) ** 0.5


def test_readers_who_are_drawn_too_add_their_own_share_to_the_score():
    shapes = Shapes(count=1, size=16, modes=3, jitter=0)
    truth = shapes.distribution(0)
    spread = float(sample_diversity(truth))
    mean = sum(p * shapes.true_ged(0, 2, masks) for p, masks in draws(truth, 3))
    assert mean == pytest.approx(spread / 2 + spread / 3, abs=1e-9)


def test_infinitely_many_samples_leave_nothing_to_wish():
    for shapes in KINDS:
        assert shapes.true_ged(3) == pytest.approx(0, abs=1e-12)
        assert shapes.true_matched_iou(3) == (pytest.approx(1), 0.0)


def test_the_error_of_the_estimate_is_what_it_says():
    shapes = Shapes(count=1, size=16)
    exactly = shapes.true_matched_iou(0, 4, draws=1000)
    assert exactly.error == 0
    estimates = [shapes.true_matched_iou(0, 4, draws=100, seed=seed) for seed in range(40)]
    off = np.array([(estimate.mean - exactly.mean) / estimate.error for estimate in estimates])
    assert abs(off.mean()) < 5 / 40**0.5
    assert 0.6 < off.std() < 1.6
    assert shapes.true_matched_iou(0, 4, draws=100, seed=3) == estimates[3]


@pytest.mark.parametrize("shapes", KINDS, ids=KINDS_IDS)
def test_the_best_single_mask_by_trying_each(shapes):
    truth = shapes.distribution(4)
    for readers in (None, MaskDistribution(torch.from_numpy(shapes[4].labels)[None])):
        against = truth if readers is None else readers
        tried = [
            (float(ged(masks, against, shapes.evaluated)), float(matched_iou(masks, against, shapes.evaluated)))
            for masks in truth.labels[0][:, None, None]
        ]
        best = shapes.best_single(4, readers)
        assert best[1:] == (pytest.approx(min(t[0] for t in tried)), pytest.approx(max(t[1] for t in tried)))
        assert tried[best.mask] == (pytest.approx(best.ged), pytest.approx(best.matched_iou))


@settings(max_examples=15)
@given(st.integers(0, 499), st.sampled_from([2, 3]), st.integers(1, 4), st.integers(0, 1))
def test_more_samples_are_better_and_many_beat_any_single_mask(index, classes, modes, jitter):
    shapes = Shapes(count=500, size=16, classes=classes, modes=modes, jitter=jitter)
    scores = [shapes.true_ged(index, n) for n in (1, 2, 4, None)]
    assert scores == sorted(scores, reverse=True)
    matched = [shapes.true_matched_iou(index, n).mean for n in (1, 2, None)]
    assert matched == pytest.approx(sorted(matched))
    best = shapes.best_single(index)
    assert best.ged >= scores[-1] - 1e-9
    assert matched[0] <= best.matched_iou + 1e-9  # the best mask is better than one at random
    assert math.isfinite(sum(scores) + sum(matched))


def test_wrong_questions_are_refused():
    shapes = Shapes(count=1, size=16)
    for ask in (shapes.true_ged, shapes.true_matched_iou):
        with pytest.raises(ValueError, match="samples must be at least 1, found 0"):
            ask(0, 0)
    with pytest.raises(ValueError, match="protocol must be one of mose, kohl2018, phiseg, ccdm, found 'rectangular'"):
        shapes.true_matched_iou(0, 2, protocol="rectangular")


# -- as a data set -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("count", 0, "count must be from 1 to 100000, found 0"),
        ("size", 8, "size must be from 16"),
        ("classes", 1, "classes must be from 2"),
        ("modes", 5, "modes must be from 1 to 4, found 5"),
        ("readers", 0, "readers must be from 1"),
        ("jitter", 7, "jitter must be from 0 to 6, found 7"),
        ("noise", -1.0, "noise must be from 0"),
        ("per_patient", 0, "per_patient must be from 1"),
        ("seed", -1, "seed must be from 0"),
    ],
)
def test_settings_out_of_range_are_refused(option, value, message):
    with pytest.raises(DataError, match=f"shapes: {message}"):
        Shapes(**{option: value})


def test_digests_tell_apart_what_differs_without_drawing(monkeypatch):
    settings = [
        {},
        {"size": 32},
        {"classes": 3},
        {"modes": 3},
        {"readers": 5},
        {"readers": None},
        {"jitter": 0},
        {"noise": 1.0},
        {"per_patient": 3},
        {"seed": 1},
    ]
    same_picture = [{}, {"modes": 3}, {"readers": 5}, {"jitter": 0}, {"count": 9}]
    pictures = {Shapes(**({"count": 8} | s))[5].image.tobytes() for s in same_picture}
    assert len(pictures) == 1
    monkeypatch.setattr(Shapes, "__getitem__", lambda self, index: pytest.fail("drew an image"))
    digests = [Shapes(count=8, **s).digest(5) for s in settings]  # type: ignore[arg-type]
    assert len(set(digests)) == len(settings)
    assert Shapes(count=9).digest(5) == digests[0]
    assert len({Shapes(**({"count": 8} | s)).image_digest(5) for s in same_picture}) == 1
    assert len({fingerprint(Shapes(count=n)) for n in (8, 9)}) == len({Shapes(count=n).state() for n in (8, 9)}) == 2


def test_patients_share_their_ground_and_kind_and_a_split_keeps_them_together():
    shapes = Shapes(count=120, per_patient=3)
    assert len(set(shapes.patients)) == 40
    check_leakage(shapes, Split.by_hash(shapes))
    for i in range(0, 30, 3):
        assert len({shapes.scene(j).corners for j in range(i, i + 3)}) == 1
