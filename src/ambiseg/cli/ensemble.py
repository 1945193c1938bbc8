"""``ambiseg ensemble``: one run of several that were trained alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from ambiseg._util.processes import program
from ambiseg.cli.options import add_json, check_json, emit, path

EXAMPLES = """\
examples:
  ambiseg train my.yaml --model.method unet --seed 1 --out runs/one      a member, alone
  ambiseg ensemble runs/one runs/two runs/three --out runs/ensemble      all of them as one model
  ambiseg train my.yaml --model.method ensemble --model.members 3        the same in one training
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``ensemble``."""
    ensemble = commands.add_parser(
        "ensemble",
        help="put trained runs of one network together as one model",
        description="Put runs of the deterministic U-Net (--model.method unet) together as members of an ensemble.\n"
        "Nothing is trained. The new folder is evaluated, used and reported like that of any run, and does not\n"
        "need the others. They must have the same network, data and split.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    ensemble.set_defaults(run=_ensemble)
    ensemble.add_argument("folders", type=path, nargs="+", metavar="RUN", help="the folders of two or more runs")
    ensemble.add_argument(
        "--out", type=path, metavar="DIR", default="runs/ensemble", help="the new run's folder (default: runs/ensemble)"
    )
    add_json(ensemble)
    ensemble.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _ensemble(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from ambiseg.ensembles import ensemble

    run = ensemble(arguments.folders, arguments.out, command=sys.argv)
    if emit(arguments, {"run": arguments.out, "members": run.members}) and not arguments.quiet:
        typed, folder = program(), shlex.quote(str(arguments.out))
        print(f"{len(run.members)} members in {arguments.out}")
        print(f"next: {typed} evaluate {folder}    {typed} report {folder}")
    return 0
