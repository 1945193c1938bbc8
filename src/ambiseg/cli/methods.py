"""``ambiseg methods``: what `--model.method` knows."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from ambiseg.cli.options import add_json, check_json, emit, word

EXAMPLES = """\
examples:
  ambiseg methods                                       all of them
  ambiseg methods probunet                              one of them, with its settings
  ambiseg train demo --model.method probunet            train with it
  ambiseg train demo --model.method ssn --model.published true    with the network of its paper
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``methods``."""
    made = commands.add_parser(
        "methods",
        help="list the methods that can be trained",
        description="List the methods that `ambiseg train --model.method NAME` knows: what each does, its paper,\n"
        "and the size of its weights in MB of 32 bits, on the common U-Net and as published.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    made.add_argument("name", nargs="?", type=word, metavar="NAME", help="one method, with its settings")
    add_json(made)
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.set_defaults(run=_methods)


def _methods(arguments: argparse.Namespace) -> int:
    from ambiseg.methods.catalogue import catalogue

    check_json(arguments)
    entries = catalogue(arguments.name)
    if emit(arguments, [entry._asdict() for entry in entries]):
        width = min(shutil.get_terminal_size((110, 24)).columns, 120)
        print(listed(entries, width))
        if arguments.name is not None:
            print(_settings(arguments.name, width))
    return 0


def listed(entries: list[Any], width: int) -> str:
    """A block per method: name, year and sizes, then idea and paper beside them."""
    wide = max(8, *(len(entry.name) for entry in entries)) + 2
    indent = wide + 6 + 9 + 11
    lines = [f"{'method':<{wide}}{'year':<6}{'MB':>7}  {'published':>9}  what it does, and its paper"]
    for entry in entries:
        published = "" if entry.published is None else f"{entry.published:.2f}"
        start = f"{entry.name:<{wide}}{entry.year or '':<6}{entry.megabytes:>7.2f}  {published:>9}  "
        text = f"{entry.idea}; its strata: {entry.stratum}s" if entry.stratum else entry.idea
        body = [*textwrap.wrap(text, max(width - indent, 40)), *textwrap.wrap(entry.reference, max(width - indent, 40))]
        lines += [start + body[0], *(" " * indent + line for line in body[1:])]
    return "\n".join(lines)


def _settings(name: str, width: int) -> str:
    from ambiseg.cli.train import setting_lines
    from ambiseg.config import tables

    found = next(table for table in tables() if table.title.startswith(f"model, method {name}:"))
    return "\n".join(["", "its settings:", *setting_lines(found, width)])
