"""A run as one typed configuration: recipes, YAML files and the command line all fill in these dataclasses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ambiseg import schema
from ambiseg._util.errors import ConfigError
from ambiseg.data.config import DataConfig


def _known(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        close = get_close_matches(value, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}: expected one of {', '.join(known)}, found {value!r}{hint}")


def _at_least(section: str, settings: Any, **least: float) -> None:
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{section}.{name}: expected at least {low}, found {value}")


def _above_zero(section: str, settings: Any, **most: float) -> None:
    for name, high in most.items():
        value = getattr(settings, name)
        if value is not None and not 0 < value <= high:
            limit = "" if high == float("inf") else f" and at most {high:g}"
            raise ConfigError(f"{section}.{name}: expected more than 0{limit}, found {value}")


@dataclass
class ModelConfig:
    """The network and its method. Channels and classes come from the data.

    Args:
        method: mose, or another key of ``ambiseg.METHODS``.
        backbone: unet, unet-light or deeplabv3plus.
        channels: features of each level of a U-Net of another width; nothing takes the backbone's own.
        convs: convolutions in each block of a U-Net.
        momentum: how fast batch statistics follow, 0.01 as published; short runs want 0.1.
        experts: K, the number of experts.
        samples: S, samples of each expert in training.
        latent: L, the dimension of an expert's Gaussian.
        cost: of a pair of masks: iou or ce.
        class_weights: of pixels by their class, for ce, one a class; nothing is equal.
        beta: weight of the KL term.
        solver: greedy as in the paper, or exact.
        kl: the paper's KL term, or scaled as in the released code.
        stochastic: experts are Gaussians; false makes each a single point.
        diagonal: one standard deviation for each latent dimension instead of one an expert.
        expert_weights: learned by the gate, or uniform.
        gate_level: where the gate of a U-Net looks, as a fraction of the way down; 1 is the bottom.
        inject_level: where latents enter a U-Net, as a fraction of the way up; 1 is the last features.
        head: three 1×1 convolutions as in the paper, or the released code's head.
        hidden: features of the head.
        objective: transport, or all-pairs for comparison.
        form: weighted, or gumbel for comparison.
    """

    method: str = "mose"
    backbone: Literal["unet", "unet-light", "deeplabv3plus"] = "unet"
    channels: list[int] | None = None
    convs: int = 3
    momentum: float = 0.01
    experts: int = 4
    samples: int = 4
    latent: int = 1
    cost: Literal["iou", "ce"] = "iou"
    class_weights: list[float] | None = None
    beta: float = 1.0
    solver: Literal["greedy", "exact"] = "greedy"
    kl: Literal["paper", "released"] = "paper"
    stochastic: bool = True
    diagonal: bool = False
    expert_weights: Literal["learned", "uniform"] = "learned"
    gate_level: float = 1.0
    inject_level: float = 1.0
    head: Literal["paper", "released"] = "paper"
    hidden: int = 32
    objective: Literal["transport", "all-pairs"] = "transport"
    form: Literal["weighted", "gumbel"] = "weighted"

    def __post_init__(self) -> None:
        from ambiseg.methods import METHODS

        _known("model.method", self.method, list(METHODS))
        _at_least("model", self, convs=1, experts=1, samples=1, latent=1, hidden=1, beta=0)
        _above_zero("model", self, momentum=1, gate_level=1, inject_level=1)
        if self.channels is not None and (len(self.channels) < 2 or min(self.channels) < 1):
            raise ConfigError(f"model.channels: expected two levels or more of at least 1, found {self.channels}")


@dataclass
class Schedule:
    """A setting that moves while a network trains.

    Args:
        kind: constant (the first value); linear (from the first value to the last, over ``epochs``); plateau (to the
            next value when the training loss has not improved for more than ``patience`` epochs).
        values: one for constant, two for linear, any number for plateau.
        epochs: how long linear takes.
        warm_up: epochs at the first value before linear begins.
        patience: epochs without improvement that plateau bears.
    """

    kind: Literal["constant", "linear", "plateau"] = "constant"
    values: list[float] = field(default_factory=lambda: [1.0])
    epochs: int = 1
    warm_up: int = 0
    patience: int = 10

    def __post_init__(self) -> None:
        wanted = {"constant": 1, "linear": 2}.get(self.kind)
        if not self.values or (wanted is not None and len(self.values) != wanted):
            noun = "value" if wanted == 1 else "values"
            raise ConfigError(f"schedule: {self.kind} expects {wanted or 'some'} {noun}, found {self.values}")
        for name, low in (("epochs", 1), ("warm_up", 0), ("patience", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"schedule: expected {name} of at least {low}, found {getattr(self, name)}")


@dataclass
class SchedulesConfig:
    """What moves during training.

    Args:
        capacity: γ, how much annotation mass one sample may take; small values spread the experts at first.
        group_threshold: G₀, experts whose masks are more alike than this count as one; 1 is off.
        samples: S, samples of each expert; nothing takes ``model.samples``.
        annealing: how far annotation weights have gone from uniform (0) to their own (1).
    """

    capacity: Schedule = field(default_factory=Schedule)
    group_threshold: Schedule = field(default_factory=Schedule)
    samples: Schedule | None = None
    annealing: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "capacity": (0, 1), "group_threshold": (0, 1), "samples": (1, float("inf")), "annealing": (0, 1)
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            schedule = getattr(self, name)
            if schedule is not None and not all(low <= value <= high for value in schedule.values):
                between = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
                raise ConfigError(f"schedules.{name}: expected values {between}, found {schedule.values}")


@dataclass
class OptimizerConfig:
    """Adam.

    Args:
        lr: learning rate.
        weight_decay: as a penalty on the squared weights.
        decay: constant; linear or cosine to ``min_lr`` over the whole run, step by step; or plateau: times ``factor``
            when the training loss has not improved for more than ``patience`` epochs.
        min_lr: the smallest learning rate.
        factor: of plateau.
        patience: of plateau, in epochs.
        warm_up: steps over which the learning rate rises from 0.
        clip: largest norm of the gradient; nothing does not clip.
        average: keep an exponential average of the weights with this memory (0.998 remembers some 500 steps), and
            validate and save that one; 0 does not.
    """

    lr: float = 1e-4
    weight_decay: float = 1e-5
    decay: Literal["constant", "linear", "cosine", "plateau"] = "constant"
    min_lr: float = 1e-5
    factor: float = 0.5
    patience: int = 10
    warm_up: int = 0
    clip: float | None = None
    average: float = 0.0

    def __post_init__(self) -> None:
        _above_zero("optimizer", self, lr=float("inf"), factor=1, clip=float("inf"))
        _at_least("optimizer", self, weight_decay=0, min_lr=0, patience=0, warm_up=0, average=0)
        if self.average >= 1:
            raise ConfigError(f"optimizer.average: expected less than 1, found {self.average}")


@dataclass
class TrainerConfig:
    """How long, and on what.

    Args:
        epochs: passes through the training set.
        accelerator: auto, cpu, gpu, mps and others that Lightning knows.
        devices: how many devices, or which: 2, "0,3", auto.
        num_nodes: machines.
        strategy: auto, ddp and others that Lightning knows.
        precision: 32-true, bf16-mixed, 16-mixed and others that Lightning knows.
        accumulate: batches whose gradients are added before a step.
        channels_last: keep a pixel's features side by side in memory: faster on CPUs and with mixed precision.
        threads: CPU threads of PyTorch; nothing leaves its own choice.
        check_every: epochs from one validation to the next.
        tensorboard: also write TensorBoard logs; needs the package tensorboard.
        deterministic: only algorithms that repeat to the last bit, where a device has a choice.
    """

    epochs: int = 30
    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    accumulate: int = 1
    channels_last: bool = True
    threads: int | None = None
    check_every: int = 1
    tensorboard: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        _at_least("trainer", self, epochs=1, num_nodes=1, accumulate=1, threads=1, check_every=1)


@dataclass
class EvalConfig:
    """How models are compared while they train, and by default afterwards.

    Args:
        samples: masks an image, drawn in standard form.
        protocol: whose way of computing GED and matched IoU, a key of ``ambiseg.PROTOCOLS``.
    """

    samples: int = 16
    protocol: str = "mose"

    def __post_init__(self) -> None:
        from ambiseg.metrics import PROTOCOLS

        _at_least("evaluation", self, samples=1)
        _known("evaluation.protocol", self.protocol, list(PROTOCOLS))


@dataclass
class Config:
    """Everything that decides what a run does.

    Args:
        data: what to load and how.
        model: the network and its method.
        optimizer: how it is fitted.
        schedules: what moves meanwhile.
        trainer: how long and on what.
        evaluation: how models are compared.
        seed: of weights, samples, order and augmentation.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedules: SchedulesConfig = field(default_factory=SchedulesConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data.augment.warps and self.data.size is None:
            raise ConfigError("data.size: expected a window, which rotate and scale of data.augment need, found null")
        schedule = self.schedules.samples
        fewest = self.model.experts * (self.model.samples if schedule is None else round(min(schedule.values)))
        if (smallest := min(self.schedules.capacity.values)) * fewest < 1 - 1e-6:
            found = f"{smallest:g} with {fewest} samples"
            raise ConfigError(
                f"schedules.capacity: expected at least 1/{fewest}, or annotations have nowhere to go, found {found}"
            )


# -- recipes and files -------------------------------------------------------------------------------------------


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(resources.files("ambiseg") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe: the path of a YAML file, or a name in ``recipes/``."""
    text = os.fspath(name)
    if text in recipes():
        return recipes()[text]
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        if not Path(text).is_file():
            raise ConfigError(f"{text}: expected a recipe, found no such file")
        return Path(text)
    close = get_close_matches(text, recipes(), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"recipe: expected one of {', '.join(recipes())} or a YAML file, found {text!r}{hint}")


def parser() -> Any:
    """jsonargparse's parser of a :class:`Config`."""
    from jsonargparse import ArgumentParser

    made = ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False, print_config=None)
    made.add_argument("--config", action="config")
    made.add_class_arguments(Config)
    return made


def parse(arguments: Sequence[str], recipe: str | os.PathLike[str] | None = None) -> Config:
    """A configuration from the command line, over a recipe, over the defaults.

    With another ``--data.name`` than the recipe's, the recipe's ``data.options``, which are of its data, are left out.

    >>> parse(["--model.experts", "8", "--data.options.size", "32"]).model.experts
    8
    >>> parse(["--model.expert", "8"])
    Traceback (most recent call last):
    ambiseg._util.errors.ConfigError: --model.expert: no such setting; did you mean --model.experts?
    """
    made, given = parser(), []
    config = Config()
    if recipe is not None:
        path = find_recipe(recipe)
        with _named(f"{path}: "):
            schema.check(Config, schema.read_yaml(path))
            given = ["--config", str(path)]
            config = _build(made, given)
    if not arguments:
        return config
    with _named():
        schema.check_arguments(Config, arguments)
        changed = _build(made, [*given, *arguments])
        if changed.data.name != config.data.name:  # options are of one data set: another has no use for the recipe's
            changed.data.options = made.parse_args(list(arguments)).as_dict()["data"]["options"]
        return changed


def load(path: str | os.PathLike[str]) -> Config:
    """The configuration that a YAML file holds."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a configuration, found no such file")
    return parse([], path)


def dump(config: Config) -> str:
    """YAML of all settings, defaults included, in the order of the dataclasses."""
    import yaml

    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """With lists for tuples, which YAML has not."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _build(made: Any, arguments: Sequence[str]) -> Config:
    values = made.parse_args(list(arguments)).as_dict()
    return schema.build(Config, {name: values[name] for name in Config.__dataclass_fields__})


@contextmanager
def _named(file: str = "") -> Iterator[None]:
    """One line for whatever does not fit. ``schema.check`` has worded nearly all of it before jsonargparse could."""
    from jsonargparse import ArgumentError

    try:
        yield
    except (ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(file + " ".join(str(error).split()).removeprefix(file)) from None
