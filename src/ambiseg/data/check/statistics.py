"""Statistics of a data set, gathered case by case: sizes, classes, readers, and how far the readers agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, combinations_with_replacement

import numpy as np

from ambiseg._util.bands import counted
from ambiseg.data.case import Case

_COMPARED = 100  # readers of one image whose masks are compared with each other
_MATRICES = 64  # classes of one image up to which all pairs of readers are compared at once
_SAMPLE = 1 << 20  # pixel values that are kept of the whole data set, for percentiles


@dataclass(frozen=True)
class CaseSummary:
    """One case in numbers.

    Args:
        empty: masks without a pixel of any evaluated class.
        iou: mean IoU of its pairs of readers, a class that neither of two marked counting as 1; nan for one reader.
        differing: share of its pixels that the readers do not all label alike.
        apart: a reader whose mask hardly overlaps those of all others, who agree; or ``None``.
    """

    name: str
    patient: str
    split: str | None
    size: tuple[int, int]
    readers: tuple[str, ...]
    empty: int
    iou: float
    differing: float
    apart: str | None


@dataclass
class ClassCount:
    """How often a class was marked."""

    pixels: int = 0
    masks: int = 0
    images: int = 0


@dataclass
class ReaderCount:
    """One reader: images, empty masks, and IoUs with other readers' masks where one of both marked something."""

    images: int = 0
    empty: int = 0
    ious: list[float] = field(default_factory=list)

    @property
    def mean_iou(self) -> float:
        return _mean(self.ious)


@dataclass
class Statistics:
    """The numbers of all cases that were given to :meth:`add`. Keeps names and counts, no images.

    Args:
        classes, evaluated: of the data set.
        expected: number of cases that will be added.

    >>> case = Case.of(np.zeros((1, 1, 4), np.uint8), np.array([[[0, 1, 1, 0]], [[0, 0, 1, 0]]]), name="a")
    >>> statistics = Statistics(("background", "disc"), (1,), expected=1)
    >>> statistics.add(case)
    >>> statistics.iou, statistics.ambiguous, statistics.differing
    (0.5, 1.0, 0.25)
    """

    classes: tuple[str, ...] = ()
    evaluated: tuple[int, ...] = ()
    expected: int = 0
    cases: list[CaseSummary] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    types: Counter[tuple[int, str]] = field(default_factory=Counter)  # channels and dtype of the images
    low: float = float("inf")
    high: float = float("-inf")
    by_class: list[ClassCount] = field(init=False)
    by_reader: dict[str, ReaderCount] = field(default_factory=lambda: defaultdict(ReaderCount))
    together: Counter[tuple[str, str]] = field(default_factory=Counter)  # images that two readers share
    identical: Counter[tuple[str, str]] = field(default_factory=Counter)  # of these, with equal masks
    by_digest: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # cases by their image's digest
    blank: list[int] = field(default_factory=list)  # cases whose image has one value in all pixels
    void: int = 0  # pixels
    marked_ious: list[float] = field(default_factory=list)  # per image, over pairs with a mark
    weighted: int = 0  # images with weights of readers
    _values: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_class = [ClassCount() for _ in self.classes]

    def add(self, case: Case, split: str | None = None) -> None:
        """Count one case."""
        self._add_image(case)
        area = counted(case.regions, len(case.table)).astype(np.float64)
        if case.void is not None:
            self.void += int(area[case.void].sum())
            area = np.where(case.void, 0, area)
        table, area = case.table[area > 0], area[area > 0]  # [U, M], [U]
        self._add_classes(table, area)
        empty = np.asarray(~np.isin(table, self.evaluated).any(0))
        # Of very many readers some are compared, evenly spread: pairs are as many as their square.
        some = np.unique(np.linspace(0, len(case.readers) - 1, _COMPARED).astype(int))
        compared = [case.readers[m] for m in some]
        agree, marked = pairwise_iou(table[:, some], area, self.evaluated)
        self._add_readers(case.readers, empty)
        self._add_pairs(compared, table[:, some], marked)
        upper = np.triu_indices(len(some), 1)
        if np.isfinite(marked[upper]).any():
            self.marked_ious.append(float(np.nanmean(marked[upper])))
        self.weighted += case.weights is not None
        differing = float(area[(table != table[:, :1]).any(1)].sum() / max(area.sum(), 1))
        iou, apart = _mean(agree[upper]), _reader_apart(marked, empty[some], compared)
        about = case.name, case.patient, split, case.size, case.readers
        self.cases.append(CaseSummary(*about, int(empty.sum()), iou, differing, apart))

    def _add_image(self, case: Case) -> None:
        image = case.image
        self.sizes[case.size] += 1
        self.types[len(image), str(image.dtype)] += 1
        low, high = float(image.min()), float(image.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if low == high:
            self.blank.append(len(self.cases))
        else:
            self.by_digest[case.image_digest].append(len(self.cases))
        step = max(1, image.size * max(self.expected, 1) // _SAMPLE)
        self._values.append(image.reshape(-1)[::step].copy())

    def _add_classes(self, table: np.ndarray, area: np.ndarray) -> None:
        pixels, masks = np.zeros(len(self.classes)), np.zeros(len(self.classes), int)
        for ids in table.T:
            found = np.bincount(ids.astype(np.intp), area, len(self.classes))
            pixels += found
            masks += found > 0
        for c in np.flatnonzero(masks):
            counts = self.by_class[c]
            counts.pixels += int(pixels[c])
            counts.masks += int(masks[c])
            counts.images += 1

    def _add_readers(self, readers: Sequence[str], empty: np.ndarray) -> None:
        for reader, nothing in zip(readers, empty.tolist(), strict=True):
            self.by_reader[reader].images += 1
            self.by_reader[reader].empty += nothing

    def _add_pairs(self, readers: Sequence[str], table: np.ndarray, marked: np.ndarray) -> None:
        for i, reader in enumerate(readers):
            others = np.delete(marked[i], i)
            self.by_reader[reader].ious += others[np.isfinite(others)].tolist()
        for i, j in combinations(range(len(readers)), 2):
            self.together[readers[i], readers[j]] += 1
            self.identical[readers[i], readers[j]] += int((table[:, i] == table[:, j]).all())

    @property
    def patients(self) -> int:
        return len({case.patient for case in self.cases})

    @property
    def splits(self) -> Counter[str]:
        """Cases per declared split."""
        return Counter(case.split for case in self.cases if case.split)

    @property
    def masks(self) -> int:
        return sum(len(case.readers) for case in self.cases)

    @property
    def empty(self) -> float:
        """Share of masks without a pixel of any evaluated class."""
        return sum(case.empty for case in self.cases) / max(self.masks, 1)

    @property
    def readers_per_image(self) -> dict[int, int]:
        """Number of readers -> images."""
        return dict(sorted(Counter(len(case.readers) for case in self.cases).items()))

    @property
    def shared(self) -> list[CaseSummary]:
        """Cases with two readers or more."""
        return [case for case in self.cases if len(case.readers) > 1]

    @property
    def iou(self) -> float:
        """Mean over shared cases of the mean IoU of their pairs of readers; a class that neither marked counts as 1."""
        return _mean(case.iou for case in self.shared)

    @property
    def iou_where_marked(self) -> float:
        """The same over pairs of which at least one reader marked something."""
        return _mean(self.marked_ious)

    @property
    def ambiguous(self) -> float:
        """Share of the shared cases on which readers differ anywhere."""
        return _mean(case.differing > 0 for case in self.shared)

    @property
    def differing(self) -> float:
        """Mean over shared cases of the share of pixels that not all readers label alike."""
        return _mean(case.differing for case in self.shared)

    def class_shares(self) -> list[float]:
        """Share of each class in the pixels of all masks."""
        total = max(sum(counts.pixels for counts in self.by_class), 1)
        return [counts.pixels / total for counts in self.by_class]

    def percentiles(self) -> list[float]:
        """The 0.5th, 50th and 99.5th of pixel values, from a regular sample of every image."""
        return np.percentile(np.concatenate(self._values), (0.5, 50, 99.5)).tolist()

    def as_dict(self) -> dict[str, object]:
        """All numbers, for JSON; those that do not exist are nan."""
        shares = self.class_shares()
        return {
            "images": len(self.cases),
            "patients": self.patients,
            "splits": self.splits,
            "sizes": [{"size": size, "images": n} for size, n in self.sizes.most_common()],
            "image_types": [{"channels": c, "dtype": d, "images": n} for (c, d), n in self.types.most_common()],
            "values": {"low": self.low, "high": self.high, "percentiles_0.5_50_99.5": self.percentiles()},
            "classes": [
                {"id": c, "name": name, **asdict(counts), "share": shares[c], "evaluated": c in self.evaluated}
                for c, (name, counts) in enumerate(zip(self.classes, self.by_class, strict=True))
            ],
            "void_pixels": self.void,
            "readers": [
                {"name": n, "images": r.images, "empty_share": r.empty / r.images, "mean_iou_with_others": r.mean_iou}
                for n, r in self.by_reader.items()
            ],
            "readers_per_image": self.readers_per_image,
            "masks": self.masks,
            "weighted_images": self.weighted,
            "pairwise_iou": self.iou,
            "pairwise_iou_where_marked": self.iou_where_marked,
            "empty_mask_share": self.empty,
            "ambiguous_image_share": self.ambiguous,
            "differing_pixel_share": self.differing,
            "cases": [asdict(case) for case in self.cases],
        }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("nan")


def pairwise_iou(table: np.ndarray, area: np.ndarray, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """``[M, M]`` twice: IoU averaged over the classes, where a class in neither mask is 1, and where it is left out.

    Equals :func:`ambiseg.overlap.pairwise_iou`, computed from regions ``[U, M]`` and their areas instead of pixels,
    which takes a small part of the time that reading the case takes.
    """
    M = table.shape[1]
    present = np.intersect1d(table, classes)
    total, there = np.zeros((M, M)), np.zeros((M, M), int)
    if len(present) <= _MATRICES:
        for c in present:
            here = (table == c).astype(np.float64)
            both = here.T @ (area[:, None] * here)
            size = np.diag(both)
            union = size[:, None] + size[None, :] - both
            total += np.divide(both, union, out=np.zeros_like(both), where=union > 0)
            there += union > 0
    else:  # of very many classes most pairs share none: by pairs, in the time of their regions
        ranks = np.searchsorted(present, table)
        known = present[np.minimum(ranks, len(present) - 1)] == table
        ranks = np.where(known, ranks, len(present))  # the last is of all that do not count
        sizes = [np.bincount(ids, area, len(present) + 1)[:-1] for ids in ranks.T]
        for i, j in combinations_with_replacement(range(M), 2):
            alike = np.where(ranks[:, i] == ranks[:, j], area, 0)
            both = np.bincount(ranks[:, i], alike, len(present) + 1)[:-1]
            union = sizes[i] + sizes[j] - both
            total[i, j] = total[j, i] = (both[union > 0] / union[union > 0]).sum()
            there[i, j] = there[j, i] = (union > 0).sum()
    marked = np.divide(total, there, out=np.full((M, M), np.nan), where=there > 0)
    return (total + (len(classes) - there)) / len(classes), marked


def _reader_apart(ious: np.ndarray, empty: np.ndarray, readers: Sequence[str]) -> str | None:
    """The one reader whose mask hardly overlaps the others', if there are others and they overlap each other."""
    marked = np.flatnonzero(~empty)
    for m in marked if len(marked) > 2 else ():
        others = marked[marked != m]
        rest = ious[np.ix_(others, others)][np.triu_indices(len(others), 1)]
        if ious[m, others].max() < 0.1 and rest.mean() > 0.5:
            return readers[int(m)]
    return None
