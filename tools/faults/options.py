"""Values on the command line: every setting, every option of every command, and paths."""

from __future__ import annotations

import argparse
import json
from typing import Any

from faults.commands import Place, Step, quiet
from faults.corpus import SHAPES, TINY
from faults.judge import Command
from faults.mutate import INTEGERS, NUMBERS, TEXTS, value

# Large values of these are work that somebody may want, processes or other machines; a campaign waits for none of it.
_LARGEST = {
    **dict.fromkeys(("epochs", "windows", "samples", "per-stratum", "minutes", "cases", "count"), 40),
    **dict.fromkeys(("devices", "workers"), 2),
    **dict.fromkeys(("num_nodes", "num-nodes"), 1),
}
_NEVER = ("--help", "--version", "--open", "--settings", "--recipes", "--device", "--accelerator")


def text(place: Place, key: str, words: list[str]) -> str:
    """A value as it is typed."""
    rng = place.rng
    kind = rng.random()
    if words and kind < 0.3:
        return rng.choice(words)
    if kind < 0.6:
        found: Any = rng.choice([*INTEGERS, *range(-2, 12)])
    elif kind < 0.75:
        found = rng.choice(NUMBERS)
    elif kind < 0.9:
        found = rng.choice(TEXTS)
    else:
        found = json.dumps(value(rng))[:5000]
    largest = next((most for end, most in _LARGEST.items() if key.endswith(end)), float("inf"))
    if isinstance(found, int | float) and found > largest:
        found = rng.choice([0, -1, 1, largest, 0.5, "x", float("nan")])
    return str(found).replace("\0", "").replace("\ud800", "")


def settings(place: Place) -> list[Step]:
    """One to three settings of a training."""
    from ambiseg.cli.options import known_settings

    known = known_settings()
    words = list[str]()
    for key in place.rng.sample(list(known), place.rng.choice([1, 1, 2, 3])):
        words.append(f"--{key}={text(place, key, known[key])}")
    if place.rng.random() < 0.35:
        return [Command(["train", "demo", "--print-config", *SHAPES, *TINY, *words, *quiet(place)])]
    if place.rng.random() < 0.1:
        place.copy(place.corpus.made / "run", "run")
        return [Command(["train", "--resume", "run", "--trainer.epochs", "2", *words, *quiet(place)], ("run",))]
    name = "demo" if place.rng.random() < 0.03 else "train"
    command = ["demo"] if name == "demo" else ["train", "demo"]
    return [Command([*command, "--out", "new", *SHAPES, *TINY, *words, *quiet(place)], ("new",))]


def options(place: Place) -> list[Step]:
    """One or two options of any command."""
    base, writes = _base(place)
    parser = _parser(base)
    known = [action for action in parser._actions if action.option_strings and action.option_strings[0] not in _NEVER]
    known = [action for action in known if action.option_strings[0] not in base]
    words = list(base)
    for action in place.rng.sample(known, min(len(known), place.rng.choice([1, 1, 2]))):
        option = action.option_strings[-1]
        if option in ("--json", "--html", "--out"):
            page = option == "--html" or (base[0] == "report" and option == "--out")
            words += [option, file := "page.html" if page else f"{option[2:]}.json"]
            writes = (*writes, file, "out.csv", "page-figures")
        elif action.nargs == 0:
            words.append(option)
        else:
            several = {"+": place.rng.choice([1, 2, 3]), "*": 2, 2: 2}.get(action.nargs or 1, 1)
            if option == "--set":
                words += [
                    option,
                    f"{place.rng.choice(['count', 'size', 'readers', 'seed', 'x'])}={text(place, 'set', [])}",
                ]
            else:
                choices = [text(place, option, [str(c) for c in action.choices or ()]) for _ in range(several)]
                words += [f"{option}={choices[0]}"] if several == 1 else [option, *choices]
    return [
        Command(
            words,
            writes,
            writes if base[0] == "data" and base[1] == "check" else (),
            lines=50 if base[0] == "predict" else 1,
        )
    ]


def _base(place: Place) -> tuple[list[str], tuple[str, ...]]:
    made = place.corpus.made
    image, data = str(made / "data" / "images" / "shape-00000.png"), str(made / "data")
    which = place.rng.randrange(9)
    if which == 0:
        return ["predict", str(made / "run"), image, "--out", "out"], ("out",)
    if which == 1:
        place.copy(made / "run", "run")
        return ["evaluate", "run"], tuple(
            f"run/evaluation-{p}.{s}" for p in ("test", "val", "train") for s in ("json", "csv")
        )
    if which == 2:
        place.copy(made / "run", "run")
        return ["report", "run", "--cases", "0"], ("run",)
    if which == 3:
        return ["data", "check", str(place.corpus.kinds / "png")], ()
    if which == 4:
        return ["data", "split", place.rng.choice([data, "shapes"]), "--out", "parts.json"], ("parts.json",)
    if which == 5:
        return ["data", "export", place.rng.choice([data, "shapes", "nodules"]), "--out", "exported", "--count", "3"], (
            "exported",
        )
    if which == 6:
        return ["data", "prepare", "lidc", str(place.corpus.lidc / "pickle" / "data_lidc.pickle"), "--out", "store"], (
            "store",
        )
    if which == 7:
        return ["evaluate", "--predictions", str(made / "masks"), "--truth", data], ()
    return ["train", "auto", "--data.root", data, "--print-config"], ()


def _parser(base: list[str]) -> argparse.ArgumentParser:
    from ambiseg.cli import parser, subparsers

    found: Any = parser()
    for word in base:
        below = subparsers(found)
        if word not in below:
            break
        found = below[word]
    return found


_PATHS = ["", ".", "..", "/", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "/nowhere", "nowhere/x",
          "a\nb", "[/b]", "-", "~", "file",
          "folder", "x" * 300, "/proc/1/root", "folder/", "file/x", "\udcff", "shapes", "demo", "sample",
          "module:Class", "os:mkdir", "http://x/y.png"]  # fmt: skip


def paths(place: Place) -> list[Step]:
    """A place that is none, where a file or folder is expected."""
    rng, made = place.rng, place.corpus.made
    (place.work / "file").write_text("x")
    (place.work / "folder").mkdir()
    one, data, run = rng.choice(_PATHS), str(made / "data"), str(made / "run")
    image = f"{data}/images/shape-00000.png"
    commands = [
        ["data", "check", one],
        ["data", "check", data, "--json", one],
        ["data", "check", data, "--html", one],
        ["data", "split", one, "--out", "parts.json"],
        ["data", "split", data, "--out", one],
        ["data", "split", data, "--out", "parts.json", "--extend", one],
        ["data", "export", one, "--out", "exported"],
        ["data", "export", "shapes", "--set", "count=3", "--set", "size=16", "--out", one],
        ["data", "prepare", "lidc", one, "--out", "store"],
        ["data", "prepare", "lidc", str(place.corpus.lidc / "pickle" / "data_lidc.pickle"), "--out", one],
        ["train", one, "--out", "new"],
        ["train", "demo", "--out", one, *SHAPES, *TINY],
        ["train", "--resume", one],
        ["train", "auto", "--data.root", one, "--out", "new"],
        ["evaluate", one],
        ["evaluate", "--predictions", one, "--truth", data],
        ["evaluate", "--predictions", str(made / "masks"), "--truth", one],
        ["evaluate", "--predictions", str(made / "masks"), "--truth", data, "--out", one],
        ["predict", one, image, "--out", "out"],
        ["predict", run, one, "--out", "out"],
        ["predict", run, image, "--out", one],
        ["predict", run, image, "--out", "out", "--extra", one],
        ["report", one],
        ["demo", "--out", one, "--trainer.epochs=0"],
    ]
    words = rng.choice(commands)
    # Anything may be written below the place that was named, and nowhere else.
    writes = ("parts.json", "exported", "store", "new", "out")
    named = one.rstrip("/") not in ("", ".", "..")
    one = "../home" if one == "~" else one
    writes = (*writes, one, f"{one}.csv", f"{one}.json", "runs") if named else (".",)
    lines = 50 if words[0] == "predict" else 1
    if words[0] == "train" and one in ("demo", "shapes", "sample") and words[1] == one:
        words = [*words, "--print-config"]
    return [Command([*words, *quiet(place)], writes, lines=lines)]


def plain(place: Place) -> list[Step]:
    """Commands that read nothing."""
    rng = place.rng
    words = rng.choice(
        [["completion", rng.choice(["bash", "zsh", "fish", "x", ""])], ["data", "list"], ["data", "list", "--json"],
        ["--version"], ["--help"], [],
         ["train", "--settings"], ["train", "--recipes"], ["data"], ["x"], ["--x"], ["train"], ["evaluate"],
         ["predict"], ["predict", "--help"]]
    )  # fmt: skip
    return [Command(words)]
