"""How often the statements of `ambiseg calibrate` hold on real readers, by repeated divisions of patients.

    python tools/guarantees.py RUN [--root DIR] [--parts test] [--alpha 0.1] [--splits 200]

All images of the parts are scored once. Then patients are divided at random, half to calibrate and half to test, again
and again; printed are the mean over the divisions of how often each statement holds in a test half (of ``found`` and
``sure`` the loss), patients alike, with the range of the middle 95 % of the divisions. docs/guarantees.md has the
numbers.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ambiseg.decisions.calibration import STATEMENTS, ImageScores, Readers, Rules, held, thresholds
from ambiseg.prediction.calibrating import open_part, score_part
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Options
from ambiseg.runs import Run, open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--root")
    parser.add_argument("--parts", nargs="+", default=["test"])
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--per", choices=("reading", "patient"), default="reading")
    parser.add_argument("--samples", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = open_run(arguments.run)
    predictor = Predictor(run, Options(samples=arguments.samples), calibration=False)
    data = {} if arguments.root is None else {"root": arguments.root}
    asked: list[tuple[Readers, float]] = [("all", 0.0), ("marked", 0.0), ("marked", 2.0)]
    for readers, slack in asked:
        rules = Rules(arguments.alpha, readers, arguments.per, slack)
        began = time.process_time()
        scores = [image for part in arguments.parts for image in score_part(run, predictor, part, rules, data, True)[0]]
        patients: dict[str, list[ImageScores]] = defaultdict(list)
        for image in scores:
            patients[image.patient].append(image)
        print(
            f"{arguments.run}, readers {readers}, slack {slack:g}: {len(scores)} images of {len(patients)} patients, "
            f"alpha {arguments.alpha:g}, {arguments.splits} divisions, {time.process_time() - began:.0f} s of CPU"
        )
        for name, values in repeated(list(patients.values()), rules, arguments.splits).items():
            low, high = np.quantile(values, [0.025, 0.975])
            print(f"| {name} | {np.mean(values):.3g} | {low:.3g} to {high:.3g} |")
        print(f"pixels, on average: {pixels(run, predictor, arguments.parts[0], scores, rules, data)}")


def repeated(patients: list[list[ImageScores]], rules: Rules, splits: int) -> dict[str, list[float]]:
    """How often each statement holds in the test half, for every division; and the thresholds."""
    random, found = np.random.default_rng(0), defaultdict(list)
    for _ in range(splits):
        order = random.permutation(len(patients))
        half = len(patients) // 2
        at = thresholds([image for i in order[:half] for image in patients[i]], rules)
        rates: dict[str, list[float]] = defaultdict(list)
        for i in order[half:]:
            said = [held(image, at, rules) for image in patients[i]]
            for name in STATEMENTS:
                values = [value for each in said for value in each[name].values()]
                whole = rules.per == "patient" and name not in ("found", "sure")
                if values:
                    rates[name].append(min(values) if whole else float(np.mean(values)))
        for name, values in rates.items():
            found[name].append(float(np.mean(values)))
        for label, levels in at.classes.items():
            for name, level in levels.items():
                found[f"level of {name}, class {label}"].append(level)
    return found


def pixels(
    run: Run, predictor: Predictor, part: str, scores: list[ImageScores], rules: Rules, data: Mapping[str, Any]
) -> str:
    """How large masks are on 50 images of a part, calibrated on all; beside those of readers who mark anything."""
    found = thresholds(scores, rules)
    module, indices = open_part(run, part, data, True)
    sizes = defaultdict(list)
    for index in indices[:: max(1, len(indices) // 50)]:
        batch = module.batch_of(index)
        with torch.no_grad():
            draws, _ = predictor.draw(predictor.method.predict_whole(batch.images))
        for label, at in found.classes.items():
            soft = draws.marginal_probs(len(run.card.classes))[0, label].double().numpy()
            for name in ("outer", "found", "sure", "inner"):
                mask = soft >= at[name] if name in ("outer", "found") else soft > at[name]
                sizes[name, label].append(int(mask.sum()))
            areas = (batch.annotations.labels[0] == label).flatten(1).sum(1)
            sizes["readers", label] += areas[areas > 0].tolist()
    return ", ".join(f"{name} {np.mean(values):.0f}" for (name, _), values in sizes.items())


if __name__ == "__main__":
    main()
