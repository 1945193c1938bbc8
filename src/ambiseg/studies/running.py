"""Training and scoring the members of a study, several at a time, each in a process of its own with one thread."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import Lock, write_text
from ambiseg._util.terminal import animated, say
from ambiseg._util.text import count, printable
from ambiseg.config import dump
from ambiseg.history import read
from ambiseg.studies.child import PARENT
from ambiseg.studies.members import Member, command_of
from ambiseg.studies.store import WHICH, Store, Trial

_LOOK = 0.2  # seconds between two looks at processes
_GRACE = 20.0  # seconds that a process has to stop in good order
_LINES = {True: 60.0, False: 300.0}  # seconds between two lines of progress, on a terminal and elsewhere
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 129)  # codes of a command that somebody stopped
_PATIENCE = 20.0  # seconds in which a training that another process is at is asked for again: it may be ending
_BUSY = "expected no other process at work there"  # of a run that a command outside of any study trains
_TAIL = 1 << 16  # bytes of a log in which a reason is looked for


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def jobs_at_hand(accelerators: Iterable[str]) -> int:
    """Trainings at a time: one for each core, or one where they would share a GPU.

    >>> jobs_at_hand(["cpu"]) == cores()
    True
    """
    import torch

    shared = any(one != "cpu" for one in accelerators) and torch.cuda.is_available()
    return 1 if shared else cores()


@dataclass
class Job:
    """A training that runs."""

    trial: Trial
    lock: Lock
    process: subprocess.Popen[bytes]
    command: list[str]
    stage: str
    log: Path
    started: float


class Runner:
    """Runs trials until all have a result, are failures, or are run by another process.

    Args:
        store: where results are.
        jobs: trainings at a time.
        quiet: no lines of progress.
        changed: called after each training that has ended.
    """

    def __init__(self, store: Store, jobs: int, quiet: bool, changed: Callable[[], Any]) -> None:
        self.store, self.jobs, self.quiet, self.changed = store, jobs, quiet, changed
        self.running: list[Job] = []
        self.done = self.total = 0

    def run(self, trials: Sequence[tuple[Member, int]]) -> list[str]:
        """Run all; the names of those that another process is busy with."""
        left, busy, self.total = list(trials), list[tuple[Member, int]](), len(trials)
        told = time.monotonic()
        until = told + _PATIENCE
        try:
            while left or self.running or (busy and time.monotonic() < until):
                if not left and len(self.running) < self.jobs:
                    left, busy = busy, []
                while left and len(self.running) < self.jobs:
                    if not self._begin(*left[0]):
                        busy.append(left[0])
                    left.pop(0)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self._next(job)
                if self.running and time.monotonic() - told > _LINES[animated()]:
                    told = time.monotonic()
                    self._tell(self._progress(len(left)))
                time.sleep(_LOOK if self.running or busy else 0)
        except BaseException:
            self._stop()
            raise
        names = [f"{member.name} seed {seed}" for member, seed in busy]
        if names:
            self._tell(f"another process is at {', '.join(names)}")
        return names

    # -- one training --------------------------------------------------------------------------------------------------

    def _begin(self, member: Member, seed: int) -> bool:
        """Start what a training lacks, unless another process is at it."""
        lock = self.store.lock(member, seed)
        try:
            lock.__enter__()
        except ConfigError:
            return False
        try:
            trial = self.store.trial(member, seed)  # now that nobody else changes it
            if trial.state in ("done", "failed"):
                lock.__exit__()
                self.done += 1
                if trial.state == "failed":
                    self._tell(f"{trial.name}: failed: {trial.reason}")
                return True
            self._start(trial, lock, self._command(trial))
        except BaseException:
            lock.__exit__()
            raise
        return True

    def _command(self, trial: Trial) -> list[str]:
        """What comes next for a training."""
        if trial.state == "trained":
            samples = map(str, self.store.wanted(trial.folder, trial.member.samples))
            accelerator = trial.member.config.trainer.accelerator
            device = [] if accelerator == "auto" else ["--device", accelerator]
            how = ["--split", self.store.split, "--which", WHICH, "--samples", *samples, *device]
            return ["evaluate", str(trial.folder), *how, "--quiet"]
        if trial.state == "begun":
            return ["train", "--resume", str(trial.folder)]
        words = command_of(trial.member, trial.seed)
        if words is None:  # settings that cannot be typed
            place = self.store.out / "plans" / f"{trial.folder.name}.yaml"
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, dump(trial.member.config.with_settings({"seed": trial.seed})))
            words = [str(place)]
        return ["train", *words, "--trainer.look", "false", "--out", str(trial.folder)]  # scores do not need it

    def _start(self, trial: Trial, lock: Lock, command: list[str]) -> None:
        log = self.store.log(trial.member, trial.seed)
        log.parent.mkdir(parents=True, exist_ok=True)
        (self.store.out / "members").mkdir(exist_ok=True)
        environment = {**os.environ, PARENT: str(os.getpid())}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with open(log, "ab") as file:
            file.write(f"$ {shlex.join(['ambiseg', *command])}\n".encode(errors="backslashreplace"))
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "ambiseg.studies.child", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock.descriptor,) if os.name == "posix" else (),  # it holds the lock if this one is killed
                start_new_session=True,  # Ctrl-C is for the study, which stops them one by one
            )
        stage = {"evaluate": "evaluation"}.get(command[0], "training")
        doing = {"missing": "training", "begun": "training goes on", "trained": "evaluating"}[trial.state]
        self._tell(f"{trial.name}: {doing} ({self.done + 1 + len(self.running)} of {self.total})")
        self.running.append(Job(trial, lock, process, command, stage, log, time.monotonic()))

    def _next(self, job: Job) -> None:
        """After a command has ended: the next one of the same training, or its end."""
        self.running.remove(job)
        code, (member, seed) = job.process.returncode, (job.trial.member, job.trial.seed)
        trial = self.store.trial(member, seed)
        if code == 0 and job.stage == "training" and trial.state == "trained":
            self._start(trial, job.lock, self._command(trial))
            return
        try:
            took = f"{(time.monotonic() - job.started) / 60:.1f} min"
            if code in _STOPPED:
                self._tell(f"{trial.name}: {job.stage} was stopped from outside; start the study again to go on")
            elif code == 2 and _BUSY in (reason := self._reason(job, code)):
                self._tell(f"{trial.name}: {reason}")
            elif code != 0 or trial.state != "done":
                reason = self._reason(job, code)
                about = {"stage": job.stage, "code": code, "command": ["ambiseg", *job.command], "log": str(job.log)}
                self.store.fail(member, seed, reason, **about)
                self._tell(f"{trial.name}: failed after {took}: {reason}")
            else:
                self._tell(f"{trial.name}: done")
        finally:
            job.lock.__exit__()
        self.done += 1
        self.changed()

    def _reason(self, job: Job, code: int) -> str:
        """What a command said last, or how it ended."""
        with open(job.log, "rb") as file:
            file.seek(max(0, job.log.stat().st_size - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
        since = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=0)
        said = [line.removeprefix("ambiseg: ") for line in lines[since:] if line.startswith("ambiseg: ")]
        if code < 0:
            return f"{job.stage} was ended by signal {-code}"
        if code == 0:
            return f"{job.stage} ended without a result; see {job.log}"
        return printable(said[-1]) if said else f"{job.stage} ended with code {code}; see {job.log}"

    # -- all of them ---------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop what runs; a training loses its current epoch and no more."""
        for job in self.running:
            if job.process.poll() is None:
                job.process.terminate()
        until = time.monotonic() + _GRACE
        for job in self.running:
            try:
                job.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            job.lock.__exit__()
        self.running.clear()

    def _progress(self, left: int) -> str:
        now = []
        for job in self.running:
            epochs = job.trial.member.config.trainer.epochs
            where = job.stage
            if job.stage == "training":
                try:
                    where = f"epoch {min(len(read(job.trial.folder / 'metrics.csv')) + 1, epochs)}/{epochs}"
                except (ConfigError, OSError):
                    where = "training"
            now.append(f"{job.trial.name} {where}")
        return f"{self.done} of {count(self.total, 'training')} done, {left} to start; {', '.join(now)}"

    def _tell(self, line: str) -> None:
        if not self.quiet:
            say(printable(line))
