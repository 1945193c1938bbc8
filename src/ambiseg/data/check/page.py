"""A check's result as one page with pictures: no network, no script, light and dark, readable on a phone."""

from __future__ import annotations

import json
import math

import numpy as np

from ambiseg._util.progress import progress
from ambiseg.data.case import Cases
from ambiseg.data.check.check import CheckResult, read
from ambiseg.data.check.statistics import CaseSummary
from ambiseg.data.check.text import CLASS_HEAD, READER_HEAD, class_rows, overview, reader_rows
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.viz.colours import HEAT, reader_colours
from ambiseg.viz.page import render
from ambiseg.viz.pictures import data_uri, differences, outlines, over, photograph

Shown = list[tuple[CaseSummary, str]]  # cases to draw, each with the line of a problem or ""
_MOST, _LEAST, _WRONG = 8, 4, 12  # pictures of each kind


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
