"""``ambiseg demo``: train, evaluate and report on the data that come with the package."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ambiseg._util.processes import first_process, program
from ambiseg._util.text import count
from ambiseg.cli.options import add_device, add_json, add_limit, check_json, emit, path
from ambiseg.cli.train import settings_of


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="train, evaluate and report on the embedded data",
        description="Train a small model on the nodules that come with the package (real outlines of four\n"
        "radiologists on simulated CT), evaluate it on patients it has not seen, and write a page of\n"
        "results: about five minutes on two cores. Run again, it goes on from wherever it is.",
        epilog="Settings of `ambiseg train` may be added, such as --trainer.epochs 2.",
        formatter_class=formatter,
        allow_abbrev=False,
    )
    demo.add_argument(
        "--out", type=path, metavar="DIR", default="runs/demo", help="the run's folder (default: runs/demo)"
    )
    add_device(demo, "the best there is")
    add_limit(demo)
    add_json(demo)
    demo.add_argument("--quiet", action="store_true", help="print nothing but errors")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from ambiseg import config as configuration

    check_json(arguments)
    out, quiet = Path(arguments.out), arguments.quiet
    config = configuration.parse(settings_of(arguments), "demo")

    def say(text: str) -> None:
        if not quiet and first_process():
            print(text, file=sys.stderr, flush=True)

    say(f"1/3 training: {config.trainer.epochs} epochs into {out}")
    from ambiseg.runs import Run
    from ambiseg.training import train

    begun = (out / "run.json").is_file()
    if begun and _trained(out, config.trainer.epochs):
        say("    done before")
    else:
        train(config, out, resume=begun, quiet=quiet, command=sys.argv)

    from ambiseg.evaluation import evaluate, evaluation_path, saved_evaluation
    from ambiseg.reporting import SAMPLES, report

    say("2/3 evaluating on patients that it has not seen")
    run = Run(out)
    results = saved_evaluation(run)
    if results is not None:
        say("    done before")
    else:
        results = evaluate(run, samples=SAMPLES, threads=config.trainer.threads or 1, quiet=quiet)
        results.save(evaluation_path(run))
    say("3/3 writing the report")
    page = report(out, quiet=quiet)
    setting = results.headline(SAMPLES[0])  # an earlier evaluation may be of other settings
    score = setting.metrics["ged"]
    found = {"run": out, "evaluation": evaluation_path(run), "report": page, "samples": setting.samples}
    if emit(arguments, {**found, "images": results.images, "ged": score.model_dump()}):
        shown = f"GED({setting.samples}) on {results.images} test nodules"
        print(f"\n{shown} of {count(results.patients, 'patient')}: {score.text}")
        print(f"look at   {page}")
        typed, folder = program(), shlex.quote(str(out))
        print(f"predict   {typed} predict {folder} sample --out predictions/")
        print(f"your own  {typed} data check FOLDER")
        print(f"          {typed} train auto --data.root FOLDER --out runs/mine")
    return 0


def _trained(out: Path, epochs: int) -> bool:
    """Whether training is done: the checkpoint says so, which is written last. What a killed process left goes."""
    from ambiseg._util.files import Lock
    from ambiseg.training.checkpoint import read

    with Lock(out, "training"):
        about = read(out / "last.ckpt")["ambiseg"] if (out / "last.ckpt").is_file() else None
    history = about.get("history") if isinstance(about, dict) else None
    return isinstance(history, list) and len(history) >= epochs
