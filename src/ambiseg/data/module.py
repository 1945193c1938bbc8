"""All data sets as Lightning loads them."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from ambiseg.data.case import Cases
from ambiseg.data.config import TEMPORARY, DataConfig, cached, open_cases, open_split
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Loader, Tickets, Window
from ambiseg.data.splits import Split, check_leakage, subset
from ambiseg.data.store import Progress


class DataModule(LightningDataModule):
    """Loaders for the parts of a data set: ``train``, ``val``, ``test``.

    Every batch is a function of the configuration, the epoch, the process and its number alone: neither workers nor
    interruptions change what is trained on. In a run of several processes each takes its share by itself.

    Args:
        config: see :class:`~ambiseg.data.config.DataConfig`.
        cases: a data set of your own, instead of the one that the configuration names.
        split: a split at hand, instead of the one that the configuration names.
        progress: called with (done, total) while cases are decoded.

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
    ) -> None:
        super().__init__()
        self.config = config
        self._source, self._split, self._progress = cases, split, progress
        self._cases: Cases | None = None

    # -- Lightning calls these -------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Decode into the cache, in one process of each machine; the others find it there."""
        if self.config.cache not in (None, TEMPORARY):
            cached(self.source, self.config.cache, self._progress)

    def setup(self, stage: str | None = None) -> None:
        """Open the data, split them, and make sure that nothing leaks."""
        if self._cases is not None:
            return
        cases = cached(self.source, self.config.cache, self._progress)
        split = open_split(cases, self.config) if self._split is None else self._split
        check_leakage(cases, split)
        self._cases, self._split = cases, split

    def train_dataloader(self) -> DataLoader:
        """Shuffled, augmented windows of the training part."""
        return self._loader("train", training=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part, in order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """The test part, in order."""
        return self._loader("test")

    # -- more ------------------------------------------------------------------------------------------------

    @property
    def source(self) -> Cases:
        """The data set as it was given, not decoded yet."""
        if self._source is None:
            self._source = open_cases(self.config)
        return self._source

    @property
    def cases(self) -> Cases:
        """The data set that batches come from."""
        if self._cases is None:
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
        """How raw values become input: the configuration's, or what the data set recommends."""
        return self.source.intensity if self.config.intensity is None else self.config.intensity

    def indices(self, part: str) -> list[int]:
        """Numbers of the cases of a part; of ``train`` only the fraction that is trained on."""
        indices = self.split.indices(self.cases, part)
        if part == "train" and self.config.fraction != 1:
            indices = subset(self.cases, indices, self.config.fraction, self.config.split_seed)
        return indices

    def part_dataloader(self, part: str, whole: bool = False) -> DataLoader:
        """Any part in order and without augmentation; ``whole`` keeps every process from taking only its share."""
        return self._loader(part, alone=whole)

    def _loader(self, part: str, training: bool = False, alone: bool = False) -> DataLoader:
        config = self.config
        rank, processes = self._place() if not alone else (0, 1)
        tickets = Tickets(
            self.indices(part),
            config.batch_size if training else config.eval_batch_size,
            shuffle=training,
            seed=config.seed,
            rank=rank,
            processes=processes,
        )
        loader = Loader(
            self.cases,
            self.intensity,
            Window(_pair(config.size if training else config.eval_size), config.outside),
            config.augment if training else None,
            config.annotations if training else "all",
            seed=config.seed,
        )
        workers = min(config.workers, len(tickets))
        return DataLoader(
            loader,
            batch_size=None,  # a ticket is a batch already
            sampler=tickets,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._on_gpu(),
        )

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def _on_gpu(self) -> bool:
        trainer = self.trainer
        return trainer is not None and trainer.strategy.root_device.type == "cuda"


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else None if size is None else (size[0], size[1])
