"""``cost.json``: what the training of a run has cost so far."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ambiseg._util.errors import ConfigError
from ambiseg._util.reading import read_json, validated

FILE = "cost.json"
_FORMAT = "ambiseg.Cost/1"


class Cost(BaseModel):
    """Time that a training took, loading of data and validation included.

    Attributes:
        cpu_seconds: CPU time of all its processes and of those that load data for them.
        wall_seconds: time that passed.
        epochs: the finished epochs that this covers; fewer than the run has, if it was begun by an earlier version.
        processes, threads: how many processes trained, and PyTorch's threads in each.
        device: name of the processor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpu_seconds: float = Field(ge=0)
    wall_seconds: float = Field(ge=0)
    epochs: int = Field(ge=0)
    processes: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    device: str = ""

    def written(self) -> str:
        """The text of the file."""
        return json.dumps({"format": _FORMAT, **self.model_dump()}, indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Cost | None:
    """``None`` of a run that has no record; :class:`ConfigError` for anything that is none."""
    if not path.exists():
        return None
    content = read_json(path, "the cost of a training", dict)
    if (found := content.pop("format", None)) != _FORMAT:
        raise ConfigError(f"{path}: expected a cost of format {_FORMAT}, found {found}")
    return validated(Cost, content, path, "the cost of a training")
