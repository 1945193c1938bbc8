"""Flips: a hand case, the 2ⁿ maps written out, and what holds for any table and any map."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import DataError
from ambiseg.data.augment import Augment
from ambiseg.data.case import Case
from ambiseg.data.config import DataConfig, open_cases
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import BatchSpec, Loader, Window
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.street.flips import Flips, flip_modes, happening, mode_weights
from ambiseg.data.store import Store
from ambiseg.masks import MaskDistribution
from ambiseg.methods.mose.model import MoSE
from ambiseg.overlap import ce_cost
from tests.cases import Listed, random_cases
from tests.files import make

TABLE = {"class 1": ("one", "1/4"), "class 2": ("two", 0.5), 3: ("class 0", "2/5")}


def one_map(seed: int = 0, size: tuple[int, int] = (6, 5), classes: int = 5, count: int = 2) -> Listed:
    rng = np.random.default_rng(seed)
    cases = []
    for i in range(count):
        labels = rng.choice(rng.permutation(classes)[: 1 + int(rng.integers(classes))], size)
        valid = rng.random(size) > 0.3
        image = rng.normal(size=(2, *size)).astype(np.float32)
        cases.append(Case.of(image, labels[None], name=f"f{i}", readers=("map",), valid=valid))
    return Listed(cases, classes)


def written_out(labels: np.ndarray, valid: np.ndarray, flips) -> dict[bytes, float]:
    """Every combination's full map, void set to 255, with its probability; equal maps are one."""
    found: dict[bytes, float] = {}
    for happens in itertools.product((False, True), repeat=len(flips)):
        made, weight = labels.astype(np.int64).copy(), 1.0
        for flip, does in zip(flips, happens, strict=True):
            weight *= flip.probability if does else 1 - flip.probability
            if does:
                made[labels == flip.source] = flip.target
        key = np.where(valid, made, 255).astype(np.uint8).tobytes()
        found[key] = found.get(key, 0) + weight
    return found


def test_a_flip_by_hand():
    labels = np.array([[[0, 1, 1], [2, 2, 4]]])
    case = Case.of(
        np.zeros((1, 2, 3)), labels, name="a", readers=("map",), valid=np.array([[1, 1, 1], [1, 1, 0]], bool)
    )
    cases = Flips(Listed([case], 5), {1: ("new", "8/17"), 4: ("other", 0.5)})
    made = cases[0]
    assert cases.classes == ("class 0", "class 1", "class 2", "class 3", "class 4", "new", "other")
    assert cases.evaluated == (1, 4, 5, 6)
    assert made.readers == ("0-", "1-")  # class 4 is only where nothing counts
    assert made.weights is not None
    np.testing.assert_allclose(made.weights, [9 / 17, 8 / 17])
    assert made.labels.tolist() == [[[0, 1, 1], [2, 2, 0]], [[0, 5, 5], [2, 2, 0]]]  # void holds nothing
    assert made.regions is case.regions  # one map for all modes


@given(st.integers(0, 10_000))
def test_modes_are_the_maps_written_out(seed):
    cases = one_map(seed)
    flipped = Flips(cases, TABLE)
    for i in range(len(cases)):
        plain, made = cases[i], flipped[i]
        assert plain.valid is not None
        expected = written_out(plain.labels[0], plain.valid, flipped.flips)
        assert made.weights is not None
        found = {
            np.where(plain.valid, mask, 255).astype(np.uint8).tobytes(): weight
            for mask, weight in zip(made.labels, made.weights, strict=True)
        }
        assert len(found) == len(made.readers) == len(set(made.readers))  # no two modes are equal
        assert found.keys() == expected.keys()
        for key, weight in expected.items():
            assert found[key] == pytest.approx(weight)
        assert made.mass.sum() == pytest.approx(1)
        assert plain.void is not None
        counts = ~plain.void
        allowed = {*plain.table[counts, 0].tolist(), *(f.target for f in flipped.flips)}
        assert {*made.table[counts].flatten().tolist()} <= allowed  # no class id is invented
        assert np.array_equal(made.table[counts, 0], plain.table[counts, 0])  # the first mode has no flips


def test_flips_that_meet_are_merged():
    flips = Flips(one_map(classes=3), {0: (1, 0.5), 1: (0, 0.25)}).flips
    both = flip_modes(np.array([0, 1]), np.ones(2, bool), flips)
    assert both.table.T.tolist() == [[0, 1], [0, 0], [1, 1], [1, 0]]
    alone = flip_modes(np.array([0, 1]), np.array([True, False]), flips)
    assert alone.names == ("0-", "1-")
    assert alone.weights.tolist() == [0.5, 0.5]
    assert alone.which.tolist() == [0, 0, 1, 1]


def test_thirty_two_modes_have_the_probabilities_of_the_paper():
    weights = mode_weights(Flips(one_map(classes=5), {c: (f"n{c}", f"{8 - c}/17") for c in range(5)}).flips)
    assert len(weights) == 32
    assert weights.sum() == pytest.approx(1)
    assert weights[0] == pytest.approx(9 * 10 * 11 * 12 * 13 / 17**5)
    assert weights[0b10001] == pytest.approx(8 * 10 * 11 * 12 * 4 / 17**5)
    assert happening(5)[0b10001].tolist() == [True, False, False, False, True]


def test_batches_of_unequal_numbers_of_modes():
    cases = Flips(one_map(3, (12, 10), count=6), TABLE)
    counts = {len(case.readers) for case in cases}
    assert len(counts) > 1
    loader = Loader(cases, Intensity(), Window((8, 8)), Augment(scale=(0.8, 1.2), flip="horizontal"))
    batch = loader[BatchSpec(tuple(range(6)), 3)]
    annotations = batch.annotations
    model = MoSE(
        2, len(cases.classes), experts=9, samples=1, latent=3, backbone="unet-light", cost="ce", solver="exact"
    )
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    settings: dict[str, Any] = {"capacity": 1 / 8, "annealing": 0.5, "group_threshold": 0.9}
    lazy = model.loss(batch.images, annotations, generator=generators[0], **settings)
    assert "labels" not in vars(annotations)  # no mode was written out
    written = MaskDistribution(annotations.labels, annotations.weights, annotations.valid)
    full = model.loss(batch.images, written, generator=generators[1], **settings)
    assert lazy["total"].item() == pytest.approx(full["total"].item(), rel=1e-4)
    torch.testing.assert_close(annotations.marginal_probs(8), written.marginal_probs(8))
    assert annotations[0].labels.shape == (1, *annotations.labels.shape[1:])
    assert annotations.to("cpu").mass.sum() == pytest.approx(6)


def test_a_store_keeps_flips(tmp_path):
    cases = Flips(one_map(4, count=4), TABLE)
    store = Store.build(cases, tmp_path)
    assert store.flips == cases.flips
    for i in range(4):
        assert np.array_equal(store[i].table, cases[i].table)
        assert store[i].readers == cases[i].readers
        assert store[i].mass == pytest.approx(cases[i].mass)
        assert store.digest(i) == cases.digest(i)
    other = Flips(cases.cases, {**TABLE, "class 1": ("one", "1/3")})
    assert other.state() != cases.state()
    assert other.digest(0) != cases.digest(0)
    assert other.image_digest(0) == cases.image_digest(0)


@pytest.mark.parametrize("foreground", [1, 255])
def test_a_store_of_files_whose_labels_are_found_on_the_way_has_the_same_flips(tmp_path, foreground):
    cases = Flips(Folder(make(tmp_path / "data", readers=["map"], foreground=foreground)), {1: ("other", "1/4")})
    store = Store.build(cases, tmp_path / "store")
    for i, case in enumerate(cases):
        assert case.readers == ("0", "1")
        assert np.array_equal(store[i].labels, case.labels)
        assert (store.digest(i), store.image_digest(i)) == (cases.digest(i), cases.image_digest(i))


def test_any_data_set_takes_flips_as_an_option():
    config = DataConfig(name="shapes", options={"count": 4, "size": 16, "flips": {1: ["other", "1/3"]}})
    cases = open_cases(config)
    assert isinstance(cases, Flips)
    assert cases.classes[-1] == "other"
    with pytest.raises(DataError, match=r"expected one class-id map to flip, found \d+ readers"):
        cases[0]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "for 1 to 12 classes, found 0"),
        ([1], r"for 1 to 12 classes, found \[1\]"),
        ({"road": ("road2", 0.5)}, "expected one of the classes class 0, class 1, class 2, found 'road'"),
        ({7: ("x", 0.5)}, "found 7"),
        ({1: (9, 0.5)}, "found 9"),
        ({1: ("x", "8//17")}, "class.*|1: expected a probability such as 0.25 or 8/17, found '8//17'"),
        ({1: ("x", 0)}, "between 0 and 1, found 0"),
        ({1: ("x", "5/4")}, "between 0 and 1, found 5/4"),
        ({1: ("x", None)}, "found None"),
        ({1: "x"}, r"expected \[new class, probability\], found 'x'"),
        ({1: ("class 1", 0.5)}, "expected another class to become, found itself"),
        ({1: ("x", 0.5), "class 1": ("y", 0.5)}, "expected each class once"),
    ],
)
def test_bad_tables_are_named(table, expected):
    with pytest.raises(DataError, match=f"flips: .*{expected}") as caught:
        Flips(random_cases(1, readers=1), table)
    assert "\n" not in str(caught.value)


def test_classes_may_weigh_differently():
    """Against PyTorch's own weighted cross-entropy, one pair after the other; void and absent modes as ever."""
    cases = Flips(one_map(3, (12, 10), count=3), TABLE)
    batch = Loader(cases, Intensity(), Window(None))[BatchSpec((0, 1, 2), 0)]
    C, annotations = len(cases.classes), batch.annotations
    logits, weights = torch.randn(3, 4, C, 12, 10), torch.rand(C) + 0.1
    found = ce_cost(logits, annotations, regions=batch.annotations.regions, class_weights=weights)
    assert annotations.valid is not None
    for b, n, m in itertools.product(range(3), range(4), range(annotations.count)):
        if annotations.mass[b, m] > 0:
            target = torch.where(annotations.valid[b], annotations.labels[b, m].long(), -100)
            expected = torch.nn.functional.cross_entropy(logits[b, n][None], target[None], weights)
            assert found[b, n, m].item() == pytest.approx(expected.item(), rel=1e-4)
    options: dict[str, Any] = {"in_channels": 2, "classes": C, "backbone": "unet-light", "cost": "ce"}
    model = MoSE(**options, class_weights=weights.tolist())
    assert "class_weights" not in model.state_dict()
    loss = [m.loss(batch.images, annotations)["total"] for m in (model, MoSE(**options))]
    assert all(value.isfinite() for value in loss)
    for wrong in ({"class_weights": [1.0]}, {"class_weights": [0.0] * C}, {"class_weights": [1.0] * C, "cost": "iou"}):
        with pytest.raises(ValueError, match="class_weights: expected"):
            MoSE(**{**options, **wrong})
