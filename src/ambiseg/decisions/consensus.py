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

import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.extras import require
from ambiseg.masks import MaskDistribution, Masks, as_masks, exact
from ambiseg.overlap import check_classes, pairwise_iou

LEVELS = 256
"""Thresholds that are tried: multiples of 1/256. Up to 256 equally likely masks have no level between two of them."""

RATERS = 100
"""STAPLE counts raters: weighted masks are given to it as so many copies in all, at most."""

_AT_ONCE = 1 << 24  # labels that are compared at a time
_TIE = 1e-6  # votes that differ by less are equal: weights are of 32 bits
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # which PyTorch compares on every device


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
    """The N masks with weight of one image, at the S pixels where any of them or the marginal leaves the background."""

    labels: Tensor  # [N, S]
    mass: Tensor  # [N] float64
    number: Tensor  # [N] which of the masks
    soft: Tensor | None  # [C, S] the producer's marginal
    pixels: Tensor  # [S] where
    outside: int  # pixels that count and are background in every mask
    classes: tuple[int, ...] = ()  # that overlaps are averaged over

    @cached_property
    def votes(self) -> Tensor:
        """Weight of the masks that give each pixel each class, ``[C, S]``."""
        return _votes(self.labels, self.mass)

    @property
    def probs(self) -> Tensor:
        """The marginal, ``[C, S]``."""
        return self.votes if self.soft is None else self.soft

    @cached_property
    def of_masks(self) -> Tensor:
        """Expected IoU and Dice of the masks themselves, ``[2, N]``."""
        return _expected(self.labels, self)

    @cached_property
    def of_levels(self) -> _Levels:
        """Those of the thresholds of the marginal."""
        return _level_sets(self)


class _Levels(NamedTuple):
    level: Tensor  # [S] of the marginal of the foreground, 0 … 256
    best: Tensor  # [S] its most probable class
    expected: Tensor  # [2, 256] IoU and Dice of the masks {level ≥ k}, k = 1 … 256


class _Chosen(NamedTuple):
    labels: Tensor  # [S]
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
        present = {c for one in images if one is not None for c in one.votes.amax(1).nonzero().flatten().tolist()}
        ids = sorted(present - {0}) or [1]
    B, device, dtype = len(masks), masks.device, exact(masks.mass).dtype
    narrow = masks.labels.dtype if masks.labels.dtype in _NARROW else torch.long
    labels = {name: torch.zeros(B, masks.spatial.numel(), dtype=narrow, device=device) for name in names}
    numbers = {name: torch.full((4, B), torch.nan, dtype=dtype, device=device) for name in names}
    for b, image in enumerate(images):
        if image is None:
            continue
        image.classes = tuple(ids)
        chosen = [CONSENSUS[name](image, threshold) for name in names]
        drawn = torch.stack([one.labels.to(narrow) for one in chosen])
        expected = _expected(drawn, image)
        for name, one, row, overlaps in zip(names, chosen, drawn, expected.T, strict=True):
            labels[name][b, image.pixels] = row
            numbers[name][:2, b] = overlaps
            numbers[name][2, b] = image.number[one.mask] if one.mask >= 0 else -1
            numbers[name][3, b] = one.threshold
    found = {}
    for name in names:
        iou, dice, mask, limit = numbers[name]
        drawn = labels[name].to(masks.labels.dtype).view(B, *masks.spatial)
        found[name] = Consensus(name, drawn, iou, dice, mask.nan_to_num(nan=-1).long(), limit)
    return found


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
    mass = exact(one.mass[0])
    number = (mass > 0).nonzero().flatten()
    labels = one.labels[0].flatten(1)
    if labels.dtype not in _NARROW:
        labels = labels.long()
    if len(number) < len(labels):
        labels = labels[number]
    valid = None if one.valid is None else one.valid[0].flatten()
    shown = torch.ones_like(labels[0], dtype=torch.bool) if background else labels.amax(0) > 0
    soft = None if one.marginal is None else one.marginal[0].flatten(1)
    if soft is not None:
        shown |= soft[1:].sum(0) * LEVELS >= 1
    total = shown.numel() if valid is None else int(valid.sum())
    if total == 0:
        return None
    if valid is not None:
        shown &= valid
    pixels = shown.nonzero().flatten()
    if len(pixels) == 0:  # background everywhere
        pixels = torch.zeros(1, dtype=torch.long, device=labels.device) if valid is None else valid.nonzero()[:1, 0]
    labels, mass = labels[:, pixels], mass[number] / mass[number].sum()
    soft = None if soft is None else exact(soft[:, pixels])
    return _Image(labels, mass, number, soft, pixels, total - len(pixels))


def _votes(labels: Tensor, mass: Tensor) -> Tensor:
    """Weight of the masks that give each pixel each class, ``[C, S]`` float64."""
    classes = int(labels.max()) + 1
    votes = torch.zeros(max(2, classes), labels.shape[1], dtype=mass.dtype, device=labels.device)
    rows = max(1, _AT_ONCE // labels.shape[1])
    for some, weight in zip(labels.split(rows), mass.split(rows), strict=True):
        for c in range(classes):
            votes[c] += weight @ (some == c).to(weight.dtype)
    return votes


def _expected(candidates: Tensor, image: _Image) -> Tensor:
    """Expected IoU and Dice of K masks ``[K, S]`` with a mask of the image, ``[2, K]``."""
    a, b = (MaskDistribution(labels[None, :, None]) for labels in (candidates, image.labels))
    iou = torch.stack([pairwise_iou(a, b, (c,))[0] for c in image.classes])
    return torch.stack([iou.mean(0) @ image.mass, (2 * iou / (1 + iou)).mean(0) @ image.mass])


def _level_sets(image: _Image) -> _Levels:
    foreground = image.probs[1:]
    level = (foreground.sum(0) * LEVELS + LEVELS * _TIE).floor().long().clamp(0, LEVELS)
    best = _argmax(foreground) + 1
    overlaps = []
    for c in image.classes:
        # Sorted by level, a set {level ≥ k} is a beginning: what it shares with a mask is a cumulative sum.
        some = (best == c).nonzero().flatten() if c else torch.arange(len(level), device=level.device)
        order = some[level[some].argsort(descending=True)]
        counts = torch.bincount(level[order], minlength=LEVELS + 1)
        area = counts.flip(0).cumsum(0).flip(0)[1:]  # [256] pixels of the set
        rows, shared, own = max(1, _AT_ONCE // len(level)), [], []
        for labels in image.labels.split(rows):
            hits = (labels[:, order] == c).cumsum(1, dtype=torch.int32)
            shared.append(torch.nn.functional.pad(hits, (1, 0))[:, area])
            own.append((labels == c).sum(1, keepdim=True))
        intersection, drawn = torch.cat(shared), torch.cat(own)
        if c == 0:  # the background is what is left of the set
            intersection, area = drawn - intersection, len(level) - area
        union = drawn + area - intersection
        iou = exact(intersection) / exact(union)
        overlaps.append(iou.nan_to_num(nan=1.0))
    iou = torch.stack(overlaps)
    dice = 2 * iou / (1 + iou)
    return _Levels(level, best, torch.stack([image.mass @ iou.mean(0), image.mass @ dice.mean(0)]))


def _argmax(votes: Tensor) -> Tensor:
    """The first class of the most votes, where votes that differ by rounding only are equal."""
    best = votes >= votes.amax(0) - _TIE
    found = torch.full_like(best[0], len(votes) - 1, dtype=torch.long)
    for c in range(len(votes) - 2, -1, -1):
        found.masked_fill_(best[c], c)
    return found


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
    drawn = image.labels.amax(0) > 0
    return _Chosen((_argmax(image.votes[1:]) + 1) * drawn)


def _intersection(image: _Image, threshold: float | None) -> _Chosen:
    first = image.labels[0]
    return _Chosen(first * (image.labels == first).all(0))


def _least(score: int) -> Rule:
    def rule(image: _Image, threshold: float | None) -> _Chosen:
        of_masks, of_levels = image.of_masks[score], image.of_levels.expected[score]
        mask, k = int(of_masks.argmax()), LEVELS - 1 - int(of_levels.flip(0).argmax())  # the highest of equal ones
        if of_levels[k] > of_masks[mask] + 1e-12:  # equal ones: a mask that somebody could have drawn
            return _Chosen(image.of_levels.best * (image.of_levels.level > k), threshold=(k + 1) / LEVELS)
        return _Chosen(image.labels[mask], mask=mask)

    return rule


def _staple(image: _Image, threshold: float | None) -> _Chosen:
    labels, first = image.labels.cpu(), image.labels[0]
    if (image.labels == first).all():
        return _Chosen(first)  # nothing to estimate: STAPLE would divide 0 by 0
    import SimpleITK as sitk

    # STAPLE looks at single pixels, so the image may be one long row; the background around it is part of its prior.
    foreground = [c for c in labels.unique().tolist() if c > 0]
    rows = torch.nn.functional.pad(labels, (0, image.outside)).to(torch.int32).numpy()
    pictures = [
        picture
        for row, copies in zip(rows, copies_of(image.mass.tolist()), strict=True)
        if copies
        for picture in [sitk.GetImageFromArray(row[None].astype("uint16"))] * copies
    ]
    if len(foreground) == 1:
        filter_ = sitk.STAPLEImageFilter()
        filter_.SetForegroundValue(float(foreground[0]))
        probability = sitk.GetArrayFromImage(filter_.Execute(pictures))[0, : labels.shape[1]]
        found = torch.from_numpy(probability >= 0.5).to(labels.dtype) * foreground[0]
    else:
        filter_ = sitk.MultiLabelSTAPLEImageFilter()
        undecided = max(foreground) + 1
        filter_.SetLabelForUndecidedPixels(undecided)
        found = torch.from_numpy(sitk.GetArrayFromImage(filter_.Execute(pictures)).astype("int64"))[0]
        found = found[: labels.shape[1]]
        found = torch.where(found == undecided, _argmax(_votes(labels, image.mass.cpu())), found)
    return _Chosen(found.to(first.device))


def copies_of(weights: Sequence[float], most: int = RATERS) -> list[int]:
    """Whole numbers in the ratio of the weights: the smallest that fit, else ``most`` in all, by largest remainders.

    >>> copies_of([0.25, 0.25, 0.5]), sum(copies_of([0.123, 0.456, 0.421]))
    ([1, 1, 2], 100)
    """
    share = torch.tensor(weights, dtype=torch.float64)
    for total in range(1, most + 1):
        exactly = share * total
        if float((exactly - exactly.round()).abs().max()) < 1e-4 and float(exactly.round().sum()) == total:
            return [int(n) for n in exactly.round()]
    copies = (share * most).floor()
    left = most - int(copies.sum())
    copies[(share * most - copies).argsort(descending=True, stable=True)[:left]] += 1
    return [int(n) for n in copies]


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
