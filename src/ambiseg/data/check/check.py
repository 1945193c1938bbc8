"""Read all cases of a data set; report statistics and every problem with its file."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress
from ambiseg._util.text import count, some
from ambiseg.data.case import Case, Cases
from ambiseg.data.check.kinds import other_data
from ambiseg.data.check.statistics import Statistics
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.labels import declared_convention
from ambiseg.data.sets.folder.layout import SPLITS
from ambiseg.data.sets.folder.manifest import find_manifest
from ambiseg.data.sets.folder.persons import find_persons
from ambiseg.data.sets.folder.settings import FILE, FolderSettings
from ambiseg.data.store import Store
from ambiseg.io.errors import FileError, Problem, one_per_file

FileOf = Callable[..., str]  # a case's name, and perhaps a reader -> the file
_SLICE = re.compile(r"^(.+?)[_-][a-z]{0,5}\d+$", re.IGNORECASE)  # patient_s12


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
    def next(self) -> str:
        """The command to go on with; ``""`` while the data cannot be used, or trained on."""
        usable = self.exit_code == 0 and not self.untrainable
        return f"ambiseg train auto --data.root {shlex.quote(str(self.path))}" if usable else ""

    @property
    def untrainable(self) -> str:
        """Why no model can be trained on data that are right in themselves; ``""`` if one can."""
        if self.statistics.empty == 1:
            return "nothing is marked: there is nothing to train on"
        patients, parts = self.statistics.patients, list(dict.fromkeys(SPLITS.values()))
        if patients < len(parts) and self.cases is not None and not self.cases.declared:
            return f"training needs {len(parts)} patients, one for each of {', '.join(parts)}, found {patients}"
        return ""

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
            "next": self.next or None,
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
        source: a folder, a manifest, a store, an ``.npz`` of :class:`~ambiseg.data.sets.arrays.Arrays`, or an opened
            data set.
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
    elif (path := Path(source)).is_dir() and (path / "store.json").is_file():
        cases = Store(path)
    elif (other := _other(path)) is not None:
        raise other
    elif path.suffix.lower() == ".npz" and path.is_file():
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
        found = [*cases.problems, *_incomplete_readers(cases), *found]
        if cases.seen is not None and any(problem.code == "E307" for problem in found):
            result.suggestion |= {"colours": table} if (table := cases.seen.colour_table()) else {}
    if statistics.cases:
        broken = {problem.file for problem in found if problem.severity == "error"}
        found += _problems_of_all(statistics, cases, broken)
        if isinstance(cases, Folder):
            found += _advice(statistics, cases, result.suggestion)
    result.problems = sorted(dict.fromkeys(found), key=lambda p: ("EWH".index(p.code[0]), p.code))
    return result


def _other(path: Path) -> FileError | None:
    """Where a path is a public data set that has a reader of its own."""
    if not path.exists() or path.suffix.lower() in (".csv", ".tsv", ".json"):
        return None
    if path.is_dir() and ((path / FILE).is_file() or (path / "images").is_dir() or find_manifest(path) is not None):
        return None
    if (found := other_data(path)) is None:
        return None
    what, fix = found
    return FileError.of("E002", path, f"expected images/ and masks/, or a manifest.csv, found {what}", fix)


def read(cases: Cases, index: int) -> tuple[Case | None, list[Problem]]:
    """One case from as many of its files as can be read, and the problems of the others."""
    try:
        return cases.read(index) if isinstance(cases, Folder) else (cases[index], [])
    except FileError as error:
        return None, [error.problem]
    except DataError as error:
        name = cases.names[index]
        return None, [Problem("E201", name, str(error).removeprefix(f"{name}: "))]


def _labels_text(folder: Folder) -> str:
    """What the values in the masks were taken to mean, and why."""
    convention = folder.convention
    if cut := next((problem.code for problem in folder.problems if problem.code in ("E205", "E312")), ""):
        return f"soft edges ({cut}): below, {convention.threshold} and above is foreground"
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


# -- problems that only the whole data set shows, and settings worth writing down ------------------------------------


def _problems_of_all(statistics: Statistics, cases: Cases, broken: set[str]) -> Iterator[Problem]:
    """Leaks between splits, copies, odd readers, classes without a pixel; ``broken``: files with errors."""
    number = {name: index for index, name in enumerate(cases.names)}

    def file_of(name: str, reader: str | None = None) -> str:
        return str(cases.file_of(number[name], reader)) if isinstance(cases, Folder) else name

    yield from _leaks(statistics)
    if isinstance(cases, Folder):
        yield from _likely_leaks(cases)
    yield from _copies(statistics, file_of)
    yield from _odd_readers(statistics, file_of, broken)
    yield from _odd_masks(statistics, file_of)


def _leaks(statistics: Statistics) -> Iterator[Problem]:
    splits: dict[str, dict[str, str]] = {}
    for case in statistics.cases:
        if case.split:
            splits.setdefault(case.patient, {}).setdefault(case.split, case.name)
    for patient, parts in splits.items():
        if len(parts) > 1:
            where = " and ".join(f"{split} ({name})" for split, name in parts.items())
            yield Problem("E401", f"patient {patient}", f"expected the patient in one split, found it in {where}")


def _likely_leaks(folder: Folder) -> Iterator[Problem]:
    """Patients whom the names put into two of the owner's splits, unless each split counts its patients anew."""
    if folder.settings.patient is not None or any(entry.split is None for entry in folder.entries):
        return
    splits = {entry.name.split("/", 1)[-1]: entry.split for entry in folder.entries}
    found = find_persons(list(splits)) if len(splits) == len(folder.entries) else None
    parts: dict[str, dict[str | None, str]] = {}
    for name, split in splits.items():
        if found is not None and (fits := re.match(found.pattern, name)):
            parts.setdefault(fits[1], {}).setdefault(split, name)
    if found is not None and (several := [patient for patient, of in parts.items() if len(of) > 1]):
        where = " and ".join(f"{split} ({name})" for split, name in parts[several[0]].items())
        message = (
            f"expected patients in one split, found {count(len(several), 'likely one', 'likely ones')} in two, if "
        )
        yield Problem("W415", "", f"{message}{found.text}: {several[0]} in {where}")


def _copies(statistics: Statistics, file_of: FileOf) -> Iterator[Problem]:
    for same in statistics.by_digest.values():
        first, *others = (statistics.cases[i] for i in same)
        for other in others:
            if other.split != first.split:
                message = f"expected a picture in one split, found it in {first.split} ({first.name}) and {other.split}"
                yield Problem("E402", file_of(other.name), message)
            elif other.patient != first.patient:
                message = f"expected a picture of its own, found the pixels of {first.name}, another patient's"
                yield Problem("W403", file_of(other.name), message)
    for name in (statistics.cases[i].name for i in statistics.blank):
        if "#" not in name:  # the outer slices of a volume are often blank
            yield Problem("W209", file_of(name), "expected something to see, found one value in all pixels")


def _odd_readers(statistics: Statistics, file_of: FileOf, broken: set[str]) -> Iterator[Problem]:
    by_reader = statistics.by_reader
    copies: set[str] = set()  # each is reported once, as a copy of the first
    for (one, other), images in statistics.together.items():
        if other not in copies and images == statistics.identical[one, other] > max(1, by_reader[one].empty):
            copies.add(other)
            message = f"expected masks of its own, found those of {one} on all {images} images they share"
            yield Problem("W404", f"reader {other}", message)
    for reader, counts in by_reader.items():
        if counts.empty == counts.images > 1 and statistics.empty < 1:
            files = {file_of(case.name, reader) for case in statistics.cases if reader in case.readers}
            if not files & broken:  # else the slices with marks may be those that could not be read
                message = f"expected marks, found {count(counts.images, 'mask')} without any"
                yield Problem("W405", f"reader {reader}", message)
    means = {reader: c.mean_iou for reader, c in by_reader.items() if c.ious and c.empty < c.images}
    usual = float(np.median(list(means.values()))) if len(means) > 2 else 0.0
    for reader, mean in means.items():
        if mean < usual / 2:
            message = f"expected a mean IoU with the others near {usual:.2f}, as readers have here, found {mean:.2f}"
            yield Problem("W408", f"reader {reader}", message)
    if not statistics.shared:
        message = "one reader per image: agreement cannot be measured, nor ambiguity learned from pairs of masks"
        yield Problem("H410", "", message)


def _odd_masks(statistics: Statistics, file_of: FileOf) -> Iterator[Problem]:
    for case in statistics.cases:
        if case.apart is not None:
            where = f" on {case.name}" if "#" in case.name else ""
            message = f"expected a mask that overlaps the others', found that of {case.apart} to overlap none{where}"
            yield Problem("W409", file_of(case.name, case.apart), message)
    if statistics.empty == 1:
        yield Problem("W407", "", f"expected marks, found none in any of {count(statistics.masks, 'mask')}")
        return
    if missed := [c for c, n in enumerate(statistics.by_class) if c in statistics.evaluated and not n.pixels]:
        names = [name if (name := statistics.classes[c]) == f"class {c}" else f"class {c} ({name})" for c in missed]
        yield Problem("W406", "", f"expected pixels of {some(names)}, found none in any mask")


def _incomplete_readers(folder: Folder) -> Iterator[Problem]:
    """Readers who lack masks of some images: often on purpose, sometimes because a file was lost."""
    readers: dict[str, dict[str, Path]] = {}  # the folder of each entry's mask
    for entry in folder.entries:
        for mask in entry.masks:
            readers.setdefault(mask.reader, {})[entry.name] = mask.path.parent
    total = len(folder.entries)
    for reader, masks in sorted(readers.items()):
        lacking = [entry.image.name for entry in folder.entries if entry.name not in masks]
        if lacking and 2 * len(masks) >= total:
            parent, *others = set(masks.values())
            own = not others and parent.name == reader  # a manifest may have all readers' masks in one folder
            message = f"expected a mask for each of {total} images, found none for {some(lacking, 3)}"
            yield Problem("H108", str(parent) if own else f"reader {reader}", message)


def _advice(statistics: Statistics, folder: Folder, suggestion: dict[str, object]) -> Iterator[Problem]:
    """Hints about settings that are not declared; values for them are added to ``suggestion``."""
    declared = folder.settings
    unclear = any(problem.code == "E306" for problem in folder.problems)
    if any(problem.code in ("E205", "E312") for problem in folder.problems):
        suggestion["labels"], unclear = {"threshold": folder.convention.threshold}, True
    if declared_convention(declared) is None and not unclear and "colours" not in suggestion:
        names = list(folder.classes) if len(folder.classes) <= 16 else len(folder.classes)
        suggestion |= {"classes": names, "labels": folder.convention.kind}
        suggestion |= {} if declared.void is None else {"void": declared.void}
        yield Problem("H411", FILE, "labels and classes are not declared, so all masks were read to find them")
    if declared.intensity is None and folder.intensity == Intensity():
        low, middle, high = statistics.percentiles()
        start, end = _two_digits(low, math.floor), _two_digits(high, math.ceil)
        if start < end:
            centre, scale = (float(f"{x:.6g}") for x in ((start + end) / 2, (end - start) / 2))
            suggestion["intensity"] = {"low": start, "high": end, "mean": centre, "std": scale}
            types = some([dtype for _, dtype in statistics.types])
            span = f"{types} values from {statistics.low:.6g} to {statistics.high:.6g}"
            middle = f"99 % lie in {low:.6g} … {high:.6g}, half below {middle:.6g}"
            yield Problem("H412", FILE, f"{span}; {middle}; they reach the network as they are")
    if folder.persons is not None:
        images, patients = count(len(folder.entries), "image"), count(len(set(folder.patients)), "patient")
        yield Problem("H414", "", f"{images} of {patients}: {folder.persons.text}")
    elif declared.patient is None and all(entry.patient is None for entry in folder.entries):
        stems = Counter(m[1] for entry in folder.entries if (m := _SLICE.match(entry.name.rsplit("/", 1)[-1])))
        named = sum(stems.values()) == len(folder.entries) and not SPLITS.keys() >= stems.keys()
        if named and 1 < len(stems) < len(folder.entries):
            suggestion["patient"] = "([^/]+)[_-][^_-]+$"
            groups = some([f"{stem} ({n})" for stem, n in stems.most_common()], 3)
            message = f"every image counts as a patient of its own; if names begin with the patient: {groups}"
            yield Problem("H413", FILE, message)


def _two_digits(value: float, towards: Callable[[float], int]) -> float:
    """Rounded to two significant digits, up or down.

    >>> _two_digits(0.3271, math.floor), _two_digits(263.0, math.ceil)
    (0.32, 270)
    """
    if value == 0 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    result = float(f"{towards(value / unit) * unit:.6g}")  # 0.33, not 0.32999999999999996
    return int(result) if result == int(result) else result
