"""The loop over the batches of a part, run by Lightning in one process or several with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import quiet_lightning
from ambiseg.data.loader import Batch
from ambiseg.data.module import DataModule
from ambiseg.evaluation.scoring import ScoredCase
from ambiseg.methods.base import Method, Predictive


class PartData(DataModule):
    """A data set whose part ``part`` is what Lightning tests on."""

    def __init__(self, *args: Any, part: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = part
        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer batches than processes

    def test_dataloader(self) -> Any:
        return self.part_dataloader(self.part)


class ScoringModule(pl.LightningModule):
    """Scores the batches of this process. ``scored`` has them by their number among the batches of all processes.

    ``report`` is called with (done, total) batches of this process; ``threads`` are PyTorch's per process.
    """

    def __init__(
        self,
        model: Method,
        score: Callable[[Predictive, Batch], list[ScoredCase]],
        threads: int,
        report: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self.model, self.score, self.threads, self.report = model, score, threads, report
        self.scored: dict[int, list[ScoredCase]] = {}

    def on_test_start(self) -> None:
        # Lightning divides the cores among its processes, and sums may depend on the number of threads.
        torch.set_num_threads(self.threads)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        number = batch_idx * self.trainer.world_size + self.trainer.global_rank  # as BatchSampler deals batches out
        self.scored[number] = self.score(self.model.predict_whole(batch.images), batch)
        self.report(batch_idx + 1, int(sum(self.trainer.num_test_batches)))


def score_part(scoring: ScoringModule, data: PartData, **devices: Any) -> list[ScoredCase]:
    """Scores of all images in the order of the part; the same in every process."""
    threads = torch.get_num_threads()
    try:
        with quiet_lightning():
            trainer = _trainer(**devices)
            trainer.test(scoring, datamodule=data, verbose=False)
            found = [scoring.scored] * trainer.world_size
            if trainer.world_size > 1:
                # After the loop: a process without a batch does not reach its last hook.
                torch.distributed.all_gather_object(found, scoring.scored)
    finally:
        torch.set_num_threads(threads)
    batches = {number: scored for part in found for number, scored in part.items()}
    return [one for number in sorted(batches) for one in batches[number]]


def _trainer(**devices: Any) -> pl.Trainer:
    options = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    try:
        return pl.Trainer(**devices, logger=False, **dict.fromkeys(options, False))
    except (MisconfigurationException, TypeError, ValueError) as error:
        asked = ", ".join(f"{key} {value}" for key, value in devices.items())
        raise ConfigError(f"expected devices that are there, found {asked}: {' '.join(str(error).split())}") from None
