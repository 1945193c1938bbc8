"""Numbers about a data set, gathered case by case: sizes, classes, readers, and how far the readers agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ambiseg.data.case import Case, digest

_SAMPLE = 1 << 20  # pixel values that are kept of the whole data set, for percentiles


@dataclass(frozen=True)
class Summary:
    """One case in numbers.

    Args:
        iou: mean IoU of its pairs of readers, a class that neither of two marked counting as 1; nan for one reader.
        differing: share of its pixels that the readers do not all call the same.
        apart: a reader whose mask has next to nothing in common with those of all others, who agree; or nothing.
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
    """One reader: images, masks without a mark, and the sum and number of IoUs with other readers."""

    images: int = 0
    empty: int = 0
    iou: float = 0.0
    pairs: int = 0

    @property
    def mean_iou(self) -> float:
        """Over all other masks of the same images; pairs where neither reader marked anything are left out."""
        return self.iou / self.pairs if self.pairs else float("nan")


@dataclass
class Survey:
    """What :meth:`add` has seen so far. Takes the memory of the names, whatever the size of the images.

    >>> case = Case.of(np.zeros((1, 1, 4), np.uint8), np.array([[[0, 1, 1, 0]], [[0, 0, 1, 0]]]), name="a")
    >>> survey = Survey(("background", "disc"), (1,), expected=1)
    >>> survey.add(case)
    >>> survey.iou, survey.ambiguous, survey.differing
    (0.5, 1.0, 0.25)
    """

    classes: tuple[str, ...]
    evaluated: tuple[int, ...]
    expected: int  # cases that will be added, for the size of the sample
    cases: list[Summary] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    forms: Counter[tuple[int, str]] = field(default_factory=Counter)  # channels and number type of the images
    low: float = float("inf")
    high: float = float("-inf")
    by_class: list[ClassCount] = field(default_factory=list)
    by_reader: dict[str, ReaderCount] = field(default_factory=dict)
    together: Counter[tuple[str, str]] = field(default_factory=Counter)  # images that two readers share
    identical: Counter[tuple[str, str]] = field(default_factory=Counter)  # … with masks that are the same
    pictures: dict[str, list[int]] = field(default_factory=dict)  # cases by the digest of their image
    blank: list[int] = field(default_factory=list)
    void: int = 0
    drawn: list[float] = field(default_factory=list)
    weighted: int = 0
    _values: list[np.ndarray] = field(default_factory=list)

    def add(self, case: Case, split: str | None = None) -> None:
        """Count one case."""
        if not self.by_class:
            self.by_class = [ClassCount() for _ in self.classes]
        self._add_image(case)
        area = np.bincount(case.regions.reshape(-1), minlength=len(case.table)).astype(np.float64)
        if case.void is not None:
            self.void += int(area[case.void].sum())
            area = np.where(case.void, 0, area)
        marked = np.isin(case.table, self.evaluated) & (area > 0)[:, None]  # [U, M]
        empty = np.asarray(~marked.any(0))
        self._add_classes(case, area)
        agree, drawn = _pair_ious(case.table, area, self.evaluated)
        M = len(case.readers)
        upper = np.triu_indices(M, 1)
        differs = (case.table != case.table[:, :1]).any(1) & (area > 0)
        same = _identical(case.table[area > 0])
        for i, reader in enumerate(case.readers):
            counts = self.by_reader.setdefault(reader, ReaderCount())
            counts.images += 1
            counts.empty += int(empty[i])
            others = np.delete(drawn[i], i)
            counts.iou += float(np.nansum(others))
            counts.pairs += int(np.isfinite(others).sum())
            for j in range(i + 1, M):
                pair = (reader, case.readers[j])
                self.together[pair] += 1
                self.identical[pair] += int(same[i, j])
        if M > 1 and np.isfinite(drawn[upper]).any():
            self.drawn.append(float(np.nanmean(drawn[upper])))
        self.weighted += case.weights is not None
        self.cases.append(
            Summary(
                name=case.name,
                patient=case.patient,
                split=split,
                size=case.size,
                readers=case.readers,
                empty=int(empty.sum()),
                iou=float(agree[upper].mean()) if M > 1 else float("nan"),
                differing=float(area[differs].sum() / max(area.sum(), 1)),
                apart=_apart(drawn, empty, case.readers),
            )
        )

    def _add_image(self, case: Case) -> None:
        image = case.image
        self.sizes[case.size] += 1
        self.forms[len(image), str(image.dtype)] += 1
        low, high = float(image.min()), float(image.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if low == high:
            self.blank.append(len(self.cases))
        else:
            self.pictures.setdefault(digest(image), []).append(len(self.cases))
        step = max(1, image.size * max(self.expected, 1) // _SAMPLE)
        self._values.append(image.reshape(-1)[::step].copy())

    def _add_classes(self, case: Case, area: np.ndarray) -> None:
        for c in np.unique(case.table[area > 0]):
            here = case.table == c
            pixels = area @ here
            self.by_class[c].pixels += int(pixels.sum())
            self.by_class[c].masks += int((pixels > 0).sum())
            self.by_class[c].images += 1

    @property
    def masks(self) -> int:
        return sum(len(case.readers) for case in self.cases)

    @property
    def empty(self) -> float:
        """Share of masks without a pixel of any evaluated class."""
        return sum(case.empty for case in self.cases) / max(self.masks, 1)

    @property
    def readers_per_image(self) -> dict[int, int]:
        return dict(sorted(Counter(len(case.readers) for case in self.cases).items()))

    @property
    def _shared(self) -> list[Summary]:
        return [case for case in self.cases if len(case.readers) > 1]

    @property
    def iou(self) -> float:
        """Mean over images with two readers or more of the mean IoU of their pairs; neither marked counts as 1."""
        return float(np.mean([case.iou for case in self._shared])) if self._shared else float("nan")

    @property
    def iou_drawn(self) -> float:
        """The same over pairs of which at least one reader marked something."""
        return float(np.mean(self.drawn)) if self.drawn else float("nan")

    @property
    def ambiguous(self) -> float:
        """Share of the images with two readers or more on which they differ anywhere."""
        return float(np.mean([case.differing > 0 for case in self._shared])) if self._shared else float("nan")

    @property
    def differing(self) -> float:
        """Mean share of pixels that are not called the same by all readers of an image, of two or more."""
        return float(np.mean([case.differing for case in self._shared])) if self._shared else float("nan")

    def percentiles(self, at: Sequence[float] = (0.5, 50, 99.5)) -> list[float]:
        """Of pixel values, from a regular sample of every image."""
        return np.percentile(np.concatenate(self._values), at).tolist() if self._values else []

    def as_dict(self) -> dict[str, object]:
        """All numbers, for JSON; those that do not exist are nan."""
        pixels = max(sum(c.pixels for c in self.by_class), 1)
        return {
            "images": len(self.cases),
            "patients": len({case.patient for case in self.cases}),
            "splits": dict(Counter(case.split for case in self.cases if case.split)),
            "sizes": [{"size": list(size), "images": n} for size, n in self.sizes.most_common()],
            "image_types": [{"channels": c, "dtype": d, "images": n} for (c, d), n in self.forms.most_common()],
            "values": {"low": self.low, "high": self.high, "percentiles_0.5_50_99.5": self.percentiles()},
            "classes": [
                {
                    "id": c,
                    "name": name,
                    **asdict(counts),
                    "share": counts.pixels / pixels,
                    "evaluated": c in self.evaluated,
                }
                for c, (name, counts) in enumerate(zip(self.classes, self.by_class, strict=True))
            ],
            "void_pixels": self.void,
            "readers": [
                {
                    "name": name,
                    "images": r.images,
                    "empty_share": r.empty / r.images,
                    "mean_iou_with_others": r.mean_iou,
                }
                for name, r in self.by_reader.items()
            ],
            "readers_per_image": {str(k): n for k, n in self.readers_per_image.items()},
            "masks": self.masks,
            "weighted_images": self.weighted,
            "pairwise_iou": self.iou,
            "pairwise_iou_where_marked": self.iou_drawn,
            "empty_mask_share": self.empty,
            "ambiguous_image_share": self.ambiguous,
            "differing_pixel_share": self.differing,
            "cases": [asdict(case) for case in self.cases],
        }


def _pair_ious(table: np.ndarray, area: np.ndarray, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """``[M, M]`` twice: IoU averaged over the classes, where a class in neither mask is 1, and where it is left out.

    The numbers of :func:`ambiseg.overlap.pairwise_iou`, from regions: a region is as many pixels as its area.
    """
    ious = []
    for c in classes:
        here = (table == c).astype(np.float64)
        both = here.T @ (area[:, None] * here)
        size = np.diag(both)
        union = size[:, None] + size[None, :] - both
        ious.append(np.divide(both, union, out=np.full_like(both, np.nan), where=union > 0))
    stacked = np.stack(ious)
    there = np.isfinite(stacked)
    drawn = np.where(there, stacked, 0).sum(0) / np.where(there.any(0), there.sum(0), np.nan)
    return np.where(there, stacked, 1).mean(0), drawn


def _identical(table: np.ndarray) -> np.ndarray:
    """``[M, M]``: which masks are the same."""
    return np.stack([(table == table[:, m : m + 1]).all(0) for m in range(table.shape[1])])


def _apart(drawn: np.ndarray, empty: np.ndarray, readers: Sequence[str]) -> str | None:
    """The one reader whose mask meets none of the others', if there are others and they meet each other."""
    marked = [m for m in range(len(readers)) if not empty[m]]
    if len(marked) < 3:
        return None
    ious = drawn[np.ix_(marked, marked)]
    for i, m in enumerate(marked):
        others = np.delete(np.arange(len(marked)), i)
        rest = ious[np.ix_(others, others)][np.triu_indices(len(others), 1)]
        if ious[i, others].max() < 0.1 and rest.mean() > 0.5:
            return readers[m]
    return None
