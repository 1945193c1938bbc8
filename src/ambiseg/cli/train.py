"""``ambiseg train``: a recipe and what you change of it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import first_process, program
from ambiseg._util.text import count
from ambiseg.cli.options import add_device, add_json, add_limit, check_json, emit, number, path, placed

EXAMPLES = """\
examples:
  ambiseg train auto --data.root scans/ --out runs/mine     settings that fit your data, each with its reason
  ambiseg train auto --data.root scans/ --minutes 60        the same for a longer training
  ambiseg train demo                                        about five minutes on two cores
  ambiseg train demo --model.samples 8 --trainer.epochs 10  the same with other settings
  ambiseg train my.yaml --data.root scans/ --out runs/mine  a recipe of your own
  ambiseg train lidc --trainer.devices 4 --trainer.num_nodes 2 --trainer.strategy ddp
  ambiseg train --resume runs/demo                          go on after an interruption
  ambiseg train demo --print-config > my.yaml               every setting, to start a recipe from

Any setting can be given as --section.key value, or --key value where only one section has that key (--epochs 2);
`ambiseg train --settings` lists them with their meaning.
"""

AUTO = "auto"  # in the place of a recipe: see ambiseg.planning


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``train``."""
    train = commands.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train a model. A run's folder gets its settings, its split, a line of metrics per epoch, and the\n"
        "weights of the last epoch and of the one with the smallest validation GED. Ctrl-C stops at once;\n"
        "nothing but the current epoch is lost.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    train.add_argument("recipe", nargs="?", type=path, metavar="RECIPE", help="auto, a recipe's name, or a YAML file")
    train.add_argument("--out", type=path, metavar="DIR", help="the run's folder (default: runs/RECIPE)")
    train.add_argument("--resume", type=path, metavar="RUN", help="go on with the run in this folder")
    train.add_argument(
        "--minutes",
        metavar="N",
        type=number(0, 10**6, above=True),
        help="of one core that training may take, with auto (default: 6)",
    )
    add_device(train, "the best there is; --devices and --num-nodes are settings")
    add_limit(train)
    add_json(train)
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")
    train.add_argument("--print-config", action="store_true", help="print all settings as YAML, and stop")
    train.add_argument("--settings", action="store_true", help="list all settings with their meaning, and stop")
    train.add_argument("--recipes", action="store_true", help="list the recipes, and stop")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from ambiseg import config as configuration

    check_json(arguments)
    if arguments.recipes:
        files = configuration.recipes()
        first = {name: path.read_text(encoding="utf-8").splitlines()[0] for name, path in files.items()}
        about = {name: line.removeprefix("#").strip() for name, line in first.items()}
        if emit(arguments, about):
            print("\n".join(f"{name:{max(map(len, about)) + 2}s}{text}" for name, text in about.items()))
        return 0
    if arguments.settings:
        if emit(arguments, [row._asdict() for table in configuration.tables() for row in table.rows]):
            print(settings_text(min(shutil.get_terminal_size((110, 24)).columns, 120)))
        return 0
    if (arguments.recipe is None) == (arguments.resume is None):
        known = ", ".join(configuration.recipes())
        raise ConfigError(f"train: expected a recipe (auto, {known}, or a YAML file) or --resume RUN")
    if arguments.minutes is not None and arguments.recipe != AUTO:
        raise ConfigError("train: --minutes is for `ambiseg train auto`, which plans; use --trainer.epochs")
    if arguments.resume is not None and arguments.out is not None:
        raise ConfigError("train: expected --resume RUN or --out DIR, found both: a run goes on in its own folder")
    begun = None if arguments.resume is None else Path(arguments.resume)
    if begun is not None and not (begun / "config.yaml").is_file():
        raise ConfigError(f"{begun}: expected the folder of a run, found no config.yaml in it")
    out = begun or Path(arguments.out or Path("runs") / Path(arguments.recipe).stem)
    if arguments.recipe == AUTO:
        from ambiseg.runs import Run

        if not arguments.print_config:
            Run.claim(out)
        planned = _plan(arguments)
        config, reasons = planned.config, planned.reasons
    else:
        config = configuration.parse(settings_of(arguments), begun / "config.yaml" if begun else arguments.recipe)
        reasons = None
    if arguments.print_config:
        print(configuration.dump(config, reasons), end="")
        return 0
    if not arguments.quiet and first_process():
        doing = f"training {arguments.recipe} into {out}" if begun is None else f"resuming {out}"
        print(doing, file=sys.stderr, flush=True)

    from ambiseg.training import train

    run = train(config, out, resume=begun is not None, quiet=arguments.quiet, command=sys.argv, reasons=reasons)
    if not first_process():
        return 0
    from ambiseg.history import best_row

    history = run.history
    if emit(arguments, {"run": out, "epochs": len(history), "best": best_row(history), "last": history[-1]}):
        print(outcome(history, config.trainer.check_every, config.data.eval_size))
        typed, folder = program(), shlex.quote(str(out))
        print(f"next: {typed} evaluate {folder}    {typed} report {folder}")
    return 0


def outcome(history: Sequence[Mapping[str, float]], check_every: int, eval_size: Any) -> str:
    """The best epoch in one line, or why there is none.

    >>> outcome([{"epoch": 1, "val_ged": 0.5}, {"epoch": 2, "val_ged": 0.25}], 1, 64)
    'best epoch 2: validation GED 0.2500 (of the middle 64×64 pixels of each image)'
    >>> outcome([{"epoch": 1, "val_ged": 0.5, "val_ged_unbiased": 0.45, "val_masks": 16}], 1, None)
    'best epoch 1: validation GED 0.5000, unbiased 0.4500'
    >>> outcome([{"epoch": 1}, {"epoch": 2}], 5, None)
    'no validation ran in 2 epochs (trainer.check_every is 5): the best weights are the last ones'
    """
    from ambiseg.history import best_row

    best = best_row(history)
    if best is not None:
        sides = [eval_size] * 2 if isinstance(eval_size, int) else eval_size
        where = f" (of the middle {sides[0]}×{sides[1]} pixels of each image)" if sides else ""
        scores = {"GED": best.get("val_ged"), "unbiased": best.get("val_ged_unbiased")}
        said = ", ".join(f"{name} {score:.4f}" for name, score in scores.items() if score is not None)
        return f"best epoch {best['epoch']:.0f}: validation {said}{where}"
    why = f"no validation ran in {count(len(history), 'epoch')} (trainer.check_every is {check_every})"
    if len(history) >= check_every:
        why = "validation gave no GED: no image of the validation part has a value"
    return f"{why}: the best weights are the last ones"


def _plan(arguments: argparse.Namespace) -> Any:
    from ambiseg._util.progress import reporting
    from ambiseg.planning import MINUTES, plan

    quiet = arguments.quiet or arguments.print_config or not first_process()
    minutes = MINUTES if arguments.minutes is None else arguments.minutes
    with reporting("looking at the training images", arguments.quiet) as progress:
        planned = plan(settings=settings_of(arguments), minutes=minutes, progress=progress)
    if not quiet:
        print(plan_text(planned, min(shutil.get_terminal_size((120, 24)).columns, 140)), file=sys.stderr, flush=True)
    return planned


def plan_text(planned: Any, width: int) -> str:
    """The settings that a plan chose, and why, in the order of ``config.yaml``."""
    from ambiseg.settings import inline

    rows = []
    for key, reason in planned.reasons.items():
        value: Any = planned.config
        for part in key.split("."):
            value = getattr(value, part)
        rows.append((key, inline(value), reason))
    sections = list(type(planned.config).model_fields)
    rows.sort(key=lambda row: sections.index(row[0].split(".")[0]))
    wide = max(len(key) for key, _, _ in rows) + 2
    lines = []
    for key, value, reason in rows:
        body = textwrap.wrap(f"{value}  ({reason})", max(width - wide - 2, 30), break_on_hyphens=False)
        lines += [f"  {key:<{wide}}{body[0]}", *(" " * (wide + 4) + line for line in body[1:])]
    return "\n".join(["the plan, from the training part:", *lines])


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The settings that were typed, ``--device`` included."""
    device = {} if arguments.device is None else placed(arguments.device)
    return [*(f"--trainer.{key}={value}" for key, value in device.items()), *arguments.settings_given]


def settings_text(width: int = 100) -> str:
    """Every setting with its default and its meaning, by section."""
    from ambiseg.config import tables

    lines = [
        "Settings, their defaults and their meanings. Give one as --section.key value, or many in a YAML file:",
        "`ambiseg train demo --print-config > my.yaml` writes one to start from. Lists are [1, 2], tables are",
        "{key: value}, and null is no value.",
    ]
    for table in tables():
        lines += ["", *textwrap.wrap(table.title, max(width, 60), subsequent_indent="  "), *setting_lines(table, width)]
    return "\n".join(lines)


def setting_lines(table: Any, width: int, indent: int = 46) -> list[str]:
    """The settings of one table: key and default, and the meaning beside them."""
    lines = []
    for row in table.rows:
        start = f"  {'' if table.key == 'schedule' else '--'}{row.key:<30}{row.default}"
        body = textwrap.wrap(row.meaning.replace("`", ""), max(width - indent, 30))
        if len(start) < indent and body:
            start = f"{start:<{indent}}{body.pop(0)}"
        lines += [start, *(" " * indent + line for line in body)]
    return lines
