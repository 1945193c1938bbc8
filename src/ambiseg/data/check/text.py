"""A check's result as text: rows of tables, and what the terminal shows."""

from __future__ import annotations

import json
import sys

from ambiseg._util.tables import table
from ambiseg._util.text import count, percent, shape_text, some
from ambiseg.data.check.check import CheckResult
from ambiseg.data.check.statistics import Statistics
from ambiseg.viz.page import number

_PROBLEMS, _READERS = 5, 20  # lines that the terminal shows of one kind of problem, and of readers
_COLOURS = {"error": "bold red", "warning": "yellow", "hint": "cyan"}
CLASS_HEAD = ("id", "class", "pixels", "masks", "images")
READER_HEAD = ("reader", "images", "empty", "IoU with others")


def overview(result: CheckResult) -> list[tuple[str, str]]:
    """What the data set contains, as rows of a name and a text."""
    statistics = result.statistics
    sizes = [shape_text(size) + f" ({n:,})" * (len(statistics.sizes) > 1) for size, n in statistics.sizes.most_common()]
    types = [f"{count(c, 'channel')} of {dtype}" for (c, dtype), _ in statistics.types.most_common()]
    per_image = [f"{k} ({count(n, 'image')})" for k, n in statistics.readers_per_image.items()]
    unread = f", and {result.unread:,} that could not be read" if result.unread else ""
    rows = [
        ("images", f"{len(statistics.cases):,}{unread}"),
        ("patients", f"{statistics.patients:,}"),
        ("splits", ", ".join(f"{split} {n:,}" for split, n in statistics.splits.items())),
        ("height×width", some(sizes)),
        ("pixels", f"{some(types)}, {statistics.low:.6g} … {statistics.high:.6g}"),
        ("mask values", result.labels),
        ("void", f"{statistics.void:,} px" if statistics.void else ""),
        ("readers per image", some(per_image, 8)),
        ("weights", f"on {count(statistics.weighted, 'image')}" if statistics.weighted else ""),
    ]
    if statistics.shared:
        iou, marked = number(statistics.iou), number(statistics.iou_where_marked)
        where = f"; {marked} where at least one reader marked something" if marked != iou else ""
        rows.append(("pairwise IoU", iou + where))
    rows.append(("empty masks", f"{percent(statistics.empty)} of {statistics.masks:,}"))
    if statistics.shared:
        pixels = percent(statistics.differing)
        rows.append(("ambiguous", f"{percent(statistics.ambiguous)} of images, {pixels} of pixels"))
    return [(name, text) for name, text in rows if text]


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
                print(f"{problem.file}: " * bool(problem.file) + f"{problem.code} {problem.message}")


def print_result(result: CheckResult) -> None:
    """Tables, then every kind of problem with its first files and its remedy."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(str(result.path if result.path.name else result.title), "bold")
    line("")
    statistics = result.statistics
    if statistics.cases:
        for name, text in overview(result):
            console.print(Text.assemble((f"{name:19}", "dim"), text), soft_wrap=True)
        readers = reader_rows(statistics)
        if (more := len(readers) - _READERS) > 0:
            readers[_READERS:] = [(f"… and {more} more", "", "", "")]
        for made in (table(CLASS_HEAD, class_rows(statistics), left=(1,)), table(READER_HEAD, readers)):
            line("")
            console.print(made)
        line("")
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
        line(f"\nsettings go into {result.settings_file}", "dim")
    if result.suggestion:
        line("\nambiseg.json could say", "bold")
        line(json.dumps(result.suggestion, ensure_ascii=False))
    style = _COLOURS[result.worst] if result.worst in ("error", "warning") else "green"
    line("\n" * bool(result.problems) + result.verdict, style)
