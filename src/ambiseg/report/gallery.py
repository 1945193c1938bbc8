"""Which cases are shown, and what the model says of them: drawn again, for those cases only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress, reporting
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Batch, BatchSpec, seed_of
from ambiseg.data.module import DataModule
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Method, Predictive
from ambiseg.methods.mose.model import MoSEPredictive
from ambiseg.metrics import sample_diversity
from ambiseg.report.modes import Paired, pair_up
from ambiseg.report.pictures import LARGE
from ambiseg.report.results import Results, Scored
from ambiseg.runs import Run

GALLERIES: dict[str, tuple[str, str]] = {
    "ambiguous": ("Most ambiguous", "The readers differ most in these, whatever the model makes of them."),
    "best": ("Best", "The smallest GED."),
    "median": ("Median", "In the middle of all cases by their GED: what to expect."),
    "worst": ("Worst", "The largest GED."),
}
_EXPERTS = 8  # rows a case; the others have little weight, and their number and weight are said
_MASKS = 8  # different annotations a case


@dataclass(frozen=True, eq=False)
class Opinion:
    """One annotation, and how much of the readers' weight is behind it."""

    labels: np.ndarray  # [H, W]
    share: float
    readers: int


@dataclass(frozen=True, eq=False)
class Voice:
    """What one expert predicts; a method without experts has a single voice without a number."""

    number: int | None  # from 1
    weight: float
    masks: np.ndarray  # [S, H, W]
    probability: np.ndarray  # [C, H, W], mean of the soft samples


@dataclass(frozen=True, eq=False)
class View:
    """Everything that is shown of one case; of large images every n-th pixel, as many as a picture has."""

    scored: Scored
    image: np.ndarray  # [C, H, W] in raw units
    opinions: Sequence[Opinion]  # the most frequent first
    voices: Sequence[Voice]  # the heaviest first
    unseen: tuple[int, float]  # experts that are not shown, and their weight
    entropy: np.ndarray  # [H, W] of the whole prediction, in nats
    disagreement: np.ndarray  # [H, W] the same of the annotations
    valid: np.ndarray | None
    equal: bool  # whether each reader counts as much as any other


@dataclass(frozen=True, eq=False)
class Gallery:
    """The cases that were chosen, by kind, and what is shown of each."""

    chosen: Mapping[str, Sequence[str]]
    views: Mapping[str, View]
    span: tuple[float, float]  # raw values from black to white, the same in all images
    attribution: str
    paired: Mapping[str, Paired] = field(default_factory=dict)  # of data of known modes: some of the cases


def choose(cases: Sequence[Scored], key: str, disagreement: Mapping[str, float], count: int) -> dict[str, list[str]]:
    """``count`` names of each kind. A case may be of several kinds; where there is no score there is no place.

    >>> scores = {"a": 0.3, "b": 0.1, "c": 0.2}
    >>> cases = [Scored(name, name, 1, 4, 0.5, {"standard-16": {"ged": ged}}) for name, ged in scores.items()]
    >>> choose(cases, "standard-16", {"a": 0.0, "b": 0.5, "c": 0.1}, 1)
    {'ambiguous': ['b'], 'best': ['b'], 'median': ['c'], 'worst': ['a']}
    """
    score = {case.name: case.scores.get(key, {}).get("ged", math.nan) for case in cases}
    order = sorted((name for name in score if math.isfinite(score[name])), key=lambda name: (score[name], name))
    known = {name: disagreement[name] for name in score if math.isfinite(disagreement.get(name, math.nan))}
    middle = max(0, (len(order) - count) // 2)
    return {
        "ambiguous": sorted(known, key=lambda name: (-known[name], name))[:count],
        "best": order[:count],
        "median": order[middle : middle + count],
        "worst": order[::-1][:count],
    }


def gather(
    run: Run,
    results: Results,
    key: str,
    count: int,
    samples: int = 4,
    data: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Gallery:
    """Choose ``count`` cases of each kind and draw ``samples`` masks of every expert for them.

    Args:
        key: of the setting whose GED decides.
        data: settings of the run's data to change, such as ``root`` for data that have moved.
    """
    module = _open(run, data or {}, quiet)
    loader: Any = module.part_dataloader(results.split, whole=True)
    if any(math.isnan(case.disagreement) for case in results.cases):
        disagreement = _disagreement(loader, results, quiet)
    else:
        disagreement = {case.name: case.disagreement for case in results.cases}
    chosen = choose(results.cases, key, disagreement, count)
    place = {module.cases.names[index]: index for index in module.indices(results.split)}
    if missing := [case.name for case in results.cases if case.name not in place]:
        raise DataError(
            f"{run.folder}: expected an evaluation of cases in split {results.split}, found {missing[0]!r} in it; "
            "evaluate the run again"
        )
    scored = {case.name: case for case in results.cases}
    names = list(dict.fromkeys(name for kind in chosen.values() for name in kind))
    model = run.model("last" if results.which == "last" else "best")
    views, values, paired = {}, [], {}
    beside = [] if results.modes is None else [*chosen["best"][:1], *chosen["median"][:1]]
    for name in progress(names, len(names), "drawing", quiet):
        batch = loader.dataset[BatchSpec((place[name],), 0)]  # alone, so that its size is its own
        seed = seed_of(results.seed, "report", name)
        views[name] = look(model, batch, scored[name], samples, seed, run.card.intensity)
        values.append(np.percentile(views[name].image[:3], (0.5, 99.5)))
        if name in beside:
            found = pair_up(model, batch, module.cases.flips, results.evaluated, results.protocol, seed)
            paired |= {} if found is None else {name: found}
    span = (float(np.min(values, 0)[0]), float(np.max(values, 0)[1])) if values else (0.0, 1.0)
    return Gallery(chosen, views, span, str(getattr(module.source, "attribution", "")), paired)


def _open(run: Run, changes: Mapping[str, Any], quiet: bool) -> DataModule:
    """The run's data, which must be those that were split: else the pictures would not be of the numbers."""
    split = run.split
    config = replace(run.config.data, **{"intensity": run.card.intensity, **changes})
    with reporting("preparing data", quiet) as report:
        module = DataModule(config, split=split, progress=report)
        try:
            module.setup()
            split.verify(module.cases)
        except (DataError, OSError) as error:
            hint = "0 cases make a page without pictures, which needs no data"
            raise DataError(f"{run.folder}: pictures need the run's data: {error}; {hint}") from None
    return module


def look(model: Method, batch: Batch, scored: Scored, samples: int, seed: int, intensity: Intensity) -> View:
    """One case as the readers and the model see it. ``batch`` holds this case alone."""
    generator = torch.Generator().manual_seed(seed)
    annotations = batch.annotations
    voices, marginal = _voices(model.predict(batch.images), samples, model.classes, generator)
    valid = None if annotations.valid is None else annotations.valid[0].numpy()
    entropy = torch.special.entr(marginal).sum(0).numpy()
    experts = len(voices)
    present = annotations.mass[annotations.mass > 0]
    voices = voices[:_EXPERTS]
    return View(
        scored=scored,
        image=thin(intensity.undo(batch.images)[0].numpy()),
        opinions=[replace(o, labels=thin(o.labels)) for o in group(annotations)[:_MASKS]],
        voices=voices,
        unseen=(experts - len(voices), max(0.0, 1 - sum(voice.weight for voice in voices))),
        entropy=thin(entropy if valid is None else entropy * valid),
        disagreement=thin(annotations.entropy(model.classes)[0].numpy()),
        valid=None if valid is None else thin(valid),
        equal=bool((present == present[0]).all()),
    )


def thin(pixels: np.ndarray) -> np.ndarray:
    """``[…, H, W]`` as it is, or every n-th pixel of what is much larger than any picture of it."""
    step = max(1, round(max(pixels.shape[-2:]) / LARGE))
    return np.ascontiguousarray(pixels[..., ::step, ::step])


def group(annotations: MaskDistribution) -> list[Opinion]:
    """The different masks of one image, each with the weight of all readers who drew it; the most frequent first."""
    mass = annotations.mass[0].numpy()
    present = np.flatnonzero(mass > 0)
    labels = annotations.labels[0].numpy()
    if annotations.valid is not None:
        labels = np.where(annotations.valid[0].numpy(), labels, 0)  # masks that differ where nothing counts are alike
    _, first, which = np.unique(
        labels[present].reshape(len(present), -1), axis=0, return_index=True, return_inverse=True
    )
    which = which.reshape(-1)
    found = [
        Opinion(labels[present[i]], float(mass[present][which == k].sum()), int((which == k).sum()))
        for k, i in enumerate(first)
    ]
    order = sorted(range(len(found)), key=lambda k: (-round(found[k].share, 6), first[k]))
    return [found[k] for k in order]


def _disagreement(loader: Any, results: Results, quiet: bool) -> dict[str, float]:
    """How much the readers of each case differ, E[1 - IoU(Y, Y′)]."""
    found: dict[str, float] = {}
    for batch in progress(loader, len(loader), "comparing readers", quiet):
        spread = sample_diversity(batch.annotations, results.evaluated, results.protocol)
        found |= dict(zip(batch.names, spread.tolist(), strict=True))
    return found


@torch.no_grad()
def _voices(
    predicted: Predictive, samples: int, classes: int, generator: torch.Generator
) -> tuple[list[Voice], Tensor]:
    """What each expert says, the heaviest first, and the class probabilities ``[C, H, W]`` of all of them."""
    if not isinstance(predicted, MoSEPredictive):
        drawn = predicted.sample(2 * samples, generator)
        marginal = drawn.marginal_probs(classes)[0]
        return [Voice(None, 1.0, thin(drawn.labels[0].numpy()), thin(marginal.numpy()))], marginal
    experts = predicted.model.experts
    latents = experts.each(1, samples, generator).unflatten(1, (experts.count, samples))[0]
    voices, marginal = [], torch.zeros(())
    for k, weight in enumerate(predicted.expert_weights[0].tolist()):
        masks, mean = [], torch.zeros(())
        for latent in latents[k]:  # one at a time: a street scene's logits of all samples would fill the memory
            probs = predicted.logits(latent[None, None])[0, 0].float().softmax(0)
            masks.append(thin(probs.argmax(0).numpy()))
            mean = mean + probs / samples
        marginal = marginal + weight * mean
        voices.append(Voice(k + 1, weight, np.stack(masks), thin(mean.numpy())))
    return sorted(voices, key=lambda voice: -voice.weight), marginal
