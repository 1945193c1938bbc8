"""Several processes of one command on one machine: when one of them is killed, the others end, with one line.

Lightning starts the other processes by calling the command again. Its own guard looks every five seconds and kills the
first process without a word; those that it started outlive a first process that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from ambiseg._util.errors import ConfigError


class ProcessLost(ConfigError):
    """One of several processes was killed; what they did together can go on."""


_PARENT = "AMBISEG_FIRST_PROCESS"
_OBSERVER = "_launch_process_observer"  # of Lightning, private: where there is none, Lightning does as it does
_INTERVAL = 0.25  # seconds between two looks
_GRACE = 4.0  # seconds in which the others notice by themselves, and end in good order


def follow_parent() -> None:
    """In a process that Lightning started: end as soon as the process that started it has."""
    parent = os.environ.get(_PARENT)
    if parent is None or os.environ.get("LOCAL_RANK", "0") == "0":
        return

    def look() -> None:
        while str(os.getppid()) == parent:
            time.sleep(_INTERVAL)
        os._exit(1)  # it cannot be told whether anybody reads a word

    threading.Thread(target=look, daemon=True, name="ambiseg-parent").start()


@contextmanager
def watched(hint: str, release: Callable[[], Any] | None = None) -> Iterator[None]:
    """While Lightning's trainer runs: if one of the processes that it starts dies, end all with one line.

    Args:
        hint: what to do then, the end of that line.
        release: called before the process is ended from outside, if the main thread waits for the dead one.
    """
    launcher = import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    started: list[subprocess.Popen[Any]] = []
    ended = threading.Event()

    def observe(processes: list[subprocess.Popen[Any]]) -> None:
        started.extend(processes)
        threading.Thread(target=_guard, args=(started, ended, hint, release), daemon=True).start()

    before = getattr(launcher, _OBSERVER, None)
    follow_parent()
    if before is not None:
        setattr(launcher, _OBSERVER, observe)
        os.environ.setdefault(_PARENT, str(os.getpid()))
    try:
        yield
    except BaseException as error:
        _end(error, started, hint)
    finally:
        ended.set()
        if before is not None:
            setattr(launcher, _OBSERVER, before)


def _end(error: BaseException, started: list[subprocess.Popen[Any]], hint: str) -> NoReturn:
    """After an error: of a connection that was lost, say what was lost; the other processes end."""
    place = type(error).__module__.partition(".")[0]
    lost = isinstance(error, RuntimeError) and place in ("builtins", "torch")  # as gloo and NCCL put it
    if lost and os.environ.get("LOCAL_RANK", "0") != "0" and _PARENT in os.environ:
        time.sleep(_GRACE)  # its parent is dead, and this process about to be; or the error is its own
    try:
        until = time.monotonic() + (_GRACE if lost else 0)
        while started and not _dead(started) and time.monotonic() < until:
            time.sleep(_INTERVAL)
        if lost and (dead := _dead(started)):
            raise _explained(dead, started, hint) from None
        raise error
    finally:
        _kill(started)


def _guard(
    started: list[subprocess.Popen[Any]], ended: threading.Event, hint: str, release: Callable[[], Any] | None
) -> None:
    while not ended.wait(_INTERVAL):
        if _dead(started):
            if ended.wait(_GRACE):
                return
            error = _explained(_dead(started), started, hint)
            _kill(started)
            if release is not None:
                release()
            with suppress(OSError, ValueError):
                print(f"ambiseg: {error}", file=sys.stderr, flush=True)
            os._exit(2)


def _dead(started: list[subprocess.Popen[Any]]) -> list[subprocess.Popen[Any]]:
    return [one for one in started if one.poll()]


def _kill(started: list[subprocess.Popen[Any]]) -> None:
    for one in started:
        if one.poll() is None:
            one.kill()


def _explained(dead: list[subprocess.Popen[Any]], started: list[subprocess.Popen[Any]], hint: str) -> ProcessLost:
    number, code = started.index(dead[0]) + 2, dead[0].returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return ProcessLost(f"process {number} of {len(started) + 1} {how}; {hint}")
