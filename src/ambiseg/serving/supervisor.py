"""The worker as the service sees it: started, asked, watched, and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg.serving.settings import Served
from ambiseg.serving.tasks import Task
from ambiseg.serving.wire import receive, send

_GRACE = 3.0  # seconds that a worker has to end by itself


class WorkerLost(Exception):
    """The worker ended in the middle of something; the text says how."""


class Supervisor:
    """One worker process at a time.

    Args:
        models: that it loads.
        device: to compute on.
        threads: of PyTorch; ``None``: as many as it likes.
    """

    def __init__(self, models: Sequence[Served], device: str = "cpu", threads: int | None = None) -> None:
        self.models, self.device, self.threads = list(models), device, threads
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()
        self._reason = ""

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process is not None and self.alive else None

    def start(self) -> None:
        """Start a worker and wait until its models are loaded; :class:`ConfigError` if they cannot be."""
        self.stop()
        self.starts += 1
        self._reason = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ambiseg.serving.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        models = [(one.run, one.which) for one in self.models]
        begin = {"models": models, "device": self.device, "threads": self.threads}
        try:
            self._send(begin)
            kind, *rest = self.receive()
        except WorkerLost as lost:
            raise ConfigError(f"expected a worker that loads {self.models[0].run}, found that it {lost}") from None
        if kind == "unable":
            self.stop()
            raise ConfigError(rest[0])

    def predict(self, tasks: Sequence[Task]) -> None:
        """Ask for predictions; :meth:`receive` then gives what comes of them."""
        self._send(("predict", list(tasks)))

    def cancel(self, number: int) -> None:
        """Ask the worker to give up a task; it looks between two windows or slices."""
        with suppress(WorkerLost):
            self._send(("cancel", number))

    def receive(self) -> Any:
        """The worker's next message; :class:`WorkerLost` if it ends instead."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return receive(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, ValueError):
            raise WorkerLost(self._ending()) from None

    def kill(self, reason: str = "") -> None:
        """End the worker now; whoever receives from it is told the reason."""
        if self._process is not None:
            self._reason = self._reason or reason
            self._process.kill()

    def stop(self) -> None:
        """Let the worker end, and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, message: Any) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise WorkerLost("has not been started")
        try:
            with self._writing:
                send(process.stdin, message)  # type: ignore[arg-type]
        except (OSError, ValueError):
            raise WorkerLost(self._ending()) from None

    def _ending(self) -> str:
        process = self._process
        if process is None:
            return "was stopped"
        deadline = time.monotonic() + _GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._reason:
            return self._reason
        code = process.poll()
        if code is None:
            process.kill()
            return "no longer answered"
        if code < 0:
            with suppress(ValueError):
                return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"
