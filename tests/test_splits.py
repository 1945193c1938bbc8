from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases
from ambiseg.data.intensity import Intensity
from ambiseg.data.splits import EmptyPart, LeakageError, Rule, Split, check_leakage, fingerprint, subset

HALVES = {"train": 0.5, "test": 0.5}


class Toy(Cases):
    """One pixel a case. ``pixels`` has what it shows; by default no two cases show the same."""

    title, classes, evaluated, channels, intensity = "toy", ("none", "some"), (1,), 1, Intensity()

    def __init__(self, patients, declared=None, names=None, pixels=None, labels=None):
        self.patients = list(patients)
        self.names = [f"case-{i}" for i in range(len(self.patients))] if names is None else list(names)
        self.declared = declared
        self.pixels = dict.fromkeys(self.names) if pixels is None else pixels
        self.labels = {} if labels is None else labels
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        name = self.names[index]
        pixel = self.pixels.get(name) or int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        masks = np.array(self.labels.get(name, [0, 1])).reshape(-1, 1, 1)
        return Case.of(np.array([[[pixel]]]), masks, name=name, patient=self.patients[index])

    def chosen(self, indices) -> Toy:
        indices = list(indices)
        return Toy([self.patients[i] for i in indices], names=[self.names[i] for i in indices])


def part_of(split: Split) -> dict[str, str]:
    return {name: part for part, names in split.parts.items() for name in names}


patients = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), min_size=1, max_size=40)


# -- the rule ------------------------------------------------------------------------------------------------


def test_by_hand():
    rule = Rule({"train": 0.5, "val": 0.25, "test": 0.25}, seed=3)
    for patient in ("ann", "Jürgen", "病人", ""):
        digest = hashlib.blake2b(f"3:{patient}".encode(), digest_size=8).hexdigest()
        first_bits = bin(int(digest, 16) + 2**64)[3:5]  # 0x is under a half, 10 in the third quarter, 11 in the last
        assert rule.part(patient) == {"00": "train", "01": "train", "10": "val", "11": "test"}[first_bits]


def test_golden_parts_stay_what_they_are_forever():
    rule = Rule(dict.fromkeys("abcd", 0.25))
    assert "".join(rule.part(f"patient-{i}") for i in range(24)) == "ccdbbcddadadcadaacddabdb"


def test_fractions_are_met_on_average():
    rule = Rule({"train": 0.7, "val": 0.1, "test": 0.2}, seed=1)
    found = [rule.part(f"patient {i}") for i in range(20_000)]
    for part, share in rule.fractions.items():  # 5 standard deviations
        assert abs(found.count(part) / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_seeds_are_independent():
    rules = [Rule(HALVES, seed) for seed in range(2)]
    same = sum(rules[0].part(str(i)) == rules[1].part(str(i)) for i in range(2000))
    assert 900 < same < 1100


def test_fractions_that_round_badly_leave_nobody_out():
    rule = Rule(dict.fromkeys("abcdefghij", 0.1))
    assert {rule.part(str(i)) for i in range(500)} == set("abcdefghij")


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({}, "must be positive, found none"),
        ({"train": 1.0, "val": 0.0}, "must be positive, found train 1, val 0"),
        ({"train": 0.7, "test": 0.2}, "must sum to 1, found train 0.7, test 0.2"),
        ({"train": float("nan")}, "must be positive"),
    ],
)
def test_bad_fractions(fractions, message):
    with pytest.raises(DataError, match=message):
        Split.by_hash(Toy("ab"), fractions)


# -- by hash -------------------------------------------------------------------------------------------------


@given(patients, st.integers(0, 5), st.integers(2, 5))
def test_splits_never_share_a_patient(patients, seed, count):
    patients = [*patients, *(f"extra-{i}" for i in range(60))]  # enough that no part is empty
    cases = Toy(patients)
    split = Split.by_hash(cases, {str(k): 1 / count for k in range(count)}, seed)
    check_leakage(cases, split)
    where = part_of(split)
    assert sorted(where) == sorted(cases.names)
    homes = [{where[n] for n, p in zip(cases.names, patients, strict=True) if p == patient} for patient in patients]
    assert all(len(home) == 1 for home in homes)


@given(patients, st.randoms(use_true_random=False))
def test_adding_removing_and_reordering_moves_nobody(patients, rng):
    everybody = [*patients, *(f"extra-{i}" for i in range(60))]  # fewer than 50 are divided by rank
    cases = Toy(everybody)
    whole = part_of(Split.by_hash(cases, HALVES))
    order = rng.sample(range(len(cases)), len(cases))
    assert part_of(Split.by_hash(cases.chosen(order), HALVES)) == whole
    some = cases.chosen(sorted(set(order[: len(patients)]) | set(range(len(patients), len(cases)))))
    assert part_of(Split.by_hash(some, HALVES)).items() <= whole.items()


def test_the_same_patient_is_in_the_same_part_of_every_data_set():
    one, other = Toy([f"p{i}" for i in range(60)]), Toy([f"p{i}" for i in range(30, 90)], names=map(str, range(60)))
    homes = []
    for cases in (one, other):
        where = part_of(Split.by_hash(cases))
        homes.append({p: where[n] for n, p in zip(cases.names, cases.patients, strict=True)})
    assert all(homes[0][p] == homes[1][p] for p in homes[0].keys() & homes[1].keys())


def test_an_empty_part_is_an_error_that_names_it():
    many = Toy(map(str, range(60)))
    with pytest.raises(
        EmptyPart, match=r"'val' would be empty: a fraction of 0\.001 of 60 patients; seed=\d+ fills"
    ) as e:
        Split.by_hash(many, {"train": 0.999, "val": 0.001})
    assert e.value.seed is not None
    assert Split.by_hash(many, {"train": 0.999, "val": 0.001}, e.value.seed).parts["val"]
    assert f"; --seed {e.value.seed} fills all parts" in str(e.value.naming("--seed {}"))
    with pytest.raises(DataError, match="'val' of the split has no case"):
        Split({"train": ("a",), "val": ()}, "", Rule(HALVES))


def test_names_that_are_not_unique_are_refused():
    with pytest.raises(DataError, match="a name of its own, found twice: 'a'"):
        Split.by_hash(Toy("xyz", names=["a", "a", "b"]), HALVES)


# -- the owner's split ---------------------------------------------------------------------------------------


def test_the_owners_split_is_kept():
    cases = Toy("abcc", declared=["train", "test", "dev", "dev"])
    split = Split.declared(cases)
    assert split.parts == {"train": ("case-0",), "test": ("case-1",), "dev": ("case-2", "case-3")}
    assert str(split.rule) == "declared by the data's owner"


def test_val_is_taken_out_of_the_owners_train_by_hash():
    names = [f"p{i // 2}" for i in range(160)]
    cases = Toy(names, declared=["test" if i < 20 else "train" for i in range(160)])
    split = Split.declared(cases, val=0.25, seed=4)
    check_leakage(cases, split)
    rule = Rule({"train": 0.75, "val": 0.25}, seed=4)
    where = part_of(split)
    assert all(where[n] == ("test" if i < 20 else rule.part(names[i])) for i, n in enumerate(cases.names))
    assert str(split.rule).endswith("its train divided by hash of the patient with seed 4: train 75%, val 25%")


@pytest.mark.parametrize(
    ("declared", "val", "message"),
    [
        (None, None, "2 of 2 without one: 'case-0', 'case-1'"),
        (["train", ""], None, "1 of 2 without one: 'case-1'"),
        (["train", "val"], 0.5, "with a train and without a val, found train, val"),
        (["test", "dev"], 0.5, "with a train and without a val, found dev, test"),
        (["train", "test"], 1.5, "between 0 and 1, found 1.5"),
        (["train", "test"], 0.1, "expected at least 2 patients, one for each of train, val, found 1"),
    ],
)
def test_what_the_owner_must_have_declared(declared, val, message):
    with pytest.raises(DataError, match=message):
        Split.declared(Toy("ab", declared=declared), val=val)


def test_an_owner_who_divides_a_patient_is_told_before_anything_is_read():
    cases = Toy("abab", declared=["train", "train", "test", "test"])
    with pytest.raises(
        LeakageError, match=r"patient 'a' is in train \(case 'case-0'\) and test \(case 'case-2'\); in all 2"
    ):
        Split.declared(cases)
    assert cases.read == 0


# -- fingerprint and verification ----------------------------------------------------------------------------


def test_the_fingerprint_follows_content_and_not_order():
    base, order = Toy("abc"), [2, 0, 1]
    assert fingerprint(base) == fingerprint(Toy("abc")) == fingerprint(base.chosen(order))
    changed = [
        Toy("abd"),
        Toy("abc", names=["case-0", "case-1", "case-3"]),
        Toy("abc", pixels={"case-1": 5}),
        Toy("abc", labels={"case-1": [1, 1]}),
        Toy("abc", labels={"case-1": [0, 1, 1]}),
        Toy("ab"),
    ]
    assert len({fingerprint(cases) for cases in [base, *changed]}) == 7


def test_progress_is_reported_case_by_case():
    cases, calls = Toy("abc"), []
    fingerprint(cases, lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    split = Split.by_hash(Toy(map(str, range(20))), HALVES)
    calls.clear()
    check_leakage(Toy(map(str, range(20))), split, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, 20) for i in range(20)]


def test_verify_says_what_changed():
    cases = Toy(map(str, range(30)))
    split = Split.by_hash(cases, HALVES)
    split.verify(cases)
    split.verify(cases.chosen(random.Random(0).sample(range(30), 30)))
    larger, smaller = Toy(map(str, range(35))), cases.chosen(range(2, 30))
    with pytest.raises(DataError, match=r"the 30 cases of the split, found 5 new: 'case-30', .* and 2 more") as error:
        split.verify(larger)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"found 2 missing: 'case-0', 'case-1'$"):
        split.verify(smaller)
    with pytest.raises(DataError, match=r"1 missing: 'case-0'; 1 new: 'new'"):
        split.verify(Toy(map(str, range(30)), names=["new", *cases.names[1:]]))
    with pytest.raises(DataError, match=f"another content .* expected fingerprint {split.fingerprint}, found"):
        split.verify(Toy(map(str, range(30)), pixels={"case-7": 1}))


def test_some_cases_are_verified_without_reading_the_others(tmp_path):
    cases = Toy(map(str, range(30)))
    Split.by_hash(cases, HALVES).save(tmp_path / "split.json")
    split = Split.load(tmp_path / "split.json")
    changed = Toy(map(str, range(30)), pixels={"case-7": 1})
    split.verify(changed, names=["case-3", "case-5"])
    assert changed.read == 2
    with pytest.raises(
        DataError, match=r"toy: case 'case-7' has another content .* expected digest .*, found"
    ) as error:
        split.verify(changed, names=["case-3", "case-7"])
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="found 1 missing: 'case-0'"):
        split.verify(cases.chosen(range(1, 30)), names=["case-3"])
    content = json.loads((tmp_path / "split.json").read_text())
    assert content.pop("digests").keys() == set(cases.names)
    (tmp_path / "split.json").write_text(json.dumps(content))  # as it was saved before digests were
    before = changed.read
    Split.load(tmp_path / "split.json").verify(changed, names=["case-7"])
    assert changed.read == before
    changed.fingerprint = fingerprint(changed)  # as a store has it: all cases are compared, and none is read
    before = changed.read
    with pytest.raises(DataError, match="another content"):
        split.verify(changed, names=["case-3"])
    assert changed.read == before


def test_extending_adds_the_new_and_moves_nobody():
    cases, larger = Toy(map(str, range(60))), Toy(map(str, range(90)))
    split = Split.by_hash(cases, HALVES)
    extended = split.extended(larger)
    assert part_of(split).items() <= part_of(extended).items()
    assert extended == Split.by_hash(larger, HALVES)
    assert extended.extended(larger) == extended
    extended.verify(larger)
    with pytest.raises(DataError, match="another content"):
        split.extended(Toy(map(str, range(90)), pixels={"case-7": 1}))
    with pytest.raises(DataError, match="the 60 cases of the split, found 1 missing: 'case-0'"):
        split.extended(larger.chosen(range(1, 90)))


def test_extending_follows_a_patient_who_was_moved_by_hand():
    cases = Toy(map(str, range(20)))
    split = Split.by_hash(cases, HALVES)
    other = "test" if "case-0" in split.parts["train"] else "train"
    parts = {part: tuple(n for n in names if n != "case-0") for part, names in split.parts.items()}
    moved = Split(parts | {other: (*parts[other], "case-0")}, split.fingerprint, split.rule)
    larger = Toy([*map(str, range(20)), "0"])
    assert part_of(moved.extended(larger))["case-20"] == other


def test_extending_the_owners_split_needs_the_owners_word():
    declared = ["train", "test", "train"]
    split = Split.declared(Toy("ab", declared=declared[:2]))
    assert split.extended(Toy("abc", declared=declared)).parts["train"] == ("case-0", "case-2")
    for silent in (None, ["train", "test", ""]):
        with pytest.raises(DataError, match="'c': expected a declared split, found none"):
            split.extended(Toy("abc", declared=silent))


def test_indices_find_the_same_cases_in_any_order():
    cases = Toy(map(str, range(40)))
    split = Split.by_hash(cases)
    shuffled = cases.chosen(random.Random(0).sample(range(40), 40))
    for part in split.parts:
        names = [[some.names[i] for i in split.indices(some, part)] for some in (cases, shuffled)]
        assert names[0] == names[1] == list(split.parts[part])
    with pytest.raises(DataError, match="part must be one of train, val, test, found 'tset'"):
        split.indices(cases, "tset")
    with pytest.raises(DataError, match="cases of the split, found"):
        split.indices(cases.chosen(range(3)), "train")


# -- leakage -------------------------------------------------------------------------------------------------


def test_a_patient_in_two_parts_is_found():
    cases = Toy(["ann", "bob", "ann", "bob", "cem"])
    split = Split({"train": ("case-0", "case-1"), "test": ("case-2", "case-3", "case-4")}, "", Rule(HALVES))
    with pytest.raises(LeakageError) as error:
        check_leakage(cases, split, content=False)
    assert str(error.value) == (
        "toy: patient 'ann' is in train (case 'case-0') and test (case 'case-2'); in all 2 patients are in two parts"
    )
    assert cases.read == 0


def test_an_image_in_two_parts_is_found_whoever_it_is_said_to_show():
    cases = Toy(map(str, range(30)))
    split = Split.by_hash(cases, HALVES)
    check_leakage(cases, split)
    a, b = split.parts["train"][0], split.parts["test"][-1]
    same = Toy(cases.patients, pixels={a: 7, b: 7}, labels={b: [1, 1]})
    with pytest.raises(LeakageError) as error:
        check_leakage(same, split)
    assert str(error.value) == f"toy: the same image is in train (case '{a}') and test (case '{b}')"
    check_leakage(same, split, content=False)
    twins = Toy(cases.patients, pixels=dict.fromkeys(split.parts["train"][:2], 7))
    check_leakage(twins, split)  # twice in one part is no leak


def test_a_case_in_two_parts_is_no_split():
    with pytest.raises(LeakageError, match="case 'a' is in the split twice, in train and in test"):
        Split({"train": ("a", "b"), "test": ("a",)}, "", Rule(HALVES))


# -- files ---------------------------------------------------------------------------------------------------


def test_file_round_trip(tmp_path):
    cases = Toy([f"Jürgen {i}" for i in range(40)], names=[f"bäh {i}" for i in range(40)])
    cases.declared = ["train"] * 30 + ["test"] * 10
    for split in (Split.by_hash(cases, seed=2), Split.declared(cases), Split.declared(cases, val=0.3)):
        split.save(tmp_path / "split.json")
        assert Split.load(tmp_path / "split.json") == split
    assert "bäh 7" in (tmp_path / "split.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "ambiseg.Split/2"}, "format: expected ambiseg.Split/1, found 'ambiseg.Split/2'"),
        ({"colour": 1}, "colour: no such setting"),
        ({"seed": None}, "seed: expected a whole number, found null"),
        ({"seed": True}, "seed: expected a whole number, found true"),
        ({"fractions": {"train": "all"}}, "fractions: expected a table of numbers, found {train: all}"),
        ({"fractions": {"train": 0.5}}, "must sum to 1"),
        ({"parts": {"train": "a"}}, "parts: expected a table.*, found {train: a}"),
        ({"parts": {"train": [1]}}, r"parts: expected a table.*, found {train: \[1\]}"),
        ({"digests": {"a": "0"}}, "digests: expected one per case, found 1 for 2 cases"),
        ({"parts": {"train": []}}, "'train' of the split has no case"),
        ({"parts": {"train": ["a"], "test": ["a"]}}, "in train and in test"),
    ],
)
def test_other_files_are_refused_in_one_line_that_names_them(tmp_path, change, message):
    path = tmp_path / "split.json"
    Split({"train": ("a",), "test": ("b",)}, "0", Rule(HALVES)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message) as error:
        Split.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "split.json"
    Split({"train": ("a",), "test": ("ä",)}, "0", Rule(HALVES)).save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"split\.json: cannot be read as a split"):
            Split.load(path)
    for content in (
        b"[]",
        b"\xff\xfe",
        b"null",
        whole.replace(b'"test"', b'"train"'),
        whole.replace(b'"seed"', b'"s"'),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as a split"):
            Split.load(path)
    with pytest.raises(FileNotFoundError):
        Split.load(tmp_path / "absent.json")


# -- smaller training sets -----------------------------------------------------------------------------------


@given(patients, st.lists(st.floats(0.05, 1), min_size=2, max_size=2), st.integers(0, 3), st.randoms())
def test_subsets_are_nested_exact_and_free_of_order(patients, fractions, seed, rng):
    cases = Toy([*patients, *"abcdefghij"])
    indices = rng.sample(range(len(cases)), len(cases))
    small, large = (subset(cases, indices, fraction, seed) for fraction in sorted(fractions))
    assert set(small) <= set(large)
    assert [len(small), len(large)] == [int(len(cases) * fraction + 0.5) for fraction in sorted(fractions)]
    assert subset(cases, sorted(indices), max(fractions), seed) == sorted(large)
    assert [i for i in indices if i in set(large)] == large
    assert subset(cases, indices, 1.0, seed) == indices
    whole = [p for p in set(cases.patients) if 0 < sum(cases.patients[i] == p for i in large) < cases.patients.count(p)]
    assert len(whole) <= 1  # at most one patient is cut


def test_a_subset_of_nothing_is_refused():
    cases = Toy("abc")
    for indices, fraction in (([0, 1], 0.0), ([0, 1], 1.5), ([0, 1], 0.1), ([], 1.0)):
        with pytest.raises(DataError, match=r"a fraction in \(0, 1\] of at least one case"):
            subset(cases, indices, fraction)


def test_another_seed_is_another_subset():
    cases = Toy(map(str, range(40)))
    assert subset(cases, range(40), 0.5, 0) != subset(cases, range(40), 0.5, 1)
