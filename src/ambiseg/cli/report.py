"""``ambiseg report``: a run as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ambiseg._util.shipped import in_words
from ambiseg.cli.options import add_json, add_limit, check_file, check_json, emit, path, whole, word

EXAMPLES = """\
examples:
  ambiseg report runs/lung                        runs/lung/report.html, and figures for papers in runs/lung/figures/
  ambiseg report runs/lung --cases 6 --open       more pictures, and show it
  ambiseg report runs/lung --split val --out v.html
  ambiseg report runs/lung --cases 0              numbers only: needs no data
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``report``."""
    report = commands.add_parser(
        "report",
        help="make one page with numbers, figures and pictures of a run",
        description="Make one page of a run: its scores, figures, and pictures of cases with weighted masks.\n"
        "The page needs no network. Its figures are saved as PNG and SVG as well.\n"
        "A run that is not evaluated yet is evaluated first.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    report.set_defaults(run=_report)
    report.add_argument("folder", type=path, metavar="RUN", help=f"the folder of a run, or {in_words()}")
    report.add_argument(
        "--split", type=word, default="test", metavar="PART", help="the part of the data (default: test)"
    )
    report.add_argument("--out", type=path, metavar="FILE", help="the page to write (default: RUN/report.html)")
    cases = "cases of each kind to show; 0 is none (default: 3)"
    report.add_argument("--cases", type=whole(0, 1000), metavar="N", default=3, help=cases)
    samples = "masks to show per stratum of the prediction (default: 4)"
    report.add_argument("--samples", type=whole(1, 64), metavar="N", default=4, help=samples)
    report.add_argument("--root", type=path, metavar="DIR", help="where the data are, if they have moved since")
    report.add_argument("--open", action="store_true", help="show the page in a browser")
    add_limit(report)
    add_json(report)
    report.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _report(arguments: argparse.Namespace) -> int:
    from ambiseg.reporting import report

    check_json(arguments)
    if arguments.out is not None:
        check_file(Path(arguments.out))
    options = {name: getattr(arguments, name) for name in ("split", "out", "cases", "samples", "quiet")}
    page = report(arguments.folder, **options, data=None if arguments.root is None else {"root": arguments.root})
    if emit(arguments, {"report": page}):
        print(f"the report is in {page}")
    if arguments.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0
