"""One mask when one is needed: the ways from a distribution of masks to a single mask, and how well it will do.

``CONSENSUS`` has them by name; :func:`consensus` applies one. Each image is reduced to the pixels where any mask or the
marginal leaves the background, so that large images with small objects cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.extras import require
from ambiseg.bits import equal, intersections, shared_by_distinct
from ambiseg.masks import MaskDistribution, Masks, as_masks, at_least_float32, exact
from ambiseg.overlap import check_classes

LEVELS = 256
"""Thresholds that are tried: multiples of 1/256. Up to 256 equally likely masks have no level between two of them."""

RATERS = 100
"""STAPLE counts raters: weighted masks are given to it as so many copies in all, at most."""

_AT_ONCE = 1 << 24  # labels that are compared at a time
_TIE = 1e-6  # votes that differ by less are equal: weights are of 32 bits


@dataclass(frozen=True, eq=False)
class Consensus:
    """One mask of each image.

    Attributes:
        how: a key of ``CONSENSUS``.
        labels: ``[B, *spatial]`` class ids; 0 at void pixels.
        expected_iou, expected_dice: ``[B]`` float64, the overlap with a mask that is drawn from the distribution,
            averaged over the classes; a class in neither mask counts as 1. nan for an image without a valid pixel.
        mask: ``[B]`` number of the mask that was chosen; −1 where the result is made of pixels instead.
        threshold: ``[B]`` of the marginal; nan where none was used.
    """

    how: str
    labels: Tensor
    expected_iou: Tensor
    expected_dice: Tensor
    mask: Tensor
    threshold: Tensor


@dataclass(eq=False)
class _Image:
    """The N distinct masks of one image, at the S pixels where any of them or the marginal leaves the background."""

    labels: np.ndarray  # [N, S]
    mass: np.ndarray  # [N] float64
    number: np.ndarray  # [N] which of the masks is the first of its kind
    drawn: MaskDistribution | None  # whose distinct masks they are, if none of those is of weight 0
    soft: np.ndarray | None  # [C, S] the producer's marginal
    pixels: np.ndarray  # [S] where
    outside: int  # pixels that count and are background in every mask
    classes: tuple[int, ...] = ()  # that overlaps are averaged over

    @cached_property
    def votes(self) -> np.ndarray:
        """Weight of the masks that give each pixel each class, ``[C, S]``."""
        votes = np.zeros((max(2, int(self.labels.max()) + 1), len(self.pixels)))
        rows = max(1, _AT_ONCE // len(self.pixels))
        for i in range(0, len(self.mass), rows):
            some, weight = self.labels[i : i + rows], self.mass[i : i + rows]
            for c in range(1, len(votes)):
                votes[c] += weight @ (some == c)
        votes[0] = self.mass.sum() - votes[1:].sum(0)
        return votes

    @property
    def probs(self) -> np.ndarray:
        """The marginal, ``[C, S]``."""
        return self.votes if self.soft is None else self.soft

    @cached_property
    def bits(self) -> list[np.ndarray]:
        """Of each class the masks as words of 64 pixels, ``[N, W]``."""
        return [_packed(self.labels, c) for c in self.classes]

    @cached_property
    def of_masks(self) -> np.ndarray:
        """Expected IoU and Dice of the masks themselves, ``[2, N]``."""
        overlaps = []
        for c, words in zip(self.classes, self.bits, strict=True):
            rows = torch.from_numpy(words.view(np.int64))[None]
            both = intersections(rows, rows) if self.drawn is None else shared_by_distinct(self.drawn, c, rows)
            shared = both[0].cpu().numpy()
            overlaps.append(_iou(shared, shared.diagonal()[:, None], shared.diagonal()))
        return _means(overlaps) @ self.mass

    @cached_property
    def of_levels(self) -> _Levels:
        """Those of the thresholds of the marginal."""
        return _level_sets(self)


class _Levels(NamedTuple):
    level: np.ndarray  # [S] of the marginal of the foreground, 0 … 256
    best: np.ndarray  # [S] its most probable class
    expected: np.ndarray  # [2, 256] IoU and Dice of the masks {level ≥ k}, k = 1 … 256


class _Chosen(NamedTuple):
    labels: np.ndarray  # [S]
    mask: int = -1
    threshold: float = float("nan")


Rule: TypeAlias = Callable[[_Image, "float | None"], _Chosen]


def consensus(
    masks: Masks, how: str = "dice", *, classes: Sequence[int] | None = None, threshold: float | None = None
) -> Consensus:
    """One mask of each image, by one of these rules (w_i is the weight of mask i, p_c the marginal of class c):

    - ``marginal``: the most probable class of each pixel, argmax_c p_c; with ``threshold`` t, the most probable
      foreground class where Σ_{c>0} p_c ≥ t.
    - ``majority``: the class with the most votes, argmax_c Σ_i w_i [y_i = c]. It differs from ``marginal`` where the
      producer has a soft marginal.
    - ``union``: the foreground class with the most votes, wherever any mask has one.
    - ``intersection``: the class that all masks agree on, else background.
    - ``iou``: the mask of the least expected 1 − IoU,  argmin_y Σ_i w_i (1 − IoU(y, y_i)): the better one of the best
      among the masks themselves (exactly) and the best threshold of the marginal, in steps of 1/256.
    - ``dice``: the same with Dice. The two differ rarely: Dice = 2 IoU / (1 + IoU).
    - ``staple``: STAPLE (Warfield 2004) by SimpleITK, for several classes its multi-label form (Rohlfing 2003). It
      estimates how good each rater is, and knows no weights: unequal weights become whole numbers of copies of the
      masks, at most 100 in all, by largest remainders. Copies are sure of each other, so a mask of much weight is
      believed more than by any other rule. Void pixels are not shown to it. Needs the extra ``staple``.

    A tie goes to the smaller class id, so that half of the votes are not enough for an object.

    Args:
        masks: N masks per image, of a method or of readers; masks of weight 0 do not count.
        how: a key of ``CONSENSUS``.
        classes: the ids that IoU and Dice are averaged over; ``None``: all foreground classes that occur.
        threshold: of ``marginal``, in (0, 1].

    >>> readers = torch.tensor([[[[1, 1, 1, 0]], [[0, 1, 1, 0]], [[0, 0, 1, 0]]]])  # three readers, 4 pixels
    >>> found = consensus(readers, "majority")
    >>> found.labels.tolist(), found.expected_dice.round(decimals=3).tolist()
    ([[[0, 1, 1, 0]]], [0.822])
    >>> consensus(readers, "dice").mask.tolist()  # the second reader
    [1]
    """
    return consensus_each(masks, (how,), classes=classes, threshold=threshold)[how]


def consensus_each(
    masks: Masks,
    how: Sequence[str] | None = None,
    *,
    classes: Sequence[int] | None = None,
    threshold: float | None = None,
) -> dict[str, Consensus]:
    """:func:`consensus` by several rules, which share most of the work; ``None``: all that are installed.

    >>> found = consensus_each(torch.tensor([[[[0, 1]], [[1, 1]]]]), ["union", "intersection"])
    >>> {name: one.labels.tolist() for name, one in found.items()}
    {'union': [[[1, 1]]], 'intersection': [[[0, 1]]]}
    """
    masks = as_masks(masks)
    names = installed() if how is None else list(how)
    check_rules(names)
    for name in names:
        if threshold is not None and (name != "marginal" or not 0 < threshold <= 1):
            expected = "None" if name != "marginal" else "a number in (0, 1]"
            raise ConfigError(f"threshold: expected {expected} for {name}, found {threshold:g}")
    ids = None if classes is None else check_classes(classes)
    parts = masks if len(masks) > 1 else (masks,)  # a copy of one image would be checked again
    images = [_reduced(one, ids is not None and 0 in ids) for one in parts]
    if ids is None:
        present = {c for one in images if one is not None for c in np.flatnonzero(one.votes.any(1)).tolist()}
        ids = sorted(present - {0}) or [1]
    B, narrow = len(masks), torch.empty(0, dtype=masks.labels.dtype).numpy().dtype
    labels = np.zeros((len(names), B, masks.spatial.numel()), narrow)
    numbers = np.full((4, len(names), B), np.nan)
    for b, image in enumerate(images):
        if image is None:
            continue
        image.classes = tuple(ids)
        chosen = [CONSENSUS[name](image, threshold) for name in names]
        drawn = np.stack([one.labels.astype(narrow, copy=False) for one in chosen])
        labels[:, b, image.pixels] = drawn
        numbers[:2, :, b] = _expected([_packed(drawn, c) for c in ids], image)
        numbers[2, :, b] = [image.number[one.mask] if one.mask >= 0 else -1 for one in chosen]
        numbers[3, :, b] = [one.threshold for one in chosen]
    made = torch.from_numpy(labels).view(-1, B, *masks.spatial).to(masks.device)
    iou, dice, mask, limit = torch.from_numpy(numbers).to(masks.device, exact(masks.mass[:1]).dtype)
    parts = zip(made, iou, dice, mask.nan_to_num(nan=-1).long(), limit, strict=True)
    return {name: Consensus(name, *part) for name, part in zip(names, parts, strict=True)}


def check_rules(names: Iterable[str]) -> None:
    """A :class:`ConfigError` for names that are not in ``CONSENSUS``, and for a rule whose library is missing."""
    for name in names:
        if name not in CONSENSUS:
            raise ConfigError(f"consensus: expected one of {', '.join(CONSENSUS)}, found {name!r}")
        if name == "staple":
            require("staple")


def installed() -> list[str]:
    """The rules whose libraries are there: all but ``staple``, which needs SimpleITK."""
    return [name for name in CONSENSUS if name != "staple" or find_spec("SimpleITK") is not None]


def _reduced(one: MaskDistribution, background: bool) -> _Image | None:
    """One image at the pixels that matter, all that count where ``background`` is scored; ``None`` if none counts."""
    mass = one.mass[0].detach().cpu().double().numpy()
    number = np.flatnonzero(mass > 0)
    (distinct, kind), share = equal(one)[0], mass[number] / mass[number].sum()
    first = np.sort(np.unique(kind[number], return_index=True)[1])  # of each kind
    mass, number = np.bincount(kind[number], share)[kind[number[first]]], number[first]
    drawn = one if np.array_equal(number, distinct) else None
    labels = one.labels[0].flatten(1).cpu().numpy()
    if len(number) < len(labels):
        labels = labels[number]
    valid = None if one.valid is None else one.valid[0].flatten().cpu().numpy()
    shown = np.ones(labels.shape[1], bool) if background else np.bitwise_or.reduce(labels, 0) > 0
    soft = None if one.marginal is None else at_least_float32(one.marginal[0].detach().flatten(1)).cpu().numpy()
    if soft is not None:
        shown |= soft[1:].sum(0) * LEVELS >= 1
    total = shown.size if valid is None else int(valid.sum())
    if total == 0:
        return None
    if valid is not None:
        shown &= valid
    pixels = np.flatnonzero(shown)
    if len(pixels) == 0:  # background everywhere
        pixels = np.zeros(1, int) if valid is None else np.flatnonzero(valid)[:1]
    if soft is not None:
        soft = soft.take(pixels, 1).astype(float)
        order = np.argsort(LEVELS - _level_of(soft[1:]), kind="stable")  # as level sets are made
        soft, pixels = soft.take(order, 1), pixels[order]
    return _Image(labels.take(pixels, 1), mass, number, drawn, soft, pixels, total - len(pixels))


def _packed(labels: np.ndarray, c: int) -> np.ndarray:
    """Where masks ``[N, S]`` have a class, as words of 64 pixels ``[N, W]``."""
    rows, words = max(1, _AT_ONCE // max(1, labels.shape[1])), -(-labels.shape[1] // 64)
    packed = np.zeros((len(labels), 8 * words), np.uint8)
    for i in range(0, len(labels), rows):
        some = np.packbits(labels[i : i + rows] == c, axis=1)
        packed[i : i + rows, : some.shape[1]] = some
    return packed.view(np.uint64)


def _expected(candidates: Sequence[np.ndarray], image: _Image) -> np.ndarray:
    """Expected IoU and Dice of K masks, of which the words of each class are given, with a mask of the image:
    ``[2, K]``."""
    overlaps = []
    for x, y in zip(candidates, image.bits, strict=True):
        a = torch.from_numpy(x.view(np.int64))[None]
        b = torch.from_numpy(y.view(np.int64))[None]
        of_a, of_b = (np.bitwise_count(one).sum(1, dtype=np.int64) for one in (x, y))
        overlaps.append(_iou(intersections(a, b)[0].numpy(), of_a[:, None], of_b))
    return _means(overlaps) @ image.mass


def _iou(intersection: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    union = a + b - intersection
    return np.where(union > 0, intersection / np.maximum(union, 1), 1.0)


def _means(ious: Sequence[np.ndarray]) -> np.ndarray:
    """IoU and Dice, means over the classes, of the IoUs of each class: ``[2, …]``."""
    both = [np.stack([iou, 2 * iou / (1 + iou)]) for iou in ious]
    return both[0] if len(both) == 1 else sum(both[1:], both[0]) / len(both)


def _level_of(foreground: np.ndarray) -> np.ndarray:
    """The highest k with Σ_c p_c ≥ k / 256, of probabilities ``[C, S]``."""
    return np.floor(foreground.sum(0) * LEVELS + LEVELS * _TIE).clip(0, LEVELS).astype(np.int16)


def _level_sets(image: _Image) -> _Levels:
    foreground = image.probs[1:]
    level, best = _level_of(foreground), _argmax(foreground) + 1
    overlaps = []
    for c, words in zip(image.classes, image.bits, strict=True):
        # Sorted by level, a set {level ≥ k} is a beginning: whole bytes of 8 pixels, and a part of one.
        some = np.flatnonzero(best == c) if c else np.arange(len(level))
        order = some[np.argsort(LEVELS - level[some], kind="stable")]
        area = np.bincount(level[order], minlength=LEVELS + 1)[::-1].cumsum()[-2::-1]  # [256] pixels of the set
        whole = len(order) == len(level) and bool((np.diff(order) == 1).all())
        bits = (words if whole else _packed(image.labels.take(order, 1), c)).view(np.uint8)
        drawn = np.bitwise_count(words).sum(1, dtype=np.int64)[:, None]
        bits = np.hstack([bits, np.zeros((len(bits), 1), np.uint8)])
        before = np.bitwise_count(bits).cumsum(1, dtype=np.int32)
        byte, part = np.divmod(area, 8)
        part = (0xFF >> part).astype(np.uint8)  # without so many high bits
        shared = before.take(byte, 1) - np.bitwise_count(bits.take(byte, 1) & part)
        if c == 0:  # the background is what is left of the set
            shared, area = drawn - shared, len(level) - area
        overlaps.append(_iou(shared, drawn, area))
    return _Levels(level, best, np.stack([image.mass @ score for score in _means(overlaps)]))


def _argmax(votes: np.ndarray) -> np.ndarray:
    """The first class of the most votes, where votes that differ by rounding only are equal."""
    return (votes >= votes.max(0) - _TIE).argmax(0)


def _first_best(values: np.ndarray) -> int:
    return int((values >= values.max() - 1e-12).argmax())


# -- the rules ---------------------------------------------------------------------------------------------------------


def _marginal(image: _Image, threshold: float | None) -> _Chosen:
    if threshold is None:
        return _Chosen(_argmax(image.probs))
    foreground = image.probs[1:]
    inside = foreground.sum(0) >= threshold - _TIE
    return _Chosen((_argmax(foreground) + 1) * inside, threshold=threshold)


def _majority(image: _Image, threshold: float | None) -> _Chosen:
    return _Chosen(_argmax(image.votes))


def _union(image: _Image, threshold: float | None) -> _Chosen:
    return _Chosen((_argmax(image.votes[1:]) + 1) * (np.bitwise_or.reduce(image.labels, 0) > 0))


def _intersection(image: _Image, threshold: float | None) -> _Chosen:
    first = image.labels[0]
    return _Chosen(first * (image.labels == first).all(0))


def _least(score: int) -> Rule:
    def rule(image: _Image, threshold: float | None) -> _Chosen:
        of_masks, of_levels = image.of_masks[score], image.of_levels.expected[score]
        mask, k = _first_best(of_masks), LEVELS - 1 - _first_best(of_levels[::-1])  # the highest of equal ones
        if of_levels[k] > of_masks[mask] + 1e-12:  # equal ones: a mask that somebody could have drawn
            return _Chosen(image.of_levels.best * (image.of_levels.level > k), threshold=(k + 1) / LEVELS)
        return _Chosen(image.labels[mask], mask=mask)

    return rule


def _staple(image: _Image, threshold: float | None) -> _Chosen:
    labels = image.labels
    if len(labels) == 1:
        return _Chosen(labels[0])  # nothing to estimate: STAPLE would divide 0 by 0
    import SimpleITK as sitk

    # STAPLE looks at single pixels, so the image may be one long row; the background around it is part of its prior.
    foreground = [c for c in np.flatnonzero(image.votes.any(1)).tolist() if c > 0]
    rows = np.pad(labels, ((0, 0), (0, image.outside)))
    rows = rows.astype(np.uint8 if rows.max() < 255 else np.uint16, copy=False)  # multi-label: one more id
    pictures = [
        picture
        for row, copies in zip(rows, copies_of(image.mass.tolist()), strict=True)
        if copies
        for picture in [sitk.GetImageFromArray(row[None])] * copies
    ]
    if len(foreground) == 1:
        filter_ = sitk.STAPLEImageFilter()
        filter_.SetForegroundValue(float(foreground[0]))
        probability = sitk.GetArrayFromImage(filter_.Execute(pictures))[0, : labels.shape[1]]
        return _Chosen((probability >= 0.5) * np.int64(foreground[0]))
    filter_ = sitk.MultiLabelSTAPLEImageFilter()
    undecided = max(foreground) + 1
    filter_.SetLabelForUndecidedPixels(undecided)
    found = sitk.GetArrayFromImage(filter_.Execute(pictures))[0, : labels.shape[1]]
    return _Chosen(np.where(found == undecided, _argmax(image.votes), found))


def copies_of(weights: Sequence[float], most: int = RATERS) -> list[int]:
    """Whole numbers in the ratio of the weights: the smallest that fit, else ``most`` in all, by largest remainders.

    >>> copies_of([0.25, 0.25, 0.5]), sum(copies_of([0.123, 0.456, 0.421]))
    ([1, 1, 2], 100)
    """
    share, totals = np.asarray(weights, float), np.arange(1, most + 1)
    exactly = share * totals[:, None]
    whole = exactly.round()
    fits = (np.abs(exactly - whole).max(1) < 1e-4) & (whole.sum(1) == totals)
    if fits.any():
        return whole[fits.argmax()].astype(int).tolist()
    copies = np.floor(share * most)
    copies[np.argsort(copies - share * most, kind="stable")[: most - int(copies.sum())]] += 1
    return copies.astype(int).tolist()


CONSENSUS: dict[str, Rule] = {
    "marginal": _marginal,
    "majority": _majority,
    "union": _union,
    "intersection": _intersection,
    "iou": _least(0),
    "dice": _least(1),
    "staple": _staple,
}
"""The rules by name."""
