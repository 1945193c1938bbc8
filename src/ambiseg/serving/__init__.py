"""The service: predictions over HTTP, for `ambiseg serve` and the page of `ambiseg view`.

Two processes. One answers requests and holds results; the other, the worker, reads images and runs networks, and is
started again if it ends. Names of files that a client sends are never opened: they only say the format.
"""

from __future__ import annotations

from ambiseg.serving.app import create_app
from ambiseg.serving.jobs import Job, Jobs, Refused
from ambiseg.serving.scene import PredictionScene, Scene
from ambiseg.serving.settings import Limits, Served

__all__ = ["Job", "Jobs", "Limits", "PredictionScene", "Refused", "Scene", "Served", "create_app"]
