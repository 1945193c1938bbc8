"""Checkpoints: written beside their place with all files of the epoch, and read only if all of it fits the run."""

from __future__ import annotations

import copy
import io
import os
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import atomic_write, draft_name
from ambiseg.training.module import TrainingModule
from ambiseg.training.scan import check as check_pickle
from ambiseg.weights import check_finite, check_names

Write = Callable[[BinaryIO], Any]
_MOST = 1 << 26  # bytes of what is not a tensor


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Beside:
    """What is written together with a checkpoint.

    Attributes:
        files: how each is written. They take their places in this order, before the checkpoint.
        copy: another name of the checkpoint, which takes its place first.
    """

    files: dict[Path, Write] = field(default_factory=dict)
    copy: Path | None = None


class RunCheckpoints(CheckpointIO):
    """How Lightning writes and reads the checkpoints of a run.

    All files of an epoch are on the disk as drafts beside their places before the first of them takes its name: a full
    disk leaves the folder as it was. The temporary folder, through which Lightning writes, is not used.

    Attributes:
        content: what is read; see :func:`fitted`.
    """

    content: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Beside | None = None) -> None:
        """Write a checkpoint, and what is beside it."""
        beside, content = storage_options or Beside(), io.BytesIO()
        torch.save(checkpoint, content)  # into memory: of a full disk it would not tell whose
        with ExitStack() as drafts:  # they take their places in the opposite order
            draft = drafts.enter_context(atomic_write(path))
            _fill(draft, lambda file: file.write(content.getbuffer()))
            for other, write in reversed(beside.files.items()):
                _fill(drafts.enter_context(atomic_write(other)), write)
            if beside.copy is not None:
                _copy(draft, drafts.enter_context(atomic_write(beside.copy)), content)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """What was read and checked before."""
        assert self.content is not None
        return self.content

    def remove_checkpoint(self, path: Any) -> None:
        """For callbacks of Lightning's, of which none is used."""
        Path(path).unlink(missing_ok=True)


def _fill(file: BinaryIO, write: Write) -> None:
    write(file)
    file.flush()
    os.fsync(file.fileno())


def _copy(draft: BinaryIO, file: BinaryIO, content: io.BytesIO) -> None:
    """Let a draft be a second name of another one; a file of its own where there are no links."""
    link = draft_name(Path(file.name).parent)
    try:
        os.link(draft.name, link)
        os.replace(link, file.name)
    except OSError:
        _fill(file, lambda file: file.write(content.getbuffer()))
    finally:
        link.unlink(missing_ok=True)


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of this library's, tensors and numbers; nothing in it is executed."""
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # zip, pickle and torch fail in their own ways on half a file
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path}: expected a checkpoint of ambiseg, found a damaged file ({reason})") from None
    if not isinstance(content, dict) or not {"ambiseg", "state_dict"} <= content.keys():
        raise ConfigError(f"{path}: expected a checkpoint of ambiseg, found another program's")
    return content


def _check_archive(path: Path) -> None:
    """PyTorch compares no checksums, and would inflate whatever it is given."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename} is compressed")
            if entry.filename.endswith(".pkl"):
                if entry.file_size > _MOST:
                    raise ValueError(f"{entry.filename} has more than {_MOST} bytes")
                check_pickle(archive.read(entry))
        if wrong := archive.testzip():
            raise ValueError(f"the checksum of {wrong} is another")


def fitted(content: dict[str, Any], path: Path, module: TrainingModule, trainer: pl.Trainer) -> dict[str, Any]:
    """What Lightning needs to go on, made of a checkpoint that fits the module; else an error that names the part.

    What follows from the configuration, such as betas, is not taken from the file.
    """
    own, state = module.state_dict(), content["state_dict"]
    wanted = f"{path}: expected a checkpoint of this run, found"
    try:
        check_names(own, {name: tuple(_tensor(state[name]).shape) for name in _table(state)}, path)
        if odd := [name for name in own if own[name].is_floating_point() != state[name].is_floating_point()]:
            raise _Other(f"{state[odd[0]].dtype} for {odd[0]!r}")
        check_finite(state, path)
        about = _own_part(content["ambiseg"], module)
        loops = _counters(_table(_table(content.get("loops")).get("fit_loop")), trainer.fit_loop.state_dict())
        _check_counters(loops, len(about["history"]))
        ready = {
            "epoch": len(about["history"]) - 1,
            "global_step": about["steps"],
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": {name: state[name] for name in own},
            "loops": {"fit_loop": loops},
            "optimizer_states": _optimizers(content.get("optimizer_states"), module, path),
            "lr_schedulers": [],
            "callbacks": {},
            "ambiseg": about,
        }
        plugin = type(trainer.precision_plugin).__qualname__  # the scale of 16-mixed
        if (expected := trainer.precision_plugin.state_dict()) and plugin in content:
            ready[plugin] = _alike(content[plugin], expected, plugin)
    except _Other as error:
        raise ConfigError(f"{wanted} {error}") from None
    return ready


class _Other(Exception):
    """Of what a checkpoint has in place of what belongs there."""


def _table(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Other(f"{_kind(value)} in place of a table")
    return value


def _tensor(value: Any) -> Tensor:
    if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise _Other(f"{_kind(value)} in place of a tensor")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise _Other(f"{_kind(value)} for {name} in place of a number that counts")
    return value


def _alike(value: Any, template: dict[str, Any], name: str) -> dict[str, Any]:
    """A table with the numbers of another one."""
    value = _table(value)
    for key, one in template.items():
        if key not in value:
            raise _Other(f"no {key} of {name}")
        if isinstance(one, int) and not isinstance(one, bool):
            _whole(value[key], f"{key} of {name}")
        elif isinstance(value[key], bool) or not isinstance(value[key], int | float):
            raise _Other(f"{_kind(value[key])} for {key} of {name}")
    return {key: value[key] for key in template}


def _own_part(value: Any, module: TrainingModule) -> dict[str, Any]:
    about = _table(value)
    history = about.get("history")
    if not isinstance(history, list) or not history:
        raise _Other("no history of epochs")
    for number, row in enumerate(history, 1):
        for name, one in _table(row).items():
            if not isinstance(name, str) or isinstance(one, bool) or not isinstance(one, int | float):
                raise _Other(f"{_kind(one)} in the history of epoch {number}")
        if row.get("epoch") != number or not {"step", "loss"} <= row.keys():
            raise _Other(f"no epoch {number} with its step and loss in the history")
    steps = _whole(about.get("steps", history[-1]["step"]), "steps")  # version 0.1 had it in the history alone
    schedules = _table(about.get("schedules"))
    moving = {name: _moved(one, schedules.get(name), name) for name, one in module.schedules.items()}
    rate = None if module.rate is None else _moved(module.rate, about.get("rate"), "rate")
    return {"schedules": moving, "rate": rate, "history": history, "steps": steps}


def _moved(schedule: Any, state: Any, name: str) -> dict[str, Any]:
    """The state of something that moves, if there is a value at it."""
    found, trial = _alike(state, schedule.state_dict(), name), copy.deepcopy(schedule)
    trial.load_state_dict(found)
    try:
        float(trial.value)
    except IndexError:
        raise _Other(f"a place beyond the last value of {name}") from None
    return found


def _counters(found: Any, template: dict[str, Any]) -> dict[str, Any]:
    """Lightning's counters, of the form that they have in this version of it; those that it had not are new."""
    made, found = {}, _table(found)
    for key, one in template.items():
        if isinstance(one, dict):
            made[key] = _counters(found.get(key, one), one)
        elif isinstance(one, bool):
            made[key] = bool(found.get(key, one))
        else:
            made[key] = _whole(found.get(key, one), key)
    return made


def _check_counters(loops: dict[str, Any], epochs: int) -> None:
    """They are of the end of an epoch, the last in the history."""
    epoch, batch = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
    if (epoch["ready"], epoch["processed"], epoch["completed"]) != (epochs, epochs, epochs - 1):
        raise _Other(f"{epoch['processed']} epochs, of which {epochs} are in the history")
    if len(set(batch["current"].values())) != 1 or not batch["is_last_batch"]:
        raise _Other("an epoch that is not finished")


def _optimizers(value: Any, module: TrainingModule, path: Path) -> list[dict[str, Any]]:
    """The averages of gradients, of the shapes of their parameters."""
    fresh = module.configure_optimizers()
    if not isinstance(value, list) or len(value) != len(fresh):
        raise _Other(f"no states of {len(fresh)} optimisers")
    made = []
    for optimizer, saved in zip(fresh, value, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        kept = {}
        for index, state in _table(_table(saved).get("state")).items():
            if _whole(index, "a parameter") >= len(parameters):
                raise _Other(f"the optimiser of {index + 1} parameters, and there are {len(parameters)}")
            shapes = {"step": (), "exp_avg": parameters[index].shape, "exp_avg_sq": parameters[index].shape}
            for name, shape in shapes.items():
                one = _tensor(_table(state).get(name))
                if one.shape != shape or not one.is_floating_point():
                    raise _Other(f"{list(one.shape)} for {name} of parameter {index} instead of {list(shape)}")
                check_finite({f"{name} of parameter {index}": one}, path)
            kept[index] = {name: state[name] for name in shapes}
        made.append({"state": kept, "param_groups": groups})
    return made
