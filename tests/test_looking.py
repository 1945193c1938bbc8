"""When a person must look: expected disagreement of two masks, risk–coverage curves and AURC."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.decisions.looking import (
    area_disagreement,
    aurc,
    aurc_draws,
    expected_disagreement,
    risk_coverage,
    selective,
)
from ambiseg.masks import MaskDistribution
from ambiseg.methods.drawing import bias
from ambiseg.metrics import compare

RNG = np.random.default_rng(0)


def slow_aurc(score, loss) -> float:
    """The mean over all orders that the score allows: every permutation of all images, those out of order left out."""
    found = []
    for order in itertools.permutations(range(len(score))):
        if all(score[a] <= score[b] for a, b in itertools.pairwise(order)):
            values = [loss[i] for i in order]
            found.append(np.mean([np.mean(values[: k + 1]) for k in range(len(values))]))
    return float(np.mean(found))


# -- scores -----------------------------------------------------------------------------------------------------------


def test_disagreement_of_three_masks_by_hand():
    masks = torch.tensor([[[[1, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]]])
    # 1 − IoU: ½ of the first two, 1 of each with the empty one
    assert expected_disagreement(masks, [1]).tolist() == pytest.approx([(0.5 + 1 + 1) / 3])
    weights = torch.tensor([[0.5, 0.5, 0.0]])  # the absent one counts nowhere
    assert expected_disagreement(MaskDistribution(masks, weights), [1]).tolist() == pytest.approx([0.5])
    p = [2 / 3, 1 / 3, 0, 0]
    both, either = sum(x * x for x in p), sum(2 * x - x * x for x in p)
    assert area_disagreement(masks, [1], smooth=0).tolist() == pytest.approx([1 - both / either])


def test_masks_that_agree_and_empty_ones_have_no_disagreement():
    for masks in (torch.ones(1, 4, 5, 5).long(), torch.zeros(1, 4, 5, 5).long(), torch.zeros(1, 1, 5, 5).long()):
        assert expected_disagreement(masks, [1]).item() == pytest.approx(0, abs=1e-12)
        assert area_disagreement(masks, [1]).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("strata", [None, 3])
def test_it_is_diversity_without_what_the_number_of_masks_takes_away(strata):
    labels = torch.from_numpy(RNG.integers(0, 3, (4, 6, 8, 8)))
    weights = torch.from_numpy(RNG.dirichlet([1.0] * 3, 4)).repeat_interleave(2, 1) / 2 if strata else None
    masks = MaskDistribution(labels, weights)
    pair = compare(masks, labels[:, :1], [1, 2])
    within = pair.diversity(3) if strata else pair.diversity()
    expected = pair.diversity() + bias(masks, within)
    assert expected_disagreement(masks, [1, 2], strata=strata).numpy() == pytest.approx(expected.numpy(), rel=1e-6)


def test_areas_are_what_drawing_each_pixel_alone_gives():
    p = torch.from_numpy(RNG.random((1, 1, 6, 6)))
    marginal = torch.cat([1 - p, p], 1)
    masks = MaskDistribution(torch.zeros(1, 1, 6, 6).long(), marginal=marginal)
    draws = torch.from_numpy(RNG.random((20_000, 2, 6, 6)) < p.numpy())
    both, either = draws.all(1).double().sum((1, 2)).mean(), draws.any(1).double().sum((1, 2)).mean()
    assert area_disagreement(masks, [1], smooth=0).item() == pytest.approx(1 - (both / either).item(), abs=0.005)


def test_void_pixels_count_nowhere():
    labels = torch.tensor([[[[1, 1, 0]], [[1, 0, 1]]]])
    valid = torch.tensor([[[True, True, False]]])
    masks, cut = MaskDistribution(labels, valid=valid), labels[..., :2]
    for score in (expected_disagreement, area_disagreement):
        assert score(masks, [1]).item() == pytest.approx(score(cut, [1]).item())
        assert score(MaskDistribution(labels, valid=valid & False), [1]).isnan().all()


# -- what an order is worth -------------------------------------------------------------------------------------------


def test_risk_and_aurc_by_hand():
    coverage, risk = risk_coverage([0.1, 0.2, 0.3], [0.0, 0.3, 0.6])
    assert coverage == pytest.approx([1 / 3, 2 / 3, 1])
    assert risk == pytest.approx([0, 0.15, 0.3])
    assert aurc([0.1, 0.2, 0.3], [0.0, 0.3, 0.6]) == pytest.approx(0.15)
    found = selective([3, 2, 1], [0.0, 0.3, 0.6])  # the worst order
    assert found.aurc.mean == pytest.approx((0.6 + 0.45 + 0.3) / 3)
    assert (found.oracle, found.random) == pytest.approx((0.15, 0.3))
    assert found.excess.mean == pytest.approx(0.3)
    assert found.gain == pytest.approx(-1)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1, allow_subnormal=False)), min_size=1, max_size=6))
def test_ties_are_the_mean_over_all_orders(pairs):
    score, loss = zip(*pairs, strict=True)
    assert aurc(score, loss) == pytest.approx(slow_aurc(score, loss), abs=1e-9)
    shuffled = sorted(pairs, key=lambda one: one[1])
    assert aurc(*zip(*shuffled, strict=True)) == pytest.approx(aurc(score, loss), abs=1e-12)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30))
def test_no_order_is_better_than_that_of_the_losses(pairs):
    score, loss = map(np.array, zip(*pairs, strict=True))
    found = selective(score, loss, resamples=20)
    assert found.oracle <= found.aurc.mean + 1e-12
    assert found.oracle <= found.random + 1e-12
    assert aurc(np.exp(score), loss) == pytest.approx(found.aurc.mean) or len(np.unique(np.exp(score))) < len(
        np.unique(score)
    )
    assert aurc(np.zeros_like(score), loss) == pytest.approx(found.random)


def test_images_without_a_number_are_left_out():
    assert aurc([0.1, np.nan, 0.2, 0.3], [0.1, 0.2, None, 0.5]) == aurc([0.1, 0.3], [0.1, 0.5])
    assert np.isnan(aurc([np.nan], [0.1]))
    found = selective([np.nan], [0.1])
    assert found.images == 0
    assert np.isnan(found.aurc.mean)


def test_resamples_are_those_of_a_loop_over_copies():
    score, loss = RNG.integers(0, 4, 12) / 4, RNG.random(12)
    groups = list("aabbbcddddee")
    drawn = aurc_draws(score, loss, groups, resamples=25, seed=3)
    names = list(dict.fromkeys(groups))
    times = np.random.default_rng(3).multinomial(len(names), [1 / len(names)] * len(names), size=25)
    for row, found in zip(times, drawn, strict=True):
        chosen = [i for i, name in enumerate(groups) for _ in range(row[names.index(name)])]
        assert found[0] == pytest.approx(aurc(score[chosen], loss[chosen]))
        assert found[1] == pytest.approx(aurc(loss[chosen], loss[chosen]))


def test_intervals_are_by_patient():
    score, loss = RNG.random(60), RNG.random(60)
    alone = selective(score, loss).aurc
    copied = selective(np.repeat(score, 5), np.repeat(loss, 5), [i // 5 for i in range(300)]).aurc
    wrong = selective(np.repeat(score, 5), np.repeat(loss, 5)).aurc
    assert copied.high - copied.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert wrong.high - wrong.low < 0.7 * (alone.high - alone.low)
    single = selective([0.1, 0.2], [0.1, 0.3], ["one", "one"])
    assert np.isnan([single.aurc.low, single.excess.high]).all()
    with pytest.raises(ValueError, match="group of each of 2 images, found 1"):
        aurc_draws([0.1, 0.2], [0.1, 0.3], ["one"])
    with pytest.raises(ValueError, match=r"found shapes \[2\] and \[1\]"):
        aurc([0.1, 0.2], [0.1])


# -- in evaluations and comparisons -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluation(tiny_run) -> Any:
    from ambiseg.evaluation import evaluate

    return evaluate(tiny_run, samples=(4, 16), quiet=True)


def test_evaluations_have_both_scores_against_both_losses(evaluation, tmp_path):
    from ambiseg.evaluation.results import Evaluation

    looking = evaluation.looking
    assert looking is not None
    assert {(one.score, one.loss) for one in looking.selections} == {
        (score, loss) for score in ("pairs", "areas") for loss in ("readers", "ged")
    }
    assert looking.setting == "standard-16"
    for value, case in zip(looking.values, evaluation.cases, strict=True):
        assert value == pytest.approx(case.scores["standard-16"]["diversity"] * 16 / 15, abs=1e-9)
    found = looking.selection("readers")
    readers = [case.annotations["diversity"] for case in evaluation.cases]
    assert found is not None
    assert found.aurc.mean == pytest.approx(aurc(looking.values, readers))
    assert found.random == pytest.approx(np.mean([r for r in readers if r is not None]))
    assert found.curve.coverage[-1] == 1
    assert found.curve.risk[-1] == pytest.approx(found.random)
    evaluation.save(tmp_path / "e.json")
    assert Evaluation.load(tmp_path / "e.json").looking == looking


def test_an_evaluation_of_an_earlier_version_has_what_its_cases_say(evaluation, tmp_path):
    import json

    from ambiseg._util.errors import DataError
    from ambiseg.evaluation.results import Evaluation
    from ambiseg.evaluation.selecting import looking_of

    evaluation.save(path := tmp_path / "e.json")
    content = json.loads(path.read_text())
    content["looking"]["values"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"e.json: looking.values: expected \d+ values"):
        Evaluation.load(path)
    del content["looking"]
    path.write_text(json.dumps(content))
    old = Evaluation.load(path)
    assert old.looking is None
    found = looking_of(old)
    assert found is not None
    assert found.selection("readers") == evaluation.looking.selection("readers")
    assert found.selection("readers", "areas") is None


def test_a_method_of_one_mask_is_ordered_by_its_soft_mask(evaluation):
    from ambiseg.evaluation.selecting import looking

    cases = [
        case.model_copy(
            update={"scores": {k: v | {"diversity": 0.0, "ged_unbiased": v["ged"]} for k, v in case.scores.items()}}
        )
        for case in evaluation.cases
    ]
    areas = [i / len(cases) for i in range(len(cases))]
    found = looking(cases, evaluation.settings, areas)
    assert found is not None
    assert (found.score, found.values) == ("areas", areas)
    alone = looking(cases, evaluation.settings)
    assert alone is not None
    assert alone.selection("readers").gain == pytest.approx(0, abs=1e-9)  # type: ignore[union-attr]


def test_the_terminal_and_the_figure_say_it(evaluation, tmp_path):
    from rich.console import Console

    from ambiseg.cli.scores import show
    from ambiseg.reporting import figures

    with (tmp_path / "out.txt").open("w") as file:
        show(evaluation, Console(file=file, width=80))
    text = (tmp_path / "out.txt").read_text()
    assert "when a person must look" in text
    assert f"{evaluation.looking.selection('readers').aurc.mean:.3f} [" in text
    with figures.drawing():
        plot = figures.Figures(tmp_path).plot("looking", figures.risk_coverage, evaluation.looking, "reader")
    for words in ("random order", "best order", "what readers disagree on", "share of the images left to the model"):
        assert words in plot.svg


def test_differences_are_paired(evaluation):
    from ambiseg.comparison.looking import areas
    from ambiseg.comparison.scores import Entry

    looking = evaluation.looking
    turned = looking.model_copy(update={"values": [-value for value in looking.values]})
    other = evaluation.model_copy(update={"looking": turned, "weights": "other", "cases": evaluation.cases[::-1]})
    other = other.model_copy(update={"looking": turned.model_copy(update={"values": turned.values[::-1]})})
    base = Entry("base", (evaluation,))
    rows: dict[Any, Any] = {(name, loss): (value, change) for name, loss, value, change in areas(
        [base, Entry("other", (other,)), Entry("same", (evaluation,)), Entry("two", (evaluation, other))], base
    )}  # fmt: skip
    value, change = rows["other", "readers"]
    readers = [case.annotations["diversity"] for case in evaluation.cases]
    assert rows["base", "readers"][0].mean == pytest.approx(aurc(looking.values, readers))
    assert value.mean == pytest.approx(aurc([-v for v in looking.values], readers))
    assert change.mean == pytest.approx(value.mean - rows["base", "readers"][0].mean)
    assert change.low < change.mean < change.high
    assert rows["base", "readers"][1] is None
    same = rows["same", "readers"][1]
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    two = rows["two", "readers"][0]
    assert two.mean == pytest.approx((value.mean + rows["base", "readers"][0].mean) / 2)
    assert two.spread == pytest.approx(np.std([value.mean, rows["base", "readers"][0].mean], ddof=1))
