"""One method being fitted, as Lightning runs it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ambiseg.config import Config, OptimizerConfig, Schedule
from ambiseg.data.loader import Batch, seed_of
from ambiseg.methods.base import Method
from ambiseg.methods.schedules import Linear, Plateau
from ambiseg.metrics import ged, matched_iou
from ambiseg.transport import NotFiniteError


class NotFinite(RuntimeError):
    """The loss of a batch is nan or infinite."""


class Fitting(LightningModule):
    """A method, its optimiser and everything that moves while it is trained.

    Whatever is random in a step comes from (seed, epoch, process, step), and whatever moves is a function of the step
    or is in the checkpoint: a run that is taken up at an epoch's end goes on to the bit as if it had not stopped.

    Args:
        model: what is trained.
        config: how.
        evaluated: class ids that validation looks at.
        recover: makes the batch of (epoch, step) again, to be saved when its loss is not finite.
    """

    def __init__(
        self,
        model: Method,
        config: Config,
        evaluated: tuple[int, ...],
        recover: Callable[[int, int], Batch] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.config, self.evaluated = model, config, evaluated
        self.average = copy.deepcopy(model).requires_grad_(False) if config.optimizer.average else None
        schedules = config.schedules
        self.schedules: dict[str, Linear | Plateau] = {
            "capacity": make_schedule(schedules.capacity),
            "group_threshold": make_schedule(schedules.group_threshold),
            "annealing": make_schedule(schedules.annealing),
        }
        if schedules.samples is not None:
            self.schedules["samples"] = make_schedule(schedules.samples)
        optimizer = config.optimizer
        self.rate = Plateau(_rates(optimizer), optimizer.patience) if optimizer.decay == "plateau" else None
        self.history: list[dict[str, float]] = []
        self.offending: Batch | None = None
        self._recover = recover
        self._sums: dict[str, Tensor] = {}
        self._scores: dict[str, list[Tensor]] = _no_scores()
        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer validation batches than processes

    @property
    def chosen(self) -> Method:
        """The weights that are validated and saved: the average where there is one."""
        return self.model if self.average is None else self.average  # type: ignore[return-value]

    # -- training ----------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, float]:
        """What the schedules say in this epoch."""
        values = {name: schedule.value for name, schedule in self.schedules.items()}
        if "samples" in values:
            values["samples"] = round(values["samples"])
        return values

    def on_train_epoch_start(self) -> None:
        self._sums = {}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        rate = self.rate_at(self.trainer.global_step)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed = seed_of(self.config.seed, "samples", self.current_epoch, self.global_rank, batch_idx)
        generator = torch.Generator(self.device).manual_seed(seed)
        try:
            terms = self.model.loss(
                batch.images, batch.annotations, generator=generator, **self.settings()
            )
        except NotFiniteError:  # on a CPU the coupling looks
            self._stop(batch_idx)
        self._keep(terms, batch_idx)
        return terms["total"]

    def _keep(self, terms: dict[str, Tensor], step: int) -> None:
        """Sums of the epoch on the device; the first step that was not finite is looked up without waiting for it."""
        values = {name: value.detach().double() for name, value in terms.items()}
        bad = torch.where(values["total"].isfinite(), math.inf, float(step))
        if not self._sums:
            self._sums = {name: torch.zeros_like(value) for name, value in values.items()}
            self._sums |= {"count": torch.zeros_like(bad), "bad": torch.full_like(bad, math.inf)}
        for name, value in values.items():
            self._sums[name] += value
        self._sums["count"] += 1
        self._sums["bad"] = torch.minimum(self._sums["bad"], bad)
        if bad.is_cpu or step % 50 == 49:
            self._check()

    def _check(self) -> None:
        step = float(self._sums["bad"]) if self._sums else math.inf
        if math.isfinite(step):
            self._stop(int(step))

    def _stop(self, step: int) -> NoReturn:
        if self._recover is not None:
            self.offending = self._recover(self.current_epoch, step)
        names = f" for {', '.join(self.offending.names)}" if self.offending is not None else ""
        raise NotFinite(f"epoch {self.current_epoch + 1}, step {step + 1}: the loss is not finite{names}")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.average is not None and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._average()
        if self.trainer.world_size > 1 and self.trainer.is_last_batch:
            self._agree()

    def _agree(self) -> None:
        """Statistics of the first process for all of them, so that what is validated is what will be saved.

        DDP would do so in the first step of validation, and wait for ever for a process that has no validation batch.
        """
        for buffer in self.buffers():
            torch.distributed.broadcast(buffer, 0)
        if isinstance(self.trainer.model, DistributedDataParallel):
            self.trainer.model.require_forward_param_sync = False  # until the next step in training

    @torch.no_grad()
    def _average(self) -> None:
        assert self.average is not None
        steps = self.trainer.global_step
        memory = min(self.config.optimizer.average, (1 + steps) / (10 + steps))  # the first steps are soon forgotten
        for kept, new in zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, 1 - memory)
            else:
                kept.copy_(new)

    def on_train_epoch_end(self) -> None:
        self._check()
        sums = {name: self.all_reduce(value) for name, value in self._sums.items() if name != "bad"}
        means = {name: float(value / sums["count"]) for name, value in sums.items() if name != "count"}
        row = {
            "epoch": self.current_epoch + 1,
            "step": self.trainer.global_step,
            "lr": self.rate_at(max(self.trainer.global_step - 1, 0)),
            **self.settings(),
            "loss": means.pop("total"),
            **means,
            **self._validated(),
        }
        for schedule in (*self.schedules.values(), *([self.rate] if self.rate else [])):
            schedule.update(row["loss"])
        self.history.append(row)
        for logger in self.loggers:
            logger.log_metrics({key: value for key, value in row.items() if key != "epoch"}, self.current_epoch + 1)

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return self.trainer.strategy.reduce(value, reduce_op="sum")  # type: ignore[return-value]

    # -- learning rate -----------------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.config.optimizer
        groups = self.model.parameter_groups()
        if len(groups) > 1:
            raise NotImplementedError(f"one optimiser for now, found parameter groups {', '.join(groups)}")
        parameters = [p for group in groups.values() for p in group]
        return torch.optim.Adam(parameters, lr=optimizer.lr, weight_decay=optimizer.weight_decay)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, a function of its number (or, on a plateau, of the state in the checkpoint)."""
        setting = self.config.optimizer
        rise = min(1.0, (step + 1) / setting.warm_up) if setting.warm_up else 1.0
        if self.rate is not None:
            return rise * self.rate.value
        done = min(step / max(int(self.trainer.estimated_stepping_batches), 1), 1.0)
        share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[setting.decay]
        return rise * max(setting.lr * share, min(setting.min_lr, setting.lr))

    # -- validation --------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._scores = _no_scores()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # The same draws at every epoch, so that epochs differ by their weights alone.
        seed = seed_of(self.config.seed, "validation", batch.names[0])
        generator = torch.Generator(self.device).manual_seed(seed)
        how = self.config.evaluation
        drawn = self.chosen.predict(batch.images).sample(how.samples, generator)
        options = {"classes": self.evaluated, "protocol": how.protocol}
        self._scores["val_ged"].append(ged(drawn, batch.annotations, **options))
        self._scores["val_ged_unbiased"].append(ged(drawn, batch.annotations, unbiased=True, **options))
        self._scores["val_matched_iou"].append(matched_iou(drawn, batch.annotations, **options))

    def _validated(self) -> dict[str, float]:
        """Means over the images of all processes.

        Taken at the end of the epoch, which every process reaches: one without a batch of its own skips validation
        with all its hooks, and the others would wait for it.
        """
        if (self.current_epoch + 1) % (self.trainer.check_val_every_n_epoch or 1):
            return {}
        validated = {}
        for name, parts in self._scores.items():
            scores = torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.double, device=self.device)
            scores = scores[scores.isfinite()]
            total, count = (self.all_reduce(x) for x in (scores.sum(), scores.new_tensor(len(scores))))
            validated[name] = float(total / count) if float(count) else math.nan
        return validated

    # -- checkpoints -------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ambiseg"] = {
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
            "rate": None if self.rate is None else self.rate.state_dict(),
            "history": self.history,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["ambiseg"]
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state["schedules"][name])
        if self.rate is not None:
            self.rate.load_state_dict(state["rate"])
        self.history = list(state["history"])


def _no_scores() -> dict[str, list[Tensor]]:
    return {"val_ged": [], "val_ged_unbiased": [], "val_matched_iou": []}


def make_schedule(setting: Schedule) -> Linear | Plateau:
    """The schedule that a setting describes."""
    if setting.kind == "linear":
        return Linear(setting.values[0], setting.values[1], setting.epochs, setting.warm_up)
    return Plateau(setting.values, setting.patience)  # a single value stays


def _rates(setting: OptimizerConfig) -> list[float]:
    rates = [setting.lr]
    while rates[-1] * setting.factor > setting.min_lr:
        rates.append(rates[-1] * setting.factor)
    return [*rates, setting.min_lr] if rates[-1] > setting.min_lr else rates
