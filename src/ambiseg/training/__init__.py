"""``ambiseg.train``: a configuration in, the folder of a run out. Lightning runs the loop, on a core or eight nodes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import atomic_write, write_text
from ambiseg._util.processes import first_process, plain_speech
from ambiseg._util.progress import reporting
from ambiseg.config import Config, dump
from ambiseg.data.loader import Batch
from ambiseg.runs import Card, Run, build_model

__all__ = ["Stopped", "train"]


class Stopped(KeyboardInterrupt):
    """Training was interrupted from outside; the run can be taken up again."""


def train(
    config: Config,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    quiet: bool = False,
    command: list[str] | None = None,
) -> Run:
    """Train a model and return its run.

    Args:
        config: see :class:`ambiseg.config.Config`; :func:`ambiseg.config.parse` makes one of a recipe.
        out: the folder of the run. It must be new or empty, unless ``resume``.
        resume: go on with the run in ``out`` from its last finished epoch, to the bit as if it had not stopped; where
            none was finished, from the beginning.
        quiet: print nothing but errors.
        command: what the user typed, for the record.
    """
    import lightning.pytorch as pl

    from ambiseg.data.module import DataModule
    from ambiseg.training.callbacks import Bar, Keep, Tell
    from ambiseg.training.fitting import Fitting, NotFinite

    out = Path(out)
    checkpoint = _checkpoint(out) if resume else None
    if resume:
        config = _same(Run(out), config)
    elif first_process():
        Run.claim(out)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    with reporting("preparing data", quiet or not first_process()) as progress:
        data = DataModule(config.data, progress=progress)
        data.prepare_data()
        data.setup()
    card = Card.of(data.cases, data.intensity)
    pl.seed_everything(config.seed, verbose=False)
    model = build_model(config.model, card.channels, len(card.classes))
    if config.trainer.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if first_process() and not resume:
        Run.create(out, config, card, data.split, command if command is not None else sys.argv)
    elif resume:
        _unchanged(Run(out), data.split.fingerprint)
        if first_process():
            write_text(out / "config.yaml", dump(config))  # how long and on what may be new
    fitting = Fitting(model, config, card.evaluated, recover=lambda epoch, step: _batch(data, epoch, step))
    show = not quiet and first_process()
    callbacks: list[Any] = [Keep(out)]
    callbacks += [Tell(config.trainer.epochs)] if show else []
    callbacks += [Bar()] if show and sys.stderr.isatty() else []
    with plain_speech():
        trainer = pl.Trainer(
            max_epochs=config.trainer.epochs,
            accelerator=config.trainer.accelerator,
            devices=config.trainer.devices,
            num_nodes=config.trainer.num_nodes,
            strategy=config.trainer.strategy,
            precision=config.trainer.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=config.trainer.accumulate,
            gradient_clip_val=config.optimizer.clip,
            check_val_every_n_epoch=config.trainer.check_every,
            deterministic=config.trainer.deterministic,
            callbacks=callbacks,
            logger=_loggers(config, out),
            enable_checkpointing=True,
            enable_progress_bar=any(isinstance(c, Bar) for c in callbacks),
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=out,
        )
        try:
            trainer.fit(fitting, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except NotFinite as error:
            raise ConfigError(f"{error}; {_save_batch(fitting.offending, out)}") from None
        except SystemExit:  # how Lightning answers Ctrl-C
            raise Stopped(_how_to_go_on(out)) from None
    if trainer.interrupted:
        raise Stopped(_how_to_go_on(out))
    return Run(out)


def _batch(data: Any, epoch: int, step: int) -> Batch:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return loader.dataset[list(loader.sampler)[step]]


def _save_batch(batch: Batch | None, out: Path) -> str:
    if batch is None:
        return "the batch could not be made again"
    import numpy as np

    path = out / "offending_batch.npz"
    with atomic_write(path) as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            images=batch.images.numpy(),
            labels=batch.annotations.labels.numpy(),
            names=np.array(batch.names),
        )
    return f"its images and labels are in {path}"


# -- resuming ---------------------------------------------------------------------------------------------------------


def _checkpoint(out: Path) -> Path | None:
    path = out / "last.ckpt"
    Run(out)  # names whatever else is wrong with the folder
    if not path.is_file():
        return None  # stopped in its first epoch
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        known = isinstance(content, dict) and "ambiseg" in content and "state_dict" in content
    except Exception as error:  # zip, pickle and torch fail in their own ways on half a file
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path}: expected a checkpoint of ambiseg, found a damaged file ({reason})") from None
    if not known:
        raise ConfigError(f"{path}: expected a checkpoint of ambiseg, found another program's")
    return path


def _same(run: Run, asked: Config) -> Config:
    """The run's own configuration; only how long, on what, and where the data are may differ from it."""
    import copy
    from dataclasses import asdict

    allowed = copy.deepcopy(run.config)
    allowed.trainer = asked.trainer
    for key in ("root", "workers", "cache"):
        setattr(allowed.data, key, getattr(asked.data, key))
    wanted, found = asdict(allowed), asdict(asked)
    for section, values in wanted.items():
        if values != found[section]:
            keys = [k for k in values if values[k] != found[section][k]] if isinstance(values, dict) else []
            key = f"{section}.{keys[0]}" if keys else section
            has, found = (values[keys[0]], found[section][keys[0]]) if keys else (values, found[section])
            hint = "start a new run for that, with another --out"
            raise ConfigError(f"{run.folder}: expected {key} {has} as the run has it, found {found}; {hint}")
    return allowed


def _unchanged(run: Run, fingerprint: str) -> None:
    if run.split.fingerprint != fingerprint:
        raise ConfigError(f"{run.folder}: expected the data that the run began with, found that they have changed")


def _how_to_go_on(out: Path) -> str:
    when = "stopped" if (out / "last.ckpt").is_file() else "stopped before the first epoch was finished"
    return f"{when}; go on with: ambiseg train --resume {shlex.quote(str(out))}"


# -- Lightning's manners ----------------------------------------------------------------------------------------------


def _loggers(config: Config, out: Path) -> Any:
    if not config.trainer.tensorboard:
        return False
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(str(out), name="tensorboard", version="")
    except ModuleNotFoundError:
        raise ConfigError("trainer.tensorboard: expected the package tensorboard, found none: pip install it") from None
