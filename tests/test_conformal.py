"""Guarantees: thresholds against hand cases and slow references, and coverage in simulations with known truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.decisions.calibration import (
    Calibration,
    ClassThresholds,
    Rules,
    apply,
    coverage,
    held,
    in_words,
    score_readings,
    thresholds,
)
from ambiseg.decisions.conformal import (
    LEVELS,
    conformal_threshold,
    containment_scores,
    controlled_level,
    false_fractions,
    fewest_patients,
    missed_fractions,
    nearest_strata,
    stratum_scores,
    stratum_set,
    weighted_quantile,
)
from ambiseg.masks import MaskDistribution

# -- thresholds -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.1, 0.3]))
def test_threshold_by_the_definition(seed, alpha):
    random = np.random.default_rng(seed)
    patients = random.integers(0, 25, 60)
    scores, weights = random.integers(0, 12, 60).astype(float), random.integers(0, 3, 60).astype(float)
    names = sorted({p for p, w in zip(patients, weights, strict=True) if w > 0})

    def mass(limit):
        total = 0.0
        for name in names:
            mine = (patients == name) & (weights > 0)
            total += weights[mine & (scores <= limit)].sum() / weights[mine].sum()
        return total / (len(names) + 1)

    enough = [s for s in sorted(set(scores[weights > 0])) if mass(s) >= 1 - alpha - 1e-12]
    assert conformal_threshold(scores, patients.tolist(), alpha, weights) == (enough[0] if enough else np.inf)


def test_the_fewest_patients_make_a_finite_threshold():
    for alpha in (0.1, 0.05, 0.25, 0.3):
        least = fewest_patients(alpha)
        assert conformal_threshold(np.arange(float(least)), range(least), alpha) == least - 1
        assert conformal_threshold(np.arange(least - 1.0), range(least - 1), alpha) == np.inf


def test_controlled_level_by_the_definition():
    random = np.random.default_rng(0)
    losses = np.sort(random.random((40, 30)))[:, ::-1].copy()
    losses[:, -1] = 0
    patients = random.integers(0, 15, 40)
    level = controlled_level(losses, patients.tolist(), 0.2)
    names = sorted(set(patients))
    risk = np.mean([losses[patients == name].mean(0) for name in names], 0)
    bound = (len(names) * risk + 1) / (len(names) + 1)
    assert bound[level] <= 0.2 < bound[level - 1]
    assert controlled_level(losses, patients.tolist(), 0.01) == 29  # too few patients: the last, which loses nothing


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="alpha must be between 0 and 1, found 1"):
        conformal_threshold(np.zeros(3), range(3), 1)
    with pytest.raises(ValueError, match="expected a patient and a weight for each of 3 readings"):
        conformal_threshold(np.zeros(3), range(2), 0.1)
    with pytest.raises(ValueError, match="per must be reading or patient, found 'image'"):
        conformal_threshold(np.zeros(3), range(3), 0.1, per="image")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"losses must be in \[0, 1\], found 0 to 2"):
        controlled_level(np.full((3, 2), 2.0), range(3), 0.1)
    with pytest.raises(ValueError, match="found nan"):
        conformal_threshold(np.array([np.nan]), [0], 0.1)


# -- coverage with known truth ----------------------------------------------------------------------------------------


def hierarchy(random, patients: int, slope: float = -0.5) -> tuple[np.ndarray, np.ndarray]:
    """Scores of patients with 1 to 8 readings, those of patients with many far smaller: pooled readings mislead."""
    count = random.integers(1, 9, patients)
    effect = random.normal(size=patients) + slope * count
    owner = np.repeat(np.arange(patients), count)
    return effect[owner] + 0.5 * random.normal(size=len(owner)), owner


def test_coverage_of_a_reading_of_a_new_patient():
    """Within the binomial error of 3000 calibrations, each with one new patient; pooling the readings fails."""
    random, trials, alpha, n = np.random.default_rng(0), 3000, 0.1, 39
    covered, pooled = 0, 0
    for _ in range(trials):
        scores, owner = hierarchy(random, n + 1)
        new = owner == n
        reading = random.choice(scores[new])
        covered += reading <= conformal_threshold(scores[~new], owner[~new].tolist(), alpha)
        pooled += reading <= conformal_threshold(scores[~new], range(int((~new).sum())), alpha)
    error = 3 * np.sqrt(alpha * (1 - alpha) / trials)
    assert 1 - alpha - error <= covered / trials <= 1 - alpha + 1 / (n + 1) + 2 * error
    assert pooled / trials < 1 - alpha - error


def test_coverage_of_all_readings_of_a_new_patient():
    random, trials, alpha, n = np.random.default_rng(1), 3000, 0.1, 39
    covered, single = 0, 0
    for _ in range(trials):
        scores, owner = hierarchy(random, n + 1, slope=0.0)
        new, names = owner == n, owner[owner != n].tolist()
        covered += scores[new].max() <= conformal_threshold(scores[~new], names, alpha, per="patient")
        single += scores[new].max() <= conformal_threshold(scores[~new], names, alpha)
    error = 3 * np.sqrt(alpha * (1 - alpha) / trials)
    assert 1 - alpha - error <= covered / trials <= 1 - alpha + 1 / (n + 1) + error
    assert single / trials < 1 - alpha - error  # the weaker statement is not this one


def disc(radius: float, centre: tuple[float, float] = (8, 8)) -> np.ndarray:
    y, x = np.mgrid[:17, :17]
    return np.hypot(y - centre[0], x - centre[1]) <= radius


def patient(random, index: int, rules: Rules):
    """Readers draw discs about a radius that the model gets wrong, and half of them nothing in some images."""
    made = []
    for _ in range(random.integers(1, 3)):
        radius = random.uniform(2, 5)
        readers = np.stack([disc(max(0.5, radius + random.normal(0, 0.8))) for _ in range(random.integers(1, 4))])
        if random.random() < 0.1:
            readers[0] = False
        draws = np.stack([disc(radius * r) for r in (0.6, 0.8, 0.9, 1.0, 1.2)])
        soft = np.stack([disc(radius * r) for r in np.linspace(0.5, 1.5, 40)]).mean(0) * 0.96 + 0.01
        soft = np.clip(soft + 0.01 * random.random(soft.shape), 0, 1)
        marginal = torch.from_numpy(np.stack([1 - soft, soft]))[None].float()
        masks = MaskDistribution(torch.from_numpy(draws)[None], marginal=marginal)
        theirs = MaskDistribution(torch.from_numpy(readers)[None])
        strata = torch.tensor([[0.1, 0.3, 0.2, 0.3, 0.1]]), torch.arange(5)[None]
        made.append(score_readings(masks, theirs, f"patient {index}", (1,), rules, strata))
    return made


@pytest.mark.parametrize("rules", [Rules(0.2), Rules(0.2, "marked", slack=1.0), Rules(0.2, per="patient")])
def test_every_statement_holds_in_simulations(rules):
    """Means over 60 divisions of fresh patients into calibration and test, within their standard errors."""
    random = np.random.default_rng(2)
    everyone = [patient(random, i, rules) for i in range(160)]
    rates: dict[str, list[float]] = {}
    for _ in range(60):
        order = random.permutation(160)
        found = thresholds([image for i in order[:40] for image in everyone[i]], rules)
        per_patient: dict[str, list[float]] = {}
        for i in order[40:]:
            said = [held(image, found, rules) for image in everyone[i]]
            for name in said[0]:
                values = [value for each in said for value in each[name].values()]
                whole = rules.per == "patient" and name not in ("found", "sure")
                if values:
                    per_patient.setdefault(name, []).append(min(values) if whole else float(np.mean(values)))
        for name, values in per_patient.items():
            rates.setdefault(name, []).append(float(np.mean(values)))
    for name, values in rates.items():
        error = 3 * np.std(values) / np.sqrt(len(values)) + 3 * np.sqrt(0.2 * 0.8 / 160) / 2
        mean = np.mean(values)
        if name in ("found", "sure"):
            assert mean <= 0.2 + error, name
            assert mean > 0.05, name  # and not by marking everything
        else:
            assert mean >= 1 - (0.1 if name in ("outer", "inner") else 0.2) - error, name


# -- scores -----------------------------------------------------------------------------------------------------------


def slow_containment(m, mask, valid, slack):
    """Both scores by loops over all pairs of pixels."""
    pixels = [p for p in np.ndindex(m.shape)]
    near = {
        p: max(m[q] for q in pixels if np.hypot(p[0] - q[0], p[1] - q[1]) <= slack and valid[q]) if valid[p] else 0
        for p in pixels
    }
    inside = [p for p in pixels if mask[p] and valid[p]]
    outer = -min((near[p] for p in inside), default=1.0)
    far = [p for p in pixels if valid[p] and all(np.hypot(p[0] - q[0], p[1] - q[1]) > slack for q in inside)]
    return outer, max((m[p] for p in far), default=0.0)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 1.5, 2.0]))
def test_containment_scores_against_loops(seed, slack):
    random = np.random.default_rng(seed)
    m, masks = random.random((5, 6)), random.random((3, 5, 6)) < 0.4
    masks[0] = False
    valid = random.random((5, 6)) < 0.9
    outer, inner = containment_scores(m, masks, valid, slack)
    for i, mask in enumerate(masks):
        assert (outer[i], inner[i]) == pytest.approx(slow_containment(m, mask, valid, slack))
    if slack == 0:  # what the scores mean
        t_out, t_in = -outer[1], inner[1]
        assert not (masks[1] & valid & ~(m >= t_out)).any()
        assert not (valid & (m > t_in) & ~masks[1]).any()


def test_slack_in_millimetres():
    m, mask = np.array([[0.9, 0.1, 0.1]]), np.array([[[False, True, False]]])
    assert containment_scores(m, mask, slack=1, spacing=(1, 2))[0] == [-0.1]
    assert containment_scores(m, mask, slack=2, spacing=(1, 2))[0] == [-0.9]
    with pytest.raises(ValueError, match="slack must be at least 0, found -1"):
        containment_scores(m, mask, slack=-1)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_fractions_against_loops(seed):
    random = np.random.default_rng(seed)
    m, masks = random.choice([0.0, 1e-8, 0.25, 0.5, random.random(), 1.0], (4, 5)), random.random((3, 4, 5)) < 0.4
    masks[2] = False
    valid = random.random((4, 5)) < 0.8
    missed, wrong = missed_fractions(m, masks, valid), false_fractions(m, masks, valid)
    some = random.choice(len(LEVELS), 6)
    for i, mask in enumerate(masks & valid):
        for j in some:
            t = LEVELS[::-1][j]
            assert missed[i, j] == pytest.approx((mask & (m < t)).sum() / max(1, mask.sum()))
            later = [valid & (m > level) for level in LEVELS[j:]]
            assert wrong[i, j] == pytest.approx(max((s & ~mask).sum() / max(1, s.sum()) for s in later))
    assert (missed[:, -1] == 0).all()
    assert (wrong[:, -1] == 0).all()
    assert (np.diff(missed) <= 1e-12).all()
    assert (np.diff(wrong) <= 1e-12).all()


def test_strata():
    labels = torch.zeros(1, 4, 1, 4, dtype=torch.long)
    labels[0, 0, 0, :2], labels[0, 1, 0, :1], labels[0, 2:, 0, 3] = 1, 1, 1
    masks, strata = MaskDistribution(labels), torch.tensor([[0, 0, 2, 2]])
    readers = MaskDistribution(torch.tensor([[[[1, 1, 0, 0]], [[0, 0, 0, 1]], [[0, 0, 1, 1]]]]))
    assert nearest_strata(masks, strata, readers, (1,)).tolist() == [[0, 2, 2]]
    weights = np.array([0.2, 0.5, 0.3])
    assert stratum_scores(weights, np.array([0, 1, 2])).round(9).tolist() == [1.0, 0.5, 0.8]
    assert stratum_set(weights, 0.1) == [1]  # the heaviest, at least
    assert stratum_set(weights, 1.0) == [1, 2, 0]
    single = np.array([0.1, 0.3, 0.2, 0.3, 0.1], np.float32)  # whose sum is above 1 in double precision
    assert stratum_scores(single, np.arange(5)).max() == 1
    for threshold in (0.5, 0.79, 0.8, 1.0):
        scores = stratum_scores(weights, np.arange(3))
        assert set(stratum_set(weights, threshold)) == set(np.flatnonzero(scores <= threshold).tolist()) | {1}


def test_weighted_quantile():
    values, weights = np.array([4.0, 1.0, 3.0]), np.array([0.5, 0.25, 0.25])
    assert [weighted_quantile(values, weights, q) for q in (0.05, 0.25, 0.3, 0.5, 0.6, 1.0)] == [1, 1, 3, 3, 4, 4]


# -- what is stored, and what it says ---------------------------------------------------------------------------------


def calibration(**changes: Any) -> Calibration:
    levels: dict[str, Any] = {"outer": 0.1, "inner": 0.9, "found": 0.3, "sure": 0.6, "area": 0.5}
    one = ClassThresholds(id=1, name="nodule", patients=40, readings=90, **levels)
    about: dict[str, Any] = {"alpha": 0.1, "weights": "abc", "which": "best", "data": "discs", "part": "val"}
    about |= {"patients": 40, "images": 60, "samples": 5, "size": ((1, 4), (1, 4)), "classes": [one]}
    return Calibration(**{**about, **changes})


def test_bounds_of_an_image():
    m = torch.tensor([0.05, 0.1, 0.55, 0.95])
    labels = torch.tensor([[[[0, 0, 1, 1]], [[0, 0, 0, 1]]]])
    draws = MaskDistribution(labels, marginal=torch.stack([1 - m, m])[None, :, None])
    found = apply(calibration(strata=0.7, stratum="member"), draws, np.array([0.6, 0.4], np.float32))
    [one] = found.classes
    assert one.outer.tolist() == [[False, True, True, True]]  # 0.1 in single precision is above 0.1
    assert one.inner.tolist() == [[False, False, False, True]]
    assert one.found.tolist() == [[False, False, True, True]]
    assert one.sure.tolist() == [[False, False, False, True]]
    assert one.area == pytest.approx(((1 - 0.5) ** 2, (2**0.5 + 0.5) ** 2))
    assert found.strata == (0,)
    narrowed = calibration(classes=[calibration().classes[0].model_copy(update={"area": -1.0})])
    [one] = apply(narrowed, draws).classes
    assert one.area[0] == one.area[1]


def test_file_and_words(tmp_path):
    made = calibration(strata=0.7, stratum="member", readers="marked", slack=2.0)
    made.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == made
    said = in_words(made)
    assert "nodule, found: misses on average at most 10 % of a reader's mask that marks the class" in said
    assert any("up to 2 pixels" in line and "at least 90 %" in line for line in said)
    assert any(line.startswith("members: with probability at least 90 %") for line in said)
    for damage, text in (('"alpha": 0.1', '"alpha": 2'), ('"outer": 0.1', '"outer": "x"'), ("{", "[")):
        content = (tmp_path / "calibration.json").read_text().replace(damage, text, 1)
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises((ConfigError, DataError), match=r"bad\.json: "):
            Calibration.load(tmp_path / "bad.json")


def test_too_few_patients_are_refused():
    random, rules = np.random.default_rng(0), Rules(0.2)
    few = [image for i in range(5) for image in patient(random, i, rules)]
    with pytest.raises(
        ConfigError, match=r"alpha 0.2: expected at least 9 patients, found 5; a larger alpha needs fewer"
    ):
        thresholds(few, rules)


def test_coverage_counts_patients_alike():
    random, rules = np.random.default_rng(0), Rules(0.2)
    scored = [image for i in range(30) for image in patient(random, i, rules)]
    found = thresholds(scored, rules)
    value = coverage(scored, found, rules)["area"][1]
    means: dict[str, list[float]] = {}
    for image in scored:
        means.setdefault(image.patient, []).append(held(image, found, rules)["area"][1])
    assert value.mean == pytest.approx(np.mean([np.mean(v) for v in means.values()]))
    assert value.low <= value.mean <= value.high
