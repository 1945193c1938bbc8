"""Every method on the same data, split, backbone, training loop and metrics, for the same CPU time.

    python -m benchmarks.zoo shapes runs/zoo --minutes 2
    python -m benchmarks.zoo lidc71 runs/zoo --minutes 12 --root lidc71.npz

A run that is there is not repeated, and one that was stopped goes on. The last weights are scored, so that nothing is
chosen by its score, and validation takes no part of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ambiseg.config import Config, parse
from ambiseg.data.module import DataModule
from ambiseg.evaluation import Evaluation
from ambiseg.methods import METHODS
from ambiseg.runs import build_model
from ambiseg.training.precision import MIXED, resolve
from benchmarks.harness import table

SHAPES = [
    "--data.name=shapes",
    "--data.options={count: 600, size: 32}",
    "--data.batch_size=16",
    "--data.augment={flip: both, quarter_turns: true}",
    "--backbone.channels=[16, 32, 64]",
    "--backbone.momentum=0.1",
    "--optimizer.lr=0.002",
    "--optimizer.decay=cosine",
    "--optimizer.warm_up=50",
    "--optimizer.average=0.99",
]
SETUPS: dict[str, tuple[str | None, list[str]]] = {"shapes": (None, SHAPES), "lidc71": ("lidc71", [])}
# What a method cannot do without, in place of the recipe's: each is explained in docs/methods.md.
_CAR = ["--model.disc_width=8", "--optimizer.weight_decay=0", "--model.disc_steps=1", "--model.disc_cycle=1"]
OWN: dict[str, dict[str, list[str]]] = {
    "shapes": {"car": _CAR, "ccdm": ["--model.steps=10"]},
    "lidc71": {"car": _CAR, "ccdm": ["--model.steps=10"]},
}
COLUMNS = ("ged", "ged_unbiased", "matched_iou", "diversity")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=SETUPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="CPU time of each training")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--root", help="of data that are not part of the package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in () if given.table else given.methods:
        member(name, given)
    show(given.out / given.data)


def member(name: str, given: argparse.Namespace) -> None:
    """Train and score one method, as far as that is not done."""
    run = given.out / given.data / name
    recipe, settings = SETUPS[given.data]
    settings = [*settings, *OWN[given.data].get(name, []), f"--model.method={name}", f"--seed={given.seed}"]
    settings += [f"--data.root={given.root}"] if given.root else []
    settings += ["--trainer.threads=1", "--trainer.accelerator=cpu"]
    if not (run / "run.json").is_file():
        config = parse(settings, recipe)
        epochs = max(1, round(60 * given.minutes / epoch_seconds(config)))
        config = config.with_settings(
            {"trainer.epochs": epochs, "trainer.check_every": epochs, **_moved(config, epochs)}
        )
        print(f"{name}: {epochs} epochs", flush=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        recipe_file = run.parent / f"{name}.json"
        recipe_file.write_text(json.dumps(config.model_dump(mode="json")))
        spent = command("train", str(recipe_file), "--out", str(run), "--quiet")
        (run.parent / f"{name}-cpu.json").write_text(json.dumps({"train": spent}))
    elif not (run / "last.safetensors").is_file() or not (run.parent / f"{name}-cpu.json").is_file():
        spent = command("train", "--resume", str(run), "--quiet")
        (run.parent / f"{name}-cpu.json").write_text(json.dumps({"train": spent, "resumed": True}))
    if not (run / "evaluation-test.json").is_file():
        command("evaluate", str(run), "--which", "last", "--samples", "16", "--device", "cpu", "--quiet")


def _moved(config: Config, epochs: int) -> dict[str, Any]:
    """Schedules of a recipe are for its number of epochs; here their second half begins in the middle of the run."""
    found: dict[str, Any] = {}
    for name, schedule in config.model.schedules.items():
        found[f"model.{name}"] = {**schedule.model_dump(), "warm_up": epochs // 2}
    return found


def epoch_seconds(config: Config) -> float:
    """CPU time of an epoch, from a few steps with their data. A phase counts by its share of the steps."""
    data = DataModule(config.data)
    data.setup()
    loader, generator = data.train_dataloader(), torch.Generator().manual_seed(0)
    model = build_model(config, data.cases.channels, len(data.cases.classes)).train()
    groups, precision = model.parameter_groups(), resolve(config.trainer.precision, "cpu")[0]
    optimisers = {key: torch.optim.Adam(group.parameters, lr=1e-5) for key, group in groups.items()}
    cheapest, loading, batches = dict.fromkeys(groups, math.inf), math.inf, iter(loader)
    for _ in range(5):
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


def command(*arguments: str) -> float:
    """Run ``ambiseg`` to its end; CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "ambiseg", *arguments], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show(folder: Path) -> None:
    """A row per method that is scored, the best first, and what the simple and the perfect score."""
    rows, anchors = [], {}
    for path in folder.glob("*/evaluation-test.json"):
        found, name = Evaluation.load(path, "test"), path.parent.name
        epochs = json.loads((folder / f"{name}.json").read_text())["trainer"]["epochs"]
        spent = json.loads((folder / f"{name}-cpu.json").read_text())["train"] / 60
        for setting in found.settings:
            scores = [setting.score(metric) for metric in COLUMNS]
            shown = [f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in scores]
            rows.append([name, str(epochs), f"{spent:.1f}", f"{setting.form} {setting.samples}", *shown])
        anchors = {anchor.title: anchor.ged.mean for anchor in found.anchors}
    rows.sort(key=lambda row: row[4])
    print(table(["method", "epochs", "CPU min", "masks", *COLUMNS], rows))
    print("\n".join(f"{title}: {ged:.3f}" for title, ged in anchors.items()))


if __name__ == "__main__":
    main()
