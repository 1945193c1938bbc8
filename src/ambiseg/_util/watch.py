"""Several processes of one command on one machine: when one of them is killed, the others end, with one line.

Lightning starts the other processes by calling the command again. Its own guard looks every five seconds and kills the
first process without a word; those that it started outlive a first process that is killed. A process that waits for
another one also hears no signal, since Python answers signals between two of its own steps.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from ambiseg._util.errors import ConfigError

_PARENT = "AMBISEG_FIRST_PROCESS"
_OBSERVER = "_launch_process_observer"  # of Lightning, private: where there is none, Lightning does as it does
_INTERVAL = 0.25  # seconds between two looks
_GRACE = 4.0  # seconds in which a process may notice by itself, and end in good order
_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class ProcessLost(ConfigError):
    """One of several processes was killed; what they did together can go on."""


@contextmanager
def watched(hint: str, release: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """While Lightning's trainer runs: if one of the processes that it starts dies, end all with one line.

    Args:
        hint: what to do then, the end of that line.
        release: called before this process is ended from outside, because it waits for a dead one.
    """
    launcher = import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    before = getattr(launcher, _OBSERVER, None)
    watch, started = _Watch(hint, release), _is_started()
    if started:
        _follow_parent(os.environ[_PARENT])
    if before is not None:
        setattr(launcher, _OBSERVER, watch.start)
    if not started:
        os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    except BaseException as error:
        watch.end(error)
    finally:
        watch.stop()
        if before is not None:
            setattr(launcher, _OBSERVER, before)
        if not started:
            os.environ.pop(_PARENT, None)  # programs that this one starts later are not of Lightning's


def _is_started() -> bool:
    """Whether Lightning started this process."""
    return os.environ.get(_PARENT, str(os.getpid())) != str(os.getpid()) and os.environ.get("LOCAL_RANK", "0") != "0"


def _follow_parent(parent: str) -> None:
    """In a process that Lightning started: end as soon as the process that started it has."""

    def look() -> None:
        while str(os.getppid()) == parent:
            time.sleep(_INTERVAL)
        os._exit(1)  # it cannot be told whether anybody reads a word

    threading.Thread(target=look, daemon=True, name="ambiseg-parent").start()


class _Watch:
    """Of the first process over those that it started."""

    def __init__(self, hint: str, release: Callable[[], Any]) -> None:
        self.hint, self.release = hint, release
        self.started: list[subprocess.Popen[Any]] = []
        self.ended = threading.Event()
        self._signals: tuple[int, int, int] | None = None

    def start(self, processes: list[subprocess.Popen[Any]]) -> None:
        """In place of Lightning's observer."""
        self.started = processes
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            reading, writing = os.pipe()  # where the numbers of signals come at once
            os.set_blocking(writing, False)
            self._signals = reading, writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._look, daemon=True, name="ambiseg-watch").start()

    def stop(self) -> None:
        """The trainer has come to its end."""
        self.ended.set()
        if self._signals is not None:
            signal.set_wakeup_fd(self._signals[2])
            os.close(self._signals[1])
            self._signals = None

    def end(self, error: BaseException) -> NoReturn:
        """After an error: of a connection that was lost, say what was lost; the other processes end."""
        place = type(error).__module__.partition(".")[0]
        lost = isinstance(error, RuntimeError) and place in ("builtins", "torch")  # as gloo and NCCL put it
        if _is_started():
            if isinstance(error, SystemExit | KeyboardInterrupt):
                os._exit(128 + signal.SIGINT)  # the first process says it
            if lost:
                time.sleep(_GRACE)  # the first one is dead, and this one about to be; or the error is its own
        until = time.monotonic() + (_GRACE - 1 if lost else 0)
        while self.started and not self._dead() and time.monotonic() < until:
            time.sleep(_INTERVAL)
        text = self._explained() if lost and self._dead() else None
        self._kill()
        if text is not None:
            raise ProcessLost(text) from None
        raise error

    def _look(self) -> None:
        code, text, signals = 0, "", self._signals
        while not self.ended.is_set():
            if signals is None:
                time.sleep(_INTERVAL)
            elif select.select(signals[:1], [], [], _INTERVAL)[0]:
                heard = os.read(signals[0], 1)
                if heard and heard[0] in _STOPS and signal.getsignal(heard[0]) is not signal.SIG_IGN:
                    code, text = 128 + heard[0], f"stopped; {self.hint}"
            if not code and self._dead():
                code, text = 2, self._explained()
            if code and not self.ended.wait(_GRACE):  # the main thread waits for a dead process
                self._kill()
                self.release()
                with suppress(OSError, ValueError):
                    print(f"ambiseg: {text}", file=sys.stderr, flush=True)
                os._exit(code)
        if signals is not None:
            os.close(signals[0])

    def _dead(self) -> list[subprocess.Popen[Any]]:
        return [one for one in self.started if one.poll()]

    def _kill(self) -> None:
        for one in self.started:
            if one.poll() is None:
                one.kill()

    def _explained(self) -> str:
        dead = self._dead()[0]
        number, code = self.started.index(dead) + 2, dead.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"process {number} of {len(self.started) + 1} {how}; {self.hint}"
