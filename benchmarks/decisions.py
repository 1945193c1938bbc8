"""What is made of 100 masks, against drawing them: all of it together is to take less than a fifth of it.

Each part is measured alone, on masks of which nothing is known yet; "all" is one run of all parts, one after the other,
on masks that have just been drawn. What several parts need is computed once there: which masks are equal, and how many
pixels each pair of them shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from ambiseg.masks import MaskDistribution
from benchmarks.harness import cpu_seconds, publish, table

RUNS = 200
PARTS = ("six rules", "five measures", "three of 100", "guarantees", "look")
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


def least_ms(model: Any, size: int, spacing: float, number: int) -> dict[str, float]:
    """CPU time of drawing, of all parts together, and of each part alone: the least of all runs."""
    image = model.card.prepare(torch.from_numpy(Nodules(size, spacing)[number].image)[None])

    def drawing(_: object = None) -> tuple[MaskDistribution, np.ndarray]:
        predictive = model.predict(image)
        masks = predictive.compact(per_stratum=25, generator=torch.Generator().manual_seed(0))
        return masks, predictive.weights[0].detach().numpy()

    def everything(drawn: MaskDistribution) -> None:
        for part in PARTS:
            runs[part](drawn)

    masks, weights = drawing()
    runs: dict[str, Callable[[MaskDistribution], object]] = {
        "drawing": drawing,
        "all": everything,
        "six rules": partial(consensus_each, how=RULES),
        "five measures": measure_all,
        "three of 100": partial(compact, k=3),
        "guarantees": partial(apply, CALIBRATION, weights=weights),
        "look": partial(expected_disagreement, classes=(1,)),
    }
    if "staple" in installed():
        runs["staple"] = partial(consensus, how="staple")
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(RUNS):  # in turn, so that other work on the machine falls on all of them
        for name, run in runs.items():
            unknown = replace(masks)  # without what earlier runs have computed of them
            best[name] = min(best[name], 1e3 * cpu_seconds(partial(run, unknown)))
    return best


def main() -> None:
    print("decisions: of 100 masks of the shipped model, one thread")
    torch.set_num_threads(1)
    model, rows, data = load("demo"), [], {}
    for name, case in CASES.items():
        best = least_ms(model, *case)
        share = best["all"] / best["drawing"]
        cells = [f"{best[part]:.1f}" if part in best else "–" for part in ("drawing", *PARTS, "all", "staple")]
        rows.append([name, *cells[:-1], f"{100 * share:.0f} %", cells[-1]])
        data[name] = {**best, "everything": share}
    headers = ["image", "drawing 100 masks, CPU ms", *PARTS, "all", "all, of drawing", "STAPLE alone"]
    publish("decisions", "What is made of 100 masks", table(headers, rows), data)


if __name__ == "__main__":
    main()
