"""``ambiseg study``: the tables of papers, on any data and at any scale."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ambiseg.cli.options import add_json, add_limit, check_json, emit, number, path, whole, word

EXAMPLES = """\
examples:
  ambiseg study                                          the studies that come with the package
  ambiseg study ablation --data lidc71.npz               all members, three seeds each, in the cores at hand
  ambiseg study ablation --data lidc71.npz --seeds 1     one seed: a first look
  ambiseg study zoo --data scans/ --minutes 5            your own data, five CPU minutes per method
  ambiseg study zoo --data lidc71.npz --list | parallel  one command per member, for any scheduler
  ambiseg study ablation --data lidc71.npz --table       only the table of what is there
  ambiseg study ablation --data lidc71.npz --trainer.epochs 20 --adopt runs/a runs/b    runs that exist already
  ambiseg study my.yaml --data scans/                    a study of your own

What is finished is not repeated, of this study or another in the same folder; what was interrupted goes on. A failed
member stays in the table with its reason until --retry. The exit code is 1 if a member has no result. Any setting of
`ambiseg train` can be given as --section.key value, and holds for all members.
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``study``."""
    made = commands.add_parser(
        "study",
        help="repeat a table of a paper, on your data and at your scale",
        description="Train and score the members of a study, each with several seeds, and write one page with the\n"
        "table, its intervals, the paper's own numbers beside it, and what failed.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    made.add_argument("name", nargs="?", type=path, metavar="STUDY", help="the name of a study, or a YAML file")
    data = "a folder, a store or an .npz, or the name of data that come with the package"
    made.add_argument("--data", type=path, metavar="ROOT", help=data)
    made.add_argument("--scale", choices=("small", "paper"), default="small", help="of the training (default: small)")
    seeds = "trainings of every member (default: as the study says, usually 3)"
    made.add_argument("--seeds", type=whole(1, 1000), metavar="N", help=seeds)
    made.add_argument(
        "--out", type=path, default="runs/studies", metavar="DIR", help="for all studies (default: runs/studies)"
    )
    made.add_argument(
        "--jobs", type=whole(1, 1024), metavar="N", help="trainings at a time (default: all cores; 1 on a GPU)"
    )
    base = "the recipe that members change, or auto (default: the study's; auto for data of another kind)"
    made.add_argument("--base", type=path, metavar="RECIPE", help=base)
    minutes = "CPU time of every training (default: as the study says)"
    made.add_argument("--minutes", type=number(0, 10**6, above=True), metavar="N", help=minutes)
    made.add_argument("--split", type=word, default="test", metavar="PART", help="what is scored (default: test)")
    only = "run only these, or MEMBER:SEED; the table has all"
    made.add_argument("--only", nargs="+", type=word, default=[], metavar="MEMBER", help=only)
    made.add_argument("--list", action="store_true", help="print one command per member, and stop")
    made.add_argument("--table", action="store_true", help="only write and print the table of what is there")
    made.add_argument("--adopt", nargs="+", type=path, metavar="RUN", help="copy finished runs in, and stop")
    made.add_argument("--retry", action="store_true", help="try failed members again")
    add_limit(made)
    add_json(made)
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.set_defaults(run=_study)


def _study(arguments: argparse.Namespace) -> int:
    from ambiseg._util.extras import require

    check_json(arguments)
    if arguments.name is None:
        return _listed(arguments)
    require("train")
    from ambiseg.studies.experiment import Study
    from ambiseg.studies.members import typed

    options = {name: getattr(arguments, name) for name in ("scale", "seeds", "out", "base", "minutes", "split")}
    study = Study(arguments.name, arguments.data, settings=typed(arguments.settings_given), **options)
    if arguments.list:
        study.chosen(arguments.only)
        if emit(arguments, study.commands()):
            print("\n".join(study.commands()))
        return 0
    if arguments.adopt:
        adopted = study.adopt(arguments.adopt)
        if emit(arguments, [{"member": one.member.name, "seed": one.seed, "run": one.folder} for one in adopted]):
            print("\n".join(f"{one.member.name} seed {one.seed}: {one.folder}, {one.state}" for one in adopted))
        return 0
    if not arguments.table:
        study.run(arguments.jobs, arguments.only, arguments.retry, arguments.quiet)
    return _results(arguments, study)


def _results(arguments: argparse.Namespace, study: Any) -> int:
    from ambiseg._util import terminal
    from ambiseg.studies.results import state_line
    from ambiseg.studies.writing import show

    folder: Path = study.write()
    rows, trouble, trials = study.results()
    if emit(arguments, study.as_json(rows, trouble, trials)):
        console = terminal.console(highlight=False)
        console.print(f"{study.name}: {study.definition.title}", style="bold", soft_wrap=True)
        show(study.definition, rows, console)
        if trouble:
            console.print(f"without differences: {trouble}", soft_wrap=True)
        if study.definition.train:
            console.print(state_line(rows, trials), soft_wrap=True)
        console.print(f"all of it: {folder / 'index.html'}, table.md, table.csv, table.tex, study.json", soft_wrap=True)
    if arguments.table or not study.definition.train:
        return 0
    asked = study.trials(arguments.only)
    names = {name for name, _ in study.chosen(arguments.only)}
    unready = any(study.members[name] is None for name in names)
    return int(unready or any(trial.state != "done" for trial in asked))


def _listed(arguments: argparse.Namespace) -> int:
    """Every study with its title."""
    from ambiseg.studies.definition import find, studies

    known = {name: find(name)[1] for name in studies()}
    about = {
        name: {"title": one.title, "repeats": one.repeats, "members": list(one.rows)} for name, one in known.items()
    }
    if emit(arguments, about):
        wide = max(map(len, known), default=0) + 2
        for name, one in known.items():
            print(f"{name:{wide}s}{one.title}{f' ({one.repeats})' if one.repeats else ''}")
    return 0
