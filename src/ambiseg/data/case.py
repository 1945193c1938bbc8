"""What every data set is: a list of cases, each one image with the masks of all its readers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ambiseg._util.bands import PIXELS, bands, counted, looked_up
from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (cases done, cases in all) after each case."""
_REGIONS = 1 << 20  # of one image; those of objects and their readers are a few hundred
_MANY = 256  # combinations of labels: more than these are reduced to those that occur before the next map is added


@dataclass(frozen=True, eq=False)
class Case:
    """One image and its annotations: one map of regions, and a table of the class that each reader gave each region.

        labels[m, y, x] = table[regions[y, x], m]

    Pixels that all readers labelled alike share a region, so M masks are one map of small integers, whatever M is:
    one map to store, to crop and to rotate, and masks that are equal stay equal under every transform.

    Args:
        image: ``[C, H, W]`` in the units and the dtype of its source (Hounsfield int16, grey uint8 …).
        regions: ``[H, W]`` unsigned integers, rows of ``table``.
        table: ``[U, M]`` class ids.
        name: unique in its data set; files that are made of the case are named after it.
        patient: what must not be divided between splits: the patient, or whatever else makes images alike.
        readers: M names; any names where readers are exchangeable.
        weights: ``[M]`` non-negative, any sum; ``None``: equal weights.
        void: ``[U]`` bool, True where a region counts nowhere; ``None``: no void pixels.

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
        M, void = len(labels), None
        try:  # a region is void as a whole or not
            regions, table = partition(labels if valid is None else [*labels, ~valid])
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        if valid is not None:
            table, void = np.ascontiguousarray(table[:, :M]), table[:, M].astype(bool)
        patient = name if patient is None else patient
        readers = [f"reader_{m + 1}" for m in range(M)] if readers is None else readers
        return Case(image, regions, table, name, patient, tuple(readers), weights, void)

    @property
    def labels(self) -> np.ndarray:
        """``[M, H, W]`` class ids."""
        return np.stack([looked_up(labels, self.regions) for labels in np.ascontiguousarray(self.table.T)])

    @property
    def valid(self) -> np.ndarray | None:
        """``[H, W]``, False at void pixels; ``None`` when there are none."""
        return None if self.void is None else looked_up(~self.void, self.regions)

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

    @property
    def image_digest(self) -> str:
        """A hash of the image's pixels: the same image under another name has the same digest."""
        return digest(self.image)

    @property
    def digest(self) -> str:
        """A hash of everything that the case holds."""
        void = None if self.void is None else self.valid
        masks = [part for mask in zip(self.readers, self.labels, self.mass, strict=True) for part in mask]
        return digest(self.name, self.patient, self.image, *masks, void)


def partition(maps: Sequence[np.ndarray] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One map of regions and the table that gives back all ``maps``:  maps[m] = table[regions, m].

    Rows of the table are in lexicographic order and all distinct. Map and table have the smallest unsigned dtype that
    holds them.

    >>> regions, table = partition(np.array([[[0, 1, 1]], [[0, 0, 1]]]))
    >>> regions.tolist(), table.tolist()
    ([[0, 1, 2]], [[0, 0], [1, 0], [1, 1]])
    """
    if maps[0].size <= PIXELS:
        return _partition(maps)
    flat = [labels.reshape(-1) for labels in maps]  # of many pixels, some at a time: they are numbered with 64 bits
    parts = [_partition([labels[band] for labels in flat]) for band in bands(maps[0].size)]
    table, rows = np.unique(np.concatenate([table for _, table in parts]), axis=0, return_inverse=True)
    _check_regions(len(table))
    regions, start = np.empty(maps[0].size, smallest_unsigned(len(table))), 0
    for band, (found, own) in zip(bands(maps[0].size), parts, strict=True):
        regions[band] = rows.reshape(-1)[start : start + len(own)].astype(regions.dtype)[found]
        start += len(own)
    return regions.reshape(maps[0].shape), table


def _partition(maps: Sequence[np.ndarray] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    regions, count = np.zeros(maps[0].size, np.intp), 1
    for labels in maps:
        if labels.dtype.kind in "biu" and labels.min() >= 0 and (most := int(labels.max())) < 16:  # most data: fast
            values, ranks = most + 1, labels.reshape(-1).astype(np.intp, copy=False)
        else:
            distinct, ranks = ranked(labels.reshape(-1))
            values = len(distinct)
        regions, count = regions * values + ranks, count * values
        if count > _MANY:
            rows, regions = _ranked_below(count, regions)
            _check_regions(count := len(rows))
    rows, regions = _ranked_below(count, regions)
    example = np.empty(len(rows), np.intp)  # a pixel of each region, which has the labels of all of it
    example[regions] = np.arange(len(regions))
    table = np.stack([labels.reshape(-1)[example] for labels in maps], 1).astype(np.int64)
    regions = regions.reshape(maps[0].shape).astype(smallest_unsigned(len(table)))
    return regions, table.astype(smallest_unsigned(table.max() + 1))


def _check_regions(count: int) -> None:
    if count > _REGIONS:
        expected = f"expected masks whose labels combine in at most {_REGIONS:,} ways in one image"
        raise DataError(f"{expected}, found {count:,} or more: these are no masks of objects, but noise or a picture")


def ranked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct numbers of a flat array in order, and the rank of each number among them."""
    if values.dtype.kind in "bu" and values.dtype.itemsize <= 2:  # much faster than sorting
        numbers = (values != 0).view(np.uint8) if values.dtype.kind == "b" else values  # any byte may be True
        seen = counted(numbers) > 0
        return np.flatnonzero(seen), looked_up((np.cumsum(seen) - 1).astype(smallest_unsigned(seen.sum())), numbers)
    distinct, ranks = np.unique(values, return_inverse=True)
    return distinct, ranks.reshape(-1)


def _ranked_below(limit: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if limit > max(4 * numbers.size, 1 << 20):  # a table of what may occur would be larger than what does
        distinct, ranks = np.unique(numbers, return_inverse=True)
        return distinct, ranks.reshape(-1)
    seen = np.zeros(limit, bool)
    seen[numbers] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[numbers]


def smallest_unsigned(count: int) -> np.dtype:
    """The smallest unsigned dtype that counts from 0 to ``count`` - 1."""
    return np.min_scalar_type(max(int(count) - 1, 0))


@dataclass(frozen=True)
class Flip:
    """A class that is another class in some of an image's modes: all its pixels at once, independent of other flips."""

    source: int
    target: int
    probability: float


@dataclass(frozen=True)
class Reading:
    """How the files of images are read, so that new images can be read alike.

    Args:
        axes: of ``.npy`` and ``.npz`` arrays, such as ``HWC``; ``None``: not said.
        axis: that a NIfTI volume is cut along; ``None``: not said.
        convert: grey images are read as colour, and colour that is grey as grey.
    """

    axes: str | None = None
    axis: int | None = None
    convert: bool = False


@dataclass(frozen=True)
class Extra:
    """Another model's prediction of an image, which joins it as one channel for each class.

    Args:
        classes: how many.
        ids: meaning of the numbers in a map of class ids, ``None`` for void.
    """

    classes: int
    ids: dict[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Decoded:
    """One case of :meth:`Cases.decode`, with everything that a store keeps of it: digests, declared split, origin.

    ``observed`` (ready for JSON) is not ``None`` where the table holds values whose class is known only when all cases
    have been read: :meth:`Cases.settle` needs it, and ``digest`` is not known before.
    """

    case: Case
    image_digest: str
    digest: str = ""
    declared: str | None = None
    origin: dict[str, Any] | None = None
    observed: Any = None


class Cases(ABC):
    """A data set: its cases by number, and what is known of all of them.

    A data set implements ``__getitem__`` and sets the attributes; those that cannot be known without reading pixels may
    be computed when they are first asked for. Names are unique. A case that is read twice is the same.

    Attributes:
        title: what the data are, for tables and reports.
        classes: names of the class ids 0 … C-1.
        evaluated: class ids that metrics look at; usually all but the background.
        channels: C of every image.
        intensity: how raw values become the network's input, unless the user says otherwise.
        units: of raw values: HU, 8-bit grey …; empty where they are not known.
        reading: how the images' files are read.
        extra: the last channels, where they are another model's prediction.
        names, patients: one of each per case.
        declared: the split that the data's owner gave each case; ``None`` when there is none.
        patients_known: False where the source does not tell which cases are of one patient.
        patients_assumed: what was assumed to tell the patients apart, in words; empty where the source tells.
        group: what ``patients`` are called in tables: patient, sequence …
        annotator: what a mask of the table is called: reader, or mode where modes are known.
        flips: what makes the modes of data whose modes are known; see :class:`~ambiseg.data.sets.street.flips.Flips`.
        fingerprint: :func:`ambiseg.data.splits.fingerprint` of all cases, where it was computed before.
    """

    title: str
    classes: tuple[str, ...]
    evaluated: tuple[int, ...]
    channels: int
    intensity: Intensity
    units: str = ""
    reading: Reading = Reading()
    extra: Extra | None = None
    names: Sequence[str]
    patients: Sequence[str]
    declared: Sequence[str] | None = None
    patients_known: bool = True
    patients_assumed: str = ""
    group: str = "patient"
    annotator: str = "reader"
    flips: tuple[Flip, ...] = ()
    fingerprint: str | None = None

    @abstractmethod
    def __getitem__(self, index: int) -> Case:
        """Read one case. Raises :class:`DataError` that names the file when it cannot be read as declared."""

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Case]:
        return (self[i] for i in range(len(self)))

    @property
    def unit(self) -> str:
        """What is resampled for intervals: :attr:`group`, or a case where groups are not known."""
        return self.group if self.patients_known else "case"

    def size_of(self, index: int) -> tuple[int, int]:
        """Height and width of one case; this reads it, a store knows."""
        return self[index].size

    def origin(self, index: int) -> dict[str, Any]:
        """Where one case comes from (series, slice, place in it …), ready for JSON; a store keeps it."""
        return {}

    def about(self) -> dict[str, Any]:
        """The same of all cases: the source and what was done to it."""
        return {}

    def state(self) -> str:
        """A text that changes whenever the data do; a copy of the data made at another state is out of date.
        This reads everything; most data sets know something cheaper, such as times and sizes of their files."""
        return digest(self.title, *(self.digest(i) for i in range(len(self))))

    def image_digest(self, index: int, case: Case | None = None) -> str:
        """A hash of one image; ``case`` is the case of that number, if it has been read already."""
        return (self[index] if case is None else case).image_digest

    def digest(self, index: int, case: Case | None = None) -> str:
        """A hash of everything that one case holds; ``case`` as in :meth:`image_digest`."""
        return (self[index] if case is None else case).digest

    @property
    def expected(self) -> int:
        """How many cases :meth:`decode` will find, as far as that is known before: for progress."""
        return len(self)

    def decode(self, start: int = 0) -> Iterator[Decoded]:
        """All cases from number ``start`` on, each read once: what a store is made of."""
        for index in range(start, len(self)):
            case = self[index]
            declared = None if self.declared is None else self.declared[index]
            digests = self.image_digest(index, case), self.digest(index, case)
            yield Decoded(case, *digests, declared, self.origin(index))

    def settle(self, observed: Sequence[Any]) -> bool:
        """Called after the last case with what :meth:`decode` observed in all of them: classes are known from here on.
        Returns whether the tables of the cases must be :meth:`settled`."""
        return False

    def settled(self, case: Case, observed: Any) -> Case:
        """The case with class ids in its table, once :meth:`settle` was called; its regions stay as they are."""
        return case


def byte_units(dtype: np.dtype, channels: int) -> str:
    """Units of pixels of bytes; empty for other types, whose units are not known.

    >>> byte_units(np.dtype(np.uint8), 3), byte_units(np.dtype(np.int16), 1)
    ('8-bit RGB', '')
    """
    return {1: "8-bit grey", 3: "8-bit RGB"}.get(channels, "8-bit") if dtype == np.uint8 else ""


def digest(*parts: np.ndarray | np.generic | str | None) -> str:
    """32 hexadecimal digits of BLAKE2 over arrays (with shape and dtype) and texts: the same on every machine."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if part is None or isinstance(part, str):
            content, head = (part or "").encode(), "text" if part is not None else "none"
        else:
            array = np.ascontiguousarray(part)
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            content, head = array.reshape(-1).view(np.uint8).data, f"{array.dtype.str}{list(array.shape)}"
        state.update(f"{head}:{len(content)};".encode())
        state.update(content)
    return state.hexdigest()
