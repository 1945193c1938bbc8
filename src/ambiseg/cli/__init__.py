"""The ``ambiseg`` command. Sub-commands import what they need when they run: help and errors come at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ambiseg import __version__
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


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. What a user can put right is one line on the error stream and code 2."""
    made = parser()
    chosen, rest = made.parse_known_args(arguments)
    chosen.settings_given = rest  # `train` hands --section.key to jsonargparse; nobody else takes more than it declares
    if rest and not getattr(chosen, "takes_settings", False):
        made.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return chosen.run(chosen)
    except KeyboardInterrupt as stop:
        print(f"ambiseg: {stop or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if not _expected(error):
            raise
        print(f"ambiseg: {_one_line(error)}", file=sys.stderr)
        return 2


def _expected(error: Exception) -> bool:
    """An error about the user's input or disk, as against one of ours."""
    from ambiseg.data.base import DataError

    return isinstance(error, DataError | OSError)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
