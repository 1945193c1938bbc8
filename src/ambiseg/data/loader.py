"""From cases to batches: windows, padding of unequal sizes and reader counts, batches that can be repeated exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ambiseg._util.bands import bands, counted, looked_up
from ambiseg._util.errors import DataError
from ambiseg.data.augment import Augment
from ambiseg.data.case import Case, Cases
from ambiseg.data.intensity import Intensity
from ambiseg.nn.windows import WHOLE
from ambiseg.regions import RegionMasks, Regions

_LARGE = 1 << 24  # pixels of an image from which on the numbers of its regions take 32 bits instead of 64
Outside = Literal["reflect", "void"]
_MOST = 10**8  # windows of an epoch, whose order is kept in memory
AnnotationPolicy = Literal["all", "random", "once"] | Annotated[int, Field(ge=0, lt=1 << 16)] | None
"""Annotations of a training image: all; one drawn for each batch; one drawn once for the whole training; the one of
this number. ``None`` is all."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Images ``[B, C, H, W]`` (float32) ready for the network, with M annotations, a name and a patient each.

    ``annotations.regions`` are as :func:`ambiseg.regions.partition` would make them, up to order. Absent readers have
    weight 0.
    """

    images: Tensor
    annotations: RegionMasks
    names: tuple[str, ...]
    patients: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in memory that a GPU can fetch by itself."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        masks, regions = self.annotations, self.annotations.regions
        assert regions is not None
        regions = Regions(move(regions.index), move(regions.labels), move(regions.size))
        weights, valid = (None if x is None else move(x) for x in (masks.weights, masks.valid))
        masks = RegionMasks.of(regions, masks.spatial, weights, valid, masks.dtype)
        return replace(self, images=move(self.images), annotations=masks)


@dataclass(frozen=True)
class BatchSpec:
    """The numbers of the cases of a batch, and the seed of everything that is random in it."""

    indices: tuple[int, ...]
    seed: int


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on ``parts`` alone: the same on every machine and in every process.

    >>> seed_of(0, "epoch", 3) == seed_of(0, "epoch", 3), seed_of(0, "epoch", 3) == seed_of(0, "epoch", 4)
    (True, False)
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class BatchSampler(DistributedSampler):
    """The batches of one epoch for one process: a function of (seed, epoch, process) alone.

    Training batches differ in size by at most one, so none is too small for batch statistics, and every case is seen
    ``windows`` times per epoch (with P processes up to P - 1 of them once more, because all must take the same number
    of steps): all cases in one order, then all in another, so that a batch holds a case twice only when it must.
    Evaluation keeps the order and hands out whole batches: any number of processes makes the same batches with the same
    seeds, so that their results are equal to the bit. With ``sizes``, height and width of each case, its batches are of
    images of one size, so that nothing is padded and a network sees each as if it were alone; and of at most as many
    pixels as a single image may have, so that their memory is bounded.
    """

    def __init__(
        self,
        indices: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        processes: int = 1,
        windows: int = 1,
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if batch_size < 1 or windows < 1:
            found = f"{batch_size} and {windows}"
            raise ValueError(f"expected a batch size and windows per case of at least 1, found {found}")
        if not indices:
            raise DataError("expected at least one case to load, found none")
        if shuffle and windows * len(indices) > _MOST:
            found = f"{windows:,} of each of {len(indices):,} cases"
            raise DataError(f"data.windows: expected at most {_MOST:,} windows in an epoch, found {found}")
        # DistributedSampler's own fields, so that Lightning recognises it, leaves it in place and calls set_epoch.
        super().__init__(indices, num_replicas=processes, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.indices = list(indices)
        self.batch_size, self.windows = batch_size, windows
        self._batches = [] if shuffle else _batches(sizes or [(1, 1)] * len(self.indices), batch_size)

    def __len__(self) -> int:
        if self.shuffle:
            return steps_per_epoch(len(self.indices), self.batch_size, self.windows, self.num_replicas)
        return len(range(self.rank, len(self._batches), self.num_replicas))

    def __iter__(self) -> Iterator[BatchSpec]:  # type: ignore[override]
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", self.epoch))
            rounds = [torch.randperm(len(self.indices), generator=generator).numpy() for _ in range(self.windows)]
            order = np.concatenate(rounds)
            order = np.concatenate([order, np.resize(order, -len(order) % self.num_replicas)])
            batches = np.array_split(order[self.rank :: self.num_replicas], len(self))
        else:
            batches = self._batches[self.rank :: self.num_replicas]
        for step, batch in enumerate(batches):
            seed = seed_of(self.seed, "batch", self.epoch, step * self.num_replicas + self.rank)
            yield BatchSpec(tuple(self.indices[i] for i in batch), seed)


def _batches(sizes: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
    """Places of images of one size, in their order: at most ``most`` and, unless it is one, :data:`WHOLE` pixels.

    >>> _batches([(8, 8), (8, 9), (8, 8), (8, 8)], 2), _batches([(512, 1024)] * 5, 32)
    ([[0, 2], [1], [3]], [[0, 1], [2, 3], [4]])
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for place, size in enumerate(sizes):
        alike.setdefault(size, []).append(place)
    found = []
    for (height, width), places in alike.items():
        step = min(most, max(1, WHOLE // (height * width)))
        found += [places[start : start + step] for start in range(0, len(places), step)]
    return sorted(found)


def steps_per_epoch(cases: int, batch_size: int, windows: int = 1, processes: int = 1) -> int:
    """Training batches of one process in an epoch.

    >>> steps_per_epoch(28, batch_size=8), steps_per_epoch(28, batch_size=8, windows=6)
    (4, 21)
    """
    return -(-cases * windows // (batch_size * processes))


@dataclass(frozen=True)
class Window:
    """Which part of an image goes into a batch: ``size`` pixels somewhere (training) or in the middle, or everything.

    Args:
        size: height and width; ``None`` takes whole images, and pads a batch of unequal ones with void.
        outside: what lies beyond the border of an image that is too small: its mirror image, or void pixels.
        focus: share of the training windows that hold a pixel which some reader marked, in their middle half: one of a
            class drawn from those that are marked in the image. The others are anywhere.
    """

    size: tuple[int, int] | None = None
    outside: Outside = "reflect"
    focus: float = 0.0

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"expected a window of at least 1×1, found {self.size[0]}×{self.size[1]}")
        if self.outside not in ("reflect", "void"):
            raise ValueError(f"expected outside reflect or void, found {self.outside!r}")
        if not 0 <= self.focus <= 1:
            raise ValueError(f"expected focus from 0 to 1, found {self.focus}")


class Loader(Dataset):
    """``loader[spec] -> Batch``: reads, crops, prepares and augments a whole batch at once, in any process.

    Without ``augment``, windows are in the middle. ``annotations`` says which annotations to keep, see
    :data:`AnnotationPolicy`; ``seed`` is of those that are drawn once.
    """

    def __init__(
        self,
        cases: Cases,
        intensity: Intensity,
        window: Window = Window(),
        augment: Augment | None = None,
        annotations: AnnotationPolicy = None,
        seed: int = 0,
    ) -> None:
        if augment is not None and window.size is None and augment.warps:
            raise ValueError("augment: rotation and scale need a window size")
        if isinstance(annotations, str) and annotations not in ("all", "random", "once"):
            raise ValueError(f"expected annotations all, random, once or a number, found {annotations!r}")
        self.cases, self.intensity, self.window, self.augment = cases, intensity, window, augment
        self.annotations, self.seed = annotations, seed

    def __getitem__(self, spec: BatchSpec) -> Batch:
        generator = torch.Generator().manual_seed(spec.seed)
        cases = [self._choose(self.cases[i], spec.seed) for i in spec.indices]
        for case in cases:
            if len(case.image) != self.cases.channels:
                raise DataError(f"{case.name}: expected {self.cases.channels} channels, found {len(case.image)}")
        size, outside = self.window.size, self.window.outside
        if size is None:
            source, outside = (max(c.size[0] for c in cases), max(c.size[1] for c in cases)), "void"
            corners = [(0, 0)] * len(cases)
        else:
            source = size if self.augment is None else self.augment.source(size)
            corners = [self._corner(case, size, source, generator) for case in cases]
        cuts = [_cut(case, corner, source, outside) for case, corner in zip(cases, corners, strict=True)]
        images, regions = zip(*cuts, strict=True)
        ranges = None
        if self.intensity.per_image:  # of the whole images
            ranges = torch.cat([self.intensity.ranges(torch.tensor(case.image[None])) for case in cases])
        pixels = self.intensity(torch.from_numpy(np.stack(images)), ranges)
        codes = torch.from_numpy(np.stack(regions))
        if self.augment is not None:
            pixels, codes = self.augment(pixels, codes, generator, size)
        return _assemble(cases, pixels.contiguous(), codes)

    def _choose(self, case: Case, seed: int) -> Case:
        """The case with the annotations that this loader is asked for."""
        if self.annotations in (None, "all"):
            return case
        M = case.table.shape[1]
        if isinstance(self.annotations, int):
            m = self.annotations
            if not 0 <= m < M:
                raise DataError(f"{case.name}: expected an annotation number {m}, found {M} (from 0)")
        else:
            u = seed_of(self.seed if self.annotations == "once" else seed, "annotation", case.name) / 2**63
            m = min(int(np.searchsorted(np.cumsum(case.mass), u, side="right")), M - 1)
        return replace(case, table=case.table[:, [m]], readers=(case.readers[m],), weights=None)

    def _corner(
        self, case: Case, size: tuple[int, int], source: tuple[int, int], generator: torch.Generator
    ) -> tuple[int, int]:
        """Where the source window starts, so that the window proper lies in the image wherever it can."""
        corner, mark = [], None
        if self.augment is not None and self.window.focus and (case.size[0] > size[0] or case.size[1] > size[1]):
            mark = self._mark(case, generator)
        for axis, (have, want, around) in enumerate(zip(case.size, size, source, strict=True)):
            free = have - want
            at = free // 2
            if self.augment is not None and free > 0:
                if mark is None:
                    at = int(torch.randint(free + 1, (), generator=generator))
                else:  # the mark is in the middle half of the window, unless the border is near
                    at = mark[axis] - want // 4 - int(torch.randint(max(want // 2, 1), (), generator=generator))
                    at = min(max(at, 0), free)
            corner.append(at - (around - want) // 2)
        return corner[0], corner[1]

    def _mark(self, case: Case, generator: torch.Generator) -> tuple[int, int] | None:
        """A marked pixel, for the share of windows that ``focus`` asks for; ``None`` for the others."""
        chance, which, where = torch.rand(3, generator=generator, dtype=torch.double).tolist()
        if chance >= self.window.focus:
            return None
        rows = case.table if case.void is None else case.table[~case.void]
        marked = np.intersect1d(rows, self.cases.evaluated)
        if not len(marked):
            return None
        said = (case.table == marked[int(which * len(marked))]).any(1)
        inside = looked_up(said if case.void is None else said & ~case.void, case.regions).reshape(-1)
        place = int(where * np.count_nonzero(inside))  # among the marked pixels
        for band in bands(inside.size):
            if place < (here := int(np.count_nonzero(inside[band]))):
                y, x = divmod(band.start + int(np.flatnonzero(inside[band])[place]), case.size[1])
                return y, x
            place -= here
        return None


def middle(case: Case, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """The middle of an image that evaluation looks at, and its map of regions; U is void beyond the border."""
    assert window.size is not None
    top, left = ((have - want) // 2 for have, want in zip(case.size, window.size, strict=True))
    return _cut(case, (top, left), window.size, window.outside)


def _cut(case: Case, corner: tuple[int, int], size: tuple[int, int], outside: Outside) -> tuple[np.ndarray, np.ndarray]:
    """A window of the image and of its regions (int32); beyond the border as ``outside`` says, void as region U."""
    U, (H, W) = len(case.table), case.size
    top, left = corner
    bottom, right = top + size[0], left + size[1]
    if top >= 0 and left >= 0 and bottom <= H and right <= W:
        return case.image[:, top:bottom, left:right], case.regions[top:bottom, left:right].astype(np.int32)
    y, x = _mirrored(top, bottom, H)[:, None], _mirrored(left, right, W)
    regions = case.regions[y, x].astype(np.int32)
    if outside == "void":
        inside = np.zeros(size, bool)
        inside[max(-top, 0) : max(H - top, 0), max(-left, 0) : max(W - left, 0)] = True
        regions[~inside] = U
    return case.image[:, y, x], regions


def _mirrored(start: int, stop: int, length: int) -> np.ndarray:
    """Positions ``start`` … ``stop`` - 1 folded back into an image, the border pixel shared: … 2 1 0 1 2 …"""
    before, after = max(-start, 0), max(stop - length, 0)
    return np.pad(np.arange(length), (before, after), "reflect")[start + before : stop + before]


def _assemble(cases: Sequence[Case], images: Tensor, codes: Tensor) -> Batch:
    """A batch of prepared images and region maps."""
    return Batch(images, annotations_of(cases, codes), tuple(c.name for c in cases), tuple(c.patient for c in cases))


def annotations_of(cases: Sequence[Case], codes: Tensor) -> RegionMasks:
    """The annotations of cases whose maps of regions are ``codes [B, H, W]``; U is void.

    Tables are padded to the largest; absent readers have weight 0.
    """
    B, (U, M) = len(cases), np.max([case.table.shape for case in cases], 0).tolist()
    widest = max((c.table.dtype for c in cases), key=lambda dtype: dtype.itemsize)
    table = np.zeros((B, U + 1, M), widest)  # one row more, for pixels that lie outside
    weights = np.zeros((B, M), np.float32)
    void = np.ones((B, U + 1), bool)
    for b, case in enumerate(cases):
        rows, columns = case.table.shape
        table[b, :rows, :columns] = case.table
        weights[b, :columns] = case.mass
        void[b, :rows] = False if case.void is None else case.void
    large = codes[0].numel() > _LARGE
    index = codes.flatten(1).to(torch.int32 if large else torch.int64)
    said = torch.from_numpy(table.astype(np.int64 if widest.itemsize > 2 else widest, copy=False))
    hidden = Regions(index, said[:, :0], said[:, :0]).spread(torch.from_numpy(void)[:, None])[:, 0]
    anywhere = bool(hidden.any())
    if anywhere:
        index = torch.where(hidden, U, index)
    size = torch.from_numpy(np.stack([counted(row.numpy(), U + 1) for row in index]))
    regions = Regions(index, said[:, :U].transpose(1, 2).long().contiguous(), size[:, :U].contiguous())
    return RegionMasks.of(
        regions,
        codes.shape[1:],
        weights=None if (weights == weights[:, :1]).all() else torch.from_numpy(weights),
        valid=~hidden.view(codes.shape) if anywhere else None,
        dtype=said.dtype,
    )
