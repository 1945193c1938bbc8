"""``ambiseg demo``: train, evaluate and report on the data that come with the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="train, evaluate and report on the embedded data",
        description="Train a small model on the nodules that come with the package (real outlines of four\n"
        "radiologists on simulated CT), evaluate it on patients it has not seen, and write a page of\n"
        "results: about five minutes on two cores. Run again, it goes on from wherever it is.",
        formatter_class=formatter,
        allow_abbrev=False,
    )
    demo.add_argument("--out", metavar="DIR", default="runs/demo", help="the run's folder (default: runs/demo)")
    demo.add_argument("--quiet", action="store_true", help="print nothing but errors")
    demo.set_defaults(run=_demo, takes_settings=True)


def _demo(arguments: argparse.Namespace) -> int:
    from ambiseg import config as configuration

    out, quiet = Path(arguments.out), arguments.quiet
    config = configuration.parse(arguments.settings_given, "demo")

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    from ambiseg.runs import Run

    begun = (out / "last.ckpt").is_file()
    finished = begun and len(Run(out).history) >= config.trainer.epochs
    if not finished:
        say(f"1/3 training {'on in' if begun else 'into'} {out}: {config.trainer.epochs} epochs, some minutes")
        from ambiseg.training import train

        train(config, out, resume=begun, quiet=quiet, command=sys.argv)
    else:
        say(f"1/3 {out} is trained already")

    from ambiseg.evaluation import evaluate
    from ambiseg.report import report

    say("2/3 evaluating on patients that it has not seen")
    results = evaluate(out, samples=(16, 50, 100), quiet=quiet)
    say("3/3 writing the report")
    page = report(out, quiet=quiet)
    if not quiet:
        score = next(s for s in results.settings if (s["form"], s["samples"]) == ("standard", 16))["metrics"]["ged"]
        interval = f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
        print(f"GED(16) on {results.images} test nodules: {interval}")
        print(f"\nlook at   {page}")
        print(f"predict   ambiseg predict {out} IMAGE --out predictions/")
        print("your own  ambiseg data check FOLDER   then   ambiseg train demo --data.name folder --data.root FOLDER")
    return 0
