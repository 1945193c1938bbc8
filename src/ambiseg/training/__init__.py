"""``ambiseg.train``: from a configuration to the folder of a run. Lightning runs the loop."""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.files import atomic_write, write_text
from ambiseg._util.own import imported, is_reference
from ambiseg._util.processes import first_process, quiet_lightning
from ambiseg._util.progress import reporting
from ambiseg._util.terminal import animated
from ambiseg._util.text import count
from ambiseg.config import Config, dump
from ambiseg.data.case import Cases
from ambiseg.data.config import DataConfig, dataset_at
from ambiseg.data.loader import Batch
from ambiseg.methods import method_named
from ambiseg.nn.own import SMP
from ambiseg.planning import AUTO, plan, warnings_of
from ambiseg.runs import Card, Run, build_model
from ambiseg.training.precision import resolve

__all__ = ["Stopped", "train"]


class Stopped(KeyboardInterrupt):
    """Training was interrupted from outside; the run can be taken up again."""


def train(
    config: str | os.PathLike[str] | Config,
    out: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    command: list[str] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Run:
    """Train a model and return its run.

    ``ambiseg.train("demo", "runs/mine", {"trainer.epochs": 2})`` is ``ambiseg train demo --trainer.epochs 2 --out
    runs/mine``.

    Args:
        config: the name of a recipe, the path of a YAML file, or a :class:`~ambiseg.config.Config`; ``"auto"`` plans
            one that fits the data of ``settings``, such as ``{"data.root": "scans/"}``: see :func:`ambiseg.plan`.
        out: the folder of the run. It must be new or empty, unless ``resume``.
        settings: what to change of it, by key; see :meth:`ambiseg.config.Config.from_recipe`.
        resume: go on with the run in ``out`` from its last finished epoch, to the bit as if it had not stopped; where
            none was finished, from the beginning.
        quiet: print nothing but errors.
        command: what the user typed, for the record.
        reasons: of settings, by their keys, as :func:`ambiseg.plan` gives them: comments in ``config.yaml``.

    What keeps the configuration from learning anything is said in one line each, with what to do, and recorded in
    ``run.json``.
    """
    require("train")
    show = not quiet and first_process()
    with reporting("loading", not show):  # Lightning takes seconds
        import lightning.pytorch as pl

        from ambiseg.data.module import DataModule
        from ambiseg.training.callbacks import Checkpoints, EpochLines, ProgressBar
        from ambiseg.training.module import NonFiniteLoss, TrainingModule

    if not isinstance(config, Config) and os.fspath(config) == AUTO:
        planned = plan(settings=settings)
        config, reasons = planned.config, planned.reasons
    elif not isinstance(config, Config):
        config = Config.from_recipe(config, settings)
    elif settings:
        config = config.with_settings(settings)
    out = Path(out)
    checkpoint = _checkpoint(out) if resume else None
    if resume:
        config = _same(Run(out), config)
    elif first_process():
        Run.claim(out)
    if is_reference(config.backbone.name) and not config.backbone.name.startswith(SMP):
        imported(config.backbone.name, "backbone.name")  # what cannot be imported is said before data are read
    begun = Run(out).precision if resume else None
    precision, why = resolve(config.trainer.precision, config.trainer.accelerator, begun)
    with _threads(config.trainer.threads):
        with reporting("preparing data", not show) as progress:
            # A run goes on with its own split: one that is made anew may be another, if the rule or the data changed.
            data = DataModule(_with_policy(config), split=Run(out).split if resume else None, progress=progress)
            data.prepare_data()
            try:
                data.setup()
                if resume:
                    data.split.verify(data.cases)
            except DataError as error:
                if resume:
                    raise ConfigError(f"{out}: the data must be those that the run began with: {error}") from None
                raise
        if show and data.cases.patients_assumed:
            print(_assumed(data.cases), file=sys.stderr, flush=True)
        warned = warnings_of(config, data) if first_process() and not resume else []
        if show and warned:
            print(*(f"warning: {line}" for line in warned), sep="\n", file=sys.stderr, flush=True)
            if reasons is None:
                print(f"note: `{_auto(data.config)}` fits all settings to these data", file=sys.stderr, flush=True)
        card = Card.of(data.cases, data.intensity, method_named(config.model.method), *data.trained_on())
        pl.seed_everything(config.seed, verbose=False)
        model = build_model(config, card.channels, len(card.classes))
        if config.trainer.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if first_process() and not resume:
            typed = command if command is not None else sys.argv
            Run.create(out, config, card, data.split, typed, precision=precision, reasons=reasons, warnings=warned)
        elif first_process():  # how long and on what may be new
            write_text(out / "config.yaml", dump(config, Run(out).reasons(config)))
        if show:
            print(f"precision {precision}: {why}", file=sys.stderr, flush=True)
        module = TrainingModule(model, config, card.evaluated, recover=lambda epoch, step: _batch(data, epoch, step))
        callbacks: list[Any] = [Checkpoints(out)]
        callbacks += [EpochLines(config.trainer.epochs)] if show else []
        callbacks += [ProgressBar(console_kwargs={"stderr": True})] if show and animated() else []
        with quiet_lightning():
            trainer = _trainer(config, precision, out, callbacks, several=len(module.groups) > 1)
            try:
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            except NonFiniteLoss as error:
                raise ConfigError(f"{error}; {_save_batch(module.offending, out)}") from None
            except SystemExit:  # how Lightning answers Ctrl-C
                raise Stopped(_how_to_resume(out)) from None
    if trainer.interrupted:
        raise Stopped(_how_to_resume(out))
    return Run(out)


def _auto(data: DataConfig) -> str:
    """The command that plans a training on these data."""
    options = [f"--data.name {data.name}"] if data.root is None or data.name != dataset_at(data.root) else []
    return " ".join(["ambiseg train auto", *options, *([f"--data.root {shlex.quote(data.root)}"] if data.root else [])])


def _trainer(config: Config, precision: str, out: Path, callbacks: list[Any], several: bool) -> Any:
    import lightning.pytorch as pl

    setting, strategy = config.trainer, config.trainer.strategy
    alone = str(setting.devices) == "1" and setting.num_nodes == 1
    if several and strategy in ("auto", "ddp") and not alone:
        strategy = "ddp_find_unused_parameters_true"  # a phase leaves the parameters of the others unused
    return pl.Trainer(
        max_epochs=setting.epochs,
        accelerator=setting.accelerator,
        devices=setting.devices,
        num_nodes=setting.num_nodes,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        check_val_every_n_epoch=setting.check_every,
        deterministic=setting.deterministic,
        callbacks=callbacks,
        logger=_loggers(config, out),
        enable_checkpointing=True,
        enable_progress_bar=type(callbacks[-1]).__name__ == "ProgressBar",
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=out,
    )


def _assumed(cases: Cases) -> str:
    of = f"{count(len(cases), 'image')} of {count(len(set(cases.patients)), 'patient')}"
    return f'{of}: {cases.patients_assumed} ("patient" in ambiseg.json sets it; ".+" keeps each image on its own)'


def _with_policy(config: Config) -> DataConfig:
    """The data with the annotations that are asked for, or those that the method trains on by default."""
    data = copy.copy(config.data)
    if data.annotations is None:
        data.annotations = method_named(config.model.method).annotations[0]  # type: ignore[assignment]
    return data


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many CPU threads of PyTorch for a while; ``None`` leaves them."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    allowed = run.config.model_copy(deep=True)
    allowed.trainer = asked.trainer
    for key in ("root", "workers", "cache"):
        setattr(allowed.data, key, getattr(asked.data, key))
    wanted, found = allowed.model_dump(), asked.model_dump()
    for section, values in wanted.items():
        if values != found[section]:
            keys = [k for k in values if values[k] != found[section][k]] if isinstance(values, dict) else []
            key = f"{section}.{keys[0]}" if keys else section
            has, found = (values[keys[0]], found[section][keys[0]]) if keys else (values, found[section])
            hint = "start a new run in another folder for that"
            raise ConfigError(f"{run.folder}: expected {key} {has} as the run has it, found {found}; {hint}")
    return allowed


def _how_to_resume(out: Path) -> str:
    when = "stopped" if (out / "last.ckpt").is_file() else "stopped before the first epoch was finished"
    return f"{when}; go on with: ambiseg train --resume {shlex.quote(str(out))}"


# -- loggers ---------------------------------------------------------------------------------------------------------


def _loggers(config: Config, out: Path) -> Any:
    if not config.trainer.tensorboard:
        return False
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(str(out), name="tensorboard", version="")
    except ModuleNotFoundError:
        raise ConfigError("trainer.tensorboard: expected the package tensorboard, found none: pip install it") from None
