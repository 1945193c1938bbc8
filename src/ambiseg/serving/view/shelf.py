"""A queue for pages that predict nothing: it only keeps what was opened."""

from __future__ import annotations

from typing import Any

from ambiseg._util.errors import DataError
from ambiseg.serving.jobs import Job, Jobs
from ambiseg.serving.settings import Limits
from ambiseg.serving.supervisor import Supervisor


class Shelf(Jobs):
    """Jobs without a worker.

    >>> Shelf().health["status"]
    'ok'
    """

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(Supervisor([]), limits or Limits())

    def start(self) -> None:
        """Nothing needs to be started."""

    @property
    def health(self) -> dict[str, Any]:
        """Always ready."""
        return {"status": "ok", "waiting": 0, "running": 0}

    def submit(self, *_: Any, **__: Any) -> Job:
        """Refused: there is no model."""
        raise DataError("expected a run, which predicts, found none: start `ambiseg view RUN`")
