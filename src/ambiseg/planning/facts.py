"""Gathering the facts that a plan, and the warnings of a training, rest on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ambiseg._util.bands import counted, looked_up
from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, Progress
from ambiseg.data.check.statistics import pairwise_iou
from ambiseg.data.intensity import LARGEST, Intensity
from ambiseg.data.splits import Split
from ambiseg.methods.facts import Facts

LOOKED_AT = 200  # images whose pixels are looked at; of all others the tables of labels are enough
_SAMPLE = 1 << 14  # pixels of an image that are kept for percentiles
_ALIKE = 0.75  # IoU from which two masks are one way of reading an image
_GRID = 16  # cells of an image, down and across, in which its direction is looked for


def gather(
    cases: Cases,
    split: Split,
    train: Sequence[int],
    *,
    pixels: int = LOOKED_AT,
    most: int | None = None,
    progress: Progress | None = None,
) -> Facts:
    """The facts of a training part, and how large the validation part is. No image of the test part is looked at.

    Args:
        train: numbers of the training cases.
        pixels: images whose pixels are looked at; with 0, facts that need them have neutral values.
        most: cases that are read at all, for data that are decoded on reading; ``None``: all.
    """
    val = split.indices(cases, "val") if "val" in split.parts else []
    chosen = train if most is None else train[:: max(1, -(-len(train) // most))]
    step = max(1, -(-len(chosen) // max(pixels, 1)))
    found = _Gathered(cases.evaluated, len(cases.classes), cases.channels)
    for done, index in enumerate(chosen):
        found.add(cases[index], pixels=bool(pixels) and done % step == 0)
        if progress is not None:
            progress(done + 1, len(chosen))
    sizes = np.array(found.sizes)
    low, high, mean, std = found.intensities()
    own = np.concatenate(found.own, 1) if found.own else np.zeros((cases.channels, 1))
    return Facts(
        images=len(train),
        patients=len({cases.patients[i] for i in train}),
        val_images=len(val),
        val_patients=len({cases.patients[i] for i in val}),
        smallest=_pair(sizes.min(0)),
        median=_pair(np.sort(sizes, 0)[len(sizes) // 2]),
        largest=_pair(sizes.max(0)),
        channels=cases.channels,
        dtype=found.dtype,
        low=low,
        high=high,
        mean=mean,
        std=std,
        own_mean=tuple(own.mean(1).tolist()),
        own_std=_positive(own.std(1)),
        recommended=cases.intensity != Intensity.for_dtype(np.dtype(found.dtype)),
        gain=_ratio(found.spreads),
        upright=_common(found.turned),
        classes=tuple(cases.classes),
        evaluated=tuple(cases.evaluated),
        shares=tuple((found.area / max(found.area.sum(), 1)).tolist()),
        fewest=min(found.readers),
        readers=max(found.readers),
        identical=max(found.readers) > 1 and found.identical,
        iou=float(np.mean(found.ious)) if found.ious else 1.0,
        modes=int(np.ceil(np.percentile(found.modes or [1], 75))),
        marked=float(np.mean(found.marked or [0.0])),
        thickness=2 * found.marked_area / max(found.perimeter, 1.0),
        empty=found.empty / max(sum(found.readers), 1),
    )


class _Gathered:
    """Sums over the images of the training part."""

    def __init__(self, evaluated: Sequence[int], classes: int, channels: int) -> None:
        self.evaluated, self.channels = list(evaluated), channels
        self.sizes: list[tuple[int, int]] = []
        self.readers: list[int] = []
        self.modes: list[int] = []
        self.ious: list[float] = []
        self.marked: list[float] = []
        self.spreads: list[float] = []
        self.turned: list[np.ndarray] = []  # images minus their upside-down copies
        self.values: list[np.ndarray] = []  # [C, n] of each image
        self.own: list[np.ndarray] = []  # the same in the image's own range
        self.area = np.zeros(classes)
        self.identical, self.empty = True, 0
        self.marked_area, self.perimeter = 0.0, 0.0
        self.dtype = "float32"

    def add(self, case: Case, pixels: bool) -> None:
        self.sizes.append(case.size)
        self.readers.append(case.table.shape[1])
        kept = np.ones(len(case.table), bool) if case.void is None else ~case.void
        self.identical = self.identical and bool((case.table[kept] == case.table[kept][:, :1]).all())
        said = np.isin(case.table, self.evaluated) & kept[:, None]  # [U, M]
        self.empty += int((~said.any(0)).sum())
        if not pixels:  # a class that is only here is seen all the same
            self.area[np.unique(case.table[kept])] += 1
            return
        size = counted(case.regions, len(case.table)) * kept
        for m in range(case.table.shape[1]):
            self.area += np.bincount(case.table[:, m], size, minlength=len(self.area))
        overlap, _ = pairwise_iou(case.table, size.astype(float), self.evaluated)
        self.modes.append(_groups(overlap))
        if len(overlap) > 1:
            self.ious.append(float(overlap[np.triu_indices(len(overlap), 1)].mean()))
        self._add_shape(looked_up(np.asarray(said.any(1)), case.regions))
        self._add_image(case.image)

    def _add_shape(self, marked: np.ndarray) -> None:
        self.marked.append(float(marked.mean()))
        self.marked_area += float(marked.sum())
        edges = (marked[1:] != marked[:-1]).sum() + (marked[:, 1:] != marked[:, :-1]).sum()
        self.perimeter += float(edges) * np.pi / 4  # a slanted line has more edges than it is long

    def _add_image(self, image: np.ndarray) -> None:
        if not np.isfinite(image).all():
            raise DataError("expected finite pixels in the training part, found nan or infinity")
        if (most := float(np.abs(image).max(initial=0))) > LARGEST:
            raise DataError(f"expected pixels of at most {LARGEST:g} in the training part, found {most:g}")
        self.dtype = str(image.dtype)
        flat = image.reshape(len(image), -1)
        every = max(1, flat.shape[1] // _SAMPLE)
        some, ranges = flat[:, ::every].copy(), Intensity.ranges(torch.tensor(image[None]))
        self.own.append(Intensity(per_image=True)(torch.from_numpy(some)[None], ranges)[0].numpy())
        self.values.append(flat := some.astype(np.float64))
        self.spreads.append(float(np.subtract(*np.percentile(flat, (99.5, 0.5)))))
        rows, columns = (np.array_split(np.arange(n), min(_GRID, n)) for n in image.shape[1:])
        coarse = np.array([[image[:, r[0] : r[-1] + 1, c[0] : c[-1] + 1].mean() for c in columns] for r in rows])
        coarse = (coarse - coarse.mean()) / (coarse.std() or 1.0)
        difference = coarse - coarse[::-1]
        if difference.shape == (_GRID, _GRID):
            self.turned.append(difference)

    def intensities(self) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
        values = np.concatenate(self.values, 1) if self.values else np.zeros((self.channels, 1))
        low, high = (float(x) for x in np.percentile(values, (0.5, 99.5)))
        if self.dtype != "uint8" and low < high:
            values = values.clip(low, high)
        return low, high, tuple(values.mean(1).tolist()), _positive(values.std(1))


def _positive(std: np.ndarray) -> tuple[float, ...]:
    return tuple(np.where(std > 0, std, 1.0).tolist())


def _groups(overlap: np.ndarray) -> int:
    """How many masks ``[M, M]`` remain when those that are like an earlier one are left out."""
    leaders: list[int] = []
    for m in range(len(overlap)):
        if not any(overlap[m, leader] >= _ALIKE for leader in leaders):
            leaders.append(m)
    return len(leaders)


def _ratio(spreads: Sequence[float]) -> float:
    positive = [spread for spread in spreads if spread > 0]
    if len(positive) < 3:
        return 1.0
    low, high = np.percentile(positive, (10, 90))
    return float(high / low)


def _common(differences: Sequence[np.ndarray]) -> float:
    """‖mean‖² over mean ‖·‖², less what the mean of so few would have by chance."""
    if len(differences) < 5:
        return 0.0
    stacked = np.stack(differences)
    total = float((stacked**2).mean())
    share = float((stacked.mean(0) ** 2).mean()) / total if total else 0.0
    n = len(stacked)
    return max(0.0, (share - 1 / n) / (1 - 1 / n))


def _pair(numbers: np.ndarray) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[1])
