"""What a terminal gets: bars and colours where they are welcome, plain text where they are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from ambiseg._util import progress
from ambiseg._util.progress import reporting
from tests.conftest import REPOSITORY

pty = pytest.importorskip("pty", reason="no terminals on this system")

PROGRAM = """
import sys, time
from ambiseg._util import progress, terminal
from ambiseg._util.tables import table
from ambiseg.cli import _patience, main
progress._PATIENCE = 0.05
with progress.reporting("opening the data"):  # which says nothing about how far it is
    time.sleep(0.4)
    with progress.reporting("reading files") as report:
        for i in range(4):
            report(i, 4)
            time.sleep(0.1)
with _patience():
    pass
terminal.console().print(table(["name", "what it is"], [["shapes", "pictures"]]))
sys.stdout.flush()
assert "torch" not in sys.modules  # so that this is a fast test
main(["train", "demo", "--xyzzy"])
"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # but tabs and new lines


def shown(on_terminal: bool, **environment: str) -> str:
    """What the program prints, on a terminal of its own or into a pipe."""
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": str(REPOSITORY / "src"), **environment}
    command = [sys.executable, "-c", PROGRAM]
    if not on_terminal:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # how a terminal ends on Linux
                break
            if not part:
                break
            parts.append(part)
        process.wait(120)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_terminal_gets_bars_and_colours():
    text = shown(True)
    assert "\x1b[" in text
    assert "opening the data" in text
    assert re.search(r"reading files.*3/4", text)
    assert "\x1b[1m" in text  # the head of the table
    assert "loading …" in text
    error = text.rstrip("\n").splitlines()[-1]
    assert error.startswith("ambiseg train: unrecognized arguments: --xyzzy")
    assert not CONTROL.search(error)


@pytest.mark.parametrize(
    ("on_terminal", "environment"),
    [(True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"}), (False, {})],
    ids=["NO_COLOR", "dumb", "pipe"],
)
def test_plain_text_where_it_is_asked_for(on_terminal, environment):
    text = shown(on_terminal, **environment)
    assert not CONTROL.search(text), repr(text)
    assert "what it is" in text
    assert "ambiseg train: unrecognized arguments: --xyzzy" in text


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    monkeypatch.setattr(progress, "_INTERVAL", -1.0)
    with reporting("reading") as report:
        report(1234, 5000)
    assert capsys.readouterr().err == "reading: 1,234 of 5,000\n"
    with reporting("reading", quiet=True) as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


def test_what_is_fast_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "animated", lambda: True)
    with reporting("reading") as report:
        report(1, 2)
        bar = progress._Bar._running[-1]
    time.sleep(0.01)
    assert bar.shown is None
    assert bar.timer.finished.is_set()  # nothing will come later
    assert progress._Bar._running == []
