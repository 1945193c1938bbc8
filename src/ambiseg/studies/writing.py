"""The table of a study as Markdown, CSV, LaTeX, JSON, and text for a terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ambiseg._util.tables import table
from ambiseg.comparison.scores import Aggregate
from ambiseg.studies.definition import Column, Definition
from ambiseg.studies.results import (
    FORMAT,
    PERCENT,
    Row,
    cell,
    gap,
    minutes_text,
    number,
    paper_cell,
    seeds_text,
    title_of,
)

if TYPE_CHECKING:
    from rich.console import Console


_WIDE = 300  # characters of a line where there is no terminal


def head_and_body(
    definition: Definition, rows: Sequence[Row], short: bool = False
) -> tuple[list[str], list[list[str]]]:
    """The table in text; columns without any content are left out.

    Args:
        short: means and ± only, for terminals.
    """
    columns, reference = definition.table_columns, definition.reference
    first = columns[0]
    papers = [one for one in columns if any(one in row.paper for row in rows)]
    head = ["member", "masks", "seeds", "epochs", "CPU min", *map(title_of, columns)]
    if reference is not None and any(row.differences for row in rows):
        head.append(f"Δ {title_of(first)}")
    head += [f"paper: {title_of(one)}" for one in papers] if not short else []
    body = []
    for row in rows:
        epochs = "–" if row.epochs is None else str(row.epochs)
        line = [row.title, row.form or "–", seeds_text(row), epochs, minutes_text(row)]
        line += [_short(row.cells[one], one) if short else cell(row.cells[one], one.metric) for one in columns]
        if reference is not None and any(row.differences for row in rows):
            line.append("reference" if row.reference else gap(row.differences.get(first), first.metric))
        line += [paper_cell(row.paper.get(one), one.metric) for one in papers] if not short else []
        body.append(line)
    if not definition.train:
        drop = {1, 2, 3, 4}
        head = [text for i, text in enumerate(head) if i not in drop]
        body = [[text for i, text in enumerate(line) if i not in drop] for line in body]
    return head, body


def _short(value: Aggregate | None, one: Column) -> str:
    if value is None:
        return "–"
    spread = "" if value.spread is None else f" ± {number(value.spread, one.metric)}"
    return number(value.mean, one.metric) + spread


def statuses(rows: Sequence[Row]) -> list[str]:
    """What is missing or failed, a line per member."""
    return list(dict.fromkeys(f"{row.title}: {row.status}" for row in rows if row.status))


def notes(definition: Definition, rows: Sequence[Row]) -> list[str]:
    """Notes of members, and of the study."""
    own = [f"{row.title or name}: {row.note}" for name, row in definition.rows.items() if row.note]
    return [" ".join(text.split()) for text in [*own, definition.note] if text]


def markdown(definition: Definition, rows: Sequence[Row]) -> str:
    """A table for a README or a pull request."""
    head, body = head_and_body(definition, rows)
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join("| " + " | ".join(_bar(one) for one in line) + " |" for line in lines)
    more = [f"- {line}" for line in statuses(rows)]
    return f"{text}\n" + ("\n" + "\n".join(more) + "\n" if more else "")


def _bar(text: str) -> str:
    return text.replace("|", r"\|")


def latex(definition: Definition, rows: Sequence[Row]) -> str:
    """A tabular, with ± and without intervals."""
    columns = definition.table_columns
    fixed = ["member", "masks", "seeds"] if definition.train else ["member"]
    head = [*fixed, *map(title_of, columns)]
    lines = [r"\begin{tabular}{" + "l" * len(fixed) + "r" * len(columns) + "}", r"\hline", _tex_line(head), r"\hline"]
    for row in rows:
        start = [row.title, row.form or "–", seeds_text(row)][: len(fixed)]
        lines.append(_tex_line([*start, *(_short(row.cells[one], one) for one in columns)]))
    lines += [r"\hline", r"\end{tabular}"]
    lines += [f"% {line}" for line in statuses(rows)]
    return "\n".join(lines) + "\n"


_TEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "\\": r"\textbackslash{}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "–": "--", "β": r"$\beta$"}
_TEX |= {"½": "1/2", "¼": "1/4", "×": r"$\times$", "γ": r"$\gamma$", "π": r"$\pi$", "Δ": r"$\Delta$"}


def _tex_line(cells: Sequence[str]) -> str:
    return " & ".join("".join(_TEX.get(letter, letter) for letter in text) for text in cells) + r" \\"


def comma_separated(rows: Sequence[Row]) -> str:
    """One line per row and column, with all that is known of it, in fractions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    own = ["mean", "low", "high", "spread"]
    head = ["member", "form", "metric", "masks", "seeds", "epochs", "cpu_minutes", *own]
    head += [*(f"difference_{name}" for name in own), "paper", "paper_spread", "paper_table", "status"]
    writer.writerow(head)
    for row in rows:
        for one, value in row.cells.items():
            unit = 100 if one.metric in PERCENT else 1
            said = row.paper.get(one)
            paper = [None, None] if said is None else [said.mean / unit, said.spread and said.spread / unit]
            masks = value.masks if value else one.samples
            start = [row.member, row.form, one.metric, masks or "", row.seeds, row.epochs, row.minutes]
            numbers = [*_numbers(value), *_numbers(row.differences.get(one)), *paper]
            shown = ["" if x is None else f"{x:.6g}" if isinstance(x, float) else x for x in [*start, *numbers]]
            writer.writerow([*shown, " ".join(row.sources) if said else "", row.status])
    return text.getvalue()


def _numbers(value: Aggregate | None) -> list[float | None]:
    return [None] * 4 if value is None else [value.mean, value.low, value.high, value.spread]


def as_json(definition: Definition, rows: Sequence[Row], **about: Any) -> dict[str, Any]:
    """Everything, for programs."""
    listed = []
    for row in rows:
        one = {key: getattr(row, key) for key in ("member", "title", "form", "seeds", "wanted", "epochs", "minutes")}
        one |= {"status": row.status, "failed": row.failed, "reference": row.reference, "sources": list(row.sources)}
        one["cells"] = {str(key): None if value is None else asdict(value) for key, value in row.cells.items()}
        one["differences"] = {str(k): None if v is None else asdict(v) for k, v in row.differences.items()}
        one["paper"] = {str(key): value._asdict() for key, value in row.paper.items()}
        listed.append(one)
    about = {"format": FORMAT, "title": definition.title, "question": definition.question, **about}
    return {**about, "repeats": definition.repeats, "paper_data": definition.paper_data, "rows": listed}


def json_text(content: dict[str, Any]) -> str:
    """JSON with a line per value."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def show(definition: Definition, rows: Sequence[Row], console: Console) -> None:
    """The table on a terminal; the full one is in files."""
    head, body = head_and_body(definition, rows, short=True)
    if not console.is_terminal:
        console.width = _WIDE
    wide = [max(len(line[i]) for line in [head, *body]) + 2 for i in range(len(head))]
    fixed = 5 if definition.train else 1
    drop, last = list[int](), len(head) - 1
    for i in range(last - 1, fixed, -1):  # all columns are in the files
        if sum(width for k, width in enumerate(wide) if k not in drop) > console.width:
            drop.append(i)
    kept = [[text for i, text in enumerate(line) if i not in drop] for line in [head, *body]]
    console.print(table(kept[0], kept[1:], left=(0, 1) if definition.train else (0,)))
    for line in statuses(rows):
        console.print(line, soft_wrap=True)
