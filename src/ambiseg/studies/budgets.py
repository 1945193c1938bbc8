"""Equal budgets: how many epochs a CPU time allows, from a few timed steps, measured once for a folder of studies."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import Lock, write_text
from ambiseg._util.reading import read_json
from ambiseg.config import Config

FILE = "budgets.json"
STEPS = 5  # of which the fastest counts
_PATIENCE = 600.0  # seconds to wait for another process that measures


def known(out: Path) -> dict[str, float]:
    """CPU seconds of an epoch, by the fingerprint of a configuration with its recipe's number of epochs."""
    path = out / FILE
    if not path.is_file():
        return {}
    content = read_json(path, "budgets", dict[str, dict[str, Any]])
    found = {}
    for key, one in content.items():
        seconds = one.get("seconds")
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ConfigError(f"{path}: expected seconds of an epoch for {key}, found {seconds!r}")
        found[key] = float(seconds)
    return found


def measured(out: Path, key: str, config: Config, name: str) -> float:
    """CPU seconds of an epoch: as they were measured before, else measured now and kept.

    One process measures at a time, so that two of them never have different budgets.
    """
    with _waiting(out / "locks" / "budgets"):
        if key in (found := known(out)):
            return found[key]
        seconds = epoch_seconds(config)
        path = out / FILE
        content = read_json(path, "budgets", dict[str, dict[str, Any]]) if path.is_file() else {}
        content[key] = {"seconds": seconds, "member": name, "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return seconds


def epochs_for(minutes: float, seconds: float) -> int:
    """How many epochs fit.

    >>> epochs_for(12, 25.0)
    29
    """
    return max(1, round(60 * minutes / seconds))


def epoch_seconds(config: Config) -> float:
    """CPU time of an epoch, from a few steps with their data. A phase counts by its share of the steps."""
    import torch

    from ambiseg.data.module import DataModule
    from ambiseg.runs import build_model
    from ambiseg.training.precision import MIXED, resolve

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = DataModule(config.data)
        data.setup()
        loader, generator = data.train_dataloader(), torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            model = build_model(config, data.cases.channels, len(data.cases.classes)).train()
        groups, precision = model.parameter_groups(), resolve(config.trainer.precision, "cpu")[0]
        optimisers = {key: torch.optim.Adam(group.parameters, lr=1e-5) for key, group in groups.items()}
        cheapest, loading, batches = dict.fromkeys(groups, math.inf), math.inf, iter(loader)
        for _ in range(min(STEPS, len(loader))):
            started = time.process_time()
            batch = next(batches)
            loading = min(loading, time.process_time() - started)
            for phase in groups:
                started, extra = time.process_time(), {"phase": phase} if len(groups) > 1 else {}
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == MIXED):
                    loss = model.loss(batch.images, batch.annotations, generator=generator, **extra)["total"]
                optimisers[phase].zero_grad()
                loss.backward()
                optimisers[phase].step()
                cheapest[phase] = min(cheapest[phase], time.process_time() - started)
        steps = [tuple(model.phases(step)) for step in range(1000)]
        shares = {phase: sum(phase in step for step in steps) / len(steps) for phase in groups}
        return (loading + sum(cheapest[phase] * shares[phase] for phase in groups)) * len(loader)
    finally:
        torch.set_num_threads(threads)


class _waiting:
    """A lock that is waited for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(folder, "measuring")

    def __enter__(self) -> None:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                self.lock.__enter__()
                return
            except ConfigError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(*error)
