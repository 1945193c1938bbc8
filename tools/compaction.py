"""How much is lost when k weighted masks stand for N = 100: for each run, on images of its test part.

    python tools/compaction.py RUN … [--root DIR] [--images 100] [--samples 100] [--means]

For every image N equally likely masks are drawn. Printed are their GED to the readers, and for k = 2, 3, 4, 8 the loss
(GED of the k to the N), that of k equally weighted draws (what is lost without choosing), the GED of the k to the
readers, and the time of choosing as a share of the time that features and drawing took. docs/guarantees.md has the
numbers.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import numpy as np
import torch

from ambiseg.data.loader import seed_of
from ambiseg.data.module import DataModule
from ambiseg.decisions.compaction import compact
from ambiseg.familiarity import data_of
from ambiseg.masks import MaskDistribution
from ambiseg.metrics import ged
from ambiseg.runs import open_run

KEPT = (2, 3, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--root")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--means", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.runs:
        run = open_run(name)
        data = data_of(run, None if arguments.root is None else {"root": arguments.root}, quiet=True)
        indices = data.indices("test")
        some = [indices[i] for i in np.linspace(0, len(indices) - 1, min(arguments.images, len(indices))).astype(int)]
        found, seconds = measure(run, data, some, arguments.samples, arguments.means)
        print(f"{name} ({run.config.model.method}): {len(some)} images, N = {arguments.samples}")
        print(f"  GED of N to the readers {np.mean(found['all']):.3f}")
        for k in KEPT:
            loss, drawn, readers = (np.mean(found[what, k]) for what in ("loss", "drawn", "readers"))
            share = seconds[k] / seconds["draw"]
            print(f"  k = {k}: loss {loss:.4f}, of k draws {drawn:.4f}, to the readers {readers:.3f}, time {share:.0%}")


def measure(run, data: DataModule, indices: list[int], samples: int, means: bool):
    """Of every image the numbers by name and k, and seconds of CPU."""
    model, classes = run.model().method, run.card.evaluated
    found, seconds = defaultdict(list), defaultdict(float)
    for index in indices:
        batch = data.batch_of(index)
        generator = torch.Generator().manual_seed(seed_of(0, "compaction", batch.names[0]))
        began = time.process_time()
        with torch.no_grad():
            masks = model.predict_whole(batch.images).sample(samples, generator)
        seconds["draw"] += time.process_time() - began
        found["all"].append(float(ged(masks, batch.annotations, classes)))
        for k in KEPT:
            began = time.process_time()
            kept = compact(masks, k, classes=classes, means=means)
            seconds[k] += time.process_time() - began
            found["loss", k].append(float(kept.loss))
            found["readers", k].append(float(ged(kept.masks, batch.annotations, classes)))
            found["drawn", k].append(float(ged(MaskDistribution(masks.labels[:, :k]), masks, classes)))
    return found, seconds


if __name__ == "__main__":
    main()
