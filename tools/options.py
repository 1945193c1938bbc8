"""Extreme values for every setting and every option of every command: each is used, or refused in one line.

    python tools/options.py [--only train] [--seed 0] [--count 500]

Settings come from the configuration, options from the parsers, so that new ones are tried without being listed here.
Every try is a fork of this process in folders of its own. What it may do is what :mod:`faults.judge` says: exit 0, 1
where that is documented, or 2 with one line and nothing left behind; 30 seconds and 4 GB at most.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update({name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")})

from faults.corpus import SHAPES, TINY
from faults.judge import Command, Ended, judge, snapshot
from faults.run import Sandbox, remove, run, warm

from ambiseg._util.errors import ConfigError

NUMBERS = ["-1", "0", "1", "2", "7", "300", "8192", "1000000", "1000000000000000000", str(2**70), "9" * 5000, "0.5",
           "-0.5", "1e-320", "1e308", "-1e308", "nan", ".nan", "inf", "-.inf"]  # fmt: skip
VALUES = ["", "null", "true", "x", "[]", "[1, 2]", "[4, 4, 4]", "[[1], {a: 2}]", "{a: 1}", "{}", "{values: [1, 2]}",
          "a\nb\x1b[2J\r", "\x00", "é" * 5000, "[" * 3000, f"[{', '.join(['1'] * 3000)}]", "&a [*a]", "[/b]", "%s{0}",
          "this:s", "os:abort_", "sys:exit", "json:loads", "no.such:Thing", "auto", "random", "../up"]  # fmt: skip
PATHS = ["", "~", "~/x", "..", ".", "/", "x" * 300, "d/" * 3000, "a\x00b", "a\nb", "/dev/null", "/proc/self/nothing",
         "file", "folder", "file/below", "-", "new", "none/new", "[/b]", "\udcff", "a:b", "x.json", "run"]  # fmt: skip

# Values that are work which somebody may want, or wait for other machines: these are only read, with --print-config.
ONLY_READ = {
    "trainer.epochs": ("300", "8192", "1000000"),
    "trainer.devices": ("2", "7", "300", "8192", "auto"),
    "trainer.num_nodes": ("2", "7", "300", "8192"),
    "data.windows": ("300", "8192"),
}
BASES: dict[str, list[str]] = {  # arguments that make each command work, by its name
    "demo": ["--out", "new", *SHAPES, *TINY],
    "train": ["demo", "--out", "new", *SHAPES, *TINY],
    "evaluate": ["run", "--samples", "2", "--device", "cpu"],
    "ensemble": ["run", "run", "--out", "new"],
    "compare": ["run", "--samples", "2", "--cases", "1", "--out", "new"],
    "predict": ["run", "image.png", "--out", "new"],
    "report": ["run", "--cases", "1"],
    "study": ["sizes", "--out", "new"],
    "methods": [],
    "data list": [],
    "data check": ["folder"],
    "data split": ["shapes", "--set", "count=12", "--set", "size=32", "--out", "new.json"],
    "data prepare lidc": ["lidc", "--out", "new"],
    "data export": ["shapes", "--set", "size=32", "--out", "new", "--count", "2"],
    "completion": ["bash"],
}
_NEVER = ("--help", "--version", "--open")
_PLACES = ("", "../home", "../tmp", "../cache")  # where a command that ends well may write


class Try(NamedTuple):
    """One call: the command that it is of, what is tried and the value, and all arguments."""

    command: str
    what: str
    value: str
    arguments: list[str]


def settings() -> Iterator[Try]:
    """Every setting with every value, in a training or where it is only read."""
    from ambiseg.config import Config
    from ambiseg.settings import keys

    for key in keys(Config, {"model": {"capacity": {}, "samples": {}}}):
        for value in (*NUMBERS, *VALUES):
            last = ["--print-config"] if value in ONLY_READ.get(key, ()) else []
            yield Try("train", key, value, ["train", *BASES["train"], f"--{key}={value}", *last])


def planned() -> Iterator[Try]:
    """The settings that a plan rests on, with ``train auto``."""
    for key in ("data.size", "data.batch_size", "backbone.scale", "model.samples", "data.intensity", "seed"):
        for value in (*NUMBERS, *VALUES):
            arguments = ["train", "auto", "--print-config", *SHAPES, f"--{key}={value}"]
            yield Try("train auto", key, value, arguments)
    for value in NUMBERS:
        arguments = ["train", "auto", "--print-config", *SHAPES, f"--minutes={value}"]
        yield Try("train auto", "--minutes", value, arguments)


def options() -> Iterator[Try]:
    """Every option and argument of every command with every value; paths where a path is asked for."""
    from ambiseg.cli import parser
    from ambiseg.cli.completion import _FILES

    for path, command in _leaves(parser()):
        words = path.split()
        for action in command._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if action.option_strings and (not names or names[-1] in _NEVER):
                continue
            values = PATHS if str(action.metavar) in _FILES else [*NUMBERS, *VALUES]
            values = [*values, *(str(choice) for choice in action.choices or ())]
            base = BASES[path]
            for value in ["1"] if action.nargs == 0 else values:
                if not names:  # an argument: it takes the place of the first
                    yield Try(path, str(action.metavar), value, [*words, value, *base[1:]])
                elif action.nargs == 0:
                    yield Try(path, names[-1], "", [*words, *base, names[-1]])
                elif isinstance(action.metavar, tuple):
                    yield Try(path, names[-1], value, [*words, *base, names[-1], value, value])
                elif action.dest == "options":
                    for key in ("size", "count", "seed", "readers", "noise", "unknown"):
                        rest = ["--count", "2"] if path == "data export" else []
                        given = [*words, base[0], "--set", f"{key}={value}", "--out", "new.json", *rest]
                        yield Try(path, f"--set {key}", value, given)
                else:
                    yield Try(path, names[-1], value, [*words, *base, f"{names[-1]}={value}"])
    shares = ["", "=", "train", "train=", "train=nan", "train=-1", "train=2", "train=1", "a/b=1", "train=0.5 train=0.5"]
    for value in (*shares, "train=0.5 val=0.5 test=0.5", "train=1e308 val=inf", "train=0.7 val=0.3", "\n=1"):
        yield Try(
            "data split",
            "--fractions",
            value,
            ["data", "split", *BASES["data split"], "--fractions", *value.split(" ")],
        )


def _leaves(of: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    from ambiseg.cli import subparsers

    for name, below in subparsers(of).items():
        inner = f"{path} {name}".strip()
        if subparsers(below):
            yield from _leaves(below, inner)
        else:
            yield inner, below


def _furnish(sandbox: Sandbox, corpus: Path | None) -> None:
    """What tries find in the folder that they run in."""
    sandbox.clear()
    if corpus is not None:
        shutil.copytree(corpus, sandbox.work, dirs_exist_ok=True)


def _corpus(folder: Path, entry: Any) -> Path:
    """A run, a folder of data, an image and a file, made once by the commands themselves."""
    sandbox = Sandbox(folder / "corpus")
    sandbox.clear()
    for arguments in (
        ["train", "demo", "--out", "run", "--quiet", *SHAPES, *TINY],
        ["data", "export", "shapes", "--set", "size=32", "--out", "folder", "--count", "4", "--quiet"],
    ):
        ended = run(arguments, sandbox, entry)
        if ended.code:
            raise SystemExit(f"{' '.join(arguments)}: {ended.err}")
    made = sandbox.work
    shutil.copy(next((made / "folder" / "images").iterdir()), made / "image.png")
    (made / "file").write_text("not what was expected\n")
    (made / "lidc").mkdir()
    return made


def _screened(tries: list[Try], sandbox: Sandbox, counts: Counter[str]) -> list[Try]:
    """Many tries in one fork, up to where settings and options are read: what is refused there is judged there.

    Returns the others, which are to be run, and of those that mean the same one.
    """
    _furnish(sandbox, None)
    before = snapshot(sandbox.root)
    ended = run(["screen"], sandbox, lambda: _read_all(tries))
    after = snapshot(sandbox.root)
    if left_behind := [path for path in after if before.get(path) != after[path] and not path.startswith("home")]:
        print(f"reading {len(tries)} tries left {left_behind[0]}", flush=True)  # logs of faults are judged below
        counts["failed"] += 1
    left, seen = list[Try](), set[str]()
    for number, one in enumerate(tries):
        told = sandbox.printed / str(number)
        content = told.read_text(encoding="utf-8", errors="replace") if told.exists() else None
        told.unlink(missing_ok=True)
        code, _, text = ("", "", "") if content is None else content.partition("\n")
        if code == "2":
            refused = Ended(2, err=text)
            _count(one, refused, judge(Command(one.arguments), refused, sandbox.root, after), counts)
        elif not text or text not in seen:
            seen.add(text)
            left.append(one)
        else:
            counts["as another"] += 1
    if ended.code:
        print(f"reading {len(tries)} tries ended with {ended.code} {ended.stopped}", file=sys.stderr, flush=True)
    return left


def _read_all(tries: list[Try]) -> int:
    """In a fork: the exit code and the error, or the settings that were understood, into one file a try."""
    from ambiseg.cli import main, parse

    for number, one in enumerate(tries):
        out, err = io.StringIO(), io.StringIO()
        code: Any = 70
        with redirect_stdout(out), redirect_stderr(err):
            try:
                if one.arguments[0] == "train" and "auto" not in one.arguments and one.what[:2] != "--":
                    code = main([*one.arguments, "--print-config"])
                else:
                    parse(one.arguments)
                    code = ""
            except ConfigError as error:
                print(f"ambiseg: {error}", file=err)
                code = 2
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc(file=err)
        text = err.getvalue() if code == 2 else out.getvalue()
        Path(f"../../printed/{number}").write_text(f"{code}\n{text}", encoding="utf-8", errors="backslashreplace")
    return 0


def _count(one: Try, ended: Ended, faults: list[str], counts: Counter[str]) -> None:
    counts["failed" if faults else f"exit {ended.code}"] += 1
    if faults:
        print(f"{one.command} {one.what}={one.value[:60]!r}: {'; '.join(faults)}")
        print(f"    {ended.err[-400:]!r}", flush=True)


def _campaign(tries: list[Try], place: Path) -> Counter[str]:
    entry, counts = warm(), Counter[str]()
    corpus, sandbox = _corpus(place, entry), Sandbox(place / "try")
    left = [one for at in range(0, len(tries), 200) for one in _screened(tries[at : at + 200], sandbox, counts)]
    print(
        f"{len(tries) - len(left)} refused on reading: {dict(counts)}; {len(left)} to run", file=sys.stderr, flush=True
    )
    for number, one in enumerate(left, 1):
        _furnish(sandbox, corpus)
        before = snapshot(sandbox.root)
        keeps = ("run",) if one.command in ("evaluate", "compare", "report") else ()
        ended = run(one.arguments, sandbox, entry)
        faults = judge(Command(one.arguments, _PLACES, keeps), ended, sandbox.root, before)
        _count(one, ended, faults, counts)
        if number % 100 == 0:
            print(f"{number} of {len(left)}: {dict(counts)}", file=sys.stderr, flush=True)
    return counts


def main() -> int:
    reader = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    reader.add_argument("--only", default="", help="tries whose command and key begin with this, such as 'train data.'")
    reader.add_argument("--seed", type=int, default=0, help="of the order (default: 0)")
    reader.add_argument("--count", type=int, help="so many tries, drawn at random (default: all)")
    reader.add_argument("--folder", type=Path, help="where to (default: a temporary folder)")
    asked = reader.parse_args()
    tries = [one for one in (*settings(), *planned(), *options()) if f"{one.command} {one.what}".startswith(asked.only)]
    random.Random(asked.seed).shuffle(tries)
    tries = tries[: asked.count]
    place = Path(tempfile.mkdtemp(dir=asked.folder))  # a TemporaryDirectory would vanish when the first fork ends
    try:
        counts = _campaign(tries, place)
    finally:
        remove(place)
    print(f"{len(tries)} tries: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
