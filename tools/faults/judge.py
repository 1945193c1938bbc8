"""What a command may do under any fault, and the faults of one that did something else.

A command is judged by how it ended, by what it printed, and by every file in the folders that it could write to,
before and after. A judge that cannot fail is none: ``tests/test_fuzz.py`` shows it careless commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

CANARY = "CANARY"  # what damaged files make if anything in them is run
DRAFT = ".ambiseg-"  # how files begin that are being written
_HASHED = 8 << 20  # bytes of a file whose content is compared; of larger ones size and time


@dataclass(frozen=True)
class Limits:
    """What a command may take: seconds that it ran or slept, and bytes of its largest process."""

    seconds: float = 30.0
    memory: float = 4e9


LIMITS = Limits()


@dataclass(frozen=True)
class Command:
    """One call of ``ambiseg``, and what it may change.

    Attributes:
        arguments: what is typed after ``ambiseg``.
        writes: files and folders that it may make or change when it succeeds, from the folder that it runs in.
        keeps: of these, what it may change even when it fails, because a later call goes on from there.
        lines: at most this many lines of errors with exit code 2; ``predict`` has one for each image.
    """

    arguments: list[str]
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    lines: int = 1

    @property
    def name(self) -> str:
        """The command without its arguments: ``data check``."""
        return " ".join(self.arguments[: 2 if self.arguments[:1] == ["data"] else 1])


@dataclass
class Ended:
    """How a command ended: its exit code (negative: the signal), what it printed and what it took."""

    code: int
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    memory: float = 0.0
    stopped: str = ""  # why the watch killed it
    survivors: list[str] = field(default_factory=list)  # processes that outlived it


Tree = dict[str, tuple[object, ...]]


def snapshot(root: Path) -> Tree:
    """Every file and folder below ``root``, with what tells whether it was changed."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _state(path)
    return found


def _state(path: str) -> tuple[object, ...]:
    about = os.lstat(path)
    if stat.S_ISLNK(about.st_mode):
        return "link", os.readlink(path)
    if not stat.S_ISREG(about.st_mode):
        return ("folder",) if stat.S_ISDIR(about.st_mode) else ("special", about.st_mode)
    if about.st_size > _HASHED:
        return "file", about.st_size, about.st_mtime_ns
    with open(path, "rb") as file:
        return "file", about.st_size, hashlib.blake2b(file.read()).digest()


def judge(command: Command, ended: Ended, root: Path, before: Tree, limits: Limits = LIMITS) -> list[str]:
    """The faults of a command that was run in ``root/work``, in one line each; none if it did what it may."""
    after = snapshot(root)
    changed = [path for path, state in after.items() if before.get(path) != state]
    gone = [path for path in before if path not in after]
    return [
        *_ending(command, ended, limits),
        *_printed(command, ended),
        *_files(command, ended, root, changed, gone),
        *_halves(root, changed),
    ]


# -- how it ended and what it printed ---------------------------------------------------------------------------------

_NOTES = re.compile(r"ambiseg: (warning: |--[\w.-]+ is --)")  # lines of these are no errors
_FOREIGN = {
    "traceback": r"Traceback \(most recent call last\)",
    "unraisable exception": r"Exception (ignored in|in thread)",
    "crash of the interpreter": r"Fatal Python error|Segmentation fault|terminate called|core dumped",
    "warning of Python's": r"^\S+\.py:\d+: \w*Warning: ",
}


def _ending(command: Command, ended: Ended, limits: Limits) -> Iterable[str]:
    if ended.stopped:
        yield ended.stopped
    elif ended.code < 0:
        yield f"ended by signal {-ended.code}"
    elif ended.code == 70:
        yield "exit 70: a fault of ours"
    elif ended.code not in (0, 1, 2):
        yield f"exit {ended.code}: not documented"
    elif ended.code == 1 and command.name not in ("data check", "predict"):
        yield f"exit 1: not documented for {command.name}"
    if not ended.stopped and ended.seconds > limits.seconds:
        yield f"over {limits.seconds:.0f} s"
    if not ended.stopped and ended.memory > limits.memory:
        yield f"over {limits.memory / 1e9:.1f} GB"
    if ended.survivors:
        yield f"left a process: {ended.survivors[0]}"


def _printed(command: Command, ended: Ended) -> Iterable[str]:
    for what, pattern in _FOREIGN.items():
        if re.search(pattern, ended.err, re.MULTILINE):
            yield what
    lines = [line for line in re.split(r"[\r\n]+", ended.err) if line.strip()]
    errors = [line for line in lines if re.match(r"ambiseg\b[\w ]*: \S", line) and not _NOTES.match(line)]
    if ended.code == 2 and not ended.stopped:
        if not errors and not (
            command.name == "data check" and re.search(r"\berror\b|\bE\d{3}\b", ended.out)
        ):  # its table says it
            yield "exit 2 without a line that says why"
        elif len(errors) > command.lines:
            yield f"exit 2 with {len(errors)} lines of errors"
        elif errors and lines[-1] != errors[-1]:
            yield "exit 2, and the last line is not its error"
        elif "--quiet" in command.arguments and len(lines) > len(errors):
            yield "exit 2 with other lines than its error, though --quiet"


# -- files ------------------------------------------------------------------------------------------------------------


def _files(command: Command, ended: Ended, root: Path, changed: list[str], gone: list[str]) -> Iterable[str]:
    """Anything that is new, other or gone and not declared; paths count from ``root``."""
    if ran := [path for path in changed if CANARY in path]:
        yield f"code from data was run: {ran[0]}"
    failed = ended.code != 0 and not (ended.code == 1 and command.name in ("predict", "data check"))
    allowed = command.keeps if failed else (*command.writes, *command.keeps)
    places = [os.path.normpath(os.path.join("work", path)) for path in allowed]
    if failed and "offending_batch.npz" in ended.err:  # a training whose loss was no number shows what it was given
        places += [os.path.dirname(path) for path in changed if path.endswith("/offending_batch.npz")]
    told = list[str]()
    for path in sorted(changed):
        if CANARY in path or any(path.startswith(above + os.sep) for above in told):
            continue
        if any(part.startswith(DRAFT) for part in path.split(os.sep)):
            fault = f"left a draft: {_place(path)}"
        elif path.split(os.sep)[0] == "cache":
            fault = "" if _finished(root, path) else "left half a store in the cache"
        elif any(_within(path, place) for place in places) or (ended.code == 70 and path.startswith("home")):
            fault = ""  # what was asked for, or the log of a fault
        else:
            fault = f"{'failed and left' if failed else 'left'} {_place(path)}"
        if fault:
            told.append(path)
            yield fault
    for path in gone:
        if path.split(os.sep)[0] != "cache" and not any(_within(path, place) for place in places):
            yield f"removed {_place(path)}"


def _within(path: str, place: str) -> bool:
    """Whether a path is a place, in it, or a folder on the way to it."""
    return path == place or path.startswith(place + os.sep) or place.startswith(path + os.sep)


def _place(path: str) -> str:
    """A path for a list of causes: numbers that are drawn anew each time are left out."""
    return re.sub(r"[0-9a-f]{8,}", "…", path)


def _finished(root: Path, path: str) -> bool:
    """Whether a path of the cache is the cache itself or part of a store that is finished."""
    parts = Path(path).parts
    store = root.joinpath(*parts[:2])
    return len(parts) < 2 or ((store / "store.json").is_file() and not (store / "draft.json").exists())


def _halves(root: Path, changed: list[str]) -> Iterable[str]:
    """Files that were written and are not whole."""
    for path in changed:
        file = root / path
        if not file.is_file() or file.is_symlink() or path.startswith("cache") or DRAFT in path:
            continue
        try:
            if not whole(file):
                yield f"half-written: {_place(path)}"
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            yield f"half-written: {_place(path)}: {type(error).__name__}"


def whole(path: Path) -> bool:
    """Whether a file of a format that is written here is complete; errors of its reader are as good as False."""
    suffix = path.suffix
    if suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    elif suffix == ".jsonl" and path.name != "draft.jsonl":  # a journal may end in the middle
        for line in path.read_text(encoding="utf-8").splitlines():
            json.loads(line)
    elif suffix == ".html":
        return path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    elif suffix in (".npz", ".ckpt"):
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    elif suffix == ".safetensors":
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + size])
        ends = [about["data_offsets"][1] for name, about in tensors.items() if name != "__metadata__"]
        return len(content) == 8 + size + max(ends, default=0)
    elif suffix == ".png":
        return path.read_bytes().endswith(b"IEND\xaeB`\x82")
    return True


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")
