"""``ambiseg.ensemble``: one run of several that were trained alone, without training anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import atomic_write
from ambiseg.methods.ensemble import Ensemble
from ambiseg.methods.unet import UNetConfig, UNetMethod
from ambiseg.runs import Run, Which, open_run
from ambiseg.settings import inline
from ambiseg.weights import write_weights

_MEANING = ("classes", "evaluated", "channels", "intensity", "reading", "extra")  # of inputs and outputs


def ensemble(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    command: list[str] | None = None,
) -> Run:
    """Put the weights of finished runs of the deterministic U-Net together, as the members of an ensemble.

    ``ambiseg.ensemble(["runs/a", "runs/b"], "runs/both")`` is ``ambiseg ensemble runs/a runs/b --out runs/both``. What
    comes out is the folder of a run: it is evaluated, used and reported like any other, and needs the others no more.

    Args:
        runs: of one backbone, on the same data in the same split; in one of another split, images that the ensemble is
            tested on may have been trained on.
        out: the folder of the new run. It must be new or empty.
        command: what the user typed, for the record.
    """
    opened = [open_run(run) for run in runs]
    if len(opened) < 2:
        raise ConfigError(f"ensemble: expected at least two runs, found {len(opened)}")
    Run.claim(out)
    _check_alike(opened)
    best, last = _joined(opened, "best"), _joined(opened, "last")
    first = opened[0]
    config = first.config.model_copy(update={"model": best.config})
    members = [{"run": str(run.folder), "best": run.digest("best"), "last": run.digest("last")} for run in opened]
    typed = command if command is not None else sys.argv
    how: dict[str, Any] = {"precision": first.precision, "members": members}
    with (
        Run.begin(out, config, first.card, first.split, typed, **how),
        atomic_write(Path(out) / "best.safetensors") as file,
        atomic_write(Path(out) / "last.safetensors") as other,
    ):  # both are on the disk before one takes its name
        write_weights(best, file, {})
        write_weights(last, other, {})
    return Run(out)


def _joined(runs: Sequence[Run], which: Which) -> Ensemble:
    members = [run.model(which).method for run in runs]
    return Ensemble.of([member for member in members if isinstance(member, UNetMethod)])  # all are: _check_alike


def _check_alike(runs: Sequence[Run]) -> None:
    """Numbers of all members mean the same, and no member was trained on what the others are tested on."""
    first, seen = runs[0], set[Path]()
    for run in runs:
        ours, theirs = first.config, run.config
        if not isinstance(theirs.model, UNetConfig):
            raise ConfigError(f"{run.folder}: expected a run of {UNetConfig().method}, found {theirs.model.method}")
        if run.folder.resolve() in seen:
            raise ConfigError(f"{run.folder}: expected every run once, found it twice")
        seen.add(run.folder.resolve())
        built = [("model", "published"), *(("backbone", key) for key in type(ours.backbone).model_fields)]
        for section, key in built:
            one, other = (inline(getattr(getattr(config, section), key)) for config in (ours, theirs))
            if one != other:
                found = f"{section}.{key} {one} as in {first.folder}, found {other}"
                raise ConfigError(f"{run.folder}: expected {found}")
        if differs := [key for key in _MEANING if getattr(run.card, key) != getattr(first.card, key)]:
            raise ConfigError(f"{run.folder}: expected the {differs[0]} of {first.folder}, found another")
        if (run.split.parts, run.split.fingerprint) != (first.split.parts, first.split.fingerprint):
            raise ConfigError(f"{run.folder}: expected the data and the split of {first.folder}, found others")
