"""A check's report as one page with pictures: no network, no script, light and dark, readable on a phone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ambiseg._util.progress import progress
from ambiseg._util.text import count
from ambiseg.data.case import Case, Cases
from ambiseg.data.check.survey import Summary, Survey
from ambiseg.data.check.text import CLASS_HEAD, READER_HEAD, class_rows, number, overview, percent, reader_rows
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.io.errors import KINDS, Problem
from ambiseg.viz.drawing import data_uri, differences, heat_gradient, outlines, reader_colours

if TYPE_CHECKING:
    from ambiseg.data.check.check import Report

_MOST, _LEAST, _WRONG = 8, 4, 12  # pictures of each kind

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6472; --paper: #ffffff; --card: #f4f6f9; --line: #d8dde5;
  --error: #b3261e; --warning: #8a5a00; --hint: #1a5fb4; --fine: #1b7a3d; --bar: #56748f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #a0a9b8; --paper: #14181f; --card: #1d232c;
  --line: #333c49; --error: #ff8a80; --warning: #f2c265; --hint: #8ab8f5; --fine: #7fd39a; --bar: #7d9cba; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 4rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.error { color: var(--error); } .warning { color: var(--warning); } .hint { color: var(--hint); }
.fine { color: var(--fine); } .verdict { font-size: 1.1rem; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } .words { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
details { background: var(--card); border-radius: .5rem; padding: .6rem .9rem; margin: .5rem 0; }
summary { cursor: pointer; font-weight: 600; } ul { margin: .5rem 0; padding-left: 1.1rem; }
code, pre { font: .875em/1.45 ui-monospace, monospace; } pre { background: var(--card); padding: .7rem .9rem;
  border-radius: .5rem; overflow-x: auto; white-space: pre-wrap; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .7rem; }
figure div { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem; }
figure div img:only-child { grid-column: 1 / -1; }
img { width: 100%; height: auto; display: block; border-radius: .25rem; background: #000; image-rendering: pixelated; }
figcaption { font-size: .875rem; margin-top: .4rem; } figcaption b { color: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .9rem; margin: .4rem 0 .8rem; padding: 0; }
.swatch { display: inline-block; width: .9rem; height: .9rem; border-radius: .2rem; margin-right: .4rem;
  vertical-align: -.1rem; border: 1px solid var(--soft); }
.heat { display: inline-block; width: 7rem; height: .8rem; border-radius: .2rem; vertical-align: -.1rem;
  margin: 0 .4rem; }
svg { max-width: 36rem; width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui; fill: var(--soft); }
svg rect { fill: var(--bar); }
@media (max-width: 34rem) { th, td { padding-right: .7rem; } th, .words { white-space: normal; overflow-wrap: normal; }
  dl { gap: .2rem .8rem; } svg text { font-size: 18px; } }
"""


def page(report: Report, cases: Cases, quiet: bool = False) -> str:
    """The whole page as HTML."""
    tone = "error" if report.count("error") else "warning" if report.count("warning") else "fine"
    survey = report.survey
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(str(report.path))}</p>',
        f'<p class="verdict {tone}">{escape(report.verdict)}</p>',
    ]
    if survey is not None and survey.cases:
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in overview(report, survey))
        body += [f"<dl>{rows}</dl>"]
    body += _problems(report)
    if report.suggestion:
        text = json.dumps(report.suggestion, ensure_ascii=False, indent=2)
        body += ["<h2>ambiseg.json could say</h2>", f"<pre>{escape(text)}</pre>"]
    if survey is not None and survey.cases:
        body += ["<h2>Classes</h2>", _table(CLASS_HEAD, class_rows(survey), words=(1,))]
        body += ["<h2>Readers</h2>", _table(READER_HEAD, reader_rows(survey), words=(0,))]
        if survey.drawn:
            body += [
                '<p class="soft">IoU with others leaves out pairs of masks where neither reader marked anything.</p>'
            ]
        body += _histogram(survey)
        body += _galleries(report, survey, cases, quiet)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>{escape(report.title)}: {escape(report.verdict)}</title>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{title}<style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _problems(report: Report) -> list[str]:
    if not report.problems:
        return []
    parts = ["<h2>Problems</h2>"]
    for code, problems in report.groups():
        severity = problems[0].severity
        head = f'<span class="{severity}">{severity} {code}</span> {escape(KINDS[code].name)}'
        lists = ""
        for remedy, same in groupby(problems, lambda problem: problem.remedy):
            lines = "".join(
                f"<li><code>{escape(p.file)}</code> {escape(p.message)}</li>"
                if p.file
                else f"<li>{escape(p.message)}</li>"
                for p in same
            )
            lists += f'<ul>{lines}</ul><p class="soft">→ {escape(remedy)}</p>'
        state = " open" if severity != "hint" and len(problems) <= 20 else ""
        number_of = f' <span class="soft">({len(problems):,})</span>' if len(problems) > 1 else ""
        parts.append(f"<details{state}><summary>{head}{number_of}</summary>{lists}</details>")
    if report.settings_file:
        parts.append(f'<p class="soft">Settings go into <code>{escape(report.settings_file)}</code></p>')
    return parts


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: tuple[int, ...]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=words' if i in words else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _histogram(survey: Survey) -> list[str]:
    """How many images have which mean IoU of their readers."""
    values = [case.iou for case in survey.cases if math.isfinite(case.iou)]
    if not values:
        return []
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    most = int(counts.max())
    bars = "".join(
        f'<rect x="{30 + 25 * i}" y="{110 - 90 * n / most:.1f}" width="23" height="{90 * n / most:.1f}">'
        f"<title>IoU {i / 20:.2f} to {(i + 1) / 20:.2f}: {count(int(n), 'image')}</title></rect>"
        for i, n in enumerate(counts)
        if n
    )
    ticks = "".join(
        f'<text x="{30 + 500 * t}" y="126" text-anchor="middle">{t:g}</text>' for t in (0, 0.25, 0.5, 0.75, 1)
    )
    label = f"Histogram of the mean pairwise IoU of {count(len(values), 'image')}, mean {number(survey.iou)}"
    axis = f'<text x="26" y="24" text-anchor="end">{most}</text><text x="26" y="113" text-anchor="end">0</text>'
    svg = f'<svg viewBox="0 0 540 130" role="img" aria-label="{escape(label)}">{bars}{ticks}{axis}</svg>'
    return ["<h2>Agreement, image by image</h2>", f'<p class="soft">Images by the mean IoU of their readers</p>{svg}']


def _galleries(report: Report, survey: Survey, cases: Cases, quiet: bool) -> list[str]:
    place = {name: index for index, name in enumerate(cases.names)}
    order = sorted((c for c in survey.cases if math.isfinite(c.iou)), key=lambda c: (c.iou, c.name))
    wrong = _cases_with_problems(report, cases, {case.name: case for case in survey.cases})
    parts: list[tuple[str, str, list[tuple[Summary, str]]]] = []
    if wrong:
        parts.append(("With problems", "Cases that can be drawn, with what was found.", wrong[:_WRONG]))
    if order:
        least = [(case, "") for case in reversed(order[_MOST:][-_LEAST:])]
        parts.append(
            ("Most ambiguous", "The lowest mean IoU of their readers.", [(case, "") for case in order[:_MOST]])
        )
        parts += [("Least ambiguous", "The highest mean IoU of their readers.", least)] if least else []
    elif not wrong:
        step = max(1, len(survey.cases) // _MOST)
        parts.append(("Examples", "One reader an image.", [(case, "") for case in survey.cases[::step][:_MOST]]))
    colours = reader_colours(sorted(survey.by_reader))
    total = sum(len(chosen) for _, _, chosen in parts)
    drawn = progress((pair for part in parts for pair in part[2]), total, "drawing", quiet)
    figures = {id(pair): _figure(_again(cases, place[pair[0].name]), *pair, colours) for pair in drawn}
    html = [f"<h2>Pictures</h2>{_legend(colours, several=bool(order))}"]
    for title, text, chosen in parts:
        shown = "".join(figures[id(pair)] for pair in chosen)
        html.append(f'<h2>{title}</h2><p class="soft">{text}</p><div class="gallery">{shown}</div>')
    return html


def _again(cases: Cases, index: int) -> Case | None:
    return cases.read(index)[0] if isinstance(cases, Folder) else cases[index]


def _cases_with_problems(report: Report, cases: Cases, known: dict[str, Summary]) -> list[tuple[Summary, str]]:
    """Cases that can be drawn although one of their files has a problem, with that problem."""
    if not isinstance(cases, Folder):
        return []
    by_file: dict[str, Problem] = {p.file: p for p in reversed(report.problems) if p.severity != "hint"}
    found = []
    for index, name in enumerate(cases.names):
        files = [str(cases.file_of(index)), *(str(cases.file_of(index, r)) for r in cases.readers_of(index))]
        hit = next((by_file[file] for file in files if file in by_file), None)
        if hit is not None and name in known:
            found.append((known[name], report.relative(hit).line))
    return found


def _figure(case: Case | None, summary: Summary, problem: str, colours: dict[str, str]) -> str:
    if case is None:
        return ""
    name, readers = escape(summary.name), count(len(case.readers), "reader")
    pictures = f'<img alt="{name}: the image with the outlines of {readers}" src="{data_uri(outlines(case, colours))}">'
    if len(case.readers) > 1:
        alt = f"{name}: where the readers differ, {percent(summary.differing)} of the pixels"
        pictures += f'<img alt="{alt}" src="{data_uri(differences(case))}">'
    about = f"{readers}, {summary.size[0]}×{summary.size[1]}"
    if math.isfinite(summary.iou):
        about += f", IoU {number(summary.iou)}, {percent(summary.differing)} of pixels differ"
    note = f'<br><span class="warning">{escape(problem)}</span>' if problem else ""
    return f"<figure><div>{pictures}</div><figcaption><b>{name}</b><br>{about}{note}</figcaption></figure>"


def _legend(colours: dict[str, str], several: bool) -> str:
    shown = list(colours.items())[:24]
    readers = "".join(f'<span><i class="swatch" style="background:{c}"></i>{escape(r)}</span>' for r, c in shown)
    more = f"<span>and {len(colours) - 24} more</span>" if len(colours) > 24 else ""
    gradient = f'<i class="heat" style="background:linear-gradient(90deg, {heat_gradient()})"></i>'
    heat = f'<div class="legend"><span>few readers differ{gradient}evenly divided</span></div>' if several else ""
    return f'<div class="legend">{readers}{more}</div>{heat}'
