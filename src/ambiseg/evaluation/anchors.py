"""What the simple and the perfect score on the same images: without it nobody can tell whether a GED is a good one.

Everything is computed from the regions of the annotations (:mod:`ambiseg.regions`), so that it costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ambiseg._util.bands import PIXELS, bands
from ambiseg._util.text import count
from ambiseg.data.case import Cases
from ambiseg.data.loader import Window, middle
from ambiseg.evaluation.overlaps import region_iou
from ambiseg.evaluation.records import Mean
from ambiseg.evaluation.results import Anchor, AnchorKey
from ambiseg.masks import MaskDistribution
from ambiseg.metrics import PROTOCOLS, bootstrap
from ambiseg.overlap import regions_of

_IMAGES = 500  # of the training part that a constant mask is made of; more change little
_PIXELS = 1 << 20  # of a constant mask
_SURE = 6  # groups that a verdict should rest on


@dataclass(frozen=True, eq=False)
class AnchorScores:
    """One image.

    Attributes:
        spread: E d(Y, Y′) of two different annotators; nan for a single one.
        own: what the finite number of annotators adds, as a share of ``spread``: 1/M, or Σv² of weighted ones; 0 for
            known modes, which are all there are.
        scores: GED and matched IoU of single masks.
    """

    spread: float
    own: float
    scores: Mapping[AnchorKey, tuple[float, float]]

    def perfect(self, samples: int) -> float:
        """GED of a perfect sampler, on average:  E d(Y, Y′) (1/M + 1/N)."""
        return self.spread * (self.own + 1 / samples)


def anchor_scores(
    annotations: MaskDistribution,
    classes: int,
    evaluated: Sequence[int],
    protocol: str,
    known: bool = False,
    constant: np.ndarray | None = None,
) -> list[AnchorScores]:
    """The anchors of every image of a batch.

    Args:
        annotations: of the images.
        classes, evaluated, protocol: how masks are compared.
        known: the annotations are modes with their probabilities, all that there are.
        constant: ``[H, W]`` labels of the mask that is the same for all images, which is brought to their size.
    """
    regions = regions_of(annotations, classes)
    index, table, size = (x.detach().cpu().numpy() for x in (regions.index, regions.labels, regions.size))
    mass = annotations.mass.detach().double().cpu().numpy()
    rule = PROTOCOLS[protocol]

    def one(b: int) -> AnchorScores:
        present, U = mass[b] > 0, size.shape[1]
        v = mass[b, present] / mass[b, present].sum()
        labels = table[b, present].T  # [U, M]
        masks: dict[AnchorKey, np.ndarray] = {}  # [C, U] pixels of each class in each region
        if 0 not in evaluated:
            masks["empty"] = _counts(np.zeros(U, int), size[b], classes)
        votes = np.stack([((labels == c) * v).sum(1) for c in range(classes)])
        masks["consensus"] = _counts(votes.argmax(0), size[b], classes)
        if constant is not None:
            placed = index[b].reshape(tuple(annotations.spatial[-2:]))
            masks["constant"] = _pairs(constant, placed, classes, U).astype(float)
        drawn = [_counts(column, size[b], classes) for column in labels.T]
        absent = rule.absent(evaluated)
        iou = region_iou(np.stack([*drawn, *masks.values()]), labels, size[b], evaluated, absent)
        if not size[b].any():
            iou = np.full_like(iou, np.nan)
        within = float((v[:, None] * v * (1 - iou[: len(v)])).sum())

        def single(overlaps: np.ndarray, weights: np.ndarray, spread: float) -> tuple[float, float]:
            """GED and matched IoU of one mask that is predicted for certain."""
            mean = float((weights * overlaps).sum())
            return 2 * (1 - mean) - spread, float(overlaps.max()) if rule.matching == "rectangular" else mean

        scores: dict[AnchorKey, tuple[float, float]] = {
            key: single(iou[len(v) + k], v, within) for k, key in enumerate(masks)
        }
        alone = [single(*(iou[m], v) if known else _others(iou[m], v, m), within) for m in range(len(v))]
        scores["reader"] = tuple(float((v * column).sum()) for column in np.array(alone).T)  # type: ignore[assignment]
        squares = float((v * v).sum())
        own = 0.0 if known else squares
        return AnchorScores(within / (1 - own) if own < 1 - 1e-9 else np.nan, own, scores)

    return [one(b) for b in range(len(annotations))]


def _pairs(constant: np.ndarray, regions: np.ndarray, classes: int, count: int) -> np.ndarray:
    """``[C, U]`` pixels that a mask, brought to the size of a map of U regions, gives each class in each of them."""
    total = np.zeros(classes * (count + 1), np.intp)
    rows = max(1, PIXELS // regions.shape[1])
    for band in bands(len(regions), rows):
        placed = nearest(constant, (regions.shape[0], regions.shape[1]), band)
        total += np.bincount((placed * (count + 1) + regions[band]).reshape(-1), minlength=len(total))
    return total.reshape(classes, count + 1)[:, :count]


def _others(iou: np.ndarray, v: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """IoU of annotator m with the others, and their weights; nan if there are none.

    Beside it goes E d(Y, Y′) of all annotators, m too: that of the others alone has fewer annotators in it, and would
    make the score of one mask D (1 + 1/(M−1)), where a model that draws one perfect mask gets D (1 + 1/M).
    """
    others = np.arange(len(v)) != m
    return (iou[others], v[others] / v[others].sum()) if others.any() else (np.full(1, np.nan), np.ones(1))


def _counts(labels: np.ndarray, size: np.ndarray, classes: int) -> np.ndarray:
    """``[C, U]`` pixels that a mask with one label per region ``[U]`` gives each class."""
    return (labels == np.arange(classes)[:, None]) * size.astype(float)


# -- one mask for all images ------------------------------------------------------------------------------------------


def constant_mask(cases: Cases, indices: Sequence[int], window: Window) -> np.ndarray | None:
    """What most annotators drew at each pixel of these cases, ``[H, W]`` labels; ``None`` for no case.

    Images of unequal sizes are laid over each other in relative coordinates. Of many cases, evenly spaced ones are
    taken.
    """
    chosen = indices[:: max(1, -(-len(indices) // _IMAGES))]
    if not chosen:
        return None
    classes, shape = len(cases.classes), window.size
    if shape is None:
        shape = Counter(cases.size_of(i) for i in chosen).most_common(1)[0][0]
        shrink = max(1.0, (shape[0] * shape[1] / _PIXELS) ** 0.5)
        shape = max(1, round(shape[0] / shrink)), max(1, round(shape[1] / shrink))
    votes = np.zeros((classes, *shape))
    for i in chosen:
        case = cases[i]
        regions = case.regions if window.size is None else middle(case, window)[1]
        share = np.zeros((len(case.table) + 1, classes))  # of each region; the last one lies outside of the image
        for labels, weight in zip(case.table.T, case.mass, strict=True):
            share[np.arange(len(labels)), labels] += weight
        if case.void is not None:
            share[:-1][case.void] = 0
        placed = nearest(regions, shape)
        for c in np.flatnonzero(share.any(0)):
            votes[c] += share[:, c][placed]
    return votes.argmax(0)


def nearest(labels: np.ndarray, size: tuple[int, int], band: slice = slice(None)) -> np.ndarray:
    """A map at another size, or a band of rows of it: each pixel takes the one in which its middle lies.

    >>> nearest(np.array([[0, 1]]), (2, 4)).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    if labels.shape == size:
        return labels[band]
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for old, new in zip(labels.shape, size, strict=True)
    )
    return labels[rows[band, None], columns]


# -- averages and words -----------------------------------------------------------------------------------------------

_WORDS: dict[AnchorKey, tuple[str, str]] = {
    "perfect": (
        "a perfect sampler",
        "{samples} masks drawn from exactly where those of the {annotator}s come from; not 0, because {why}.",
    ),
    "reader": (
        "a single {annotator}",
        "The mask of one {annotator} as the only prediction, compared with {others}, by the rules for the model; the "
        "average over all of them.",
    ),
    "consensus": (
        "the {annotator}s' majority",
        "What most {annotator}s of the same image say at each pixel, as the only prediction; a model cannot see it.",
    ),
    "constant": (
        "one constant mask",
        "The same mask for every image: at each pixel what most {annotator}s of the training images say there.",
    ),
    "empty": ("an empty mask", "Nothing is marked in any image."),
}


def anchors_of(
    scored: Sequence[AnchorScores], samples: Sequence[int], annotator: str, known: bool, mean: Any
) -> list[Anchor]:
    """Averages of the anchors of all images; ``mean`` makes a :class:`Mean` of a value per image."""
    why = "a few masks are never the whole distribution"
    if not known:
        why = f"{{samples}} masks and a few {annotator}s are not all that there could be"
    others = f"all {annotator}s" if known else f"the other {annotator}s"

    def made(key: AnchorKey, values: Sequence[float], overlaps: Sequence[float] | None, n: int | None) -> Anchor:
        title, explanation = _WORDS[key]
        words: dict[str, Any] = {"annotator": annotator, "others": others, "samples": n}
        words["why"] = why.format(**words)
        overlap = None if overlaps is None else mean(overlaps)
        texts = {"title": title.format(**words), "explanation": explanation.format(**words)}
        return Anchor(key=key, **texts, ged=mean(values), matched_iou=overlap, samples=n)

    found = [made("perfect", [one.perfect(n) for one in scored], None, n) for n in sorted(set(samples))]
    for key in ("reader", "consensus", "constant", "empty"):
        if all(key in one.scores for one in scored):
            values, overlaps = zip(*(one.scores[key] for one in scored), strict=True)
            found.append(made(key, values, overlaps, None))
    return [anchor for anchor in found if anchor.ged.mean is not None]


def verdict(
    model: Mean,
    values: Sequence[float],
    scored: Sequence[AnchorScores],
    anchors: Sequence[Anchor],
    samples: int,
    groups: Sequence[str],
    unit: str = "patient",
) -> str:
    """The model beside the anchors, in one sentence.

    Better and worse are said where the 95 % interval of the paired difference over groups excludes 0. Few groups are
    mentioned: that n of them fall on one side has the chance 2^(1−n) if nothing differs, which is below 5 % from 6 on.

    Args:
        model: mean GED of the model.
        values: its GED of every image.
        scored: the anchors of every image.
        anchors: their averages.
        samples: the number of masks that the model is scored with.
        groups: what is resampled: the patient of every image.
        unit: what a group is called.
    """
    if model.mean is None:
        return "No verdict: no image has a GED."
    by = {anchor.key: anchor for anchor in anchors if anchor.samples in (None, samples)}
    said: dict[str, list[str]] = {"better": [], "open": [], "worse": []}
    for key in ("constant", "empty", "reader"):
        if key not in by:
            continue
        found = bootstrap(values, groups, baseline=[one.scores[key][0] for one in scored])
        how = "better" if found.high < 0 else "worse" if found.low > 0 else "open"
        if key == "empty" and how == "better" and "constant" in by:
            continue  # an empty mask is one that does not change, too
        said[how].append(f"{by[key].title} ({by[key].ged.mean:.3f})")
    clauses = []
    if said["better"]:
        clauses.append(f"better than {' and '.join(said['better'])}")
    if said["open"]:
        clauses.append(f"not clearly better or worse than {' and '.join(said['open'])}")
    if said["worse"]:
        clauses.append(f"worse than {' and '.join(said['worse'])}")
    if "perfect" in by:
        clauses.append(f"{by['perfect'].title} would score {by['perfect'].ged.mean:.3f} with {samples} masks")
    if not clauses:
        return "No verdict: there is nothing to compare with."
    text, n = "; ".join(clauses), len({group for group, value in zip(groups, values, strict=True) if value == value})
    few = f" {count(n, unit)} {'is' if n == 1 else 'are'} too few to be sure." if n < _SURE else ""
    return f"{text[0].upper()}{text[1:]}.{few}"
