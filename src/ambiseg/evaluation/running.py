"""A trained model's evaluation as Lightning runs it: one process or many, which find the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import quiet_lightning
from ambiseg.data.loader import Batch
from ambiseg.data.module import DataModule
from ambiseg.evaluation.scoring import Rules, Scored, score_batch, settings_of
from ambiseg.methods.base import Method


class Part(DataModule):
    """A data set of which one part is tested on, whatever its name."""

    def __init__(self, *args: Any, part: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = part
        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer batches than processes is no mistake

    def test_dataloader(self) -> Any:
        return self.part_dataloader(self.part)


class Scoring(pl.LightningModule):
    """Scores the batches of this process, and keeps them by their number among those of all processes."""

    def __init__(
        self,
        model: Method,
        rules: Rules,
        forms: Sequence[str],
        samples: Sequence[int],
        seed: int,
        threads: int,
        report: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self.model, self.rules, self.forms, self.samples, self.seed = model, rules, forms, samples, seed
        self.threads, self.report = threads, report
        self.scored: dict[int, list[Scored]] = {}
        self.settings: list[tuple[str, int]] = []

    def on_test_start(self) -> None:
        # Lightning divides the cores among the processes it starts, and sums may depend on the number of threads.
        torch.set_num_threads(self.threads)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        predictive = self.model.predict(batch.images)
        self.settings = settings_of(predictive, self.forms, self.samples)
        number = batch_idx * self.trainer.world_size + self.trainer.global_rank  # as BatchSampler deals batches out
        self.scored[number] = score_batch(predictive, batch, self.rules, self.forms, self.samples, self.seed)
        self.report(batch_idx + 1, int(sum(self.trainer.num_test_batches)))


def score(scoring: Scoring, data: DataModule, **devices: Any) -> tuple[list[Scored], list[tuple[str, int]]]:
    """Scores of all images in the order of the part, and the settings they are of; the same in every process."""
    threads = torch.get_num_threads()
    try:
        with quiet_lightning():
            trainer = _trainer(devices)
            trainer.test(scoring, datamodule=data, verbose=False)
            found = [(scoring.scored, scoring.settings)]
            if trainer.world_size > 1:
                found = [found[0]] * trainer.world_size
                # After the loop, not in its last hook, which a process without a batch does not reach.
                torch.distributed.all_gather_object(found, (scoring.scored, scoring.settings))
    finally:
        torch.set_num_threads(threads)
    batches = {number: scored for part, _ in found for number, scored in part.items()}
    settings = next(settings for _, settings in found if settings)
    return [one for number in sorted(batches) for one in batches[number]], settings


def _trainer(devices: dict[str, Any]) -> pl.Trainer:
    try:
        return pl.Trainer(
            **devices,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        asked = ", ".join(f"{key} {value}" for key, value in devices.items())
        raise ConfigError(f"expected devices that are there, found {asked}: {' '.join(str(error).split())}") from None
