"""A service on a real socket, for tests and for ``benchmarks/serving.py``."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from ambiseg._util.errors import ConfigError
from ambiseg.serving import Jobs, Limits, Served, create_app
from ambiseg.serving.server import address_of, listening, run
from ambiseg.serving.supervisor import WorkerLost
from ambiseg.serving.tasks import Task


@dataclass
class Service:
    """A service that answers: its address, the application, and a client without cookies."""

    url: str
    app: Any
    client: httpx.Client

    @property
    def jobs(self) -> Jobs:
        return self.app.state.jobs


@contextmanager
def serving(
    models: Sequence[str] = ("demo",),
    token: str | None = None,
    limits: Limits | None = None,
    **about: Any,
) -> Iterator[Service]:
    """Serve models in a thread, and their worker in its process."""
    app = create_app([Served.open(one) for one in models], token=token, limits=limits, threads=1, **about)
    bound, ready, started = listening("127.0.0.1", 0), threading.Event(), list[Any]()
    url = address_of(bound)
    app.state.jobs.start()
    thread = threading.Thread(target=run, args=(app, bound, ready.set, started))
    thread.start()
    try:
        assert ready.wait(60)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
            yield Service(url, app, client)
    finally:
        for server in started:
            server.should_exit = True
        thread.join()


class Stand:
    """A worker that computes nothing, for the queue alone: it answers when it is told to.

    Attributes:
        asked: tasks that the queue sent, in groups.
        answers: what it says, one message at a time; ``None``: it ends.
    """

    def __init__(self) -> None:
        self.asked: list[list[Task]] = []
        self.cancelled: list[int] = []
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.models: list[Served] = []
        self.starts, self.alive, self.reason, self.fails = 0, False, "", ""

    def start(self) -> None:
        if self.fails:
            raise ConfigError(self.fails)
        self.starts += 1
        self.alive, self.reason = True, ""

    def predict(self, tasks: Sequence[Task]) -> None:
        self.asked.append(list(tasks))

    def receive(self) -> Any:
        answer = self.answers.get()
        if answer is None:
            self.alive = False
            raise WorkerLost(self.reason or "was ended by signal 9 (SIGKILL)")
        return answer

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def kill(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        if self.alive:
            self.answers.put(None)

    def stop(self) -> None:
        self.alive = False

    def wait(self, groups: int = 1) -> list[Task]:
        """The last group, once there are so many."""
        until(lambda: len(self.asked) >= groups)
        return self.asked[-1]


def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@contextmanager
def standing(limits: Limits | None = None, token: str | None = None, **about: Any) -> Iterator[tuple[Service, Stand]]:
    """A service whose worker is a :class:`Stand`."""
    stand: Any = Stand()
    limits = limits or Limits()
    with serving(limits=limits, token=token, jobs=Jobs(stand, limits), **about) as service:
        yield service, stand


def picture(side: int = 32, seed: int = 0) -> bytes:
    """A TIFF of Hounsfield units."""
    import tifffile

    rng = np.random.default_rng(seed)
    coarse = rng.normal(-500, 250, (side // 8, side // 8))
    pixels = np.kron(coarse, np.ones((8, 8))) + rng.normal(0, 20, (side, side))
    file = io.BytesIO()
    tifffile.imwrite(file, pixels.clip(-1000, 400).astype(np.int16))
    return file.getvalue()
