"""Running a command in a folder of its own, watched: in a fork of a process that has imported everything, or anew."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from faults.judge import LIMITS, Ended, Limits

# One thread: a fork of several would wait for locks that nobody holds any more.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
Entry = Callable[[], Any]
PROGRAM = Path(__file__).resolve().parents[2] / "src" / "ambiseg" / "__main__.py"


class Sandbox:
    """Folders that stand for all that a command can write to: ``work``, where it runs, home, temporary files, cache."""

    PARTS = ("work", "home", "tmp", "cache")

    def __init__(self, root: Path) -> None:
        self.root, self.printed = root / "sandbox", root / "printed"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def clear(self) -> None:
        """Empty all folders."""
        remove(self.root)
        for part in self.PARTS:
            (self.root / part).mkdir(parents=True)
        self.printed.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        home = str(self.root / "home")
        return {
            "HOME": home,
            "TMPDIR": str(self.root / "tmp"),
            "AMBISEG_CACHE": str(self.root / "cache"),
            "XDG_CACHE_HOME": f"{home}/.cache",
            "XDG_STATE_HOME": f"{home}/.local/state",
            "MPLCONFIGDIR": str(self.printed),  # matplotlib's list of fonts is none of ours
            "PYTHONDONTWRITEBYTECODE": "1",
            **ONE_THREAD,
        }


def remove(folder: Path) -> None:
    """With folders that may not be read or entered."""

    def again(function: Any, path: str, _: Any) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        with suppress(OSError):
            os.chmod(path, 0o700)
            function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=again)
    if folder.exists():
        shutil.rmtree(folder)


def warm() -> Entry:
    """Import all that commands may import, and return what the command ``ambiseg`` calls."""
    import importlib
    import pkgutil

    import ambiseg

    for module in pkgutil.walk_packages(ambiseg.__path__, "ambiseg."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    others = "lightning.pytorch torchmetrics matplotlib.pyplot matplotlib.backends.backend_agg tifffile nibabel pydicom"
    others += (
        " h5py PIL.Image yaml rich scipy.optimize jinja2 safetensors.torch filelock fsspec.implementations.chained"
    )
    for name in others.split():
        with suppress(ImportError):
            importlib.import_module(name)
    entry = importlib.import_module("ambiseg.__main__").main
    gc.collect()
    gc.freeze()  # so that a fork's collector does not copy every page by touching it
    return entry


def run(arguments: list[str], sandbox: Sandbox, entry: Entry | None = None, limits: Limits = LIMITS) -> Ended:
    """Run ``ambiseg`` with these arguments.

    Args:
        entry: called in a fork of this process; ``None``: a process of its own is started.
    """
    out, err = sandbox.printed / "out", sandbox.printed / "err"
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    if entry is None:
        pid = _started(arguments, sandbox, out, err)
    elif (pid := os.fork()) == 0:
        _forked(arguments, sandbox, out, err, entry)
    ended = _watched(pid, began, limits)
    ended.survivors = _survivors(pid)
    ended.out, ended.err = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
    return ended


def _started(arguments: list[str], sandbox: Sandbox, out: Path, err: Path) -> int:
    with open(out, "wb") as stdout, open(err, "wb") as stderr, open(os.devnull) as stdin:
        started = subprocess.Popen(
            [sys.executable, "-m", "ambiseg", *arguments],
            cwd=sandbox.work,
            env=os.environ | sandbox.environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    started.returncode = 0  # it is waited for below, with what it took
    return started.pid


def _forked(arguments: list[str], sandbox: Sandbox, out: Path, err: Path, entry: Entry) -> None:
    """The life of a fork, which does not return."""
    code = 1
    try:
        os.setsid()
        atexit._clear()  # what the parent has to do at its end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, out, flags), (2, err, flags)):
            file = os.open(path, how, 0o644)
            os.dup2(file, number)
            os.close(file)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(sandbox.environment)
        os.chdir(sandbox.work)
        tempfile.tempdir = None
        sys.argv = [str(PROGRAM), *arguments]  # which a command starts again for further processes
        code = _code(entry)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any process
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _code(entry: Entry) -> int:
    try:
        found = entry()
    except SystemExit as end:
        found = end.code
        if isinstance(found, str):
            print(found, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        found = 1
    return found if isinstance(found, int) else 0 if found is None else 1


# -- watching ---------------------------------------------------------------------------------------------------------


def _watched(pid: int, began: float, limits: Limits) -> Ended:
    """Wait for a process, and kill its session if it takes too long or too much.

    Time that it waited for a core of a busy machine does not count.
    """
    pause, waited, peak = 0.002, 0.0, 0.0
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            seconds = time.monotonic() - began - waited
            return Ended(os.waitstatus_to_exitcode(status), seconds=seconds, memory=max(peak, used.ru_maxrss * 1024))
        waited = _waited_for_core(pid, waited)
        family = _family(pid)
        peak = max([peak, *map(_peak, family)])
        stopped = ""
        if time.monotonic() - began - waited > limits.seconds:
            stopped = f"over {limits.seconds:.0f} s"
        elif peak > limits.memory:
            stopped = f"over {limits.memory / 1e9:.1f} GB"
        if stopped:
            seconds = time.monotonic() - began - waited
            for one in reversed(family):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(-9, seconds=seconds, memory=peak, stopped=stopped)
        time.sleep(pause)
        pause = min(1.3 * pause, 0.03)


def _waited_for_core(pid: int, before: float) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # it has just ended, or the system does not tell
        return before


def _family(pid: int) -> list[int]:
    """A process and those below it, as far as they can be seen."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def _peak(pid: int) -> float:
    try:
        told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return float(told[1]) * 1024 if told else 0.0


def _survivors(session: int, patience: float = 2.0) -> list[str]:
    """Processes of a session whose first has ended; they get a moment, and are killed."""
    until = time.monotonic() + patience
    while found := list(_of_session(session)):
        if time.monotonic() > until:
            for pid, _ in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return [name for _, name in found]
        time.sleep(0.05)
    return []


def _of_session(session: int) -> Any:
    if not os.path.isdir("/proc/self"):
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                text = Path(f"/proc/{name}/stat").read_text()
                state, _, _, found = text.rpartition(")")[2].split()[:4]
                if int(found) == session and state != "Z":
                    yield int(name), text.partition("(")[2].partition(")")[0]
