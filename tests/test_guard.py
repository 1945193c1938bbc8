"""What surrounds every command: streams, signals, exit codes, crash logs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ambiseg._util.errors import DataError
from ambiseg.cli import guard, main
from ambiseg.cli.guard import guarded
from ambiseg.io.errors import FileError

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell and signals of POSIX")


@pytest.fixture(autouse=True)
def _logs(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_log_folder", lambda: tmp_path / "logs")


def raising(error: BaseException):
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError("a.png: expected a picture,\n found text"), "a.png: expected a picture, found text"),
        (OSError(28, "No space left on device", "run/last.ckpt"), "run/last.ckpt: No space left on device"),
        (MemoryError(), "expected to have enough memory, found too little"),
        (RuntimeError("not enough memory: you tried to allocate 9000000000 bytes"), "expected to have enough memory"),
        (BrokenPipeError(32, "Broken pipe"), "[Errno 32] Broken pipe"),  # of a socket: the streams have none
        (ModuleNotFoundError("no", name="nibabel"), "expected the package nibabel, found none; install it with"),
        (FileError.of("E201", "a", "expected b, found c", "save it again"), "a: expected b, found c (save it again)"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(capsys, error, line):
    assert guarded(raising(error)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ambiseg: {line}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("deep"), ValueError("a\nb"), AssertionError()])
def test_a_fault_of_ours_is_one_line_and_a_log(tmp_path, capsys, error):
    assert guarded(raising(error)) == 70
    said = capsys.readouterr().err
    assert said.startswith(f"ambiseg: a fault of ambiseg's own: {type(error).__name__}")
    assert said.count("\n") == 1
    (log,) = (tmp_path / "logs").iterdir()
    assert f"the details are in {log}" in said
    assert "Traceback" in log.read_text()


def test_logs_do_not_pile_up(tmp_path):
    (tmp_path / "logs").mkdir()
    for number in range(30):
        (tmp_path / "logs" / f"crash-2020-{number:02}.log").touch()
    (tmp_path / "logs" / "notes.txt").touch()
    guarded(raising(KeyError("x")))
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(logs) == 21
    assert logs[0] == "crash-2020-11.log"
    assert logs[-1] == "notes.txt"


def test_a_fault_in_a_thread_is_one_line(capsys):
    def work() -> int:
        thread = threading.Thread(target=raising(KeyError("x")))
        thread.start()
        thread.join()
        return 0

    assert guarded(work) == 0
    said = capsys.readouterr().err
    assert said.startswith("ambiseg: a fault of ambiseg's own: KeyError: 'x'")
    assert said.count("\n") == 1


def test_the_parsers_own_exit_passes():
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0


@POSIX
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize("answer", ["none", "exit", "error"])
def test_a_signal_ends_the_command_with_its_code(capsys, name, code, answer):
    """Lightning answers an interruption with exit(1), and a library may turn it into an error of its own."""
    before = signal.getsignal(getattr(signal, name))

    def work() -> int:
        try:
            os.kill(os.getpid(), getattr(signal, name))
            signal.pause()
        except KeyboardInterrupt:
            if answer == "exit":
                sys.exit(1)
            if answer == "error":
                raise ValueError("could not be imported") from None
            raise KeyboardInterrupt("stopped; go on with: …") from None
        return 0

    assert guarded(work) == code
    assert capsys.readouterr().err == f"ambiseg: stopped{'; go on with: …' if answer == 'none' else ''}\n"
    assert signal.getsignal(getattr(signal, name)) == before


@POSIX
def test_an_ignored_signal_stays_ignored():
    """As by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert guarded(lambda: os.kill(os.getpid(), signal.SIGHUP) or 0) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@POSIX
def test_a_signal_in_a_place_that_drops_exceptions_is_not_lost(capsys):
    class Drops:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass

    def work() -> int:
        Drops()
        signal.pause()
        return 0

    assert guarded(work) == 143
    assert capsys.readouterr().err == "ambiseg: stopped\n"


WORK = """
import sys, time
from ambiseg.cli.guard import guarded
def work():
    for n in range({lines}):
        print("result", n)
        print("note", n, file=sys.stderr)
    open("done", "w").write(str(sys.stdin and sys.stdin.read()))
    return 0
sys.exit(guarded(work))
"""


@POSIX
@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        ("", 0, "note"),
        ("| true", 0, "note"),
        ("| head -1", 0, "note"),
        ("2>&1 | true", 0, ""),
        (">&-", 0, "note"),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        (">/dev/full", 2, "ambiseg: standard output: No space left on device"),
    ],
)
def test_no_work_ends_because_a_stream_is_closed(tmp_path, streams, code, said):
    (tmp_path / "work.py").write_text(WORK.format(lines=20_000))
    line = f"{shlex.quote(sys.executable)} work.py {streams}; exit ${{PIPESTATUS[0]}}"
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    found = subprocess.run(["bash", "-c", line], cwd=tmp_path, check=False, **given)
    assert found.returncode == code
    assert "Traceback" not in found.stderr
    assert "Exception ignored" not in found.stderr
    assert said in found.stderr
    assert Path(tmp_path, "done").exists() == (code == 0)
