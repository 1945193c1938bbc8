"""All data sets as Lightning loads them: settings, caches, processes, workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ambiseg._util.errors import DataError
from ambiseg.data.augment import Augment
from ambiseg.data.case import Case
from ambiseg.data.config import DataConfig, open_cases
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Batch
from ambiseg.data.module import DataModule
from ambiseg.data.splits import LeakageError, Rule, Split
from ambiseg.settings import validate
from tests.cases import Listed, random_cases

LEAKING = Split({"train": ("case-0", "case-1"), "val": ("case-2",), "test": ("case-3",)}, "", Rule(declared=True))


class Reading(Listed):
    """Keeps the numbers of the cases that are read."""

    def __init__(self, count: int, **options) -> None:
        cases = random_cases(count, **options)
        super().__init__(list(cases), len(cases.classes))
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Case:
        self.read.append(index)
        return super().__getitem__(index)

    def state(self) -> str:
        return f"{len(self)} cases for reading"


def module(cases=None, split=None, **settings) -> DataModule:
    made = DataModule(DataConfig(**settings), random_cases(40, patients=20) if cases is None else cases, split)
    made.setup()
    return made


def same(a: Batch, b: Batch) -> bool:
    assert a.annotations.regions is not None
    assert b.annotations.regions is not None
    return (
        a.names == b.names
        and torch.equal(a.images, b.images)
        and torch.equal(a.annotations.labels, b.annotations.labels)
        and torch.equal(a.annotations.regions.index, b.annotations.regions.index)
    )


def test_every_case_is_in_one_part_and_parts_share_no_patient():
    data = module(eval_batch_size=3)
    parts = {part: [n for b in data.part_dataloader(part) for n in b.names] for part in ("train", "val", "test")}
    assert sorted(n for names in parts.values() for n in names) == sorted(data.cases.names)
    patients = {part: {p for b in data.part_dataloader(part) for p in b.patients} for part in parts}
    assert patients["train"].isdisjoint(patients["val"] | patients["test"])
    assert patients["val"].isdisjoint(patients["test"])


def test_workers_do_not_change_what_is_loaded_and_leave_nothing_behind():
    settings = {"size": (8, 8), "augment": Augment(rotate=30, noise=0.1), "batch_size": 4, "seed": 3}
    alone, helped = module(**settings), module(**settings, workers=2)
    loaders, one, two = (), [], []
    for epoch in range(2):
        loaders = alone.train_dataloader(), helped.train_dataloader()
        for loader in loaders:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        one, two = (list(loader) for loader in loaders)
        assert all(same(a, b) for a, b in zip(one, two, strict=True))
    loader = helped.train_dataloader()
    started = iter(loader)
    next(started)
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    del started, loader, loaders, one, two
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


def test_an_interrupted_process_takes_its_workers_with_it():
    code = """
import time
from ambiseg.data.config import DataConfig
from ambiseg.data.module import DataModule
from tests.cases import random_cases
import multiprocessing
data = DataModule(DataConfig(workers=2, batch_size=2), random_cases(40))
data.setup()
batches = iter(data.train_dataloader())
next(batches)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout is not None
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 2
    run.send_signal(signal.SIGINT)
    run.wait(20)
    run.stdout.close()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_epochs_differ_and_repeat():
    data = module(size=(8, 8), batch_size=5)

    def epoch(number):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return list(loader)

    assert all(same(a, b) for a, b in zip(epoch(1), epoch(1), strict=True))
    assert not same(epoch(0)[0], epoch(1)[0])


def test_evaluation_is_neither_augmented_nor_thinned():
    data = module(size=(6, 6), eval_size=8, annotations="random", fraction=0.5)
    batch = next(iter(data.val_dataloader()))
    assert batch.images.shape[2:] == (8, 8)
    assert batch.annotations.count == 3
    assert same(batch, next(iter(data.val_dataloader())))
    trained = next(iter(data.train_dataloader()))
    assert trained.images.shape[2:] == (6, 6)
    assert trained.annotations.count == 1


def test_fractions_of_the_training_set_are_nested():
    whole, half, quarter = (module(fraction=f).indices("train") for f in (1.0, 0.5, 0.25))
    assert set(quarter) < set(half) < set(whole)
    assert len(half) == round(len(whole) / 2)


def test_intensity_is_the_data_sets_unless_one_is_given():
    assert module().intensity == random_cases(1).intensity
    given = Intensity(mean=3.0)
    assert module(intensity=given).intensity == given


@pytest.mark.parametrize("cache", [None, "user", "temporary", "folder"])
def test_caches_change_nothing(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("AMBISEG_CACHE", str(tmp_path / "user"))
    settings = {"cache": str(tmp_path / "folder") if cache == "folder" else cache}
    data, again = module(**settings), module(**settings)
    plain = module(cache=None)
    for a, b, c in zip(*(m.test_dataloader() for m in (data, again, plain)), strict=True):
        assert same(a, b)
        assert same(a, c)
    places = {None: [], "folder": ["folder"], "user": ["user"], "temporary": ["user"]}[cache]
    assert [path.name for path in tmp_path.iterdir()] == places
    assert all(len(list((tmp_path / place).glob("*/store.json"))) == 1 for place in places)


def test_few_cases_are_read_without_decoding_all():
    cases = Reading(40)
    split = Split.by_hash(cases, {"train": 0.5, "val": 0.2, "test": 0.3})
    cases.read.clear()
    data = DataModule(DataConfig(), cases, split, decode=False)
    data.setup()
    index = data.indices("test")[0]
    split.verify(data.cases, names=[cases.names[index]])
    batch = data.batch_of(index)
    assert batch.names == (cases.names[index],)
    assert cases.read == [index]  # once, for verifying and for the batch
    with pytest.raises(LeakageError):
        DataModule(DataConfig(), Reading(4, patients=2), LEAKING, decode=False).setup()
    DataModule(DataConfig(), cases, split).setup()  # decodes into the cache
    cases.read.clear()
    cached = DataModule(DataConfig(), cases, split, decode=False)
    cached.setup()
    assert same(cached.batch_of(index), batch)
    assert not cases.read


def test_a_frozen_split_is_compared_with_the_data(tmp_path):
    cases = random_cases(40, patients=20)
    Split.by_hash(cases, {"train": 0.5, "val": 0.2, "test": 0.3}).save(tmp_path / "split.json")
    data = module(cases)
    frozen = DataModule(DataConfig(split=str(tmp_path / "split.json")), cases)
    frozen.setup()
    assert frozen.split.parts != data.split.parts
    other = DataModule(DataConfig(split=str(tmp_path / "split.json")), random_cases(40, patients=20, seed=1))
    with pytest.raises(DataError, match="another content"):
        other.setup()
    with pytest.raises(DataError, match=r"data\.split: expected .* found 'nowhere\.json'"):
        DataModule(DataConfig(split="nowhere.json"), cases).setup()


def test_a_leaking_split_stops_everything():
    with pytest.raises(LeakageError, match="patient 'patient-0' is in train"):
        DataModule(DataConfig(), random_cases(4, patients=2), LEAKING).setup()


def test_declared_splits_without_validation_get_one_from_train():
    cases = random_cases(60)
    cases.declared = ["train"] * 50 + ["test"] * 10
    data = module(cases)
    assert data.split.parts["test"] == tuple(sorted(cases.names[50:]))
    assert 0 < len(data.indices("val")) < 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "nodule"}, r"name: expected one of nodules, .* found 'nodule'; did you mean nodules\?"),
        ({"name": "folder"}, r"data\.root: expected the folder"),
        ({"name": "nodules", "root": "x"}, r"data\.root: nodules is part of the package"),
        (
            {"name": "shapes", "options": {"sise": 3}},
            r"data\.options: expected some of .*size.* found 'sise'; did you mean size\?",
        ),
        ({"batch_size": 0}, "batch_size: expected at least 1, found 0"),
        ({"size": 0}, "size: expected at least 1, found 0"),
        ({"workers": -1}, "workers: expected at least 0, found -1"),
        ({"fraction": 0}, "fraction: expected more than 0 and at most 1, found 0"),
        ({"annotations": "first"}, "annotations: expected all, random, once, a whole number or null, found 'first'"),
        ({"augment": {"noise": -1}}, r"augment\.noise: expected at least 0, found -1"),
        ({"augment": {"scale": [2, 1]}}, r"augment\.scale: expected 0 < smallest ≤ largest, found 2 and 1"),
        ({"intensity": {"low": 1, "high": 0}}, r"intensity\.low: expected low < high, found 1 and 0"),
        ({"intensity": {"lo": 1}}, r"intensity\.lo: no such setting; did you mean intensity\.low\?"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(DataError, match=message):
        open_cases(validate(DataConfig, settings))


def test_lightning_trains_and_each_process_takes_its_share(monkeypatch):
    """As Lightning sees two processes: it leaves the sampler in place, and the two see different cases."""
    seen = []
    for rank in range(2):
        data = module(eval_batch_size=2)
        monkeypatch.setattr(data, "_place", lambda rank=rank: (rank, 2))
        seen.append([n for b in data.val_dataloader() for n in b.names])
    everything = [n for b in module().val_dataloader() for n in b.names]
    assert sorted(seen[0] + seen[1]) == sorted(everything)
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers and the missing validation
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning asks PyTorch in last year's way
def test_lightning_sets_the_epoch():
    from lightning.pytorch import LightningModule, Trainer

    class Watch(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.epochs: list[list[str]] = [[], []]

        def training_step(self, batch: Batch):
            self.epochs[self.current_epoch] += batch.names
            return self.weight * batch.images.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    watch = Watch()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataModule(DataConfig(batch_size=4), random_cases(40, patients=20))
    trainer.fit(watch, datamodule=data)
    first, second = watch.epochs
    assert sorted(first) == sorted(second) == sorted(data.cases.names[i] for i in data.indices("train"))
    assert first != second
