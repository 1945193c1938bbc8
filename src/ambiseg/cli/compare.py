"""``ambiseg compare``: methods on the same images, with differences, intervals and costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util import terminal
from ambiseg._util.errors import ConfigError
from ambiseg._util.shipped import in_words
from ambiseg._util.tables import table
from ambiseg.cli.options import SAMPLES, SYMMETRIES, add_json, add_limit, check_json, emit, path, whole, word

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ambiseg.comparison.record import Comparison

EXAMPLES = """\
examples:
  ambiseg compare runs/a runs/b                              b against a, on the test part, 16 masks per image
  ambiseg compare runs/a runs/b runs/c --baseline runs/b     a and c against b
  ambiseg compare old=runs/old new=runs/s0,runs/s1,runs/s2   three seeds of one method under a name of one's own
  ambiseg compare runs/a runs/b --samples 16 50 100 --open   more masks, and show the page
  ambiseg compare runs/a theirs.json                         masks of another tool: first write theirs.json by
      ambiseg evaluate --predictions masks/ --truth scans/ --split runs/a/split.json --out theirs.json

Written into --out: index.html (tables and cases side by side), comparison.json, .md, .csv and .tex.
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``compare``."""
    compare = commands.add_parser(
        "compare",
        help="compare runs on the same images, with intervals and costs",
        description="Compare runs on the same images: all metrics at equal numbers of masks, differences\n"
        "to a baseline with 95 % intervals over patients and seeds, and the CPU time of training and of masks.\n"
        "Runs that are not evaluated in these settings are evaluated first.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    compare.set_defaults(run=_compare)
    runs = f"the folder of a run, {in_words()}, or an evaluation's JSON; NAME=RUN,RUN for several seeds of one method"
    compare.add_argument("runs", nargs="+", type=path, metavar="RUN", help=runs)
    compare.add_argument("--baseline", type=path, metavar="RUN", help="what others are compared with (default: first)")
    part = "the part of the data (default: test)"
    compare.add_argument("--split", type=word, default="test", metavar="PART", help=part)
    masks = "masks per image (default: 16)"
    compare.add_argument("--samples", nargs="+", type=whole(1, SAMPLES), default=[16], metavar="N", help=masks)
    metrics = "which metrics (default: all in the files, the main ones on the terminal)"
    compare.add_argument("--metrics", nargs="+", type=word, metavar="NAME", help=metrics)
    compare.add_argument(
        "--out", type=path, default="comparison", metavar="DIR", help="the folder to write into (default: comparison)"
    )
    cases = "cases with pictures; 0 is none (default: 12)"
    compare.add_argument("--cases", type=whole(0, 1000), default=12, metavar="N", help=cases)
    compare.add_argument("--root", type=path, metavar="DIR", help="where the data are, if they have moved since")
    compare.add_argument("--which", choices=("best", "last"), default="best", help="which weights (default: best)")
    symmetries = "average over so many flips and quarter turns of each image (default: 1, the image alone)"
    compare.add_argument("--symmetries", type=int, choices=SYMMETRIES, default=1, help=symmetries)
    compare.add_argument("--open", action="store_true", help="show the page in a browser")
    add_limit(compare)
    add_json(compare)
    compare.add_argument("--quiet", action="store_true", help="print nothing but errors")


_SETTINGS = 32  # numbers of samples at a time, as of evaluate
_WIDEST = 1000  # characters of a table


def _compare(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    if arguments.json is not None and Path(arguments.json).absolute() == Path(arguments.out).absolute():
        raise ConfigError(f"--json: expected another name than that of --out, found {arguments.json}")
    if len(arguments.samples) > _SETTINGS:
        raise ConfigError(f"--samples: expected at most {_SETTINGS} numbers, found {len(arguments.samples)}")
    from ambiseg.comparison import compare

    options = {name: getattr(arguments, name) for name in ("split", "samples", "metrics", "out", "cases", "which")}
    data = None if arguments.root is None else {"root": arguments.root}
    found = compare(
        arguments.runs,
        arguments.baseline,
        **options,
        symmetries=arguments.symmetries,
        data=data,
        quiet=arguments.quiet or arguments.json == "-",
    )
    page = Path(arguments.out) / "index.html"
    if emit(arguments, found.to_json()):
        show(found, terminal.console(highlight=False))
        print(f"the page is in {page}, tables beside it: comparison.md, .csv, .tex, .json")
    if arguments.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0


def show(found: Comparison, console: Console) -> None:
    """Print the tables of the metrics that were asked for, or of the main ones, and of costs."""
    from ambiseg.comparison.writing import (
        COST_HEAD,
        LOOK_HEAD,
        LOOK_TITLE,
        MARK,
        about,
        cost_rows,
        look_rows,
        main_metrics,
        notes,
        rows_of,
        title_of,
    )

    console.print(about(found), style="bold", soft_wrap=True)
    console.print()
    several = any(one.seeds > 1 for one in found.methods)
    for metric in main_metrics(found):
        console.print(title_of(metric, found.annotator), style="bold")
        rows = [
            [name, f"{form} {masks}", *([seeds] if several else []), value, change, f"{MARK} {mark}" if mark else ""]
            for name, form, masks, seeds, value, change, mark in rows_of(found, metric)
        ]
        head = ["", "masks", *(["seeds"] if several else []), "mean [95 % interval]", "difference", ""]
        _print(table(head, rows, left=(0, 1)), console)
    if looks := [[*row[:-1], f"{MARK} {row[-1]}" if row[-1] else ""] for row in look_rows(found)]:
        console.print(LOOK_TITLE, style="bold", soft_wrap=True)
        _print(table(("", *LOOK_HEAD[1:]), looks, left=(0, 1)), console)
    console.print("cost", style="bold")
    _print(table(("", *COST_HEAD[1:]), cost_rows(found.methods), left=(0, 1)), console)
    for line in notes(found):
        console.print(line, style="dim", soft_wrap=True)


def _print(made: Table, console: Console) -> None:
    """A table as wide as it is: a terminal that is narrower breaks its lines, and no number is left out."""
    width, console.width = console.width, _WIDEST
    console.print(made, crop=False)
    console.width = width
    console.print()
