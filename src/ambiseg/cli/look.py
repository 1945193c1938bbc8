"""``ambiseg look RUN``: prepare a run to say when a person must look at an image."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ambiseg.cli.options import add_json, add_limit, check_json, emit, path

EXAMPLES = """\
examples:
  ambiseg look runs/mine                        then predictions of the run say whether to look
  ambiseg look runs/mine --root /new/place      the data have moved
  ambiseg look runs/mine --which last           of the last weights, for predict --which last

Trainings do this when they end; it is for runs that lack it, and for more images than a short training looks at.
Written: RUN/look.npz. `ambiseg predict` then has the expected disagreement of every image beside those of the
validation images, and warns of images that are unlike those of the training.
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``look``."""
    command = commands.add_parser(
        "look",
        help="prepare a run to say when a person must look at an image",
        description="Send images of the training and the validation part through the network once, and keep what\n"
        "they are like: statistics of its features, and how much disagreement is expected.",
        epilog=EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=_look)
    command.add_argument("model", type=path, metavar="RUN", help="the folder of a run")
    command.add_argument("--root", type=path, metavar="DIR", help="where the run's data are now")
    command.add_argument("--which", choices=("best", "last"), default="best", help="which weights (default: best)")
    add_limit(command)
    add_json(command)
    command.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _look(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    from ambiseg.familiarity import FILE, look

    data = {"root": arguments.root} if arguments.root is not None else None
    quiet = arguments.quiet or arguments.json == "-"
    found = look(arguments.model, arguments.which, data=data, quiet=quiet)
    file = Path(arguments.model) / FILE
    said = {"file": str(file), "images": found.images, "others": len(found.distances), "statistics": len(found.mean)}
    if emit(arguments, said) and not arguments.quiet:
        of = f"{found.images} training and {len(found.distances)} validation images"
        print(f"{len(found.mean)} statistics of {of} in {file}")
        print("predictions of this run now say when a person must look")
    return 0
