"""The folder of all studies: runs by fingerprint and seed, logs, failures, locks.

==========================  =======================================================================================
``members/NAME-sSEED-HASH``  an ordinary run, which any study with the same configuration uses
``logs/``                    what its commands printed
``failures/``                why a member has no result
``locks/``                   who trains what
``budgets.json``, ``plans/`` what was measured and planned once, so that it stays the same
``STUDY/``                   table and page of a study
==========================  =======================================================================================
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.files import Lock, contents, write_text
from ambiseg._util.reading import read_json
from ambiseg.comparison.scores import setting_of
from ambiseg.evaluation import evaluation_path, saved_evaluation
from ambiseg.evaluation.results import Evaluation
from ambiseg.runs import Run
from ambiseg.studies.fingerprint import DIGITS, differing
from ambiseg.studies.members import Member

WHICH = "last"  # weights that are scored, so that nothing is chosen by its score
_FOLDER = re.compile(rf"(.+)-s(\d{{1,10}})-([0-9a-f]{{{DIGITS}}})")
State = Literal["done", "trained", "begun", "missing", "failed"]


@dataclass(frozen=True)
class Trial:
    """One training of a member.

    Attributes:
        member, seed: which one.
        folder: of its run; it may not exist yet.
        state: ``done``: trained and scored; ``trained``; ``begun``: interrupted; ``missing``; ``failed``.
        reason: of a failure, one line.
        evaluation: where it is done.
        cost: CPU seconds of training, where they are known.
    """

    member: Member
    seed: int
    folder: Path
    state: State
    reason: str = ""
    evaluation: Evaluation | None = None
    cost: float | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.member.name} seed {self.seed}"


class Store:
    """The folder, opened.

    Args:
        out: the folder; it is made when something is written.
        split: the part of the data that is scored.
    """

    def __init__(self, out: Path, split: str) -> None:
        self.out, self.split = out, split

    def runs(self) -> dict[tuple[str, int], Path]:
        """Folders of runs, by fingerprint and seed."""
        found: dict[tuple[str, int], Path] = {}
        for name in contents(self.out / "members"):
            match, path = _FOLDER.fullmatch(name), self.out / "members" / name
            if match and path.is_dir() and (path / "run.json").is_file():
                found.setdefault((match[3], int(match[2])), path)
        return found

    def place(self, member: Member, seed: int) -> Path:
        """Where a new run goes."""
        return self.out / "members" / f"{member.name}-s{seed}-{member.fingerprint}"

    def lock(self, member: Member, seed: int) -> Lock:
        """Of one training, whatever the studies call it; entering it is a :class:`ConfigError` where it is taken."""
        folder = self.out / "locks" / f"{member.fingerprint}-s{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder, "training")

    def log(self, member: Member, seed: int) -> Path:
        """What the commands of a training printed."""
        return self.out / "logs" / f"{self.place(member, seed).name}.log"

    # -- states --------------------------------------------------------------------------------------------------------

    def trial(self, member: Member, seed: int, runs: dict[tuple[str, int], Path] | None = None) -> Trial:
        """How far a training is."""
        folder = (self.runs() if runs is None else runs).get((member.fingerprint, seed))
        if folder is None:
            failed = self.failure(member, seed)
            state: State = "missing" if failed is None else "failed"
            return Trial(member, seed, self.place(member, seed), state, failed or "")
        try:
            run = Run(folder)
            if keys := differing(run.config, member.config):
                expected = f"{folder}: expected the settings of {member.name}, found another {', '.join(keys[:3])}"
                return Trial(member, seed, folder, "failed", f"{expected}; move it away")
            evaluation = self._evaluation(run, member.samples)
            done = len(run.history) >= run.config.trainer.epochs and (folder / f"{WHICH}.safetensors").is_file()
            cost = _cost(run)
        except (DataError, OSError) as error:
            return Trial(member, seed, folder, "failed", str(error))
        if evaluation is not None and done:
            return Trial(member, seed, folder, "done", evaluation=evaluation, cost=cost)
        if (failed := self.failure(member, seed)) is not None:
            return Trial(member, seed, folder, "failed", failed, cost=cost)
        return Trial(member, seed, folder, "trained" if done else "begun", cost=cost)

    def _evaluation(self, run: Run, samples: Sequence[int]) -> Evaluation | None:
        """The evaluation of a run, where it has the numbers of masks that are asked for."""
        path = evaluation_path(run, self.split)
        if not path.is_file():
            return None
        state = path.stat()
        found = _loaded(str(run.folder), self.split, state.st_mtime_ns, state.st_size)
        if found is None or found.which != WHICH or found.symmetries != 1:
            return None
        return found if all(setting_of(found, "standard", n) is not None for n in samples) else None

    def wanted(self, folder: Path, samples: Sequence[int]) -> list[int]:
        """Numbers of masks to score, those that another study has asked for included."""
        old = None
        with suppress(DataError, OSError):  # it is replaced
            old = saved_evaluation(Run(folder), self.split)
        kept = [one.samples for one in old.settings if one.form == "standard"] if old and old.which == WHICH else []
        return sorted({*samples, *kept})

    # -- failures ------------------------------------------------------------------------------------------------------

    def _failure(self, member: Member, seed: int) -> Path:
        return self.out / "failures" / f"{member.fingerprint}-s{seed}.json"

    def failure(self, member: Member, seed: int) -> str | None:
        """Why a training has no result, in one line."""
        path = self._failure(member, seed)
        if not path.is_file():
            return None
        try:
            return str(read_json(path, "a failure", dict[str, Any]).get("reason", "unknown"))
        except (ConfigError, OSError) as error:
            return str(error)

    def fail(self, member: Member, seed: int, reason: str, **about: Any) -> None:
        """Record why a training has no result."""
        path = self._failure(member, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"member": member.name, "seed": seed, "reason": reason, **about}
        content["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def forgive(self, member: Member, seed: int) -> None:
        """Forget a failure, to try again."""
        self._failure(member, seed).unlink(missing_ok=True)


@lru_cache(maxsize=256)
def _loaded(folder: str, split: str, changed: int, size: int) -> Evaluation | None:
    """An evaluation that is read again when its file has changed."""
    return saved_evaluation(Run(folder), split)


def _cost(run: Run) -> float | None:
    """CPU seconds of a training whose record covers all of it."""
    return run.cost.cpu_seconds if run.cost is not None and run.cost.epochs >= len(run.history) else None
