"""``ambiseg evaluate``: every number about a trained model, or about masks that another tool made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ambiseg.evaluation import Evaluation

EXAMPLES = """\
examples:
  ambiseg evaluate runs/demo                                the test part, 16 masks an image
  ambiseg evaluate runs/demo --split val --samples 16 50 100
  ambiseg evaluate runs/demo --form standard --protocol kohl2018
  ambiseg evaluate runs/demo --devices 4                    four processes; the numbers are the same
  ambiseg evaluate runs/mine --root /new/place/of/scans     the data have moved
  ambiseg evaluate --predictions masks/ --truth scans/      masks that predict or another tool wrote

Of a run, RUN/evaluation-SPLIT.json and .csv are written; of mask files nothing, unless --out names a file.
Predicted masks are what `ambiseg predict` wrote; or DIR/SAMPLE/CASE.png or DIR/CASE/SAMPLE.png, in any format that a
data folder may hold, or DIR/CASE.png where there is one a case; or DIR/CASE.npz of a MaskDistribution.
DIR/weights.json {"CASE": {"SAMPLE": 0.5}} makes some likelier than others.
"""

TITLES: dict[str, str] = {
    "ged": "GED",
    "ged_unbiased": "GED unbiased",
    "matched_iou": "matched IoU",
    "ece": "ECE",
    "diversity": "diversity",
    "entropy": "entropy",
    "empty_mass": "empty mass",
}


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``evaluate``."""
    made = commands.add_parser(
        "evaluate",
        help="score a trained model, or masks of any other tool",
        description="Score a trained model on a part of its data: GED, matched IoU, calibration, diversity, entropy\n"
        "and use of the experts, for each image and on average, with 95 % intervals over patients, and by\n"
        "how many readers drew anything.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    made.add_argument("model", nargs="?", metavar="RUN", help="the folder of a run, or demo")
    made.add_argument("--split", metavar="PART", help="train, val or test (default: test; of files: all)")
    made.add_argument("--samples", nargs="+", type=int, metavar="N", help="masks an image (default: 16)")
    made.add_argument("--form", nargs="+", metavar="FORM", help="standard, compact (default: all that the method has)")
    made.add_argument("--protocol", metavar="NAME", help="whose way of scoring (default: the run's; of files: mose)")
    made.add_argument("--which", choices=("best", "last"), help="which weights (default: best)")
    made.add_argument("--seed", type=int, metavar="S", help="of the masks that are drawn (default: 0)")
    made.add_argument("--root", metavar="DIR", help="where the run's data are now")
    made.add_argument("--batch-size", type=int, metavar="B", help="images at a time; another number makes other draws")
    made.add_argument("--workers", type=int, metavar="W", help="processes that load data")
    made.add_argument("--accelerator", metavar="KIND", help="cpu, gpu … (default: the best there is)")
    made.add_argument("--devices", metavar="D", help="how many, or which: 2, 0,3 (default: 1)")
    made.add_argument("--num-nodes", type=int, metavar="M", help="machines (default: 1)")
    made.add_argument("--threads", type=int, metavar="T", help="of a process; may change a last digit (default: 1)")
    made.add_argument("--predictions", metavar="DIR", help="score these masks instead of a run")
    made.add_argument("--truth", metavar="DIR", help="what the readers drew, for --predictions")
    made.add_argument("--out", metavar="FILE", help="write the JSON here, and the CSV beside it")
    made.add_argument("--json", action="store_true", help="print the JSON instead of tables")
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.set_defaults(run=_evaluate)


_OF_RUNS = (
    "samples", "form", "which", "seed", "root", "batch_size", "workers", "accelerator", "devices", "num_nodes",
    "threads",
)  # fmt: skip


def _evaluate(arguments: argparse.Namespace) -> int:
    from ambiseg._util.errors import ConfigError

    files = arguments.predictions is not None or arguments.truth is not None
    if files and arguments.model is not None:
        raise ConfigError("evaluate: expected RUN, or --predictions and --truth, found both")
    if files and (arguments.predictions is None or arguments.truth is None):
        raise ConfigError("evaluate: expected --predictions and --truth together, found one of them")
    if not files and arguments.model is None:
        raise ConfigError("evaluate: expected the folder of a run, or --predictions DIR --truth DIR, found neither")
    if files and (wrong := [name for name in _OF_RUNS if getattr(arguments, name) is not None]):
        option = f"--{wrong[0].replace('_', '-')}"
        raise ConfigError(f"evaluate: expected {option} with a RUN only, found it with --predictions")
    found, out = _files(arguments) if files else _run(arguments)
    from ambiseg._util.processes import first_process

    if not first_process():
        return 0
    if out is not None:
        found.save(out)
    if arguments.json:
        sys.stdout.write(found.to_json())
    elif not arguments.quiet:
        from rich.console import Console

        console = Console(highlight=False)
        show(found, console)
        if out is not None:
            console.print(f"all numbers: {out}, {out.with_suffix('.csv').name}", soft_wrap=True)
    return 0


def _files(arguments: argparse.Namespace) -> tuple[Evaluation, Path | None]:
    from ambiseg.evaluation import evaluate_files

    options = _given(arguments, "protocol", "split", "quiet")
    found = evaluate_files(arguments.predictions, arguments.truth, **options)
    return found, None if arguments.out is None else Path(arguments.out)


def _run(arguments: argparse.Namespace) -> tuple[Evaluation, Path | None]:
    from ambiseg._util.processes import first_process
    from ambiseg.evaluation import evaluate
    from ambiseg.runs import is_shipped, open_run

    run = open_run(arguments.model)
    if not arguments.quiet and first_process():
        print(f"evaluating {arguments.model} on its {arguments.split or 'test'} part", file=sys.stderr, flush=True)
    data = {
        key: value
        for key, value in (
            ("root", arguments.root),
            ("eval_batch_size", arguments.batch_size),
            ("workers", arguments.workers),
        )
        if value is not None
    }
    options = _given(
        arguments, "split", "samples", "protocol", "which", "seed", "accelerator", "num_nodes", "threads", "quiet"
    )
    if arguments.devices is not None:
        options["devices"] = int(arguments.devices) if arguments.devices.isdigit() else arguments.devices
    found = evaluate(run, forms=arguments.form, data=data, **options)
    if arguments.out is not None:
        return found, Path(arguments.out)
    return found, None if is_shipped(arguments.model) else run.folder / f"evaluation-{found.split}.json"


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What the user said; the defaults are those of the functions."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


# -- tables -----------------------------------------------------------------------------------------------------------


def show(found: Evaluation, console: Console) -> None:
    """Print an evaluation: averages, then by how many readers drew anything, then the use of the experts."""
    weights = "" if found.which == "files" else f", {found.which} weights"
    images, patients = (
        f"{n:,} {noun}{'s' * (n != 1)}" for n, noun in ((found.images, "image"), (found.patients, "patient"))
    )
    title = f"{found.run}: {found.split} of {found.data}, {images} of {patients}, protocol {found.protocol}{weights}"
    console.print(title, style="bold", soft_wrap=True)
    _show_averages(found, console)
    _show_buckets(found, console)
    if found.experts is not None:
        _show_experts(found, console)
    if found.modes is not None:
        _show_modes(found.modes, console)


def _show_averages(found: Evaluation, console: Console) -> None:
    cell, last = len("0.000 [0.000, 0.000]") + 2, len("readers")
    fits = max(1, (console.width - max(map(len, TITLES.values())) - 2 - last) // cell)
    own = {name: found.annotations[name] for name in ("diversity", "entropy")}
    own["empty_mass"] = found.annotations["empty_share"]
    for start in range(0, len(found.settings), fits):
        part = found.settings[start : start + fits]
        table = _table("", *(f"{s['form']} {s['samples']}" for s in part), "readers")
        for metric, title in TITLES.items():
            means = [_like_mean(s["ece"]) if metric == "ece" else s["metrics"][metric] for s in part]
            table.add_row(title, *map(_interval, means), _number(own[metric]["mean"]) if metric in own else "")
        console.print(table)
        console.print()
    for setting in found.settings:
        for metric in ("ged", "matched_iou", "diversity"):
            if lacking := found.images - setting["metrics"][metric]["count"]:
                what = f"{setting['form']} {setting['samples']}: {lacking:,} of {found.images:,} images have no"
                console.print(f"{what} {TITLES[metric]} under protocol {found.protocol} and are left out")


def _show_buckets(found: Evaluation, console: Console) -> None:
    first = found.settings[0]
    table = _table("readers", "images", "GED", "matched IoU", "diversity", "empty")
    for bucket in first["buckets"]:
        metrics = bucket["metrics"]
        table.add_row(
            str(bucket["readers"]),
            f"{bucket['images']:,}",
            _interval(metrics["ged"]),
            _interval(metrics["matched_iou"]),
            _number(metrics["diversity"]["mean"]),
            _number(metrics["empty_mass"]["mean"]),
        )
    console.print(f"by how many readers drew anything, {first['form']} {first['samples']}", style="bold")
    console.print(table)
    empty = first["empty"]
    if empty["correlation"] is not None:
        text = f"probability of an empty mask and share of readers who drew nothing: r = {empty['correlation']:.2f}"
        console.print(f"{text}, {_number(empty['error'])} apart on average", soft_wrap=True)
    console.print()


def _show_experts(found: Evaluation, console: Console) -> None:
    experts = found.experts
    assert experts is not None
    buckets = experts["by_bucket"]
    room = (console.width - 44) // 7
    shown = buckets if len(buckets) <= room else []
    table = _table("expert", "mean weight", " " * 12, *(str(bucket["readers"]) for bucket in shown))
    table.columns[2].justify = "left"  # bars grow to the right
    for k in range(experts["count"]):
        mean = {"mean": experts["mean"][k], "low": experts["low"][k], "high": experts["high"][k]}
        bar = f"{'█' * round(12 * experts['mean'][k]):<12}"
        table.add_row(str(k + 1), _interval(mean), bar, *(_number(bucket["mean"][k]) for bucket in shown))
    by = ", and by how many readers drew anything" if shown else ""
    console.print(f"use of the experts{by}", style="bold")
    console.print(table)
    console.print()


def _show_modes(modes: dict[str, Any], console: Console) -> None:
    table = _table("class", "becomes", "truth", "predicted")
    for flip in modes["flips"]:
        table.add_row(flip["class"], flip["to"], _number(flip["truth"]), _number(flip["predicted"]))
    console.print(f"share of flipped pixels, {modes['setting'].replace('-', ' ')}", style="bold")
    console.print(table)
    text = f"{100 * modes['distance']:.0f} % of the probability is with the wrong of {len(modes['names'])} modes"
    if modes.get("found") is not None:
        text += f"; {modes['found']} of them are what some expert draws most often"
    if modes.get("correlation") is not None:
        text += f"; weights of experts and probabilities of their modes: r = {modes['correlation']:.2f}"
    console.print(text, soft_wrap=True)
    console.print()


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _like_mean(ece: dict[str, float | None]) -> dict[str, float | None]:
    return {"mean": ece["value"], "low": ece["low"], "high": ece["high"]}


def _interval(mean: Any) -> str:
    """``0.190 [0.178, 0.203]``; the mean alone where one patient gives no interval."""
    if mean is None:
        return ""
    if mean["low"] is None:
        return _number(mean["mean"])
    return f"{_number(mean['mean'])} [{_number(mean['low'])}, {_number(mean['high'])}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
