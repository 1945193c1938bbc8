"""``ambiseg evaluate``: all scores of a trained model, or of masks that another tool made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util import terminal
from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import first_process
from ambiseg._util.shipped import in_words
from ambiseg._util.text import some
from ambiseg.cli.options import (
    BATCH,
    NODES,
    SAMPLES,
    SEED,
    SYMMETRIES,
    THREADS,
    WORKERS,
    add_device,
    add_json,
    add_limit,
    check_file,
    check_json,
    devices,
    emit,
    number,
    path,
    placed,
    whole,
    word,
    words,
)
from ambiseg.cli.scores import show

if TYPE_CHECKING:
    from ambiseg.evaluation.results import Evaluation

EXAMPLES = """\
examples:
  ambiseg evaluate runs/demo                                the test part, 16 masks per image
  ambiseg evaluate runs/demo --split val --samples 16 50 100
  ambiseg evaluate runs/demo --form standard --protocol kohl2018
  ambiseg evaluate runs/demo --symmetries 8                 averaged over flips and quarter turns
  ambiseg evaluate runs/demo --whole                        whole images, where the run scores their middle
  ambiseg evaluate runs/demo --spacing 0.5 --surfaces       millimetres, and distances between outlines
  ambiseg evaluate runs/demo --devices 4                    four processes; the numbers are the same
  ambiseg evaluate runs/mine --root /new/place/of/scans     the data have moved
  ambiseg evaluate runs/f1 runs/f2 runs/f3 --out folds.json pool the folds of a cross-validation
  ambiseg evaluate --predictions masks/ --truth scans/      masks that predict or another tool wrote
  ambiseg evaluate --predictions masks/ --truth scans/ --split runs/mine/split.json   of the test part of a run
  ambiseg evaluate --predictions masks/ --truth scans/ --partial                      of the cases that are there

For a run, RUN/evaluation-SPLIT.json and .csv are written; for mask files nothing, unless --out names a file.
Predicted masks are what `ambiseg predict` wrote; or DIR/SAMPLE/CASE.png or DIR/CASE/SAMPLE.png, in any format of a
data folder, or DIR/CASE.png for one mask per case; or DIR/CASE.npz of a MaskDistribution.
DIR/weights.json {"CASE": {"SAMPLE": 0.5}} gives them weights.
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``evaluate``."""
    made = commands.add_parser(
        "evaluate",
        help="score a trained model, or masks of any other tool",
        description="Score a trained model on a part of its data: GED, matched IoU, calibration, diversity, entropy\n"
        "and the weights of its strata, for each image and on average, with 95 % intervals over patients,\n"
        "by how many readers drew anything, and beside what a perfect sampler, a single reader, one constant\n"
        "mask and an empty one score on the same images.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    runs = f"the folder of a run, or {in_words()}; several folds are pooled"
    made.add_argument("model", nargs="*", type=path, metavar="RUN", help=runs)
    part = (
        "train, val or test (default: test; for files: all); for files also RUN/split.json, whose test part is scored"
    )
    made.add_argument("--split", type=path, metavar="PART", help=part)
    made.add_argument("--samples", nargs="+", type=whole(1, SAMPLES), metavar="N", help="masks per image (default: 16)")
    made.add_argument(
        "--form", nargs="+", type=word, metavar="FORM", help="standard, compact (default: all that the method has)"
    )
    made.add_argument(
        "--protocol", type=word, metavar="NAME", help="how masks are scored (default: the run's or a new run's)"
    )
    made.add_argument("--which", choices=("best", "last"), help="which weights (default: best)")
    made.add_argument("--seed", type=whole(0, SEED), metavar="S", help="seed of the draws (default: 0)")
    symmetries = "average over so many flips and quarter turns of each image (default: 1, the image alone)"
    made.add_argument("--symmetries", type=int, choices=SYMMETRIES, help=symmetries)
    made.add_argument("--whole", action="store_true", default=None, help="score whole images, whatever the run did")
    rule = "rules whose single masks are scored (default: all but staple)"
    made.add_argument("--consensus", action="extend", type=words, metavar="RULE[,RULE…]", help=rule)
    surfaces = "score them by the distances of outlines as well: HD95, ASSD (needs MONAI)"
    made.add_argument("--surfaces", action="store_true", default=None, help=surfaces)
    spacing = "of the pixels in mm, down and across or one for both (default: pixels)"
    made.add_argument("--spacing", nargs="+", type=number(1e-9, 1e9), metavar="MM", help=spacing)
    made.add_argument("--root", type=path, metavar="DIR", help="where the run's data are now")
    batch = "images per batch; another number makes other draws"
    made.add_argument("--batch-size", type=whole(1, BATCH), metavar="B", help=batch)
    made.add_argument("--workers", type=whole(0, WORKERS), metavar="W", help="processes that load data")
    add_device(made, "the best there is")
    made.add_argument("--devices", type=devices, metavar="D", help="how many, or which: 2, 0,3 (default: 1)")
    made.add_argument("--num-nodes", type=whole(1, NODES), metavar="M", help="machines (default: 1)")
    threads = "per process; may change the last digit (default: 1)"
    made.add_argument("--threads", type=whole(1, THREADS), metavar="T", help=threads)
    made.add_argument("--predictions", type=path, metavar="DIR", help="score these masks instead of a run")
    made.add_argument("--truth", type=path, metavar="DIR", help="the readers' masks, for --predictions")
    partial = "score the cases that have a prediction, and say how many have none"
    made.add_argument("--partial", action="store_true", default=None, help=partial)
    made.add_argument("--out", type=path, metavar="FILE", help="write the JSON here, and the CSV beside it")
    add_limit(made)
    add_json(made)
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.set_defaults(run=_evaluate)


_OPTIONS = (
    "split",
    "samples",
    "protocol",
    "which",
    "seed",
    "symmetries",
    "device",
    "devices",
    "num_nodes",
    "threads",
    "quiet",
    "consensus",
    "surfaces",
    "spacing",
)
_FOR_FILES = ("protocol", "split", "quiet", "partial", "consensus", "surfaces", "spacing")
_SETTINGS = 32  # numbers of samples that are scored at a time
_DATA = {"root": "root", "batch_size": "eval_batch_size", "workers": "workers"}  # settings of the run's data


def _evaluate(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None and value != []}
    check_json(arguments)
    if "out" in given:
        check_file(Path(given["out"]))
    if len(given.get("samples", ())) > _SETTINGS:
        raise ConfigError(f"--samples: expected at most {_SETTINGS} numbers, found {len(given['samples'])}")
    files = given.keys() & {"predictions", "truth"}
    if not files and "model" not in given:
        raise ConfigError("evaluate: expected the folder of a run, or --predictions DIR --truth DIR, found neither")
    if files and "model" in given:
        raise ConfigError("evaluate: expected RUN, or --predictions and --truth, found both")
    if "partial" in given and not files:
        raise ConfigError("evaluate: expected --partial with --predictions only, found it with a RUN")
    if len(files) == 1:
        raise ConfigError("evaluate: expected --predictions and --truth together, found one of them")
    found, out = _score_files(given) if files else _score_run(given)
    out = Path(given["out"]) if "out" in given else out
    if not first_process():
        return 0
    if out is not None:
        found.save(out)
    if emit(arguments, found.to_json()):
        console = terminal.console(highlight=False)
        show(found, console)
        if out is not None:
            console.print(f"all numbers: {out}, {out.with_suffix('.csv').name}", soft_wrap=True)
    return 0


def _score_files(given: dict[str, Any]) -> tuple[Evaluation, Path | None]:
    from ambiseg.evaluation import evaluate_files

    options = {name: given[name] for name in _FOR_FILES if name in given}
    for name in (*_OPTIONS, "form", "whole", *_DATA):
        if name in given and name not in options:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"evaluate: expected {option} with a RUN only, found it with --predictions")
    return evaluate_files(given["predictions"], given["truth"], **options), None


def _score_run(given: dict[str, Any]) -> tuple[Evaluation, Path | None]:
    from ambiseg.evaluation import evaluate, evaluation_path
    from ambiseg.runs import is_shipped, open_run

    runs = [open_run(model) for model in given["model"]]
    if not given["quiet"] and first_process():
        names = some(given["model"])
        print(f"evaluating {names} on the {given.get('split', 'test')} part", file=sys.stderr, flush=True)
    options: dict[str, Any] = placed(given["device"]) if "device" in given else {}
    options |= {name: given[name] for name in _OPTIONS if name in given and name != "device"}
    if options.get("devices", "").isdigit():
        options["devices"] = int(options["devices"])
    data = {key: given[name] for name, key in _DATA.items() if name in given}
    data |= {"eval_size": None} if "whole" in given else {}
    found = evaluate(runs, forms=given.get("form"), data=data, **options)
    saved = len(runs) == 1 and not is_shipped(given["model"][0])
    return found, evaluation_path(runs[0], found.split) if saved else None
