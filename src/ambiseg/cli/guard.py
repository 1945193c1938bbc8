"""What surrounds every command: streams that may be closed, signals, and one line for whatever goes wrong.

=====  ================================================================================================================
code   meaning
=====  ================================================================================================================
0      done
1      done in part, as the help of the command says: ``data check`` found errors, ``predict`` could not read an image
2      something that the user can put right, in one line on the error stream
70     a fault of ambiseg's: one line, and the path of a log with the details
130    stopped by Ctrl-C (SIGINT); 143 by SIGTERM, 129 by SIGHUP
=====  ================================================================================================================
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ambiseg import __version__
from ambiseg._util.errors import DataError
from ambiseg._util.extras import MissingExtra, explained
from ambiseg._util.memory import out_of_memory
from ambiseg._util.text import printable

FAULT = 70  # EX_SOFTWARE of sysexits.h
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_GONE = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET)  # of a stream that nobody reads any more
_KEPT = 20  # crash logs


class Stop(KeyboardInterrupt):
    """A signal that ends the command."""


def guarded(work: Callable[[], int], line: Callable[[str], str] = str, command: str = "") -> int:
    """Run a command and return its exit code; whatever goes wrong is one line.

    Args:
        line: a last change to the text of an error that the user can put right.
        command: its name, for advice on what takes less memory.
    """
    with ExitStack() as stack:
        stack.enter_context(_steady_streams())
        stack.enter_context(_quiet_threads())
        received = stack.enter_context(_signals())
        try:
            try:
                code = work()
            finally:
                sys.stdout.flush()  # while what goes wrong can still be said
        except SystemExit as end:  # of the parser; of Lightning, when a signal has ended its loop
            if not received:
                raise
            code = _stopped(received, str(end) if isinstance(end.code, str) else "")
        except KeyboardInterrupt as stop:
            code = _stopped(received, str(stop))
        except BaseException as error:
            if received:  # in the middle of an import, or of a library that turns it into an error of its own
                code = _stopped(received, "")
            elif (text := _told(error, command)) is not None:
                _say(line(text))
                code = 2
            else:
                _say(_fault(error))
                code = FAULT
        return code


def _stopped(received: list[int], text: str) -> int:
    _say(text or "stopped")
    return 128 + (received[0] if received else signal.SIGINT)


def _say(text: str) -> None:
    print(f"ambiseg: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)


def _told(error: BaseException, command: str) -> str | None:
    """An error that the user can put right in one line; ``None`` for a fault of ours."""
    if (text := out_of_memory(error, command)) is not None and not isinstance(error, DataError):
        return text
    known = explained(error) if isinstance(error, ModuleNotFoundError) else error
    if not isinstance(known, DataError | OSError | MissingExtra):
        return None
    text = str(known)
    if isinstance(known, OSError) and known.filename is not None and known.strerror:
        text = f"{os.fsdecode(known.filename)}: {known.strerror}"
    if fix := getattr(getattr(known, "problem", None), "fix", ""):  # of this file, not of its kind
        text = f"{text} ({fix})"
    return text


# -- faults of ours ----------------------------------------------------------------------------------------------------


def _fault(error: BaseException) -> str:
    """One line about an error that nobody foresaw, whose traceback is in a log."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    log = _log(error)
    where = f"the details are in {log}" if log else "the details could not be written anywhere"
    return f"a fault of ambiseg's own: {said[:200]}; {where}"


def _log(error: BaseException) -> Path | None:
    text = "\n".join(
        [
            f"ambiseg {__version__}, Python {sys.version}, {sys.platform}",
            f"at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}, process {os.getpid()}: {sys.argv}",
            "",
            "".join(traceback.format_exception(error)),
        ]
    )
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in (_log_folder(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8", "backslashreplace")
            for old in sorted(folder.glob("crash-*.log"))[:-_KEPT]:
                old.unlink()
            return folder / name
    return None


def _log_folder() -> Path:
    try:
        from platformdirs import user_log_path
    except ImportError:
        return Path(tempfile.gettempdir())
    return user_log_path("ambiseg")


# -- signals -----------------------------------------------------------------------------------------------------------


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that end a program end the command in order: drafts vanish, and the exit code says which signal it was.

    Yields those that were received. A signal that is ignored, as SIGHUP by ``nohup``, stays so.
    """
    received: list[int] = []
    owner, before = os.getpid(), dict[int, Any]()

    def stop(number: int, _: Any) -> None:
        if os.getpid() != owner:  # a forked worker ends as any process does
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        received.append(number)
        raise Stop

    def unraisable(found: Any) -> None:
        """A signal that came in a place where exceptions are dropped is sent again; all else there is no user's."""
        if isinstance(found.exc_value, Stop):
            again = threading.Timer(0.05, os.kill, (owner, received[-1]))
            again.daemon = True
            again.start()

    hook = sys.unraisablehook
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, stop)
            sys.unraisablehook = unraisable
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """What goes wrong in a thread that nobody waits for, such as that of a bar, is one line as well."""

    def told(found: Any) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
            _say(_fault(found.exc_value))

    before, threading.excepthook = threading.excepthook, told
    try:
        yield
    finally:
        threading.excepthook = before


# -- streams -----------------------------------------------------------------------------------------------------------


class _Steady(io.FileIO):
    """A standard stream whose reader may go away: what is printed after that is lost, and the work goes on."""

    def write(self, content: Any, /) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            _discard(self.fileno())
            if error.errno not in _GONE and self.fileno() != 2:  # results that cannot be written are an error
                raise OSError(error.errno, error.strerror, "standard output") from None
            return memoryview(content).nbytes


def _discard(descriptor: int) -> None:
    """Let whatever is written to a descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == descriptor:  # it was closed, and the lowest that was free
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


@contextmanager
def _steady_streams() -> Iterator[None]:
    """The standard streams for a while such that no command ends because one of them is closed.

    A descriptor that is closed from the start, as by ``2>&-``, would be taken by the next file that is opened, and
    what libraries print would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _discard(descriptor)
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _steady(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _steady(2, sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _steady(descriptor: int, stream: Any) -> Any:
    if stream is not None:
        with suppress(OSError):
            stream.flush()
    buffer = io.BufferedWriter(_Steady(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(
        buffer,
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",  # a name may have bytes that are no text
        line_buffering=descriptor == 2 or bool(getattr(stream, "line_buffering", False)),
    )
