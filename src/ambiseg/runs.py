"""The folder of a run: what was asked for, what came of it, and everything needed to load it or to go on.

=====================  ============================================================================================
``config.yaml``        every setting, defaults included
``run.json``           the data's classes and intensity, precision, versions, seeds, the command
``split.json``         which case is in which part, with a fingerprint of the data
``metrics.csv``        one line per epoch
``cost.json``          CPU and wall time of the training so far
``look.npz``           what images of the training are like: by training when it ends, or by ``ambiseg look``
``calibration.json``   what ``ambiseg calibrate`` found out about the best weights, if it was run
``best.safetensors``   weights of the epoch with the smallest unbiased validation GED; the last until one has any
``last.safetensors``   weights of the last epoch
``best.ckpt``          the same with optimiser and schedules, to go on from
``last.ckpt``          what ``ambiseg train --resume`` takes up
=====================  ============================================================================================

Every file is replaced as a whole: whenever a run is killed, its folder is that of the last finished epoch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from ambiseg import config as configuration
from ambiseg import costs
from ambiseg import history as metrics
from ambiseg._util.errors import ConfigError
from ambiseg._util.files import Lock, atomic_folder, contents, made, write_text
from ambiseg._util.reading import read_json, validated
from ambiseg._util.shipped import shipped
from ambiseg._util.text import did_you_mean
from ambiseg._util.watch import ProcessLost
from ambiseg.config import Config
from ambiseg.costs import Cost
from ambiseg.data.case import Cases, Extra, Reading
from ambiseg.data.intensity import Intensity
from ambiseg.data.splits import Split
from ambiseg.data.values import Values
from ambiseg.methods import Method, Predictive, method_named
from ambiseg.weights import read_weights

_FORMAT = "ambiseg.Run/1"
_BEGUN = ("run.json", "split.json", "config.yaml")  # what is there before the first epoch is finished
Which = Literal["best", "last"]
_MOST = 1 << 16  # channels or classes


@dataclass(frozen=True)
class Card:
    """What a model's numbers mean: the classes, and how raw images become its input.

    Attributes:
        classes: names of the class ids.
        evaluated: class ids that metrics look at.
        channels: of the images.
        intensity: how raw values become input.
        title: of the training data.
        stratum: what the method calls a stratum; empty for methods without.
        units: of raw values; empty where they are not known.
        values: distribution of the raw values of the training images; ``None`` for runs of earlier versions.
        size: height and width of the largest image that the model was trained or validated on.
        reading: how the training images' files were read.
        extra: the last channels, where they are another model's prediction.
    """

    classes: tuple[str, ...]
    evaluated: tuple[int, ...]
    channels: int
    intensity: Intensity
    title: str
    stratum: str = ""
    units: str = ""
    values: Values | None = None
    size: tuple[int, int] | None = None
    reading: Reading = field(default_factory=Reading)
    extra: Extra | None = None

    @staticmethod
    def of(
        cases: Cases,
        intensity: Intensity,
        method: type[Method],
        values: Values | None = None,
        size: tuple[int, int] | None = None,
    ) -> Card:
        """The card of a model that is trained on ``cases``; ``values`` and ``size`` as in the attributes."""
        about = tuple(cases.classes), tuple(cases.evaluated), cases.channels, intensity, cases.title
        return Card(*about, method.stratum, cases.units, values, size, cases.reading, cases.extra)

    def prepare(self, images: Tensor) -> Tensor:
        """Raw images ``[B, C, H, W]``, in the units of the training data, as the model's input."""
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(f"expected images [B, {self.channels}, H, W], found {list(images.shape)}")
        return self.intensity(images)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A method with trained weights, and what its numbers mean.

    Attributes:
        method: the network, in evaluation mode.
        card: its classes, and how raw images become its input.
        run, which: the run that it is from, and of which of its weights.
    """

    method: Method
    card: Card
    run: str = "memory"
    which: str = ""

    def predict(self, images: Tensor) -> Predictive:
        """Prepared images ``[B, C, H, W]`` -> their predictive distribution; raw ones go through ``card.prepare``."""
        return self.method.predict(images)

    def to(self, device: torch.device | str) -> TrainedModel:
        """The same model, moved to a device."""
        self.method.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.method.parameters()).device


def build_model(config: Config, channels: int, classes: int) -> Method:
    """The network that a configuration describes, with fresh weights from PyTorch's global generator."""
    try:
        return method_named(config.model.method).build(config.model, config.backbone, channels, classes)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None


class _Record(BaseModel):
    """What ``run.json`` holds, as far as anything reads it; it may hold more."""

    model_config = ConfigDict(extra="allow")

    format: str
    data: Card
    command: list[str] = []
    started: str = ""
    seed: int = 0
    precision: str = ""
    warnings: list[str] = []
    reasons: dict[str, str] = {}
    members: list[dict[str, str]] = []

    @model_validator(mode="after")
    def _fits(self) -> _Record:
        """Numbers of channels and classes decide how large a network is, and others index by them."""
        card = self.data
        raw = card.channels - (card.extra.classes if card.extra else 0)
        shown = [len(rows) for rows in vars(card.values).values() if isinstance(rows, tuple)] if card.values else []
        scaled = [len(x) for x in (card.intensity.mean, card.intensity.std) if isinstance(x, tuple)]
        for part, fits in (
            ("channels", 1 <= card.channels <= _MOST and raw >= 0),
            ("classes", 1 <= len(card.classes) <= _MOST),
            ("evaluated", all(0 <= one < len(card.classes) for one in card.evaluated)),
            ("size", card.size is None or min(card.size) >= 1),
            ("values", all(length == raw for length in shown)),
            ("intensity", all(length == card.channels for length in scaled)),
        ):
            if not fits:
                raise ValueError(f"{part} of data: {getattr(card, part)}"[:200])
        return self


class Run:
    """A run's folder, opened for reading."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: expected the folder of a run, found none")
        about = self.folder / "run.json"
        if not about.exists():
            raise ConfigError(f"{self.folder}: expected the folder of a run with run.json in it, found no such file")
        self.about: dict[str, Any] = read_json(about, "a run", finite=False)
        self._record: _Record = validated(_Record, self.about, about, "a run")
        if self._record.format != _FORMAT:
            raise ConfigError(f"{about}: expected a run of format {_FORMAT}, found {self._record.format}")
        self.config: Config = configuration.load(self.folder / "config.yaml")
        self.card = replace(self._record.data, stratum=method_named(self.config.model.method).stratum)
        if "reading" not in self.about["data"]:  # of an earlier version
            options = self.config.data.options
            convert = options.get("channels") == self.card.channels
            self.card = replace(self.card, reading=Reading(options.get("axes"), options.get("axis"), convert))

    @staticmethod
    @contextmanager
    def begin(
        folder: str | os.PathLike[str],
        config: Config,
        card: Card,
        split: Split,
        command: list[str],
        *,
        precision: str | None = None,
        reasons: Mapping[str, str] | None = None,
        warnings: Sequence[str] = (),
        members: Sequence[Mapping[str, str]] = (),
    ) -> Iterator[Run]:
        """A new run, with what is known before the first step, whose folder is locked while the block runs.

        A folder that does not exist appears with all that is in it. Into an empty one, whose place may belong to
        somebody else, ``run.json`` comes last. If the block fails before the first epoch is finished, nothing is left.

        Args:
            precision: the one used, where the configuration may say ``auto``.
            reasons: of settings, by their keys, where the run was planned.
            warnings: what may keep it from learning.
            members: the runs that its weights are put together from; see :mod:`ambiseg.ensembles`.
        """
        about = {
            "format": _FORMAT,
            "command": [word.encode(errors="backslashreplace").decode() for word in command],  # bytes that are no text
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": config.seed,
            "precision": precision or config.trainer.precision,
            "data": card_as_json(card),
            "split": {"fingerprint": split.fingerprint, "rule": str(split.rule)},
            "versions": versions(),
            "git": _commit(),
            "warnings": list(warnings),
            **({"reasons": dict(reasons)} if reasons else {}),
            **({"members": [dict(member) for member in members]} if members else {}),
        }

        def fill(place: Path) -> None:
            write_text(place / "config.yaml", configuration.dump(config, reasons))
            split.save(place / "split.json")
            write_text(place / "run.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")

        place = Path(os.path.realpath(Run.claim(folder)))
        with ExitStack() as stack:
            if place.is_dir():
                stack.enter_context(Lock(place, "training"))
                Run.claim(folder)  # again, now that no other process writes there
                fill(place)
            else:
                stack.enter_context(made(place.parent))
                stack.push(lambda kind, *_: _drop(place) if kind else None)
                with atomic_folder(place, replace=False) as draft:
                    fill(draft)
                    lock = stack.enter_context(Lock(draft, "training"))
                lock.folder = place  # it moved with its folder
            try:
                yield Run(folder)
            except ProcessLost:
                raise
            except Exception:
                _undo(place)
                raise

    def reasons(self, config: Config) -> dict[str, str]:
        """Why settings are what they are, where the run was planned; of those that ``config`` keeps as they were."""
        return {
            key: reason if _setting(config, key) == _setting(self.config, key) else "changed when the run was resumed"
            for key, reason in self._record.reasons.items()
        }

    @staticmethod
    def claim(folder: str | os.PathLike[str]) -> Path:
        """The folder of a new run, or why it cannot be: asked before anything that takes time, and nothing is made."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: expected a folder for the run, found a file")
        # Without run.json the other two are what a run that was killed in its first moment left.
        if folder.is_dir() and set(contents(folder)) - {*_BEGUN[1:]}:
            hint = "resume that run, or choose another folder"
            raise ConfigError(f"{folder}: expected a new or empty folder for the run, found files in it; {hint}")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(there, os.W_OK):
            raise ConfigError(f"{folder}: expected a folder that can be written to, found that {there} cannot")
        return folder

    def digest(self, which: Which = "best") -> str:
        """Hash of the weights: an evaluation with another hash is out of date."""
        return hashlib.blake2b(self._weights(which).read_bytes(), digest_size=16).hexdigest()

    @property
    def members(self) -> list[dict[str, str]]:
        """The runs that the weights were put together from, where they were not trained here."""
        return self._record.members

    @property
    def precision(self) -> str:
        """The precision that the run was begun with; before it was recorded, it was that of the configuration."""
        return self._record.precision or self.config.trainer.precision

    @property
    def split(self) -> Split:
        """Which case was in which part."""
        return Split.load(self.folder / "split.json")

    @property
    def history(self) -> list[dict[str, float]]:
        """``metrics.csv``, one dictionary per epoch; empty cells are left out."""
        return metrics.read(self.folder / "metrics.csv")

    @property
    def cost(self) -> Cost | None:
        """What the training took; ``None`` of runs of earlier versions, and of those that were not trained here."""
        return costs.read(self.folder / costs.FILE)

    def model(self, which: Which = "best", device: torch.device | str = "cpu") -> TrainedModel:
        """The trained network in evaluation mode, with the card of its data."""
        path = self._weights(which)
        with torch.random.fork_rng(devices=[]):  # weights that are about to be replaced take nothing from the caller
            fresh = self.config.model_copy(update={"backbone": self.config.backbone.without_weights()})
            method = build_model(fresh, self.card.channels, len(self.card.classes))
        read_weights(method, path)
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPUs
        return TrainedModel(method.to(device).eval(), self.card, str(self.folder), which)

    def _weights(self, which: Which) -> Path:
        path = self.folder / f"{which}.safetensors"
        if not path.is_file():
            raise ConfigError(f"{path}: expected the weights of a finished epoch, found no such file")
        return path


def _undo(place: Path) -> None:
    """Remove what :meth:`Run.begin` has written, unless more has come of the run."""
    if set(contents(place)) <= {*_BEGUN, "tensorboard"}:
        for name in _BEGUN:  # run.json first: without it the folder can be begun again
            (place / name).unlink(missing_ok=True)
        shutil.rmtree(place / "tensorboard", ignore_errors=True)


def _drop(place: Path) -> None:
    with suppress(OSError):  # not empty
        place.rmdir()


def card_as_json(card: Card) -> dict[str, Any]:
    """A card as ``run.json`` has it, without what the method says."""
    return {key: value for key, value in asdict(card).items() if key != "stratum"}


def load(run: str | os.PathLike[str], which: Which = "best", device: torch.device | str = "cpu") -> TrainedModel:
    """A trained model: the folder of a run, or the name of one that comes with the package, such as ``"demo"``.

    Its ``card`` says what its classes are and prepares raw images: ``model.predict(model.card.prepare(raw))``.
    """
    return open_run(run).model(which, device)


def is_shipped(run: str | os.PathLike[str]) -> bool:
    """Whether a name means a model in the package, into whose folder nothing is written."""
    return os.fspath(run) in shipped() and not Path(run).is_dir()


def open_run(run: str | os.PathLike[str]) -> Run:
    """The folder of a run, or a shipped one by its name (a folder of that name goes first)."""
    if is_shipped(run):
        return Run(shipped()[os.fspath(run)])
    if not Path(run).exists() and (name := os.fspath(run)) == Path(run).name:  # no folder: perhaps a misspelt name
        known = [*shipped()]
        expected = f"the folder of a run, or a model of the package ({', '.join(known)})"
        raise ConfigError(f"{name}: expected {expected}, found neither{did_you_mean(name, known)}")
    return Run(run)


def versions() -> dict[str, str]:
    """Of everything that may change a number."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("ambiseg", "torch", "numpy", "scipy", "POT", "lightning", "torchmetrics"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _setting(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None)
    return found


def _commit() -> str | None:
    """The commit of the source, when the package runs from a checkout."""
    try:
        folder = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5)
        looking = ["git", "--no-optional-locks", "status", "--porcelain"]  # a kill would leave the index locked
        changed = subprocess.run(looking, cwd=folder, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
