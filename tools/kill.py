"""Stops every command before and after its file operations, and looks at what a user finds.

    python tools/kill.py --count 200 --seed 1
    python tools/kill.py --fault error --only train predict
    python tools/kill.py --one "train kill 17 after"

A command is run once undisturbed while its file operations are listed. Then it is run again and again from the same
state, and at one of them

- ``kill``: all its processes are killed;
- ``twice``: the same, and the command that its user types next is killed as well;
- ``error``: the operation fails: a full disk, a damaged one, or a lack of permission;
- ``signal``: SIGINT, SIGTERM or SIGHUP arrives;
- ``pair``: the same command is started a second time.

Whatever is visible then must be whole. After that comes what a user would type next. It must succeed, and everything
in the folder, the cache and the temporary folder must be as without the fault. Exit code: 0 if it always was, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from faults.bench import BY_NAME, ERRORS, FAILING, FAULTS, SIGNALS, Bench, Outcome, Trial, general  # noqa: E402
from faults.scenarios import SCENARIOS, Scenario, Workshop, import_everything, workshop  # noqa: E402
from faults.trace import Hanging, Operation, cannot  # noqa: E402

# -- campaigns --------------------------------------------------------------------------------------------------------


def points(operations: Sequence[Operation], rng: random.Random) -> Iterator[int]:
    """Numbers of operations without end: one of each kind and file first, then the others."""
    while True:
        order = list(range(len(operations)))
        rng.shuffle(order)
        kinds = Counter[str]()
        ranked = list[tuple[int, int]]()
        for number in order:
            kind = general(str(operations[number]))
            ranked.append((kinds[kind], number))
            kinds[kind] += 1
        yield from (number for _, number in sorted(ranked, key=lambda pair: pair[0]))


def trials(name: str, fault: str, operations: Sequence[Operation], rng: random.Random) -> Iterator[Trial]:
    """Faults of one kind in one scenario, without end."""
    for number in points(operations, rng):
        kind = operations[number].name
        if fault == "error":
            named = [*ERRORS] if kind in BY_NAME else ["ENOSPC", "EIO"]
            if kind not in FAILING:
                continue
            yield Trial(name, fault, number, rng.choice(named))
        elif fault == "signal":
            yield Trial(name, fault, number, rng.choice([*SIGNALS]))
        else:
            second = rng.randrange(max(1, len(operations) * 2 // 3)) if fault == "twice" else -1
            yield Trial(name, fault, number, rng.choice(["before", "after"]), second)


class Campaign:
    """Trials of several scenarios.

    Attributes:
        outcomes: of all trials so far.
        wrong: what is wrong without any fault, by scenario.
    """

    def __init__(self, shop: Workshop, scenarios: Mapping[str, Scenario], log: bool) -> None:
        self.shop, self.scenarios, self.log = shop, scenarios, log
        self.outcomes, self.wrong = list[Outcome](), dict[str, list[str]]()
        self._began = time.monotonic()

    def run(self, faults: Sequence[str], count: int, seed: int, fresh: float) -> None:
        """So many trials, divided by the scenarios' weights, faults in turn."""
        whole, passed, done = sum(one.weight for one in self.scenarios.values()), 0.0, 0
        for name, scenario in self.scenarios.items():
            passed += scenario.weight
            todo, done = round(count * passed / whole) - done, round(count * passed / whole)
            if todo:
                self._disturb(name, scenario, faults, todo, random.Random(f"{seed} {name}"), fresh)

    def _disturb(
        self, name: str, scenario: Scenario, faults: Sequence[str], count: int, rng: random.Random, fresh: float
    ) -> None:
        try:
            bench = Bench(self.shop, scenario)
        except (Hanging, RuntimeError) as error:
            self.wrong[name] = [str(error)]
            self._say(f"{name}: {error}")
            return
        if problems := bench.undisturbed():
            self.wrong[name] = problems
        self._say(f"{name}: {len(bench.operations)} operations, {count} faults", *problems)
        sources = [trials(name, fault, bench.operations, rng) for fault in faults]
        for number in range(count):
            self.outcomes.append(outcome := bench.run(next(sources[number % len(sources)]), rng.random() < fresh))
            if outcome.problems:
                self._say(_failure(outcome))

    def _say(self, text: str, *problems: str) -> None:
        if self.log:
            lines = [f"[{time.monotonic() - self._began:5.0f} s] {text}", *(f"    undisturbed: {p}" for p in problems)]
            print("\n".join(lines), file=sys.stderr, flush=True)

    def report(self, **about: Any) -> str:
        """All of it as JSON."""
        rows = [{**vars(one), "trial": str(one.trial)} for one in self.outcomes]
        return json.dumps({**about, "undisturbed": self.wrong, "trials": rows}, indent=1) + "\n"


def _failure(outcome: Outcome) -> str:
    lines = [f"FAILED {outcome.trial} ({outcome.operation})", *(f"    {line}" for line in outcome.problems[:6])]
    return "\n".join(lines + [f"    and {len(outcome.problems) - 6} more"] * (len(outcome.problems) > 6))


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by scenario and fault."""
    rows = Counter((one.trial.scenario, one.trial.fault) for one in outcomes)
    lines = [f"{'command':26s}{'fault':8s}{'tried':>7s}{'struck':>8s}{'failed':>8s}"]
    for (scenario, fault), tried in rows.items():
        of = [one for one in outcomes if (one.trial.scenario, one.trial.fault) == (scenario, fault)]
        struck, failed = sum(one.struck for one in of), sum(bool(one.problems) for one in of)
        lines.append(f"{scenario:26s}{fault:8s}{tried:7d}{struck:8d}{failed:8d}")
    struck, failed = sum(one.struck for one in outcomes), sum(bool(one.problems) for one in outcomes)
    lines.append(f"{'all':34s}{len(outcomes):7d}{struck:8d}{failed:8d}")
    if again := sum(one.again for one in outcomes):
        lines.append(f"{again} of them were killed twice")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="faults in all (default: 200)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="another seed chooses others (default: 1)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, metavar="COMMAND", help=", ".join(SCENARIOS))
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=["kill"], help="in turn (default: kill)")
    parser.add_argument("--fresh", type=float, default=0.0, metavar="SHARE", help="in new interpreters (default: 0)")
    parser.add_argument("--one", metavar="TRIAL", help='repeat one, as printed: "train kill 17 after"')
    parser.add_argument("--list", action="store_true", help="the operations of the commands, and stop")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to work (default: the temporary folder)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all outcomes as JSON")
    parser.add_argument("--quiet", action="store_true", help="the table only")
    chosen = parser.parse_args(arguments)
    if reason := cannot():
        print(f"kill.py: {reason}", file=sys.stderr)
        return 2
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")  # no threads before a fork
    import_everything()
    with workshop(chosen.folder) as shop:
        if chosen.one:
            trial = Trial.parse(chosen.one)
            outcome = Bench(shop, SCENARIOS[trial.scenario]).run(trial)
            print(_failure(outcome) if outcome.problems else f"ok {trial} ({outcome.operation})")
            if outcome.said:
                print(outcome.said)
            return int(bool(outcome.problems))
        scenarios = {name: SCENARIOS[name] for name in chosen.only or SCENARIOS}
        if chosen.list:
            for name, scenario in scenarios.items():
                for number, operation in enumerate(Bench(shop, scenario).operations):
                    print(f"{name} {number}: {operation}")
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        campaign = Campaign(shop, scenarios, not chosen.quiet)
        try:
            campaign.run(chosen.fault, chosen.count, chosen.seed, chosen.fresh)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    print(table(campaign.outcomes))
    failed = [one for one in campaign.outcomes if one.problems]
    if chosen.quiet:
        lines = [_failure(one) for one in failed]
        lines += [f"undisturbed {name}: {line}" for name, of in campaign.wrong.items() for line in of]
        print("\n".join(lines))
    if chosen.out is not None:
        chosen.out.write_text(campaign.report(seed=chosen.seed, faults=chosen.fault), "utf-8")
    return int(bool(failed or campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
