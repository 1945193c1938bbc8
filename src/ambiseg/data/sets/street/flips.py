"""Data whose modes are known: every mode is the same class-id map with some of its classes flipped to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, Decoded, Flip, digest, smallest_unsigned

_MOST = 12  # flips; 2¹² modes are a table of 4,096 columns

FlipTable = Mapping[str | int, Sequence[str | int | float]]
"""{class: (new class, probability)}: classes by name or id, a probability as a number or as text such as 8/17."""


class Flips(Cases):
    """Any data set of one class-id map per image, made ambiguous: n classes flip independently, which makes 2ⁿ modes.

        P(mode) = ∏ over flips that happen p · ∏ over flips that do not (1 − p)

    (Kohl et al. 2018, as in multimodal Cityscapes.) A case has one map of regions, and its table has one column per
    mode, so that 32 modes take no more memory than one. Modes that are equal, because a class is not in the image, are
    joined to one with the sum of their weights. Void regions are never flipped.

    A mode is named after its flips, in the order of the table: 1 happened, 0 did not, - makes no difference here.

    Args:
        cases: the data; each case has one reader.
        table: {class: (new class, probability)}. A new class that has no id yet is appended to the classes.
        title: of the data; ``None``: the title of ``cases`` with the number of modes.

    >>> from ambiseg.data.sets.shapes import Shapes
    >>> import dataclasses
    >>> class One(Shapes):                                        # the first of several readers is a class-id map
    ...     def __getitem__(self, index):
    ...         case = super().__getitem__(index)
    ...         return dataclasses.replace(case, table=case.table[:, :1], readers=("map",), weights=None)
    >>> flipped = Flips(One(count=2, size=16), {1: ("other", "1/4")})
    >>> flipped[0].readers, flipped[0].weights.tolist(), flipped.classes[-1], flipped.evaluated[-1]
    (('0', '1'), [0.75, 0.25], 'other', 2)
    """

    def __init__(self, cases: Cases, table: FlipTable, title: str | None = None) -> None:
        self.cases = cases
        self.classes, self.flips = _read(table, cases.classes)
        self.evaluated = tuple(dict.fromkeys([f.source for f in self.flips] + [f.target for f in self.flips]))
        self.title = title or f"{cases.title}, {2 ** len(self.flips)} modes"
        self.channels, self.intensity, self.units = cases.channels, cases.intensity, cases.units
        self.reading, self.extra = cases.reading, cases.extra
        self.names, self.patients, self.declared = cases.names, cases.patients, cases.declared
        self.patients_known, self.patients_assumed = cases.patients_known, cases.patients_assumed
        self.group, self.annotator = cases.group, "mode"

    def __getitem__(self, index: int) -> Case:
        return self._flipped(self.cases[index])

    def decode(self, start: int = 0) -> Iterator[Decoded]:
        # Not by the source's decode, whose tables may hold numbers that are no classes yet.
        for index in range(start, len(self)):
            case = self.cases[index]
            declared = None if self.declared is None else self.declared[index]
            digests = self.cases.image_digest(index, case), self._digest(self.cases.digest(index, case))
            yield Decoded(self._flipped(case), *digests, declared, self.origin(index))

    def _flipped(self, case: Case) -> Case:
        if case.table.shape[1] != 1:
            raise DataError(f"{case.name}: expected one class-id map to flip, found {case.table.shape[1]} readers")
        void = np.zeros(len(case.table), bool) if case.void is None else case.void
        modes = flip_modes(np.where(void, 0, case.table[:, 0]), ~void, self.flips)
        return replace(case, table=modes.table, readers=modes.names, weights=modes.weights)

    def size_of(self, index: int) -> tuple[int, int]:
        return self.cases.size_of(index)

    def origin(self, index: int) -> dict[str, Any]:
        return self.cases.origin(index)

    def about(self) -> dict[str, Any]:
        return self.cases.about()

    def state(self) -> str:
        return self._digest(self.cases.state())

    def image_digest(self, index: int, case: Case | None = None) -> str:
        return self.cases.image_digest(index)

    def digest(self, index: int, case: Case | None = None) -> str:
        """A hash of the case without flips and of the flips, not of every mode's map."""
        return self._digest(self.cases.digest(index))

    def _digest(self, found: str) -> str:
        return digest("flips", found, f"{self.title} {self.classes} {self.flips}")


@dataclass(frozen=True, eq=False)
class ModeTable:
    """The modes of one image, as far as they differ in it.

    Attributes:
        table: ``[U, D]`` class of each region in each mode; mode 0 is the one without flips.
        weights: ``[D]`` sum to 1.
        names: D, one character per flip: 1 happened, 0 did not, - makes no difference here.
        which: ``[2ⁿ]`` which of the D each combination of flips is, in the order of :func:`happening`.
    """

    table: np.ndarray
    weights: np.ndarray
    names: tuple[str, ...]
    which: np.ndarray


def flip_modes(labels: np.ndarray, counts: np.ndarray, flips: Sequence[Flip]) -> ModeTable:
    """The class of every region of one image in every mode; modes that are equal are joined.

    Args:
        labels: ``[U]`` class ids of the regions.
        counts: ``[U]`` bool, False for void regions, which are the same in every mode.
        flips: which may happen.

    >>> modes = flip_modes(np.array([0, 1, 2]), np.ones(3, bool), [Flip(1, 3, 0.25), Flip(2, 4, 0.5), Flip(5, 6, 0.5)])
    >>> modes.table.tolist(), modes.weights.tolist()
    ([[0, 0, 0, 0], [1, 1, 3, 3], [2, 4, 2, 4]], [0.375, 0.375, 0.125, 0.125])
    >>> modes.names, modes.which.tolist()
    (('00-', '01-', '10-', '11-'), [0, 0, 1, 1, 2, 2, 3, 3])
    """
    happens = happening(len(flips))
    labels = labels.astype(smallest_unsigned(1 + max([*labels.tolist(), *(flip.target for flip in flips)])))
    table = np.repeat(labels[:, None], len(happens), 1)
    here = np.zeros(len(flips), bool)
    for f, flip in enumerate(flips):
        regions = counts & (labels == flip.source)
        here[f] = regions.any()
        table[np.ix_(regions, happens[:, f])] = flip.target
    _, first, which = np.unique(table, axis=1, return_index=True, return_inverse=True)
    order = np.sort(first)  # of equal modes the one with the fewest flips is kept
    which = np.searchsorted(order, first[which.reshape(-1)])
    names = tuple("".join(row) for row in np.where(here, happens[order].astype(int).astype(str), "-"))
    return ModeTable(np.ascontiguousarray(table[:, order]), np.bincount(which, mode_weights(flips)), names, which)


def happening(flips: int) -> np.ndarray:
    """``[2ⁿ, n]`` bool: which flips happen in each mode; the first mode has none, and the last flip changes fastest."""
    modes = np.arange(2**flips)[:, None]
    return (modes >> np.arange(flips)[::-1] & 1).astype(bool)


def mode_weights(flips: Sequence[Flip]) -> np.ndarray:
    """``[2ⁿ]`` the probability of each combination of flips.

    >>> mode_weights([Flip(1, 3, 0.25), Flip(2, 4, 0.5)]).tolist()
    [0.375, 0.375, 0.125, 0.125]
    """
    chance = np.array([flip.probability for flip in flips])
    return np.where(happening(len(flips)), chance, 1 - chance).prod(1)


def _read(table: FlipTable, classes: Sequence[str]) -> tuple[tuple[str, ...], tuple[Flip, ...]]:
    """The classes with those that are new, and the flips by id."""
    names, flips = list(classes), []
    if not isinstance(table, Mapping) or not 1 <= len(table) <= _MOST:
        found = len(table) if isinstance(table, Mapping) else repr(table)
        raise DataError(f"flips: expected {{class: [new class, probability]}} for 1 to {_MOST} classes, found {found}")
    for key, value in table.items():
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise DataError(f"flips: {key}: expected [new class, probability], found {value!r}")
        source = _class(key, names[: len(classes)])
        if isinstance(value[0], str) and value[0] not in names:
            names.append(value[0])
        target = _class(value[0], names)
        try:
            probability = float(Fraction(value[1]))
        except (ValueError, TypeError, ZeroDivisionError):
            raise DataError(f"flips: {key}: expected a probability such as 0.25 or 8/17, found {value[1]!r}") from None
        if not 0 < probability < 1:
            raise DataError(f"flips: {key}: expected a probability between 0 and 1, found {value[1]}")
        if source == target:
            raise DataError(f"flips: {key}: expected another class to become, found itself")
        if source in (flip.source for flip in flips):
            raise DataError(f"flips: {key}: expected each class once, found it twice")
        flips.append(Flip(source, target, probability))
    return tuple(names), tuple(flips)


def _class(key: object, names: Sequence[str]) -> int:
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(names):
        return key
    if isinstance(key, str) and key in names:
        return list(names).index(key)
    raise DataError(f"flips: expected one of the classes {', '.join(names)}, found {key!r}")
