"""``ambiseg serve RUN``: predictions over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.shipped import in_words
from ambiseg.cli.options import THREADS, add_device, add_json, add_limit, check_json, emit, number, path, whole, word

EXAMPLES = """\
examples:
  ambiseg serve runs/mine                             http://127.0.0.1:8000, for this machine alone
  curl -F image=@scan.png http://127.0.0.1:8000/v1/predict
  ambiseg serve runs/mine runs/other --port 0         two models, on a port that is free
  AMBISEG_TOKEN=$(openssl rand -hex 16) ambiseg serve runs/mine --host 0.0.0.0
"""
DESCRIPTION = """\
Answer requests for predictions over HTTP: an image in, weighted masks out. /openapi.json describes all of it.

Only this machine can reach the service unless --host says otherwise; it then asks for a token. Images are deleted as
soon as they are read, and nothing else is stored. Ctrl-C ends it."""
VARIABLE = "AMBISEG_TOKEN"


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``serve``."""
    about: dict[str, Any] = {"description": DESCRIPTION, "epilog": EXAMPLES, "formatter_class": formatter}
    command = commands.add_parser("serve", help="answer requests for predictions over HTTP", **about)
    command.set_defaults(run=_serve)
    command.add_argument(
        "models", type=path, nargs="+", metavar="RUN", help=f"folders of runs, or {in_words()}; several are chosen from"
    )
    add_address(command, 8000)
    command.add_argument("--token", type=word, metavar="T", help=f"that every request must bring (default: {VARIABLE})")
    command.add_argument("--no-token", action="store_true", help="none, although other machines can reach the service")
    add_running(command)
    add_json(command)
    command.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_address(command: Any, port: int) -> None:
    """``--host``, ``--port`` and ``--allow-host``."""
    command.add_argument(
        "--host", type=word, metavar="ADDRESS", default="127.0.0.1", help="to listen at (default: 127.0.0.1)"
    )
    command.add_argument(
        "--port", type=whole(0, 65535), metavar="N", default=port, help=f"0 takes a free one (default: {port})"
    )
    allowed = "a further name by which the service is called, such as that of a proxy"
    command.add_argument("--allow-host", type=word, metavar="NAME", action="append", default=[], help=allowed)


def add_running(command: Any) -> None:
    """Limits, weights and device."""
    limits = command.add_argument_group("limits")
    limits.add_argument(
        "--max-upload", type=whole(1, 1 << 20), metavar="MB", default=512, help="of a request (default: 512)"
    )
    limits.add_argument(
        "--queue", type=whole(1, 10_000), metavar="N", default=32, help="requests at a time; more get 503 (default: 32)"
    )
    seconds = "that one prediction may take (default: 600)"
    limits.add_argument("--timeout", type=number(0.1, 1e6), metavar="S", default=600.0, help=seconds)
    limits.add_argument(
        "--results", type=whole(1, 10_000), metavar="N", default=16, help="finished results to hold (default: 16)"
    )
    add_limit(limits)
    running = command.add_argument_group("running")
    running.add_argument("--which", choices=("best", "last"), default="best", help="weights of (default: best)")
    add_device(running, "cpu")
    running.add_argument("--threads", type=whole(1, THREADS), metavar="T", help="of PyTorch; may change the last digit")
    batch = "images of one size that go through the network together; 1: each alone (default: 8)"
    running.add_argument("--batch", type=whole(1, 256), metavar="N", default=8, help=batch)


def _serve(arguments: argparse.Namespace) -> int:
    from ambiseg._util.extras import require

    require("train", "serve")
    from ambiseg.serving.server import is_loopback

    check_json(arguments)
    token = None if arguments.no_token else check_token(arguments.token or os.environ.get(VARIABLE))
    if arguments.no_token and arguments.token:
        raise ConfigError("--no-token: expected no --token beside it, found one")
    if token is None and not arguments.no_token and not is_loopback(arguments.host):
        hint = f"set {VARIABLE}, or leave it open to everybody with --no-token"
        raise ConfigError(f"--token: expected one where other machines reach the service, found none; {hint}")

    def told(address: str) -> None:
        about = {"url": address, "models": [one.name for one in app.state.models], "token": token is not None}
        if emit(arguments, about):
            asks = "; it asks for the token" if token else ""
            print(f"serving {', '.join(about['models'])} at {address}{asks}; Ctrl-C ends it")
        sys.stdout.flush()  # whoever reads this from a pipe waits for it

    app, bound = prepared(arguments, token)
    return served(app, bound, told, arguments.quiet)


def check_token(token: str | None) -> str | None:
    """A token that can be sent in a header, or a one-line error.

    >>> check_token("0123456789abcdef"), check_token(None)
    ('0123456789abcdef', None)
    """
    if not token:
        return None
    if not 8 <= len(token) <= 512 or not token.isascii() or not token.isprintable() or set(token) & set(' ",;\\'):
        expected = "8 to 512 letters, digits and signs without spaces, quotes, commas and semicolons"
        raise ConfigError(f"--token: expected {expected}, found another")
    return token


def prepared(arguments: argparse.Namespace, token: str | None, extra: Any = ()) -> tuple[Any, socket.socket]:
    """The application that the options describe, and the socket that it is to answer at.

    Args:
        extra: routers that come before those of the service.
    """
    from ambiseg.serving import Limits, create_app
    from ambiseg.serving.app import LOOPBACK
    from ambiseg.serving.server import is_loopback, listening
    from ambiseg.serving.settings import opened

    limits = Limits(
        upload=arguments.max_upload << 20,
        queue=arguments.queue,
        seconds=arguments.timeout,
        kept=arguments.results,
        batch=arguments.batch,
    )
    hosts = [*LOOPBACK, *arguments.allow_host]
    if not is_loopback(arguments.host):
        hosts += ["ip", arguments.host, socket.gethostname(), socket.getfqdn()]
    models = opened(arguments.models, arguments.which)
    about = {"device": arguments.device or "cpu", "threads": arguments.threads}
    app = create_app(models, token=token, hosts=hosts, limits=limits, extra=extra, **about)
    return app, listening(arguments.host, arguments.port)


def served(app: Any, bound: socket.socket, told: Any, quiet: bool) -> int:
    """Load the models, then answer until a signal comes.

    Args:
        told: called with the address, when requests can come.
    """
    from ambiseg._util.progress import reporting
    from ambiseg.serving.server import address_of, run

    jobs = app.state.jobs
    try:
        with reporting("loading the model", quiet):
            jobs.start()
        run(app, bound, lambda: told(address_of(bound)))
    finally:
        jobs.close()
        bound.close()
    return 0
