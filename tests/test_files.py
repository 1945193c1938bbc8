from __future__ import annotations

import os
import stat
import sys

import pytest

from ambiseg._util.files import atomic_folder, atomic_write, write_text

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
    assert done == ["fsync", "replace"]


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
