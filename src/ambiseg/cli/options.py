"""What several commands have in common: options of one name and form, settings by the end of their key, JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ambiseg._util import limits
from ambiseg._util.errors import ConfigError
from ambiseg._util.text import keys_ending

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


def add_json(parser: Any) -> None:
    """``--json [FILE]``."""
    meaning = "print the results as JSON instead, or also write them to FILE.json"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=meaning)


def add_device(parser: Any, default: str) -> None:
    """``--device KIND``."""
    meaning = f"cpu, cuda, cuda:1, mps … (default: {default})"
    parser.add_argument("--device", metavar="KIND", help=meaning)


def add_limit(parser: Any) -> None:
    """``--max-pixels N``, which ``main`` puts into the environment: for commands that read images."""
    meaning = f"refuse images with more pixels per slice, or {limits.SLICES} N per file (default: {limits.DEFAULT})"
    parser.add_argument(limits.OPTION, metavar="N", help=meaning)


def placed(device: str) -> dict[str, str]:
    """A device as arguments of Lightning's trainer.

    >>> placed("cpu"), placed("cuda:1")
    ({'accelerator': 'cpu'}, {'accelerator': 'cuda', 'devices': '1,'})
    """
    kind, colon, index = device.partition(":")
    if colon and not index.isdigit():
        raise ConfigError(f"--device: expected a kind and perhaps a number, such as cpu or cuda:1, found {device!r}")
    return {"accelerator": kind, **({"devices": f"{index},"} if colon else {})}


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
