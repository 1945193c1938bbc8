"""``ambiseg.report``: a run and its evaluation as one page to look at, to send and to put into a paper."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SAMPLES", "report"]

SAMPLES = (16, 50, 100)  # masks per image, as papers report them


def report(
    run: str | os.PathLike[str],
    split: str = "test",
    out: str | os.PathLike[str] | None = None,
    *,
    cases: int = 3,
    samples: int = 4,
    data: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Path:
    """Write the report of a run and return its path. The same run gives the same bytes.

    The figures are saved as well, beside the page: PNG of 300 dpi and SVG, for papers. A run without an evaluation
    of the split is evaluated first.

    Args:
        run: the folder of a run, or ``"demo"``.
        split: which part of the data, usually ``test`` or ``val``.
        out: the page, with its figures in ``<name>-figures`` beside it. ``None``: ``report.html`` and ``figures`` in
            the run's folder (``report-val.html`` and ``figures-val`` for that split); for the model that comes with
            the package, ``demo-report.html`` in the current folder.
        cases: pictures of this many cases of each kind: most ambiguous, best, median, worst. 0 needs no data.
        samples: masks per stratum in a picture.
        data: settings of the run's data to change, such as ``{"root": …}`` for data that have moved.
        quiet: no progress.
    """
    from ambiseg._util.errors import ConfigError
    from ambiseg._util.extras import require
    from ambiseg._util.files import atomic_folder, made, write_text
    from ambiseg._util.progress import reporting

    require("train", "report")
    from ambiseg.evaluation import evaluate, evaluation_path, saved_evaluation
    from ambiseg.reporting.gallery import make_gallery
    from ambiseg.reporting.page import page
    from ambiseg.runs import is_shipped, open_run

    if cases < 0 or samples < 1:
        raise ConfigError(f"report: expected 0 or more cases and at least 1 sample, found {cases} and {samples}")
    opened, shipped = open_run(run), is_shipped(run)
    suffix = "" if split == "test" else f"-{split}"
    if out is None and not shipped:
        target, folder = opened.folder / f"report{suffix}.html", opened.folder / f"figures{suffix}"
    else:
        target = Path(f"{opened.folder.name}-report{suffix}.html" if out is None else out)
        folder = target.with_name(f"{target.stem}-figures")
    evaluation = saved_evaluation(opened, split)
    if evaluation is None:
        evaluation = evaluate(opened, split, samples=SAMPLES, data=data, quiet=quiet)
        if not shipped:
            evaluation.save(evaluation_path(opened, split))
    with reporting("choosing and drawing cases", quiet):
        gallery = make_gallery(opened, evaluation, cases, samples, data, quiet) if cases else None
    with made(target.parent), reporting("drawing figures", quiet):
        with atomic_folder(folder) as draft:
            text = page(opened, evaluation, gallery, draft)
        write_text(target, text)
    return target
