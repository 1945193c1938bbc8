"""tools/kill.py: that it sees every writer, that its judge can fail, and a small campaign over ambiseg itself."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ambiseg._util.files import Lock, write_text
from tests.conftest import REPOSITORY
from tests.tools import tool

kill = tool("kill")
trace, bench = import_module("faults.trace"), import_module("faults.bench")  # which kill.py has made known
Program = Callable[[tuple[str, ...]], int]


@pytest.fixture(autouse=True, scope="module")
def _can() -> None:
    if reason := kill.cannot():
        pytest.skip(reason)


# -- the tracer --------------------------------------------------------------------------------------------------------


def test_writers_of_all_kinds_are_seen(tmp_path: Path) -> None:
    def child() -> int:
        import threading

        import torch

        os.chdir(tmp_path)
        thread = threading.Thread(target=lambda: Path("thread").write_text("1"))
        thread.start()
        thread.join()
        torch.save({"weights": torch.zeros(3)}, "weights.ckpt")  # in C++
        subprocess.run(["sh", "-c", "echo 1 > child; rm child"], check=True)
        os.mkdir("folder")
        os.rename("folder", "renamed")
        Path("thread").read_text()
        return 7

    seen = trace.traced(child, tmp_path)
    done = [str(one) for one in seen.operations]
    for one in ("open thread", "write weights.ckpt", "open child", "unlink child", "mkdir folder"):
        assert one in done
    assert "rename folder -> renamed" in done
    assert done.count("open thread") == 1  # reading is none
    assert seen.code == 7
    assert not seen.struck


def test_faults_strike_where_they_are_told_to(tmp_path: Path) -> None:
    def child() -> int:
        os.chdir(tmp_path)
        try:
            file = os.open("a", os.O_WRONLY | os.O_CREAT)
            os.write(file, b"whole")
        except OSError as error:
            return error.errno or 1
        return 0

    def struck(number: int, fault: Any) -> Any:
        (tmp_path / "a").unlink(missing_ok=True)
        return trace.traced(child, tmp_path, lambda at, operation: fault if at == number else None)

    assert [str(one) for one in struck(9, None).operations] == ["open a", "write a"]
    assert struck(0, trace.Kill("before")).code == 137
    assert not (tmp_path / "a").exists()
    assert struck(0, trace.Kill("after")).code == 137
    assert (tmp_path / "a").read_text() == ""
    assert struck(1, trace.Kill("after")).code == 137
    assert (tmp_path / "a").read_text() == "whole"
    assert struck(1, trace.Fail(errno.ENOSPC)).code == errno.ENOSPC
    assert (tmp_path / "a").read_text() == ""
    assert struck(1, trace.Signal(signal.SIGTERM)).code == 143
    calls: list[bool] = []
    assert struck(1, trace.Meanwhile(lambda: calls.append((tmp_path / "a").exists()))).code == 0
    assert calls == [True]


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(trace.Hanging, match="1 s"):
        trace.traced(lambda: time.sleep(60), tmp_path, seconds=1)


def test_a_trial_is_repeated_by_its_text() -> None:
    for trial in (bench.Trial("data split", "kill", 3, "after"), bench.Trial("train", "twice", 3, "before", 8)):
        assert bench.Trial.parse(str(trial)) == trial
    with pytest.raises(ValueError, match="expected SCENARIO"):
        bench.Trial.parse("train kill")


# -- the judge ---------------------------------------------------------------------------------------------------------

TEXT = json.dumps({"a": list(range(9))}) + "\n"


def _told(work: Callable[[], None]) -> int:
    try:
        work()
    except OSError as error:
        print(f"ambiseg: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"ambiseg: {error}", file=sys.stderr)
        return 2
    return 0


def _careful(_: Any) -> int:
    def work() -> None:
        with Lock(".", "writing"):
            write_text("out.json", TEXT)

    return _told(work)


def _raising(_: Any) -> int:
    write_text("out.json", TEXT)
    return 0


def _telling(_: Any) -> int:
    return _told(lambda: write_text("out.json", TEXT))


def _in_place(_: Any) -> int:
    with open("out.json", "w", buffering=1) as file:
        for part in (TEXT[:10], TEXT[10:]):
            file.write(part)
            file.flush()
    return 0


def _forgetful(_: Any) -> int:
    Path(f".ambiseg-{os.getpid()}").write_text(TEXT)
    os.rename(f".ambiseg-{os.getpid()}", "out.json")
    return 0


def _appending(_: Any) -> int:
    for number in range(3):
        with open("log.txt", "a") as file:
            file.write(f"{number}\n")
    return 0


def _refusing(_: Any) -> int:
    def work() -> None:
        if any(Path().iterdir()):
            raise ValueError("out.json: expected an empty folder, found files")
        write_text("draft.json", TEXT)
        os.rename("draft.json", "out.json")

    return _told(work)


def _deaf(_: Any) -> int:
    try:
        write_text("out.json", TEXT)
    except (OSError, KeyboardInterrupt):
        return 0
    return 0


def _naming_the_draft(_: Any) -> int:
    def work() -> None:
        with open(".ambiseg-0", "w") as file:
            os.fsync(file.fileno())
        try:
            os.rename(".ambiseg-0", "out.json")
        except OSError:
            os.unlink(".ambiseg-0")
            raise

    return _told(work)


def _sharing_a_draft(_: Any) -> int:
    Path("out.tmp").write_text(TEXT)
    os.rename("out.tmp", "out.json")
    return 0


def _problems(folder: Path, program: Program, fault: str, details: list[str], **about: Any) -> list[str]:
    """All problems of all trials of one kind."""
    scenario = kill.Scenario(("write",), known=("out.json",), **about)
    with kill.workshop(folder, program) as shop:
        made = bench.Bench(shop, scenario)
        numbers = [n for n, one in enumerate(made.operations) if fault != "error" or one.name in bench.FAILING]
        outcomes = [made.run(bench.Trial("it", fault, n, detail)) for n in numbers for detail in details]
    assert any(one.struck for one in outcomes)
    return [line for one in outcomes for line in one.problems]


SIDES = ["before", "after"]


@pytest.mark.parametrize(
    ("program", "fault", "details", "problem"),
    [
        (_careful, "kill", SIDES, None),
        (_telling, "error", ["ENOSPC", "EIO"], None),
        (_telling, "signal", ["SIGTERM"], "left after the signal: place/.ambiseg-"),  # it does not listen to signals
        (_careful, "pair", ["before"], None),
        (_in_place, "kill", SIDES, "half-written: place/out.json"),
        (_forgetful, "kill", SIDES, "left over: place/.ambiseg-"),
        (_appending, "kill", SIDES, "differs: place/log.txt"),
        (_refusing, "kill", SIDES, "afterwards, write: exit code 2"),
        (_raising, "error", ["EIO"], "exit code 1 after the error"),
        (_deaf, "error", ["EIO"], "missing: place/out.json"),
        (_deaf, "signal", ["SIGINT"], "missing: place/out.json"),
        (_naming_the_draft, "error", ["EACCES"], "names no file that the user knows"),
        (_sharing_a_draft, "pair", SIDES, "of two ended with 1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_judge_finds_what_is_wrong(
    tmp_path: Path, program: Program, fault: str, details: list[str], problem: str | None
) -> None:
    found = _problems(tmp_path, program, fault, details)
    if problem is None:
        assert found == []
    else:
        assert any(problem in line for line in found), found


def test_half_a_folder_is_found(tmp_path: Path) -> None:
    def program(_: Any) -> int:
        os.makedirs("out", exist_ok=True)
        for name in ("a", "b"):
            Path("out", name).write_text(name)
        return 0

    assert any("half a folder: out" in line for line in _problems(tmp_path, program, "kill", SIDES, appears=("out",)))
    assert any("half a run: out" in line for line in _problems(tmp_path, program, "kill", SIDES, run="out"))


def test_without_a_fault_files_are_on_the_disk_and_nothing_is_left(tmp_path: Path) -> None:
    def wrong(program: Program) -> list[str]:
        with kill.workshop(tmp_path, program) as shop:
            return bench.Bench(shop, kill.Scenario(("write",))).undisturbed()

    def untidy(_: Any) -> int:
        Path(os.environ["TMPDIR"], "rest").write_text("1")
        return _careful(_)

    def leaving(_: Any) -> int:
        subprocess.Popen(["sleep", "60"])
        return _careful(_)

    assert wrong(_careful) == []
    assert wrong(leaving) == ["1 processes or threads were left"]
    assert wrong(_sharing_a_draft) == ["not on the disk when it took its name: place/out.json"]
    assert wrong(untidy) == ["left over: tmp/rest"]


# -- ambiseg -----------------------------------------------------------------------------------------------------------


def test_a_small_campaign(tmp_path: Path) -> None:
    """A few faults of every kind in the commands that are fast; `python tools/kill.py --count 200` is the long one."""
    command = [sys.executable, str(REPOSITORY / "tools" / "kill.py"), "--quiet", "--folder", str(tmp_path)]
    command += ["--only", "train", "export", "prepare", "--fault", *bench.FAULTS]
    command += ["--count", "15", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(tmp_path) == []
