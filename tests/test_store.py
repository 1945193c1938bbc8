"""The memory-mapped store: the same cases, whatever interrupts its writing."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, Decoded
from ambiseg.data.loader import BatchSpec, Loader, Window
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.splits import fingerprint
from ambiseg.data.store import Store
from tests.cases import Listed, random_cases
from tests.mutations import mutated, survives


def same(a: Case, b: Case) -> bool:
    fields = ("image", "regions", "table", "weights", "void")
    arrays = [(getattr(a, f), getattr(b, f)) for f in fields]
    equal = all((x is None) == (y is None) and (x is None or np.array_equal(x, y)) for x, y in arrays)
    dtypes = all(getattr(a, f).dtype == getattr(b, f).dtype for f in ("image", "regions", "table"))
    return equal and dtypes and (a.name, a.patient, a.readers) == (b.name, b.patient, b.readers)


FINISHED = ("cases.jsonl", "store.json")


class Interrupted(Exception):
    pass


class Breaking(Listed):
    """Stops at one case, and counts how often each is read."""

    def __init__(self, cases: Cases, at: int | None) -> None:
        super().__init__(list(cases), len(cases.classes))
        self.at, self.read = at, [0] * len(cases)
        self._state = cases.state()

    def __getitem__(self, index: int) -> Case:
        if index == self.at:
            raise Interrupted
        self.read[index] += 1
        return super().__getitem__(index)

    def state(self) -> str:
        return self._state


@pytest.mark.parametrize("void", [False, True])
def test_a_store_holds_what_its_source_holds(tmp_path, void):
    sizes = [(5, 7), (9, 4), (1, 1)]
    cases = [random_cases(4, size, None, void=void, seed=i)[3] for i, size in enumerate(sizes)]
    cases = [Case(**{**case.__dict__, "name": f"ein Fall {i} ß"}) for i, case in enumerate(cases)]
    source = Listed(cases, 3, declared=["train", "val", "train"])
    done = []
    store = Store.build(source, tmp_path / "a folder", lambda *x: done.append(x))
    assert done == [(1, 3), (2, 3), (3, 3)]
    for i in range(3):
        assert same(store[i], source[i])
        assert store.digest(i) == source.digest(i)
        assert store.image_digest(i) == source.image_digest(i)
    assert (list(store.names), list(store.patients), store.declared) == (source.names, source.patients, source.declared)
    assert (store.title, store.classes, store.evaluated) == (source.title, source.classes, source.evaluated)
    assert (store.channels, store.intensity, store.state()) == (source.channels, source.intensity, source.state())


def test_pixels_stay_on_disk(tmp_path):
    store = Store.build(random_cases(3), tmp_path)
    image = store[1].image
    base = image
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not image.flags.writeable  # nobody changes the data by accident
    assert image.flags.aligned


def test_a_finished_store_is_opened_not_written_again(tmp_path):
    source = Breaking(random_cases(4), None)
    Store.build(source, tmp_path)
    Store.build(source, tmp_path)
    assert source.read == [1, 1, 1, 1]


def test_a_store_of_other_data_is_replaced(tmp_path):
    Store.build(random_cases(4, seed=0), tmp_path)
    store = Store.build(random_cases(2, seed=1), tmp_path)
    assert len(store) == 2
    assert same(store[1], random_cases(2, seed=1)[1])


@pytest.mark.parametrize("damage", ["none", "half a line", "pixels missing"])
def test_writing_is_taken_up_where_it_stopped(tmp_path, damage):
    cases = random_cases(6)
    with pytest.raises(Interrupted):
        Store.build(Breaking(cases, at=4), tmp_path)
    with pytest.raises(DataError, match="expected a finished store"):
        Store(tmp_path)
    if damage == "half a line":
        journal = tmp_path / "draft.jsonl"
        journal.write_text(journal.read_text()[:-20])
    elif damage == "pixels missing":
        os.truncate(tmp_path / "regions.bin", os.path.getsize(tmp_path / "regions.bin") - 1)
    second = Breaking(cases, at=None)
    store = Store.build(second, tmp_path)
    assert second.read == ([0, 0, 0, 0, 1, 1] if damage == "none" else [0, 0, 0, 1, 1, 1])
    assert all(same(store[i], cases[i]) for i in range(6))
    assert {path.name for path in tmp_path.iterdir()} - {"lock"} == {"images.bin", "regions.bin", *FINISHED}


def test_an_interrupted_store_of_other_data_is_not_continued(tmp_path):
    with pytest.raises(Interrupted):
        Store.build(Breaking(random_cases(6, seed=0), at=4), tmp_path)
    store = Store.build(random_cases(6, seed=1), tmp_path)
    assert all(same(store[i], random_cases(6, seed=1)[i]) for i in range(6))


class Doubling(Listed):
    """Masks hold twice the class id, which is known when all cases have been read."""

    def __init__(self, cases: Cases, at: int | None = None) -> None:
        super().__init__(list(cases), len(cases.classes))
        self.at, self.read = at, 0
        self.classes = ()

    def state(self) -> str:
        return "doubled"

    def decode(self, start: int = 0) -> Iterator[Decoded]:
        for index in range(start, len(self)):
            if index == self.at:
                raise Interrupted
            self.read += 1
            case = replace(self[index], table=self[index].table * 2)
            yield Decoded(case, case.image_digest, observed={"most": int(case.table.max())})

    def settle(self, observed: Sequence[Any]) -> bool:
        self.classes = tuple("abcdefgh"[: max(one["most"] for one in observed) // 2 + 1])
        return True

    def settled(self, case: Case, observed: Any) -> Case:
        assert observed["most"] == case.table.max()
        return replace(case, table=case.table // np.array(2, case.table.dtype))


@pytest.mark.parametrize("interrupted", [False, True])
def test_tables_are_settled_when_everything_has_been_read(tmp_path, interrupted):
    cases = random_cases(5, void=True)
    if interrupted:
        with pytest.raises(Interrupted):
            Store.build(Doubling(cases, at=3), tmp_path)
    source = Doubling(cases)
    store = Store.build(source, tmp_path)
    assert source.read == (2 if interrupted else 5)
    assert store.classes == ("a", "b", "c")
    for i in range(5):
        assert same(store[i], cases[i])
        assert store.digest(i) == cases.digest(i)
    assert store.fingerprint == fingerprint(cases)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"expected a store or an empty folder to write one, found thesis\.tex"):
        Store.build(random_cases(2), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_damaged_stores_are_named(tmp_path):
    Store.build(random_cases(3), tmp_path)
    os.truncate(tmp_path / "images.bin", 10)
    with pytest.raises(DataError, match=r"images\.bin: expected .* bytes, found 10"):
        Store(tmp_path)
    header = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**header, "count": 9}))
    with pytest.raises(DataError, match=r"cases\.jsonl: expected 9 cases, found 3"):
        Store(tmp_path)
    (tmp_path / "store.json").write_text(json.dumps({**header, "format": "ambiseg.Store/9"}))
    with pytest.raises(DataError, match=r"found ambiseg\.Store/9"):
        Store(tmp_path)
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(DataError, match=r"store\.json: expected a store as JSON"):
        Store(tmp_path)
    with pytest.raises(DataError, match="expected a finished store"):
        Store(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["store.json", "cases.jsonl", "regions.bin", "images.bin"])
def test_a_damaged_store_is_read_or_refused_in_one_line(tmp_path, name):
    Store.build(random_cases(3, void=True), tmp_path)

    def read() -> None:
        store = Store(tmp_path)
        for i, case in enumerate(store):
            _ = case.labels, case.valid, case.mass, store.size_of(i), store.origin(i)
        Loader(store, store.intensity, Window((8, 8)))[BatchSpec((0, min(1, len(store) - 1)), 1)]

    assert survives(tmp_path / name, read, 150) > 50
    read()


def test_what_a_line_says_fits_its_pixels(tmp_path):
    Store.build(random_cases(3), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    for change, message in [
        ({"readers": ["a"]}, "expected class|expected a table|weights and void regions that fit it"),
        ({"weights": [0, 0, 0]}, "expected weights with a sum above 0, found"),
        ({"weights": [1.0]}, "weights and void regions that fit it"),
        ({"table": [9] * len(lines[1]["table"])}, "expected class ids below 3, found 9 to 9"),
        ({"table": lines[1]["table"][:3]}, "expected regions below 1, found"),
        ({"image": {**lines[1]["image"], "at": 1 << 40}}, "images.bin: case 'case-1': expected"),
        (
            {"image": {**lines[1]["image"], "shape": [1, 10, 12]}},
            "expected regions of the image's size 10×12, found 12×10",
        ),
        ({"image": {**lines[1]["image"], "dtype": "|O"}}, "line 2: image.dtype: expected"),
        (
            {"regions": {**lines[1]["regions"], "shape": [0, 0]}},
            "line 2: regions.shape.0: expected at least 1, found 0",
        ),
    ]:
        changed = [lines[0], {**lines[1], **change}, lines[2]]
        (tmp_path / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        with pytest.raises(DataError, match=message):
            list(Store(tmp_path))


@pytest.mark.parametrize("name", ["draft.json", "draft.jsonl", "regions.bin"])
def test_a_damaged_draft_is_not_continued(tmp_path, name):
    cases = random_cases(4)
    with pytest.raises(Interrupted):
        Store.build(Breaking(cases, at=3), tmp_path / "draft")
    rng = random.Random(name)
    for number in range(20):
        shutil.copytree(tmp_path / "draft", tmp_path / str(number))
        path = tmp_path / str(number) / name
        path.write_bytes(mutated(path.read_bytes(), rng))
        store = Store.build(Breaking(cases, at=None), tmp_path / str(number))
        assert name == "regions.bin" or all(same(store[i], cases[i]) for i in range(4))


def test_a_store_can_be_sent_to_another_process(tmp_path):
    store = Store.build(random_cases(3), tmp_path)
    _ = store[0]
    content = pickle.dumps(store)
    assert same(pickle.loads(content)[2], store[2])


def test_two_processes_do_not_write_at_once(tmp_path):
    code = (
        "import sys; from tests.cases import random_cases; from ambiseg.data.store import Store;"
        "s = Store.build(random_cases(40), sys.argv[1]); print(len(s), s[39].name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert (out, run.returncode) == ("40 case-39\n", 0), err


class Unreadable(Shapes):
    """The third of whose cases cannot be decoded."""

    def decode(self, start: int = 0):
        for number, decoded in enumerate(super().decode(start), start):
            if number == 2:
                raise DataError("c.png: expected PNG, found text")
            yield decoded


def test_a_source_that_cannot_be_decoded_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match=r"c\.png"):
        Store.build(Unreadable(count=4, size=16), tmp_path / "new" / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"c\.png"):
        Store.build(Unreadable(count=4, size=16), tmp_path / "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_what_killed_processes_left_in_a_store_is_removed(tmp_path):
    cases = Shapes(count=4, size=16)
    (tmp_path / ".ambiseg-0").touch()  # killed before the first file had its name
    Store.build(cases, tmp_path)
    whole = sorted(path.name for path in tmp_path.iterdir())
    for name in ("draft.json", "draft.jsonl", ".ambiseg-1"):  # killed when all was written
        (tmp_path / name).touch()
    Store.build(cases, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == whole


def test_a_folder_of_other_files_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"found thesis\.tex"):
        Store.build(Shapes(count=4, size=16), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_full_disk_names_the_store(tmp_path):
    class Full(Shapes):
        def decode(self, start: int = 0):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        Store.build(Full(count=4, size=16), tmp_path / "store")
    assert caught.value.filename == str(tmp_path / "store")
