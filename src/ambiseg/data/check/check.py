"""Read everything of a data set and say what is there and what is wrong, each problem with its file."""

from __future__ import annotations

import json as json_module
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import write_text
from ambiseg._util.progress import progress
from ambiseg._util.text import count, some
from ambiseg.data.case import Case, Cases
from ambiseg.data.check.survey import Survey
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.arrays import Arrays
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.labels import declared_convention
from ambiseg.data.sets.folder.layout import SPLITS
from ambiseg.data.sets.folder.settings import FILE, FolderSettings
from ambiseg.io.errors import FileError, Problem, one_per_file

Locate = Callable[..., str]  # a case's name, and perhaps a reader -> the file
_ORDER = ("error", "warning", "hint")
_SLICE = re.compile(r"^(.+?)[_-][a-z]{0,5}\d+$", re.IGNORECASE)


@dataclass
class Report:
    """What a check found.

    Args:
        path: what was checked.
        survey: the numbers; ``None`` if nothing could be read.
        problems: errors first.
        labels: in a line, what values in the masks were taken to mean.
        suggestion: settings that are worth writing into ``ambiseg.json``.
        unread: cases that could not be read at all.
    """

    path: Path
    title: str
    survey: Survey | None = None
    problems: list[Problem] = field(default_factory=list)
    labels: str = ""
    suggestion: dict[str, object] = field(default_factory=dict)
    unread: int = 0

    def count(self, severity: str) -> int:
        return sum(problem.severity == severity for problem in self.problems)

    @property
    def exit_code(self) -> int:
        """0: can be used; 1: errors; 2: nothing could be read."""
        if self.survey is None or not self.survey.cases:
            return 2
        return 1 if self.count("error") else 0

    @property
    def verdict(self) -> str:
        counts = [count(self.count(s), s) for s in _ORDER if self.count(s)]
        return ", ".join(counts) if counts else "no problems"

    def relative(self, problem: Problem) -> Problem:
        """The problem with its file's path as seen from the folder that was checked."""
        top = self.path if self.path.is_dir() else self.path.parent
        file = problem.file.removeprefix(f"{top}{os.sep}")
        return Problem(problem.code, file, problem.message, problem.fix)

    def groups(self) -> Iterator[tuple[str, list[Problem]]]:
        """Problems of one kind together, the worst first; among them those with the same remedy."""
        kinds = sorted({p.code for p in self.problems}, key=lambda code: ("EWH".index(code[0]), code))
        for code in kinds:
            by_remedy: dict[str, list[Problem]] = {}
            for problem in self.problems:
                if problem.code == code:
                    by_remedy.setdefault(problem.remedy, []).append(self.relative(problem))
            yield code, [problem for same in by_remedy.values() for problem in same]

    @property
    def settings_file(self) -> str:
        """Where settings go that a remedy names, if any does."""
        named = any(re.search(r'"\w+": |`\w+`', p.remedy) for p in self.problems if p.severity != "hint")
        return str((self.path if self.path.is_dir() else self.path.parent) / FILE) if named else ""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON; numbers that do not exist are null."""
        result: dict[str, object] = {
            "format": "ambiseg.check/1",
            "path": str(self.path),
            "title": self.title,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "problems": [self.relative(problem).as_dict() for problem in self.problems],
            "suggested_settings": self.suggestion,
        }
        if self.survey is not None and self.survey.cases:
            result["statistics"] = {"unread": self.unread, "labels": self.labels, **self.survey.as_dict()}
        return _plain(result)  # type: ignore[return-value]


def check(source: str | os.PathLike[str] | Cases, settings: FolderSettings | None = None, quiet: bool = False) -> Report:
    """Read every case of a folder, a manifest or any data set.

    Raises ``DataError`` only if there is nothing to read: no such path, no images and masks, settings or a manifest
    that cannot be understood. All else is in the report.

    >>> from ambiseg.data.case import Case
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> for part in ("images", "masks/Ann", "masks/Bob"):
    ...     (root / part).mkdir(parents=True)
    ...     np.save(root / part / "a.npy", np.arange(6, dtype=np.uint8).reshape(2, 3) // 3)
    >>> np.save(root / "masks/Bob/a.npy", np.zeros((2, 2), np.uint8))
    >>> for problem in check(root).problems[:1]:
    ...     print(problem.code, Path(problem.file).name, problem.message)
    E301 a.npy expected 2×3 as its image a.npy, found 2×2
    """
    if isinstance(source, Cases):
        cases, path = source, Path(getattr(source, "root", source.title))
    else:
        path = Path(source)
        cases = _open(path, settings or FolderSettings(), quiet)
    report = Report(path, cases.title)
    found: list[Problem] = []
    report.survey = survey = Survey(cases.classes, cases.evaluated, len(cases))
    if isinstance(cases, Folder):
        report.labels = _labels_text(cases)
        found += [*cases.problems, *_incomplete(cases)]
    met: list[Problem] = []  # while reading
    for index in progress(range(len(cases)), len(cases), "checking", quiet):
        case, wrong = _read(cases, index)
        met += wrong
        if case is None:
            report.unread += 1
        else:
            survey.add(case, cases.declared[index] if cases.declared else None)
    found += one_per_file(met)
    if isinstance(cases, Folder) and cases.seen is not None and any(p.code == "E307" for p in found):
        table = cases.seen.colour_table()
        report.suggestion |= {"colours": table} if table else {}
    if survey.cases:
        broken = {problem.file for problem in found if problem.severity == "error"}
        found += _about_all(survey, cases, report, broken)
    unique = dict.fromkeys(found)  # a volume's problem shows in each of its slices
    report.problems = sorted(unique, key=lambda p: ("EWH".index(p.code[0]), p.code))
    return report


def run(
    path: str | os.PathLike[str],
    settings: FolderSettings | None = None,
    html: str | os.PathLike[str] | None = None,
    json: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> int:
    """Check and print; the body of ``ambiseg data check``.

    Args:
        path: a folder, a manifest, or an ``.npz`` of :class:`~ambiseg.data.sets.arrays.Arrays`.
        settings: win over the folder's own.
        html: a page with pictures to write.
        json: a file to write all numbers and problems to; ``-`` prints them instead of everything else.
        quiet: one line for each error and warning, and nothing else.

    Returns:
        0 when the data can be used, 1 when a problem keeps them from it, 2 when nothing can be read.
    """
    from ambiseg.data.check.text import print_lines, print_report

    try:
        for target in (html, None if json == "-" else json):
            if target is not None and not Path(target).resolve().parent.is_dir():
                raise DataError(f"{target}: expected a folder to write into, found none named {Path(target).parent}")
            if target is not None and Path(target).is_dir():
                raise DataError(f"{target or repr('')}: expected a file to write, found a folder")
        cases = _open(Path(path), settings or FolderSettings(), quiet)
        report = check(cases, quiet=quiet)
        report.path = Path(path)
    except DataError as error:
        problem = error.problem if isinstance(error, FileError) else None
        print(f"error: {error}" + (f" ({problem.remedy})" if problem else ""), file=sys.stderr)
        if problem and json is not None and Path(json).resolve().parent.is_dir():
            _put_json(Report(Path(path), Path(path).name, problems=[problem]), json)
        return 2
    if json != "-":
        (print_lines if quiet else print_report)(report)
    if json is not None:
        _put_json(report, json)
    if html is not None:
        from ambiseg.data.check.page import page

        write_text(html, page(report, cases, quiet))
    if not quiet and json != "-":
        for target in (html, json):
            if target is not None:
                print(f"written: {target}")
    return report.exit_code


def _open(path: Path, settings: FolderSettings, quiet: bool) -> Cases:
    if path.suffix.lower() == ".npz" and path.is_file():
        return Arrays(path, settings.classes or 2, settings.title, settings.intensity, settings.void)
    return Folder.tolerant(path, settings, quiet)


def _put_json(report: Report, path: str | os.PathLike[str]) -> None:
    text = json_module.dumps(report.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if path == "-":
        print(text, end="")
    else:
        write_text(path, text)


def _read(cases: Cases, index: int) -> tuple[Case | None, list[Problem]]:
    if isinstance(cases, Folder):
        return cases.read(index)
    try:
        return cases[index], []
    except FileError as refused:
        return None, [refused.problem]
    except DataError as error:
        return None, [Problem("E201", cases.names[index], str(error))]


def _labels_text(folder: Folder) -> str:
    """What the values in the masks were taken to mean, and on whose word."""
    convention, settings = folder.convention, folder.settings
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
    return means + void + (" (declared)" if declared_convention(settings) else " (from all masks together)")


def _incomplete(folder: Folder) -> Iterator[Problem]:
    """Readers who lack a mask here and there: often by intention, sometimes a file that was lost."""
    readers: dict[str, list[Path]] = {}
    for entry in folder.entries:
        for mask in entry.masks:
            readers.setdefault(mask.reader, []).append(mask.path)
    total = len(folder.entries)
    for reader, masks in sorted(readers.items()):
        lacking = [e.image.name for e in folder.entries if reader not in {mask.reader for mask in e.masks}]
        if lacking and 2 * len(masks) >= total:
            [folder_of, *others] = {mask.parent for mask in masks}
            alone = not others and folder_of.name == reader  # a manifest may have all readers' masks in one folder
            folder_of = str(folder_of) if alone else f"reader {reader}"
            message = f"expected a mask for each of {total} images, found none for {some(lacking, 3)}"
            yield Problem("H108", folder_of, message)


# -- what only the whole data set shows --------------------------------------------------------------------------------


def _about_all(survey: Survey, cases: Cases, report: Report, broken: set[str]) -> list[Problem]:
    number = {name: index for index, name in enumerate(cases.names)}

    def file(name: str, reader: str | None = None) -> str:
        return str(cases.file_of(number[name], reader)) if isinstance(cases, Folder) else name

    found = [*_leaks(survey), *_twice(survey, file), *_about_readers(survey, file, broken), *_about_classes(survey)]
    return [*found, *_advice(survey, cases, report)]


def _leaks(survey: Survey) -> Iterator[Problem]:
    splits: dict[str, dict[str, str]] = {}
    for case in survey.cases:
        if case.split:
            splits.setdefault(case.patient, {}).setdefault(case.split, case.name)
    for patient, parts in splits.items():
        if len(parts) > 1:
            where = " and ".join(f"{split} ({name})" for split, name in parts.items())
            yield Problem("E401", f"patient {patient}", f"expected the patient in one split, found it in {where}")


def _twice(survey: Survey, file: Locate) -> Iterator[Problem]:
    for same in survey.pictures.values():
        first, *others = (survey.cases[i] for i in same)
        for other in others:
            if other.split != first.split:
                message = f"expected a picture in one split, found it in {first.split} ({first.name}) and {other.split}"
                yield Problem("E402", file(other.name), message)
            elif other.patient != first.patient:
                message = f"expected a picture of its own, found the pixels of {first.name}, another patient's"
                yield Problem("W403", file(other.name), message)
    for i in survey.blank:
        name = survey.cases[i].name
        if "#" not in name:  # the outer slices of a volume often show nothing
            yield Problem("W209", file(name), "expected something to see, found one value in all pixels")


def _about_readers(survey: Survey, file: Locate, broken: set[str]) -> Iterator[Problem]:
    copies: set[str] = set()  # of three who are alike two are copies, and each is said once
    for (one, other), images in survey.together.items():
        if other in copies:
            continue
        if images > 1 and survey.identical[one, other] == images and survey.by_reader[one].empty < images:
            copies.add(other)
            message = f"expected masks of its own, found those of {one} on all {images} images they share"
            yield Problem("W404", f"reader {other}", message)
    for reader, counts in survey.by_reader.items():
        if counts.empty == counts.images and counts.images > 1 and survey.empty < 1:
            if any(reader in case.readers and file(case.name, reader) in broken for case in survey.cases):
                continue  # the slices with marks are those that could not be read
            yield Problem(
                "W405", f"reader {reader}", f"expected marks, found {count(counts.images, 'mask')} without any"
            )
    means = {reader: c.mean_iou for reader, c in survey.by_reader.items() if c.pairs and c.empty < c.images}
    if len(means) > 2:
        usual = float(np.median(list(means.values())))
        for reader, mean in means.items():
            if mean < usual / 2:
                message = (
                    f"expected a mean IoU with the others near {usual:.2f}, as readers have here, found {mean:.2f}"
                )
                yield Problem("W408", f"reader {reader}", message)
    for case in survey.cases:
        if case.apart is not None:
            where = f" on {case.name}" if "#" in case.name else ""
            message = f"expected a mask that meets the others', found that of {case.apart} to meet none{where}"
            yield Problem("W409", file(case.name, case.apart), message)
    if all(len(case.readers) == 1 for case in survey.cases):
        yield Problem("H410", "", "one reader an image: agreement cannot be measured, nor ambiguity learned from pairs")


def _about_classes(survey: Survey) -> Iterator[Problem]:
    if survey.empty == 1:
        yield Problem("W407", "", f"expected marks, found none in any of {count(survey.masks, 'mask')}")
        return
    missed = [c for c in survey.evaluated if c < len(survey.by_class) and not survey.by_class[c].pixels]
    if missed:
        names = [name if (name := survey.classes[c]) == f"class {c}" else f"class {c} ({name})" for c in missed]
        yield Problem("W406", "", f"expected pixels of {some(names)}, found none in any mask")


def _advice(survey: Survey, cases: Cases, report: Report) -> Iterator[Problem]:
    if not isinstance(cases, Folder):
        return
    said = cases.settings
    unclear = any(problem.code == "E306" for problem in cases.problems)
    if declared_convention(said) is None and not unclear and "colours" not in report.suggestion:
        names = list(cases.classes) if len(cases.classes) <= 16 else len(cases.classes)
        report.suggestion |= {"classes": names, "labels": cases.convention.kind}
        report.suggestion |= {} if said.void is None else {"void": said.void}
        yield Problem("H411", FILE, "labels and classes are not declared, so all masks were looked through")
    if said.intensity is None and cases.intensity == Intensity():
        low, middle, high = survey.percentiles()
        start, end = _rounded(low, math.floor), _rounded(high, math.ceil)
        if start < end:
            centre, scale = (float(f"{x:.6g}") for x in ((start + end) / 2, (end - start) / 2))
            report.suggestion["intensity"] = {"low": start, "high": end, "mean": centre, "std": scale}
            form = some([kind for _, kind in survey.forms])
            message = f"{form} values from {survey.low:.6g} to {survey.high:.6g}; 99 % lie in {low:.6g} … {high:.6g}"
            yield Problem("H412", FILE, f"{message}, half below {middle:.6g}; they reach the network as they are")
    if said.patient is None and all(entry.patient is None for entry in cases.entries):
        stems = Counter(m[1] for entry in cases.entries if (m := _SLICE.match(entry.name.rsplit("/", 1)[-1])))
        named = sum(stems.values()) == len(cases.entries) and not SPLITS.keys() >= stems.keys()
        if named and 1 < len(stems) < len(cases.entries):
            report.suggestion["patient"] = "([^/]+)[_-][^_-]+$"
            groups = some([f"{stem} ({n})" for stem, n in stems.most_common()], 3)
            message = f"every image counts as a patient of its own; if names begin with the patient: {groups}"
            yield Problem("H413", FILE, message)


def _rounded(value: float, towards) -> float:
    """To two digits."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    result = float(f"{towards(value / unit) * unit:.6g}")  # 0.33, not 0.32999999999999996
    return int(result) if result == int(result) else result


def _plain(value: object) -> object:
    """As JSON has it: no nan, no tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value
