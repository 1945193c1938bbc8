"""The campaign of damaged input: that its judge can fail, and a small one over every kind of file."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "tools"))
judging: Any = importlib.import_module("faults.judge")
running: Any = importlib.import_module("faults.run")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/status").exists(), reason="forks are watched"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

REFUSED = "ambiseg: a.png: expected a picture, found nothing"


@pytest.fixture
def sandbox(tmp_path: Path) -> Any:
    made = running.Sandbox(tmp_path)
    made.clear()
    (made.work / "input.txt").write_text("as it was")
    return made


def faults(sandbox: Any, entry: Any, words: str = "train demo", **options: Any) -> list[str]:
    """What the judge finds when a command does this."""
    limits = judging.Limits(**{key: options.pop(key) for key in ("seconds", "memory") if key in options})
    command = judging.Command(words.split(), **options)
    before = judging.snapshot(sandbox.root)
    ended = running.run(command.arguments, sandbox, entry, limits)
    return judging.judge(command, ended, sandbox.root, before, limits)


def say(*lines: str, code: int = 2) -> int:
    print(*lines, sep="\n", file=sys.stderr)
    return code


def test_commands_that_behave(sandbox):
    assert faults(sandbox, lambda: 0) == []
    assert faults(sandbox, lambda: say(REFUSED), "train demo --quiet") == []
    assert faults(sandbox, lambda: say("reading", "ambiseg: warning: odd", REFUSED)) == []
    assert faults(sandbox, lambda: say(REFUSED, REFUSED), "predict demo a.png b.png", lines=2) == []
    assert faults(sandbox, lambda: 1, "data check scans") == []
    assert faults(sandbox, lambda: print("error E201 unreadable") or 2, "data check scans") == []
    assert faults(sandbox, lambda: sys.exit(0)) == []

    def writes() -> int:
        Path("new").mkdir()
        Path("new/run.json").write_text("{}")
        return 0

    assert faults(sandbox, writes, writes=("new",)) == []


def fail() -> int:
    raise KeyError("careless")


def later() -> int:
    """A process that outlives the one that started it."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return 0


def write(path: str, text: str = "x", code: int = 0) -> Any:
    def entry() -> int:
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return say(REFUSED) if code else 0

    return entry


def remove() -> int:
    Path("input.txt").unlink()
    return 0


CARELESS = {
    "traceback": (fail, "train demo", {}),
    "exit 1: not documented for train": (fail, "train demo", {}),
    "exit 70: a fault of ours": (lambda: say("ambiseg: a fault", code=70), "train demo", {}),
    "exit 3: not documented": (lambda: 3, "train demo", {}),
    "ended by signal 9": (lambda: os.kill(os.getpid(), 9), "train demo", {}),
    "exit 2 without a line that says why": (lambda: 2, "train demo", {}),
    "exit 2 with 2 lines of errors": (lambda: say(REFUSED, REFUSED), "train demo", {}),
    "exit 2, and the last line is not its error": (lambda: say(REFUSED, "and so on"), "train demo", {}),
    "exit 2 with other lines than its error, though --quiet": (lambda: say("x", REFUSED), "train demo --quiet", {}),
    "warning of Python's": (lambda: say("/lib/x.py:3: UserWarning: old", code=0), "train demo", {}),
    "over 0 s": (lambda: time.sleep(60), "train demo", {"seconds": 0.4}),
    "left a process: ": (later, "train demo", {}),
    "code from data was run: work/CANARY": (lambda: os.mkdir("CANARY"), "train demo", {}),
    "left work/more.txt": (write("more.txt"), "train demo", {}),
    "left tmp/more.txt": (write("../tmp/more.txt"), "train demo", {}),
    "left home/.config": (write("../home/.config/x"), "train demo", {}),
    "left work/input.txt": (write("input.txt", "changed"), "train demo", {}),
    "removed work/input.txt": (remove, "train demo", {}),
    "left a draft: work/new/.ambiseg-": (write("new/.ambiseg-0011223344556677"), "train demo", {"writes": ("new",)}),
    "failed and left work/new": (write("new/run.json", "{}", 2), "train demo", {"writes": ("new",)}),
    "left half a store in the cache": (write("../cache/folder-1/draft.json", "{}"), "train demo", {}),
    "half-written: work/new.json": (write("new.json", '{"a": '), "train demo", {"writes": ("new.json",)}),
    "half-written: work/nan.json": (write("nan.json", '{"a": NaN}'), "train demo", {"writes": ("nan.json",)}),
    "half-written: work/page.html": (write("page.html", "<html>"), "train demo", {"writes": ("page.html",)}),
    "half-written: work/a.ckpt": (write("a.ckpt", "PK"), "train demo", {"writes": ("a.ckpt",)}),
    "half-written: work/a.png": (write("a.png", "PNG"), "train demo", {"writes": ("a.png",)}),
}


@pytest.mark.parametrize("fault", CARELESS)
def test_the_judge_can_fail(sandbox, fault):
    entry, words, options = CARELESS[fault]
    assert any(found.startswith(fault) for found in faults(sandbox, entry, words, **options))


def test_the_judge_sees_memory(sandbox):
    before = running.run([], sandbox, lambda: 0).memory

    def eat() -> int:
        content = [bytes(b"x" * (1 << 20)) for _ in range(1200)]  # far more than what a kernel reclaims of us meanwhile
        time.sleep(1)
        return len(content) * 0

    found = faults(sandbox, eat, memory=before + 150e6)
    assert len(found) == 1
    assert found[0].startswith("over ")
    assert found[0].endswith(" GB")


def test_damage_is_that_of_its_seed(tmp_path):
    formats: Any = importlib.import_module("faults.formats")
    source = {
        "a.json": b'{"a": [1, 2, {"b": "c"}]}',
        "a.csv": b"image,mask\na,b\n",
        "a.yaml": b"a: {b: 1}\n",
        "a.bin": b"0" * 99,
    }
    for name, content in source.items():
        made = set[bytes]()
        for seed in range(12):
            twice = []
            for _ in range(2):
                (tmp_path / name).write_bytes(content)
                formats.damage(Random(seed), tmp_path / name)
                twice.append((tmp_path / name).read_bytes())
            assert twice[0] == twice[1]
            made.add(twice[0])
        assert len(made) > 6


def test_small_campaign(tmp_path):
    """Everything is run as `python tools/fuzz.py --count 10000` does; that many are for a night."""
    report = tmp_path / "report.jsonl"
    command = [sys.executable, str(REPOSITORY / "tools" / "fuzz.py"), "--count", "45", "--seed", "12", "--cold", "0"]
    done = subprocess.run(
        [*command, "--out", str(report)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(one["number"] for one in outcomes) == list(range(45))
    assert len({one["family"] for one in outcomes}) > 20
    assert {call["code"] for one in outcomes for call in one["commands"]} >= {0, 2}
