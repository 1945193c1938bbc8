"""What is made of 100 masks, against drawing them: single masks and measurements take less than a fifth of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ambiseg import load
from ambiseg.data import Nodules
from ambiseg.decisions.calibration import Calibration, ClassThresholds, apply
from ambiseg.decisions.compaction import compact
from ambiseg.decisions.consensus import CONSENSUS, consensus, consensus_each, installed
from ambiseg.decisions.looking import expected_disagreement
from ambiseg.decisions.measure import measure_all
from benchmarks.harness import cpu_seconds, publish, table

RULES = [name for name in CONSENSUS if name != "staple"]
CASES = {  # what is predicted: size and spacing of the image, number of the nodule
    "a nodule, 64²": (64, 0.5, 7),
    "a nodule that fills the image, 64²": (64, 0.5, 0),
    "a nodule, 128²": (128, 0.25, 7),
}
LEVELS = ClassThresholds(id=1, name="", patients=40, readings=160, outer=0.05, inner=0.95, found=0.2, sure=0.8, area=1)
CALIBRATION = Calibration(
    alpha=0.1,
    weights="",
    which="best",
    data="",
    part="val",
    patients=40,
    images=60,
    size=((64, 64), (64, 64)),
    strata=0.9,
    classes=[LEVELS],
)


def main() -> None:
    print("decisions: of 100 masks of the shipped model, one thread")
    torch.set_num_threads(1)
    model, rows, data = load("demo"), [], {}
    for name, (size, spacing, number) in CASES.items():
        image = model.card.prepare(torch.from_numpy(Nodules(size, spacing)[number].image)[None])

        def drawing(image: torch.Tensor = image) -> tuple[Any, np.ndarray]:
            predictive: Any = model.predict(image)
            masks = predictive.compact(per_stratum=25, generator=torch.Generator().manual_seed(0))
            return masks, predictive.weights[0].detach().numpy()

        masks, weights = drawing()
        parts = {
            "drawing": drawing,
            "six rules": partial(consensus_each, masks, RULES),
            "five measures": partial(measure_all, masks),
            "three of 100": partial(compact, masks, 3),
            "guarantees": partial(apply, CALIBRATION, masks, weights),
            "look": partial(expected_disagreement, masks, (1,)),
        }
        if "staple" in installed():
            parts["staple"] = partial(consensus, masks, "staple")
        best = dict.fromkeys(parts, float("inf"))
        for _ in range(20):  # in turn, so that other work on the machine falls on all of them
            for part, run in parts.items():
                best[part] = min(best[part], 1e3 * cpu_seconds(run))
        share = (best["six rules"] + best["five measures"]) / best["drawing"]
        everything = sum(value for part, value in best.items() if part not in ("drawing", "staple")) / best["drawing"]
        cells = [f"{best[part]:.1f}" if part in best else "–" for part in [*list(parts)[:6], "staple"]]
        rows.append([name, *cells[:3], f"{100 * share:.0f} %", *cells[3:6], f"{100 * everything:.0f} %", cells[6]])
        data[name] = {**best, "share": share, "everything": everything}
    headers = ["image", "drawing 100 masks, CPU ms", "six rules", "five measures", "both, of drawing"]
    headers += ["three of 100", "guarantees", "look", "all, of drawing", "STAPLE alone"]
    publish("decisions", "What is made of 100 masks", table(headers, rows), data)


if __name__ == "__main__":
    main()
