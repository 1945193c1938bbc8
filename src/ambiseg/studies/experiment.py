"""A study: its members, what of them is there, and what is to be done."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import ambiseg.studies.budgets as budgets
import ambiseg.studies.writing as writing
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import MissingExtra, require
from ambiseg._util.files import atomic_folder, write_text
from ambiseg._util.processes import program
from ambiseg._util.progress import reporting
from ambiseg._util.text import did_you_mean
from ambiseg.config import Config
from ambiseg.data.config import NEEDS_ROOT
from ambiseg.runs import Run
from ambiseg.settings import inline
from ambiseg.studies.definition import SEEDS, MemberDefinition, Scale, find
from ambiseg.studies.fingerprint import changes, differing, fingerprint
from ambiseg.studies.members import AUTO, EPOCHS, Member, Start, resolve, start_of
from ambiseg.studies.results import Row, rows_of, total_hours
from ambiseg.studies.running import Runner, jobs_at_hand
from ambiseg.studies.store import Store, Trial

_METHOD = "model.method"
_PAUSE, _SHARE = 10.0, 20.0  # seconds between two tables while trainings run, and times what one takes


class Study:
    """A study on some data, and what there is of it in a folder. See :func:`ambiseg.study` for the arguments.

    Attributes:
        name, definition: of the study.
        store: the folder of all studies.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        data: str | os.PathLike[str] | None = None,
        *,
        scale: str = "small",
        seeds: int | None = None,
        out: str | os.PathLike[str] = "runs/studies",
        settings: Mapping[str, Any] | None = None,
        base: str | os.PathLike[str] | None = None,
        minutes: float | None = None,
        split: str = "test",
    ) -> None:
        self.asked = os.fspath(name)
        self.name, self.definition = find(name)
        if scale not in self.definition.base:
            known = ", ".join(s for s in get_args(Scale) if s in self.definition.base)
            raise ConfigError(f"--scale: expected one of {known}, found {scale!r}")
        if seeds is not None and not 1 <= seeds <= SEEDS:
            raise ConfigError(f"--seeds: expected 1 to {SEEDS:,}, found {seeds}")
        self.data = None if data is None else os.fspath(data)
        self.scale, self.seeds, self.split = scale, seeds, split
        self.typed = dict(settings or {})
        if "seed" in self.typed:
            raise ConfigError("--seed: expected --seeds N, which trains every member with the seeds 0 to N − 1")
        self.recipe = None if base is None else os.fspath(base)
        self.base = self.definition.base[scale]  # type: ignore[index]
        self.minutes = self.base.minutes if minutes is None else minutes
        self.minutes_asked = minutes
        self.store = Store(Path(out), split)
        self.start: Start = start_of(self.base, self.data, self.recipe)
        self._members: dict[str, Member | None] | None = None
        self._next = 0.0

    @property
    def out(self) -> Path:
        """Where table and page are."""
        return self.store.out / self.name

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> dict[str, Member | None]:
        """The members by name; ``None`` for one whose settings need something that is measured or planned first."""
        if self._members is None:
            rows = self.definition.rows.items()
            self._members = {name: self._member(name, row, prepare=False) for name, row in rows}
        return self._members

    def prepare(self, only: Sequence[str] = (), quiet: bool = False) -> None:
        """Plan and measure what the settings of members need, once for all studies of the folder."""
        chosen = {name for name, _ in self.chosen(only)} if only else set(self.definition.rows)
        todo = [name for name, member in self.members.items() if member is None and name in chosen]
        with reporting("planning and timing members", quiet) as progress:
            for i, name in enumerate(todo):
                progress(i, len(todo))
                self.members[name] = self._member(name, self.definition.rows[name], prepare=True)

    def _member(self, name: str, row: MemberDefinition, prepare: bool) -> Member | None:
        prefix = f"{self.name}, member {name}: "
        layers = [self.definition.settings, row.settings]
        try:
            start = self._planned(row, prepare) if self.start.recipe == AUTO else self.start
            if start is None:
                return None
            config, settings = resolve(start, layers, self.typed, prefix)
            if self.minutes is not None and self.definition.train and EPOCHS not in self.typed:
                key = fingerprint(config)
                seconds = budgets.known(self.store.out).get(key)
                if seconds is None and not prepare:
                    return None
                seconds = seconds or budgets.measured(self.store.out, key, config, name)
                epochs = {EPOCHS: budgets.epochs_for(self.minutes, seconds)}
                config, settings = resolve(start, [*layers, epochs], self.typed, prefix)
        except DataError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(prefix) else f"{prefix}{text}") from None
        seeds = self.seeds or row.seeds or self.definition.seeds
        samples = tuple(self.definition.samples if row.samples is None else row.samples)
        return Member(name, row.title or name, row.note, config, seeds, start.recipe, settings, samples)

    def _planned(self, row: MemberDefinition, prepare: bool) -> Start | None:
        """The plan for the data and the method of a member as a recipe; ``None`` where there is none yet."""
        from ambiseg.planning import MINUTES, plan

        given: dict[str, Any] = {**self.start.settings, **self.definition.settings, **self.typed}
        if _METHOD in row.settings:
            given = {key: value for key, value in given.items() if not key.startswith("model.")}
            given[_METHOD] = row.settings[_METHOD]
        minutes = self.minutes or MINUTES
        root = given.get("data.root")
        known = {**given, "data.root": os.path.realpath(root) if root else None, "minutes": minutes}
        key = hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
        path = self.store.out / "plans" / f"{given.get(_METHOD, 'auto')}-{key}.yaml"
        if not path.is_file():
            if not prepare:
                return None
            planned = plan(settings=given, minutes=minutes).config
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, _recipe(planned))
        return Start(str(path))

    def chosen(self, only: Sequence[str] = ()) -> list[tuple[str, int | None]]:
        """Names of members, or with one seed of each, as ``--only`` gives them."""
        rows, found = self.definition.rows, list[tuple[str, int | None]]()
        for text in only:
            name, colon, seed = text.partition(":")
            if name not in rows:
                raise ConfigError(
                    f"--only: expected some of {', '.join(rows)}, found {name!r}{did_you_mean(name, rows)}"
                )
            if colon and (not seed.isdigit() or int(seed) >= SEEDS):
                raise ConfigError(f"--only: expected MEMBER or MEMBER:SEED, found {text!r}")
            found.append((name, int(seed) if colon else None))
        return found or [(name, None) for name in rows]

    # -- what there is -------------------------------------------------------------------------------------------------

    def trials(self, only: Sequence[str] = ()) -> list[Trial]:
        """All trainings of the members that are ready, the first seeds first, and further seeds that are there."""
        runs, found = self.store.runs(), list[tuple[int, int, Trial]]()
        for i, (name, seed) in enumerate(self.chosen(only)):
            member = self.members[name]
            if member is None:
                continue
            there = {s for fp, s in runs if fp == member.fingerprint} if not only else set()
            seeds = {*range(member.seeds)} | there if seed is None else {seed}
            found += [(one, i, self.store.trial(member, one, runs)) for one in seeds]
        return [trial for _, _, trial in sorted(found, key=lambda one: one[:2])]

    def run(
        self, jobs: int | None = None, only: Sequence[str] = (), retry: bool = False, quiet: bool = False
    ) -> list[Trial]:
        """Train and score what is not there yet, and return the trainings that were asked for."""
        self.chosen(only)  # an error before anything takes time
        if not self.definition.train:
            return []
        if jobs is not None and jobs < 1:
            raise ConfigError(f"--jobs: expected at least 1, found {jobs}")
        if self.start.recipe != AUTO:
            data, _ = resolve(self.start, [self.definition.settings], self.typed)
            if data.data.name in NEEDS_ROOT and data.data.root is None:
                raise ConfigError(
                    f"study {self.name}: expected --data, where the {data.data.name} data are, found none"
                )
        self.prepare(only, quiet)
        trials = self.trials(only)
        if retry:
            for trial in trials:
                if trial.state == "failed":
                    self.store.forgive(trial.member, trial.seed)
        todo = [(t.member, t.seed) for t in trials if t.state != "done" and (retry or t.state != "failed")]
        unique = list({(member.fingerprint, seed): (member, seed) for member, seed in todo}.values())
        if unique:
            self.store.out.mkdir(parents=True, exist_ok=True)
            self.write()
            jobs = jobs or jobs_at_hand(member.config.trainer.accelerator for member, _ in unique)
            Runner(self.store, jobs, quiet, self._changed).run(unique)
        return self.trials(only)

    def adopt(self, runs: Sequence[str | os.PathLike[str]]) -> list[Trial]:
        """Copy runs that were trained elsewhere to where the study looks for the members that they are."""
        self.prepare(quiet=True)
        return [self._adopt(Run(run)) for run in runs]

    def _adopt(self, run: Run) -> Trial:
        ready = [member for member in self.members.values() if member is not None]
        key, seed = fingerprint(run.config), run.config.seed
        member = next((one for one in ready if one.fingerprint == key), None)
        if member is None:
            nearest = min(ready, key=lambda one: len(differing(one.config, run.config)))
            keys = differing(nearest.config, run.config)
            text = "; ".join(
                f"{k} {inline(_value(run.config, k))} instead of {inline(_value(nearest.config, k))}" for k in keys[:3]
            )
            expected = f"a run of a member of {self.name}, found none; nearest is {nearest.name}"
            raise ConfigError(f"{run.folder}: expected {expected}: {text}")
        if (member.fingerprint, seed) not in self.store.runs():
            place = self.store.place(member, seed)
            place.parent.mkdir(parents=True, exist_ok=True)
            with self.store.lock(member, seed), atomic_folder(place, replace=False) as draft:
                shutil.copytree(run.folder, draft, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".ambiseg-*"))
        return self.store.trial(member, seed)

    # -- words ---------------------------------------------------------------------------------------------------------

    def commands(self) -> list[str]:
        """One command per member, to be run in any order, anywhere that sees the data and the folder."""
        return [self.command(name, program()) for name in self.definition.rows]

    def command(self, only: str | None = None, program: str = "ambiseg") -> str:
        """The command of this study, or of one member."""
        words = ["study", self.asked, *(["--data", self.data] if self.data is not None else [])]
        words += ["--scale", self.scale] if self.scale != "small" else []
        words += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        words += ["--base", self.recipe] if self.recipe is not None else []
        words += ["--minutes", f"{self.minutes_asked:g}"] if self.minutes_asked is not None else []
        words += ["--split", self.split] if self.split != "test" else []
        words += ["--out", str(self.store.out)] if self.store.out != Path("runs/studies") else []
        for key, value in self.typed.items():
            words += [f"--{key}", inline(value)]
        words += ["--only", only] if only is not None else []
        return f"{program} {shlex.join(words)}"

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """The table of what is there; see :class:`~ambiseg.studies.results.Row`."""
        return self.results()[0]

    def results(self) -> tuple[list[Row], str, list[Trial]]:
        """The rows, what keeps members from being compared, and the trainings."""
        trials = self.trials()
        return *rows_of(self.definition, self.members, trials, self.seeds), trials

    def to_markdown(self) -> str:
        """The table."""
        return writing.markdown(self.definition, self.rows)

    def write(self) -> Path:
        """Write table and page of what is there, and return the folder."""
        started = time.monotonic()
        rows, trouble, trials = self.results()
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "table.md", writing.markdown(self.definition, rows))
        write_text(self.out / "table.csv", writing.comma_separated(rows))
        write_text(self.out / "table.tex", writing.latex(self.definition, rows))
        write_text(self.out / "study.json", writing.json_text(self.as_json(rows, trouble, trials)))
        with suppress(MissingExtra):  # matplotlib and jinja2: the tables need neither
            require("report")
            from ambiseg.studies.page import page

            write_text(self.out / "index.html", page(self, rows, trouble, trials, self.out))
        now = time.monotonic()
        self._next = now + max(_PAUSE, _SHARE * (now - started))
        return self.out

    def _changed(self) -> None:
        """Write, unless that was done just now."""
        if time.monotonic() >= self._next:
            self.write()

    def as_json(self, rows: Sequence[Row], trouble: str, trials: Sequence[Trial]) -> dict[str, Any]:
        """Everything, for programs."""
        listed = [
            {"member": t.member.name, "seed": t.seed, "run": str(t.folder), "state": t.state, "reason": t.reason}
            for t in trials
        ]
        about = {"study": self.name, "scale": self.scale, "split": self.split, "command": self.command()}
        hours, known = total_hours(trials)
        about |= {"cpu_hours": hours if known else None, "cpu_hours_of": known, "trouble": trouble, "trainings": listed}
        return writing.as_json(self.definition, rows, **about)


def _value(config: Config, key: str) -> Any:
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _recipe(config: Config) -> str:
    """A recipe with the settings of a configuration that are not the method's defaults."""
    import yaml

    content: dict[str, Any] = {}
    for key, value in changes(config).items():
        section, _, name = key.partition(".")
        content.setdefault(section, {})[name] = value
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1 << 16)
