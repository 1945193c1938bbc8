"""A check's result for people and scripts: on the terminal, and as a page with pictures."""

from __future__ import annotations

import json
import math
import sys

import numpy as np

from ambiseg._util import terminal
from ambiseg._util.progress import progress
from ambiseg._util.tables import table
from ambiseg._util.text import count, percent, printable, shape_text, some
from ambiseg.data.case import Cases
from ambiseg.data.check.check import CheckResult, read
from ambiseg.data.check.statistics import CaseSummary, Statistics
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.viz.colours import HEAT, reader_colours
from ambiseg.viz.page import number, render
from ambiseg.viz.pictures import data_uri, differences, outlines, over, photograph

_PROBLEMS, _READERS = 5, 20  # lines that the terminal shows of one kind of problem, and of readers or classes
_COLOURS = {"error": "bold red", "warning": "yellow", "hint": "cyan"}
CLASS_HEAD = ("id", "class", "pixels", "masks", "images")
READER_HEAD = ("reader", "images", "empty", "IoU with others")
Shown = list[tuple[CaseSummary, str]]  # cases to draw, each with the line of a problem or ""
_MOST, _LEAST, _WRONG = 8, 4, 12  # pictures of each kind


def overview(result: CheckResult) -> list[tuple[str, str]]:
    """What the data set contains, as rows of a name and a text."""
    statistics = result.statistics
    sizes = [shape_text(size) + f" ({n:,})" * (len(statistics.sizes) > 1) for size, n in statistics.sizes.most_common()]
    types = [f"{count(c, 'channel')} of {dtype}" for (c, dtype), _ in statistics.types.most_common()]
    per_image = [f"{k} ({count(n, 'image')})" for k, n in statistics.readers_per_image.items()]
    unread = f", and {result.unread:,} that could not be read" if result.unread else ""
    iou, marked = number(statistics.iou), number(statistics.iou_where_marked)
    iou += f"; {marked} where at least one reader marked something" if marked != iou else ""
    differing = f"{percent(statistics.ambiguous)} of images, {percent(statistics.differing)} of pixels"
    rows = [
        ("images", f"{len(statistics.cases):,}{unread}"),
        ("patients", f"{statistics.patients:,}"),
        ("splits", _splits(statistics)),
        ("height×width", some(sizes)),
        ("pixels", f"{some(types)}, {statistics.low:.6g} … {statistics.high:.6g}"),
        ("mask values", result.labels),
        ("void", f"{statistics.void:,} px" if statistics.void else ""),
        ("readers per image", some(per_image, 8)),
        ("weights", f"on {count(statistics.weighted, 'image')}" if statistics.weighted else ""),
        ("pairwise IoU", iou if statistics.shared else ""),
        ("empty masks", f"{percent(statistics.empty)} of {statistics.masks:,}"),
        ("ambiguous", differing if statistics.shared else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _splits(statistics: Statistics) -> str:
    found = statistics.splits
    taken = [part for part in ("val", "test") if part not in found] if "train" in found else []
    note = f"; training takes {' and '.join(taken)} out of train" if taken else ""
    return ", ".join(f"{split} {n:,}" for split, n in found.items()) + note


def class_rows(statistics: Statistics) -> list[tuple[str, ...]]:
    """Id, name, share of pixels, masks and images with the class."""
    rows, shares = [], statistics.class_shares()
    for c, (name, counts) in enumerate(zip(statistics.classes, statistics.by_class, strict=True)):
        note = " (not evaluated)" * (c not in statistics.evaluated)
        rows.append((str(c), name + note, percent(shares[c]), f"{counts.masks:,}", f"{counts.images:,}"))
    return rows


def reader_rows(statistics: Statistics) -> list[tuple[str, ...]]:
    """Name, images, share of empty masks, mean IoU with the others."""
    readers = sorted(statistics.by_reader.items())
    return [(name, f"{r.images:,}", percent(r.empty / r.images), number(r.mean_iou)) for name, r in readers]


def print_lines(result: CheckResult) -> None:
    """One line per error and warning, for scripts: file, code, expected and found."""
    for _, problems in result.groups():
        for problem in problems:
            if problem.severity != "hint":
                print(printable(f"{problem.file}: " * bool(problem.file) + f"{problem.code} {problem.message}"))


def print_result(result: CheckResult) -> None:
    """Tables, then every kind of problem with its first files and its remedy."""
    from rich.text import Text

    console = terminal.console(width=None if sys.stdout.isatty() else 120, highlight=False)

    def line(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    line(str(result.path if result.path.name else result.title), "bold")
    console.print()
    statistics = result.statistics
    if statistics.cases:
        for name, text in overview(result):
            console.print(Text.assemble((f"{name:19}", "dim"), printable(text)), soft_wrap=True)
        readers, classes = reader_rows(statistics), class_rows(statistics)
        if (more := len(readers) - _READERS) > 0:
            readers[_READERS:] = [(f"… and {more} more", "", "", "")]
        if (more := len(classes) - 2 * _READERS) > 0:
            classes[_READERS:] = [("", f"… and {more + _READERS} more, all of them with --html", "", "", "")]
        console.print("", table(CLASS_HEAD, classes, left=(1,)), "", table(READER_HEAD, readers), "", sep="\n")
    for code, problems in result.groups():
        severity, shown = problems[0].severity, problems[:_PROBLEMS]
        console.print(Text.assemble((f"{severity} {code}", _COLOURS[severity]), f" {problems[0].name}"))
        for problem, after in zip(shown, [*shown[1:], None], strict=True):
            line(f"  {problem.line}")
            if after is None and len(problems) > _PROBLEMS:
                where = "--html or --json" if severity == "hint" else "--html, --json or --quiet"
                line(f"  … and {len(problems) - _PROBLEMS:,} more, all of them with {where}")
            if after is None or after.remedy != problem.remedy:
                line(f"  → {problem.remedy}", "dim")
    if result.settings_file:
        console.print()
        line(f"settings go into {result.settings_file}", "dim")
    if result.suggestion:
        console.print()
        line("ambiseg.json could say", "bold")
        line(json.dumps(result.suggestion, ensure_ascii=False))
    style = _COLOURS[result.worst] if result.worst in ("error", "warning") else "green"
    if result.problems:
        console.print()
    line(result.verdict, style)
    if result.next:
        line(f"next: {result.next}")
    elif result.exit_code == 0:
        line(result.untrainable)


# -- the page: no network, no script, light and dark, readable on a phone ---------------------------------------------


def page(result: CheckResult, quiet: bool = False) -> str:
    """The whole page as HTML, for a data set that could be opened."""
    statistics, cases = result.statistics, result.cases
    assert cases is not None
    colours = reader_colours(sorted(statistics.by_reader))
    galleries = _galleries(result, cases)
    shown = dict.fromkeys(case for *_, pairs in galleries for case, _ in pairs)
    return render(
        "ambiseg.data.check",
        "check.html",
        result=result,
        suggestion=json.dumps(result.suggestion, ensure_ascii=False, indent=2) if result.suggestion else "",
        statistics=statistics,
        overview=overview(result) if statistics.cases else [],
        tables=[
            ("Classes", 1, CLASS_HEAD, class_rows(statistics)),
            ("Readers", 0, READER_HEAD, reader_rows(statistics)),
        ],
        histogram=np.histogram([case.iou for case in statistics.shared], bins=20, range=(0, 1))[0].tolist(),
        colours=colours,
        heat=HEAT[1:],
        galleries=galleries,
        pictures={case: _pictures(cases, case, colours) for case in progress(shown, len(shown), "drawing", quiet)},
    )


def _galleries(result: CheckResult, cases: Cases) -> list[tuple[str, str, Shown]]:
    """Title, text and cases of each gallery: with problems, most and least ambiguous; or examples."""
    statistics, wrong = result.statistics, _cases_with_problems(result, cases)
    order = [(case, "") for case in sorted(statistics.shared, key=lambda case: (case.iou, case.name))]
    every = max(1, len(statistics.cases) // _MOST)
    examples = [] if order or wrong else [(case, "") for case in statistics.cases[::every][:_MOST]]
    return [
        ("With problems", "Cases that can be drawn, with the problem that was found.", wrong),
        ("Most ambiguous", "The lowest mean IoU of their readers.", order[:_MOST]),
        ("Least ambiguous", "The highest mean IoU of their readers.", order[_MOST:][-_LEAST:][::-1]),
        ("Examples", "One reader per image.", examples),
    ]


def _cases_with_problems(result: CheckResult, cases: Cases) -> Shown:
    """Cases that can be drawn although one of their files has a problem, with that problem."""
    if not isinstance(cases, Folder):
        return []
    summaries = {case.name: case for case in result.statistics.cases}
    lines = {p.file: result.relative(p).line for p in reversed(result.problems) if p.severity != "hint"}
    found = []
    for index, name in enumerate(cases.names):
        files = (str(cases.file_of(index, reader)) for reader in (None, *cases.readers_of(index)))
        line = next((lines[file] for file in files if file in lines), "")
        found += [(summaries[name], line)] if line and name in summaries else []
    return found[:_WRONG]


def _pictures(cases: Cases, summary: CaseSummary, colours: dict[str, str]) -> list[str]:
    """The image with its readers' outlines, and where several readers differ; none if it can no longer be read."""
    case, _ = read(cases, cases.names.index(summary.name))
    if case is None:
        return []
    pictures = [over(photograph(case.image), outlines([*case.labels], [colours[reader] for reader in case.readers]))]
    if math.isfinite(summary.iou):
        pictures.append(differences(case.image, case.table, case.regions, case.void))
    return [data_uri(picture) for picture in pictures]
