"""Fewer masks that say the same: exact weights, the search among masks, and what ``predict --keep`` makes of it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg import predict
from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.decisions.compaction import choose, compact, simplex_weights
from ambiseg.masks import MaskDistribution
from ambiseg.metrics import PROTOCOLS, ged
from ambiseg.overlap import pairwise_iou
from ambiseg.prediction import Options


def blobs(seed: int, count: int, classes: int = 2, size: int = 6) -> MaskDistribution:
    """Masks that share most of their pixels, some of them equal, with unequal weights."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, classes, (1, 3, size, size), generator=generator)
    which = torch.randint(0, 3, (1, count), generator=generator)
    noise = torch.rand(1, count, size, size, generator=generator) < 0.1
    labels = torch.where(noise, torch.randint(0, classes, noise.shape, generator=generator), base[0, which[0]][None])
    labels[:, which[0] == 0] = base[:, :1]
    mass = torch.rand(1, count, generator=generator) + 0.05
    return MaskDistribution(labels, mass / mass.sum())


def weights_by_enumeration(gram: np.ndarray, target: np.ndarray) -> float:
    """The least value of wᵀGw − 2tᵀw over the simplex, from every set of positive weights."""
    least = np.inf
    for size in range(1, len(target) + 1):
        for some in map(list, itertools.combinations(range(len(target)), size)):
            system = np.block([[gram[np.ix_(some, some)], np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            weights = np.linalg.lstsq(system, np.append(target[some], 1.0), rcond=None)[0][:-1]
            if (weights >= -1e-12).all():
                least = min(least, weights @ gram[np.ix_(some, some)] @ weights - 2 * target[some] @ weights)
    return float(least)


def test_weights_of_a_hand_case():
    weights, least = simplex_weights(np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([0.9, 0.2]))
    np.testing.assert_allclose(weights, [1.0, 0.0], atol=1e-9)  # 0.7 more for the first: the second would be negative
    assert least == pytest.approx(1 - 1.8)
    weights, _ = simplex_weights(np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([0.8, 0.7]))
    np.testing.assert_allclose(weights, [0.6, 0.4], atol=1e-9)  # difference of weights: 0.1 / 0.5


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_weights_are_exact(seed, k):
    masks = blobs(seed, 9)
    iou, mass = pairwise_iou(masks, masks, [1])[0].numpy(), masks.mass[0].double().numpy()
    some = np.random.default_rng(seed).choice(9, k, replace=False)
    gram, target = iou[np.ix_(some, some)], iou[some] @ mass
    weights, least = simplex_weights(gram, target)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    assert least == pytest.approx(weights_by_enumeration(gram, target), abs=1e-7)


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_no_exchange_of_one_mask_improves_what_the_search_finds(seed):
    masks = blobs(seed, 8)
    iou, mass = pairwise_iou(masks, masks, [1])[0].numpy(), masks.mass[0].double().numpy()
    mass, target = mass / mass.sum(), iou @ (mass / mass.sum())

    def value(some):
        return weights_by_enumeration(iou[np.ix_(some, some)], target[list(some)])

    kept = choose(iou, mass, 3)
    for place, other in itertools.product(range(len(kept)), range(8)):
        exchanged = [*np.delete(kept, place), other]
        assert len(set(exchanged)) < len(kept) or value(kept) <= value(exchanged) + 1e-7
    assert value(kept) <= min(value(pair) for pair in itertools.combinations(kept, max(1, len(kept) - 1))) + 1e-7


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("classes", [2, 4])
def test_loss_is_ged_and_falls_with_k(protocol, classes):
    masks = MaskDistribution.concat([blobs(seed, 12, classes) for seed in range(3)])
    losses = []
    for k in (1, 2, 3, 5, 12):
        found = compact(masks, k, protocol=protocol)
        assert found.masks.count == k
        assert found.masks.valid is None
        scored = ged(found.masks, masks, range(1, classes), protocol)
        torch.testing.assert_close(scored, found.loss, atol=1e-6, rtol=0)
        losses.append(found.loss)
        assert (found.masks.mass.diff(dim=1) <= 0).all()
        for b, chosen in enumerate(found.chosen):
            own = chosen[chosen >= 0]
            assert torch.equal(found.masks.labels[b, : len(own)], masks.labels[b, own])
    assert (torch.stack(losses).diff(dim=0) <= 1e-9).all()
    assert float(losses[-1].max()) < 1e-8  # all of them


def test_distances_are_of_negative_type_in_every_protocol():
    """What makes the weights a convex problem; classes that are in neither mask included."""
    for seed, absent in itertools.product(range(20), ("agree", "skip")):
        masks = torch.randint(0, 4, (1, 14, 1, 4), generator=torch.Generator().manual_seed(seed))
        iou = pairwise_iou(masks, masks, [1, 2, 3], absent)[0].nan_to_num(nan=1.0)
        assert float(torch.linalg.eigvalsh(iou)[0]) > -1e-12


def test_equal_masks_empty_masks_and_masks_without_weight():
    labels = torch.tensor([[[[0, 0]], [[0, 0]], [[0, 1]], [[1, 1]]]])
    masks = MaskDistribution(labels, torch.tensor([[0.25, 0.25, 0.5, 0.0]]))
    found = compact(masks, 4)
    assert found.masks.mass.tolist() == [[0.5, 0.5, 0, 0]]  # two different masks that count
    assert sorted(found.chosen[0].tolist()) == [-1, -1, 0, 2]
    assert found.loss.item() < 1e-8
    near = found.chosen[0, found.nearest[0]]
    assert near[:3].tolist() == [0, 0, 2]
    with pytest.raises(ValueError, match="k must be at least 1, found 0"):
        compact(masks, 0)
    with pytest.raises(ValueError, match="protocol must be one of"):
        compact(masks, 2, protocol="nobody")


def test_void_pixels_count_nowhere():
    labels = torch.tensor([[[[0, 1, 1]], [[0, 1, 0]], [[1, 0, 0]]]])
    masks = MaskDistribution(labels, valid=torch.tensor([[[True, True, False]]]))
    found = compact(masks, 2)
    assert found.loss.item() < 1e-8
    assert found.masks.mass[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_a_mean_takes_its_place_where_it_is_nearer():
    pixels = torch.eye(9, dtype=torch.long).reshape(9, 3, 3)
    masks = (1 - pixels)[None]  # a square that lacks one pixel each time: their mean lacks none
    plain, mean = compact(masks, 1), compact(masks, 1, means=True)
    assert mean.loss < plain.loss
    assert mean.chosen.tolist() == [[-1]]
    assert mean.masks.labels.all()
    torch.testing.assert_close(ged(mean.masks, masks, [1]), mean.loss, atol=1e-9, rtol=0)
    for seed in range(5):
        other = blobs(seed, 20, 3)
        found = compact(other, 3, means=True)
        assert found.loss <= compact(other, 3).loss + 1e-9
        torch.testing.assert_close(ged(found.masks, other, [1, 2]), found.loss, atol=1e-6, rtol=0)


# -- predict ----------------------------------------------------------------------------------------------------------


def test_kept_masks_of_a_model(tmp_path):
    image = "sample"
    [many] = predict("demo", image, per_stratum=25)
    [few] = predict("demo", image, tmp_path, keep=3)
    assert len(few.draws) == 100
    assert few.masks.count == 3
    assert few.kept is not None
    scored = ged(few.masks, MaskDistribution(many.masks.labels, many.masks.weights), [1])
    assert scored.item() == pytest.approx(few.kept.loss, abs=1e-6)
    assert few.kept.of == 100
    torch.testing.assert_close(few.entropy, many.entropy)  # of all draws
    assert {draw.mask for draw in few.draws} == {0, 1, 2}
    about = json.loads((tmp_path / few.name / "weights.json").read_text())
    assert about["kept"] == {"asked": 3, "of": 100, "loss": few.kept.loss, "distance": "GED, d = 1 - IoU"}
    assert sum(mask["draws"] for mask in about["masks"]) == 100
    assert sum(mask["weight"] for mask in about["masks"]) == pytest.approx(1)
    assert len([*(tmp_path / few.name).glob("mask_*")]) == 3


def test_keep_of_the_command(tmp_path, capsys):
    command = ["predict", "demo", "sample", "--out", str(tmp_path), "--quiet", "--json"]
    assert main([*command, "--keep", "2", "--samples", "20"]) == 0
    [row] = json.loads(capsys.readouterr().out)["predictions"]
    assert row["masks"] == 2
    assert row["kept"]["of"] == 20
    assert row["kept"]["loss"] > 0
    for wrong in ("0", "2000", "x"):
        assert main([*command, "--keep", wrong]) == 2
        assert "--keep: expected" in capsys.readouterr().err
    with pytest.raises(DataError, match="keep: expected 1 or more, found 0"):
        Options(keep=0)
