"""The page of a study: question, table, figure, differences, the paper's numbers, failures, and how to repeat it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ambiseg._util.errors import DataError
from ambiseg._util.text import count, some
from ambiseg.evaluation.results import Evaluation
from ambiseg.reporting.figures import Figures, drawing
from ambiseg.reporting.terms import METRICS as TERMS
from ambiseg.runs import Run
from ambiseg.studies.definition import Column, Definition
from ambiseg.studies.fingerprint import canonical
from ambiseg.studies.members import Member, Start, command_of
from ambiseg.studies.results import (
    Row,
    gap,
    minutes_text,
    number,
    paper_cell,
    seeds_text,
    state_line,
    title_of,
    total_hours,
)
from ambiseg.studies.store import WHICH, Trial
from ambiseg.studies.writing import notes, statuses
from ambiseg.viz.colours import SERIES
from ambiseg.viz.page import render, safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEANINGS = {
    "modes_found": "modes that some stratum draws more often than any other mode",
    "modes_distance": "total variation between the predicted and the true probabilities of the modes; less is better",
    "parameters": "weights of the network, in millions",
    "megabytes": "10⁶ bytes of its weights in 32 bits",
}
_LISTED = ("numpy", "torch", "lightning", "python", "ambiseg")


class Subject(Protocol):
    """What the page says of a study beside its table: a :class:`~ambiseg.studies.experiment.Study`."""

    name: str
    definition: Definition
    scale: str
    start: Start

    @property
    def members(self) -> Mapping[str, Member | None]:
        """By name."""
        ...

    def command(self) -> str:
        """That repeats it."""
        ...


def page(study: Subject, rows: Sequence[Row], trouble: str, trials: Sequence[Trial], folder: Path | None) -> str:
    """The page as HTML; its figure is also saved to ``folder``."""
    definition = study.definition
    columns, papers = definition.table_columns, _papers(definition, rows)
    files = resources.files("ambiseg.reporting") / "style.css", resources.files("ambiseg.studies") / "study.css"
    done = [trial for trial in trials if trial.evaluation is not None]
    evaluation = done[0].evaluation if done else None
    plot = None
    if definition.plot is not None and (lines := _lines(study, rows)):
        with drawing():
            plot = Figures(folder).plot("plot", _draw, definition, lines)
    return render(
        "ambiseg.studies",
        "study.html",
        style=safe("".join(file.read_text(encoding="utf-8") for file in files)),
        name=study.name,
        definition=definition,
        state=state_line(rows, trials) if definition.train else "",
        data=evaluation.data if evaluation else "",
        ours=_ours(evaluation),
        failures=[line for line in statuses(rows) if "failed" in line],
        open=[line for line in statuses(rows) if "failed" not in line],
        trouble=trouble,
        columns=[(title_of(one), one) for one in columns],
        papers=[(title_of(one), one) for one in papers],
        compared=definition.reference is not None and any(row.differences for row in rows),
        first=title_of(columns[0]),
        reference=_reference(definition),
        rows=[_cells(definition, row, papers) for row in rows],
        differences=_differences(definition, rows),
        meanings=_words(columns, evaluation),
        notes=notes(definition, rows),
        plot=plot,
        plot_title=_plot_title(definition),
        facts=_facts(study, trials, evaluation),
        command=study.command(),
        members=_members(study, trials),
    )


# -- the table --------------------------------------------------------------------------------------------------------


def _papers(definition: Definition, rows: Sequence[Row]) -> list[Column]:
    return [one for one in definition.table_columns if any(one in row.paper for row in rows)]


def _cells(definition: Definition, row: Row, papers: Sequence[Column]) -> dict[str, Any]:
    """One row as texts: (mean and ±, interval) for each column."""
    cells = []
    for one in definition.table_columns:
        value, small = row.cells[one], ""
        text = "–" if value is None else number(value.mean, one.metric)
        if value is not None and value.spread is not None:
            text += f" ± {number(value.spread, one.metric)}"
        if value is not None and value.low is not None and value.high is not None:
            small = f"{number(value.low, one.metric)} to {number(value.high, one.metric)}"
        if value is not None and one.samples and value.masks != one.samples:
            small = f"{small}{', ' if small else ''}{value.masks} masks"
        cells.append((text, small))
    first = definition.table_columns[0]
    change = row.differences.get(first)
    return {
        "title": row.title,
        "form": row.form,
        "status": row.status,
        "failed": row.failed,
        "reference": row.reference,
        "empty": definition.train and not row.form,
        "seeds": seeds_text(row),
        "epochs": "–" if row.epochs is None else row.epochs,
        "minutes": minutes_text(row),
        "cells": cells,
        "difference": "reference" if row.reference else gap(change, first.metric),
        "sure": change is not None and change.excludes_zero,
        "paper": [paper_cell(row.paper.get(one), one.metric) for one in papers],
        "sources": ", ".join(row.sources),
    }


def _differences(definition: Definition, rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """All differences to the reference; whether an interval excludes 0."""
    found = []
    for row in rows:
        if row.differences:
            cells = [row.differences.get(one) for one in _compared(definition)]
            texts = [gap(value, one.metric) for value, one in zip(cells, _compared(definition), strict=True)]
            clear = [value is not None and value.excludes_zero for value in cells]
            found.append((row.title, row.form, list(zip(texts, clear, strict=True))))
    return found


def _compared(definition: Definition) -> list[Column]:
    return [one for one in definition.table_columns if one.metric in TERMS]


def _reference(definition: Definition) -> dict[str, Any]:
    if definition.reference is None:
        return {"title": "", "columns": []}
    name, form = definition.reference.member, definition.reference.form
    title = definition.rows[name].title or name
    return {"title": f"{title}, {form}" if form else title, "columns": [title_of(c) for c in _compared(definition)]}


def _ours(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    images = f"{count(evaluation.images, 'image')} of {count(evaluation.patients, evaluation.unit)}"
    return f"{evaluation.data}: {evaluation.split}, {images}"


def _words(columns: Sequence[Column], evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """What the columns mean."""
    found, annotator = dict[str, str](), evaluation.annotator if evaluation else "reader"
    for one in sorted(columns, key=lambda one: [*TERMS, *_MEANINGS].index(one.metric)):
        if one.metric in TERMS:
            term = TERMS[one.metric].worded(annotator=annotator)
            found[title_of(Column(one.metric, 0))] = f"{term.meaning}; {term.better}" if term.better else term.meaning
        else:
            found[title_of(Column(one.metric, 0))] = _MEANINGS[one.metric]
    return list(found.items())


# -- the figure -------------------------------------------------------------------------------------------------------

Line = tuple[str, list[tuple[float, float, float | None, float | None]]]  # form; x, mean, low and high of each point


def _lines(study: Subject, rows: Sequence[Row]) -> list[Line]:
    """The points of the figure, by form of masks."""
    plot, found = study.definition.plot, list[Line]()
    assert plot is not None
    target = next(one for one in study.definition.table_columns if str(one) == plot.y)
    for form in study.definition.forms:
        points = []
        for row in rows:
            member, value = study.members[row.member], row.cells[target]
            x = None if member is None else canonical(member.config).get(plot.x)
            if row.form == form and value is not None and value.mean is not None and isinstance(x, int | float):
                points.append((float(x), value.mean, value.low, value.high))
        if points:
            found.append((form, sorted(points)))
    return found


def _draw(figure: Figure, definition: Definition, lines: Sequence[Line]) -> None:
    plot = definition.plot
    assert plot is not None
    axes = figure.add_subplot()
    logarithmic = plot.logarithmic and min(x for _, points in lines for x, *_ in points) > 0
    for place, (form, exact) in enumerate(lines):
        shift = 0.015 * (place - (len(lines) - 1) / 2)  # side by side, so that intervals do not hide each other
        wide = max(x for x, *_ in exact) - min(x for x, *_ in exact)
        colour, xs = SERIES[place % len(SERIES)], [x for x, *_ in exact]
        xs = [x * (1 + 2 * shift) if logarithmic else x + shift * wide for x in xs]
        axes.plot(xs, [mean for _, mean, *_ in exact], "o-", color=colour, label=form, zorder=3)
        for x, (_, _, low, high) in zip(xs, exact, strict=True):
            if low is not None and high is not None:
                axes.vlines(x, low, high, color=colour, linewidth=1.2, zorder=2)
    ticks = sorted({x for _, points in lines for x, *_ in points})
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(plot.title or plot.x)
    axes.set_ylabel(_plot_title(definition))
    figure.legend(loc="outside upper left", ncols=2)


def _plot_title(definition: Definition) -> str:
    if definition.plot is None:
        return ""
    return title_of(next(one for one in definition.table_columns if str(one) == definition.plot.y))


# -- how it was done --------------------------------------------------------------------------------------------------


def _facts(study: Subject, trials: Sequence[Trial], evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """Data, split, budget, versions: what a reader of the table has to know."""
    runs = _runs(trials)
    found = [("scale", f"{study.scale}: recipe {_recipes(study)}")]
    if evaluation is not None:
        region = f", {evaluation.region.text}" if evaluation.region else ""
        found.append(("scored", f"{_ours(evaluation)}{region}; {WHICH} weights, protocol {evaluation.protocol}"))
    if runs:
        found += [("data", runs[0].card.title), ("split", f"{runs[0].split} (fingerprint {runs[0].split.fingerprint})")]
        found.append(("seeds", "of weights and of draws in training; split, order and augmentation are the same"))
        found.append(("precision", _distinct([run.precision for run in runs])))
        costs = [run.cost for run in runs if run.cost is not None]
        found.append(
            ("trained on", _distinct([f"{c.device or 'unknown'}, {count(c.threads, 'thread')}" for c in costs]))
        )
        hours, known = total_hours(trials)
        of = f"{hours:.1f} hours for {count(known, 'training')}"
        lacking = f", that of {len(runs) - known} is not recorded" if known < len(runs) else ""
        found.append(("CPU time", f"{of}{lacking}" if known else "not recorded"))
        found.append(("begun", _span([str(run.about.get("started", ""))[:10] for run in runs])))
        versions = [run.about.get("versions") or {} for run in runs]
        listed = [f"{name} {_distinct([str(v.get(name)) for v in versions])}" for name in reversed(_LISTED)]
        found.append(("versions", ", ".join(listed)))
        found.append(("commit", _distinct([str(run.about.get("git"))[:12] for run in runs if run.about.get("git")])))
    return [(key, text) for key, text in found if text]


def _recipes(study: Subject) -> str:
    names = [os.path.basename(m.recipe) for m in study.members.values() if m is not None]
    return _distinct(names) or study.start.recipe


def _runs(trials: Sequence[Trial]) -> list[Run]:
    found = []
    for trial in trials:
        if trial.state in ("done", "trained"):
            try:
                found.append(Run(trial.folder))
            except (DataError, OSError):
                continue
    return found


def _distinct(texts: Sequence[str]) -> str:
    return some(list(dict.fromkeys(texts)), 6)


def _span(days: Sequence[str]) -> str:
    known = sorted(day for day in days if day)
    return "" if not known else known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _members(study: Subject, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Every member with the command that trains it, and its runs."""
    found = []
    for name, member in study.members.items():
        own = [trial for trial in trials if trial.member.name == name]
        found.append(
            {
                "name": name,
                "title": study.definition.rows[name].title,
                "command": _train(member) if member is not None and study.definition.train else "",
                "runs": [(str(one.folder), f"seed {one.seed}: {one.state}") for one in own],
            }
        )
    return found


def _train(member: Member) -> str:
    words = command_of(member, 0)
    return "" if words is None else f"{shlex.join(['ambiseg', 'train', *words])} --out RUN"
