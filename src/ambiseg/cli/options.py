"""What several commands have in common: options of one name and form, settings by the end of their key, JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ambiseg._util import limits
from ambiseg._util.errors import ConfigError
from ambiseg._util.text import keys_ending, printable

# The sections of ambiseg.config.Config, which is not imported for --help; schedules are version 0.1's.
SECTIONS = ("data", "backbone", "model", "optimizer", "schedules", "trainer", "evaluation", "seed")


def known_settings() -> dict[str, list[str]]:
    """Every setting and the words that it may be, without importing what defines them.

    ``settings.txt`` is written by ``tools/settings_table.py``; a test compares it with the settings themselves.
    """
    text = Path(__file__).with_name("settings.txt").read_text(encoding="utf-8")
    return {key: words for key, *words in map(str.split, text.splitlines())}


# -- options ----------------------------------------------------------------------------------------------------------

_RENAMED = {"--accelerator": "--device"}  # as evaluate called it

# Bounds that are those of settings, which are not imported for --help; a test compares them.
SEED, SAMPLES, SIDE, CLASSES = 2**32 - 1, 1024, 8192, 1 << 16
BATCH, WORKERS, THREADS, NODES = 1 << 16, 256, 1024, 10_000
SYMMETRIES = (1, 2, 4, 8)


@cache
def whole(low: int, high: int) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds.

    >>> whole(1, 1024)("16")
    16
    >>> whole(1, 1024)("0")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: expected at least 1, found 0
    """

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:  # also of more digits than Python reads
            raise argparse.ArgumentTypeError(f"expected a whole number, found {quoted(text)}") from None
        return int(_within(found, low, high, text))

    return read


@cache
def number(low: float, high: float, above: bool = False) -> Callable[[str], float]:
    """The type of an option that is a number within bounds, ``above`` the lower one or at least that."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if math.isnan(found):
            raise argparse.ArgumentTypeError(f"expected a number, found {quoted(text)}")
        if above and found <= low:
            raise argparse.ArgumentTypeError(f"expected more than {low:g}, found {quoted(text, '')}")
        return _within(found, low, high, text)

    return read


def _within(found: float, low: float, high: float, text: str) -> float:
    if low <= found <= high:
        return found
    bound = f"at least {low:,}" if found < low else f"at most {high:,}"
    raise argparse.ArgumentTypeError(f"expected {bound}, found {quoted(text, '')}")


def quoted(text: str, quote: str = "'") -> str:
    """What was typed, in one line and not all of what is long."""
    return f"{quote}{printable(text[:60])}{quote}" + "…" * (len(text) > 60)


def word(text: str) -> str:
    """The type of an option that is a name."""
    if not text or "\0" in text or len(text) > 4096:
        found = "an empty one" if not text else quoted(text)
        raise argparse.ArgumentTypeError(f"expected a text, found {found}")
    return text


def words(text: str) -> list[str]:
    """The type of an option that is several names in one word, so that it takes no argument after it for a name.

    >>> words("dice,iou")
    ['dice', 'iou']
    """
    return [word(part) for part in text.split(",")]


def path(text: str) -> str:
    """The type of an option or argument that is a file or a folder; ``~`` is the user's own, whatever the shell does.

    >>> path("runs/mine"), path("~/runs").startswith("~")
    ('runs/mine', False)
    """
    if not text or "\0" in text:
        found = "an empty text" if not text else quoted(text)
        raise argparse.ArgumentTypeError(f"expected a path, found {found}")
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def devices(text: str) -> str:
    """The type of ``--devices``: how many, or which.

    >>> devices("2"), devices("0,3"), devices("auto")
    ('2', '0,3', 'auto')
    """
    if not re.fullmatch(r"auto|-1|[1-9]\d{0,3}|\d{1,4},|\d{1,4}(,\d{1,4}){1,63}", text):
        raise argparse.ArgumentTypeError(f"expected how many devices, or which, such as 2 or 0,3, found {quoted(text)}")
    return text


def add_json(parser: Any) -> None:
    """``--json [FILE]``."""
    meaning = "print the results as JSON instead, or also write them to FILE.json"
    parser.add_argument("--json", nargs="?", const="-", type=path, metavar="FILE", help=meaning)


def add_device(parser: Any, default: str) -> None:
    """``--device KIND``."""
    meaning = f"cpu, cuda, cuda:1, mps … (default: {default})"
    parser.add_argument("--device", type=word, metavar="KIND", help=meaning)


def add_limit(parser: Any) -> None:
    """``--max-pixels N``, which ``main`` puts into the environment: for commands that read images."""
    meaning = f"refuse images with more pixels per slice, or {limits.SLICES} N per file (default: {limits.DEFAULT})"
    parser.add_argument(limits.OPTION, metavar="N", help=meaning)


def placed(device: str) -> dict[str, str]:
    """A device as arguments of Lightning's trainer.

    >>> placed("cpu"), placed("cuda:1")
    ({'accelerator': 'cpu'}, {'accelerator': 'cuda', 'devices': '1,'})
    """
    found = re.fullmatch(r"([A-Za-z]{1,20})(?::(\d{1,4}))?", device, re.ASCII)
    if not found:
        expected = "a kind and perhaps a number, such as cpu or cuda:1"
        raise ConfigError(f"--device: expected {expected}, found {quoted(device)}")
    kind, index = found.groups()
    return {"accelerator": kind, **({} if index is None else {"devices": f"{index},"})}


def regular(arguments: Sequence[str]) -> list[str]:
    """Options in the form that parsers know: dashes in names, and a file of --json only where one is meant.

    >>> regular(["evaluate", "--json", "runs/demo", "--batch_size", "4"])
    ['evaluate', '--json=-', 'runs/demo', '--batch-size', '4']
    >>> regular(["data", "check", "--json", "found.json", "scans_2/"])
    ['data', 'check', '--json=found.json', 'scans_2/']
    """
    found, left = [], list(arguments)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        if key.startswith("--") and "." not in key:
            word = _RENAMED.get(key, key.replace("_", "-")) + equals + value
        if word == "--json":
            file = left and (left[0] == "-" or left[0].endswith(".json"))
            word = f"--json={left.pop(0) if file else '-'}"
        found.append(word)
    return found


# -- settings ---------------------------------------------------------------------------------------------------------


def divide(arguments: Sequence[str], own: Collection[str] = ()) -> tuple[list[str], list[str], list[str]]:
    """What a command declares itself, the settings, which :func:`ambiseg.config.parse` understands, and notes.

    Args:
        own: options of the command. Any other without a dot is a setting if its key ends so, and no other's does.

    >>> divide(["train", "--seed=3", "--data.root", "scans/", "my.yaml", "--quiet"], ["--quiet"])
    (['train', 'my.yaml', '--quiet'], ['--seed=3', '--data.root', 'scans/'], [])
    >>> divide(["train", "demo", "--batch-size", "8"])
    (['train', 'demo'], ['--data.batch_size', '8'], ['--batch-size is --data.batch_size'])
    """
    mine, settings, notes, left = [], [], [], list(arguments)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or key in own:
            mine.append(word)
            continue
        if "." not in key and key[2:] not in SECTIONS:
            ends = [f"--{end}" for end in keys_ending(key[2:].replace("-", "_"), known_settings())]
            if not ends:
                mine.append(word)  # the parser says what it may be
                continue
            if len(ends) > 1:
                raise ConfigError(f"{key}: expected {' or '.join(ends)}, found only the end of them")
            notes.append(f"{key} is {ends[0]}")
            word = ends[0] + equals + value
        settings.append(word)
        if not equals and left and not left[0].startswith("--"):
            settings.append(left.pop(0))
    return mine, settings, notes


# -- results ----------------------------------------------------------------------------------------------------------


def emit(arguments: argparse.Namespace, content: Mapping[str, Any] | Sequence[Any] | str) -> bool:
    """Print or write results as ``--json`` asks; whether the usual text is to be printed.

    Args:
        content: what JSON is made of, or JSON.
    """
    if arguments.json is None:
        return not getattr(arguments, "quiet", False)
    text = content if isinstance(content, str) else json.dumps(plain(content), indent=1, ensure_ascii=False)
    if arguments.json == "-":
        print(text.rstrip("\n"))
        return False
    from ambiseg._util.files import write_text

    write_text(arguments.json, text.rstrip("\n") + "\n")
    return not getattr(arguments, "quiet", False)


def check_json(arguments: argparse.Namespace) -> None:
    """An error before anything is computed, if the file of ``--json`` cannot be written."""
    if arguments.json not in (None, "-"):
        check_file(Path(arguments.json))


def check_file(target: Path) -> None:
    """The same for any file that a command is to write."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: expected a folder to write into, found none named {target.parent}")
    if target.is_dir():
        raise ConfigError(f"{target}: expected a file to write, found a folder")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{target}: expected a file to write, found a device or a pipe")
    if not os.access(target.absolute().parent, os.W_OK):
        raise ConfigError(f"{target}: expected a folder that can be written to, found that {target.parent} cannot")


def plain(value: Any) -> Any:
    """As JSON has it: paths are texts, and what is no number is null.

    >>> plain({"run": Path("runs/a"), "val_ged": float("nan")})
    {'run': 'runs/a', 'val_ged': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
