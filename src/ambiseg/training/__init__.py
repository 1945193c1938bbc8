"""``ambiseg.train``: from a configuration to the folder of a run. Lightning runs the loop."""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.files import LOCK, Lock, atomic_write, write_text
from ambiseg._util.own import imported, is_reference
from ambiseg._util.processes import first_process, quiet_lightning
from ambiseg._util.progress import reporting
from ambiseg._util.terminal import Lasting, animated, say
from ambiseg._util.text import count
from ambiseg._util.watch import watched
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
    ``run.json``. Nothing is written before everything that can be known to fail has not, and one process at a time
    trains in a folder.
    """
    require("train")
    show = not quiet and first_process()
    with reporting("loading", not show):  # Lightning takes seconds
        import lightning.pytorch  # noqa: F401

    if not isinstance(config, Config) and os.fspath(config) == AUTO:
        planned = plan(settings=settings)
        config, reasons = planned.config, planned.reasons
    elif not isinstance(config, Config):
        config = Config.from_recipe(config, settings)
    elif settings:
        config = config.with_settings(settings)
    out, typed = Path(out), command if command is not None else sys.argv
    run = Run(out) if resume else None
    with ExitStack() as stack:
        if run is not None:
            if first_process():
                stack.enter_context(Lock(out, "training"))
            config = _same(run, config)
        elif first_process():
            Run.claim(out)
        stack.enter_context(_threads(config.trainer.threads))
        prepared = Prepared(config, out, run, show, planned=reasons is not None)
        if run is not None and first_process():  # how long and on what may be new
            write_text(out / "config.yaml", dump(config, run.reasons(config)))
        elif first_process():
            how = {"precision": prepared.precision, "reasons": reasons, "warnings": prepared.warned}
            stack.enter_context(Run.begin(out, config, prepared.card, prepared.data.split, typed, **how))
        prepared.fit()
        if config.trainer.look and first_process():
            prepared.look(show)
    return Run(out)


class Prepared:
    """Everything that a training needs, made and checked; nothing is written.

    Args:
        config: what is trained.
        out: the folder of the run.
        run: the one that is resumed.
        show: whether to print what is noteworthy.
        planned: whether the settings were made for the data.
    """

    def __init__(self, config: Config, out: Path, run: Run | None, show: bool, planned: bool = False) -> None:
        import lightning.pytorch as pl

        from ambiseg.data.module import DataModule
        from ambiseg.training import checkpoint
        from ambiseg.training.callbacks import Checkpoints, EpochLines, ProgressBar, Signals
        from ambiseg.training.meter import Meter
        from ambiseg.training.module import TrainingModule
        from ambiseg.training.trainer import trainer_of

        self.config, self.out = config, out
        if is_reference(config.backbone.name) and not config.backbone.name.startswith(SMP):
            imported(config.backbone.name, "backbone.name")  # what cannot be imported is said before data are read
        self.precision, why = resolve(config.trainer.precision, config.trainer.accelerator, run and run.precision)
        callbacks: list[Any] = [Signals(), meter := Meter(out), Checkpoints(out, meter)]
        callbacks += [EpochLines(config.trainer.epochs)] if show else []
        callbacks += [ProgressBar(console_kwargs={"file": Lasting(sys.stderr)})] if show and animated() else []
        plugin = checkpoint.RunCheckpoints()
        how = config, self.precision, out, callbacks, [plugin]
        with quiet_lightning():
            trainer_of(*how)  # before data are read, which may take long
        saved = _saved(run, config) if run is not None else None
        with reporting("preparing data", not show) as progress:
            # A run goes on with its own split: one that is made anew may be another, if the rule or the data changed.
            data = DataModule(_with_policy(config), split=run and run.split, progress=progress)
            data.prepare_data()
            try:
                data.setup()
                if run is not None:
                    data.split.verify(data.cases)
            except DataError as error:
                if run is not None:
                    raise ConfigError(f"{out}: the data must be those that the run began with: {error}") from None
                raise
        self.data = data
        if show and data.cases.patients_assumed:
            say(_assumed(data.cases))
        self.warned = warnings_of(config, data) if first_process() and run is None else []
        if show and self.warned:
            say(*(f"warning: {line}" for line in self.warned))
            if not planned:
                say(f"note: `{_auto(data.config)}` fits all settings to these data")
        self.card = Card.of(data.cases, data.intensity, method_named(config.model.method), *data.trained_on())
        pl.seed_everything(config.seed, verbose=False)
        model = build_model(config, self.card.channels, len(self.card.classes))
        model.before_training(images=len(data.indices("train")))
        if config.trainer.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        recover = partial(_batch, data)
        self.module = TrainingModule(model, config, self.card.evaluated, recover=recover)
        with quiet_lightning():
            self.trainer = trainer_of(*how, several=len(self.module.groups) > 1)
        self.checkpoint = None if saved is None else out / "last.ckpt"
        if saved is not None:
            plugin.content = checkpoint.fitted(saved, out / "last.ckpt", self.module, self.trainer)
        if show:
            say(f"precision {self.precision}: {why}")

    def fit(self) -> None:
        """Train to the end, or say why not."""
        from ambiseg.training.module import NonFiniteLoss

        hint = f"go on with: {_command_to_resume(self.out)}"
        try:
            with quiet_lightning(), watched(hint, lambda: (self.out / LOCK).unlink(missing_ok=True)):
                self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.checkpoint, weights_only=True)
        except NonFiniteLoss as error:
            raise ConfigError(f"{error}; {_save_batch(self.module.offending, self.out)}") from None
        except (SystemExit, KeyboardInterrupt):  # the first is how Lightning answers Ctrl-C
            raise Stopped(_how_to_resume(self.out)) from None
        if self.trainer.interrupted:
            raise Stopped(_how_to_resume(self.out))

    def look(self, show: bool) -> None:
        """Prepare the run to say when a person must look, once it is trained."""
        from ambiseg.training.looking import leave_look

        try:
            leave_look(Run(self.out), self.data, self.trainer.strategy.root_device, show)
        except KeyboardInterrupt:
            what = "stopped when the training had ended: predictions will not say when a person must look"
            raise Stopped(f"{what}, unless you call: ambiseg look {shlex.quote(str(self.out))}") from None


def _auto(data: DataConfig) -> str:
    """The command that plans a training on these data."""
    options = [f"--data.name {data.name}"] if data.root is None or data.name != dataset_at(data.root) else []
    return " ".join(["ambiseg train auto", *options, *([f"--data.root {shlex.quote(data.root)}"] if data.root else [])])


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


def _saved(run: Run, config: Config) -> dict[str, Any] | None:
    """The checkpoint of the last finished epoch; ``None`` of a run that was stopped in its first."""
    from ambiseg.training.checkpoint import read

    if run.members:
        found = f"one that was put together from {count(len(run.members), 'run')}"
        raise ConfigError(f"{run.folder}: expected a run that was trained, found {found}")
    path = run.folder / "last.ckpt"
    for name in (
        "metrics.csv",
        "cost.json",
        *(f"{which}.{kind}" for which in ("last", "best") for kind in ("ckpt", "safetensors")),
    ):
        if (run.folder / name).exists() and not (run.folder / name).is_file():
            what = "a folder" if (run.folder / name).is_dir() else "none that ends"
            raise ConfigError(f"{run.folder / name}: expected a file of a run, found {what}")
    if not path.exists():
        return None
    saved = read(path)
    history = saved["ambiseg"].get("history") if isinstance(saved["ambiseg"], dict) else None
    if isinstance(history, list) and len(history) > config.trainer.epochs:
        done = f"at least {len(history)} for trainer.epochs, which the run has done"
        raise ConfigError(f"{run.folder}: expected {done}, found {config.trainer.epochs}")
    return saved


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
    return f"{when}; go on with: {_command_to_resume(out)}"


def _command_to_resume(out: Path) -> str:
    return f"ambiseg train --resume {shlex.quote(str(out))}"
