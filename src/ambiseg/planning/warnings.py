"""What a training cannot learn as it is configured: said before it begins, each with what to type instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ambiseg._util.text import count, percent, shape_text, some
from ambiseg.config import Config
from ambiseg.data.loader import steps_per_epoch
from ambiseg.methods import method_named
from ambiseg.methods.facts import Facts

FEW = 200  # steps from which a small network learns something
FORGOTTEN = 0.05  # share of their initial values that batch statistics may keep
SEEN = 0.5  # share of an image that validation and test should see


class Warned(NamedTuple):
    """What is wrong, and what to type instead."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def warnings(config: Config, facts: Facts) -> list[Warned]:
    """Everything about a training that keeps it from learning, as far as that can be known before."""
    return [*_about_data(config, facts), *_about_windows(config, facts), *_about_length(config, facts)]


def _about_data(config: Config, facts: Facts) -> Iterator[Warned]:
    marked = [facts.classes[c] for c in facts.evaluated if facts.shares[c]]
    if not marked:
        yield Warned(
            "no pixel of the training part is marked", "there is nothing to learn; `ambiseg data check` shows why"
        )
    elif facts.unmarked:
        what = f"{some(facts.unmarked)} marked in no training image, and cannot be learned"
        yield Warned(what, f"another split with --data.split_seed {config.data.split_seed + 1}, or more images")
    if facts.readers == 1:
        what = "one annotator per training image, so that disagreement shows only between images"
        yield Warned(what, "add the masks of other annotators as masks/<reader>/")
    elif facts.identical:
        what = "all annotators agree on every pixel of the training part, so that there is no disagreement to learn"
        yield Warned(what, "`ambiseg data check` lists annotators whose masks are copies")
    if facts.val_patients < 2:
        what = f"the validation part has {count(facts.val_patients, 'patient')}, by which the best epoch is chosen"
        yield Warned(what, "--data.fractions '{train: 0.6, val: 0.2, test: 0.2}'")
    if facts.patients < 5:
        what = f"{count(facts.patients, 'patient')} in the training part will hardly stand for others"
        yield Warned(what, "add images of more patients")


def _about_windows(config: Config, facts: Facts) -> Iterator[Warned]:
    data = config.data
    if data.size is not None:
        window = (data.size, data.size) if isinstance(data.size, int) else data.size
        multiple = _multiple(config)
        room = [-(-length // multiple) * multiple for length in facts.median]
        if any(want > have for want, have in zip(window, room, strict=True)):
            what = f"windows of {shape_text(window)} are larger than images of {shape_text(facts.median)}, and mirrored"
            side = max(multiple, min(room))
            yield Warned(what, f"--data.size {side}")
    if data.eval_size is not None:
        seen = (data.eval_size, data.eval_size) if isinstance(data.eval_size, int) else data.eval_size
        share = math.prod(min(a, b) for a, b in zip(seen, facts.median, strict=True)) / math.prod(facts.median)
        if share < SEEN:
            where = f"the middle {shape_text(seen)} of images of {shape_text(facts.median)}"
            what = f"validation and test see {where}, {percent(share)} of their pixels"
            yield Warned(what, "--data.eval_size null")


def _multiple(config: Config) -> int:
    """What the backbone pads images to, as far as its settings tell."""
    if not method_named(config.model.method).uses_backbone:
        return 1
    levels = len(config.backbone.channels or ()) or {"unet-light": 4}.get(config.backbone.name, 7)
    return config.backbone.scale * 2 ** (levels - 1)


def _about_length(config: Config, facts: Facts) -> Iterator[Warned]:
    data, trainer, optimizer = config.data, config.trainer, config.optimizer
    windows = facts.images * data.windows
    batch = data.batch_size * _processes(config)
    per_epoch = -(-steps_per_epoch(facts.images, batch, data.windows) // trainer.accumulate)
    steps = per_epoch * trainer.epochs
    if batch > windows:
        what = f"batches of {batch} from {count(windows, 'training window')} per epoch"
        yield Warned(what, f"--data.batch_size {max(1, facts.images // _processes(config))}, or --data.windows")
    if steps < FEW:
        more = -(-FEW * 2 // per_epoch)
        what = f"{count(steps, 'step')} in all ({per_epoch} per epoch), too few to learn from"
        yield Warned(what, f"--data.windows {-(-FEW * 2 // steps) * data.windows}, or --trainer.epochs {more}")
    if steps < 2 * optimizer.warm_up:
        what = f"the learning rate rises over {optimizer.warm_up} steps, of {steps} in all"
        yield Warned(what, f"--optimizer.warm_up {steps // 20}")
    left = (1 - config.backbone.momentum) ** steps
    normed = method_named(config.model.method).uses_backbone and config.backbone.name in ("unet", "unet-light")
    if normed and left > FORGOTTEN:
        what = f"after {count(steps, 'step')} batch statistics still hold {percent(left)} of their initial values"
        fast = min(1.0, max(0.1, math.ceil(100 * (1 - FORGOTTEN ** (1 / max(steps, 1)))) / 100))
        yield Warned(what, f"--backbone.momentum {fast:g}")
    for name, schedule in config.model.schedules.items():
        end = schedule.warm_up + schedule.epochs
        if schedule.kind == "linear" and end > trainer.epochs:
            what = f"model.{name} arrives at {schedule.values[-1]:g} after {end} epochs, and there are {trainer.epochs}"
            half, rise = trainer.epochs // 2, "epochs"
            shorter = f"--model.{name}.warm_up {min(schedule.warm_up, half)} --model.{name}.{rise} {max(1, half // 2)}"
            yield Warned(what, f"{shorter}, or --trainer.epochs {2 * end}")
    if trainer.check_every > trainer.epochs:
        what = f"validation every {trainer.check_every} epochs never runs in {trainer.epochs}"
        yield Warned(what, f"--trainer.check_every {trainer.epochs}")


def _processes(config: Config) -> int:
    devices = config.trainer.devices
    return (devices if isinstance(devices, int) and devices > 0 else 1) * config.trainer.num_nodes
