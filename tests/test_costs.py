"""What a training cost is recorded beside its weights, and changes nothing else."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time

import pytest

from ambiseg._util.errors import ConfigError
from ambiseg.config import parse
from ambiseg.costs import Cost, read
from ambiseg.runs import Run
from ambiseg.training import train
from ambiseg.training.meter import cpu_seconds
from tests.conftest import TINY


def burn(started: object, stop: object) -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    started.set()  # type: ignore[attr-defined]
    stop.wait(60)  # type: ignore[attr-defined]


def test_children_count_while_they_live_and_afterwards():
    """A worker that has used 0.3 seconds of CPU time: before and after it ends, and once."""
    context = multiprocessing.get_context("fork")
    started, stop = context.Event(), context.Event()
    before = cpu_seconds() - time.process_time()
    child = context.Process(target=burn, args=(started, stop))
    child.start()
    assert started.wait(60)
    alive = cpu_seconds() - time.process_time() - before
    stop.set()
    child.join()
    ended = cpu_seconds() - time.process_time() - before
    assert alive >= 0.25
    assert ended == pytest.approx(alive, abs=0.1)


def test_a_run_records_what_it_cost_and_goes_on_adding(tiny_run, tmp_path):
    cost = Run(tiny_run).cost
    assert cost is not None
    assert cost.epochs == 2
    assert cost.cpu_seconds > 0
    assert cost.wall_seconds > 0
    assert (cost.processes, cost.threads) == (1, 1)
    assert cost.device
    longer, unknown = tmp_path / "longer", tmp_path / "unknown"
    for folder in (longer, unknown):
        shutil.copytree(tiny_run, folder)
    (unknown / "cost.json").write_text("{")  # damaged: the new record covers what was trained since
    (longer / "cost.json").write_text(cost.model_copy(update={"cpu_seconds": 1000.0, "wall_seconds": 2000.0}).written())
    for folder in (longer, unknown):
        train(parse([*TINY, "--trainer.epochs=3"]), folder, resume=True, quiet=True)
    more, new = Run(longer).cost, Run(unknown).cost
    assert more is not None
    assert new is not None
    assert more.cpu_seconds == pytest.approx(1000 + new.cpu_seconds, rel=0.5)
    assert more.cpu_seconds > 1000
    assert more.wall_seconds > 2000
    assert (more.epochs, new.epochs) == (3, 1)
    assert (longer / "metrics.csv").read_bytes() == (unknown / "metrics.csv").read_bytes()
    assert (longer / "last.ckpt").read_bytes() == (unknown / "last.ckpt").read_bytes()


def test_what_is_no_record_is_one_line(tmp_path):
    path = tmp_path / "cost.json"
    assert read(path) is None
    good = Cost(cpu_seconds=1.5, wall_seconds=1, epochs=3)
    path.write_text(good.written())
    assert read(path) == good
    for content, message in (
        ({"format": "x"}, "expected a cost of format ambiseg.Cost/1, found x"),
        ({**json.loads(good.written()), "epochs": -1}, "cost.json: .*epochs"),
        ([], "expected"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message) as error:
            read(path)
        assert "\n" not in str(error.value)
