"""The part of an evaluation about single masks and measurements, as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ambiseg._util.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from ambiseg.evaluation.records import Mean
    from ambiseg.evaluation.results import Evaluation


def show_decided(found: Evaluation, console: Console) -> None:
    """Print how well each rule's mask fits the readers, and how well measurements are predicted."""
    decided, who = found.decided, found.annotator
    if decided is None:
        return
    surfaces = [key for key in ("hd95", "assd") if any(key in one.readers for one in decided.consensus)]
    rows = []
    for one in decided.consensus:
        cells = [_mean(one.expected.get("dice")), one.readers["dice"].text, _mean(one.readers["iou"])]
        cells += [_mean(one.majority.get("dice"))] + [_mean(one.readers.get(key)) for key in surfaces]
        rows.append([f"a single {who}" if one.how == "reader" else one.how, *cells])
    setting = decided.setting.replace("-", " ")
    console.print(f"one mask of each image, {setting}", style="bold")
    head = ["", "expected Dice", f"Dice with {who}s", "IoU", "with majority"]
    head += [f"{key.upper()} ({decided.length})" for key in surfaces]
    console.print(table(head, rows))
    text = f"expected Dice: with the masks of the prediction; the real one is with those of the {who}s"
    _dim(f"{text}; a single {who} is compared with the others", console)
    if surfaces:
        _dim("HD95, ASSD: distances between outlines, of images where both masks have one", console)
    console.print()
    rows = []
    for one in decided.measures:
        at = one.at(0.9)
        unit = f" ({one.unit})" if one.unit else ""
        name = f"{one.what}{unit}" if len(found.evaluated) == 1 else f"{found.classes[one.of]} {one.what}{unit}"
        cells = [_mean(span) for span in (one.predicted, one.readers, one.crps, one.crps_of_readers)]
        rows.append([name, *cells, "–" if at is None else _share(at.covered), "–" if at is None else _mean(at.width)])
    if rows:
        console.print(f"measurements, {setting}", style="bold")
        head = ["", "mean", f"{who}s'", "CRPS", f"a {who}'s", "in 90 %", "width"]
        console.print(table(head, rows))
        text = f"CRPS: distance between the predicted distribution and each {who}'s value, in its unit; 0 is best"
        _dim(f"{text}. a {who}'s: predicted by the other {who}s", console)
        _dim(f"in 90 %: share of the {who}s' values in the predicted 90 % intervals, and the width of those", console)
        console.print()


def _mean(value: Mean | None) -> str:
    if value is None or value.mean is None:
        return "–"
    return f"{value.mean:.4g}" if abs(value.mean) >= 10 else f"{value.mean:.3f}"


def _share(value: Mean) -> str:
    """As per cent, with its interval: a table has to fit into 80 columns."""
    if value.mean is None:
        return "–"
    span = "" if value.low is None or value.high is None else f" [{100 * value.low:.0f}, {100 * value.high:.0f}]"
    return f"{100 * value.mean:.0f} %{span}"


def _dim(text: str, console: Console) -> None:
    for line in textwrap.wrap(text, console.width, initial_indent="  ", subsequent_indent="    "):
        console.print(line, style="dim")
