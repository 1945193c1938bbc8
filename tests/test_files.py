from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import Lock, atomic_folder, atomic_write, contents, made, sweep, write_text

POSIX = sys.platform != "win32"


def test_the_file_appears_whole_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "result.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"  # until the block ends
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["result.bin"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "result.bin"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half of it")
            raise failure

    with pytest.raises(failure):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["result.bin"]


@pytest.mark.skipif(not POSIX, reason="permission bits are POSIX's")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "written", "")
        (tmp_path / "plain").write_text("")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("written", "plain")]
    assert modes == [0o666 & ~umask] * 2


@pytest.mark.skipif(not POSIX, reason="links need no privilege on POSIX only")
def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "file").read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["file"]


def test_the_disk_has_the_content_before_the_name_changes(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    write_text(tmp_path / "note", "text")
    assert done == ["fsync", "replace", "fsync"]  # the last is of the folder, which has the name


def test_text_is_utf8_with_its_line_ends_as_they_are(tmp_path):
    write_text(tmp_path / "note", "ä\r\nb\n")
    assert (tmp_path / "note").read_bytes() == "ä\r\nb\n".encode()


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    write_text(tmp_path / ("n" * 255), "text")
    assert (tmp_path / ("n" * 255)).read_text() == "text"


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"note: the folder .*absent does not exist"):
        write_text(tmp_path / "absent" / "note", "")
    with pytest.raises(IsADirectoryError, match="expected a file to write, found a folder"):
        write_text(tmp_path, "")


@pytest.mark.skipif(not POSIX or os.geteuid() == 0, reason="no folder is closed to the superuser")
def test_a_folder_that_may_not_be_written_to(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(PermissionError, match="note"):
        write_text(tmp_path / "closed" / "note", "")


def test_a_full_disk_is_named_by_the_file(tmp_path):
    """Writing knows no names, so the system's error has none."""

    def fill() -> None:
        with atomic_write(tmp_path / "result.bin"):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.filename == str(tmp_path / "result.bin")


@pytest.mark.parametrize("before", [False, True])
def test_a_folder_appears_whole_and_replaces_what_was_there(tmp_path, before):
    path = tmp_path / "results"
    if before:
        path.mkdir()
        (path / "old").touch()
    with atomic_folder(path) as folder:
        write_text(folder / "new", "")
        assert path.exists() == before
    assert os.listdir(path) == ["new"]
    assert os.listdir(tmp_path) == ["results"]

    def fill() -> None:
        with atomic_folder(path) as folder:
            write_text(folder / "half", "")
            raise OSError(28, "No space left on device", str(folder / "half"))

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.filename == str(path)
    assert (os.listdir(path), os.listdir(tmp_path)) == (["new"], ["results"])


# -- killed processes --------------------------------------------------------------------------------------------------

LOCKS = pytest.mark.skipif(not POSIX, reason="needs the locks of POSIX")
KILLED = """
import os, signal
from pathlib import Path
from ambiseg._util.files import *
with {holding} as held:
    {then}
    os.write(1, b"ready\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def stopped(folder: Path, holding: str, then: str = "pass") -> subprocess.Popen[str]:
    """A process that is stopped in the block of one of our context managers."""
    code = textwrap.dedent(KILLED).format(holding=holding, then=then)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@LOCKS
@pytest.mark.parametrize(
    ("holding", "then"),
    [("atomic_write('a')", "held.write(b'half')"), ("atomic_folder('a')", "write_text(held / 'b', 'half')")],
)
def test_a_draft_is_swept_when_its_writer_is_dead_and_not_before(tmp_path, holding, then):
    process = stopped(tmp_path, holding, then)
    sweep(tmp_path)
    assert contents(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 1  # its writer lives
    kill(process)
    write_text(tmp_path / "other", "")  # whoever writes next
    assert os.listdir(tmp_path) == ["other"]


@LOCKS
def test_drafts_of_any_kind_and_version_are_swept(tmp_path):
    (tmp_path / ".ambiseg-0").touch()
    (tmp_path / ".last.ckpt.draft").touch()
    (tmp_path / ".ambiseg-1").symlink_to(tmp_path / "kept")
    (tmp_path / ".ambiseg-2" / "below").mkdir(parents=True)
    os.mkfifo(tmp_path / ".ambiseg-3")
    (tmp_path / "kept").touch()
    assert contents(tmp_path) == ["kept"]
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["kept"]


def test_a_folder_that_replaces_nothing(tmp_path):
    target = tmp_path / "run"
    (target / ".ambiseg-0").mkdir(parents=True)
    (target / ".ambiseg-lock").touch()  # of a killed process
    with atomic_folder(target, replace=False) as draft:
        write_text(draft / "first", "")
    assert os.listdir(target) == ["first"]

    def again() -> None:
        with atomic_folder(target, replace=False) as draft:
            write_text(draft / "second", "")

    with pytest.raises(FileExistsError, match="found files in it"):
        again()
    assert (os.listdir(target), os.listdir(tmp_path)) == (["first"], ["run"])


def test_a_folder_never_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "file").write_text("kept")

    def write() -> None:
        with atomic_folder(tmp_path / "file") as draft:
            write_text(draft / "a", "")

    with pytest.raises(FileExistsError, match="found a file"):
        write()
    assert os.listdir(tmp_path) == ["file"]


def test_folders_made_for_what_fails_go_again(tmp_path):
    (tmp_path / "kept").mkdir()
    for folder in ("kept/a/b", "new/a"):
        with pytest.raises(KeyError), made(tmp_path / folder):
            raise KeyError
    with made(tmp_path / "kept" / "c"):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "kept"]


@LOCKS
def test_a_lock_refuses_a_second_process_and_dies_with_its_own(tmp_path):
    process = stopped(tmp_path, "Lock('.', 'training')")
    with pytest.raises(ConfigError, match=rf"found training by process {process.pid}; wait"), Lock(tmp_path, "x"):
        pass
    assert contents(tmp_path) == []
    kill(process)
    assert os.listdir(tmp_path) == [".ambiseg-lock"]
    with Lock(tmp_path, "resuming"):
        assert (tmp_path / ".ambiseg-lock").read_text() == f"resuming by process {os.getpid()}\n"
    assert os.listdir(tmp_path) == []


@LOCKS
def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    """Workers of a data loader live for seconds after their parent was killed."""
    then = "if os.fork() == 0:\n        os.write(1, b'child %d\\n' % os.getpid())\n        signal.pause()"
    code = textwrap.dedent(KILLED).format(holding="Lock('.', 'training')", then=then)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]  # of both, in any order, each written at once
    child = next(int(line.split()[1]) for line in lines if line.startswith("child"))
    try:
        process.kill()
        process.wait()
        with Lock(tmp_path, "resuming"):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
