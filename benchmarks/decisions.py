"""Single masks and measurements of 100 masks, against drawing them: both are to take less than a fifth of it."""

from __future__ import annotations

from typing import Any

import torch

from ambiseg import load
from ambiseg.data import Nodules
from ambiseg.decisions.consensus import CONSENSUS, consensus, consensus_each, installed
from ambiseg.decisions.measure import measure_all
from benchmarks.harness import cpu_seconds, publish, table

RULES = [name for name in CONSENSUS if name != "staple"]
CASES = {  # what is predicted: size and spacing of the image, number of the nodule
    "a nodule, 64²": (64, 0.5, 7),
    "a large nodule, 64²": (64, 0.5, 0),
    "a nodule, 128²": (128, 0.25, 7),
}


def main() -> None:
    print("decisions: of 100 masks of the shipped model, one thread")
    torch.set_num_threads(1)
    model, rows, data = load("demo"), [], {}
    for name, (size, spacing, number) in CASES.items():
        image = model.card.prepare(torch.from_numpy(Nodules(size, spacing)[number].image)[None])

        def drawing(image: torch.Tensor = image):
            predictive: Any = model.predict(image)
            return predictive.compact(per_stratum=25, generator=torch.Generator().manual_seed(0))

        masks = drawing()
        parts = {
            "drawing": drawing,
            "six rules": lambda masks=masks: consensus_each(masks, RULES),
            "five measures": lambda masks=masks: measure_all(masks),
        }
        if "staple" in installed():
            parts["staple"] = lambda masks=masks: consensus(masks, "staple")
        best = dict.fromkeys(parts, float("inf"))
        for _ in range(20):  # in turn, so that other work on the machine falls on all of them
            for part, run in parts.items():
                best[part] = min(best[part], 1e3 * cpu_seconds(run))
        share = (best["six rules"] + best["five measures"]) / best["drawing"]
        cells = [f"{best[part]:.1f}" if part in best else "–" for part in ("drawing", "six rules", "five measures")]
        rows.append([name, *cells, f"{100 * share:.0f} %", f"{best['staple']:.1f}" if "staple" in best else "–"])
        data[name] = {**best, "share": share}
    headers = ["image", "drawing 100 masks, CPU ms", "six rules", "five measures", "both, of drawing", "STAPLE alone"]
    publish("decisions", "Single masks and measurements of 100 masks", table(headers, rows), data)


if __name__ == "__main__":
    main()
