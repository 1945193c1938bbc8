"""``ambiseg calibrate RUN``: thresholds that make statements about new images hold with a stated probability."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util import terminal
from ambiseg._util.errors import ConfigError
from ambiseg._util.shipped import in_words
from ambiseg.cli.options import (
    SAMPLES,
    SEED,
    SYMMETRIES,
    add_device,
    add_json,
    add_limit,
    check_file,
    check_json,
    emit,
    number,
    path,
    whole,
    word,
)

if TYPE_CHECKING:
    from ambiseg.decisions.calibration import Calibration

EXAMPLES = """\
examples:
  ambiseg calibrate runs/mine                          90 % guarantees, from the readers of the val part
  ambiseg calibrate runs/mine --alpha 0.05 --check test     95 %, and how often they hold on the test part
  ambiseg calibrate runs/mine --readers marked         about the masks of readers who mark anything
  ambiseg calibrate runs/mine --slack 2                inner and outer mask up to two pixels
  ambiseg calibrate nodule-ct --root lidc71.npz --out nodule-ct.json     a shipped model: predict takes the file

RUN/calibration.json is written, and `ambiseg predict RUN` then writes inner and outer masks and intervals.
"""

DESCRIPTION = """\
Calibrate a run on patients that it was not trained on, by split conformal prediction and conformal risk control. For
a new patient like those: an inner and an outer mask that a reader's lies between with probability 1 - alpha, a mask
that misses at most alpha of a reader's on average and one of which at most alpha is outside of it, an interval of the
area, and a set of the method's strata. docs/guarantees.md says what exactly is guaranteed."""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``calibrate``."""
    about: dict[str, Any] = {"description": DESCRIPTION, "epilog": EXAMPLES, "formatter_class": formatter}
    made = commands.add_parser("calibrate", help="guarantees about new images, from a held-out part", **about)
    made.set_defaults(run=_calibrate)
    made.add_argument("model", type=path, metavar="RUN", help=f"the folder of a run, or {in_words()}")
    alpha = "how often a statement may fail (default: 0.1)"
    made.add_argument("--alpha", type=number(0.001, 0.5), default=0.1, metavar="A", help=alpha)
    made.add_argument("--split", type=word, default="val", metavar="PART", help="val or test (default: val)")
    made.add_argument("--check", type=word, metavar="PART", help="say how often the statements hold on another part")
    readers = "all masks, or those that mark the class (default: all)"
    made.add_argument("--readers", choices=("all", "marked"), default="all", help=readers)
    per = "about one mask of a new patient, or about all of them at once (default: reading)"
    made.add_argument("--per", choices=("reading", "patient"), default="reading", help=per)
    slack = "how far inner and outer mask may be from holding (default: 0)"
    made.add_argument("--slack", type=number(0, 1000), default=0.0, metavar="PIXELS", help=slack)
    masks = made.add_argument_group("masks").add_mutually_exclusive_group()
    count: dict[str, Any] = {"type": whole(1, SAMPLES), "metavar": "N"}
    masks.add_argument("--per-stratum", **count, help="weighted masks per stratum of the method (default: 4)")
    masks.add_argument("--samples", **count, help="equally likely masks instead (without strata the default: 16)")
    made.add_argument("--seed", type=whole(0, SEED), metavar="S", default=0, help="seed of the draws (default: 0)")
    symmetries = "average over so many flips and quarter turns (default: 1, the image alone)"
    made.add_argument("--symmetries", type=int, choices=SYMMETRIES, default=1, help=symmetries)
    made.add_argument("--which", choices=("best", "last"), default="best", help="weights of (default: best)")
    made.add_argument("--root", type=path, metavar="DIR", help="where the run's data are now")
    made.add_argument("--out", type=path, metavar="FILE", help="write the calibration here instead")
    add_device(made, "cpu")
    add_limit(made)
    add_json(made)
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _calibrate(arguments: argparse.Namespace) -> int:
    from ambiseg.decisions.calibration import FILE, Rules
    from ambiseg.prediction.calibrating import calibrate
    from ambiseg.prediction.result import Options
    from ambiseg.runs import is_shipped, open_run

    check_json(arguments)
    opened = open_run(arguments.model)
    if arguments.out is None and is_shipped(arguments.model):
        hint = f"--out FILE, which ambiseg predict {arguments.model} --calibration FILE takes"
        raise ConfigError(f"{arguments.model}: expected {hint}, found none: nothing is written into the package")
    out = opened.folder / FILE if arguments.out is None else Path(arguments.out)
    check_file(out)
    drawn = {name: getattr(arguments, name) for name in ("per_stratum", "samples", "seed", "symmetries")}
    found = calibrate(
        opened,
        arguments.alpha,
        arguments.split,
        check=arguments.check,
        rules=Rules(readers=arguments.readers, per=arguments.per, slack=arguments.slack),
        options=Options(**drawn),
        which=arguments.which,
        data={} if arguments.root is None else {"root": arguments.root},
        device=arguments.device,
        quiet=arguments.quiet,
    )
    found.save(out)
    if emit(arguments, found.model_dump(mode="json")):
        _show(found, out)
    return 0


def _show(found: Calibration, out: Path) -> None:
    from ambiseg._util.tables import table

    console = terminal.console(highlight=False)
    rows = [
        [one.name, *(f"{value:.4g}" for value in (one.outer, one.inner, one.found, one.sure, one.area))]
        for one in found.classes
    ]
    console.print(table(["class", "outer ≥", "inner >", "found ≥", "sure >", "√area ±"], rows))
    for sentence in found.guarantees:
        console.print(f"- {sentence}", soft_wrap=True)
    if found.checked is not None:
        console.print(f"on the {found.checked.patients} patients of {found.checked.part}, with 95 % intervals:")
        cells = []
        for statement, by_class in found.checked.statements.items():
            what = "mean loss" if statement in ("found", "sure") else "holds"
            for name, (mean, low, high) in by_class.items():
                between = "" if low is None else f"{low:.3f} to {high:.3f}"
                cells.append([name, statement, what, f"{mean:.3f}", between])
        console.print(table(["", "statement", "", "mean", "interval"], cells))
    console.print(f"written to {out}", soft_wrap=True)
