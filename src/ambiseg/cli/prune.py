"""``ambiseg prune RUN --out NEW``: a run with fewer strata."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from ambiseg._util import terminal
from ambiseg._util.processes import program
from ambiseg._util.shipped import in_words
from ambiseg.cli.options import SAMPLES, add_json, add_limit, check_json, emit, path, whole

EXAMPLES = """\
examples:
  ambiseg prune runs/sixteen --out runs/fewer               as few strata as validation allows
  ambiseg prune runs/sixteen --strata 4 --out runs/four     exactly four
  ambiseg prune runs/sixteen --steps 0 --out runs/merged    merged only, nothing is fitted

NEW is the folder of a run like any other; NEW/prune.json has the trade-off. For methods with strata that
can be merged; see docs/prune.md.
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``prune``."""
    command = commands.add_parser(
        "prune",
        help="merge strata that draw alike into fewer",
        description="Merge strata of a trained model that draw alike, drop those without weight, fit the rest on\n"
        "training images, and choose how many are needed by the validation part.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=_prune)
    command.add_argument("model", type=path, metavar="RUN", help=f"the folder of a run, or {in_words()}")
    command.add_argument("--out", type=path, metavar="NEW", required=True, help="the new run's folder")
    strata = "how many are left (default: auto, the fewest within one standard error of the best)"
    command.add_argument("--strata", type=_number, metavar="K", default="auto", help=strata)
    steps = "batches that each number of strata is fitted on (default: 60)"
    command.add_argument("--steps", type=whole(0, 1_000_000), metavar="N", default=60, help=steps)
    command.add_argument("--which", choices=("best", "last"), default="best", help="which weights (default: best)")
    command.add_argument("--root", type=path, metavar="DIR", help="where the run's data are now")
    add_limit(command)
    add_json(command)
    command.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _number(text: str) -> int | str:
    return text if text == "auto" else whole(1, SAMPLES)(text)


def _prune(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from ambiseg.pruning import prune

    data = {"root": arguments.root} if arguments.root is not None else None
    quiet = arguments.quiet or arguments.json == "-"
    options: dict[str, Any] = {"which": arguments.which, "steps": arguments.steps, "data": data, "quiet": quiet}
    found = prune(arguments.model, arguments.out, arguments.strata, **options, command=sys.argv)
    table_ = [one._asdict() for one in found.table]
    said = {"run": arguments.out, "chosen": found.chosen, "unused": found.unused, "table": table_}
    if not emit(arguments, said) or arguments.quiet:
        return 0
    from ambiseg._util.tables import table

    word = found.run.card.stratum or "stratum"
    rows = [
        [
            "▶" if one.strata == found.chosen else "",
            str(one.strata),
            f"{100 * one.kept:.1f} %",
            f"{one.distance:.4f}",
            f"{one.ged:.4f}",
            f"{one.more:+.4f}".replace("-", "−"),
            f"{one.error:.4f}",
        ]
        for one in found.table
    ]
    console = terminal.console()
    head = ["", f"{word}s", "weight kept", "distance to the full", "validation GED", "more than best", "std. error"]
    console.print(table(head, rows))
    if found.unused:
        console.print(f"without weight: {word} {', '.join(map(str, found.unused))}", soft_wrap=True)
    groups = next(one.groups for one in found.table if one.strata == found.chosen)
    merged = [" + ".join(map(str, group)) for group in groups if len(group) > 1]
    if merged:
        console.print(f"merged: {', '.join(merged)}", soft_wrap=True)
    typed, folder = program(), shlex.quote(str(arguments.out))
    print(f"{found.chosen} {word}s in {arguments.out}")
    print(f"next: {typed} evaluate {folder}    {typed} compare {shlex.quote(str(arguments.model))} {folder}")
    return 0
