"""How much validation scores of one model vary by chance: standard deviations over seeds of the draws.

    python tools/validation_noise.py RUN [--seeds 20] [--samples 16]

RUN is the folder of a run, or the name of a shipped model. All seeds share one pass of the network. The scores are as
in ``metrics.csv``: ``val_ged`` of N standard masks, the unbiased estimate of the same masks, and ``val_ged_unbiased``,
which takes as many masks from every stratum. docs/train.md has the numbers of the demo.
"""

from __future__ import annotations

import argparse
import time

import torch

from ambiseg.data.loader import seed_of
from ambiseg.data.module import DataModule
from ambiseg.methods.base import Stratified
from ambiseg.methods.drawing import draw, unbiased_ged
from ambiseg.metrics import compare
from ambiseg.runs import open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run, seeds, samples = open_run(arguments.run), arguments.seeds, arguments.samples
    data = DataModule(run.config.data, split=run.split)
    data.setup()
    model, how = run.model().method, {"classes": data.cases.evaluated, "protocol": run.config.evaluation.protocol}
    names = ("GED, standard", "unbiased, standard", "unbiased, by strata")
    totals, seconds, images = (
        torch.zeros(3, seeds, dtype=torch.double),
        dict.fromkeys(("features", *names[::2]), 0.0),
        0,
    )
    for batch in data.val_dataloader():
        began = time.process_time()
        predictive = model.predict_whole(batch.images)
        seconds["features"] += time.process_time() - began
        images += len(batch.names)
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed_of(seed, "noise", batch.names[0]))
            began = time.process_time()
            pair = compare(predictive.sample(samples, generator), batch.annotations, **how)
            totals[0, seed] += pair.ged().nansum()
            totals[1, seed] += unbiased_ged(pair, 1).nansum()
            seconds[names[0]] += (time.process_time() - began) / seeds
            if isinstance(predictive, Stratified):
                began = time.process_time()
                drawing = draw(predictive, "compact", max(samples, 2 * predictive.weights.shape[1]), generator)
                pair = compare(drawing.masks, batch.annotations, **how)
                totals[2, seed] += unbiased_ged(pair, drawing.strata).nansum()
                seconds[names[2]] += (time.process_time() - began) / seeds
    print(f"{images} validation images, {samples} masks, {seeds} seeds")
    for name, scores in zip(names, totals / images, strict=True):
        print(f"{name:20} mean {scores.mean():.4f}  standard deviation {scores.std():.5f}")
    print("CPU seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
