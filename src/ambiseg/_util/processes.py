"""Which of several processes writes and prints, what they agree on; how the program was called; quiet Lightning."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "RANK")
_HINTS = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*exists and is not empty.*",
    ".*it is recommended to use `Trainer.devices=1.*",
    ".*length of `DataLoader` across ranks is zero.*",
    ".*`isinstance.treespec, LeafSpec.*",
    ".*callbacks used to create the checkpoint.*",
)


def first_process() -> bool:
    """Whether this process prints and writes files; Lightning and SLURM number processes in the environment."""
    return all(os.environ.get(name, "0").strip() in ("", "0") for name in _RANKS)


def mean_of_processes(value: Tensor) -> Tensor:
    """The mean over all processes that train together, the same in each of them; all of them have to call it."""
    import torch.distributed as processes

    if not (processes.is_available() and processes.is_initialized()):
        return value
    value = value.clone()
    processes.all_reduce(value)  # a sum, which every backend has
    return value / processes.get_world_size()


def program() -> str:
    """How to call ambiseg again from the same folder, for commands that are suggested.

    Its name where the shell finds it; else the path that it was called by, such as ``.venv/bin/ambiseg``.
    """
    called, found = Path(sys.argv[0]), shutil.which("ambiseg")
    if called.stem != "ambiseg":  # python -m ambiseg, or a program that imports it
        return "ambiseg" if found else f"{shlex.quote(sys.executable)} -m ambiseg"
    if found and called.exists() and Path(found).samefile(called):
        return "ambiseg"
    return shlex.quote(os.fspath(called))


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without Lightning's hints and lists of hardware, which are for those who call it themselves."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in _HINTS:
            warnings.filterwarnings("ignore", message)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
