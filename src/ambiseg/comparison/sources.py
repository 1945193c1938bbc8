"""What is compared: runs, several seeds of one method, evaluations of mask files; each scored in the same settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import made
from ambiseg._util.terminal import say
from ambiseg.comparison.scores import Entry, setting_of
from ambiseg.evaluation import evaluate, evaluation_path, saved_evaluation
from ambiseg.evaluation.results import Evaluation
from ambiseg.metrics import PROTOCOLS
from ambiseg.runs import Run, Which, is_shipped, open_run

Place = str | os.PathLike[str]


@dataclass(frozen=True)
class Source:
    """A method by its name, and the runs or evaluation files of its seeds as they were given."""

    name: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class Scored:
    """An entry with what it was made of: a run for each seed, or ``None`` of an evaluation file."""

    entry: Entry
    runs: tuple[Run | None, ...]

    @property
    def run(self) -> Run | None:
        """The run of the first seed."""
        return self.runs[0]


def sources_of(given: Sequence[Place] | Mapping[str, Place | Sequence[Place]]) -> list[Source]:
    """The methods of ``RUN`` and ``NAME=RUN,RUN`` arguments; a run without a name has that of its folder.

    >>> [(one.name, one.places) for one in sources_of(["runs/a", "ours=runs/b,runs/c"])]
    [('a', ('runs/a',)), ('ours', ('runs/b', 'runs/c'))]
    >>> [one.name for one in sources_of(["x/run", "y/run", "y/run"])]
    ['x/run', 'y/run', 'y/run (2)']
    """
    if isinstance(given, Mapping):
        listed = [(name, [one] if isinstance(one, (str, os.PathLike)) else list(one)) for name, one in given.items()]
        return [Source(name, tuple(os.fspath(place) for place in places)) for name, places in listed]
    found = [_parsed(os.fspath(one)) for one in given]
    short = [name or _short(places[0]) for name, places in found]
    long = [
        name if short.count(name) == 1 or found[i][0] else found[i][1][0].rstrip("/") for i, name in enumerate(short)
    ]
    seen: dict[str, int] = {}
    sources = []
    for i, name in enumerate(long):
        seen[name] = seen.get(name, 0) + 1
        again = seen[name] > 1
        if seen[name] > 1 and found[i][0]:
            raise ConfigError(f"{name}: expected each name once, found it twice")
        sources.append(Source(f"{name} ({seen[name]})" if again else name, found[i][1]))
    return sources


def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        return "", (text,)
    places = tuple(os.path.expanduser(place) for place in rest.split(",") if place)
    if not name.strip() or not places:
        raise ConfigError(f"compare: expected RUN or NAME=RUN,RUN, found {text!r}")
    return name.strip(), (rest,) if Path(rest).exists() else places


def _short(place: str) -> str:
    path = Path(place)
    if path.suffix == ".json":
        return path.absolute().parent.name if path.stem.startswith("evaluation") else path.stem
    return path.name or path.resolve().name or place


def open_sources(sources: Sequence[Source], split: str) -> list[list[Run | Evaluation]]:
    """Runs and evaluations of each source; an error before anything is computed, if they are of different images."""
    found: list[list[Run | Evaluation]] = []
    for source in sources:
        found.append([])
        for place in source.places:
            if Path(place).is_file():
                found[-1].append(Evaluation.load(place))
                continue
            run = open_run(place)
            if split not in (parts := run.split.parts):
                raise ConfigError(f"{run.folder / 'split.json'}: expected part {split!r}, found {', '.join(parts)}")
            found[-1].append(run)
    runs = [one for some in found for one in some if isinstance(one, Run)]
    for run in runs[1:]:
        mine, first = (set(one.split.parts[split]) for one in (run, runs[0]))
        if odd := sorted(mine ^ first):
            lacks, has = (run, runs[0]) if odd[0] in first else (runs[0], run)
            images = f"the {len(has.split.parts[split])} images of {has.folder} in part {split}"
            raise ConfigError(f"{lacks.folder}: expected {images}, found no {odd[0]!r}")
    return found


@dataclass(frozen=True)
class Rules:
    """How everything is scored."""

    split: str
    samples: tuple[int, ...]
    which: Which
    symmetries: int
    protocol: str | None

    def suits(self, found: Evaluation) -> bool:
        """Whether an evaluation has all that is asked for."""
        same = (found.split, found.which, found.symmetries) == (self.split, self.which, self.symmetries)
        weighted = PROTOCOLS[found.protocol].matching == "transport" and found.strata is not None
        forms = ("standard", "compact") if weighted else ("standard",)
        there = all(setting_of(found, form, n) for form in forms for n in self.samples)
        return same and there and self.protocol in (None, found.protocol)


def score_sources(
    sources: Sequence[Source],
    opened: Sequence[Sequence[Run | Evaluation]],
    rules: Rules,
    out: Path,
    data: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> list[Scored]:
    """Every source with its evaluations; runs that have none of these settings are evaluated.

    A new evaluation is saved in the run's folder where none is, and in ``out`` otherwise: nothing is overwritten.
    """
    entries = []
    for source, parts in zip(sources, opened, strict=True):
        for place, part in zip(source.places, parts, strict=True):
            if isinstance(part, Evaluation):
                _check_file(place, part, rules)  # before anything is computed
    for source, parts in zip(sources, opened, strict=True):
        found = []
        for place, part in zip(source.places, parts, strict=True):
            if isinstance(part, Run):
                part = _evaluated(place, part, rules, out, data, quiet)
            found.append(part)
        runs = tuple(part if isinstance(part, Run) else None for part in parts)
        entries.append(Scored(Entry(source.name, tuple(found)), runs))
    return entries


def _check_file(place: str, found: Evaluation, rules: Rules) -> None:
    if found.which != "files" and found.split != rules.split:
        raise ConfigError(f"{place}: expected an evaluation of split {rules.split}, found {found.split}")
    for n in rules.samples:
        if setting_of(found, "standard", n) is None:
            has = [str(setting.samples) for setting in found.settings if setting.form != "compact"]
            expected = f"expected {n} masks per image as for the others, found {', '.join(has)}"
            raise ConfigError(f"{place}: {expected}; --samples {' '.join(has)} compares at equal numbers")


def _evaluated(
    place: str, run: Run, rules: Rules, out: Path, data: Mapping[str, Any] | None, quiet: bool
) -> Evaluation:
    saved = saved_evaluation(run, rules.split)
    if saved is not None and rules.suits(saved):
        return saved
    settings = (run.digest(rules.which), rules.split, rules.which, rules.symmetries, rules.protocol, rules.samples)
    key = hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()
    own = out / "evaluations" / f"{key}.json"
    if own.is_file():
        return Evaluation.load(own, rules.split)
    if not quiet:
        say(f"evaluating {place}")
    found = evaluate(
        run,
        rules.split,
        rules.samples,
        protocol=rules.protocol,
        which=rules.which,
        symmetries=rules.symmetries,
        data=data,
        quiet=quiet,
    )
    usual = evaluation_path(run, rules.split)
    plain = rules.which == "best" and rules.symmetries == 1 and found.protocol == run.config.evaluation.protocol
    if plain and not usual.exists() and not is_shipped(place) and os.access(run.folder, os.W_OK):
        found.save(usual)
    else:
        with made(own.parent):
            found.save(own)
    return found
