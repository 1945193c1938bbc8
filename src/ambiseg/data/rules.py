"""Which part of a split a patient belongs to: by a hash of the patient, by rank among few, or by fold."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ambiseg._util.errors import DataError
from ambiseg._util.text import some

SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}
_NAME = r"[\w+=@][\w.+=@ -]{0,63}"  # of a part, which names files
FEW = 50  # patients: below this number, shares that are met on average would leave parts empty


@dataclass(frozen=True)
class Rule:
    """Which part a patient belongs to. It depends on that patient alone, not on who else is in the data:

        u = BLAKE2("seed:patient") as a number in [0, 1),     part = the first whose cumulative fraction is above u.

    Where there are few patients, or for a fold, the patients are sorted by u and each part takes its share of that
    order (:meth:`divide`); who is added later goes by u alone (:meth:`part`), so that nobody moves.

    Args:
        fractions: expected share of the patients of each part, in this order; they sum to 1. Empty only when all
            parts are declared.
        seed: another seed, another split.
        declared: keep the parts that the data's owner gave; ``fractions`` then divide the cases given ``train``.
        released: the name of a published split that was made again for these cases.
        ranked: the patients were divided by their rank.
        fold: ``k/n`` for the fold k of n of a cross-validation, whose test part has every n-th of the patients.
        assumed: what was assumed to tell the patients apart, in words; empty where the data tell.

    >>> rule = Rule({"train": 0.7, "val": 0.1, "test": 0.2})
    >>> [rule.part(patient) for patient in ("ann", "bob", "cem", "dora")]
    ['train', 'train', 'train', 'test']
    >>> print(rule)
    by hash of the patient with seed 0: train 70%, val 10%, test 20%
    """

    fractions: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    declared: bool = False
    released: str = ""
    ranked: bool = False
    fold: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fractions", {name: float(share) for name, share in self.fractions.items()})
        if self.fold:
            parse_fold(self.fold)
        if not self.fractions and self.declared:
            return
        for name in self.fractions:
            if not re.fullmatch(_NAME, name):
                raise DataError(f"fractions: expected names of parts such as train, found {name[:40]!r}")
        found = some([f"{name} {share:g}" for name, share in self.fractions.items()])
        if not self.fractions or not all(share > 0 for share in self.fractions.values()):
            raise DataError(f"fractions of a split must be positive, found {found or 'none'}")
        if not math.isclose(math.fsum(self.fractions.values()), 1, abs_tol=1e-6):
            raise DataError(f"fractions of a split must sum to 1, found {found}")

    @staticmethod
    def of_fold(fold: str, fractions: Mapping[str, float] = SHARES, seed: int = 0) -> Rule:
        """Fold ``k/n``: test has 1/n of the patients, and ``fractions`` say how the others are divided.

        >>> print(Rule.of_fold("2/4"))
        fold 2 of 4, by rank of the hash of the patient with seed 0: train 65.6%, val 9.38%, test 25%
        """
        _, n = parse_fold(fold)
        rest = {name: share for name, share in fractions.items() if name != "test"}
        if "train" not in rest or not rest.keys() <= {"train", "val"}:
            raise DataError(f"fold {fold}: expected fractions of train, val and test, found {', '.join(fractions)}")
        whole = sum(rest.values())
        shares = {name: (1 - 1 / n) * share / whole for name, share in rest.items()}
        return Rule({**shares, "test": 1 / n}, seed, fold=fold)

    def part(self, patient: str, declared: str | None = None) -> str:
        """The part of one patient; ``declared`` is what the owner said, where the rule follows it."""
        if self.released:
            raise DataError(f"patient {patient!r}: the {self.released} split has no part for who was not in it")
        if self.declared:
            if not declared:
                raise DataError(f"patient {patient!r}: expected a declared split, found none")
            if declared != "train" or not self.fractions:
                return declared
        place = self._place(patient)
        if not self.fold:
            limits = list(accumulate(self.fractions.values()))[:-1]  # the fractions may sum to slightly less than 1
            return list(self.fractions)[bisect(limits, place)]
        k, n = parse_fold(self.fold)
        val = self.fractions.get("val", 0.0) / (1 - self.fractions["test"])
        if int(place * n) + 1 == k:
            return "test"
        return "val" if uniform(f"val:{self.seed}:{patient}") < val else "train"

    def divide(self, patients: Iterable[str]) -> dict[str, str]:
        """The part of each of these patients, who are all that are to be divided.

        >>> Rule.of_fold("1/3").divide("abcdef")
        {'a': 'train', 'b': 'train', 'c': 'test', 'd': 'train', 'e': 'test', 'f': 'val'}
        """
        order = sorted(set(patients), key=lambda patient: (self._place(patient), patient))
        if not (self.ranked or self.fold):
            parts = [self.part(patient, "train") for patient in order]
        elif self.fold:
            parts = self._fold_parts(len(order))
        else:
            parts = [part for part, size in exact_sizes(self.fractions, len(order)).items() for _ in range(size)]
        return dict(sorted(zip(order, parts, strict=True)))

    def _fold_parts(self, count: int) -> list[str]:
        """Of patients in the order of their hash: fold k is the k-th of n blocks, and val is what follows it."""
        k, n = parse_fold(self.fold)
        start, end = (-(-count * i // n) for i in (k - 1, k))
        rest = count - (end - start)
        share = self.fractions.get("val", 0.0) / (1 - self.fractions["test"])
        val = max(1, math.floor(rest * share + 0.5)) if share else 0
        if n > count or rest <= val:
            raise DataError(f"fold {self.fold}: expected at least {max(n, 3)} patients, found {count}")
        parts = ["train"] * count
        parts[start:end] = ["test"] * (end - start)
        for i in range(val):
            parts[(end + i) % count] = "val"
        return parts

    def _place(self, patient: str) -> float:
        return uniform(f"{self.seed}:{patient}")

    def __str__(self) -> str:
        digits = 3 if self.fold else 6
        shares = ", ".join(f"{name} {100 * share:.{digits}g}%" for name, share in self.fractions.items())
        rank = "rank of the " * bool(self.ranked or self.fold)
        text = f"by {rank}hash of the patient with seed {self.seed}: {shares}"
        if self.fold:
            text = "fold {} of {}, ".format(*parse_fold(self.fold)) + text
        if self.released:
            text = f"as released with {self.released}, by series with random_state {self.seed}: {shares}"
        elif self.declared:
            text = "declared by the data's owner" + (f", its train divided {text}" if self.fractions else "")
        return text + (f"; {self.assumed}" if self.assumed else "")


def exact_sizes(fractions: Mapping[str, float], count: int) -> dict[str, int]:
    """So many patients in each part that shares are met as exactly as they can be, and no part is empty.

    >>> exact_sizes(SHARES, 20), exact_sizes(SHARES, 3)
    ({'train': 14, 'val': 2, 'test': 4}, {'train': 1, 'val': 1, 'test': 1})
    """
    if count < len(fractions):
        raise DataError(f"expected at least {len(fractions)} patients, found {count}")
    # With one for each part put aside, the largest shortfall gets the next one.
    sizes = dict.fromkeys(fractions, 1)
    for _ in range(count - len(fractions)):
        part = max(fractions, key=lambda part: fractions[part] * count - sizes[part])
        sizes[part] += 1
    return sizes


def parse_fold(fold: str) -> tuple[int, int]:
    """``"2/5"`` -> (2, 5)."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", fold)
    k, n = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= k <= n or n < 2:
        raise DataError(f"fold: expected K/N such as 2/5, the second of five folds, found {fold[:40]!r}")
    return k, n


def uniform(text: str) -> float:
    """A number in [0, 1) that is the same for the same text on every machine."""
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return (word >> 11) / 2**53  # all the bits that a float holds: dividing 64 of them could round up to 1
