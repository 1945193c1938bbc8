"""The split of LIDC that was released with the MoSE paper, made again from its rule and not from a list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Cases, Progress
from ambiseg.data.splits import Rule, Split

SERIES = 875  # of the v1 pickle, which the split was made for
MOSE = Rule({"train": 0.64, "val": 0.16, "test": 0.2}, released="mose")


def released_split(cases: Cases, progress: Progress | None = None) -> Split:
    """The split of :func:`mose_split` for cases whose series are known, and are the 875 of v1."""
    return Split.by_patient(cases, dict(zip(cases.patients, mose_parts(cases), strict=True)), MOSE, progress)


def mose_split(series: Sequence[str]) -> dict[str, str]:
    """The part of each series in the split of the MoSE authors, which the literature calls 60/20/20.

    Their code sorts the series, shuffles them with seed 0 and takes a fifth for test; then it shuffles what is left,
    again with seed 0, and takes a fifth of that for validation: 20% test, 16% val, 64% train. This is scikit-learn's
    ``train_test_split(…, test_size=0.2, random_state=0)`` twice.

    >>> parts = mose_split([f"1.2.{i}" for i in range(10)])
    >>> [name for name, part in parts.items() if part == "test"], [*parts.values()].count("val")
    (['1.2.2', '1.2.8'], 2)
    """
    left = np.unique(np.array(series, dtype=str))
    parts = dict.fromkeys(left.tolist(), "train")
    for part in ("test", "val"):
        order = np.random.RandomState(0).permutation(len(left))
        count = math.ceil(0.2 * len(left))
        parts.update(dict.fromkeys(left[order[:count]].tolist(), part))
        left = left[order[count:]]  # in this order: the second shuffle starts from the first one
    return parts


def mose_parts(cases: Cases) -> list[str]:
    """The part of every case by :func:`mose_split`, if all 875 series of v1 are there.

    A shuffle depends on how many there are, so a part of them would get another split under the same name. A patient
    with two series in different parts stays whole, in the part of the first series: the pickle that the split was made
    for has one series per patient.
    """
    series = [cases.origin(i).get("series") for i in range(len(cases))]
    if None in series:
        name = cases.names[series.index(None)]
        raise DataError(
            f"{cases.title}: the mose split goes by series, expected one of every case, found none of {name!r}"
        )
    if (found := len(set(series))) != SERIES:
        raise DataError(
            f"{cases.title}: the mose split is a shuffle of the {SERIES} series of v1, which another number of series "
            f"cannot repeat, found {found}; --data.split hash divides the patients by hash"
        )
    of_series = mose_split([str(one) for one in series])
    first: dict[str, str] = {}
    for patient, one in zip(cases.patients, series, strict=True):
        first[patient] = min(first.get(patient, str(one)), str(one))
    return [of_series[first[patient]] for patient in cases.patients]
