"""Few patients, and folds: every part has patients, nobody is in two, and nobody moves when cases are added."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.data.config import DataConfig, open_split
from ambiseg.data.rules import FEW, SHARES, Rule, exact_sizes, parse_fold
from ambiseg.data.splits import Split, check_leakage
from ambiseg.settings import validate
from tests.test_splits import Toy, part_of

names = st.lists(st.text("abcdefgh0123", min_size=1, max_size=6), min_size=3, max_size=FEW - 1, unique=True)


# -- few patients ----------------------------------------------------------------------------------------------


@given(names, st.integers(0, 3), st.randoms(use_true_random=False))
def test_few_patients_fill_all_parts_in_any_order(patients, seed, rng):
    parts = Rule(SHARES, seed, ranked=True).divide(patients)
    counts = Counter(parts.values())
    assert counts == exact_sizes(SHARES, len(patients))
    assert min(counts[part] for part in SHARES) >= 1
    rng.shuffle(patients)
    assert Rule(SHARES, seed, ranked=True).divide(patients) == parts


@given(st.integers(3, 200), st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_exact_sizes_are_near_the_shares(count, weights):
    shares = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    sizes = exact_sizes(shares, count)
    assert sum(sizes.values()) == count
    above = [part for part in shares if shares[part] * count >= 1]
    assert all(sizes[part] >= 1 for part in shares)
    assert all(sizes[part] <= shares[part] * count + 1 for part in above)


@pytest.mark.parametrize("count", [3, 4, 9, 20, 49])
def test_a_split_of_few_patients_works_and_says_how(count):
    split = Split.by_hash(Toy(map(str, range(count))))
    assert {part: len(of) for part, of in split.parts.items()} == exact_sizes(SHARES, count)
    assert str(split.rule) == "by rank of the hash of the patient with seed 0: train 70%, val 10%, test 20%"


def test_fifty_patients_are_divided_as_before():
    cases = Toy(map(str, range(FEW)))
    split, rule = Split.by_hash(cases), Rule(SHARES)
    assert part_of(split) == {f"case-{i}": rule.part(str(i)) for i in range(FEW)}
    assert not split.rule.ranked


def test_too_few_patients_are_one_line():
    with pytest.raises(
        DataError, match=r"expected at least 3 patients, one for each of train, val, test, found 2 \('a',"
    ):
        Split.by_hash(Toy("aabb"))
    cases = Toy("aabb")
    cases.patients_assumed = "names that end in L and R are taken as the two sides of one patient"
    with pytest.raises(DataError, match=r'two sides of one patient; "patient": "\.\+" in ambiseg.json keeps each'):
        Split.by_hash(cases)


def test_cases_that_are_added_to_few_move_nobody(tmp_path):
    split = Split.by_hash(Toy(map(str, range(20))))
    split.save(tmp_path / "split.json")
    split = Split.load(tmp_path / "split.json")
    at_once = split.extended(Toy(map(str, range(80))))
    assert part_of(split).items() <= part_of(at_once).items()
    in_steps = split.extended(Toy(map(str, range(45)))).extended(Toy(map(str, range(80))))
    assert in_steps == at_once


def test_val_and_test_are_taken_out_of_a_small_train():
    patients = list(map(str, range(20)))
    for there, added in (("test", "val"), ("val", "test")):
        cases = Toy(patients, declared=[there if i < 4 else "train" for i in range(20)])
        split = open_split(cases, DataConfig())
        assert split.parts[there] == tuple(sorted(f"case-{i}" for i in range(4)))
        assert len(split.parts[added]) == {"val": 2, "test": 3}[added]
        assert "declared by the data's owner, its train divided by rank of the hash" in str(split.rule)
        check_leakage(cases, split)
    cases = Toy(patients, declared=["val" if i < 4 else "train" for i in range(20)])
    assert set(open_split(cases, DataConfig(fractions={"train": 0.9, "val": 0.1})).parts) == {"train", "val"}
    assert set(open_split(Toy(patients, declared=["train"] * 20), DataConfig()).parts) == {"train", "val", "test"}


# -- folds -----------------------------------------------------------------------------------------------------


@given(names, st.integers(2, 8), st.integers(0, 2))
def test_folds_are_disjoint_and_together_complete(patients, n, seed):
    if len(patients) < max(n, 4):
        return
    folds = [Rule.of_fold(f"{k}/{n}", SHARES, seed).divide(patients) for k in range(1, n + 1)]
    tested = [patient for parts in folds for patient, part in parts.items() if part == "test"]
    assert sorted(tested) == sorted(patients)
    for parts in folds:
        assert set(parts.values()) == {"train", "val", "test"}
        assert abs(Counter(parts.values())["test"] - len(patients) / n) < 1


@given(names, st.integers(2, 8))
def test_who_is_added_later_is_in_the_test_part_of_one_fold(patients, n):
    rules = [Rule.of_fold(f"{k}/{n}") for k in range(1, n + 1)]
    for patient in patients:
        assert [rule.part(patient) for rule in rules].count("test") == 1


def test_a_fold_is_saved_extended_and_named(tmp_path):
    cases = Toy([str(i // 2) for i in range(40)])
    split = open_split(cases, DataConfig(fold="2/5", split="hash"))
    check_leakage(cases, split)
    assert {part: len(of) for part, of in split.parts.items()} == {"train": 28, "val": 4, "test": 8}
    assert str(split.rule) == (
        "fold 2 of 5, by rank of the hash of the patient with seed 0: train 70%, val 10%, test 20%"
    )
    split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json") == split
    grown = split.extended(Toy([str(i // 2) for i in range(80)]))
    assert part_of(split).items() <= part_of(grown).items()
    assert Split.by_hash(cases, {"train": 0.8, "test": 0.2}, fold="1/2").parts.keys() == {"train", "test"}


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "2", "a/b", "1/5/2", ""])
def test_what_is_no_fold(fold):
    with pytest.raises(DataError, match="expected K/N such as 2/5"):
        parse_fold(fold)
    with pytest.raises(ConfigError, match="fold: expected K/N such as 2/5"):
        validate(DataConfig, {"fold": fold})


def test_folds_that_cannot_be():
    with pytest.raises(DataError, match=r"toy: fold 2/5: expected at least 5 patients, found 4"):
        Split.by_hash(Toy("abcd"), fold="2/5")
    with pytest.raises(DataError, match=r"toy: fold 1/2: expected at least 3 patients, found 2"):
        Split.by_hash(Toy("ab"), fold="1/2")
    with pytest.raises(DataError, match="expected fractions of train, val and test, found a, b"):
        Split.by_hash(Toy("abcd"), {"a": 0.5, "b": 0.5}, fold="1/2")
    declared = Toy("abcd", declared=["train", "train", "train", "test"])
    with pytest.raises(DataError, match=r"data\.fold: expected data\.split hash, which divides all cases anew, found"):
        open_split(declared, DataConfig(fold="1/2"))
    assert open_split(declared, DataConfig(fold="1/2", split="hash")).rule.fold == "1/2"


# -- messages name what was typed ------------------------------------------------------------------------------


def test_the_option_of_the_command_is_named(capsys, tmp_path):
    cases = ["--set", "count=120", "--set", "size=16"]
    shares = ["--fractions", "train=0.999", "val=0.001"]
    assert main(["data", "split", "shapes", *cases, *shares, "--out", str(tmp_path / "a.json"), "--quiet"]) == 2
    assert "; --seed " in capsys.readouterr().err
    options = "--data.options={count: 120, size: 16}", "--data.fractions={train: 0.97, val: 0.01, test: 0.02}"
    assert main(["train", "demo", "--data.name=shapes", *options, "--out", str(tmp_path / "run"), "--quiet"]) == 2
    assert "; --data.split_seed=" in capsys.readouterr().err


# -- a run keeps its split -------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_its_own_split(tiny_run, tmp_path, monkeypatch):
    from ambiseg.runs import Run
    from ambiseg.training import train

    def made_anew(*_, **__):
        raise AssertionError("a rule that changed would move patients from test to train")

    out = shutil.copytree(tiny_run, tmp_path / "run")
    monkeypatch.setattr("ambiseg.data.module.open_split", made_anew)
    config, split = Run(out).config, Run(out).split
    config.trainer = config.trainer.changed(epochs=config.trainer.epochs + 1)
    train(config, out, resume=True, quiet=True)
    assert len(Run(out).history) == config.trainer.epochs
    assert Run(out).split == split
    replace(split, fingerprint="0" * 32).save(out / "split.json")
    with pytest.raises(
        ConfigError, match=r"run: the data must be those that the run began with: .* expected fingerprint"
    ):
        train(config, out, resume=True, quiet=True)
