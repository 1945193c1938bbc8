"""Read all cases of a data set; report statistics and every problem with its file."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress
from ambiseg._util.text import count
from ambiseg.data.case import Case, Cases
from ambiseg.data.check.findings import advice, incomplete_readers, problems_of_all
from ambiseg.data.check.statistics import Statistics
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.labels import declared_convention
from ambiseg.data.sets.folder.settings import FILE, FolderSettings
from ambiseg.io.errors import FileError, Problem, one_per_file


@dataclass
class CheckResult:
    """What a check found.

    Args:
        path: what was checked.
        cases: the opened data set; ``None`` if it could not be opened.
        statistics: of the cases that could be read.
        problems: errors first.
        labels: what values in the masks were taken to mean, in one line.
        suggestion: settings to write into ``ambiseg.json``.
        unread: number of cases that could not be read at all.
    """

    path: Path
    cases: Cases | None = None
    statistics: Statistics = field(default_factory=Statistics)
    problems: list[Problem] = field(default_factory=list)
    labels: str = ""
    suggestion: dict[str, object] = field(default_factory=dict)
    unread: int = 0

    @property
    def title(self) -> str:
        return self.path.name if self.cases is None else self.cases.title

    @property
    def worst(self) -> str:
        """The severity of the worst problem; ``""`` without problems."""
        return self.problems[0].severity if self.problems else ""

    @property
    def exit_code(self) -> int:
        """0: the data can be used; 1: there are errors; 2: no case could be read."""
        return int(self.worst == "error") if self.statistics.cases else 2

    @property
    def verdict(self) -> str:
        """Number of problems, such as ``1 error, 2 hints``."""
        counts = Counter(problem.severity for problem in self.problems)
        return ", ".join(count(number, severity) for severity, number in counts.items()) or "no problems"

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def relative(self, problem: Problem) -> Problem:
        """The problem with its file's path relative to the folder that was checked."""
        return replace(problem, file=problem.file.removeprefix(f"{self.folder}{os.sep}"))

    def groups(self) -> Iterator[tuple[str, list[Problem]]]:
        """Problems by code, errors first; within a code, those with the same remedy are neighbours."""
        for code, same in groupby(self.problems, lambda problem: problem.code):
            yield code, sorted(map(self.relative, same), key=lambda problem: problem.remedy)

    @property
    def settings_file(self) -> str:
        """The file for settings that a remedy names; ``""`` if no remedy names any."""
        named = any(re.search(r'"\w+": |`\w+`', p.remedy) for p in self.problems if p.severity != "hint")
        return str(self.folder / FILE) if named else ""

    def as_dict(self) -> dict[str, object]:
        """Everything, as JSON has it; numbers that do not exist are ``None``."""
        result: dict[str, object] = {
            "format": "ambiseg.check/1",
            "path": str(self.path),
            "title": self.title,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "problems": [self.relative(problem).as_dict() for problem in self.problems],
            "suggested_settings": self.suggestion,
        }
        if self.statistics.cases:
            result["statistics"] = {"unread": self.unread, "labels": self.labels, **self.statistics.as_dict()}
        return json.loads(json.dumps(result), parse_constant=lambda _: None)  # nan is not JSON


def check(
    source: str | os.PathLike[str] | Cases, settings: FolderSettings | None = None, quiet: bool = False
) -> CheckResult:
    """Read every case of a folder, a manifest or any data set.

    Raises ``DataError`` only if there is nothing to read: no such path, no images and masks, settings or a manifest
    that cannot be parsed. All other problems are in the result.

    Args:
        source: a folder, a manifest, an ``.npz`` of :class:`~ambiseg.data.sets.arrays.Arrays`, or an opened data set.
        settings: override the folder's own.
        quiet: no progress on the error stream.

    >>> import tempfile
    >>> import numpy as np
    >>> root = Path(tempfile.mkdtemp())
    >>> for part in ("images", "masks/Ann", "masks/Bob"):
    ...     (root / part).mkdir(parents=True)
    ...     np.save(root / part / "a.npy", np.arange(6, dtype=np.uint8).reshape(2, 3) // 3)
    >>> np.save(root / "masks/Bob/a.npy", np.zeros((2, 2), np.uint8))
    >>> for problem in check(root).problems[:1]:
    ...     print(problem.code, Path(problem.file).name, problem.message)
    E301 a.npy expected 2×3 as its image a.npy, found 2×2
    """
    settings = settings or FolderSettings()
    if isinstance(source, Cases):
        cases, path = source, Path(getattr(source, "root", source.title))
    elif (path := Path(source)).suffix.lower() == ".npz" and path.is_file():
        cases = Arrays(path, settings.classes or 2, settings.title, settings.intensity, settings.void)
    else:
        cases = Folder(path, settings, quiet=quiet, strict=False)
    statistics = Statistics(cases.classes, cases.evaluated, len(cases))
    result = CheckResult(path, cases, statistics)
    found: list[Problem] = []
    splits = cases.declared or [None] * len(cases)
    for index, split in enumerate(progress(splits, len(cases), "checking", quiet)):
        case, problems = read(cases, index)
        found += problems
        if case is not None:
            statistics.add(case, split)
    result.unread = len(cases) - len(statistics.cases)
    found = one_per_file(found)
    if isinstance(cases, Folder):
        result.labels = _labels_text(cases)
        found = [*cases.problems, *incomplete_readers(cases), *found]
        if cases.seen is not None and any(problem.code == "E307" for problem in found):
            result.suggestion |= {"colours": table} if (table := cases.seen.colour_table()) else {}
    if statistics.cases:
        broken = {problem.file for problem in found if problem.severity == "error"}
        found += problems_of_all(statistics, cases, broken)
        if isinstance(cases, Folder):
            found += advice(statistics, cases, result.suggestion)
    result.problems = sorted(dict.fromkeys(found), key=lambda p: ("EWH".index(p.code[0]), p.code))
    return result


def read(cases: Cases, index: int) -> tuple[Case | None, list[Problem]]:
    """One case from as many of its files as can be read, and the problems of the others."""
    if isinstance(cases, Folder):
        return cases.read(index)
    try:
        return cases[index], []
    except FileError as error:
        return None, [error.problem]
    except DataError as error:
        return None, [Problem("E201", cases.names[index], str(error))]


def _labels_text(folder: Folder) -> str:
    """What the values in the masks were taken to mean, and why."""
    convention = folder.convention
    if any(problem.code == "E306" for problem in folder.problems):
        return "not clear (E306): below, each value is a class of its own"
    means = {
        "ids": f"class ids 0 … {len(convention.classes) - 1}",
        "binary": "0 is background, 255 is foreground",
        "table": "as the table of values says",
        "threshold": f"{convention.threshold} and above is foreground",
        "colours": "as the table of colours says",
    }[convention.kind]
    void = "" if convention.void is None else f", {convention.void} is void"
    return means + void + (" (declared)" if declared_convention(folder.settings) else " (from all masks together)")
