"""Problems that only the whole data set shows, and settings worth writing down."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ambiseg._util.text import count, some
from ambiseg.data.case import Cases
from ambiseg.data.check.statistics import Statistics
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.labels import declared_convention
from ambiseg.data.sets.folder.layout import SPLITS
from ambiseg.data.sets.folder.settings import FILE
from ambiseg.io.errors import Problem

FileOf = Callable[..., str]  # a case's name, and perhaps a reader -> the file
_SLICE = re.compile(r"^(.+?)[_-][a-z]{0,5}\d+$", re.IGNORECASE)  # patient_s12


def problems_of_all(statistics: Statistics, cases: Cases, broken: set[str]) -> Iterator[Problem]:
    """Leaks between splits, copies, readers unlike the others, classes without a pixel.

    Args:
        broken: files with errors.
    """
    number = {name: index for index, name in enumerate(cases.names)}

    def file_of(name: str, reader: str | None = None) -> str:
        return str(cases.file_of(number[name], reader)) if isinstance(cases, Folder) else name

    yield from _leaks(statistics)
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
            unread = (reader in case.readers and file_of(case.name, reader) in broken for case in statistics.cases)
            if not any(unread):  # else the slices with marks may be those that could not be read
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
    missed = [c for c in statistics.evaluated if c < len(statistics.classes) and not statistics.by_class[c].pixels]
    if missed:
        names = [name if (name := statistics.classes[c]) == f"class {c}" else f"class {c} ({name})" for c in missed]
        yield Problem("W406", "", f"expected pixels of {some(names)}, found none in any mask")


def incomplete_readers(folder: Folder) -> Iterator[Problem]:
    """Readers who lack masks of some images: often on purpose, sometimes because a file was lost."""
    readers: dict[str, dict[str, Path]] = {}  # the mask of each entry
    for entry in folder.entries:
        for mask in entry.masks:
            readers.setdefault(mask.reader, {})[entry.name] = mask.path
    total = len(folder.entries)
    for reader, masks in sorted(readers.items()):
        lacking = [entry.image.name for entry in folder.entries if entry.name not in masks]
        if lacking and 2 * len(masks) >= total:
            parent, *others = {mask.parent for mask in masks.values()}
            own = not others and parent.name == reader  # a manifest may have all readers' masks in one folder
            message = f"expected a mask for each of {total} images, found none for {some(lacking, 3)}"
            yield Problem("H108", str(parent) if own else f"reader {reader}", message)


def advice(statistics: Statistics, folder: Folder, suggestion: dict[str, object]) -> Iterator[Problem]:
    """Hints about settings that are not declared; values for them are added to ``suggestion``."""
    declared = folder.settings
    unclear = any(problem.code == "E306" for problem in folder.problems)
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
    if declared.patient is None and all(entry.patient is None for entry in folder.entries):
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
