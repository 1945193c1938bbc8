"""Give every command damaged, hostile and huge input, and judge what it does.

    python tools/fuzz.py --count 10000 --seed 1 --out report.jsonl    a campaign; the same command continues it
    python tools/fuzz.py --seed 1 --one 1234 --keep /tmp/kept         one input of it again, with its files
    python tools/fuzz.py --count 500 --only run store                 of some families

No command may print a traceback, end with another exit code than 0, 1 or 2, take more than 30 s or 4 GB, leave files
that nobody asked for or half of one, change its input, leave a process, or run anything that is in a file; a refusal is
one line. ``tools/faults/judge.py`` has the rules. A number and a seed make the same input everywhere.

Most commands run in forks of a process that has imported everything; some, by ``--cold``, are started as users do.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults.judge import Command, Limits, judge, snapshot
from faults.run import ONE_THREAD, Entry, Sandbox, remove, run, warm


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--count", type=int, default=300, metavar="N", help="inputs (default: 300)")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="another seed makes other inputs (default: 0)")
    made.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first input (default: 0)")
    made.add_argument("--one", type=int, metavar="N", help="only this input, and print what it did")
    made.add_argument("--only", nargs="+", metavar="FAMILY", help="families whose name begins so")
    made.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default: 1)")
    made.add_argument("--cold", type=float, default=0.01, metavar="P", help="share in processes of their own (0.01)")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="a line of JSON per input; what is there is not run again"
    )
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of inputs that failed here")
    made.add_argument("--corpus", type=Path, metavar="DIR", help="where the whole files are (default: made anew)")
    made.add_argument("--seconds", type=float, default=Limits.seconds, help="that a command may take (default: 30)")
    made.add_argument("--worker", metavar="NUMBERS", help=argparse.SUPPRESS)
    return made.parse_args()


# -- one input --------------------------------------------------------------------------------------------------------


def family_of(number: int, seed: int, only: list[str] | None) -> str:
    """The family of an input: every family comes as often as it asks to, in an order that the seed decides."""
    from faults.families import families

    names = [
        name
        for name, (_, share) in families().items()
        for _ in range(share)
        if not only or name.startswith(tuple(only))
    ]
    if not names:
        raise SystemExit(f"fuzz: --only: expected the start of one of {', '.join(families())}")
    turn, place = divmod(number, len(names))
    return Random(f"{seed}/{turn}").sample(names, len(names))[place]


def tried(number: int, given: argparse.Namespace, corpus: Any, sandbox: Sandbox, entry: Entry) -> dict[str, Any]:
    """Make an input, run its commands and judge each of them."""
    from faults.families import Place, families

    name = family_of(number, given.seed, given.only)
    rng = Random(f"{given.seed}/{number}")
    cold = rng.random() < given.cold
    sandbox.clear()
    steps = families()[name][0](Place(rng, corpus, sandbox.work))
    limits = Limits(seconds=given.seconds)
    outcome: dict[str, Any] = {"number": number, "family": name, "commands": [], "faults": []}
    for step in steps:
        if not isinstance(step, Command):
            step()
            continue
        before = snapshot(sandbox.root)
        ended = run(step.arguments, sandbox, None if cold else entry, limits)
        faults = judge(step, ended, sandbox.root, before, limits)
        typed = shlex.join(["ambiseg", *(word[:300] for word in step.arguments)])
        told = {"typed": typed, "code": ended.code, "seconds": round(ended.seconds, 2), "memory": int(ended.memory)}
        outcome["commands"].append(
            told | ({"err": ended.err[-3000:], "out": ended.out[-1000:]} if faults or given.one is not None else {})
        )
        outcome["faults"] += [f"{step.name}: {fault}" for fault in faults]
    if outcome["faults"] and given.keep:
        kept = given.keep / str(number)
        remove(kept)
        shutil.copytree(sandbox.root, kept, symlinks=True, ignore=_special)
    return outcome


def _special(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied: pipes, and files that only seem large."""
    paths = [Path(folder, name) for name in names]
    odd = [path for path in paths if not path.is_symlink() and not (path.is_file() or path.is_dir())]
    return [path.name for path in (*odd, *(path for path in paths if path.is_file() and path.stat().st_size > 1 << 30))]


def worker(given: argparse.Namespace) -> None:
    """Try the inputs whose numbers are in the file; print a line of JSON for each."""
    from faults.corpus import Corpus

    entry, corpus = warm(), Corpus(given.corpus)
    corpus.build(entry)
    print(json.dumps({"ready": True}), flush=True)
    place = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    try:
        for number in json.loads(Path(given.worker).read_text()):
            print(json.dumps(tried(number, given, corpus, Sandbox(place), entry)), flush=True)
    finally:
        remove(place)


# -- the campaign -----------------------------------------------------------------------------------------------------


def campaign(given: argparse.Namespace, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Outcomes in the order in which they come, of ``--jobs`` processes."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        corpus = given.corpus or Path(place, "corpus")
        own = [word for word in sys.argv[1:] if word not in ("--corpus", str(given.corpus))]
        started: list[subprocess.Popen[str]] = []
        try:
            for job in range(given.jobs):
                todo = Path(place, f"{job}.json")
                todo.write_text(json.dumps(numbers[job :: given.jobs]))
                command = [sys.executable, __file__, *own, "--corpus", str(corpus), "--worker", str(todo)]
                made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD)
                started.append(made)
                assert made.stdout is not None
                if "ready" not in made.stdout.readline():  # the first one makes the corpus
                    raise SystemExit("fuzz: a process ended before its first input; see above")
            yield from _lines(started)
            if bad := [one for one in started if one.wait() != 0]:
                raise SystemExit(f"fuzz: a process ended with {bad[0].returncode}; see above")
        finally:
            for one in started:
                one.terminate()
                one.wait()


def _lines(started: list[subprocess.Popen[str]]) -> Iterator[dict[str, Any]]:
    import selectors

    with selectors.DefaultSelector() as open_ones:
        for one in started:
            open_ones.register(one.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        while open_ones.get_map():
            for key, _ in open_ones.select():
                if line := key.fileobj.readline():  # type: ignore[union-attr]
                    yield json.loads(line)
                else:
                    open_ones.unregister(key.fileobj)


def table(outcomes: list[dict[str, Any]]) -> str:
    """Inputs, commands and failures by family, and the causes."""
    rows = []
    for family in sorted({one["family"] for one in outcomes}):
        of = [one for one in outcomes if one["family"] == family]
        calls = [call for one in of for call in one["commands"]]
        codes = Counter(call["code"] for call in calls)
        failed = sum(bool(one["faults"]) for one in of)
        worst = (
            max((call["seconds"] for call in calls), default=0.0),
            max((call["memory"] for call in calls), default=0) / 1e9,
        )
        rows.append(
            f"{family:18s} {len(of):6d} {codes[0]:6d} {codes[1]:6d} {codes[2]:6d} {failed:7d}"
            f" {worst[0]:7.1f} {worst[1]:6.2f}"
        )
    head = f"{'family':18s} inputs  exit 0 exit 1 exit 2  failed     s     GB"
    causes = Counter(fault for one in outcomes for fault in one["faults"])
    first = {fault: one["number"] for one in reversed(outcomes) for fault in one["faults"]}
    lines = [f"{times:5d}  {fault} (first in input {first[fault]})" for fault, times in causes.most_common()]
    failed = sum(bool(one["faults"]) for one in outcomes)
    calls = Counter(call["typed"].split()[1] for one in outcomes for call in one["commands"] if " " in call["typed"])
    listed = ", ".join(f"{name} {times}" for name, times in calls.most_common())
    total = f"{len(outcomes)} inputs, {sum(calls.values())} commands ({listed}), {failed} failed"
    return "\n".join([head, *rows, *lines, total])


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what removes the files that were made
    if given.worker:
        worker(given)
        return 0
    if not hasattr(os, "fork"):
        raise SystemExit("fuzz: expected a system that can fork a process, found none")
    numbers = list(range(given.first, given.first + given.count)) if given.one is None else [given.one]
    outcomes: list[dict[str, Any]] = []
    if given.out and given.out.exists() and given.one is None:
        done = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
        outcomes = [one for one in done if one["number"] in set(numbers)]
        numbers = sorted(set(numbers) - {one["number"] for one in outcomes})
    began = time.monotonic()
    for one in campaign(given, numbers):
        outcomes.append(one)
        if given.out and given.one is None:
            with open(given.out, "a", encoding="utf-8") as file:
                print(json.dumps(one), file=file)
        if given.one is not None:
            print(json.dumps(one, indent=1, ensure_ascii=False))
        elif one["faults"]:
            print(
                f"{one['number']} {one['family']}: {'; '.join(one['faults'][:3])}\n    {one['commands'][-1]['typed']}",
                flush=True,
            )
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} inputs, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if given.one is None:
        print(table(outcomes))
    return int(any(one["faults"] for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
