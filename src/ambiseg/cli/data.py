"""``ambiseg data …``: look at data sets, check them, split them, write them out."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ambiseg.cli import lidc

EXAMPLES = """\
examples:
  ambiseg data list                           what comes with the package, and what can be read
  ambiseg data check scans/                   read everything; a table, and every problem with its file
  ambiseg data check scans/ --html check.html the same as a page with pictures
  ambiseg data split scans/ --out split.json  freeze a split by patient
  ambiseg data prepare lidc data_lidc.pickle --out lidc/   a public data set, as a store
  ambiseg data export nodules --out demo/ --count 20   an example of the folder layout
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``data`` and its sub-commands."""
    data = commands.add_parser(
        "data",
        help="check, split and export data sets",
        description="Look at data sets before a network does.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    actions = data.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run, help: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=help, description=description, epilog=epilog, formatter_class=formatter)
        made.set_defaults(run=run)
        return made

    command("list", _list, "the data sets by name", "The data sets that `--data.name` knows.")

    check = command(
        "check",
        _check,
        "read a folder of your own and report every problem",
        "Read every image and every mask, and print what is there and every problem with its file.\n"
        "Exit code: 0 when the data can be used, 1 when a problem keeps them from it, 2 when nothing can be read.",
        "PATH is a folder with images/ and masks/<reader>/, or a manifest (.csv, .json).\n"
        "Settings given here win over those in the folder's ambiseg.json.",
    )
    check.add_argument("path", metavar="PATH", help="the folder or the manifest")
    check.add_argument("--classes", nargs="+", metavar="NAME", help="names of the class ids 0, 1 …, or their number")
    check.add_argument("--void", type=int, metavar="ID", help="the value in masks that counts nowhere")
    check.add_argument("--labels", choices=("auto", "ids", "binary"), help="what the numbers in masks mean")
    check.add_argument("--slices", choices=("all", "marked"), help="which slices of a volume are cases")
    check.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    check.add_argument(
        "--json", metavar="FILE", help="also write all numbers and problems as JSON; - prints them, and nothing else"
    )
    check.add_argument("--quiet", action="store_true", help="print problems only, and no progress")

    split = command(
        "split",
        _split,
        "divide a data set by patient and freeze the result",
        "Divide a data set by patient, check that nothing leaks, and freeze the result to a file.\n"
        "The rule looks at each patient alone, so that adding data later moves nobody.",
    )
    _add_source(split)
    split.add_argument("--out", metavar="FILE", required=True, help="the file to write")
    split.add_argument(
        "--fractions",
        nargs="+",
        metavar="PART=SHARE",
        default=["train=0.7", "val=0.1", "test=0.2"],
        help="shares of the patients; they sum to 1 (default: train=0.7 val=0.1 test=0.2)",
    )
    split.add_argument("--seed", type=int, default=0, help="another seed, another split (default: 0)")
    split.add_argument("--declared", action="store_true", help="take the split that the data's owner gave")
    split.add_argument("--mose", action="store_true", help="for LIDC: the split by series that the paper's code makes")
    split.add_argument("--extend", metavar="FILE", help="a frozen split to keep and to add new cases to")
    split.add_argument("--quiet", action="store_true", help="no progress")

    prepare = actions.add_parser(
        "prepare",
        help="convert a public data set to a store",
        description="Convert a public data set, as it was downloaded, to a memory-mapped store.",
        formatter_class=formatter,
    )
    lidc.add(prepare.add_subparsers(title="data sets", metavar="NAME", required=True), formatter)

    export = command(
        "export",
        _export,
        "write a data set as a folder of files",
        "Write a data set as a folder with images/ and masks/<reader>/, readable by `--data.name folder`.",
    )
    _add_source(export)
    export.add_argument("--out", metavar="DIR", required=True, help="the folder to write; it must not exist yet")
    export.add_argument("--count", type=int, metavar="N", help="only N cases, spread evenly over the data")
    export.add_argument("--quiet", action="store_true", help="no progress")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a data set's name (see `ambiseg data list`) or a folder")
    parser.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the data set, such as size=128; may be repeated",
    )


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ambiseg.data.config import DATASETS, NEEDS_ROOT

    table = Table("name", "what it is", box=None, pad_edge=False, header_style="bold")
    for name, dataset in DATASETS.items():
        summary = re.sub(r":\w+:`~?([^`]+)`|\*\*(.+?)\*\*", r"\1\2", (dataset.__doc__ or "").strip().splitlines()[0])
        table.add_row(name, summary + (" (takes --data.root)" if name in NEEDS_ROOT else ""))
    Console().print(table)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ambiseg.data.check import check
    from ambiseg.data.sets.folder.settings import FolderSettings
    from ambiseg.settings import validate

    classes = arguments.classes
    if classes is not None:
        classes = int(classes[0]) if len(classes) == 1 and classes[0].isdigit() else tuple(classes)
    given = {"classes": classes, **{key: getattr(arguments, key) for key in ("void", "labels", "slices")}}
    settings = validate(FolderSettings, given, dashes="--")
    return check.run(arguments.path, settings, html=arguments.html, json=arguments.json, quiet=arguments.quiet)


def _split(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ambiseg._util.errors import DataError
    from ambiseg._util.progress import reporting
    from ambiseg.data.splits import Split, check_leakage

    cases = _open(arguments)
    with reporting("reading", arguments.quiet) as progress:
        if arguments.extend:
            split = Split.load(arguments.extend).extended(cases, progress)
        elif arguments.mose:
            from ambiseg.data.sets.lidc.released import released_split

            split = released_split(cases, progress)
        elif arguments.declared:
            split = Split.declared(cases, seed=arguments.seed, progress=progress)
        else:
            fractions = {}
            for text in arguments.fractions:
                part, _, share = text.partition("=")
                try:
                    fractions[part] = float(share)
                except ValueError:
                    raise DataError(f"--fractions: expected PART=SHARE such as train=0.7, found {text!r}") from None
            split = Split.by_hash(cases, fractions, arguments.seed, progress)
    with reporting("comparing", arguments.quiet) as progress:
        check_leakage(cases, split, progress=progress)
    split.save(arguments.out)
    if not arguments.quiet:
        table = Table("part", "patients", "cases", box=None, pad_edge=False, header_style="bold")
        for part in split.parts:
            chosen = split.indices(cases, part)
            table.add_row(part, f"{len({cases.patients[i] for i in chosen}):,}", f"{len(chosen):,}")
        console = Console()
        console.print(table)
        console.print(f"{split.rule}; fingerprint {split.fingerprint}", highlight=False, soft_wrap=True)
        console.print(f"no patient and no picture is in two parts; written to {arguments.out}", soft_wrap=True)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from ambiseg._util.progress import reporting
    from ambiseg.data.export import export

    cases = _open(arguments)
    with reporting("writing", arguments.quiet) as progress:
        count = export(cases, arguments.out, arguments.count, progress)
    if not arguments.quiet:
        print(f"{count:,} cases of {cases.title} written to {arguments.out}")
    return 0


def _open(arguments: argparse.Namespace):
    """A data set by its name, or the folder, manifest or store at a path."""
    from pathlib import Path

    import yaml

    from ambiseg._util.errors import DataError
    from ambiseg.data.config import DATASETS, NEEDS_ROOT, DataConfig, open_cases

    options = {}
    for text in arguments.options:
        key, found, value = text.partition("=")
        if not found:
            raise DataError(f"--set: expected KEY=VALUE, found {text!r}")
        options[key] = yaml.safe_load(value)
    name, root = arguments.data, None
    if name not in set(DATASETS) - NEEDS_ROOT:
        root = arguments.data
        if not Path(root).exists():
            known = ", ".join(sorted(set(DATASETS) - NEEDS_ROOT))
            raise DataError(f"{root}: expected {known} or an existing folder, found neither")
        kinds = {(Path(root) / "store.json").is_file(): "store", Path(root).suffix == ".npz": "arrays"}
        kinds |= {(Path(root) / "leftImg8bit").is_dir(): "cityscapes", (Path(root) / "trainannot").is_dir(): "camvid"}
        name = kinds.get(True, "folder")
    return open_cases(DataConfig(name=name, root=root, options=options))
