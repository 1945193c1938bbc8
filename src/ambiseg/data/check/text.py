"""A check's report in the terminal."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from ambiseg._util.text import count, shape_text, some
from ambiseg.data.check.survey import Survey
from ambiseg.io.errors import KINDS

if TYPE_CHECKING:
    from ambiseg.data.check.check import Report

_SHOWN = 5  # lines of one kind of problem
_COLOURS = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


def print_lines(report: Report) -> None:
    """One line for each error and warning, for scripts: file, code, expected and found."""
    for _, problems in report.groups():
        for problem in problems:
            if problem.severity != "hint":
                print(
                    f"{problem.file}: {problem.code} {problem.message}"
                    if problem.file
                    else f"{problem.code} {problem.message}"
                )


def print_report(report: Report) -> None:
    """Tables, then every kind of problem with its first files and what to do."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(Text(str(report.path if report.path.name else report.title), style="bold"), soft_wrap=True)
    console.print()
    survey = report.survey
    if survey is not None and survey.cases:
        for table in (_overview(report, survey), _classes(survey), _readers(survey)):
            with console.capture() as printed:
                console.print(table)
            for line in printed.get().splitlines():
                print(line.rstrip(), file=console.file)
            console.print()
    for code, problems in report.groups():
        severity = problems[0].severity
        console.print(Text.assemble((f"{severity} {code}", _COLOURS[severity]), f" {KINDS[code].name}"))
        shown = problems[:_SHOWN]
        for problem, after in zip(shown, [*shown[1:], None], strict=True):
            console.print(Text(f"  {problem.line}"), soft_wrap=True)
            if after is None and len(problems) > _SHOWN:
                where = "--html or --json" if severity == "hint" else "--html, --json or --quiet"
                console.print(f"  … and {len(problems) - _SHOWN:,} more, all of them with {where}")
            if after is None or after.remedy != problem.remedy:
                console.print(Text(f"  → {problem.remedy}", style="dim"), soft_wrap=True)
    if report.settings_file:
        console.print()
        console.print(Text(f"settings go into {report.settings_file}", style="dim"), soft_wrap=True)
    if report.suggestion:
        console.print()
        console.print(Text("ambiseg.json could say", style="bold"))
        console.print(Text(json.dumps(report.suggestion, ensure_ascii=False)), soft_wrap=True)
    if report.problems:
        console.print()
    style = "bold red" if report.count("error") else "yellow" if report.count("warning") else "green"
    console.print(Text(report.verdict, style=style))


def overview(report: Report, survey: Survey) -> list[tuple[str, str]]:
    """What a data set is, in rows of a name and a text."""
    cases = survey.cases
    sizes = [
        f"{shape_text(size)} ({n:,})" if len(survey.sizes) > 1 else shape_text(size)
        for size, n in survey.sizes.most_common()
    ]
    forms = [f"{count(c, 'channel')} of {kind}" for (c, kind), _ in survey.forms.most_common()]
    per_image = [f"{k} ({count(n, 'image')})" for k, n in survey.readers_per_image.items()]
    mean, drawn = number(survey.iou), number(survey.iou_drawn)
    splits = Counter(case.split for case in cases if case.split)
    rows = [
        ("images", f"{len(cases):,}" + (f", and {report.unread:,} that could not be read" if report.unread else "")),
        ("patients", f"{len({case.patient for case in cases}):,}"),
        ("splits", ", ".join(f"{split} {n:,}" for split, n in splits.items())),
        ("height×width", some(sizes)),
        ("pixels", f"{some(forms)}, {survey.low:.6g} … {survey.high:.6g}"),
        ("mask values", report.labels),
        ("void", f"{survey.void:,} px" if survey.void else ""),
        ("readers per image", some(per_image, 8)),
        ("weights", f"on {count(survey.weighted, 'image')}" if survey.weighted else ""),
        ("pairwise IoU", mean + (f"; {drawn} where somebody marked something" if drawn != mean else "")),
        ("empty masks", f"{percent(survey.empty)} of {survey.masks:,}"),
        ("ambiguous", f"{percent(survey.ambiguous)} of images, {percent(survey.differing)} of pixels"),
    ]
    shared = any(len(case.readers) > 1 for case in cases)
    return [(name, text) for name, text in rows if text and (shared or name not in ("pairwise IoU", "ambiguous"))]


def _overview(report: Report, survey: Survey) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in overview(report, survey):
        table.add_row(name, Text(text))
    return table


def class_rows(survey: Survey) -> list[tuple[str, ...]]:
    """Id, name, share of pixels, masks and images that have it."""
    total = max(sum(c.pixels for c in survey.by_class), 1)
    rows = []
    for c, (name, counts) in enumerate(zip(survey.classes, survey.by_class, strict=True)):
        mark = "" if c in survey.evaluated else " (not evaluated)"
        rows.append((str(c), name + mark, percent(counts.pixels / total), f"{counts.masks:,}", f"{counts.images:,}"))
    return rows


def reader_rows(survey: Survey) -> list[tuple[str, ...]]:
    """Name, images, share of empty masks, mean IoU with the others."""
    readers = sorted(survey.by_reader.items())
    return [(name, f"{r.images:,}", percent(r.empty / r.images), number(r.mean_iou)) for name, r in readers]


CLASS_HEAD = ("id", "class", "pixels", "masks", "images")
READER_HEAD = ("reader", "images", "empty", "IoU with others")


def _classes(survey: Survey) -> Any:
    return _table(CLASS_HEAD, class_rows(survey), left=(1,))


def _readers(survey: Survey) -> Any:
    rows = reader_rows(survey)
    more = len(rows) - 20
    return _table(READER_HEAD, rows[:20] + ([(f"… and {more} more", "", "", "")] if more > 0 else []), left=(0,))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: tuple[int, ...]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i in left else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def percent(share: float) -> str:
    """``12.3 %``; what is above nothing does not read as nothing.

    >>> percent(0.123), percent(1e-6), percent(float("nan"))
    ('12.3 %', '< 0.1 %', '—')
    """
    if not math.isfinite(share):
        return "—"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def number(value: float) -> str:
    """Three digits behind the point, or a dash where there is no number."""
    return f"{value:.3f}" if math.isfinite(value) else "—"
