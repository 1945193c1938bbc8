"""Several processes that act as one program, and Lightning without its asides."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "RANK")
_ASIDES = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*exists and is not empty.*",
    ".*it is recommended to use `Trainer.devices=1.*",
    ".*length of `DataLoader` across ranks is zero.*",
    ".*`isinstance.treespec, LeafSpec.*",
)


def first_process() -> bool:
    """Whether this process is the one that speaks and writes; Lightning and SLURM number them in the environment."""
    return all(int(os.environ.get(name, 0)) == 0 for name in _RANKS)


@contextmanager
def plain_speech() -> Iterator[None]:
    """Without Lightning's tips and lists of hardware, which are for people who call it themselves."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for message in _ASIDES:
            warnings.filterwarnings("ignore", message)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
