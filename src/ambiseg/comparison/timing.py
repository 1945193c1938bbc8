"""CPU time of masks, measured for all methods in turn on the same image: one thread, the smallest of several."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ambiseg._util.progress import reporting
from ambiseg.methods.drawing import draw
from ambiseg.methods.symmetries import symmetric
from ambiseg.runs import Run, Which

MASKS = 16
_REPEATS, _PATIENCE = 5, 6.0  # measurements of each method, and CPU seconds after which one is enough
_SIDE = 128  # of the image, where no run says how large its images are


@dataclass(frozen=True)
class Timing:
    """CPU seconds of 16 masks and of one mask of one image, the network included; and the size of the network."""

    masks: float
    one: float
    parameters: int


def measure(runs: Mapping[str, Run], which: Which, symmetries: int = 1, quiet: bool = False) -> dict[str, Timing]:
    """The timing of each run, by name.

    All predict the same image of random numbers, of the size of the first run's images. Runs take turns, so that a
    machine that becomes slower does so for all.
    """
    if not runs:
        return {}
    card = next(iter(runs.values())).card
    size = card.size or (_SIDE, _SIDE)
    threads = torch.get_num_threads()
    models = {name: run.model(which) for name, run in runs.items()}
    methods = {name: symmetric(model.method, symmetries) for name, model in models.items()}
    image = {n: torch.rand(1, n, *size, generator=torch.Generator().manual_seed(0)) for n in _channels(runs)}
    best: dict[str, dict[int, float]] = {name: {} for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    torch.set_num_threads(1)
    try:
        with reporting("measuring CPU time", quiet) as report, torch.inference_mode():
            for turn in range(_REPEATS + 1):
                report(turn, _REPEATS + 1)
                for name, method in methods.items():
                    if spent[name] > _PATIENCE:
                        continue
                    for n in (1, MASKS):
                        started = time.process_time()
                        predictive = method.predict_whole(image[runs[name].card.channels])
                        draw(predictive, "standard", n, torch.Generator().manual_seed(turn))
                        taken = time.process_time() - started
                        spent[name] += taken
                        best[name][n] = min(best[name].get(n, taken), taken)  # the first of all warms up
    finally:
        torch.set_num_threads(threads)
    return {
        name: Timing(times[MASKS], times[1], sum(one.numel() for one in models[name].method.parameters()))
        for name, times in best.items()
    }


def _channels(runs: Mapping[str, Run]) -> set[int]:
    return {run.card.channels for run in runs.values()}
