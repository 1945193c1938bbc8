"""The table of a study: a row per member and form of masks, with what is missing and what failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ambiseg._util.errors import DataError
from ambiseg._util.text import count
from ambiseg.comparison.scores import Aggregate, Entry, aggregate, check_comparable, difference, setting_of
from ambiseg.config import Config
from ambiseg.evaluation.results import Evaluation
from ambiseg.runs import Run, build_model
from ambiseg.studies.definition import MODES, SIZES, Column, Definition, Number
from ambiseg.studies.members import Member
from ambiseg.studies.store import Trial

FORMAT = "ambiseg.Study/1"
TITLES = {
    "ged": "GED",
    "ged_unbiased": "GED unbiased",
    "ged_unbiased_both": "GED unbiased on both sides",
    "matched_iou": "matched IoU",
    "diversity": "diversity",
    "entropy": "entropy, %",
    "ece": "ECE, %",
    "empty_mass": "empty mass",
    "modes_found": "modes found",
    "modes_distance": "distance of mode probabilities",
    "parameters": "parameters, M",
    "megabytes": "MB",
}
PERCENT = ("ece", "entropy")  # of which tables have the hundredfold
_DIGITS = {"modes_found": 1, "parameters": 2, "megabytes": 2}


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        member, title: which one.
        form: of the masks; empty where nothing is scored yet.
        seeds, wanted: trainings that are scored, and that are asked for.
        epochs: of a training; ``None`` where they are not measured yet.
        minutes: CPU time of a training on average, where it is known.
        cells: values by column.
        differences: to the reference, by column.
        paper: what the paper reports, by column.
        sources: labels of the paper's tables.
        status: what is missing or failed, in one line; empty where all is there.
        failed: whether something failed.
    """

    member: str
    title: str
    form: str
    seeds: int
    wanted: int
    epochs: int | None
    minutes: float | None
    cells: dict[Column, Aggregate | None]
    differences: dict[Column, Aggregate | None] = field(default_factory=dict)
    paper: dict[Column, Number] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    status: str = ""
    failed: bool = False
    reference: bool = False


def rows_of(
    definition: Definition, members: dict[str, Member | None], trials: Sequence[Trial], seeds: int | None = None
) -> tuple[list[Row], str]:
    """The rows in the order of the study, and what keeps members from being compared, if anything does.

    Args:
        seeds: trainings of every member that are asked for; ``None``: as the study says.
    """
    by_name: dict[str, list[Trial]] = {name: [] for name in members}
    for trial in trials:
        by_name[trial.member.name].append(trial)
    entries, problems = dict[str, Entry](), dict[str, str]()
    for name, found in by_name.items():
        evaluations = tuple(trial.evaluation for trial in found if trial.evaluation is not None)
        if evaluations:
            try:
                entries[name] = Entry(name, evaluations)
            except DataError as error:
                problems[name] = str(error)
    trouble = ""
    try:
        check_comparable(list(entries.values()))
    except DataError as error:
        trouble = str(error)
    rows: list[Row] = []
    for name, member in members.items():
        wanted = seeds or definition.rows[name].seeds or definition.seeds
        rows += _rows(
            definition, name, member, by_name[name], wanted, entries, problems.get(name, ""), compare=not trouble
        )
    return rows, trouble


def _rows(
    definition: Definition,
    name: str,
    member: Member | None,
    trials: Sequence[Trial],
    wanted: int,
    entries: dict[str, Entry],
    problem: str,
    compare: bool,
) -> list[Row]:
    """The rows of one member: one for each form of its masks, or one that says what is missing."""
    entry, found = entries.get(name), list[Row]()
    status, failed = _status(definition, member, trials, wanted)
    about: dict[str, Any] = {"member": name, "title": (definition.rows[name].title or name), "wanted": wanted}
    about |= {"epochs": member.config.trainer.epochs if member and definition.train else None}
    about |= {"status": problem or status, "failed": failed or bool(problem), "minutes": _minutes(trials)}
    sizes = _sizes(definition, member, trials)
    asked = {row.form: row for row in definition.paper if row.member == name}
    for form in definition.forms:
        cells = {
            one: sizes.get(one) if one.metric in SIZES else _cell(entry, form, one) for one in definition.table_columns
        }
        scored = [value for one, value in cells.items() if one.metric not in SIZES and value is not None]
        if definition.train and not scored:
            continue
        if not definition.train and form != definition.forms[0]:
            continue
        more: dict[str, Any] = _paper(definition, name, form)
        if entry is not None and compare:
            more |= _compared(definition, entries, entry, form)
        seeds = len(entry.evaluations) if entry else 0
        found.append(Row(form=form if definition.train else "", seeds=seeds, cells=cells, **about, **more))
    if not found:
        form = next(iter(asked), definition.forms[0])
        empty = dict.fromkeys(definition.table_columns)
        cells = {one: sizes.get(one) for one in empty}
        found = [Row(form="", seeds=0, cells=cells, **about, **_paper(definition, name, form))]
    return found


def _paper(definition: Definition, name: str, form: str) -> dict[str, Any]:
    rows = [row for row in definition.paper if row.member == name and row.form == form]
    numbers = {key: value for row in rows for key, value in row.numbers.items()}
    return {"paper": numbers, "sources": tuple(dict.fromkeys(row.source for row in rows))}


def _compared(definition: Definition, entries: dict[str, Entry], entry: Entry, form: str) -> dict[str, Any]:
    reference = definition.reference
    if reference is None or reference.member not in entries:
        return {}
    baseline, own = entries[reference.member], reference.form or form
    if entry.name == reference.member and own == form:
        return {"reference": True}
    found: dict[Column, Aggregate | None] = {}
    for one in definition.table_columns:
        if one.metric not in (*MODES, *SIZES):
            value = _difference(entry, baseline, form, one, own)
            if value is None and reference.form is None:  # a form that the reference does not have
                value = _difference(entry, baseline, form, one, "standard")
            found[one] = value
    return {"differences": found}


def _cell(entry: Entry | None, form: str, one: Column) -> Aggregate | None:
    if entry is None:
        return None
    if one.metric not in MODES:
        return _kept((_key(entry), form, one), lambda: aggregate(entry, form, one.samples, one.metric))
    values = [_of_modes(evaluation, form, one) for evaluation in entry.evaluations]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Aggregate(statistics.fmean(known), None, None, spread, len(known), len(entry.first.cases), one.samples)


def _difference(entry: Entry, baseline: Entry, form: str, one: Column, own: str) -> Aggregate | None:
    key = _key(entry), _key(baseline), form, own, one
    return _kept(key, lambda: difference(entry, baseline, form, one.samples, one.metric, own))


_computed: dict[Hashable, Aggregate | None] = {}  # the table is written whenever a training ends


def _kept(key: Hashable, compute: Callable[[], Aggregate | None]) -> Aggregate | None:
    if key not in _computed:
        _computed[key] = compute()
    return _computed[key]


def _key(entry: Entry) -> Hashable:
    """What the numbers of an entry depend on."""
    return tuple((e.run, e.weights, e.split, e.protocol, e.seed, e.threads, e.batch_size) for e in entry.evaluations)


def _of_modes(evaluation: Evaluation, form: str, one: Column) -> float | None:
    modes = evaluation.modes
    if modes is None:
        return None
    if one.metric == "modes_found":
        return None if modes.found is None else float(modes.found)
    setting = setting_of(evaluation, form, one.samples)
    return modes.by_setting[setting.key].distance if setting and setting.key in modes.by_setting else None


def _sizes(definition: Definition, member: Member | None, trials: Sequence[Trial]) -> dict[Column, Aggregate | None]:
    """Columns about the network, which needs no training."""
    columns = [one for one in definition.table_columns if one.metric in SIZES]
    if not columns or member is None:
        return {}
    channels, classes = 1, 2
    done = next((trial for trial in trials if trial.evaluation is not None), None)
    if done is not None:
        card = Run(done.folder).card
        channels, classes = card.channels, len(card.classes)
    number = parameters(member.config, channels, classes)
    value = {"parameters": number / 1e6, "megabytes": number * 4 / 1e6}
    return {one: Aggregate(value[one.metric], None, None, None, 0, 0, 0) for one in columns}


def parameters(config: Config, channels: int, classes: int) -> int:
    """Number of weights of a network; nothing is computed.

    >>> parameters(Config.from_recipe("lidc"), 1, 2)
    9318826
    """
    with torch.device("meta"):
        return sum(weight.numel() for weight in build_model(config, channels, classes).parameters())


def _minutes(trials: Sequence[Trial]) -> float | None:
    known = [trial.cost / 60 for trial in trials if trial.cost is not None and trial.state in ("done", "trained")]
    return statistics.fmean(known) if known else None


def _status(definition: Definition, member: Member | None, trials: Sequence[Trial], wanted: int) -> tuple[str, bool]:
    """What is missing and what failed, in one line."""
    if not definition.train:
        return "", False
    if member is None or not trials:
        return "not run yet", False
    done = [trial for trial in trials if trial.state == "done"]
    failed = [trial for trial in trials if trial.state == "failed"]
    open_ = [trial for trial in trials if trial.state not in ("done", "failed")]
    if not done and not failed and all(trial.state == "missing" for trial in open_):
        return "not run yet", False
    groups: dict[str, list[str]] = {}
    for trial in failed:
        groups.setdefault(f"failed: {trial.reason}", []).append(str(trial.seed))
    for state, text in {"begun": "in training", "trained": "not scored yet", "missing": "not run yet"}.items():
        for trial in open_:
            if trial.state == state:
                groups.setdefault(text, []).append(str(trial.seed))
    parts = [f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)} {text}" for text, seeds in groups.items()]
    return "; ".join(parts), bool(failed)


# -- numbers in words -------------------------------------------------------------------------------------------------


def number(value: float | None, metric: str, signed: bool = False) -> str:
    """A number of a column as tables have it; a dash for none.

    >>> number(0.2181, "ged"), number(0.00064, "ece"), number(-0.02, "ged", signed=True), number(None, "ged")
    ('.218', '.064', '−.020', '–')
    >>> number(-0.0001, "ged", signed=True)
    '.000'
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{100 * value if metric in PERCENT else value:{'+' if signed else ''}.{_DIGITS.get(metric, 3)}f}"
    text = text if float(text) else text.lstrip("+-")
    for sign in ("", "+", "-"):
        if text.startswith(f"{sign}0.") and metric not in _DIGITS:
            text = sign + text[len(sign) + 1 :]
    return text.replace("-", "−")


def cell(value: Aggregate | None, metric: str) -> str:
    """Mean, ± over seeds, and interval over patients.

    >>> cell(Aggregate(.218, .2, .24, .003, 3, 100, 16), "ged")
    '.218 ± .003 [.200, .240]'
    """
    if value is None:
        return "–"
    text = number(value.mean, metric)
    text += f" ± {number(value.spread, metric)}" if value.spread is not None else ""
    if value.low is not None and value.high is not None:
        text += f" [{number(value.low, metric)}, {number(value.high, metric)}]"
    return text


def gap(value: Aggregate | None, metric: str) -> str:
    """A difference with its interval."""
    if value is None or value.mean is None:
        return "–"
    text = number(value.mean, metric, signed=True)
    if value.low is not None and value.high is not None:
        text += f" [{number(value.low, metric, signed=True)}, {number(value.high, metric, signed=True)}]"
    return text


def paper_cell(value: Number | None, metric: str) -> str:
    """A number of a paper, which is in the table's units already.

    >>> paper_cell(Number(0.218, 0.003), "ged"), paper_cell(Number(76.15, None), "megabytes")
    ('.218 ± .003', '76.15')
    """
    if value is None:
        return "–"
    unit = 100 if metric in PERCENT else 1
    text = number(value.mean / unit, metric)
    return text if value.spread is None else f"{text} ± {number(value.spread / unit, metric)}"


def title_of(one: Column) -> str:
    """The head of a column.

    >>> title_of(Column("ged", 16))
    'GED (16)'
    """
    return TITLES[one.metric] + (f" ({one.samples})" if one.samples else "")


def seeds_text(row: Row) -> str:
    """How many trainings a row has.

    >>> seeds_text(Row("a", "a", "standard", 1, 3, 10, None, {}))
    '1 of 3'
    """
    return str(row.seeds) if row.seeds >= row.wanted else f"{row.seeds} of {row.wanted}"


def minutes_text(row: Row) -> str:
    """CPU minutes of a training."""
    return "–" if row.minutes is None else f"{row.minutes:.1f}"


def total_hours(trials: Sequence[Trial]) -> tuple[float, int]:
    """CPU hours of all trainings whose time is known, and how many these are."""
    known = {trial.folder: trial.cost for trial in trials if trial.cost is not None}
    return sum(known.values()) / 3600, len(known)


def state_line(rows: Sequence[Row], trials: Sequence[Trial]) -> str:
    """How far the study is."""
    done = sum(trial.state == "done" for trial in trials)
    failed = sum(trial.state == "failed" for trial in trials)
    known = {trial.member.name for trial in trials}
    total = len(trials) + sum({row.member: row.wanted for row in rows if row.member not in known}.values())
    text = f"{done} of {count(total, 'training')} done"
    return text + (f", {failed} failed" if failed else "")
