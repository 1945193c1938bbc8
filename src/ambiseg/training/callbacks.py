"""What happens at the end of an epoch: files, and one line of text."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar

from ambiseg._util.files import write_text
from ambiseg.runs import best_row, write_weights
from ambiseg.training.module import TrainingModule


class Checkpoints(Checkpoint):
    """Writes ``last`` and ``best`` at the end of each epoch. A file is replaced when its successor is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        better = best_row(pl_module.history) in (None, pl_module.history[-1])  # None: not validated yet
        last = self.folder / "last.ckpt"
        draft = self.folder / ".last.ckpt.draft"
        try:
            trainer.save_checkpoint(draft)  # every process takes part; the first one writes
            if trainer.is_global_zero:
                self._publish(pl_module, draft, last, better)
        finally:
            if trainer.is_global_zero:
                draft.unlink(missing_ok=True)
        trainer.strategy.barrier()

    def _publish(self, module: TrainingModule, draft: Path, last: Path, better: bool) -> None:
        row = module.history[-1]
        about = {"epoch": str(int(row["epoch"]))}
        about |= {"val_ged": f"{row['val_ged']:.6g}"} if math.isfinite(row.get("val_ged", math.nan)) else {}
        if better or not (self.folder / "best.ckpt").exists():
            link = self.folder / ".best.ckpt.draft"
            link.unlink(missing_ok=True)
            _link(draft, link)
            os.replace(link, self.folder / "best.ckpt")
            write_weights(module.chosen, self.folder / "best.safetensors", about)
        write_weights(module.chosen, self.folder / "last.safetensors", about)
        write_text(self.folder / "metrics.csv", _table(module.history))
        os.replace(draft, last)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        import shutil

        shutil.copyfile(source, target)


def _table(history: list[dict[str, float]]) -> str:
    columns = list(dict.fromkeys(key for row in history for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in history:
        writer.writerow({key: f"{value:.8g}" for key, value in row.items() if not math.isnan(value)})
    return text.getvalue()


def score(value: float) -> str:
    """``0.1234``, or that there is none: no image of the validation part has a value."""
    return f"{value:.4f}" if math.isfinite(value) else "none (no image has a value)"


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
        text += f"  val GED {score(row['val_ged'])}" if "val_ged" in row else ""
        print(f"{text}  {time.monotonic() - self._started:.0f} s", file=sys.stderr, flush=True)


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
            shown["val GED"] = score(row["val_ged"])
        return shown
