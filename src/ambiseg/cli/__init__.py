"""The ``ambiseg`` command. Sub-commands import what they need when they run, so that help and errors are fast."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ambiseg import __version__
from ambiseg._util.extras import MissingExtra, explained
from ambiseg._util.text import did_you_mean
from ambiseg.cli import data, demo, evaluate, predict, report, train


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, options in one wide column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, _columns()))


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 100


class Parser(argparse.ArgumentParser):
    """Errors in one line, with what may have been meant."""

    def error(self, message: str) -> NoReturn:
        hint = f"see {self.prog} --help"
        if choice := re.match(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from (.+)\)$", message):
            known = [name.strip("' ") for name in choice[3].split(",")]
            message = f"{choice[1]}: expected one of {', '.join(known)}, found {choice[2]!r}"
            hint = did_you_mean(choice[2], known)[2:] or hint
        elif unknown := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            hint = did_you_mean(unknown[1], self._option_string_actions)[2:] or hint
        self.exit(2, f"{self.prog}: {message}; {hint}\n")


def parser() -> Parser:
    """All commands with their options."""
    top = Parser(
        prog="ambiseg",
        allow_abbrev=False,
        formatter_class=Help,
        description="Segmentation where annotators disagree: every plausible mask, and how likely each one is.",
        epilog="`ambiseg COMMAND --help` says what a command does and shows examples.",
    )
    top.add_argument("--version", action="version", version=f"ambiseg {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, train, evaluate, predict, report, data):
        command.add(commands, Help)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What is to be run, with the --section.key of ``train`` and ``demo`` as ``settings_given``.

    >>> chosen = parse(["train", "--trainer.epochs", "8", "demo", "--quiet"])
    >>> chosen.recipe, chosen.quiet, chosen.settings_given
    ('demo', True, ['--trainer.epochs', '8'])
    """
    given, settings = list(arguments), []
    if given in ([], ["data"]):
        given.append("--help")
    if given[0] in ("train", "demo"):
        given, settings = train.divide(given)
    made = parser()
    chosen, rest = made.parse_known_args(given)
    if rest:  # by the command's own parser, which knows what may have been meant
        _of_command(made, given).error(f"unrecognized arguments: {' '.join(rest)}")
    chosen.settings_given = settings
    return chosen


def _of_command(made: Parser, given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that was typed, at any depth."""
    found: argparse.ArgumentParser = made
    for word in given:
        for action in found._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                found = action.choices[word]
                break
        else:
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error that a user can put right is one line and code 2."""
    chosen = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        with _patience():
            import ambiseg.data.case  # noqa: F401 - and with it PyTorch, which every command needs
        return chosen.run(chosen)
    except KeyboardInterrupt as stop:
        print(f"ambiseg: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        known = explained(error) if isinstance(error, ModuleNotFoundError) else error
        if not _expected(known):
            raise
        print(f"ambiseg: {_one_line(known)}", file=sys.stderr)
        return 2


@contextmanager
def _patience() -> Iterator[None]:
    """``loading …`` on the terminal while PyTorch is imported, which takes seconds on some disks."""
    if not sys.stderr.isatty() or "torch" in sys.modules:
        yield
        return
    print("loading …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _expected(error: Exception) -> bool:
    """An error about the user's input or disk, as against one of ours."""
    from ambiseg._util.errors import DataError

    return isinstance(error, DataError | OSError | MissingExtra)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
