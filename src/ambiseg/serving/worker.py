"""The worker: the process that reads images and runs networks. ``python -m ambiseg.serving.worker``.

It takes messages from its standard input and answers on its standard output. When the service goes away, so does it.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch

from ambiseg._util.errors import DataError
from ambiseg.decisions.calibration import Calibration
from ambiseg.io.open import open_source
from ambiseg.io.source import Source
from ambiseg.prediction.guarantees import calibration_of
from ambiseg.prediction.looking import Lookout
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Options, Prediction
from ambiseg.runs import TrainedModel, Which, open_run
from ambiseg.serving.tasks import Files, Found, Pixels, Task
from ambiseg.serving.wire import receive, send

_OFTEN = 0.05  # seconds between two words about progress
_TOGETHER, _ELSEWHERE = {"cpu": 1 << 15}, 1 << 22  # pixels of a batch: on CPUs larger ones take longer than one by one
_ROUNDING = 1e-3  # differences in probability that are rounding: in a batch, sums are made in another order

Answer: TypeAlias = tuple[Any, ...]


class _Cancelled(Exception):
    """Nobody waits for this prediction any more."""


class _Opened(NamedTuple):
    """An image that was read, and what predicts it."""

    task: Task
    predictor: Predictor
    source: Source
    read: Pixels | None


class _Model(NamedTuple):
    """What is loaded of a run."""

    model: TrainedModel
    calibration: Calibration | None
    lookout: Lookout

    @staticmethod
    def load(run: str, which: Which, device: str) -> _Model:
        """A calibration or statistics of other weights are left out, with a line on the error stream."""
        opened, calibration = open_run(run), None
        model = opened.model(which, device)
        lookout = Lookout(model, None)
        try:
            calibration = calibration_of(opened, which, None)
        except DataError as error:
            print(f"ambiseg: warning: {error}; nothing is guaranteed", file=sys.stderr)
        try:
            lookout = Lookout(model, opened)
        except DataError as error:
            print(f"ambiseg: warning: {error}; whether to look is not said", file=sys.stderr)
        return _Model(model, calibration, lookout)

    def predictor(self, options: Options) -> Predictor:
        """As one for the run itself, without reading its files again."""
        found = Predictor(self.model, options)
        found.calibration, found.lookout = self.calibration, self.lookout
        return found


class Worker:
    """The other end of :class:`~ambiseg.serving.supervisor.Supervisor`."""

    def __init__(self, inbound: BinaryIO, outbound: BinaryIO) -> None:
        self.inbound, self.outbound = inbound, outbound
        self.models: list[_Model] = []
        self.waiting: queue.SimpleQueue[list[Task]] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.trusted: dict[tuple[int, int, int], bool] = {}  # by model, symmetries, images: a batch gives the same

    def run(self) -> None:
        """Load the models, then compute until the service is gone."""
        begin = receive(self.inbound)
        try:
            if begin["threads"] is not None:
                torch.set_num_threads(begin["threads"])
            self.models = [_Model.load(run, which, begin["device"]) for run, which in begin["models"]]
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

    def _answers(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        """What comes of tasks for one model with the same options."""
        opened: list[_Opened] = []
        for task in tasks:
            found = self._opened(task)
            if isinstance(found, _Opened):
                opened.append(found)
                if found.read is not None:
                    yield "read", task.number, found.read
            else:
                yield found
        alike: dict[Any, list[_Opened]] = {}
        for one in opened:
            alike.setdefault((one.source.size, one.source.channels, one.source.slices), []).append(one)
        for group in alike.values():
            most = self._at_once(group[0])
            for start in range(0, len(group), most):
                yield from self._found(group[start : start + most])
        self.cancelled.difference_update(task.number for task in tasks)

    def _opened(self, task: Task) -> _Opened | Answer:
        """The image in memory, and its pixels if the service has not got them yet."""
        found = list[_Opened]()

        def read() -> Answer | None:
            predictor, pixels = self.models[task.model].predictor(task.options), None
            if isinstance(task.image, Files):
                pixels = Pixels.of(open_source(task.image.path, predictor.reading))
            source = (pixels or task.image).source()  # type: ignore[union-attr]
            found.append(_Opened(task, predictor, source, pixels))
            return None

        problem = self._told(task, read)
        return found[0] if problem is None else problem

    def _at_once(self, one: _Opened) -> int:
        """How many images such as this one go through the network together."""
        device, source = one.predictor.device.type, one.source
        if source.slices > 1 or one.predictor.method.incoherent:
            return 1
        return max(1, _TOGETHER.get(device, _ELSEWHERE) // math.prod(source.size))

    def _found(self, group: Sequence[_Opened]) -> Iterator[Answer]:
        for one in group:
            if one.task.number in self.cancelled:
                yield "cancelled", one.task.number
        group = [one for one in group if one.task.number not in self.cancelled]
        if not group:
            return
        first = group[0].predictor
        key = group[0].task.model, first.options.symmetries, len(group)
        if len(group) == 1 or self.trusted.get(key) is False:
            yield from map(self._alone, group)
            return
        try:
            made = first.together([one.source for one in group], [one.task.name for one in group])
        except Exception:  # one of them is told apart below
            yield from map(self._alone, group)
            return
        if key not in self.trusted:  # of a batch of this length for the first time
            again = first(group[0].source, group[0].task.name), first(group[-1].source, group[-1].task.name)
            self.trusted[key] = same(made[0], again[0]) and same(made[-1], again[1])
            if not self.trusted[key]:
                yield from map(self._alone, group)
                return
        for one, prediction in zip(group, made, strict=True):
            yield "done", one.task.number, Found.of(prediction)

    def _alone(self, one: _Opened) -> Answer:
        report = self._progress(one.task)

        def work() -> Answer:
            report(0, 0)
            return "done", one.task.number, Found.of(one.predictor(one.source, one.task.name, report))

        found = self._told(one.task, work)
        assert found is not None
        return found

    def _told(self, task: Task, work: Callable[[], Answer | None]) -> Answer | None:
        """What work gives, or what is wrong with it."""
        try:
            return work()
        except _Cancelled:
            return "cancelled", task.number
        except DataError as error:
            message = " ".join(str(error).split())
            if isinstance(task.image, Files):
                message = task.image.plain(message, task.name)
            return "refused", task.number, message
        except Exception as error:
            return "failed", task.number, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

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


def same(one: Prediction, other: Prediction) -> bool:
    """Whether two predictions of an image differ by rounding alone."""
    a, b = one.masks, other.masks
    assert a.marginal is not None
    assert b.marginal is not None
    if one.strata is not None and other.strata is not None:
        if not torch.allclose(one.strata.weights, other.strata.weights, atol=_ROUNDING):
            return False
        if (one.strata.centres != other.strata.centres).float().mean() > _ROUNDING:
            return False
    return bool((a.marginal - b.marginal).abs().mean() < _ROUNDING)


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
