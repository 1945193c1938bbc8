"""The ``ambiseg`` command. Sub-commands import what they need when they run, so that help and errors are fast."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ambiseg import __version__
from ambiseg._util import limits, own
from ambiseg._util.errors import ConfigError
from ambiseg._util.terminal import animated
from ambiseg._util.text import did_you_mean, printable
from ambiseg.cli import (
    calibrate,
    compare,
    completion,
    data,
    demo,
    ensemble,
    evaluate,
    export,
    look,
    methods,
    predict,
    prune,
    report,
    serve,
    study,
    train,
    view,
)
from ambiseg.cli.guard import guarded
from ambiseg.cli.options import divide, known_settings, regular

SETTING = ("train", "demo", "study")  # commands that take settings


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, options in one wide column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, shutil.get_terminal_size((100, 24)).columns))


class Parser(argparse.ArgumentParser):
    """Errors in one line, with what may have been meant."""

    def error(self, message: str) -> NoReturn:
        hint, message = f"see {self.prog} --help", printable(message)
        if refused := re.match(r"argument (\S+): (expected .+, found .+)$", message):  # by one of our types
            raise ConfigError(f"{refused[1]}: {refused[2]}")
        if choice := re.match(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from (.+)\)$", message):
            known = [name.strip("' ") for name in choice[3].split(",")]
            message = f"{choice[1]}: expected one of {', '.join(known)}, found {choice[2]!r}"
            hint = did_you_mean(choice[2], known)[2:] or hint
        elif unknown := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            known = [*self._option_string_actions]
            if self.prog.split()[-1] in SETTING:  # keys, and ends of keys
                known += [f"--{form}" for key in known_settings() for form in (key, key.rpartition(".")[2])]
            hint = did_you_mean(unknown[1], known)[2:] or hint
        self.exit(2, f"{self.prog}: {message}; {hint}\n")

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        """Unknown arguments are an error of the command's own parser, which knows what may have been meant."""
        found, unknown = super().parse_known_args(*arguments, **more)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> Parser:
    """All commands with their options."""
    top = Parser(
        prog="ambiseg",
        allow_abbrev=False,
        formatter_class=Help,
        description="Segmentation where annotators disagree: every plausible mask, and how likely each one is.",
        epilog="`ambiseg predict demo sample` shows what comes out, without any data of yours.\n"
        "`ambiseg COMMAND --help` says what a command does and shows examples.",
    )
    top.add_argument("--version", action="version", version=f"ambiseg {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    first = demo, train, ensemble, prune, evaluate, calibrate, compare, predict, look, export, view, serve
    for command in (*first, report, study, methods, data, completion):
        command.add(commands, Help)
    return top


def subparsers(of: argparse.ArgumentParser) -> dict[str, Parser]:
    """The parsers of a command's commands, by name."""
    found = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What is to be run, with the --section.key of ``train`` and ``demo`` as ``settings_given``.

    >>> chosen = parse(["train", "--epochs", "8", "demo", "--quiet"])
    >>> chosen.recipe, chosen.quiet, chosen.settings_given, chosen.notes
    ('demo', True, ['--trainer.epochs', '8'], ['--epochs is --trainer.epochs'])
    """
    given, top = regular(arguments), parser()
    settings, notes = list[str](), list[str]()
    if given in ([], ["data"]):
        given.append("--help")
    if given[0] in SETTING:
        try:
            given, settings, notes = divide(given, subparsers(top)[given[0]]._option_string_actions)
        except ConfigError as error:
            subparsers(top)[given[0]].error(str(error))
    return top.parse_args(given, argparse.Namespace(settings_given=settings, notes=notes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see :mod:`ambiseg.cli.guard`."""
    settings, given = False, list(sys.argv[1:] if arguments is None else arguments)

    def work() -> int:
        nonlocal settings
        chosen = parse(given)
        settings = hasattr(chosen, "recipe")
        if chosen.notes and not chosen.quiet:
            print(f"ambiseg: {', '.join(chosen.notes)}", file=sys.stderr)
        own.FOLDERS[:] = [os.getcwd()]  # where a module:Class of a setting may be
        _spin_briefly()
        if not getattr(chosen, "light", False):
            with _patience():
                import ambiseg.data.case  # noqa: F401 - and with it PyTorch, which the commands need
        with limits.limited(getattr(chosen, "max_pixels", None)):
            return chosen.run(chosen)

    return guarded(work, lambda text: _SETTINGS.sub(r"--\1", text) if settings else text, "".join(given[:1]))


# Settings that messages name, where they are options of the command.
_KEYS = "annotations|batch_size|eval_size|fold|fractions|intensity|options|root|size|split|split_seed|windows"
_SETTINGS = re.compile(rf"(?<![\w./-])((?:data\.(?:{_KEYS})|backbone\.channels)\b)")

# What a user may have decided about waiting threads, and what is decided here: GNU's OpenMP, and Intel's and LLVM's.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_BRIEFLY = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}


def _spin_briefly() -> None:
    """Let threads that wait for each other give up their core soon, before PyTorch is imported, which reads this once.

    By default they spin for milliseconds. On a machine with other work that keeps the thread they wait for from its
    core, and two threads are slower than one. Not to spin at all is slow on an idle machine.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ.update(_BRIEFLY)


@contextmanager
def _patience() -> Iterator[None]:
    """``loading …`` on the terminal while PyTorch is imported, which takes seconds on some disks."""
    if not animated() or "torch" in sys.modules:
        yield
        return
    print("loading …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
