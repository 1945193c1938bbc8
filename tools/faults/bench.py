"""One fault in one command, and what its user finds then."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults import aftermath
from faults.scenarios import Command, Scenario, Workshop
from faults.trace import Fail, Fault, Hanging, Kill, Meanwhile, Operation, Signal, Traced, ended, started, traced

FAULTS = ("kill", "twice", "error", "signal", "pair")
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
ERRORS = {"ENOSPC": 28, "EIO": 5, "EACCES": 13}
BY_NAME = {"open", "mkdir", "rename", "link", "symlink", "unlink", "rmdir", "chmod", "creat", "truncate"}
_TAKING = {"open", "creat", "mkdir", "write", "pwrite", "writev", "pwritev", "ftruncate", "fallocate", "copy"}
_REMOVING = {"unlink", "rmdir"}
FAILING = BY_NAME | _TAKING | {"fsync", "fdatasync", "fchmod", "sendfile"}  # locks and times fail on no disk
_PATIENCE = 5.0  # seconds after which the second of two processes is taken to wait for the first


@dataclass(frozen=True)
class Trial:
    """One fault at one operation; its text repeats it."""

    scenario: str
    fault: str
    number: int
    detail: str  # before, after, or the name of an error or a signal
    second: int = -1  # the operation of the next command, of twice

    def __str__(self) -> str:
        return f"{self.scenario} {self.fault} {self.number} {self.detail}" + f" {self.second}" * (self.second >= 0)

    @staticmethod
    def parse(text: str) -> Trial:
        """A trial from its text."""
        words = text.split()
        at = next((i for i, word in enumerate(words) if word in FAULTS), len(words))
        if len(words) not in (at + 3, at + 4):
            raise ValueError(f"expected SCENARIO FAULT NUMBER DETAIL, found {text!r}")
        return Trial(" ".join(words[:at]), words[at], int(words[at + 1]), words[at + 2], *map(int, words[at + 3 :]))


@dataclass
class Outcome:
    """What came of a trial: problems in one line each, none if all is well."""

    trial: Trial
    operation: str = ""
    struck: bool = False
    again: bool = False  # the second kill, too
    problems: list[str] = field(default_factory=list)
    said: str = ""
    seconds: float = 0.0


class Bench:
    """A scenario, ready to be disturbed: what it starts from, what it does, and what comes of it."""

    def __init__(self, shop: Workshop, scenario: Scenario) -> None:
        self.shop, self.scenario = shop, scenario
        shop.environment = scenario.environment
        self.given = shop.given(scenario)
        shop.restore(self.given)
        self.listed = traced(shop.child(scenario.command), shop.work)
        if self.listed.code != 0:
            raise RuntimeError(f"{' '.join(scenario.command)}: exit code {self.listed.code}\n{shop.said()}")
        self.quietly = len(shop.said().splitlines())
        self.wanted = shop.keep()
        self.operations = self.listed.operations

    def undisturbed(self) -> list[str]:
        """What is wrong before any fault."""
        problems = aftermath.unflushed(self.operations)
        problems += [f"left over: {name}" for name in aftermath.drafts(aftermath.tree(self.wanted))]
        inside = {name for name in aftermath.tree(self.wanted) if name.startswith(("tmp/", "home/"))} - {
            "tmp/",
            "home/",
        }
        problems += [f"left over: {name}" for name in sorted(inside)]
        outside = [name for name in sorted(self.listed.elsewhere) if not name.startswith(f"{self.shop.root}/")]
        problems += [f"written outside of the folders that it was given: {name}" for name in outside]
        return problems + _left(self.listed)

    # -- one trial ----------------------------------------------------------------------------------------------------

    def run(self, trial: Trial, fresh: bool = False) -> Outcome:
        """Do it, and look."""
        began, outcome = time.monotonic(), Outcome(trial)
        self.shop.environment = self.scenario.environment
        self.shop.restore(self.given)
        try:
            {"kill": self._kill, "twice": self._kill, "error": self._error, "signal": self._signal, "pair": self._pair}[
                trial.fault
            ](outcome, fresh)
        except Hanging as error:
            outcome.problems.append(f"hangs: {error}")
        if outcome.problems:
            outcome.said = self.shop.said()[-2000:]
        outcome.seconds = time.monotonic() - began
        return outcome

    def _traced(self, outcome: Outcome, command: Command, number: int, fault: Fault, fresh: bool = False) -> Traced:
        def decide(at: int, operation: Operation) -> Fault | None:
            if at != number:
                return None
            outcome.operation = outcome.operation or general(str(operation))
            return fault

        return traced(self.shop.child(command, fresh), self.shop.work, decide)

    def _kill(self, outcome: Outcome, fresh: bool) -> None:
        trial, command = outcome.trial, self.scenario.command
        when = "before" if trial.detail == "before" else "after"
        outcome.struck = self._traced(outcome, command, trial.number, Kill(when), fresh).struck
        outcome.problems += self._visible()
        if trial.second >= 0:
            following = self.scenario.next(self.shop.place, command)
            outcome.again = self._traced(outcome, following, trial.second, Kill(when)).struck
            outcome.problems += self._visible()
        self._recover(outcome)

    def _error(self, outcome: Outcome, fresh: bool) -> None:
        trial, full = outcome.trial, False

        def decide(at: int, operation: Operation) -> Fault | None:
            nonlocal full
            if at == trial.number:
                outcome.operation, full = general(str(operation)), trial.detail == "ENOSPC"
                return Fail(ERRORS[trial.detail])
            return Fail(ERRORS[trial.detail]) if full and operation.name in _TAKING else None  # a disk stays full

        seen = traced(self.shop.child(self.scenario.command, fresh), self.shop.work, decide)
        outcome.struck = seen.struck
        if not seen.struck:
            outcome.problems += self._final()
            return
        removing = outcome.operation.split()[0] in _REMOVING
        if seen.code == 0:  # it could do without
            beside = ("cache/",) if outcome.operation.split()[1].startswith("cache/") else ()
            found = aftermath.differences(self.shop.work, self.wanted, beside)
            outcome.problems += [line for line in found if not (removing and line.startswith("left over"))]
            return
        outcome.problems += self._one_line(seen.code, self.scenario.codes) + _left(seen)
        new = aftermath.tree(self.shop.work) - aftermath.tree(self.given)
        if not removing:
            outcome.problems += [f"left after the error: {name}" for name in aftermath.drafts(new)]
        outcome.problems += self._visible()
        self._recover(outcome)

    def _signal(self, outcome: Outcome, fresh: bool) -> None:
        trial = outcome.trial
        seen = self._traced(outcome, self.scenario.command, trial.number, Signal(SIGNALS[trial.detail]), fresh)
        outcome.struck = seen.struck
        if seen.code == 0:  # it came at the very end
            outcome.problems += self._final()
            return
        said = self.shop.said()
        if seen.code != 128 + SIGNALS[trial.detail]:
            outcome.problems.append(f"exit code {seen.code} after {trial.detail}: {said.strip()[-300:]}")
        if "Traceback" in said:
            outcome.problems.append("traceback after a signal")
        outcome.problems += _left(seen)
        new = aftermath.tree(self.shop.work) - aftermath.tree(self.given)
        outcome.problems += [f"left after the signal: {name}" for name in aftermath.drafts(new)]
        outcome.problems += self._visible()
        self._recover(outcome)

    def _pair(self, outcome: Outcome, fresh: bool) -> None:
        trial, command = outcome.trial, self.scenario.command
        second, codes, said = 0, list[int](), ""

        def start() -> None:
            nonlocal second
            second = started(self.shop.child(command, name="second"))
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                pid, status = os.waitpid(second, os.WNOHANG)
                if pid:
                    codes.append(os.waitstatus_to_exitcode(status))
                    return
                time.sleep(0.02)

        when = "before" if trial.detail == "before" else "after"
        seen = self._traced(outcome, command, trial.number, Meanwhile(start, when), fresh)
        outcome.struck = seen.struck
        if seen.struck:
            codes += [seen.others[second]] if second in seen.others else [ended(second)] if not codes else []
            said = self.shop.said("second")
        for name, code, text in (("first", seen.code, self.shop.said()), ("second", codes[0] if codes else 0, said)):
            if code not in (0, 2) or (code == 2 and len(_errors(text)) != 1):
                outcome.problems.append(f"the {name} of two ended with {code}: {text.strip()[-300:]}")
        if seen.code and codes and codes[0]:
            outcome.problems.append("both of two processes were refused")
        outcome.problems += self._final()

    # -- what is looked at --------------------------------------------------------------------------------------------

    def _visible(self) -> list[str]:
        work, scenario = self.shop.work, self.scenario
        problems = aftermath.unreadable(work, self.given, self.wanted)
        problems += aftermath.half_a_run(self.shop.place / scenario.run) if scenario.run else []
        places = (self.shop.place, self.wanted / "place", self.given / "place")
        return problems + aftermath.partly_there(*places, scenario.appears)

    def _recover(self, outcome: Outcome) -> None:
        done = not aftermath.differences(self.shop.place, self.wanted / "place")
        command = self.scenario.next(self.shop.place, self.scenario.command)
        code = self.shop.run(command)
        said = self.shop.said()
        if code != 0 and not (done and code == 2 and len(_errors(said)) == 1):  # all of it is there already
            outcome.problems.append(f"afterwards, {' '.join(command[:3])}: exit code {code}: {said.strip()[-300:]}")
        if "Traceback" in said:
            outcome.problems.append("traceback afterwards")
        outcome.problems += self._final()

    def _final(self) -> list[str]:
        return aftermath.differences(self.shop.work, self.wanted)

    def _one_line(self, code: int, codes: Sequence[int]) -> list[str]:
        said = self.shop.said()
        lines, problems = _errors(said), list[str]()
        if code not in codes:
            problems.append(f"exit code {code} after the error, expected {' or '.join(map(str, codes))}")
        if len(lines) != 1 and 1 not in codes:
            problems.append(f"{len(lines)} lines of error")
        if "Traceback" in said or len(said.splitlines()) > self.quietly + max(len(lines), 1) + 1:
            problems.append("more than a line, or a traceback")
        strange = [
            line for line in lines if aftermath.DRAFT in line or not any(name in line for name in self.scenario.known)
        ]
        problems += [f"names no file that the user knows: {line}" for line in strange[:1]]
        return [f"{problem}: {said.strip()[-400:]}" for problem in problems]


def _left(seen: Traced) -> list[str]:
    return [f"{seen.left} processes or threads were left"] * (seen.left > 0)


def _errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("ambiseg: ") and "warning:" not in line]


def general(text: str) -> str:
    """An operation without the random part of names."""
    return re.sub(r"(\.ambiseg-|\.removed-|tmp)[0-9a-z_]{8,16}", r"\1*", text)
