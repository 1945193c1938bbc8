"""Put a finished and evaluated demo run into the package: ``python tools/ship_demo.py runs/demo``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ambiseg._util.files import write_text
from ambiseg.data.module import DataModule
from ambiseg.evaluation import Evaluation
from ambiseg.runs import Card, Run, card_as_json

TARGET = Path(__file__).parents[1] / "src" / "ambiseg" / "assets" / "demo"
METRICS = ("ged", "ged_unbiased", "matched_iou")


def main(folder: str) -> None:
    run = Run(folder)
    found = Evaluation.load(run.folder / "evaluation-test.json")
    if found.weights != run.digest():
        raise SystemExit(f"{folder}: expected an evaluation of its best weights, found one of others")
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    for name in ("best.safetensors", "config.yaml", "split.json", "metrics.csv"):
        shutil.copy(run.folder / name, TARGET / name)
    about = {**run.about, "data": card_of(run)}
    # The command without the places of one machine: the folder it was run in, and where it wrote to.
    arguments = list(about["command"][1:])
    if "--out" in arguments:
        arguments[arguments.index("--out") + 1] = "runs/demo"
    about["command"] = ["ambiseg", *arguments]
    about["scores"] = {
        "command": "ambiseg evaluate demo --samples " + " ".join(map(str, _samples(found))),
        "split": found.split,
        "images": found.images,
        "patients": found.patients,
        **{setting.key: {name: setting.metrics[name].model_dump() for name in METRICS} for setting in found.settings},
    }
    write_text(TARGET / "run.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    print(f"{TARGET}: {sum(path.stat().st_size for path in TARGET.iterdir()):,} bytes")
    print("python tools/draw_prediction.py draws what the docs show of it")


def card_of(run: Run) -> dict[str, Any]:
    """What ``run.json`` says of the data, computed again: a run of an earlier version says less."""
    data = DataModule(run.config.data, split=run.split)
    data.setup()
    run.split.verify(data.cases)
    return card_as_json(Card.of(data.cases, run.card.intensity, type(run.model().method), *data.trained_on()))


def _samples(found: Evaluation) -> list[int]:
    return sorted({setting.samples for setting in found.settings if setting.form == "standard"})


if __name__ == "__main__":
    main(*sys.argv[1:])
