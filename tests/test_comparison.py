"""Scores and differences of methods: against a slow reference, and what must not be compared is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import ConfigError
from ambiseg.comparison.scores import Aggregate, Entry, aggregate, check_comparable, difference, setting_of
from ambiseg.evaluation.results import METRICS, Evaluation
from tests.pages import evaluation, parsed

NAMES = [f"case {i}" for i in range(8)]


def scored(values: dict[str, list[float | None]] | None = None, weights: str = "", **changes: Any) -> Evaluation:
    """Eight images of four patients whose GED in each setting is as given, by the setting's key."""
    content = evaluation(NAMES, weights=weights, **changes)
    for i, case in enumerate(content["cases"]):
        scores = {key: dict(row) for key, row in case["scores"].items()}
        for key, numbers in (values or {}).items():
            scores[key]["ged"] = numbers[i]
        case["scores"] = scores
    return parsed(content)


def entry(name: str, *seeds: list[float | None]) -> Entry:
    made = (scored({"standard-16": values}, f"{name} {i}") for i, values in enumerate(seeds))
    return Entry(name, tuple(made))


def ends(found: Aggregate | None) -> tuple[float, float, float]:
    """Mean and interval of what has all three."""
    assert found is not None
    values = found.mean, found.low, found.high
    assert None not in values
    return values  # type: ignore[return-value]


def numbers(seed: int, shift: float = 0.0) -> list[float | None]:
    return [float(x) + shift for x in np.random.default_rng(seed).uniform(size=8)]


def test_a_mean_over_images_and_seeds():
    """By hand: the mean of all; the spread of 0.2, 0.3 and 0.4; and an image that one seed lacks is left out."""
    found = aggregate(entry("a", [0.2] * 8, [0.3] * 8, [0.4] * 8), "standard", 16, "ged")
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert found.spread == pytest.approx(0.1)
    assert (found.seeds, found.count, found.masks) == (3, 8, 16)
    assert (found.low, found.high) == pytest.approx((0.2, 0.4), abs=0.02)
    gap = aggregate(entry("a", [0.2] * 8, [None, *[0.4] * 7]), "standard", 16, "ged")
    assert gap is not None
    assert (gap.mean, gap.count) == (pytest.approx(0.3), 7)
    alone = aggregate(entry("a", numbers(0)), "standard", 16, "ged")
    assert alone is not None
    assert alone.spread is None
    assert ends(alone)[1] < ends(alone)[0] < ends(alone)[2]


def exact_distribution(seeds: list[list[float | None]], signs: list[int]) -> np.ndarray:
    """The mean of every possible resample: all draws of four patients, and of as many seeds as each side has.

    ``seeds`` holds the seeds of both sides, one after the other, ``signs`` says of which side each is.
    """
    table = np.array(seeds, float).reshape(len(seeds), 4, 2).mean(2)  # by seed and patient
    sides = [[i for i, sign in enumerate(signs) if sign == s] for s in (1, -1)]
    found = []
    for patients in itertools.product(range(4), repeat=4):
        means = table[:, patients].mean(1)
        draws = [itertools.product(side, repeat=len(side)) for side in sides if side]
        for drawn in itertools.product(*draws):
            found.append(sum(signs[side[0]] * means[list(side)].mean() for side in drawn))
    return np.array(found)


@pytest.mark.parametrize(("mine", "theirs"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (2, 2), (3, 2)])
def test_intervals_are_those_of_all_possible_resamples(mine, theirs):
    one = [numbers(i) for i in range(mine)]
    other = [numbers(10 + i, 0.3) for i in range(theirs)]
    if theirs:
        found = difference(entry("a", *one), entry("b", *other), "standard", 16, "ged")
    else:
        found = aggregate(entry("a", *one), "standard", 16, "ged")
    exact = exact_distribution(one + other, [1] * mine + [-1] * theirs)
    mean, *interval = ends(found)
    assert mean == pytest.approx(exact.mean())
    assert interval == pytest.approx(np.quantile(exact, [0.025, 0.975]).tolist(), abs=0.02)


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(1, 3), st.integers(1, 2))
def test_differences_change_sign_with_their_sides(values, mine, theirs):
    one = entry("a", *([v + i / 9 for v in values] for i in range(mine)))
    other = entry("b", *(numbers(i) for i in range(theirs)))
    there, back = (ends(difference(*pair, "standard", 16, "ged")) for pair in ((one, other), (other, one)))
    assert there[0] == pytest.approx(-back[0])
    if mine == theirs == 1:  # the same patients are drawn; of several seeds other ones are
        assert there[1:] == pytest.approx((-back[2], -back[1]))
    own = difference(one, one, "standard", 16, "ged")
    assert ends(own) == (0, 0, 0)
    assert not own.excludes_zero  # type: ignore[union-attr]


def test_the_same_trainings_stay_paired():
    """In another order, under another name, and in another form: seeds are not drawn independently."""
    one = entry("a", numbers(0), numbers(1, 0.5))
    turned = Entry("b", one.evaluations[::-1])
    for metric in METRICS:
        found = difference(one, turned, "standard", 16, metric)
        assert found is not None
        assert found.mean == 0
        assert found.spread == 0
    forms = [{"standard-16": numbers(i), "compact-16": [v - 0.1 for v in numbers(i)]} for i in range(2)]  # type: ignore[operator]
    both = Entry("c", tuple(scored(values, f"c{i}") for i, values in enumerate(forms)))
    found = difference(both, both, "compact", 16, "ged", baseline_form="standard")
    assert ends(found) == pytest.approx((-0.1, -0.1, -0.1))
    assert found.excludes_zero  # type: ignore[union-attr]


def test_calibration_is_of_all_pixels():
    """Pooled values, which no mean over images is: an interval where the evaluation has one, none of a difference."""
    one = entry("a", numbers(0))
    content = evaluation(NAMES)
    for setting in content["settings"]:
        setting["ece"] = {"mean": 0.02, "low": 0.01, "high": 0.03}
    other = Entry("b", (parsed(content),))
    assert aggregate(other, "standard", 16, "ece") == Aggregate(0.02, 0.01, 0.03, None, 1, 8, 16)
    found = difference(other, one, "standard", 16, "ece")
    assert found is not None
    assert found.mean == pytest.approx(0.02 - 0.00041)
    assert (found.low, found.high, found.excludes_zero) == (None, None, False)
    both = Entry("c", (one.first, parsed(content)))
    found = aggregate(both, "standard", 16, "ece")
    assert found is not None
    assert found.mean == pytest.approx((0.02 + 0.00041) / 2)
    assert found.low is None


def test_forms_and_numbers_of_masks():
    """Compact is the nearest number that the strata allow; files are standard; what is not there has no value."""
    found = scored()
    assert setting_of(found, "compact", 16).key == "compact-16"  # type: ignore[union-attr]
    assert setting_of(found, "compact", 17).key == "compact-16"  # type: ignore[union-attr]
    assert setting_of(found, "compact", 50) is None
    assert setting_of(found, "standard", 50).key == "standard-50"  # type: ignore[union-attr]
    assert aggregate(Entry("a", (found,)), "standard", 100, "ged") is None
    assert setting_of(found.model_copy(update={"strata": None}), "compact", 14).key == "compact-16"  # type: ignore[union-attr]
    assert setting_of(found.model_copy(update={"strata": None}), "compact", 100) is None
    files = [s.model_copy(update={"form": "files"}) for s in found.settings[:1]]
    assert setting_of(found.model_copy(update={"settings": files}), "standard", 16).key == "files-16"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="form: expected one of standard, compact, found 'dense'"):
        setting_of(found, "dense", 16)
    with pytest.raises(ConfigError, match=r"metric: expected one of ged, .*, found 'dice'"):
        aggregate(Entry("a", (found,)), "standard", 16, "dice")


def altered(**changes: Any) -> Evaluation:
    """The same with other values in the last case."""
    found = scored(weights="b")
    last = found.cases[-1].model_copy(update=changes)
    return found.model_copy(update={"cases": [*found.cases[:-1], last]})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (scored(weights="b", data="nodules"), "expected data shapes as in a, found nodules"),
        (scored(weights="b", split="val"), "expected split test as in a, found val"),
        (scored(weights="b", protocol="kohl2018"), "expected protocol mose as in a, found kohl2018"),
        (scored(weights="b", evaluated=[0, 1]), "expected evaluated classes shape as in a, found ground, shape"),
        (scored(weights="b", classes=["ground", "disc"]), "expected classes ground, shape as in a, found ground, disc"),
        (
            scored(weights="b", region={"kind": "middle", "size": (64, 32)}),
            "expected scored pixels of whole images as in a, found in the middle 64×32",
        ),
        (altered(name="case x"), "expected the 8 images of a, found no 'case 7'"),
        (altered(patient="p9"), "'case 7': expected patient p3 as in a, found p9"),
        (altered(readers_total=5), "'case 7': expected readers 4 as in a, found 5"),
        (
            altered(annotations={"diversity": 0.5, "entropy": 0.1}),
            "'case 7': expected readers' masks of diversity 0.9 as in a, found 0.5",
        ),
    ],
)
def test_other_data_are_refused_in_one_line(other, message):
    first = scored(weights="a", region={"kind": "whole"})
    with pytest.raises(ConfigError) as error:
        check_comparable([Entry("a", (first,)), Entry("b", (other,))])
    assert str(error.value) == f"b: {message}"
    with pytest.raises(ConfigError, match=r"^x: .* x, found"):  # of one method's seeds, which name their runs
        Entry("c", (first, other))


def test_what_may_differ_and_what_may_not():
    found = scored(weights="a")
    turned = found.model_copy(update={"cases": found.cases[::-1], "run": "y", "weights": "b"})
    check_comparable([Entry("a", (found,)), Entry("b", (turned,))])
    assert difference(Entry("a", (found,)), Entry("b", (turned,)), "standard", 16, "ged").mean == 0  # type: ignore[union-attr]
    files = found.model_copy(update={"which": "files", "weights": "", "data": "truth", "split": "all"})
    check_comparable([Entry("a", (found,)), Entry("b", (files,))])
    fewer = found.model_copy(update={"cases": found.cases[:-1], "weights": "b"})
    with pytest.raises(ConfigError, match=r"^b: expected the 8 images of a, found no 'case 7'$"):
        check_comparable([Entry("a", (found,)), Entry("b", (fewer,))])
    with pytest.raises(ConfigError, match=r"^a: expected the 8 images of b, found no 'case 7'$"):
        check_comparable([Entry("a", (fewer,)), Entry("b", (found,))])
    with pytest.raises(ConfigError, match=r"^a: expected each name once"):
        check_comparable([Entry("a", (found,)), Entry("a", (turned,))])
    with pytest.raises(ConfigError, match=r"^a: expected each training once"):
        Entry("a", (found, found))
    with pytest.raises(ConfigError, match=r"^a: expected at least one evaluation"):
        Entry("a", ())
    eight = found.model_copy(update={"symmetries": 8, "weights": "b", "run": "y"})
    with pytest.raises(ConfigError, match=r"^y: expected symmetries 1 as x, found 8$"):
        Entry("a", (found, eight))


def test_of_one_seed_the_numbers_are_those_of_the_evaluation():
    values = numbers(3)
    found = aggregate(entry("a", values), "standard", 16, "ged")
    from ambiseg.evaluation.summary import mean_of

    same = mean_of(values, [f"p{i // 2}" for i in range(8)])
    assert found is not None
    assert (found.mean, found.low, found.high, found.count) == (same.mean, same.low, same.high, same.count)
