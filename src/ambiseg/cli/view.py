"""``ambiseg view``: a page in the browser that shows images, masks and their probabilities."""

from __future__ import annotations

import argparse
import secrets
import sys
import webbrowser
from typing import Any

from ambiseg._util.shipped import in_words
from ambiseg.cli.options import THREADS, add_device, add_json, add_limit, check_json, emit, path, whole, word

EXAMPLES = """\
examples:
  ambiseg view demo sample                    model and image that come with the package
  ambiseg view runs/mine                      drop images on the page; the run's test cases are listed
  ambiseg view runs/mine scans/               the images of a folder are listed first
  ambiseg view runs/mine runs/other           two runs side by side
  ambiseg view runs/mine --data scans/        annotated data: predictions beside their readers
  ambiseg view predictions/                   what `ambiseg predict` wrote
  ambiseg view --data scans/                  the readers alone, without a model
"""

DESCRIPTION = """\
Open a page in the browser: the image with contours, every mask with its probability, the marginal, entropy and
disagreement over it, the distribution of area or volume; of annotated cases, the readers too.

Everything stays on this machine: only it can reach the page, by an address with a random token; nothing is loaded from
elsewhere, and what was opened is forgotten when the command ends. Ctrl-C ends it."""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``view``."""
    about: dict[str, Any] = {"description": DESCRIPTION, "epilog": EXAMPLES, "formatter_class": formatter}
    command = commands.add_parser("view", help="look at images, masks and readers in a browser", **about)
    command.set_defaults(run=_view)
    places = f"a run ({in_words()} too) and images, a second run, or a folder of predictions"
    command.add_argument("places", type=path, nargs="*", metavar="RUN|IMAGE|PREDICTIONS", help=places)
    command.add_argument("--with", dest="other", type=path, metavar="RUN", help="a second run, side by side")
    data = "annotated data; or nodules, shapes of the package; without a run, the readers alone"
    command.add_argument("--data", type=path, metavar="ROOT", help=data)
    part = "of the run's data that is listed (default: test)"
    command.add_argument("--split", type=word, metavar="PART", default="test", help=part)
    dicom = "what the DICOM files of a folder are (default: series)"
    command.add_argument("--dicom", choices=("series", "files"), default="series", help=dicom)
    command.add_argument("--which", choices=("best", "last"), default="best", help="weights of (default: best)")
    add_device(command, "cpu")
    command.add_argument("--threads", type=whole(1, THREADS), metavar="T", help="of PyTorch")
    add_limit(command)
    page = command.add_argument_group("page")
    free = "of this machine's own address (default: one that is free)"
    page.add_argument("--port", type=whole(0, 65535), metavar="N", default=0, help=free)
    page.add_argument("--no-browser", dest="browser", action="store_false", help="print the address only")
    add_json(page)
    page.add_argument("--quiet", action="store_true", help="print nothing but the address")


def _view(arguments: argparse.Namespace) -> int:
    from ambiseg._util.extras import require

    require("train", "serve")
    check_json(arguments)
    from ambiseg._util.progress import reporting
    from ambiseg.serving.app import create_app
    from ambiseg.serving.server import address_of, listening, run
    from ambiseg.serving.view.choosing import choose
    from ambiseg.serving.view.routes import view_router
    from ambiseg.serving.view.shelf import Shelf

    with reporting("opening", arguments.quiet):
        chosen = (arguments.places, arguments.other, arguments.data, arguments.which, arguments.dicom, arguments.split)
        view = choose(*chosen)
    token = secrets.token_urlsafe(24)
    routers = [view_router(view)]
    about: dict[str, Any] = {"device": arguments.device or "cpu", "threads": arguments.threads}
    app = create_app(view.models, token=token, extra=routers, jobs=None if view.models else Shelf(), **about)
    bound = listening("127.0.0.1", arguments.port)

    def told() -> None:
        address = f"{address_of(bound)}/?token={token}"
        if emit(arguments, {"url": address, "entries": len(view.entries)}):
            print(f"{view.title}: {address}\nCtrl-C ends it")
        elif arguments.json is None:  # --quiet: the address alone, without which the page cannot be opened
            print(address)
        sys.stdout.flush()  # a program that started this waits for the address
        if arguments.browser and not _opened(address):
            print("ambiseg: no browser was found: open the address in one", file=sys.stderr)

    jobs = app.state.jobs
    try:
        with reporting("loading the model", arguments.quiet):
            jobs.start()
        run(app, bound, told)
    except KeyboardInterrupt:  # how it is meant to be ended
        pass
    finally:
        jobs.close()
        bound.close()
    return 0


def _opened(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
