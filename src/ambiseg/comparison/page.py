"""The page: tables, and the same cases side by side, which can be sorted and filtered in the browser. One file."""

from __future__ import annotations

from importlib import resources

from ambiseg._util.text import some
from ambiseg.comparison.record import CaseRow, Comparison
from ambiseg.comparison.views import Gallery
from ambiseg.comparison.writing import (
    COST_HEAD,
    HEAD,
    LOOK_HEAD,
    LOOK_TITLE,
    TERMS,
    about,
    cost_rows,
    look_rows,
    main_metrics,
    notes,
    rows_of,
    title_of,
)
from ambiseg.evaluation.results import Evaluation
from ambiseg.viz import colours, pictures
from ambiseg.viz.page import number, render, safe


def page(comparison: Comparison, evaluation: Evaluation, gallery: Gallery | None) -> str:
    """The page as HTML.

    Args:
        evaluation: of the baseline, whose classes and words are everybody's.
    """
    names = [one.name for one in comparison.methods]
    base = names.index(comparison.baseline)
    pair = next((i for i in range(len(names)) if i != base), base), base
    shown = main_metrics(comparison)
    others = [name for name in names if name != comparison.baseline]
    drawn = list(gallery.views) if gallery else []
    files = {name: resources.files(package).joinpath(name).read_text(encoding="utf-8") for package, name in (
        ("ambiseg.reporting", "style.css"),
        ("ambiseg.comparison", "comparison.css"),
        ("ambiseg.comparison", "comparison.js"),
    )}  # fmt: skip
    rows = [
        {"name": c.name, "readers": c.readers, "disagreement": c.disagreement, "ged": c.ged} for c in comparison.cases
    ]
    return render(
        ("ambiseg.comparison", "ambiseg.reporting"),
        "comparison.html",
        style=safe(files["style.css"] + files["comparison.css"]),
        script=safe(files["comparison.js"]),
        title=f"{some(others, 4)} compared with {comparison.baseline}" if others else comparison.baseline,
        about=about(comparison),
        comparison=comparison,
        evaluation=evaluation,
        annotator=evaluation.annotator,
        names=names,
        pair=pair,
        head=HEAD,
        terms={metric: TERMS[metric].worded(annotator=comparison.annotator) for metric in comparison.metrics},
        titles={metric: title_of(metric, comparison.annotator) for metric in comparison.metrics},
        tables={metric: rows_of(comparison, metric) for metric in comparison.metrics},
        shown=shown,
        hidden=[metric for metric in comparison.metrics if metric not in shown],
        notes=notes(comparison),
        look_head=LOOK_HEAD,
        look_title=LOOK_TITLE,
        looks=look_rows(comparison),
        cost_head=COST_HEAD,
        costs=cost_rows(comparison.methods),
        several=any(one.seeds > 1 for one in comparison.methods),
        readers=sorted({case.readers for case in comparison.cases}),
        differences=[_difference(case, *pair) for case in comparison.cases],
        numbers={case.name: i for i, case in enumerate(comparison.cases)},
        drawn=drawn,
        pictured=len(drawn),
        gallery=gallery or Gallery({}, ["", ""]),
        data={"cases": rows},
        colours=colours,
        pictures=pictures,
    )


def _difference(case: CaseRow, one: int, other: int) -> str:
    mine, theirs = case.ged[one], case.ged[other]
    if mine is None or theirs is None:
        return number(None)
    return ("+" if mine - theirs >= 0.0005 else "") + number(mine - theirs).replace("−0.000", "0.000")
