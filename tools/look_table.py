"""The table of detection rates in docs/looking.md: how many changed images `ambiseg look` and the card's values find.

    python tools/look_table.py RUN DATA [OTHER.npz]

RUN has look.npz, as `ambiseg look RUN` and trainings leave it. OTHER.npz holds pictures ``[N, H, W, 3]`` under any
name; they are made grey, cut to the size of the images, and given the range of the training images. At most 300 test
images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from ambiseg.familiarity import data_of, joined, saved_familiarity
from ambiseg.nn.statistics import watching
from ambiseg.runs import open_run

MOST = 300


def main(place: str, root: str, other: str | None = None) -> None:
    from scipy.ndimage import gaussian_filter

    run = open_run(place)
    familiarity, model = saved_familiarity(run), run.model()
    assert familiarity is not None, "run `ambiseg look` first"
    assert model.card.values is not None
    values, module = model.card.values, data_of(run, {"root": root}, quiet=False)
    size = module.eval_window.size
    indices = module.indices("test")
    images = [np.asarray(module.cases[i].image, np.float32) for i in indices[:: -(-len(indices) // MOST)]]
    images = [_middle(image, size) if size else image for image in images]
    low, high = values.pooled[0][0], values.pooled[0][-1]
    span, rng = high - low, np.random.default_rng(0)

    def blurred(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.stack([gaussian_filter(channel, sigma) for channel in x])

    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "own test images": lambda x: x,
        "upside down": lambda x: x[:, ::-1],
        "inverted in its own range": lambda x: x.min() + x.max() - x,
        "inverted in the range of training": lambda x: low + high - np.clip(x, low, high),
        **{
            f"noise of {s} % of the range": lambda x, s=s: x + rng.normal(0, s / 100 * span, x.shape)
            for s in (5, 10, 20)
        },
        **{f"blur of {s} pixels": blurred(s) for s in (1, 2, 4)},
        "half the contrast": lambda x: x.mean() + 0.5 * (x - x.mean()),
        "twice the contrast": lambda x: x.mean() + 2 * (x - x.mean()),
        "8 bits": lambda x: np.clip((x - low) / span, 0, 1) * 255,
        "+ 1024": lambda x: x + 1024,
        "shuffled pixels": lambda x: rng.permutation(x.reshape(len(x), -1).T).T.reshape(x.shape),
    }
    sets = {name: [np.ascontiguousarray(change(x), np.float32) for x in images] for name, change in changes.items()}
    if other is not None:
        with np.load(other) as file:
            pictures = next(
                file[name][:MOST] for name in file.files if file[name].ndim == 4 and file[name].shape[3] == 3
            )
        grey = [_middle(x.mean(2)[None].astype(np.float32), size) for x in pictures]
        sets["other pictures, in the range of training"] = [(low + span * x / 255).astype(np.float32) for x in grey]

    def distances(some: list[np.ndarray]) -> np.ndarray:
        found = []
        for part in torch.from_numpy(np.stack(some)).split(50):
            prepared = model.card.prepare(part)
            with torch.no_grad(), watching(model.method, familiarity.layers) as seen:
                model.method.predict(prepared)
            found.append(familiarity.distance(joined(prepared, seen.statistics()).double().numpy()))
        return np.concatenate(found)

    found = {name: distances(some) for name, some in sets.items()}
    at_five = np.quantile(found["own test images"], 0.95)
    print("| images | at 5 % false alarms | warned of | by the values of the card |\n|---|---|---|---|")
    for name, some in sets.items():
        odd = [values.problem(x) is not None for x in some]
        warned = [familiarity.is_unlike(d) for d in found[name]]
        print(f"| {name}, {len(some)} | {_share(found[name] > at_five)} | {_share(warned)} | {_share(odd)} |")


def _middle(image: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    height, width = size or image.shape[1:]
    top, left = ((a - b) // 2 for a, b in zip(image.shape[1:], (height, width), strict=True))
    return image[:, top : top + height, left : left + width]


def _share(found: object) -> str:
    return f"{100 * np.mean(found):.0f} %"  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
