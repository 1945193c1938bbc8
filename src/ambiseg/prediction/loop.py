"""Many images: files are written beside the network's work, and images are dealt out to the processes of Lightning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.processes import quiet_lightning
from ambiseg.io.source import Source
from ambiseg.prediction.exchange import Exchange
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Prediction
from ambiseg.prediction.writing import Existing, write

_WAITING, _BYTES = 2, 1 << 28  # predictions that wait for being written, at most: each holds all its masks

Named = tuple[str, Path | Source]
Progress = Callable[[float, int], None]


class Outcome(NamedTuple):
    """What came of one image: a prediction, with the folder of its files if they were written; or an error."""

    number: int
    name: str
    image: Path | Source
    prediction: Prediction | None
    folder: Path | None
    error: DataError | None


def predict_each(
    predictor: Predictor,
    images: Sequence[Named],
    out: Path | None = None,
    existing: Existing = "refuse",
    overview: bool = True,
    progress: Progress | None = None,
    part: slice = slice(None),
    exchange: Exchange | None = None,
) -> Iterator[Outcome]:
    """One image after the other, in order; a thread writes the files of one while the next goes through the network.

    Args:
        images: names and files.
        out, existing, overview: see :func:`ambiseg.predict`.
        progress: called with (done, total), in windows and slices if there is one image, else in images.
        part: of the images.
        exchange: further forms of each prediction; an image that has no such form is not predicted.
    """
    exchange = exchange or Exchange()
    numbers = range(len(images))[part]
    with ThreadPoolExecutor(1) as writer:
        waiting: deque[tuple[Outcome, Future[Path] | None]] = deque()
        for done, number in enumerate(numbers):
            name, image = images[number]

            def step(now: int, of: int, before: int = done) -> None:
                if progress is not None:
                    progress(*((now, of) if len(numbers) == 1 else (before + now / of, len(numbers))))

            found = Outcome(number, name, image, None, None, None)
            try:
                exchange.check(image)
                found = found._replace(prediction=predictor(image, name, step))
            except DataError as error:
                found = found._replace(error=error)
            job = None
            if found.prediction is not None and out is not None:
                job = writer.submit(write, found.prediction, out, existing, overview, exchange)
            waiting.append((found, job))
            del found, job  # what is handed on is not kept here, while the next one takes its memory
            while len(waiting) > _WAITING or sum(_size(one) for one, _ in waiting) > _BYTES:
                yield _written(*waiting.popleft())
        while waiting:
            yield _written(*waiting.popleft())


def _size(found: Outcome) -> int:
    masks = None if found.prediction is None else found.prediction.masks
    return 0 if masks is None else masks.labels.untyped_storage().nbytes()


def _written(found: Outcome, job: Future[Path] | None) -> Outcome:
    try:
        return found if job is None else found._replace(folder=job.result())
    except DataError as error:  # files that this image alone cannot have
        return found._replace(prediction=None, error=error)


class Processes:
    """The processes that Lightning starts, and the device of this one.

    With several, the calling program is started once for each, and images are dealt out: process r of n takes every
    n-th from number r on. What comes of an image does not depend on n.

    Args:
        accelerator, devices, num_nodes: as of Lightning's ``Trainer``.
        threads: PyTorch's per process; ``None``: Lightning divides the cores among the processes of a machine.
    """

    def __init__(
        self, accelerator: str = "auto", devices: int | str = 1, num_nodes: int = 1, threads: int | None = None
    ) -> None:
        require("train")
        from lightning.fabric import Fabric
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        with quiet_lightning():
            try:
                self._fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
            except (MisconfigurationException, TypeError, ValueError) as error:
                asked = f"accelerator {accelerator}, devices {devices}, num_nodes {num_nodes}"
                reason = " ".join(str(error).split())
                raise ConfigError(f"expected devices that are there, found {asked}: {reason}") from None
            self._fabric.launch()
        self.rank, self.count = self._fabric.global_rank, self._fabric.world_size
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = self._fabric.device

    @property
    def share(self) -> slice:
        """The images of this process."""
        return slice(self.rank, None, self.count)

    def gather(self, found: Any) -> list[Any]:
        """``found`` of all processes, in each of them. Nothing may be gathered after it: the connection is closed, so
        that no process ends while another still needs it."""
        if self.count == 1:
            return [found]
        everything: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(everything, found)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return everything
