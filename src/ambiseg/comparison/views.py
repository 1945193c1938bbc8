"""Which cases are shown, and what every method says of them: the same part of the image for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ambiseg._util.progress import progress
from ambiseg.comparison.record import CaseRow, Comparison
from ambiseg.comparison.sources import Scored
from ambiseg.data.loader import seed_of
from ambiseg.evaluation.results import Evaluation
from ambiseg.methods.symmetries import symmetric
from ambiseg.reporting.crop import Crop, crop_around
from ambiseg.reporting.gallery import CaseView, Samples, distinct_annotations, draw_samples, open_data
from ambiseg.runs import Run
from ambiseg.viz.colours import GROUND, class_colours
from ambiseg.viz.pictures import shrunk, thinned

_LIKELY = 0.05  # probability from which on a pixel is shown, whoever marked it
_SAMPLES = 8  # masks of every stratum, or twice as many without strata
_PIXELS = 1 << 24  # of an image that is drawn, at most
_ANNOTATIONS = 8


@dataclass(frozen=True)
class Gallery:
    """Views of the chosen cases by name, and in each the masks of every method by name; colours of the classes."""

    views: Mapping[str, Mapping[str, CaseView]]
    colours: Sequence[str]

    @property
    def ground(self) -> bool:
        """Whether class 0 is what is left when nothing is marked, and is not drawn."""
        return self.colours[0] == GROUND


def choose_cases(comparison: Comparison, count: int) -> list[str]:
    """Names of up to ``count`` cases, one of each kind in turn: the largest difference between the baseline and each of
    the others, the most disagreement, and the best, median and worst of the baseline.

    The order of the names is that of the images.
    """
    names = [one.name for one in comparison.methods]
    base = names.index(comparison.baseline)
    scored = [case for case in comparison.cases if case.ged[base] is not None]
    ranked = sorted(scored, key=lambda case: (case.ged[base], case.name))
    middle = len(ranked) // 2
    around = sorted(range(len(ranked)), key=lambda i: abs(i - middle))
    lists = [sorted(scored, key=lambda case: (-_gap(case, i, base), case.name)) for i in range(len(names)) if i != base]
    lists.append(sorted(comparison.cases, key=lambda case: (-(case.disagreement or 0), case.name)))
    lists += [ranked, [ranked[i] for i in around], ranked[::-1]]
    chosen: dict[str, None] = {}
    for nth in range(len(comparison.cases)):
        for one in lists:
            if nth < len(one) and len(chosen) < count:
                chosen.setdefault(one[nth].name)
    return [case.name for case in comparison.cases if case.name in chosen]


def _gap(case: CaseRow, one: int, other: int) -> float:
    mine, theirs = case.ged[one], case.ged[other]
    return 0.0 if mine is None or theirs is None else abs(mine - theirs)


def draw_views(
    scored: Sequence[Scored], names: Sequence[str], data: Mapping[str, Any] | None = None, quiet: bool = False
) -> Gallery | None:
    """What each method that has a run says of these cases; ``None`` where none has one.

    Args:
        data: settings of the runs' data to change, such as ``root`` for data that have moved.
    """
    shown = {one.entry.name: (one.run, one.entry.first) for one in scored if one.run is not None}
    if not shown or not names:
        return None
    first = next(iter(shown.values()))[1]
    colours = class_colours(first.classes, first.evaluated, first.flipped)
    models = {name: _Model(run, found, names, data) for name, (run, found) in shown.items()}
    views = {}
    for name in progress(names, len(names), "drawing cases", quiet):
        if next(iter(models.values())).pixels(name) <= _PIXELS:
            views[name] = _views(name, models)
    return Gallery(views, colours) if views else None


class _Model:
    """A run with its data, opened once."""

    def __init__(self, run: Run, found: Evaluation, names: Sequence[str], data: Mapping[str, Any] | None) -> None:
        region = found.region
        scored = {} if region is None else {"eval_size": region.size if region.kind == "middle" else None}
        self.run, self.found = run, found
        self.module = open_data(run, {**scored, **(data or {})}, names)
        self.place = {self.module.cases.names[index]: index for index in self.module.indices(found.split)}
        method = run.model("last" if found.which == "last" else "best").method
        self.method = symmetric(method, found.symmetries)

    def pixels(self, name: str) -> int:
        size = self.module.eval_window.size or self.module.cases.size_of(self.place[name])
        return size[0] * size[1]


def _views(name: str, models: Mapping[str, _Model]) -> dict[str, CaseView]:
    """The masks of all models, then the part of the image that holds what any of them or a reader marks."""
    drawn: dict[str, list[Samples]] = {}
    marked = np.zeros(())
    batch = image = None
    for key, model in models.items():
        batch = model.module.batch_of(model.place[name])  # alone, so that it keeps its own size
        generator = torch.Generator().manual_seed(seed_of(model.found.seed, "compare", name))
        predictive = model.method.predict_whole(batch.images)
        image = model.run.card.intensity.undo(batch.images)[0].numpy()
        samples, mean = [], torch.zeros(())
        for stratum, weight, masks in draw_samples(predictive, _SAMPLES, generator):
            probs = masks.marginal_probs(predictive.classes)[0]
            mean = mean + weight * probs
            labels, likely = masks.labels[0].numpy(), probs.argmax(0).numpy().astype(np.uint8)
            samples.append(Samples(stratum, weight, labels, likely, np.zeros((4, 1, 1), np.uint8)))
        drawn[key] = sorted(samples, key=lambda one: -one.weight)
        marked = marked + ((1 - mean[0]).numpy() >= _LIKELY)
    assert batch is not None
    assert image is not None
    annotations = batch.annotations
    valid = None if annotations.valid is None else annotations.valid[0].numpy()
    different = distinct_annotations(annotations)
    marked = (marked > 0) | np.any([one.labels > 0 for one in different], 0)
    crop = crop_around(marked if valid is None else marked & valid)
    return {
        key: _view(model, name, crop, image, different, valid, annotations.mass, drawn[key])
        for key, model in models.items()
    }


def _view(
    model: _Model, name: str, crop: Crop, image: np.ndarray, annotations: Sequence[Any], valid: np.ndarray | None,
    mass: torch.Tensor, samples: Sequence[Samples],
) -> CaseView:  # fmt: skip
    def part(labels: np.ndarray) -> np.ndarray:
        return thinned(crop(labels))

    present, none = mass[mass > 0], np.zeros((1, 1))
    return CaseView(
        scores=next(case for case in model.found.cases if case.name == name),
        crop=crop,
        whole=shrunk(image),
        image=shrunk(crop(image)),
        annotations=[replace(one, labels=part(one.labels)) for one in annotations[:_ANNOTATIONS]],
        samples=[replace(one, masks=part(one.masks), most_likely=part(one.most_likely)) for one in samples],
        hidden=(0, 0.0),
        entropy=none,
        disagreement=none,
        valid=None if valid is None else part(valid.astype(np.uint8)) > 0,
        equal_readers=bool((present == present[0]).all()),
    )
