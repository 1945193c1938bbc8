"""What predictions of a new run need to say when a person must look, as far as it can be had for little."""

from __future__ import annotations

import shlex
from typing import Any

import torch

from ambiseg._util.errors import ConfigError
from ambiseg._util.terminal import say
from ambiseg.config import Config
from ambiseg.data.module import DataModule
from ambiseg.familiarity import FEWEST, FILE, look_at
from ambiseg.runs import Run

_MOST = 512  # images of each part
_STEP = 3.0  # how many times as long a training step takes as a prediction of the same pixels
_SHARE, _LIMIT = 0.05, 0.25  # of the training's time: what it may take, and what the fewest images may take


def leave_look(run: Run, data: DataModule, device: torch.device | str, show: bool) -> None:
    """Write ``look.npz`` for the best weights of a training that has ended, or say in one line why not.

    Nothing here makes the training fail, whose files are all there.
    """
    command = f"`ambiseg look {shlex.quote(str(run.folder))}`"
    try:
        most = affordable(run.config, data)
        if most < FEWEST:
            raise ConfigError(f"it would take long beside this training; {command} makes it")
        look_at(run, data, most=most, device=device, quiet=not show).save(run.folder / FILE)
    except Exception as error:  # a method of one's own, a full disk, data that are gone: the run is whole without
        if show:
            text = " ".join(str(error).removeprefix(f"{run.folder}: ").split()) or type(error).__name__
            say(f"note: no {FILE}, by which predictions say when a person must look: {text}")


def affordable(config: Config, data: DataModule) -> int:
    """How many images of each part may be looked at; 0 where the fewest would take long beside the training.

    Pixels are counted instead of seconds, so that the same training always leaves the same file.
    """
    if any(not data.indices(part) if part in data.split.parts else True for part in ("train", "val")):
        return FEWEST  # which says what is missing
    trained = config.trainer.epochs * len(data.indices("train")) * config.data.windows * _pixels(data, config.data.size)
    images = _STEP * trained / (2 * _pixels(data, config.data.eval_size))  # of each part, in the training's time
    if images * _LIMIT < FEWEST:
        return 0
    return min(_MOST, max(FEWEST, int(images * _SHARE)))


def _pixels(data: DataModule, size: Any) -> int:
    height, width = (size, size) if isinstance(size, int) else size or data.cases.size_of(data.indices("train")[0])
    return height * width
