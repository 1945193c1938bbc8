"""The worker: the process that reads images and runs networks. ``python -m ambiseg.serving.worker``.

It takes messages from its standard input and answers on its standard output. When the service goes away, so does it.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from ambiseg._util.errors import DataError
from ambiseg.io.open import open_source
from ambiseg.io.source import Source
from ambiseg.prediction.predictor import Predictor
from ambiseg.runs import TrainedModel, load
from ambiseg.serving.tasks import Files, Found, Pixels, Task
from ambiseg.serving.wire import receive, send

_OFTEN = 0.05  # seconds between two words about progress


class _Cancelled(Exception):
    """Nobody waits for this prediction any more."""


class Worker:
    """The other end of :class:`~ambiseg.serving.supervisor.Supervisor`."""

    def __init__(self, inbound: BinaryIO, outbound: BinaryIO) -> None:
        self.inbound, self.outbound = inbound, outbound
        self.models: list[TrainedModel] = []
        self.waiting: queue.SimpleQueue[list[Task]] = queue.SimpleQueue()
        self.cancelled: set[int] = set()

    def run(self) -> None:
        """Load the models, then compute until the service is gone."""
        begin = receive(self.inbound)
        try:
            import torch

            if begin["threads"] is not None:
                torch.set_num_threads(begin["threads"])
            self.models = [load(run, which, begin["device"]) for run, which in begin["models"]]
        except Exception as error:
            send(self.outbound, ("unable", " ".join(str(error).split()), isinstance(error, DataError | OSError)))
            return
        send(self.outbound, ("ready",))
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            for answer in self._answers(self.waiting.get()):
                send(self.outbound, answer)

    def _listen(self) -> None:
        try:
            while True:
                kind, content = receive(self.inbound)
                if kind == "cancel":
                    self.cancelled.add(content)
                else:
                    self.waiting.put(content)
        except (EOFError, OSError):
            os._exit(0)  # in the middle of whatever is computed

    def _answers(self, tasks: Sequence[Task]) -> Iterator[tuple[Any, ...]]:
        for task in tasks:
            try:
                predictor = Predictor(self.models[task.model], task.options)
                source, read = self._read(task, predictor)
                if read is not None:
                    yield "read", task.number, read
                yield "done", task.number, Found.of(predictor(source, task.name, self._progress(task)))
            except _Cancelled:
                yield "cancelled", task.number
            except DataError as error:
                message = " ".join(str(error).split())
                if isinstance(task.image, Files):
                    message = task.image.plain(message, task.name)
                yield "refused", task.number, message
            except Exception as error:
                yield "failed", task.number, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.cancelled.discard(task.number)

    def _read(self, task: Task, predictor: Predictor) -> tuple[Source, Pixels | None]:
        """The image in memory, and its pixels if the service has not got them yet."""
        if isinstance(task.image, Pixels):
            return task.image.source(), None
        pixels = Pixels.of(open_source(task.image.path, predictor.reading))
        return pixels.source(), pixels

    def _progress(self, task: Task) -> Any:
        said = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal said
            if task.number in self.cancelled:
                raise _Cancelled
            if (now := time.monotonic()) - said > _OFTEN:
                said = now
                send(self.outbound, ("progress", task.number, done, total))

        return report


def main() -> None:
    """Run a worker on the standard streams; what libraries print goes to the error stream."""
    inbound, outbound = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the service as well, which then ends this process
    try:
        Worker(inbound, outbound).run()
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main()
