"""The user's cache: every file is decoded once, by one process at a time, within a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.data.cache import open_cached, store_name, trim, user_cache
from ambiseg.data.case import Cases
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.store import Store
from tests.cases import random_cases
from tests.conftest import REPOSITORY
from tests.files import disc, made, make, picture, save, save_nifti


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AMBISEG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stores(cache: Path) -> list[str]:
    return sorted(path.parent.name for path in cache.glob("*/store.json"))


def run(code: str, *arguments: object, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    made = {**os.environ, "AMBISEG_CACHE": str(cache), **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=made, cwd=REPOSITORY, check=True)


# -- every file once ---------------------------------------------------------------------------------------------------

COUNT = """
import collections, json, os, sys
root, opened = sys.argv[1] + os.sep, collections.Counter()

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and os.fsdecode(arguments[0]).startswith(root):
        opened[os.fsdecode(arguments[0])[len(root):]] += 1

sys.addaudithook(hook)
"""
TRAIN = """
from ambiseg.config import parse
from ambiseg.training import train
settings = ["--data.name=folder", f"--data.root={sys.argv[1]}", "--data.batch_size=8", "--backbone.channels=[4, 8]"]
train(parse([*settings, "--data.size=16", "--trainer.epochs=1", "--trainer.accelerator=cpu"]), sys.argv[2], quiet=True)
"""
EVALUATE = """
import ambiseg
from ambiseg.reporting import report
ambiseg.evaluate(sys.argv[2], samples=(2,), accelerator="cpu", quiet=True)
report(sys.argv[2], cases=1, quiet=True)
"""
PRINT = "\nprint(json.dumps(opened))\n"


def test_training_opens_every_file_once_and_evaluation_and_report_open_none(tmp_path):
    """Pictures whose labels are not declared: channels, number type and classes are found on the way."""
    root = make(tmp_path / "data", [f"c{i:02}" for i in range(24)], ["Ann", "Bob"])
    save(root / "masks/Ann/c03.png", disc(16, 20) > 0)  # one bit per pixel
    for name in ("c05", "c06"):
        (root / f"images/{name}.png").unlink()
        tifffile.imwrite(root / f"images/{name}.tif", picture())
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    trained = run(
        COUNT + TRAIN + PRINT, root, tmp_path / "run", cache=tmp_path / "cache", TMPDIR=str(made_dir(tmp_path))
    )
    assert json.loads(trained.stdout.splitlines()[-1]) == dict.fromkeys(files, 1)
    later = run(COUNT + EVALUATE + PRINT, root, tmp_path / "run", cache=tmp_path / "cache")
    assert json.loads(later.stdout.splitlines()[-1]) == {}
    assert (tmp_path / "run" / "report.html").is_file()
    assert not list((tmp_path / "tmp").glob("ambiseg*"))


def made_dir(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return tmp_path / "tmp"


def test_volumes_are_decoded_once(tmp_path, cache, monkeypatch):
    from ambiseg.data.sets.folder import reading

    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        save_nifti(tmp_path / f"data/images/{name}.nii.gz", rng.integers(0, 99, (8, 9, 5)).astype(np.int16))
        for reader in ("Ann", "Bob"):
            save_nifti(tmp_path / f"data/masks/{reader}/{name}.nii.gz", rng.integers(0, 2, (8, 9, 5)).astype(np.uint8))
    opened: list[Path] = []

    def opening(path, options):
        opened.append(path)
        return open_source(path, options)

    open_source = reading.open_source
    monkeypatch.setattr(reading, "open_source", opening)
    store = open_cached(Folder(tmp_path / "data"))
    assert len(store) == 15
    assert sorted(opened) == sorted((tmp_path / "data").rglob("*.nii.gz"))
    again = open_cached(Folder(tmp_path / "data"))
    assert len(opened) == 9
    assert (again.names, again.channels, again.classes) == (store.names, 1, ("background", "foreground"))


@pytest.mark.parametrize("settings", [{}, {"void": 255}, {"void": 0}, {"classes": 4}, {"void": 3, "labels": "ids"}])
@pytest.mark.parametrize("kind", ["ids", "binary"])
def test_the_one_pass_finds_what_reading_twice_finds(tmp_path, cache, settings, kind):
    rng = np.random.default_rng(1)
    values = np.array([0, 255] if kind == "binary" else [0, 1, 2, 3], np.uint8)
    for i in range(4):
        save(tmp_path / f"data/images/{i}.png", picture())
        for reader in ("Ann", "Bob", "Cid"):
            save(tmp_path / f"data/masks/{reader}/{i}.png", values[rng.integers(0, len(values), (16, 20))])
        if kind == "binary":
            save(tmp_path / f"data/masks/Bits/{i}.png", disc(16, 20) > 0)
    if kind == "ids" and settings == {"void": 255}:
        save(tmp_path / "data/masks/Ann/1.png", np.full((16, 20), 255, np.uint8) * disc(16, 20))

    def found(cases: Cases):
        digests = [cases.digest(i) for i in range(len(cases))]
        tables = [(case.table.tolist(), case.table.dtype, case.regions.tolist()) for case in cases]
        return digests, tables, cases.classes, cases.evaluated, cases.channels, cases.intensity, list(cases.names)

    def outcome(make):
        try:
            return found(make())
        except DataError as error:
            return str(error)

    once = outcome(lambda: open_cached(Folder(tmp_path / "data", **settings)))
    twice = outcome(lambda: open_cached(Folder(tmp_path / "data", **settings), None))
    assert once == twice


@pytest.mark.parametrize(
    ("value", "settings", "message"),
    [
        (7, {}, r"b\.png: expected class ids 0, 1, 2 … or 0 and 255 in all masks, found values 0, 1, 7"),
        (7, {"classes": 2}, r"b\.png: expected class ids 0 … 1, found value 7 in 4 pixels"),
    ],
)
def test_masks_that_do_not_fit_are_named_after_the_pass(tmp_path, cache, value, settings, message):
    mask = disc(16, 20)
    mask[:2, :2] = value
    save(make(tmp_path / "data", foreground=1) / "masks/Bob/b.png", mask)
    with pytest.raises(DataError, match=message):
        open_cached(Folder(tmp_path / "data", **settings))
    assert stores(cache) == []


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_store_is_found_by_the_state_of_the_data(tmp_path, cache):
    root = make(tmp_path / "data")
    first = open_cached(Folder(root))
    assert isinstance(first, Store)
    assert stores(cache) == [store_name(Folder(root))]
    second = open_cached(Folder(root))
    assert isinstance(second, Store)
    assert second.folder == first.folder
    assert isinstance(open_cached(Folder(root, title="other"), decode=False), Folder)
    save(root / "masks/Ann/a.png", np.zeros((16, 20), np.uint8))
    changed = open_cached(Folder(root))
    assert changed[0].labels[0].sum() == 0
    assert len(stores(cache)) == 2


def test_the_folder_is_the_users_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("AMBISEG_CACHE")
    assert user_cache().name == "ambiseg"
    assert Path(tempfile.gettempdir()) not in user_cache().parents
    monkeypatch.setenv("AMBISEG_CACHE", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


def test_without_decoding_nothing_is_written(cache):
    cases = random_cases(3)
    assert open_cached(cases, decode=False) is cases
    assert open_cached(cases, None) is cases
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_a_note_and_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    code = (
        "import sys; from ambiseg.data.cache import open_cached; from tests.cases import random_cases;"
        "cases = random_cases(3); assert open_cached(cases) is cases; open_cached(cases)"
    )
    found = run(code, cache=tmp_path / "file" / "cache")
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "cannot be written (Not a directory): files are decoded whenever they are needed" in found.stderr
    with pytest.raises(DataError, match=r"data\.cache: expected a folder that can be written, found .*Not a directory"):
        open_cached(random_cases(3), str(tmp_path / "file" / "cache"))


def test_a_damaged_store_is_written_again(cache):
    cases = Shapes(count=4, size=16)
    store = open_cached(cases)
    assert isinstance(store, Store)
    os.truncate(store.folder / "images.bin", 10)
    (store.folder / "cases.jsonl").write_text("{")
    again = open_cached(cases)
    assert np.array_equal(again[3].image, cases[3].image)


def aged(store: Cases, hours: float) -> Path:
    assert isinstance(store, Store)
    then = time.time() - 3600 * hours
    os.utime(store.folder / "used", (then, then))
    return store.folder


def test_the_least_recently_used_stores_go_first_and_never_one_in_use(cache):
    sets = [Shapes(count=4, size=16, seed=seed) for seed in range(4)]
    held = open_cached(sets[0])
    folders = [
        aged(held, 9),
        *(aged(open_cached(cases), hours) for cases, hours in zip(sets[1:], (3, 5, 1), strict=True)),
    ]
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    trim(cache, limit=2.5 * size)
    assert [folder.exists() for folder in folders] == [True, False, False, True]
    trim(cache, limit=0)
    assert [folder.exists() for folder in folders] == [True, False, False, False]
    assert held[3].name == sets[0][3].name
    del held
    trim(cache, limit=0)
    assert stores(cache) == []
    assert not list(cache.iterdir())


def test_opening_a_store_makes_it_recent(cache):
    one, two = Shapes(count=4, size=16), Shapes(count=4, size=16, seed=1)
    folders = [aged(open_cached(one), 9), aged(open_cached(two), 5)]
    open_cached(one)
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    trim(cache, limit=1.5 * size)
    assert [folder.exists() for folder in folders] == [True, False]


def test_the_limit_is_that_of_the_environment(cache, monkeypatch):
    monkeypatch.setenv("AMBISEG_CACHE_GB", "0")
    open_cached(Shapes(count=4, size=16))
    open_cached(Shapes(count=4, size=16, seed=1))
    assert len(stores(cache)) == 1  # the new one, in use while the other is removed
    monkeypatch.setenv("AMBISEG_CACHE_GB", "plenty")
    with pytest.raises(ConfigError, match="AMBISEG_CACHE_GB: expected a number of gigabytes, found 'plenty'"):
        open_cached(Shapes(count=4, size=16, seed=2))


# -- several processes, and killed ones --------------------------------------------------------------------------------

SLOW = """
import sys, time
from ambiseg.data.cache import open_cached
from ambiseg.data.sets.shapes import Shapes

class Slow(Shapes):
    def __getitem__(self, index):
        time.sleep(float(sys.argv[1]))
        print(index, flush=True)
        return super().__getitem__(index)

store = open_cached(Slow(count=6, size=16))
print(type(store).__name__, len(store), flush=True)
"""


def start(delay: float, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "AMBISEG_CACHE": str(cache)}
    command = [sys.executable, "-c", SLOW, str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY)


def test_of_two_processes_one_decodes(cache):
    both = [start(0.05, cache) for _ in range(2)]
    found = [process.communicate(timeout=120)[0].split() for process in both]
    assert sorted(found, key=len) == [["Store", "6"], ["0", "1", "2", "3", "4", "5", "Store", "6"]]


def test_a_killed_process_leaves_a_draft_that_the_next_one_continues(cache):
    killed = start(0.2, cache)
    assert killed.stdout is not None
    for _ in range(4):
        killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert stores(cache) == []
    [draft] = cache.glob("*/draft.json")
    open_cached(Shapes(count=2, size=16))
    assert draft.exists()  # somebody may still need it
    found = start(0, cache).communicate(timeout=120)[0].split()
    assert found[0] in ("3", "4")
    assert found[-3:] == ["5", "Store", "6"]
    assert not draft.exists()


def test_data_that_cannot_be_read_leave_nothing(cache):
    class Damaged(Shapes):
        def __getitem__(self, index):
            raise DataError("shape-0: expected a picture, found damage")

    with pytest.raises(DataError, match="found damage"):
        open_cached(Damaged(count=4, size=16))
    assert list(cache.iterdir()) == []


def test_drafts_that_nobody_continues_are_removed(cache):
    killed = start(0.2, cache)
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.stdout.readline()
    [draft] = cache.glob("*/draft.json")
    os.utime(draft.parent / "used", (0, 0))
    trim(cache)
    assert draft.exists()  # its process is still writing
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    trim(cache)
    assert not draft.parent.exists()


def test_what_a_killed_cleaning_left_is_removed(cache):
    open_cached(Shapes(count=4, size=16))
    (cache / ".removed-0123").mkdir()
    (cache / ".removed-0123" / "images.bin").write_bytes(b"0" * 99)
    trim(cache)
    assert not (cache / ".removed-0123").exists()


def test_what_was_left_in_the_last_moment_is_removed(cache):
    """Between store.json, which makes the store whole, and the removal of its draft."""
    store = open_cached(Shapes(count=4, size=16))
    assert isinstance(store, Store)
    for name in ("draft.json", "draft.jsonl"):
        (store.folder / name).write_text("{}")
    open_cached(Shapes(count=4, size=16))
    assert {path.name for path in store.folder.iterdir()} == {
        "store.json",
        "cases.jsonl",
        "images.bin",
        "regions.bin",
        "lock",
        "used",
    }


def test_a_folder_of_somebody_else_is_left_alone(cache):
    open_cached(Shapes(count=4, size=16))
    (made(cache / "thesis" / "thesis.tex")).write_text("years of work")
    trim(cache, limit=0)
    assert (cache / "thesis" / "thesis.tex").exists()
