"""Lightning's trainer from the ``trainer`` section of the settings, or one line that says what is wrong with it."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg.config import Config
from ambiseg.trainer_settings import TrainerConfig

_PLACES = ("accelerator", "devices", "num_nodes")  # what a machine may not have; the others are what they may be


def trainer_of(
    config: Config, precision: str, out: Path, callbacks: list[Any], plugins: list[Any], several: bool = False
) -> Any:
    """A trainer for this machine; nothing is written.

    Args:
        precision: the one to compute in.
        out: the folder of the run.
        several: whether the method has several optimisers.
    """
    import lightning.pytorch as pl

    setting, strategy = config.trainer, config.trainer.strategy
    alone = str(setting.devices) == "1" and setting.num_nodes == 1
    if several and strategy in ("auto", "ddp") and not alone:
        strategy = "ddp_find_unused_parameters_true"  # a phase leaves the parameters of the others unused
    loggers = _loggers(config, out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice for those who call it themselves
            trainer = pl.Trainer(
                max_epochs=setting.epochs,
                accelerator=setting.accelerator,
                devices=setting.devices,
                num_nodes=setting.num_nodes,
                strategy=strategy,
                precision=precision,  # type: ignore[arg-type]
                check_val_every_n_epoch=setting.check_every,
                deterministic=setting.deterministic,
                callbacks=callbacks,
                plugins=plugins,
                logger=loggers,
                enable_checkpointing=True,
                enable_progress_bar=type(callbacks[-1]).__name__ == "ProgressBar",
                enable_model_summary=False,
                num_sanity_val_steps=0,
                default_root_dir=out,
            )
            _check_processes(trainer, setting)
    except ConfigError:
        raise
    except Exception as error:  # Lightning, torch and drivers have many kinds for a setting that this machine has not
        raise ConfigError(_explained(setting, error)) from None
    return trainer


def _check_processes(trainer: Any, setting: TrainerConfig) -> None:
    """What Lightning would begin and then wait for: other machines, and more processes than the machine can bear."""
    strategy, most = trainer.strategy, max(8, os.cpu_count() or 1)
    if strategy.root_device.type == "cpu" and trainer.num_devices > most:
        raise ConfigError(
            f"trainer.devices: expected at most {most} processes on the CPU of this machine, found {setting.devices}"
        )
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None:  # a single process
        return
    if setting.num_nodes > 1 and not environment.creates_processes_externally and "NODE_RANK" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes: expected 1, or a start by SLURM or torchrun on each machine, found {setting.num_nodes}"
        )
    environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)


def _explained(setting: TrainerConfig, error: Exception) -> str:
    """One line that names the setting: one whose word is in the error, or those that are not as they are by default."""
    text = " ".join(str(error).split()) or type(error).__name__
    defaults = TrainerConfig()
    changed = [key for key in _PLACES if getattr(setting, key) != getattr(defaults, key)]
    named = [key for key in changed if re.search(rf"\b{key}\b", text, re.IGNORECASE)] or changed or ["accelerator"]
    found = ", ".join(f"trainer.{key} {getattr(setting, key)}" for key in named)
    reason = re.split(r"(?<=[.!?]) |\n", text)[0].rstrip(".")
    return f"{found}: expected what Lightning can start on this machine, found: {reason[:300]}"


def _loggers(config: Config, out: Path) -> Any:
    if not config.trainer.tensorboard:
        return False
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(str(out), name="tensorboard", version="")
    except ModuleNotFoundError:
        raise ConfigError("trainer.tensorboard: expected the package tensorboard, found none: pip install it") from None
