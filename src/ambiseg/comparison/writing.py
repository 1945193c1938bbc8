"""A comparison as tables: Markdown, CSV and LaTeX; in none of them can a name become more than a name."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from ambiseg._util.text import count, printable
from ambiseg.comparison.record import Comparison, Method, Score, Value
from ambiseg.reporting.terms import METRICS, Metric
from ambiseg.viz.page import NO_VALUE, number

TERMS: dict[str, Metric] = {
    **METRICS,
    "empty_mass": Metric(
        "empty mass", "probability of a mask that marks nothing", "as the share of such {annotator}s is best", 3
    ),
}
DIRECTION = {"ged": -1, "ged_unbiased": -1, "ged_unbiased_both": -1, "matched_iou": 1, "ece": -1}
"""Whether more (1) or less (-1) of a metric is better; the others have a best value in between."""
MARK, OTHER = "*", "†"
MAIN = ("ged", "ged_unbiased", "matched_iou", "ece")
"""What is shown first, unless other metrics were asked for."""


def main_metrics(comparison: Comparison) -> list[str]:
    """Those of :data:`MAIN` where all metrics were asked for, else all that were."""
    return list(MAIN) if set(comparison.metrics) == set(TERMS) else comparison.metrics


def value_text(value: Value | None, metric: str, sign: bool = False) -> str:
    """``0.190 [0.178, 0.203]``; with ``sign``, ``+0.012 [−0.003, +0.027]``.

    >>> value_text(Value(mean=0.012, low=-0.003, high=0.027, spread=None, count=9), "ged", sign=True)
    '+0.012 [−0.003, +0.027]'
    """
    if value is None or value.mean is None:
        return NO_VALUE
    mean = _signed(value.mean, metric, sign)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} [{_signed(value.low, metric, sign)}, {_signed(value.high, metric, sign)}]"


def _signed(value: float, metric: str, sign: bool) -> str:
    digits = TERMS[metric].digits
    text = f"{100 * value:.2f} %" if digits is None else f"{value:.{digits}f}"
    if not re.search("[1-9]", text):
        return text.lstrip("-")  # no negative zero
    return ("+" if sign and value > 0 else "") + text.replace("-", "−")


def verdict(score: Score) -> str:
    """``better``, ``worse`` or ``differs`` where the interval of the difference excludes 0; else empty."""
    change = score.difference
    if change is None or change.mean is None or not change.excludes_zero:
        return ""
    direction = DIRECTION.get(score.metric, 0)
    return "differs" if not direction else "better" if change.mean * direction > 0 else "worse"


def rows_of(comparison: Comparison, metric: str) -> list[list[str]]:
    """Cells of the table of a metric: method, form, masks, seeds, value, difference, verdict."""
    rows = []
    seeds = {one.name: one.seeds for one in comparison.methods}
    for score in comparison.scores:
        if score.metric != metric:
            continue
        own = score.method == comparison.baseline
        change = "baseline" if own else value_text(score.difference, metric, sign=True)
        if not own and score.against not in (None, score.form):
            change += f" {OTHER}"
        cells = [score.method, score.form, str(score.masks), str(seeds[score.method])]
        rows.append([*cells, value_text(score.value, metric), change, verdict(score)])
    return rows


HEAD = ("method", "form", "masks", "seeds", "mean [95 % interval]", "difference to the baseline", "")


LOOK_HEAD = ("method", "against", "AURC [95 % interval]", "difference to the baseline", "")
LOOK_TITLE = "which images a person must look at: AURC, the mean loss of those left to the model; less is better"


def look_rows(comparison: Comparison) -> list[list[str]]:
    """Cells of the table of :class:`~ambiseg.comparison.record.LookRow`."""
    losses, rows = {"readers": f"the {comparison.annotator}s' disagreement", "ged": "own GED"}, []
    for one in comparison.looking:
        own, change = one.method == comparison.baseline, one.difference
        mark = ""
        if change is not None and change.mean is not None and change.excludes_zero:
            mark = "better" if change.mean < 0 else "worse"
        moved = "baseline" if own else value_text(change, "ged", sign=True)
        rows.append([one.method, losses[one.loss], value_text(one.value, "ged"), moved, mark])
    return rows


COST_HEAD = ("method", "kind", "parameters", "training, CPU min", "16 masks, CPU s", "in passes of the baseline")


def cost_rows(methods: Iterable[Method]) -> list[list[str]]:
    """Cells of the table of costs."""
    return [
        [
            one.name,
            printable(one.method) or "mask files",
            NO_VALUE if one.parameters is None else f"{one.parameters:,}",
            _rounded(one.training_minutes),
            _rounded(one.mask_seconds, 3),
            _rounded(one.mask_ratio),
        ]
        for one in methods
    ]


def _rounded(value: float | None, digits: int = 1) -> str:
    """A number with more digits where it is small."""
    return number(value, digits if value is None or value >= 10 ** (1 - digits) else digits + 1)


def title_of(metric: str, annotator: str) -> str:
    """``GED: less is better``."""
    term = TERMS[metric].worded(annotator=annotator)
    return f"{term.label}: {term.better}" if term.better else term.label


def about(comparison: Comparison) -> str:
    """What was compared, in one line."""
    c = comparison
    sizes = f"{count(c.images, 'image')} of {count(c.patients, c.unit)}"
    weights = "" if c.which == "files" else f", {c.which} weights"
    turned = max(one.symmetries for one in c.methods)
    turned_text = f", mean of {turned} symmetries" if turned > 1 else ""
    return f"{c.split} of {c.data}, {sizes}, protocol {c.protocol}{weights}{turned_text}"


def notes(comparison: Comparison) -> list[str]:
    """What the numbers are, in sentences."""
    unit = comparison.unit
    several = any(one.seeds > 1 for one in comparison.methods)
    drawn = f"whole {unit}s are drawn" + (" and, for methods of several seeds, seeds" if several else "")
    found = [
        f"Differences are to {comparison.baseline}, of the same images.",
        f"Intervals are of 95 %: {drawn}. {MARK}: the interval excludes 0.",
    ]
    alone = [one.name for one in comparison.methods if one.seeds == 1]
    if alone:
        whose = "all methods" if len(alone) == len(comparison.methods) else ", ".join(alone)
        found.append(f"One seed: {whose}. Their intervals know nothing of what another training would give.")
    few = [one.name for one in comparison.methods if 1 < one.seeds < 5]
    if few:
        text = f"Few seeds: {', '.join(few)}. Resampling S of them underestimates their variance by (S − 1) / S."
        found.append(text)
    if "ece" in comparison.metrics:
        found.append("ECE is of all pixels together: its difference is that of two such values, without an interval.")
    if any(score.against not in (None, score.form) for score in comparison.scores):
        found.append(f"{OTHER}: the baseline has no compact form; this is the difference to its standard form.")
    return found


# -- Markdown ---------------------------------------------------------------------------------------------------------


def to_markdown(comparison: Comparison) -> str:
    """The tables of all metrics and of costs."""
    parts = ["# Comparison", _md(about(comparison))]
    for metric in comparison.metrics:
        rows = [[*row[:-1], f"\\{MARK} {row[-1]}" if row[-1] else ""] for row in rows_of(comparison, metric)]
        parts += [f"## {_md(title_of(metric, comparison.annotator))}", _md_table(HEAD, rows)]
    if rows := look_rows(comparison):
        rows = [[*row[:-1], f"\\{MARK} {row[-1]}" if row[-1] else ""] for row in rows]
        parts += [f"## {_md(LOOK_TITLE)}", _md_table(LOOK_HEAD, rows)]
    parts += ["## Cost", _md_table(COST_HEAD, cost_rows(comparison.methods))]
    parts += ["\n".join(f"- {_md(line)}" for line in notes(comparison))]
    return "\n\n".join(parts) + "\n"


def _md_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows whose first cell is a name, and the others are ours."""
    lines = [list(head), ["---"] * len(head), *([_md(row[0]), *row[1:]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md(text: str) -> str:
    r"""A text in which no character means anything to Markdown.

    >>> _md("a|b*c_<i>")
    'a\\|b\\*c\\_&lt;i&gt;'
    """
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#!~$])", r"\\\1", text)


# -- CSV --------------------------------------------------------------------------------------------------------------

_COLUMNS = ("method", "seeds", "form", "samples", "masks", "metric", "mean", "low", "high", "spread", "images")


def to_csv(comparison: Comparison) -> str:
    """One line for each method, form, number of masks and metric; a cell without a value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    change = [f"difference_{name}" for name in ("mean", "low", "high", "spread")]
    writer.writerow([*_COLUMNS, "baseline", "baseline_form", *change])
    seeds = {one.name: one.seeds for one in comparison.methods}
    for one in comparison.scores:
        value, moved = one.value, one.difference
        cells = [_cell(one.method), seeds[one.method], one.form, one.samples, one.masks, one.metric]
        cells += [value.mean, value.low, value.high, value.spread, value.count, _cell(comparison.baseline), one.against]
        cells += [None] * 4 if moved is None else [moved.mean, moved.low, moved.high, moved.spread]
        writer.writerow(cells)
    return text.getvalue()


def _cell(text: str) -> str:
    """A name that a spreadsheet does not take for a formula.

    >>> _cell("=1+1"), _cell("ours")
    ("'=1+1", 'ours')
    """
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


# -- LaTeX ------------------------------------------------------------------------------------------------------------

_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "−": "$-$", "–": "--", "[": "{[}", "]": "{]}",
}  # fmt: skip


def _tex(text: str) -> str:
    r"""A text in which no character means anything to LaTeX.

    >>> _tex("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_TEX.get(char, char) for char in printable(text))


def to_latex(comparison: Comparison) -> str:
    """One booktabs table: a row for each method and form, a column for each metric and the costs."""
    metrics = main_metrics(comparison)
    head = ["Method", "Form", "Masks", "Seeds", *(TERMS[m].label for m in metrics), "CPU min", "16 masks, CPU s"]
    lines = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}",
        "\\toprule",
        " & ".join(map(_tex, head)) + " \\\\",
        "\\midrule",
    ]
    methods = {one.name: one for one in comparison.methods}
    for samples in comparison.samples:
        shown = [one for one in comparison.scores if one.samples == samples]
        for method, form in dict.fromkeys((one.method, one.form) for one in shown):
            scores = {one.metric: one for one in shown if (one.method, one.form) == (method, form)}
            about = methods[method]
            cells = [_tex(method), form, str(next(iter(scores.values())).masks), str(about.seeds)]
            cells += [_tex_score(scores.get(metric)) for metric in metrics]
            cells += [_tex(_rounded(about.training_minutes)), _tex(_rounded(about.mask_seconds, 3))]
            lines.append(" & ".join(cells) + " \\\\")
        lines.append("\\midrule" if samples != comparison.samples[-1] else "\\bottomrule")
    lines += ["\\end{tabular}", f"% {printable(about_line(comparison))}"]
    return "\n".join(lines) + "\n"


def about_line(comparison: Comparison) -> str:
    """What the table says of itself in a comment of one line."""
    return f"{about(comparison)}; {MARK}: the interval of the difference to {comparison.baseline} excludes 0"


def _tex_score(score: Score | None) -> str:
    if score is None:
        return "--"
    mean, _, interval = value_text(score.value, score.metric).partition(" [")
    mark = f"$^{MARK}$" if verdict(score) else ""
    return _tex(mean) + mark + (f" {{\\scriptsize {_tex(f'[{interval}')}}}" if interval else "")
