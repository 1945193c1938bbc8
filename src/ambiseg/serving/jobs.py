"""The work queue: predictions that wait, the one group that is computed, and those that are finished."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count as counter
from typing import Any, Literal

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.io.source import Source
from ambiseg.prediction.result import Options, Prediction
from ambiseg.serving.metrics import Metrics
from ambiseg.serving.scene import PredictionScene, Scene
from ambiseg.serving.settings import Limits
from ambiseg.serving.supervisor import Supervisor, WorkerLost
from ambiseg.serving.tasks import Pixels, Task
from ambiseg.serving.uploads import Upload

State = Literal["waiting", "running", "done", "failed", "cancelled"]
Dress = Callable[[Prediction], Scene]
Given = Source | Upload | Callable[[], Source]
_LOOK = 1.0  # seconds between two looks at an idle worker
_POLITE = 2.0  # seconds that a cancelled prediction has before its worker is ended
_AGAIN = 5.0  # seconds between two attempts to start a worker that does not start


class Refused(Exception):
    """The queue is full, or the service is about to end; ``after`` is in how many seconds it may be otherwise."""

    def __init__(self, message: str, after: int = 1) -> None:
        super().__init__(message)
        self.after = after


class Job:
    """One prediction, from the time it is asked for until it is dropped.

    Attributes:
        id: that clients name it by; nobody can guess it.
        state: ``waiting``, ``running``, ``done``, ``failed`` or ``cancelled``.
        done, total: images or windows that went through the network, and how many will; 0 where not known yet.
        error: one line, if it failed.
        status: of HTTP, for the error.
        scene: what there is to look at, when it is done.
        ended: resolves, to the job, when it is in one of the last three states.
    """

    def __init__(self, name: str, model: int, options: Options, given: Given | None, dress: Dress | None) -> None:
        self.id, self.name, self.model, self.options = secrets.token_urlsafe(12), name, model, options
        self.state: State = "waiting"
        self.done = self.total = 0
        self.error, self.status = "", 500
        self.scene: Scene | None = None
        self.ended: Future[Job] = Future()
        self.created = time.time()
        self.number, self.alone = 0, False  # of its task; not again beside others
        self.pixels: Pixels | None = None  # what was read
        self._given, self._dress = given, dress

    def about(self) -> dict[str, Any]:
        """As ``/v1/predictions/{id}`` has it."""
        summary = None if self.scene is None else self.scene.summary()
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "error": self.error or None,
            "prediction": summary,
        }


class Jobs:
    """The queue of a service, and its results.

    Args:
        supervisor: of the worker.
        limits: on the queue, on time, and on what is kept.
        metrics: that are counted.
    """

    def __init__(self, supervisor: Supervisor, limits: Limits, metrics: Metrics | None = None) -> None:
        self.supervisor, self.limits, self.metrics = supervisor, limits, metrics or Metrics()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._numbers, self._reserved = counter(1), 0
        self._changed = threading.Condition(threading.RLock())
        self._closing, self._problem, self._tried = False, "", 0.0
        self._thread: threading.Thread | None = None

    # -- for the service -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker, and wait until it has loaded its models; :class:`ConfigError` if it cannot."""
        if self._thread is None:
            self.supervisor.start()
            self._thread = threading.Thread(target=self._run, daemon=True, name="ambiseg-jobs")
            self._thread.start()

    def close(self) -> None:
        """Refuse new work, cancel what there is, and end the worker."""
        with self._changed:
            self._closing = True
            for job in [*self._waiting, *self._running.values()]:
                self._end(job, "cancelled", "the service ended before it was computed", 503)
            self._waiting.clear()
            self._jobs.clear()
            self._changed.notify_all()
        self.supervisor.kill("was stopped with the service")
        if self._thread is not None:
            self._thread.join()
        self.supervisor.stop()

    @property
    def health(self) -> dict[str, Any]:
        """As ``/healthz`` has it."""
        state = (
            "failing" if self._problem else "ok" if self._thread is not None and self.supervisor.alive else "starting"
        )
        about = {"status": state, "waiting": len(self._waiting), "running": len(self._running)}
        return about | ({"error": self._problem} if self._problem else {})

    @property
    def gauges(self) -> dict[str, tuple[str, float]]:
        """For ``/metrics``."""
        kept = [job for job in list(self._jobs.values()) if job.scene is not None]
        return {
            "ambiseg_queue_waiting": ("Predictions that wait.", len(self._waiting)),
            "ambiseg_queue_running": ("Predictions that are computed.", len(self._running)),
            "ambiseg_queue_reading": ("Requests whose body is being read.", self._reserved),
            "ambiseg_results_kept": ("Results that are held.", len(kept)),
            "ambiseg_results_bytes": ("Memory of these.", sum(job.scene.nbytes for job in kept if job.scene)),
            "ambiseg_worker_up": ("Whether there is a worker.", float(self.supervisor.alive)),
            "ambiseg_worker_starts": ("Workers that were started.", self.supervisor.starts),
        }

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue while a request is being read; :class:`Refused` if there is none."""
        with self._changed:
            self._admit()
            self._reserved += 1
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= 1

    def submit(
        self,
        source: Given,
        name: str,
        model: int = 0,
        options: Options | None = None,
        dress: Dress | None = None,
        reserved: bool = False,
        kept: bool = True,
    ) -> Job:
        """Ask for a prediction.

        Args:
            source: an image; or a function that opens it, which is called in a thread of the queue; or an upload, which
                the worker reads.
            name: of the image.
            model: which of those that are served.
            options: of the prediction.
            dress: what makes the scene of the prediction.
            reserved: whether it takes the place of a request, see :meth:`place`.
            kept: whether the result is held for later questions, in the place of older ones.
        """
        job = Job(name, model, options or Options(), source, dress)
        with self._changed:
            self._admit(1 if reserved else 0)
            if kept:
                self._jobs[job.id] = job
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def add(self, name: str, scene: Scene, model: int = 0) -> Job:
        """Keep a scene that needs no prediction, as a job that is done."""
        job = Job(name, model, Options(), None, None)
        with self._changed:
            self._jobs[job.id] = job
            job.scene = scene
            self._end(job, "done")
        return job

    def get(self, identifier: str) -> Job | None:
        """The job of that id, unless it was dropped."""
        return self._jobs.get(identifier)

    def drop(self, job: Job) -> None:
        """Forget a job at once, and stop computing it."""
        with self._changed:
            self._jobs.pop(job.id, None)
            if job.state == "waiting":
                with suppress(ValueError):
                    self._waiting.remove(job)
                self._end(job, "cancelled", "cancelled by the client", 409)
            elif job.state == "running":
                number = job.number
                self.supervisor.cancel(number)
                timer = threading.Timer(_POLITE, self._insist, (number,))
                timer.daemon = True
                timer.start()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _admit(self, own: int = 0) -> None:
        if self._closing:
            raise Refused("the service is about to end", 10)
        busy = len(self._waiting) + len(self._running) + self._reserved - own
        if busy >= self.limits.queue:
            raise Refused(f"expected at most {self.limits.queue} requests at a time, found so many: try again later", 2)

    def _insist(self, number: int) -> None:
        with self._changed:
            if number in self._running:
                self.supervisor.kill("was ended because a prediction was cancelled")

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                if not self._waiting:
                    self._changed.wait(_LOOK)
            if self._closing:
                return
            if not self.supervisor.alive and not self._restarted():
                continue
            group = self._group()
            if group:
                self._compute(group)

    def _restarted(self) -> bool:
        """Start the worker again; whoever waits for one that does not start is told why."""
        if time.monotonic() - self._tried < _AGAIN and self._problem:
            time.sleep(0.1)
            return False
        self._tried = time.monotonic()
        try:
            self.supervisor.start()
        except ConfigError as error:
            with self._changed:
                self._problem = " ".join(str(error).split())
                while self._waiting:
                    self._end(self._waiting.popleft(), "failed", self._problem, 503)
            return False
        self._problem = ""
        return True

    def _group(self) -> list[Job]:
        """The next jobs that may go through the network together; usually one."""
        with self._changed:
            if not self._waiting:
                return []
            group = [self._waiting.popleft()]
            first = group[0]
            if self._fits_batch(first):
                for job in [job for job in self._waiting if self._fits_batch(job)]:
                    if len(group) < self.limits.batch and (job.model, job.options) == (first.model, first.options):
                        self._waiting.remove(job)
                        group.append(job)
            for job in group:
                job.state, job.number = "running", next(self._numbers)
                self._running[job.number] = job
        return group

    def _fits_batch(self, job: Job) -> bool:
        """Whether a job may share a batch, as far as can be said before its image is read."""
        given = job._given
        if job.alone:
            return False
        if isinstance(given, Upload):
            return given.size <= self.limits.batch_file and len(given.files.names) == 1
        return isinstance(given, Source) and given.slices == 1 and given.nbytes <= self.limits.batch_file

    def _compute(self, group: list[Job]) -> None:
        tasks = []
        for job in group:
            try:
                tasks.append(Task(job.number, job.model, job.name, job.options, self._image(job)))
            except DataError as error:
                self._finish(job, "failed", " ".join(str(error).split()), 422)
            except Exception as error:
                self._finish(job, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}", 500)
        reason = f"took longer than {self.limits.seconds:g} seconds"
        timer = threading.Timer(self.limits.seconds, self.supervisor.kill, (reason,))
        timer.daemon = True
        timer.start()
        try:
            if tasks:
                self.supervisor.predict(tasks)
            while self._running:
                self._take(self.supervisor.receive())
        except WorkerLost as lost:
            self._lost(str(lost), str(lost) == reason)
        finally:
            timer.cancel()

    def _image(self, job: Job) -> Any:
        given, job._given = job._given, None
        if isinstance(given, Upload):
            job._given = given  # its folder is removed when the worker has read it
            return given.files
        source = given() if callable(given) else given
        assert source is not None
        job.pixels = Pixels.of(source)
        return job.pixels

    def _take(self, message: Any) -> None:
        kind, number, *rest = message
        job = self._running.get(number)
        if job is None:
            return
        if kind == "progress":
            job.done, job.total = rest
        elif kind == "read":
            job.pixels = rest[0]
            _close(job)
        elif kind == "done":
            self._done(job, rest[0])
        elif kind == "cancelled":
            self._finish(job, "cancelled", "cancelled by the client", 409)
        elif kind == "refused":
            self._finish(job, "failed", rest[0], 422)
        else:
            self._finish(job, "failed", rest[0], 500)

    def _done(self, job: Job, found: Any) -> None:
        try:
            assert job.pixels is not None
            prediction = found.prediction(job.pixels.source(job.name))
            job.scene = PredictionScene(prediction, job.model) if job._dress is None else job._dress(prediction)
        except Exception as error:
            self._finish(job, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}", 500)
            return
        job.done = job.total = max(job.total, 1)
        self._finish(job, "done")

    def _lost(self, how: str, slow: bool) -> None:
        """The worker ended: what it was computing has failed, unless it was not alone; then each is tried alone."""
        with self._changed:
            jobs = list(self._running.values())
            for job in reversed(jobs if len(jobs) > 1 else []):
                if job.pixels is not None and job._given is None:
                    job._given = job.pixels.source(job.name)
                job.state, job.alone = "waiting", True
                self._running.pop(job.number)
                self._waiting.appendleft(job)
            for job in list(self._running.values()):
                hint = "" if slow else "; a new one is started: send it again, unless it always ends so"
                self._finish(job, "failed", f"the worker that computed this {how}{hint}", 504 if slow else 503)
        self.metrics.lost += 1

    def _finish(self, job: Job, state: State, error: str = "", status: int = 500) -> None:
        with self._changed:
            self._running.pop(job.number, None)
            self._end(job, state, error, status)

    def _end(self, job: Job, state: State, error: str = "", status: int = 500) -> None:
        """Everything that goes with a job's end, once."""
        with self._changed:
            if job.ended.done():
                return
            job.state, job.error, job.status = state, error, status
            job.pixels = None
            _close(job)
            self.metrics.ended(state)
            if job.id in self._jobs:
                self._jobs.move_to_end(job.id)
                self._tidy()
        job.ended.set_result(job)

    def _tidy(self) -> None:
        """Drop the oldest results beyond the limits; the newest stays."""
        ended = [job for job in self._jobs.values() if job.state not in ("waiting", "running")]
        size = sum(job.scene.nbytes for job in ended if job.scene is not None)
        while len(ended) > 1 and (len(ended) > self.limits.kept or size > self.limits.kept_bytes):
            oldest = ended.pop(0)
            size -= 0 if oldest.scene is None else oldest.scene.nbytes
            self._jobs.pop(oldest.id, None)


def _close(job: Job) -> None:
    """Remove the files of a job's upload."""
    if isinstance(job._given, Upload):
        job._given.close()
        job._given = None
