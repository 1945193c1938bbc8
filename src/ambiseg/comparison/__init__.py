"""``ambiseg.compare``: methods on the same images, with differences to one of them, intervals and costs.

runs ─► evaluations of the same images ─► paired differences ─► tables and a page with the cases side by side
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ambiseg.comparison.record import Comparison

__all__ = ["compare"]


def compare(
    runs: Sequence[str | os.PathLike[str]] | Mapping[str, Any],
    baseline: str | os.PathLike[str] | None = None,
    split: str = "test",
    samples: Sequence[int] = (16,),
    metrics: Sequence[str] | None = None,
    out: str | os.PathLike[str] = "comparison",
    *,
    cases: int = 12,
    which: Literal["best", "last"] = "best",
    symmetries: int = 1,
    data: Mapping[str, Any] | None = None,
    timing: bool = True,
    quiet: bool = False,
) -> Comparison:
    """Compare methods on the same images, write ``comparison.json``, ``.md``, ``.csv``, ``.tex`` and ``index.html``.

    Runs that are not evaluated in these settings are evaluated first. Evaluations are kept: in the run's folder, where
    there is none yet, or in ``out/evaluations``.

    Args:
        runs: folders of runs, ``"demo"``, ``"NAME=RUN,RUN"`` for several seeds of one method, or the JSON of an
            evaluation, also one of mask files; or a table of names and runs, ``{"ours": ["runs/a", "runs/b"]}``.
        baseline: the one that others are compared with, by name or as given; ``None``: the first.
        split: a part of the runs' split.
        samples: numbers of masks per image.
        metrics: some of :data:`ambiseg.evaluation.results.METRICS`; ``None``: all.
        out: the folder to write into: a new one, or one that a comparison is in.
        cases: how many cases have pictures; 0 needs no data where everything is evaluated.
        which: ``best`` or ``last`` weights.
        symmetries: 2, 4 or 8: predictions are averaged over as many flips and quarter turns.
        data: settings of the runs' data to change, such as ``{"root": …}`` for data that have moved.
        timing: whether to measure the CPU time of masks.
        quiet: no progress.
    """
    from ambiseg._util.errors import ConfigError
    from ambiseg._util.extras import require
    from ambiseg._util.files import contents, made, write_text
    from ambiseg._util.progress import reporting

    require("train", "report")
    from ambiseg.comparison.page import page
    from ambiseg.comparison.record import comparison_of
    from ambiseg.comparison.sources import Rules, open_sources, score_sources, sources_of
    from ambiseg.comparison.timing import measure
    from ambiseg.comparison.views import choose_cases, draw_views
    from ambiseg.comparison.writing import to_csv, to_latex, to_markdown
    from ambiseg.evaluation.results import METRICS, Evaluation
    from ambiseg.methods.symmetries import symmetries as turned
    from ambiseg.runs import Run

    sources, folder = sources_of(runs), Path(out)
    if not sources:
        raise ConfigError("compare: expected at least one run, found none")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder to write into, found a file")
    there = set(contents(folder))
    if there - {"evaluations"} and "comparison.json" not in there:
        raise ConfigError(f"{folder}: expected a new folder, or that of a comparison, found other files in it")
    if not samples or min(samples) < 1:
        raise ConfigError(f"samples: expected numbers of at least 1, found {', '.join(map(str, samples)) or 'none'}")
    wanted = list(dict.fromkeys(METRICS if metrics is None else metrics))
    if odd := next((name for name in wanted if name not in METRICS), None):
        raise ConfigError(f"metrics: expected some of {', '.join(METRICS)}, found {odd!r}")
    turned(symmetries)  # an error before anything is loaded
    base = _baseline(sources, baseline)
    opened = open_sources(sources, split)
    first = opened[[one.name for one in sources].index(base)][0]
    protocol = first.protocol if isinstance(first, Evaluation) else first.config.evaluation.protocol
    rules = Rules(split, tuple(dict.fromkeys(samples)), which, symmetries, protocol)
    with made(folder):
        scored = score_sources(sources, opened, rules, folder, data, quiet)
        timed = {one.entry.name: one.run for one in scored if isinstance(one.run, Run)} if timing else {}
        timings = measure(timed, which, symmetries, quiet)
        found = comparison_of(scored, base, rules.samples, wanted, timings, quiet)
        gallery = draw_views(scored, choose_cases(found, cases), data, quiet) if cases else None
        with reporting("writing", quiet):
            evaluation = next(one.entry.first for one in scored if one.entry.name == base)
            write_text(folder / "index.html", page(found, evaluation, gallery))
            for suffix, text in ((".md", to_markdown(found)), (".csv", to_csv(found)), (".tex", to_latex(found))):
                write_text(folder / f"comparison{suffix}", text)
            found.save(folder / "comparison.json")
    return found


def _baseline(sources: Sequence[Any], asked: str | os.PathLike[str] | None) -> str:
    """The name of the baseline; it may be given by its name, or as one of its runs."""
    from ambiseg._util.errors import ConfigError
    from ambiseg._util.text import did_you_mean

    if asked is None:
        return sources[0].name
    text = os.fspath(asked)
    by_name = [one.name for one in sources if one.name == text]
    place = os.path.normpath(text)
    found = by_name or [one.name for one in sources if place in [os.path.normpath(p) for p in one.places]]
    if not found:
        known = [one.name for one in sources]
        hint = did_you_mean(text, known)
        raise ConfigError(f"--baseline: expected one of {', '.join(known)}, found {text!r}{hint}")
    return found[0]
