"""``ambiseg data …``: list, check, split, convert and export data sets."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util import terminal
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.own import is_reference
from ambiseg._util.text import printable
from ambiseg.cli import lidc
from ambiseg.cli.options import SEED, add_json, add_limit, check_file, check_json, emit, path, quoted, whole, word
from ambiseg.data.sets import RELEASED_SPLIT

if TYPE_CHECKING:
    from ambiseg.data.case import Cases

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
        description="Check, split and export data sets before training.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    actions = data.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[..., int], help: str) -> argparse.ArgumentParser:
        """Named after the function that runs it, whose docstring is its description."""
        name, description = run.__name__.strip("_"), inspect.getdoc(run)
        made = actions.add_parser(name, help=help, description=description, formatter_class=formatter)
        made.set_defaults(run=run)
        return made

    add_json(command(_list, "the data sets by name"))

    check = command(_check, "read a folder of your own and report every problem")
    check.epilog = "Settings given here override those in the folder's ambiseg.json."
    meaning = "a folder with images/ and masks/<reader>/, or a manifest (.csv, .json)"
    check.add_argument("path", type=path, metavar="PATH", help=meaning)
    check.add_argument("--classes", nargs="+", metavar="NAME", help="names of the class ids 0, 1 …, or their number")
    value = whole(-(2**31), 2**32 - 1)
    check.add_argument("--void", type=value, metavar="ID", help="the value of pixels in masks that count nowhere")
    check.add_argument("--labels", choices=("auto", "ids", "binary"), help="what the numbers in masks mean")
    check.add_argument("--slices", choices=("all", "marked"), help="which slices of a volume are cases")
    check.add_argument("--html", type=path, metavar="FILE", help="also write a page with pictures")
    add_limit(check)
    add_json(check)
    check.add_argument("--quiet", action="store_true", help="one line per error and warning, and no progress")

    split = command(_split, "divide a data set by patient and freeze the result")
    _add_source(split)
    split.add_argument("--out", type=path, metavar="FILE", required=True, help="the file to write")
    shares = ["train=0.7", "val=0.1", "test=0.2"]
    meaning = f"shares of the patients; they sum to 1 (default: {' '.join(shares)})"
    split.add_argument("--fractions", nargs="+", metavar="PART=SHARE", default=shares, help=meaning)
    seed = whole(0, SEED)
    split.add_argument(
        "--seed", type=seed, metavar="S", default=0, help="another seed gives another split (default: 0)"
    )
    split.add_argument("--fold", type=word, metavar="K/N", help="test on the fold K of N of a cross-validation")
    split.add_argument("--declared", action="store_true", help="take the split that the data's owner gave")
    released = ("--released", f"--{RELEASED_SPLIT}")  # the second is the former name
    split.add_argument(*released, action="store_true", help="for LIDC: the split by series that the paper's code makes")
    split.add_argument("--extend", type=path, metavar="FILE", help="a frozen split to keep and to add new cases to")

    text = "Convert a public data set, as it was downloaded, to a memory-mapped store."
    prepare = actions.add_parser("prepare", help="convert a public data set to a store", description=text)
    prepare.formatter_class = formatter
    lidc.add(prepare.add_subparsers(title="data sets", metavar="NAME", required=True), formatter)

    export = command(_export, "write a data set as a folder of files")
    _add_source(export)
    export.add_argument(
        "--out", type=path, metavar="DIR", required=True, help="the folder to write; it must not exist yet"
    )
    export.add_argument("--count", type=whole(1, 10**9), metavar="N", help="only N cases, spread evenly over the data")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", type=path, metavar="DATA", help="a data set's name (see `ambiseg data list`), a folder, or module:Class"
    )
    option = "an option of the data set, such as size=128; may be repeated"
    parser.add_argument("--set", dest="options", action="append", default=[], metavar="KEY=VALUE", help=option)
    add_limit(parser)
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _list(arguments: argparse.Namespace) -> int:
    """The data sets that `--data.name` knows."""
    from ambiseg._util.tables import table
    from ambiseg.data.config import DATASETS, NEEDS_ROOT

    rows = []
    for name, dataset in DATASETS.items():
        summary = re.sub(r":\w+:`~?([^`]+)`|\*\*(.+?)\*\*", r"\1\2", (dataset.__doc__ or "").strip().splitlines()[0])
        rows.append((name, summary + " (takes --data.root)" * (name in NEEDS_ROOT)))
    if not emit(arguments, [{"name": name, "about": about, "root": name in NEEDS_ROOT} for name, about in rows]):
        return 0
    made = table(("name", "what it is"), rows, left=(0, 1))
    made.columns[1].no_wrap = False
    terminal.console().print(made)
    return 0


# -- check ------------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    """Read every image and every mask, and print what is there and every problem with its file.
    Exit code: 0 if the data can be used, 1 if there are errors, 2 if nothing can be read."""
    from ambiseg._util.files import write_text
    from ambiseg.data.check.check import CheckResult, check
    from ambiseg.data.check.output import page, print_lines, print_result
    from ambiseg.data.sets.folder.settings import FolderSettings
    from ambiseg.io.errors import FileError
    from ambiseg.settings import validate

    path, quiet = Path(arguments.path), arguments.quiet
    targets = [Path(file) for file in (arguments.html, arguments.json) if file not in (None, "-")]
    for target in targets:  # before everything is read
        check_file(target)
    classes = arguments.classes
    if classes is not None:
        number = len(classes) == 1 and re.fullmatch(r"[0-9]{1,9}", classes[0])
        classes = int(classes[0]) if number else tuple(classes)
    given = {"classes": classes, **{key: getattr(arguments, key) for key in ("void", "labels", "slices")}}
    settings = validate(FolderSettings, given, dashes="--")
    try:
        result = check(path, settings, quiet)
    except FileError as error:
        result = CheckResult(path, problems=[error.problem])
        print(printable(f"ambiseg: {error} ({error.problem.remedy})"), file=sys.stderr)
    show = emit(arguments, result.as_dict())
    if result.cases is None:
        return result.exit_code
    if arguments.json != "-":
        (print_lines if quiet else print_result)(result)
    if arguments.html is not None:
        write_text(arguments.html, page(result, quiet))
    for target in targets if show else ():
        print(f"written: {target}")
    if result.exit_code == 2:
        none = f"{path}: expected cases that can be read, found none: {result.verdict}"
        print(printable(f"ambiseg: {none}"), file=sys.stderr)
    return result.exit_code


# -- split and export -------------------------------------------------------------------------------------------------


def _split(arguments: argparse.Namespace) -> int:
    """Divide a data set by patient, check that no patient and no picture is in two parts, and write the result
    to a file. Data that are added later get their parts with --extend, which moves nobody."""
    from ambiseg._util.progress import reporting
    from ambiseg._util.tables import table
    from ambiseg.data.rules import Rule
    from ambiseg.data.splits import EmptyPart, Split, check_leakage

    check_json(arguments)
    check_file(Path(arguments.out))
    pairs: dict[str, float] = {}
    if not (arguments.extend or arguments.released or arguments.declared):
        pairs = _pairs("--fractions", arguments.fractions, float, "PART=SHARE such as train=0.7")
        rule = Rule(pairs, arguments.seed)  # says what is wrong before anything is read
        if arguments.fold is not None:
            Rule.of_fold(arguments.fold, rule.fractions, rule.seed)
    cases = _open(arguments)
    with reporting("reading", arguments.quiet) as progress:
        if arguments.extend:
            split = Split.load(arguments.extend).extended(cases, progress)
        elif arguments.released:
            from ambiseg.data.sets.lidc.released import released_split

            split = released_split(cases, progress)
        elif arguments.declared:
            split = Split.declared(cases, seed=arguments.seed, progress=progress)
        else:
            try:
                split = Split.by_hash(cases, pairs, arguments.seed, progress, arguments.fold)
            except EmptyPart as error:
                raise error.naming("--seed {}") from None
    with reporting("comparing", arguments.quiet) as progress:
        check_leakage(cases, split, progress=progress)
    split.save(arguments.out)
    chosen = {part: split.indices(cases, part) for part in split.parts}
    sizes = {part: {"patients": len({cases.patients[i] for i in of}), "cases": len(of)} for part, of in chosen.items()}
    about = {"split": Path(arguments.out), "rule": str(split.rule), "fingerprint": split.fingerprint, "parts": sizes}
    if emit(arguments, about):
        rows = [(part, *(f"{number:,}" for number in of.values())) for part, of in sizes.items()]
        console = terminal.console(highlight=False, soft_wrap=True)
        console.print(table(("part", "patients", "cases"), rows))
        console.print(f"{split.rule}; fingerprint {split.fingerprint}")
        console.print(f"no patient and no picture is in two parts; written to {arguments.out}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    """Write a data set as a folder with images/ and masks/<reader>/, readable by `--data.name folder`."""
    from ambiseg._util.progress import reporting
    from ambiseg.data.export import export

    check_json(arguments)
    if arguments.json not in (None, "-") and os.path.realpath(arguments.json) == os.path.realpath(arguments.out):
        raise DataError(f"--json: expected another path than that of --out, found {arguments.json}")
    cases = _open(arguments)
    with reporting("writing", arguments.quiet) as progress:
        count = export(cases, arguments.out, arguments.count, progress)
    if emit(arguments, {"folder": Path(arguments.out), "cases": count, "title": cases.title}):
        print(f"{count:,} cases of {cases.title} written to {arguments.out}")
    return 0


def _pairs(option: str, texts: list[str], parse: Any, expected: str) -> dict[str, Any]:
    """``KEY=VALUE`` as a dictionary."""
    pairs = {}
    for text in texts:
        key, found, value = text.partition("=")
        if key in pairs:
            raise DataError(f"{option}: expected every name once, found {quoted(key)} again")
        try:
            pairs[key] = parse(value)
        except ValueError:
            found = ""
        if not found:
            raise DataError(f"{option}: expected {expected}, found {quoted(text)}")
    return pairs


def _open(arguments: argparse.Namespace) -> Cases:
    """A data set by its name, or the folder, manifest or store at a path."""
    from ambiseg._util.progress import reporting
    from ambiseg.data.config import DATASETS, NEEDS_ROOT, DataConfig, dataset_at, open_cases
    from ambiseg.settings import read_value, validate

    options = _pairs("--set", arguments.options, read_value, "KEY=VALUE")
    name, root, known = arguments.data, None, sorted(set(DATASETS) - NEEDS_ROOT)
    if is_reference(name) and not Path(name).exists():  # a class of the user's, whose root is --set root=…
        root = options.pop("root", None)
    elif name not in known:
        path = Path(root := arguments.data)
        if not path.exists():
            raise DataError(f"{root}: expected {', '.join(known)} or an existing folder, found neither")
        name = dataset_at(path)
    config = validate(DataConfig, {"name": name, "root": root, "options": options}, prefix="data.")
    try:
        with reporting("opening the data", arguments.quiet):
            return open_cases(config)
    except ConfigError as error:  # options are typed in another way here
        raise ConfigError(re.sub(r"^data\.options\.?", "--set ", str(error)).replace("--set :", "--set:")) from None
