"""Known modes: ratio, flips and strata against full maps, a loop and a definition; from the run to the page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ambiseg.cli.evaluate import show
from ambiseg.config import parse
from ambiseg.data.case import Case, Flip
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Batch, BatchSpec, Loader, Window
from ambiseg.data.sets.street.flips import Flips, FlipTable
from ambiseg.evaluation import Evaluation, evaluate
from ambiseg.evaluation.modes import score_modes
from ambiseg.evaluation.summary import summarise_modes
from ambiseg.masks import MaskDistribution
from ambiseg.methods.drawing import Drawing
from ambiseg.overlap import pairwise_iou
from ambiseg.regions import Regions
from ambiseg.reporting import report
from ambiseg.training import train
from ambiseg.viz.colours import class_colours
from ambiseg.viz.pictures import outlines
from tests.cases import Listed
from tests.street import camvid
from tests.test_distributed import run as run_python
from tests.test_flips import one_map

TABLE: FlipTable = {"class 1": ("one", "1/4"), "class 2": ("two", 0.5), "class 3": ("three", "2/5")}


def regions_in(batch: Batch) -> Regions:
    assert batch.annotations.regions is not None
    return batch.annotations.regions


def batch_of(cases):
    return Loader(cases, Intensity(), Window(None))[BatchSpec(tuple(range(len(cases))), 0)]


def reference(labels: np.ndarray, weights: np.ndarray, case: Case, flips: tuple[Flip, ...], evaluated) -> dict:
    """One image, the long way: all 2ⁿ maps, ``pairwise_iou``, and shares of modes that look alike."""
    assert case.valid is not None
    base = case.labels[0].astype(np.int64)
    maps, chance = [], []
    for happens in itertools.product((0, 1), repeat=len(flips)):
        made, p = base.copy(), 1.0
        for flip, does in zip(flips, happens, strict=True):
            p *= flip.probability if does else 1 - flip.probability
            made = np.where((base == flip.source) & bool(does), flip.target, made)
        maps.append(made)
        chance.append(p)
    valid = torch.from_numpy(case.valid)[None]
    truth = MaskDistribution(torch.from_numpy(np.stack(maps))[None], valid=valid)
    drawn = MaskDistribution(torch.from_numpy(labels)[None], valid=valid)
    iou = pairwise_iou(drawn, truth, evaluated, "skip")[0].nan_to_num(nan=1.0).numpy()
    alike = [[bool(((a == b) | ~case.valid).all()) for b in maps] for a in maps]
    ratio = np.zeros(len(maps))
    nearest = np.zeros_like(iou)
    for n in range(len(labels)):
        best = [m for m in range(len(maps)) if iou[n, m] >= iou[n].max() - 1e-9]
        groups = {tuple(alike[m]): [k for k in range(len(maps)) if alike[m][k]] for m in best}
        for group in groups.values():
            for m in group:
                nearest[n, m] += chance[m] / sum(chance[k] for k in group) / len(groups)
        ratio += weights[n] * nearest[n]
    inside = labels[:, case.valid]
    counts = [
        (
            sum(w * (row == f.target).sum() for w, row in zip(weights, inside, strict=True)),
            sum(w * np.isin(row, (f.source, f.target)).sum() for w, row in zip(weights, inside, strict=True)),
            sum(p * (m[case.valid] == f.target).sum() for p, m in zip(chance, maps, strict=True)),
            sum(p * np.isin(m[case.valid], (f.source, f.target)).sum() for p, m in zip(chance, maps, strict=True)),
        )
        for f in flips
    ]
    flipped, either, true_flipped, true_either = np.array(counts, float).T
    return {
        "ratio": ratio, "nearest": nearest, "iou": iou, "flipped": flipped, "either": either,
        "true_flipped": true_flipped, "true_either": true_either,
    }  # fmt: skip


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_scores_are_those_of_the_maps_written_out(seed):
    cases = Flips(one_map(seed, (7, 6), count=3), TABLE)
    rng = np.random.default_rng(seed)
    batch = batch_of(cases)
    labels = rng.integers(0, len(cases.classes), (3, 6, 7, 6))
    for b in range(3):  # and some masks that are near to a mode
        labels[b, :3] = cases[b].labels[rng.integers(len(cases[b].readers), size=3)]
    weights = rng.dirichlet(np.ones(6), 3)
    masks = MaskDistribution(torch.from_numpy(labels), torch.from_numpy(weights))
    found = score_modes(Drawing(masks, 3), regions_in(batch), cases.flips, cases.evaluated, "mose")
    for b, one in enumerate(found):
        case = cases[b]
        assert case.valid is not None
        if not case.valid.any():
            assert one is None
            continue
        assert one is not None
        expected = reference(labels[b], weights[b], case, cases.flips, cases.evaluated)
        assert one.ratio.sum() == pytest.approx(1)
        for key in ("ratio", "flipped", "either", "true_flipped", "true_either"):
            np.testing.assert_allclose(getattr(one, key), expected[key], atol=1e-9, err_msg=key)
        for key in ("nearest", "iou"):  # two masks of each stratum
            np.testing.assert_allclose(getattr(one, key), expected[key].reshape(3, 2, -1).mean(1), atol=1e-9)


def test_a_perfect_model_is_found_perfect():
    """Also where images lack classes, and their modes look alike."""
    cases = Flips(one_map(5, (9, 8), count=8), TABLE)
    assert len({len(case.readers) for case in cases}) > 1
    batch = batch_of(cases)
    masks = MaskDistribution(batch.annotations.labels, batch.annotations.weights)
    found = score_modes(Drawing(masks, 1), regions_in(batch), cases.flips, cases.evaluated, "mose")
    scored = [{"standard-8": one} for one in found if one is not None]
    made = summarise_modes(scored, cases.flips, cases.classes, [None] * len(scored))
    assert made is not None
    assert made.names[:3] == ["000", "001", "010"]
    np.testing.assert_allclose(made.ratio, made.probability, atol=1e-6)
    assert made.distance == pytest.approx(0, abs=1e-6)
    for flip in made.flips:
        assert flip.truth == pytest.approx(flip.probability)
        assert flip.predicted == pytest.approx(flip.truth, abs=1e-6)
    assert made.strata_iou == made.nearest == made.weights == made.matching == []
    assert made.found is None


def test_strata_are_matched_with_their_modes():
    labels = np.arange(4).repeat(4).reshape(1, 4, 4)
    case = Case.of(np.zeros((1, 4, 4), np.float32), labels, name="a", readers=("map",))
    cases = Flips(Listed([case], 4), {"class 1": ("one", 0.25), "class 2": ("two", 0.5)})
    batch = batch_of(cases)
    order = [2, 0, 3, 1]  # stratum k draws mode order[k]; a fifth draws another mask
    drawn = torch.cat([batch.annotations.labels[:, order], torch.zeros(1, 1, 4, 4, dtype=torch.uint8)], 1)
    weights = torch.tensor([[0.125, 0.375, 0.125, 0.375, 0.0]])
    drawing = Drawing(MaskDistribution(drawn, weights), 5)
    (one,) = score_modes(drawing, regions_in(batch), cases.flips, cases.evaluated, "mose")
    assert one is not None
    made = summarise_modes([{"compact-5": one}], cases.flips, cases.classes, [weights[0].tolist()])
    assert made is not None
    assert made.setting == "compact-5"
    assert made.matching == [1, 3, 0, 2]
    assert made.found == 4
    assert made.correlation == pytest.approx(1)
    assert np.array(made.strata_iou).argmax(1).tolist()[:4] == order
    assert np.array(made.nearest)[4].sum() == pytest.approx(1)  # as near to one as to another: shared


def test_data_without_flips_have_no_modes():
    assert summarise_modes([], (), ("a",), []) is None


# -- from the run to the page -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def street_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("street")
    path = camvid(place / "frames.npz", 12, 5)
    options = [
        f"--data.root={path}", "--data.size=[16, 16]", "--data.batch_size=4", "--data.eval_batch_size=2",
        "--data.augment.scale=[1.0, 1.5]", "--data.fractions={train: 0.6, val: 0.4}", "--backbone.channels=[8, 16]",
        "--model.experts=6", "--model.latent=2", "--trainer.epochs=2", "--trainer.check_every=1",
        "--trainer.accelerator=cpu", "--model.group_threshold=0.9",
        "--model.capacity.values=[0.2, 1.0]",
    ]  # fmt: skip
    train(parse(options, "camvid"), place / "run", quiet=True, command=["ambiseg", "train", "camvid"])
    return place / "run"


def test_modes_are_evaluated(street_run, tmp_path):
    found = evaluate(street_run, samples=(4, 6), accelerator="cpu", quiet=True)
    modes = found.modes
    assert modes is not None
    assert (modes.setting, modes.images, len(modes.ratio)) == ("compact-6", 5, 32)
    assert sum(modes.ratio) == pytest.approx(1)
    assert sum(modes.probability) == pytest.approx(1)
    assert np.array(modes.strata_iou).shape == np.array(modes.nearest).shape == (6, 32)
    assert sorted(k for k in modes.matching if k is not None) == list(range(6))
    assert set(modes.by_setting) == {"standard-4", "standard-6", "compact-6"}
    assert [flip.to for flip in modes.flips] == ["pavement2", "pedestrian2", "car2", "tree2", "road2"]
    assert [flip.truth for flip in modes.flips] == pytest.approx([8 / 17, 7 / 17, 6 / 17, 5 / 17, 4 / 17])
    found.save(tmp_path / "e.json")
    assert Evaluation.load(tmp_path / "e.json") == found
    assert found.flipped == [(4, 11), (9, 12), (8, 13), (5, 14), (3, 15)]
    console = Console(width=100, record=True)
    show(found, console)
    text = console.export_text()
    assert "share of flipped pixels, compact 6" in text
    assert f"{modes.found} of them are drawn most often by some expert" in text


def test_modes_are_reported(street_run, tmp_path):
    found = evaluate(street_run, samples=(6,), accelerator="cpu", quiet=True)
    found.save(street_run / "evaluation-test.json")
    text = report(street_run, out=tmp_path / "r.html", cases=1, samples=1, quiet=True).read_text()
    assert text.count("Experts beside their modes") in (1, 2)
    assert "pavement2" in text
    assert text.count("matched with mode") >= 6
    assert "32 modes" in text
    assert "One digit per class: pavement, pedestrian, car, tree, road; 1 is flipped." in text
    assert (tmp_path / "r-figures" / "mode-pairs.png").is_file()
    colours = class_colours(found.classes, found.evaluated, found.flipped)
    assert len(set(colours)) == 16


def test_two_processes_find_the_same_modes(street_run, tmp_path):
    result = tmp_path / "two.json"
    options = ["--samples", "6", "--accelerator", "cpu", "--devices", "2", "--quiet", "--out", str(result)]
    run_python("-m", "ambiseg", "evaluate", str(street_run), *options, folder=tmp_path)
    one = evaluate(street_run, samples=(6,), accelerator="cpu", quiet=True)
    assert result.read_text() == one.to_json()


def test_masks_of_the_same_edges_have_one_outline():
    labels = np.zeros((8, 8), int)
    labels[2:5, 2:5] = 1
    same = outlines([labels, 2 * labels], ["#ff0000", "#00ff00"])
    assert set(map(tuple, same[same[..., 3] > 0].tolist())) == {(255, 255, 255, 255)}
    other = outlines([labels, np.roll(labels, 1, 0)], ["#ff0000", "#00ff00"])
    assert len(set(map(tuple, other[other[..., 3] > 0].tolist()))) == 2
