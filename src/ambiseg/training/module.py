"""A method in training, as Lightning runs it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ambiseg.config import Config, OptimizerConfig
from ambiseg.data.loader import Batch, seed_of
from ambiseg.methods.base import Method, Stratified
from ambiseg.methods.drawing import draw, unbiased_ged
from ambiseg.methods.schedules import Plateau
from ambiseg.metrics import compare
from ambiseg.transport import NotFiniteError

_SCORES = ("val_ged", "val_ged_unbiased", "val_masks", "val_matched_iou")


class NonFiniteLoss(RuntimeError):
    """The loss of a batch is nan or infinite."""


class TrainingModule(LightningModule):
    """A method, its optimisers and everything that moves while it is trained.

    A training step goes through the phases that the method names, one optimiser each. Whatever is random in a step
    comes from (seed, epoch, process, step), and whatever moves is a function of the step or is in the checkpoint: a run
    that is resumed at the end of an epoch goes on to the bit as if it had not stopped.

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
        self.automatic_optimization = False
        self.model, self.config, self.evaluated = model, config, evaluated
        self.average = copy.deepcopy(model).requires_grad_(False) if config.optimizer.average else None
        self.groups = model.parameter_groups()
        self.schedules = {name: schedule.start() for name, schedule in config.model.schedules.items()}
        optimizer = config.optimizer
        self.rate = Plateau(_rates(optimizer), optimizer.patience) if optimizer.decay == "plateau" else None
        self.steps = 0
        self.history: list[dict[str, float]] = []
        self.offending: Batch | None = None
        self._phases: tuple[str, ...] = ()
        self._recover = recover
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.recent: dict[str, float] = {}  # the means when they were last looked at, for a progress bar
        self._bad = torch.tensor(math.inf)
        self._scores: dict[str, list[Tensor]] = {name: [] for name in _SCORES}
        self.allow_zero_length_dataloader_with_multiple_devices = True  # fewer validation batches than processes

    @property
    def chosen(self) -> Method:
        """The weights that are validated and saved: the average where there is one."""
        return self.model if self.average is None else self.average  # type: ignore[return-value]

    # -- training ----------------------------------------------------------------------------------------------

    def scheduled(self) -> dict[str, float]:
        """The values of the settings that move, in this epoch."""
        return {name: schedule.value for name, schedule in self.schedules.items()}

    def on_train_epoch_start(self) -> None:
        self._sums, self._bad = {}, torch.tensor(math.inf, device=self.device, dtype=torch.double)
        self.recent = {}

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        seed = seed_of(self.config.seed, "samples", self.current_epoch, self.global_rank, batch_idx)
        generator = torch.Generator(self.device).manual_seed(seed)
        accumulate = self.config.trainer.accumulate
        last = (batch_idx + 1) % accumulate == 0 or self.trainer.is_last_batch
        optimizers = dict(zip(self.groups, _listed(self.optimizers()), strict=True))
        losses, several = [], len(self.groups) > 1
        if batch_idx % accumulate == 0:  # all batches of a step go through the same phases
            self._phases = tuple(self.model.phases(self.steps))
        for phase in self._phases:
            optimizer = optimizers[phase]
            for group in optimizer.param_groups:
                group["lr"] = self.rate_at(self.steps, phase)
            if several:
                self.toggle_optimizer(optimizer)  # the other parts stand still, and cost no gradient
            try:
                extra = {"phase": phase} if several else {}
                scheduled = self.scheduled()
                terms = self.model.loss(batch.images, batch.annotations, generator=generator, **scheduled, **extra)
            except NotFiniteError:  # on a CPU the coupling looks
                self._stop(batch_idx)
            losses.append(terms.pop("total"))
            names = {f"{phase}_{name}": value for name, value in terms.items()} if several else terms
            self._add(names | ({f"{phase}_loss": losses[-1]} if several else {}))
            self.manual_backward(losses[-1] / accumulate)
            if last:
                self.clip_gradients(optimizer, self._largest_norm(), "norm")
                optimizer.step()
                optimizer.zero_grad()
            if several:
                self.untoggle_optimizer(optimizer)
        self._look(sum(losses[1:], start=losses[0]), batch_idx)
        if last:
            self.steps += 1
            if self.average is not None:
                self._average()

    def _largest_norm(self) -> float | None:
        """What gradients are clipped to. With 16-mixed they are still multiplied by the scale of the loss."""
        clip, scaler = self.config.optimizer.clip, getattr(self.trainer.precision_plugin, "scaler", None)
        return clip if clip is None or scaler is None else clip * scaler.get_scale()

    def _add(self, terms: dict[str, Tensor]) -> None:
        """Sums of the epoch and how many there are, on the device."""
        for name, value in terms.items():
            value = value.detach().double()
            total, count = self._sums.get(name, (torch.zeros_like(value), torch.zeros_like(value)))
            self._sums[name] = total + value, count + 1

    def _look(self, loss: Tensor, step: int) -> None:
        """Count the loss; the first step that was not finite is looked up without waiting for the device."""
        self._add({"loss": loss})
        self._bad = torch.minimum(self._bad, torch.where(loss.detach().isfinite(), math.inf, float(step)))
        if self._bad.is_cpu or step % 50 == 49:
            self._check()
            self.recent = self.means()

    def _check(self) -> None:
        if math.isfinite(step := float(self._bad)):
            self._stop(int(step))

    def _stop(self, step: int) -> NoReturn:
        if self._recover is not None:
            self.offending = self._recover(self.current_epoch, step)
        names = f" for {', '.join(self.offending.names)}" if self.offending is not None else ""
        raise NonFiniteLoss(f"epoch {self.current_epoch + 1}, step {step + 1}: the loss is not finite{names}")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
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
        memory = min(self.config.optimizer.average, (1 + self.steps) / (10 + self.steps))  # forget the first steps soon
        for kept, new in zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, 1 - memory)
            else:
                kept.copy_(new)

    def means(self) -> dict[str, float]:
        """Means of the loss and its terms over the epoch so far, in this process."""
        return {name: float(total / count) for name, (total, count) in self._sums.items()}

    def on_train_epoch_end(self) -> None:
        self._check()
        self._sums = {name: (self.all_reduce(x), self.all_reduce(n)) for name, (x, n) in self._sums.items()}
        means = self.means()
        row = {
            "epoch": self.current_epoch + 1,
            "step": self.steps,
            "lr": self.rate_at(max(self.steps - 1, 0)),
            **self.scheduled(),
            "loss": means.pop("loss"),
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

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        setting, made = self.config.optimizer, []
        for group in self.groups.values():
            lr = group.scale * (setting.lr if group.lr is None else group.lr)
            made.append(torch.optim.Adam(group.decayed(setting.weight_decay), lr=lr, betas=group.betas))
        return made

    def rate_at(self, step: int, phase: str | None = None) -> float:
        """The learning rate of a step, a function of its number (or, on a plateau, of the state in the checkpoint)."""
        setting, group = self.config.optimizer, None if phase is None else self.groups[phase]
        lr = setting.lr if group is None or group.lr is None else group.lr
        rise = min(1.0, (step + 1) / setting.warm_up) if setting.warm_up else 1.0
        if group is not None:
            rise *= group.scale * 0.5 ** sum(step >= epoch * self._per_epoch for epoch in group.milestones)
        if self.rate is not None:
            return rise * self.rate.value * (lr / setting.lr)
        done = min(step / max(self._per_epoch * self.config.trainer.epochs, 1), 1.0)
        share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[setting.decay]
        return rise * max(lr * share, min(setting.min_lr, lr))

    @property
    def _per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-int(self.trainer.num_training_batches) // self.config.trainer.accumulate)

    # -- validation --------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._scores = {name: [] for name in _SCORES}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # The same draws at every epoch, so that epochs differ by their weights alone.
        seed = seed_of(self.config.seed, "validation", batch.names[0])
        generator = torch.Generator(self.device).manual_seed(seed)
        how, predictive = self.config.evaluation, self.chosen.predict_whole(batch.images)
        pair = compare(predictive.sample(how.samples, generator), batch.annotations, self.evaluated, how.protocol)
        self._scores["val_ged"].append(pair.ged())
        self._scores["val_matched_iou"].append(pair.matched_iou())
        strata = 1
        if isinstance(predictive, Stratified):  # as many from every stratum: what is left to chance is within them
            least = 2 * predictive.weights.shape[1]
            drawn, strata = draw(predictive, "compact", max(how.samples, least), generator)
            pair = compare(drawn, batch.annotations, self.evaluated, how.protocol)
        self._scores["val_ged_unbiased"].append(unbiased_ged(pair, strata))
        self._scores["val_masks"].append(pair.iou.new_full((len(pair.pred),), pair.pred.count))

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
            "steps": self.steps,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["ambiseg"]
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state["schedules"][name])
        if self.rate is not None:
            self.rate.load_state_dict(state["rate"])
        self.history = list(state["history"])
        self.steps = state.get("steps", int(self.history[-1]["step"]))  # version 0.1 had it in the history alone


def _listed(optimizers: Any) -> list[Any]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def _rates(setting: OptimizerConfig) -> list[float]:
    rates = [setting.lr]
    while rates[-1] * setting.factor > setting.min_lr:
        rates.append(rates[-1] * setting.factor)
    return [*rates, setting.min_lr] if rates[-1] > setting.min_lr else rates
