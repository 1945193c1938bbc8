"""Every command that writes files, as small as it can be, and what its user types next after it was stopped."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.trace import ended, started

Command = tuple[str, ...]
Program = Callable[[Command], int]

_SHAPES = ("--data.name=shapes", "--data.options={count: 24, size: 32}", "--data.size=32")
_SMALL = (
    *("--data.batch_size=8", "--backbone.channels=[4, 8]", "--model.experts=2", "--model.samples=2"),
    *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.threads=1", "--quiet"),
)
_TRAIN = ("train", "demo", *_SHAPES, *_SMALL, "--trainer.epochs=2", "--out", "run")
_EXPORT = ("data", "export", "shapes", "--set", "count=14", "--set", "size=32", "--quiet", "--out")


@dataclass(frozen=True)
class Scenario:
    """One command in a folder that holds what it needs.

    Attributes:
        command: what is typed.
        given: commands that were run before, in order; the keys of :data:`BEFORE` are allowed among them.
        next: what is typed after the command was stopped; the same again, if it does not say.
        appears: folders (patterns) that are there with all that belongs into them, or not at all.
        run: the folder of a run that is written.
        known: names that a message may use for what could not be written.
        codes: exit codes of the command when a file cannot be written.
        environment: variables that are set.
        weight: how often it is disturbed; those that draw figures take longest, and are mostly what others are.
    """

    command: Command
    given: tuple[Command | str, ...] = ()
    next: Callable[[Path, Command], Command] = lambda place, command: command
    appears: tuple[str, ...] = ()
    run: str | None = None
    known: tuple[str, ...] = ()
    codes: tuple[int, ...] = (2,)
    environment: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0


def _resumed(place: Path, command: Command) -> Command:
    return ("train", "--resume", "run", "--quiet") if (place / "run" / "run.json").is_file() else command


def _skipping(place: Path, command: Command) -> Command:
    return command if {"--overwrite", "--skip-existing"} & {*command} else (*command, "--skip-existing")


def _crops(place: Path) -> None:
    from tests.lidc_fakes import crops, write_pickle

    write_pickle(place / "data_lidc.pickle", crops(6), 2)


def _hdf5(place: Path) -> None:
    from tests.lidc_fakes import crops, write_hdf5

    write_hdf5(place / "lidc.hdf5", crops(8))


def _images(place: Path) -> None:
    (place / "new").mkdir()
    for file in sorted((place / "scans" / "images").iterdir())[:3]:
        shutil.copy2(file, place / "new")


BEFORE: dict[str, Callable[[Path], None]] = {"crops": _crops, "hdf5": _hdf5, "images": _images}
"""What is made by hand before a command."""

_SCANS = (*_EXPORT, "scans")
_PREDICT = ("predict", "run", "new", "--out", "masks", "--per-stratum", "2", "--quiet")
_PREDICTED: dict[str, Any] = {"appears": ("masks/*",), "known": ("masks", "new"), "codes": (1, 2)}
_SPLIT = ("data", "split", "shapes", "--set", "size=24", "--quiet", "--out", "split.json")

SCENARIOS: dict[str, Scenario] = {
    "train": Scenario(_TRAIN, next=_resumed, run="run", known=("run",)),
    "resume": Scenario(
        ("train", "--resume", "run", "--trainer.epochs=2", "--quiet"),
        ((*_TRAIN[:-3], "--trainer.epochs=1", "--out", "run"),),
        run="run",
        known=("run",),
    ),
    "train workers": Scenario(  # data are loaded by another process
        (*_TRAIN[:-3], "--data.workers=1", "--trainer.epochs=1", "--out", "run"),
        next=_resumed,
        run="run",
        known=("run",),
    ),
    "train auto": Scenario(
        ("train", "auto", "--data.root=scans", "--data.windows=2", *_SMALL, "--trainer.epochs=1", "--out", "run"),
        (_SCANS,),
        next=_resumed,
        run="run",
        known=("run", "cache"),
    ),
    "evaluate": Scenario(("evaluate", "run", "--samples", "4", "--quiet"), (_TRAIN,), known=("run",)),
    "evaluate --out": Scenario(
        ("evaluate", "run", "--samples", "4", "--out", "scores.json", "--quiet"), (_TRAIN,), known=("scores", "run")
    ),
    "evaluate files": Scenario(
        ("evaluate", "--predictions", "masks", "--truth", "scans", "--partial", "--out", "scores.json", "--quiet"),
        (_TRAIN, _SCANS, "images", _PREDICT),
        known=("scores",),
    ),
    "report": Scenario(
        ("report", "run", "--cases", "1", "--quiet"),
        (_TRAIN, ("evaluate", "run", "--samples", "16", "--quiet")),
        known=("run",),
        weight=0.3,
    ),
    "predict": Scenario(_PREDICT, (_TRAIN, _SCANS, "images"), next=_skipping, **_PREDICTED),
    "predict --overwrite": Scenario(
        (*_PREDICT, "--overwrite"), (_TRAIN, _SCANS, "images", (*_PREDICT, "--seed", "1")), **_PREDICTED
    ),
    "predict --skip-existing": Scenario(
        (*_PREDICT, "--skip-existing"),
        (_TRAIN, _SCANS, "images", ("predict", "run", "new/shape-00000.png", *_PREDICT[3:])),
        **_PREDICTED,
    ),
    "export": Scenario((*_EXPORT, "folder"), appears=("folder",), known=("folder",)),
    "split": Scenario((*_SPLIT, "--set", "count=30"), known=("split.json",)),
    "split --extend": Scenario(
        (*_SPLIT, "--set", "count=40", "--extend", "split.json"),
        ((*_SPLIT, "--set", "count=30"),),
        known=("split.json",),
    ),
    "prepare": Scenario(
        ("data", "prepare", "lidc", "data_lidc.pickle", "--out", "store", "--quiet"), ("crops",), known=("store",)
    ),
    "prepare hdf5": Scenario(
        ("data", "prepare", "lidc", "lidc.hdf5", "--out", "store", "--quiet"), ("hdf5",), known=("store",)
    ),
    "check": Scenario(
        ("data", "check", "scans", "--html", "page.html", "--json", "found.json", "--quiet"),
        (_SCANS,),
        known=("page.html", "found.json"),
    ),
    "demo": Scenario(
        ("demo", *_SHAPES, *_SMALL, "--trainer.epochs=1", "--out", "run"), run="run", known=("run",), weight=0.3
    ),
    "cache": Scenario(  # filled, and emptied at once of what is old
        (
            "train",
            "demo",
            "--data.name=folder",
            "--data.root=scans",
            "--data.size=32",
            *_SMALL,
            "--trainer.epochs=1",
            "--out",
            "run",
        ),
        (
            _SCANS,
            (*_EXPORT, "more"),
            (
                "train",
                "auto",
                "--data.root=more",
                "--data.windows=2",
                *_SMALL,
                "--trainer.epochs=1",
                "--out",
                "earlier",
            ),
        ),
        next=_resumed,
        run="run",
        known=("run", "cache"),
        environment={"AMBISEG_CACHE_GB": "0"},
    ),
}


class Workshop:
    """A folder in which commands are run, again and again from the same state.

    Outputs name the folder that they were made in, so that all runs of a command are made in the same: ``work``, with
    the folder of the user's in ``work/place`` and home, temporary files and cache beside it.
    """

    def __init__(self, root: Path, program: Program | None = None) -> None:
        self.root, self.work, self.place = root, root / "work", root / "work" / "place"
        self.program = program or ambiseg
        self.environment: Mapping[str, str] = {}
        self._made, self._kept = dict[tuple, Path](), 0

    def given(self, scenario: Scenario) -> Path:
        """A copy of the folder as it is before the command; made once for all scenarios that share it."""
        steps: tuple[Command | str, ...] = ()
        before = self._state(steps)
        for step in scenario.given:
            steps = (*steps, step)
            if steps not in self._made:
                self.restore(before)
                if isinstance(step, str):
                    BEFORE[step](self.place)
                elif (code := self.run(step)) != 0:
                    raise RuntimeError(f"{' '.join(step)}: exit code {code}\n{self.said()}")
            before = self._state(steps)
        return before

    def _state(self, steps: tuple[Command | str, ...]) -> Path:
        if steps not in self._made:
            if not steps:
                shutil.rmtree(self.work, ignore_errors=True)
                for name in ("place", "home", "tmp", "cache"):
                    (self.work / name).mkdir(parents=True)
            self._made[steps] = self.keep()
        return self._made[steps]

    def keep(self) -> Path:
        """A copy of the work folder as it is now."""
        self._kept += 1
        copy = self.root / f"state-{self._kept}"
        shutil.copytree(self.work, copy, symlinks=True)
        return copy

    def restore(self, copy: Path) -> None:
        """The work folder as it was, with the times of its files, by which the cache knows them."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(copy, self.work, symlinks=True)

    def child(self, command: Command, fresh: bool = False, name: str = "said") -> Callable[[], int]:
        """A function that runs a command in the work folder, for a process of its own.

        ``fresh`` is a new interpreter. Otherwise it goes on from this one, in which the packages are imported already.
        """

        def run() -> int:
            with open(self.root / f"{name}.txt", "wb") as said, open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            own = {
                "HOME": str(self.work / "home"),
                "TMPDIR": str(self.work / "tmp"),
                "AMBISEG_CACHE": str(self.work / "cache"),
                "COLUMNS": "200",
                "MPLCONFIGDIR": str(self.root / "matplotlib"),  # its list of fonts, made once
                **self.environment,
            }
            for variable in [name for name in os.environ if name.startswith(("XDG_", "AMBISEG_"))]:
                del os.environ[variable]
            os.environ.update(own)
            os.chdir(self.place)
            sys.stdin = sys.__stdin__ = open(0)  # noqa: SIM115  these are for the rest of the process
            sys.stdout = sys.__stdout__ = open(1, "w")  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(2, "w", buffering=1)  # noqa: SIM115
            tempfile.tempdir = None
            sys.argv = ["ambiseg", *command]
            if fresh:
                os.execv(sys.executable, [sys.executable, "-m", "ambiseg", *command])
            return self.program(command)

        return run

    def run(self, command: Command) -> int:
        """Run a command undisturbed and return its exit code."""
        return ended(started(self.child(command)))

    def said(self, name: str = "said") -> str:
        """What the last command printed."""
        return (self.root / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


def ambiseg(command: Sequence[str]) -> int:
    """The command line itself."""
    from ambiseg.cli import main

    return main(command)


_PACKAGES = ("h5py", "lightning.pytorch", "matplotlib.pyplot", "nibabel", "pydicom", "tifffile", "tests.lidc_fakes")
_MODULES = (
    *("cli", "data.check.check", "data.check.output", "data.export", "data.module", "data.sets.lidc", "evaluation"),
    *("prediction.loop", "reporting.gallery", "reporting.page", "training.callbacks"),
)


def import_everything() -> None:
    """All that commands import, so that their processes need not; no thread is started, which a fork would lose."""
    import torch

    for name in (*_PACKAGES, *(f"ambiseg.{module}" for module in _MODULES)):
        importlib.import_module(name)
    torch.set_num_threads(1)


@contextmanager
def workshop(folder: Path | None = None, program: Program | None = None) -> Iterator[Workshop]:
    """A workshop in a temporary folder, or in a new folder of this path."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="kill-", dir=folder)))
    try:
        yield Workshop(root, program)
    finally:
        shutil.rmtree(root, ignore_errors=True)
