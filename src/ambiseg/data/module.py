"""Batches of a data set, as Lightning asks for them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from ambiseg._util.errors import DataError
from ambiseg.data.cache import open_cached
from ambiseg.data.case import Case, Cases, Progress
from ambiseg.data.config import DataConfig, Size, open_cases, open_split
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Batch, BatchSampler, BatchSpec, Loader, Window
from ambiseg.data.splits import Split, check_leakage, subset
from ambiseg.data.store import Store
from ambiseg.data.values import Values, some_of, thinned


class DataModule(LightningDataModule):
    """Loaders for the parts of a data set: ``train``, ``val``, ``test``.

    Every batch is a function of the configuration, the epoch, the process and its number alone: neither the number of
    workers nor interruptions change it. In a run of several processes each takes its share by itself.

    Args:
        config: see :class:`~ambiseg.data.config.DataConfig`.
        cases: a data set of your own, instead of the one that the configuration names.
        split: a split to use instead of the one that the configuration names. It is checked for leakage, and not
            compared with the data: see :meth:`Split.verify`.
        progress: called with (done, total) while cases are decoded.
        decode: False for a caller that needs few cases, such as a report: without a cached store, cases are read when
            they are asked for, nothing is cached, and images are not compared between the parts.

    >>> module = DataModule(DataConfig(name="shapes", options={"count": 40, "size": 32}, batch_size=8))
    >>> module.setup()
    >>> batch = next(iter(module.train_dataloader()))
    >>> batch.images.shape[1:], batch.annotations.spatial
    (torch.Size([1, 32, 32]), torch.Size([32, 32]))
    """

    def __init__(
        self,
        config: DataConfig,
        cases: Cases | None = None,
        split: Split | None = None,
        progress: Progress | None = None,
        decode: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self._source, self._split, self._progress, self._decode = cases, split, progress, decode
        self._cases: Cases | None = None
        self._ready = False
        self._sizes: dict[int, tuple[int, int]] = {}

    def prepare_data(self) -> None:
        """Decode into the cache, in one process of each machine; the others find it there."""
        self._open()

    def setup(self, stage: str | None = None) -> None:
        """Open the data, split them, and check the split for leakage."""
        if not self._ready:
            cases = self._open()
            split = open_split(cases, self.config) if self._split is None else self._split
            check_leakage(cases, split, content=self._decode or isinstance(cases, Store))
            self._split, self._ready = split, True

    def _open(self) -> Cases:
        if self._cases is None:
            cases = open_cached(self.source, self.config.cache, self._progress, decode=self._decode)
            self._cases = cases if self._decode or isinstance(cases, Store) else cast(Cases, _ReadOnce(cases))
        return self._cases

    def train_dataloader(self) -> DataLoader:
        """Shuffled, augmented windows of the training part."""
        return self._loader("train", training=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part, in order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """The test part, in order."""
        return self._loader("test")

    @property
    def source(self) -> Cases:
        """The data set as it was given or named, not decoded."""
        if self._source is None:
            self._source = open_cases(self.config)
        return self._source

    @property
    def cases(self) -> Cases:
        """The data set that batches come from."""
        if self._cases is None or not self._ready:
            raise RuntimeError("DataModule: call setup() first")
        return self._cases

    @property
    def split(self) -> Split:
        """Which case is in which part."""
        if self._split is None:
            raise RuntimeError("DataModule: call setup() first")
        return self._split

    @property
    def intensity(self) -> Intensity:
        """How raw values become the network's input: the configuration's, or what the data set recommends."""
        cases, given = self._open(), self.config.intensity
        for key in ("mean", "std") if given is not None else ():
            values = getattr(given, key)
            if isinstance(values, tuple) and len(values) != cases.channels:
                expected = f"one number or {cases.channels}, one per channel"
                raise DataError(f"data.intensity.{key}: expected {expected}, found {len(values)}")
        return cases.intensity if given is None else given

    def indices(self, part: str) -> list[int]:
        """Numbers of the cases of a part; of ``train`` only the fraction that is trained on."""
        indices = self.split.indices(self.cases, part)
        if part == "train" and self.config.fraction != 1:
            indices = subset(self.cases, indices, self.config.fraction, self.config.split_seed)
        return indices

    @property
    def eval_window(self) -> Window:
        """What of an image validation and test look at."""
        return self._window(self.config.eval_size)

    def scored_sizes(self, part: str) -> list[tuple[int, int]]:
        """Height and width of what validation and test look at, of each case of a part."""
        size = self.eval_window.size
        return self.sizes(part) if size is None else [size] * len(self.indices(part))

    def sizes(self, part: str) -> list[tuple[int, int]]:
        """Height and width of each case of a part."""
        indices = self.indices(part)
        self._sizes |= {i: self.cases.size_of(i) for i in indices if i not in self._sizes}
        return [self._sizes[i] for i in indices]

    def _window(self, size: Size) -> Window:
        return Window((size, size) if isinstance(size, int) else size, self.config.outside, self.config.focus)

    def trained_on(self) -> tuple[Values | None, tuple[int, int] | None]:
        """Distribution of the raw values of the training images; height and width of the largest image that is trained
        or validated on. Both of at most 512 images of a part, evenly spaced."""
        cases, channels = self.cases, self.cases.channels - (self.cases.extra.classes if self.cases.extra else 0)
        sizes: list[tuple[int, int]] = []
        images: list[np.ndarray] = []
        for part, window in (("train", self.config.size), ("val", self.config.eval_size)):
            side = (window, window) if isinstance(window, int) else window
            for i in some_of(self.indices(part) if part in self.split.parts else []):
                image = cases[i].image[:channels]
                images += [thinned(image)] if part == "train" else []
                sizes.append(side or image.shape[1:])
        largest = max(sizes, key=lambda size: size[0] * size[1], default=None)
        return Values.of(images) if images else None, largest

    def part_dataloader(self, part: str) -> DataLoader:
        """Any part in order and without augmentation."""
        return self._loader(part)

    def batch_of(self, *indices: int) -> Batch:
        """One case alone, or several of one size, as validation and test see them."""
        return self._batches()[BatchSpec(indices, 0)]

    def _batches(self, training: bool = False) -> Loader:
        config = self.config
        return Loader(
            self.cases,
            self.intensity,
            self._window(config.size) if training else self.eval_window,
            config.augment if training else None,
            config.annotations if training else None,
            seed=config.seed,
        )

    def _loader(self, part: str, training: bool = False) -> DataLoader:
        config, trainer = self.config, self.trainer
        rank, processes = self._place()
        sampler = BatchSampler(
            self.indices(part),
            config.batch_size if training else config.eval_batch_size,
            shuffle=training,
            seed=config.seed,
            rank=rank,
            processes=processes,
            windows=config.windows if training else 1,
            sizes=None if training else self.scored_sizes(part),
        )
        workers = min(config.workers, len(sampler))
        return DataLoader(
            self._batches(training),
            batch_size=None,  # the sampler says what is in a batch
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
        )

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """While a GPU computes: Lightning would wait for everything that is not a plain tensor."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)


class _ReadOnce:
    """A data set whose cases are kept when they were read: a report verifies a few and then draws them."""

    def __init__(self, cases: Cases) -> None:
        self._cases, self._read = cases, dict[int, Case]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by pickle, before there are cases
            raise AttributeError(name)
        return getattr(self._cases, name)

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Case:
        if index not in self._read:
            self._read[index] = self._cases[index]
        return self._read[index]

    def size_of(self, index: int) -> tuple[int, int]:
        return self[index].size

    def digest(self, index: int) -> str:
        return self._cases.digest(index, self[index])
