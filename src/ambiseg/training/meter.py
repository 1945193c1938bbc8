"""Measures what a training costs: CPU time of the process and of those that load data for it."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from ambiseg import costs
from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import mean_of_processes
from ambiseg.costs import Cost


class Meter(Callback):
    """Adds up from the start of a training; a run that is resumed goes on from what its ``cost.json`` says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._before = folder, Cost(cpu_seconds=0, wall_seconds=0, epochs=0)
        self._cpu = self._wall = 0.0
        self._epoch = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cpu, self._wall = cpu_seconds(), time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The checkpoint has been read by now: a record of more epochs is of one that was lost, and was paid for.
        self._epoch = trainer.current_epoch
        if self._epoch:
            with suppress(ConfigError, OSError):  # without a record the new one covers the epochs from here on
                self._before = costs.read(self.folder / costs.FILE) or self._before

    def cost(self, trainer: Trainer, module: LightningModule) -> Cost:
        """Of all epochs, the one that ends included. All processes that train together have to call it."""
        used = torch.tensor(cpu_seconds() - self._cpu, dtype=torch.float32, device=module.device)
        cpu = float(mean_of_processes(used)) * trainer.world_size
        covered = self._before.epochs + trainer.current_epoch + 1 - self._epoch
        return Cost(
            cpu_seconds=round(self._before.cpu_seconds + cpu, 3),
            wall_seconds=round(self._before.wall_seconds + time.monotonic() - self._wall, 3),
            epochs=min(covered, trainer.current_epoch + 1),
            processes=trainer.world_size,
            threads=torch.get_num_threads(),
            device=device_name(module.device),
        )


def cpu_seconds() -> float:
    """CPU time of this process so far, of its ended children and, where the system tells, of those that load data.

    >>> 0 < cpu_seconds() <= cpu_seconds()
    True
    """
    times = os.times()
    return sum(times[:4]) + sum(_of_process(child.pid) for child in multiprocessing.active_children() if child.pid)


def _of_process(pid: int) -> float:
    """User and system time of another process, where there is /proc; else 0: it is counted when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def device_name(device: torch.device) -> str:
    """What a device is called, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"
