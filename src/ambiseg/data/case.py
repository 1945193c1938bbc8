"""What every data set is: a list of cases, each one image with everything that its readers said of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity


@dataclass(frozen=True, eq=False)
class Case:
    """One image and its annotations, kept as one map of regions and a table of what each reader called them.

        labels[m, y, x] = table[regions[y, x], m]

    Pixels that all readers labelled alike share a region, so M masks are one small-integer map whatever M is: one map
    to store, to crop and to turn, and a mask that equals another stays equal whatever is done to it.

    Args:
        image: ``[C, H, W]`` in the units and the dtype of its source (Hounsfield int16, grey uint8 …).
        regions: ``[H, W]`` unsigned integers, rows of ``table``.
        table: ``[U, M]`` class ids.
        name: unique in its data set; files that are made of the case are named after it.
        patient: what must not be divided between splits: the patient, or whatever else makes images alike.
        readers: M names; where readers are exchangeable any names do.
        weights: ``[M]`` non-negative, any sum; ``None`` is equal.
        void: ``[U]`` bool, True where a region counts nowhere; ``None`` is nowhere void.

    >>> case = Case.of(np.zeros((1, 1, 3)), np.array([[[0, 1, 1]], [[0, 0, 1]]]), name="a")
    >>> case.regions.tolist(), case.table.tolist()
    ([[0, 1, 2]], [[0, 0], [1, 0], [1, 1]])
    >>> case.labels.tolist()
    [[[0, 1, 1]], [[0, 0, 1]]]
    """

    image: np.ndarray
    regions: np.ndarray
    table: np.ndarray
    name: str
    patient: str
    readers: tuple[str, ...]
    weights: np.ndarray | None = None
    void: np.ndarray | None = None

    @staticmethod
    def of(
        image: np.ndarray,
        labels: np.ndarray,
        *,
        name: str,
        patient: str | None = None,
        readers: Sequence[str] | None = None,
        weights: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> Case:
        """From masks ``labels [M, H, W]`` and, where some pixels are void, ``valid [H, W]``."""
        if labels.ndim != 3 or image.ndim != 3 or image.shape[1:] != labels.shape[1:]:
            raise DataError(
                f"{name}: expected an image [C, H, W] and masks [M, H, W] of its size, "
                f"found {list(image.shape)} and {list(labels.shape)}"
            )
        maps = [*labels] if valid is None else [*labels, ~valid]  # void is one more thing to be alike in
        regions, table = join_maps(maps)
        void = None
        if valid is not None:
            table, void = table[:, :-1], table[:, -1].astype(bool)
        return Case(
            image=image,
            regions=regions,
            table=np.ascontiguousarray(table),
            name=name,
            patient=name if patient is None else patient,
            readers=tuple(readers) if readers is not None else tuple(f"reader_{m + 1}" for m in range(len(labels))),
            weights=weights,
            void=void,
        )

    @property
    def labels(self) -> np.ndarray:
        """``[M, H, W]`` class ids."""
        return np.ascontiguousarray(np.moveaxis(self.table[self.regions], -1, 0))

    @property
    def valid(self) -> np.ndarray | None:
        """``[H, W]``, False at void pixels; ``None`` when there are none."""
        return None if self.void is None else ~self.void[self.regions]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.regions.shape[0], self.regions.shape[1]

    @property
    def mass(self) -> np.ndarray:
        """``[M]`` float32 weights that sum to 1."""
        M = self.table.shape[1]
        if self.weights is None:
            return np.full(M, 1 / M, np.float32)
        return (self.weights / self.weights.sum()).astype(np.float32)


def join_maps(maps: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One map that tells as much as all of ``maps`` do:  maps[m] = table[regions, m].

    Rows of the table are in lexicographic order and all distinct; the map's dtype is the smallest that holds them.
    """
    shape = maps[0].shape
    regions = np.zeros(maps[0].size, np.int64)
    table = np.zeros((1, 0), np.int64)
    for labels in maps:
        values, codes = np.unique(labels.reshape(-1), return_inverse=True)
        pair = regions * len(values) + codes.reshape(-1)
        seen = np.zeros(len(table) * len(values), bool)
        seen[pair] = True
        rows = np.flatnonzero(seen)  # the pairs that occur, in order: their rank is the new region
        rank = np.cumsum(seen) - 1
        regions = rank[pair]
        table = np.concatenate([table[rows // len(values)], values[rows % len(values)][:, None].astype(np.int64)], 1)
    return regions.reshape(shape).astype(smallest_unsigned(len(table))), table.astype(
        smallest_unsigned(table.max() + 1)
    )


def smallest_unsigned(count: int) -> np.dtype:
    """The smallest unsigned dtype that counts from 0 to ``count`` - 1."""
    return np.min_scalar_type(max(int(count) - 1, 0))


@dataclass(frozen=True)
class Flip:
    """A class that is another class in some of an image's modes: all its pixels at once, independent of other flips."""

    source: int
    target: int
    probability: float


class Cases(ABC):
    """A data set: its cases by number, and what is known of all of them without reading a pixel.

    A data set implements ``__getitem__`` and sets the attributes. Names are unique. A case read twice is the same.

    Attributes:
        title: what the data are, for tables and reports.
        classes: names of the class ids 0 … C-1.
        evaluated: class ids that metrics look at; usually all but the background.
        channels: C of every image.
        intensity: how raw values become the network's input, unless the user says otherwise.
        names, patients: one of each per case.
        declared: the split that the data's owner gave each case; ``None`` when there is none.
        patients_known: False where the source does not tell which cases are of one patient.
        flips: what makes the modes of data whose modes are known; see :class:`~ambiseg.data.sets.street.flips.Flips`.
    """

    title: str
    classes: tuple[str, ...]
    evaluated: tuple[int, ...]
    channels: int
    intensity: Intensity
    names: Sequence[str]
    patients: Sequence[str]
    declared: Sequence[str] | None = None
    patients_known: bool = True
    flips: tuple[Flip, ...] = ()

    @abstractmethod
    def __getitem__(self, index: int) -> Case:
        """Read one case. Raises :class:`DataError` that names the file when it cannot be read as declared."""

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Case]:
        return (self[i] for i in range(len(self)))

    def origin(self, index: int) -> dict[str, Any]:
        """Where one case comes from (series, slice, place in it …), ready for JSON; a store keeps it."""
        return {}

    def about(self) -> dict[str, Any]:
        """The same of all cases: the source and what was done to it."""
        return {}

    def state(self) -> str:
        """A text that changes whenever the data do; a copy of the data made at another state is out of date.

        Unless a data set knows something cheaper (times and sizes of its files, the settings that make it), this
        reads everything.
        """
        return digest(self.title, *(self.digest(i) for i in range(len(self))))

    def image_digest(self, index: int) -> str:
        """A hash of one image's pixels: the same picture under another name has the same digest."""
        return digest(self[index].image)

    def digest(self, index: int) -> str:
        """A hash of everything that one case holds."""
        case = self[index]
        void = None if case.void is None else case.valid
        said = [*zip(case.readers, case.labels, case.mass, strict=True)]
        return digest(case.name, case.patient, case.image, *(part for reader in said for part in reader), void)


def digest(*parts: np.ndarray | np.generic | str | None) -> str:
    """32 hexadecimal digits of BLAKE2 over arrays (with shape and dtype) and texts: the same on every machine."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if part is None or isinstance(part, str):
            content, head = (part or "").encode(), "text" if part is not None else "none"
        else:
            array = np.ascontiguousarray(part)
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            content, head = array.tobytes(), f"{array.dtype.str}{list(array.shape)}"
        state.update(f"{head}:{len(content)};".encode())
        state.update(content)
    return state.hexdigest()
