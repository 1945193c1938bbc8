"""Which cases are shown, and what readers and model say of them: masks are drawn again, for these cases only."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress
from ambiseg._util.text import count as count_of
from ambiseg.data.config import DataConfig
from ambiseg.data.loader import Batch, seed_of
from ambiseg.data.module import DataModule
from ambiseg.evaluation.results import CaseScores, Evaluation, SettingScores
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Predictive, Stratified
from ambiseg.methods.drawing import draw
from ambiseg.methods.symmetries import symmetric
from ambiseg.reporting.crop import Crop, crop_around
from ambiseg.reporting.modes import ModeMatches, match_modes
from ambiseg.runs import Run
from ambiseg.settings import validate
from ambiseg.viz import pictures
from ambiseg.viz.colours import GROUND, class_colours
from ambiseg.viz.pictures import shrunk, thinned

KINDS: dict[str, tuple[str, str]] = {
    "ambiguous": ("Most ambiguous", "The {annotator}s differ most in these, whatever the model predicts."),
    "best": ("Best", "The smallest GED: the masks of the model are nearest to those of the {annotator}s."),
    "median": ("Median", "In the middle of all cases by their GED: what to expect."),
    "worst": ("Worst", "The largest GED."),
}
EXAMPLE = "The best-scored image of the quarter in which the {annotator}s differ most."
MAX_ENTROPY = math.log(2)  # nats, the end of the scale: two classes as likely as each other
_LIKELY = 0.05  # probability from which on a pixel is shown large, whoever marked it
_PIXELS = 1 << 24  # of an image that is drawn, at most
_STRATA, _ANNOTATIONS = 8, 8  # rows of strata and different annotations per case


@dataclass(frozen=True, eq=False)
class Annotation:
    """One of the different annotations of a case: its mask, its weight, and the number of readers who drew it."""

    labels: np.ndarray  # [H, W]
    weight: float
    readers: int


@dataclass(frozen=True, eq=False)
class Samples:
    """Masks of one stratum; ``stratum`` is ``None`` for a method without strata."""

    stratum: int | None
    weight: float
    masks: np.ndarray  # [S, H, W]
    most_likely: np.ndarray  # [H, W] of the mean of the soft samples
    mean: np.ndarray  # [4, H, W] that mean as a picture to lay over the image


class Option(NamedTuple):
    """One of the masks that the model holds possible, with its probability; of a stratum, where one alone draws it."""

    mask: np.ndarray  # [H, W]
    weight: float
    stratum: int | None


@dataclass(frozen=True, eq=False)
class CaseView:
    """Everything that is shown of one case: the part around what is marked; of large ones means of blocks of pixels."""

    scores: CaseScores
    crop: Crop
    whole: np.ndarray  # [C, H, W] the image in raw units
    image: np.ndarray  # the part of it that is shown
    annotations: Sequence[Annotation]  # in descending order of weight
    samples: Sequence[Samples]  # in descending order of weight
    hidden: tuple[int, float]  # number of strata that are not shown, and their weight
    entropy: np.ndarray  # [H, W] of the whole prediction, in nats
    disagreement: np.ndarray  # [H, W] the same of the annotations
    valid: np.ndarray | None
    equal_readers: bool  # whether all readers have the same weight

    @property
    def landscape(self) -> bool:
        """Whether there is no room for anything beside it."""
        return self.image.shape[2] > 1.4 * self.image.shape[1]

    @property
    def span(self) -> tuple[float, float]:
        """Raw values that are black and white: those of the part that is shown, darker, for tints to be seen."""
        low, high = pictures.value_span(self.image)
        return low, high + 0.25 * (high - low)

    @property
    def ids(self) -> list[int]:
        """Classes in the masks that are shown at the head of the page."""
        shown = [one.labels for one in self.annotations[:1]] + [option.mask for option in self.options(4)[0]]
        return np.unique(np.concatenate([labels.reshape(-1) for labels in shown])).tolist()

    def options(self, most: int) -> tuple[list[Option], float]:
        """The likeliest different masks, up to ``most`` of them, and the probability of all others.

        A stratum counts as its most likely mask; without strata the samples count alike. Equal masks are one.
        """
        if self.samples[0].stratum is None:
            masks = self.samples[0].masks
            parts = [Option(mask, 1 / len(masks), None) for mask in masks]
        else:
            parts = [Option(one.most_likely, one.weight, one.stratum) for one in self.samples]
        found: list[Option] = []
        for part in parts:
            for place, other in enumerate(found):
                if np.array_equal(part.mask, other.mask):
                    found[place] = Option(part.mask, part.weight + other.weight, None)
                    break
            else:
                found.append(part)
        found = sorted(found, key=lambda option: -option.weight)[:most]
        return found, max(0.0, 1 - sum(option.weight for option in found))


@dataclass(frozen=True, eq=False)
class Gallery:
    """Names of the cases that were chosen, by kind; what is shown of each; and class colours."""

    chosen: Mapping[str, Sequence[str]]
    views: Mapping[str, CaseView]
    colours: Sequence[str]
    example: str | None = None  # the case at the head of the page
    matches: Mapping[str, ModeMatches] = field(default_factory=dict)  # of some cases, for data of known modes

    @property
    def ground(self) -> bool:
        """Whether class 0 is what is left when nothing is marked, and is not drawn."""
        return self.colours[0] == GROUND

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """The first kind of every case, and its id on the page: it is drawn there, and linked from other kinds."""
        found: dict[str, tuple[str, str]] = {}
        for kind, names in self.chosen.items():
            for i, name in enumerate(names, 1):
                found.setdefault(name, (kind, f"case-{kind}-{i}"))
        return found


def steadiest(evaluation: Evaluation) -> SettingScores:
    """The setting whose scores of single images depend least on chance: weighted masks of every stratum, and many.

    With 16 draws of four strata the best of 500 images would be the one that was luckiest.
    """
    return max(evaluation.settings, key=lambda setting: (setting.form == "compact", setting.samples))


def choose_cases(cases: Sequence[CaseScores], key: str, count: int) -> dict[str, list[str]]:
    """``count`` names of each kind, by the GED of setting ``key``. A case may be of several kinds, or without a score.

    >>> def case(name, ged, diversity):
    ...     about = dict(name=name, patient=name, readers=1, readers_total=4, empty_share=0, strata_weights=None)
    ...     return CaseScores(**about, annotations={"diversity": diversity}, scores={"standard-16": {"ged": ged}})
    >>> choose_cases([case("a", 0.3, 0.0), case("b", 0.1, 0.5), case("c", 0.2, 0.1)], "standard-16", 1)
    {'ambiguous': ['b'], 'best': ['b'], 'median': ['c'], 'worst': ['a']}
    """
    ged = sorted((case.scores[key]["ged"], case.name) for case in cases if case.scores[key]["ged"] is not None)
    order = [name for _, name in ged]
    spread = {case.name: case.annotations["diversity"] for case in cases}
    known = sorted((-value, name) for name, value in spread.items() if value is not None)
    middle = max(0, (len(order) - count) // 2)
    return {
        "ambiguous": [name for _, name in known[:count]],
        "best": order[:count],
        "median": order[middle : middle + count],
        "worst": order[::-1][:count],
    }


def choose_example(cases: Sequence[CaseScores], key: str) -> str | None:
    """Of the quarter of the cases in which readers differ most, the one with the smallest GED of setting ``key``.

    Cases that fewer than two readers marked are left out where there are others.
    """
    scored = [case for case in cases if case.scores[key]["ged"] is not None]
    scored = [case for case in scored if case.annotations["diversity"] is not None]
    scored = [case for case in scored if case.readers > 1] or scored
    scored.sort(key=lambda case: (-(case.annotations["diversity"] or 0), case.name))
    quarter = scored[: -(-len(scored) // 4)]
    return min(quarter, key=lambda case: (case.scores[key]["ged"], case.name)).name if quarter else None


def make_gallery(
    run: Run, evaluation: Evaluation, count: int, samples: int, data: Mapping[str, Any] | None, quiet: bool
) -> Gallery | None:
    """Choose ``count`` cases of each kind and draw ``samples`` masks of every stratum for them.

    Images of more than 4096² pixels are left out, which would take many times their memory; ``None`` if all are such.

    Args:
        data: settings of the run's data to change, such as ``root`` for data that have moved.
    """
    if missing := sorted(
        {case.name for case in evaluation.cases}.difference(run.split.parts.get(evaluation.split, ()))
    ):
        raise DataError(
            f"{run.folder}: expected an evaluation of cases in split {evaluation.split}, found {missing[0]!r} in it; "
            "evaluate the run again"
        )
    key = steadiest(evaluation).key
    chosen, example = choose_cases(evaluation.cases, key, count), choose_example(evaluation.cases, key)
    first = [] if example is None else [example]
    names = list(dict.fromkeys([*first, *(name for kind in chosen.values() for name in kind)]))
    region = evaluation.region
    scored = {} if region is None else {"eval_size": region.size if region.kind == "middle" else None}
    module = open_data(run, {**scored, **(data or {})}, names)
    place = {module.cases.names[index]: index for index in module.indices(evaluation.split)}
    if module.eval_window.size is None:
        large = {name for name in names if math.prod(module.cases.size_of(place[name])) > _PIXELS}
        names, first = ([name for name in some if name not in large] for some in (names, first))
        chosen = {kind: [name for name in some if name not in large] for kind, some in chosen.items()}
        example = None if example in large else example
        if large and not quiet:
            what = f"{count_of(len(large), 'case')} of more than {_PIXELS:,} pixels"
            print(f"ambiseg: {what} {'is' if len(large) == 1 else 'are'} not drawn", file=sys.stderr)
        if not names:
            return None
    scores = {case.name: case for case in evaluation.cases}
    colours = class_colours(evaluation.classes, evaluation.evaluated, evaluation.flipped)
    method = run.model("last" if evaluation.which == "last" else "best").method
    method = symmetric(method, evaluation.symmetries)
    views, matches = {}, {}
    matched = [] if evaluation.modes is None else [*first, *chosen["best"][:1], *chosen["median"][:1]]
    for name in progress(names, len(names), "drawing cases", quiet):
        batch = module.batch_of(place[name])  # alone, so that it keeps its own size
        seed, predictive = seed_of(evaluation.seed, "report", name), method.predict_whole(batch.images)
        image = run.card.intensity.undo(batch.images)[0].numpy()
        views[name] = view_case(predictive, batch, image, scores[name], samples, seed, colours)
        if name in matched and isinstance(predictive, Stratified) and module.cases.flips:
            matches[name] = match_modes(predictive, batch, module.cases.flips, evaluation, seed)
    return Gallery(chosen, views, colours, example, matches)


def open_data(run: Run, changes: Mapping[str, Any], names: Sequence[str]) -> DataModule:
    """The run's data, of which the cases that are drawn must be those that were split."""
    content = {**vars(run.config.data), "intensity": run.card.intensity, **changes}
    config = validate(DataConfig, content, prefix="data.")
    try:
        module = DataModule(config, split=run.split, decode=False)
        module.setup()
        run.split.verify(module.cases, names)
    except (DataError, OSError) as error:
        hint = "0 cases make a page without pictures, which needs no data"
        raise DataError(f"{run.folder}: pictures need the run's data: {error}; {hint}") from None
    return module


def view_case(
    predictive: Predictive, batch: Batch, image: np.ndarray, scores: CaseScores, samples: int, seed: int,
    colours: Sequence[str],
) -> CaseView:  # fmt: skip
    """What is shown of one case; ``batch`` holds this case alone, ``image`` are its pixels in raw units."""
    annotations, classes = batch.annotations, predictive.classes
    valid = None if annotations.valid is None else annotations.valid[0].numpy()
    different = distinct_annotations(annotations)
    marked = np.any([one.labels > 0 for one in different], 0)
    shown: list[Samples] = []
    hidden, hidden_weight, marginal = 0, 0.0, torch.zeros(())
    ground = colours[0] == GROUND
    for stratum, weight, masks in draw_samples(predictive, samples, torch.Generator().manual_seed(seed)):
        mean = masks.marginal_probs(classes)[0]  # of one stratum at a time
        marginal = marginal + weight * mean
        labels, most_likely = masks.labels[0].numpy(), mean.argmax(0).numpy().astype(np.uint8)
        picture = pictures.probability(mean.numpy(), colours, ground)
        shown.append(Samples(stratum, weight, labels, most_likely, picture))
        shown.sort(key=lambda one: -one.weight)
        if len(shown) > _STRATA:  # of many strata on a large image only those that are shown are kept
            hidden, hidden_weight = hidden + 1, hidden_weight + shown.pop().weight
    marked |= (1 - marginal[0]).numpy() >= _LIKELY  # a stray pixel of one draw does not widen what is shown
    crop = crop_around(marked if valid is None else marked & valid)
    entropy = torch.special.entr(marginal).sum(0).numpy()
    present = annotations.mass[annotations.mass > 0]

    def part(labels: np.ndarray) -> np.ndarray:
        return thinned(crop(labels))

    return CaseView(
        scores=scores,
        crop=crop,
        whole=shrunk(image),
        image=shrunk(crop(image)),
        annotations=[replace(one, labels=part(one.labels)) for one in different[:_ANNOTATIONS]],
        samples=[
            replace(one, masks=part(one.masks), most_likely=part(one.most_likely), mean=shrunk(crop(one.mean)))
            for one in shown
        ],
        hidden=(hidden, hidden_weight),
        entropy=shrunk(crop(entropy if valid is None else entropy * valid), largest=True),
        disagreement=shrunk(crop(annotations.entropy(classes)[0].numpy()), largest=True),
        valid=None if valid is None else part(valid.astype(np.uint8)) > 0,
        equal_readers=bool((present == present[0]).all()),
    )


@torch.no_grad()
def draw_samples(
    predictive: Predictive, samples: int, generator: torch.Generator
) -> Iterator[tuple[int | None, float, MaskDistribution]]:
    """``samples`` equally likely masks of each stratum of one image, with its weight; twice as many without strata."""
    if not isinstance(predictive, Stratified):
        yield None, 1.0, draw(predictive, "standard", 2 * samples, generator).masks
        return
    noise = predictive.compact_noise(samples, generator)
    for k, weight in enumerate(predictive.weights[0].tolist()):
        yield k, weight, predictive.render(replace(noise[k * samples : (k + 1) * samples], weights=None))


def distinct_annotations(annotations: MaskDistribution) -> list[Annotation]:
    """The different masks of one image, each with the weight of all readers who drew it, in descending order of it."""
    mass = annotations.mass[0].numpy()
    present = np.flatnonzero(mass > 0)
    labels = annotations.labels[0].numpy()
    if annotations.valid is not None:
        labels = np.where(annotations.valid[0].numpy(), labels, 0)  # void pixels make no difference
    members: dict[bytes, list[int]] = {}  # by digest: NumPy would sort columns, as many as there are pixels
    for m in present.tolist():
        members.setdefault(hashlib.blake2b(np.ascontiguousarray(labels[m]).data).digest(), []).append(m)
    found = [Annotation(labels[same[0]], float(mass[same].sum()), len(same)) for same in members.values()]
    return sorted(found, key=lambda one: -round(one.weight, 6))
