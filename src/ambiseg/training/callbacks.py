"""What happens at the end of an epoch: files, and one line of text."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, RichProgressBar

from ambiseg._util.terminal import say
from ambiseg.costs import FILE as COST
from ambiseg.costs import Cost
from ambiseg.history import best_row, written
from ambiseg.training.checkpoint import Beside, Write
from ambiseg.training.meter import Meter
from ambiseg.training.module import TrainingModule
from ambiseg.weights import write_weights


class Checkpoints(Checkpoint):
    """Writes ``last`` and ``best`` at the end of each epoch: all files of the epoch, or none."""

    def __init__(self, folder: Path, meter: Meter) -> None:
        super().__init__()
        self.folder, self.meter = folder, meter

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        # Every process takes part, and the first one writes.
        beside = self._beside(pl_module, self.meter.cost(trainer, pl_module))
        trainer.save_checkpoint(self.folder / "last.ckpt", storage_options=beside)

    def _beside(self, module: TrainingModule, cost: Cost) -> Beside:
        row = module.history[-1]
        about = {"epoch": str(int(row["epoch"]))}
        scores = {name: row.get(name, math.nan) for name in ("val_ged", "val_ged_unbiased")}
        about |= {name: f"{value:.6g}" for name, value in scores.items() if math.isfinite(value)}
        better = best_row(module.history) in (None, row)  # None: not validated yet
        best = better or not (self.folder / "best.ckpt").exists()

        def weights(file: BinaryIO) -> None:
            write_weights(module.chosen, file, about)

        files: dict[Path, Write] = {self.folder / "best.safetensors": weights} if best else {}
        files[self.folder / "last.safetensors"] = weights
        files[self.folder / "metrics.csv"] = lambda file: file.write(written(module.history).encode())
        files[self.folder / COST] = lambda file: file.write(cost.written().encode())
        return Beside(files, copy=self.folder / "best.ckpt" if best else None)


class Signals(Callback):
    """Gives SIGTERM back to the command, which stops at once: Lightning takes note of it and goes on with its batch.

    Under SLURM it has a meaning of its own, and stays Lightning's.
    """

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        managed = isinstance(getattr(trainer.strategy, "cluster_environment", None), SLURMEnvironment)
        if threading.current_thread() is threading.main_thread() and self._before is not None and not managed:
            signal.signal(signal.SIGTERM, self._before)


def score(value: float) -> str:
    """``0.1234``, or that there is none: no image of the validation part has a value."""
    return f"{value:.4f}" if math.isfinite(value) else "none (no image has a value)"


def _validated(row: Mapping[str, float]) -> str:
    """GED of an epoch, and the estimate by which the best is chosen: ``0.1234, unbiased 0.1021``."""
    unbiased = row.get("val_ged_unbiased", math.nan)
    return score(row["val_ged"]) + (f", unbiased {unbiased:.4f}" if math.isfinite(unbiased) else "")


def terms_of(row: Mapping[str, float], scheduled: Collection[str] = ()) -> list[str]:
    """The terms of the loss among the columns of an epoch: all that are not counted, scheduled or validated."""
    known = {"epoch", "step", "lr", "loss", *scheduled}
    return [name for name in row if name not in known and not name.startswith("val_")]


class EpochLines(Checkpoint):
    """One line per epoch, for logs and terminals alike; a Checkpoint, because those are called last."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs, self._started = epochs, time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not trainer.is_global_zero:
            return
        row, width, moving = pl_module.history[-1], len(str(self.epochs)), pl_module.schedules
        text = f"epoch {int(row['epoch']):{width}d}/{self.epochs}  loss {row['loss']:.4f}"
        text += "".join(f"  {name} {row[name]:.4f}" for name in terms_of(row, moving))
        text += "".join(f"  {name} {row[name]:.3g}" for name in moving)
        text += f"  val GED {_validated(row)}" if "val_ged" in row else ""
        say(f"{text}  {time.monotonic() - self._started:.0f} s")


class ProgressBar(RichProgressBar):
    """Lightning's bar with the loss and its terms, what is scheduled, and validation GED. The lines above it stay."""

    def configure_columns(self, trainer: Trainer) -> list:
        columns = super().configure_columns(trainer)[:-1]  # without steps per second
        columns[1].bar_width = 20  # so that everything fits into a line
        return columns

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {current_epoch + 1}/{self.trainer.max_epochs}"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.progress is not None:
            self.progress.live.transient = True
        super().teardown(trainer, pl_module, stage)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        assert isinstance(pl_module, TrainingModule)
        means = pl_module.recent
        shown: dict[str, Any] = {"loss": f"{means['loss']:.3f}"} if "loss" in means else {}
        shown |= {name: f"{means[name]:.3f}" for name in terms_of(means)}
        shown |= {name: f"{value:.3g}" for name, value in pl_module.scheduled().items()}
        if pl_module.history and "val_ged" in (row := pl_module.history[-1]):
            shown["val GED"] = _validated(row)
        return shown
