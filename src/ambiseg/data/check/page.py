"""A check's result as one page with pictures: no network, no script, light and dark, readable on a phone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ambiseg._util.progress import progress
from ambiseg._util.text import count, percent, shape_text
from ambiseg.data.case import Case, Cases
from ambiseg.data.check.check import CheckResult, read
from ambiseg.data.check.statistics import CaseSummary
from ambiseg.data.check.text import CLASS_HEAD, READER_HEAD, class_rows, number, overview, reader_rows
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.io.errors import KINDS, Problem
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
    galleries = _galleries(result, cases) if statistics.cases else []
    shown = [pair for _, _, pairs in galleries for pair in pairs]
    number_of = {name: index for index, name in enumerate(cases.names)}
    drawn = progress(shown, len(shown), "drawing", quiet)
    figures = iter([_figure(cases, number_of[case.name], case, problem, colours) for case, problem in drawn])
    return render(
        "ambiseg.data.check",
        "check.html",
        result=result,
        kinds=KINDS,
        tone="error" if result.count("error") else "warning" if result.count("warning") else "fine",
        suggestion=json.dumps(result.suggestion, ensure_ascii=False, indent=2) if result.suggestion else "",
        statistics=statistics,
        overview=overview(result) if statistics.cases else [],
        tables=[
            ("Classes", 1, CLASS_HEAD, class_rows(statistics)),
            ("Readers", 0, READER_HEAD, reader_rows(statistics)),
        ],
        histogram=np.histogram([case.iou for case in statistics.shared], bins=20, range=(0, 1))[0].tolist(),
        iou=number(statistics.iou),
        colours=colours,
        heat=", ".join(HEAT[1:]),
        galleries=[(title, text, [next(figures) for _ in pairs]) for title, text, pairs in galleries],
    )


def _galleries(result: CheckResult, cases: Cases) -> list[tuple[str, str, Shown]]:
    """Title, text and cases of each gallery: with problems, most and least ambiguous."""
    statistics, found = result.statistics, []
    if wrong := _cases_with_problems(result, cases):
        found += [("With problems", "Cases that can be drawn, with the problem that was found.", wrong)]
    order = [(case, "") for case in sorted(statistics.shared, key=lambda case: (case.iou, case.name))]
    if order:
        found += [("Most ambiguous", "The lowest mean IoU of their readers.", order[:_MOST])]
        if least := order[_MOST:][-_LEAST:][::-1]:
            found += [("Least ambiguous", "The highest mean IoU of their readers.", least)]
    elif not wrong:
        examples = statistics.cases[:: max(1, len(statistics.cases) // _MOST)][:_MOST]
        found += [("Examples", "One reader per image.", [(case, "") for case in examples])]
    return found


def _cases_with_problems(result: CheckResult, cases: Cases) -> Shown:
    """Cases that can be drawn although one of their files has a problem, with that problem."""
    if not isinstance(cases, Folder):
        return []
    summaries = {case.name: case for case in result.statistics.cases}
    by_file: dict[str, Problem] = {p.file: p for p in reversed(result.problems) if p.severity != "hint"}
    found = []
    for index, name in enumerate(cases.names):
        files = (str(cases.file_of(index, reader)) for reader in (None, *cases.readers_of(index)))
        problem = next((by_file[file] for file in files if file in by_file), None)
        if problem is not None and name in summaries:
            found.append((summaries[name], result.relative(problem).line))
    return found[:_WRONG]


def _figure(cases: Cases, index: int, summary: CaseSummary, problem: str, colours: dict[str, str]) -> dict[str, Any]:
    """Pictures and caption of one case; no pictures if it can no longer be read."""
    case, _ = read(cases, index)
    if case is None:
        return {"pictures": []}
    readers, differing = count(len(case.readers), "reader"), percent(summary.differing)
    pictures = [(f"{case.name}: the image with the outlines of {readers}", data_uri(outlined(case, colours)))]
    about = f"{readers}, {shape_text(summary.size)}"
    if math.isfinite(summary.iou):
        about += f", IoU {number(summary.iou)}, {differing} of pixels differ"
        alt = f"{case.name}: where the readers differ, {differing} of the pixels"
        pictures.append((alt, data_uri(differences(case.image, case.table, case.regions, case.void))))
    return {"pictures": pictures, "name": case.name, "about": about, "problem": problem}


def outlined(case: Case, colours: dict[str, str]) -> np.ndarray:
    """``[h, w, 3]`` bytes: the image with the outlines of its readers, each in its colour."""
    lines = outlines([*case.labels], [colours.get(reader, "#ffffff") for reader in case.readers])
    return over(photograph(case.image), lines)
