"""``ambiseg.study``: a table of a paper as an experiment that can be repeated, on any data and at any scale.

    YAML of a study ─► members (configurations) × seeds ─► runs, each trained and scored once ─► table, plot, page

A study is data: a base recipe, and what its members change of it. See :mod:`ambiseg.studies.definition`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ambiseg.studies.experiment import Study

__all__ = ["study"]


def study(
    name: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    scale: str = "small",
    seeds: int | None = None,
    out: str | os.PathLike[str] = "runs/studies",
    jobs: int | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    base: str | os.PathLike[str] | None = None,
    minutes: float | None = None,
    split: str = "test",
    retry: bool = False,
    run: bool = True,
    quiet: bool = False,
) -> Study:
    """Run a study, as far as that is not done, and return it with its table.

    ``ambiseg.study("ablation", "scans/", seeds=1)`` is ``ambiseg study ablation --data scans/ --seeds 1``. Members
    that are finished, of this or of another study in ``out``, are not repeated; interrupted ones go on.

    Args:
        name: of a study that comes with the package, or the path of a YAML file.
        data: what to train on: a folder, a store, an ``.npz``, or the name of data that come with the package.
        scale: ``small`` (minutes of one core per member) or ``paper``.
        seeds: trainings of every member; ``None``: as many as the study says, usually 3.
        out: where runs, tables and pages are kept, for all studies.
        jobs: trainings at a time, of one thread each; ``None``: as many as there are cores, or one on a GPU.
        only: names of members to run, or ``member:seed``; none: all. The table has all in any case.
        settings: of all members, by key, such as ``{"trainer.epochs": 2}``.
        base: the recipe that members change, or ``auto``; ``None``: that of the study, or ``auto`` for other data.
        minutes: CPU time of every training; ``None``: as the study says.
        split: the part of the data that is scored.
        retry: try failed members again.
        run: ``False`` only reads what is there.
        quiet: print nothing.
    """
    from ambiseg.studies.experiment import Study

    found = Study(
        name, data, scale=scale, seeds=seeds, out=out, settings=settings, base=base, minutes=minutes, split=split
    )
    if run:
        found.run(jobs=jobs, only=only, retry=retry, quiet=quiet)
    found.write()
    return found
