"""What a family is made of: a folder with files to damage, and the commands that are run on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from faults.corpus import TINY, Corpus
from faults.formats import damage
from faults.judge import Command

Step = Command | Callable[[], object]  # a call of ambiseg, or something that happens between two


class Place(NamedTuple):
    """What a family is given: a generator of random numbers, whole files, and the folder that commands run in."""

    rng: Random
    corpus: Corpus
    work: Path

    def copy(self, source: Path, name: str) -> Path:
        """A whole folder or file, to be damaged."""
        target = self.work / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        return target

    def damage(self, path: Path) -> None:
        damage(self.rng, path, self.rng.choice(self.corpus.files))

    def any_file(self, folder: Path) -> Path:
        return self.rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


# -- commands ---------------------------------------------------------------------------------------------------------


def quiet(place: Place) -> list[str]:
    return ["--quiet"] if place.rng.random() < 0.5 else []


def check(place: Place, data: str) -> Command:
    """``data check``, sometimes with a page and JSON."""
    more, writes = quiet(place), tuple[str, ...]()
    if place.rng.random() < 0.4:
        more, writes = [*more, "--json", "check.json"], ("check.json",)
    if place.rng.random() < 0.2:
        more, writes = [*more, "--html", "check.html"], (*writes, "check.html")
    # What was found is written where it was asked for, also when it is that nothing can be read.
    return Command(["data", "check", data, *more], writes=writes, keeps=writes)


def split(place: Place, data: str, *more: str) -> Command:
    return Command(["data", "split", data, "--out", "parts.json", *more, *quiet(place)], ("parts.json",))


def export(place: Place, data: str) -> Command:
    return Command(["data", "export", data, "--out", "exported", *quiet(place)], ("exported",))


def predict(place: Place, *images: str, run: str = "", lines: int = 50) -> Command:
    run = run or str(place.corpus.made / "run")
    more = ["--convert"] if place.rng.random() < 0.5 else []
    more += ["--no-overview"] if place.rng.random() < 0.5 else []
    return Command(["predict", run, *images, "--out", "out", *more, *quiet(place)], ("out",), lines=lines)


def train(place: Place, *settings: str, recipe: str = "demo") -> Command:
    """A training of a second; a run that failed after its first epoch can be taken up again."""
    return Command(["train", recipe, "--out", "new", *settings, *quiet(place)], ("new",))


def auto(place: Place, data: str) -> Command:
    if place.rng.random() < 0.6:
        return Command(["train", "auto", "--data.root", data, "--print-config", *quiet(place)])
    return train(place, "--data.root", data, *TINY, recipe="auto")


def score(place: Place, predictions: str, truth: str) -> Command:
    more = ["--partial"] if place.rng.random() < 0.5 else []
    more += ["--out", "scores.json"] if place.rng.random() < 0.5 else []
    words = ["evaluate", "--predictions", predictions, "--truth", truth, *more, *quiet(place)]
    return Command(words, ("scores.json", "scores.csv") if "--out" in more else ())


def on_data(place: Place, data: str = "data") -> Command:
    """Any command that reads a data folder."""
    made = place.rng.choices(range(5), (5, 2, 2, 2, 1))[0]
    if made == 4:
        return score(place, f"{data}/masks", data) if "." not in data else check(place, data)
    return (check, split, export, auto)[made](place, data)


def on_run(place: Place, run: str = "run", hint: str = "") -> Command:
    """Any command that reads a run; of ``hint``, the file that was damaged, one that reads it."""
    rng, silent = place.rng, quiet(place)
    evaluated = tuple(f"{run}/evaluation-{part}.{suffix}" for part in ("test", "val") for suffix in ("json", "csv"))
    report = Command(["report", run, "--cases", "0", *silent], (f"{run}/report.html", f"{run}/figures", *evaluated))
    resume = ["train", "--resume", run, "--trainer.epochs", "2", *silent]
    choices = [
        Command(["evaluate", run, "--samples", "2", *silent], evaluated),
        predict(place, str(place.corpus.made / "data" / "images" / "shape-00000.png"), run=run),
        Command(resume, (run,)),
        report,
    ]
    if hint.startswith(("last.ckpt", "metrics")) and rng.random() < 0.6:
        return choices[2]
    if hint.startswith("evaluation") and rng.random() < 0.8:
        return report
    if hint.startswith("last.safe"):
        return Command(["evaluate", run, "--samples", "2", "--which", "last", *silent], evaluated)
    return rng.choices(choices, (3, 3, 3, 1))[0]
