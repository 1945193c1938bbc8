"""Runs a function in a child process and stops it before and after every system call that changes a file.

The child asks to be traced (ptrace) and installs a filter (seccomp) by which the kernel stops it at those calls only,
in all of its threads and children, whatever language they are written in. Writing through a shared memory map is no
system call, and is not seen. Linux on x86_64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from faults.calls import CALLS, kernel_filter

When = Literal["before", "after"]

_HERE = ctypes.c_int32(-100).value  # AT_FDCWD

# linux/ptrace.h, linux/seccomp.h, linux/prctl.h
_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXEC, _SECCOMP, _EXITKILL = 1, 2, 4, 8, 16, 0x80, 0x100000
_EVENT_SECCOMP = 7
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_WALL = 0x40000000
_MOMENT = 2.0  # seconds
_REGISTERS, _RETURNED, _NUMBER = 27, 10, 15  # of struct user_regs_struct, which are in the order of sys/user.h
_ARGUMENTS = (14, 13, 12, 7, 9, 8)  # rdi, rsi, rdx, r10, r8, r9

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.ptrace.restype = ctypes.c_long
    _libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Operation(NamedTuple):
    """One call that changes a file: its name, the file, and the other name of a rename or link; paths are relative."""

    name: str
    path: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.path}" + (f" -> {self.other}" if self.other else "")


class Kill(NamedTuple):
    """End all processes at once, as a machine that goes down or runs out of memory does."""

    when: When = "before"


class Fail(NamedTuple):
    """Do not do the operation, and say that it failed for this reason."""

    number: int


class Signal(NamedTuple):
    """Send a signal: SIGINT and SIGHUP to all processes, as a terminal does; others to the first one."""

    number: int
    when: When = "before"


class Meanwhile(NamedTuple):
    """Do something else while the processes are stopped."""

    do: Callable[[], None]
    when: When = "before"


Fault = Kill | Fail | Signal | Meanwhile


@dataclass
class Traced:
    """What came of the child.

    Attributes:
        code: exit code as a shell shows it.
        operations: in the watched folder, in order.
        elsewhere: files outside of it that were written to.
        struck: whether a fault was brought about.
        left: processes that were alive after the first one had ended; they were killed.
        others: exit codes of other children of this process that ended meanwhile.
    """

    code: int = -1
    operations: list[Operation] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    struck: bool = False
    left: int = 0
    others: dict[int, int] = field(default_factory=dict)


class Hanging(Exception):
    """The child did not end in time; all of its processes were killed."""


def cannot() -> str | None:
    """Why nothing can be traced here; ``None`` if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"kills at system calls need Linux on x86_64, this is {sys.platform} on {platform.machine()}"
    try:
        seen = traced(lambda: os.close(os.open(os.devnull, os.O_WRONLY)), Path("/dev"), seconds=20)
    except (OSError, Hanging) as error:
        return f"this system does not let a process trace its children: {error}"
    if [one.path for one in seen.operations] != ["null"]:
        return f"this system does not show what a traced child does: {seen.operations}, exit code {seen.code}"
    return None


def traced(
    child: Callable[[], int | None],
    watched: Path,
    decide: Callable[[int, Operation], Fault | None] = lambda number, operation: None,
    seconds: float = 300.0,
) -> Traced:
    """Run ``child`` in a process of its own and ask ``decide`` before every operation in a folder what to do there."""
    first = started(child, _trace_me)
    with _deadline(seconds, first):
        return _Tracer(first, Path(os.path.realpath(watched)), decide).run()


def started(child: Callable[[], int | None], before: Callable[[], None] | None = None) -> int:
    """The id of a new process, of a group of its own, that runs a function and ends as a Python program does."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a parent with threads: none of them is needed below
        pid = os.fork()
    if pid:
        return pid
    os.setsid()
    _be_child(child, before)


def ended(pid: int, seconds: float = 300.0) -> int:
    """The exit code of a process of :func:`started`, as a shell shows it."""
    with _deadline(seconds, pid):
        _, status = os.waitpid(pid, 0)
    return _code(status)


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@contextmanager
def _deadline(seconds: float, group: int) -> Iterator[None]:
    def stop(*_: Any) -> NoReturn:
        raise Hanging(f"did not end within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except BaseException:
        _end(group)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


def _end(group: int) -> None:
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    with suppress(OSError):
        while True:
            os.waitpid(-group, _WALL)


# -- the child --------------------------------------------------------------------------------------------------------


def _be_child(child: Callable[[], int | None], before: Callable[[], None] | None) -> NoReturn:
    import atexit
    import threading
    import traceback

    atexit._clear()  # what the parent is to do at its own end
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if before is not None:
            before()
        code = child() or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # as the interpreter does at its end; the frames above this one belong to the parent
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def _trace_me() -> None:
    if _libc.ptrace(_TRACEME, 0, None, None) != 0:
        os._exit(126)
    os.kill(os.getpid(), signal.SIGSTOP)  # until the parent has said what it wants to see
    code = kernel_filter()
    program = ctypes.create_string_buffer(code, len(code))
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(program)))
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or _libc.prctl(_SET_SECCOMP, _FILTER, about, 0, 0) != 0:
        os._exit(126)


# -- the parent -------------------------------------------------------------------------------------------------------


class _Tracer:
    def __init__(self, first: int, watched: Path, decide: Callable[[int, Operation], Fault | None]) -> None:
        self.first, self.watched, self.decide = first, f"{watched}/", decide
        self.alive, self.pending = {first}, dict[int, Fault]()
        self.seen = Traced()

    def run(self) -> Traced:
        _, status = os.waitpid(self.first, _WALL)
        if not os.WIFSTOPPED(status):
            raise PermissionError(errno.EPERM, "ptrace is not permitted")
        options = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXEC | _SECCOMP | _EXITKILL
        _ptrace(_SETOPTIONS, self.first, options)
        _ptrace(_CONT, self.first)
        while self.alive:
            try:
                pid, status = self._next()
            except ChildProcessError:  # a thread that started another program has taken the number of the first one
                break
            if os.WIFSTOPPED(status):
                known = pid in self.alive
                self.alive.add(pid)
                with suppress(ProcessLookupError):  # killed meanwhile
                    self._stopped(pid, os.WSTOPSIG(status), status >> 16, known)
                continue
            if pid == self.first:
                self.seen.code = _code(status)
            elif pid not in self.alive:
                self.seen.others[pid] = _code(status)
            self.alive.discard(pid)
        return self.seen

    def _next(self) -> tuple[int, int]:
        """What happens next. Once the first process has ended the others have a moment to end as well."""
        if self.first in self.alive or self.seen.left:
            return os.waitpid(-1, _WALL)
        for _ in range(int(_MOMENT / 0.02)):
            pid, status = os.waitpid(-1, _WALL | os.WNOHANG)
            if pid:
                return pid, status
            time.sleep(0.02)
        self.seen.left = len(self.alive)
        self._kill()
        return os.waitpid(-1, _WALL)

    def _stopped(self, pid: int, number: int, event: int, known: bool) -> None:
        if event == _EVENT_SECCOMP:
            self._before(pid)
        elif number == signal.SIGTRAP | 0x80:  # a call has returned
            fault = self.pending.pop(pid, None)
            if fault is None or self._strike(fault):
                _ptrace(_CONT, pid)
        elif event or (number == signal.SIGSTOP and not known):  # a new process, thread or program
            _ptrace(_CONT, pid)
        else:
            _ptrace(_CONT, pid, number)

    def _before(self, pid: int) -> None:
        registers = (ctypes.c_uint64 * _REGISTERS)()
        _ptrace(_GETREGS, pid, 0, ctypes.addressof(registers))
        operation = self._operation(pid, registers)
        fault = None
        if operation is not None:
            self.seen.operations.append(operation)
            fault = self.decide(len(self.seen.operations) - 1, operation)
        if isinstance(fault, Fail):
            self.seen.struck = True
            registers[_NUMBER], registers[_RETURNED] = 2**64 - 1, 2**64 - fault.number  # no call, and what it returns
            _ptrace(_SETREGS, pid, 0, ctypes.addressof(registers))
        elif fault is not None and fault.when == "after":
            self.pending[pid] = fault
            _ptrace(_SYSCALL, pid)
            return
        elif fault is not None and not self._strike(fault):
            return
        _ptrace(_CONT, pid)

    def _strike(self, fault: Fault) -> bool:
        """Whether the process goes on."""
        self.seen.struck = True
        if isinstance(fault, Kill):
            self._kill()
            return False
        if isinstance(fault, Signal):
            whole = fault.number in (signal.SIGINT, signal.SIGHUP)
            (os.killpg if whole else os.kill)(self.first, fault.number)
        elif isinstance(fault, Meanwhile):
            fault.do()
        return True

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self.first, signal.SIGKILL)
        for pid in self.alive:  # those in groups of their own
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    # -- what a call does -------------------------------------------------------------------------------------------

    def _operation(self, pid: int, registers: Any) -> Operation | None:
        name, kinds = CALLS.get(registers[_NUMBER], ("", ""))
        arguments = [registers[at] for at in _ARGUMENTS]
        paths, folder = list[str](), _HERE
        for kind, value in zip(kinds, arguments, strict=False):
            if kind == "D":
                folder = ctypes.c_int32(value & 0xFFFFFFFF).value
            elif kind == "F":
                paths.append(_link(f"/proc/{pid}/fd/{value & 0xFFFFFFFF}"))
            elif kind == "P":
                text = _text(pid, value) if value else ""
                base = _link(f"/proc/{pid}/cwd" if folder == _HERE else f"/proc/{pid}/fd/{folder}")
                paths.append(os.path.normpath(os.path.join(base, text)) if text else base)
        inside = [path.startswith(self.watched) for path in paths]
        if any(inside):
            return Operation(name, *(path.removeprefix(self.watched) for path in paths))
        if paths and paths[0].startswith("/") and not paths[0].startswith(("/dev/", "/proc/", "/sys/")):
            self.seen.elsewhere.add(paths[0])
        return None


def _ptrace(request: int, pid: int, address: int = 0, data: int | None = None) -> None:
    # The signal of CONT and the options are in the place of data.
    if data is None and request in (_CONT, _SYSCALL, _SETOPTIONS):
        address, data = 0, address
    if _libc.ptrace(request, pid, address or None, data or None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(pid: int, address: int) -> str:
    """The text at an address of another process's memory."""
    found = b""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        while b"\0" not in found and len(found) < 8192:
            memory.seek(address + len(found))
            found += memory.read(4096 - (address + len(found)) % 4096)  # the next page may not be there
    return os.fsdecode(found.partition(b"\0")[0])
