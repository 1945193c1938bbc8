"""How much two masks overlap: IoU of hard masks, and the soft costs that training minimises. Every pair, no loops.

IoU of hard masks is defined in ``_iou``, the soft costs in :func:`iou_cost` and :func:`ce_cost`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from ambiseg.bits import PIXELS, areas, encode, equal, intersections, packs, shared_by_distinct
from ambiseg.masks import MaskDistribution, Masks, as_masks, at_least_float32, common_valid, exact
from ambiseg.regions import RegionMasks, Regions, partition

Absent: TypeAlias = Literal["agree", "skip"]
"""A class that is in neither mask: ``agree`` counts it as IoU 1, ``skip`` leaves it out of the mean over classes."""

Cost: TypeAlias = Callable[..., Tensor]
"""A cost is any callable (logits ``[B, N, C, *spatial]``, MaskDistribution of M annotations) -> ``[B, N, M]``."""


_FEW = 16  # classes that are looked for one by one


# -- hard masks ----------------------------------------------------------------------------------------------


def pairwise_iou(a: Masks, b: Masks, classes: Sequence[int] | None = None, absent: Absent = "agree") -> Tensor:
    """IoU of every mask of ``a`` with every mask of ``b``, averaged over ``classes``:

        IoU[b, i, j] = mean_c |a_i^c ∩ b_j^c| / |a_i^c ∪ b_j^c|,      a_i^c = pixels that mask i gives class c.

    Args:
        a: N masks per image, ``[B, N, *spatial]``.
        b: M masks per image of the same size. A pixel counts where it is valid in both.
        classes: the class ids to average over; ``None``: all that occur, see :func:`occurring`.
        absent: what a class in neither mask counts as. With ``skip``, a pair that has none of the classes is nan.

    Returns:
        ``[B, N, M]``, float64 (float32 on devices without it).

    >>> a = torch.tensor([[[[1, 1, 0, 0]]]])
    >>> b = torch.tensor([[[[1, 0, 0, 0]], [[0, 0, 0, 1]]]])
    >>> pairwise_iou(a, b)
    tensor([[[0.5000, 0.0000]]], dtype=torch.float64)
    """
    a, b = compatible(a, b)
    ids = occurring(a, b) if classes is None else check_classes(classes)
    if a is b and isinstance(a, RegionMasks) and a.regions is not None:
        return _mean_over_classes([_divide(_shared(a.regions, c, exact(a.regions.size))) for c in ids], absent)
    if a is b and len(a) == 1 and packs(a.labels):
        which = equal(a)[0][1]
        iou = _mean_over_classes([_divide(shared_by_distinct(a, c)) for c in ids], absent).numpy()
        return torch.from_numpy(iou.take(which, 1).take(which, 2))
    return _mean_over_classes([_iou(_parts(a, b), c) for c in ids], absent)


def joint_iou(a: Masks, b: Masks, classes: Sequence[int] | None = None, absent: Absent = "agree") -> Tensor:
    """:func:`pairwise_iou` among all N + M masks of ``a`` and ``b`` together, ``[B, N + M, N + M]``, in one go."""
    return joint_overlap(a, b, classes, absent).iou


class Overlap(NamedTuple):
    """All masks of two distributions beside each other.

    Attributes:
        iou: ``[B, N + M, N + M]``, as :func:`joint_iou`.
        marked: ``[B, N + M]`` bool: whether a mask has any of the classes at a pixel that counts.
    """

    iou: Tensor
    marked: Tensor


def joint_overlap(a: Masks, b: Masks, classes: Sequence[int] | None = None, absent: Absent = "agree") -> Overlap:
    """Overlaps among the N masks of ``a`` and the M of ``b``. Where regions of ``b`` are known, its masks are not read:

    |a_i^c ∩ b_j^c| = Σ_u [b_j = c in u] · |a_i^c ∩ u|.
    """
    a, b = compatible(a, b)
    ids = occurring(a, b) if classes is None else check_classes(classes)
    parts = [list(_by_region(x, y, ids, valid) or _by_pixel(x, y, ids, valid)) for x, y, valid in _parts(a, b)]
    counted = [sum(of_class, torch.zeros(())) for of_class in zip(*parts, strict=True)]  # exact in any order
    iou = _mean_over_classes([_divide(intersection) for intersection in counted], absent)
    areas = torch.stack([intersection.diagonal(dim1=1, dim2=2) for intersection in counted])
    return Overlap(iou, (areas > 0).any(0))


def _parts(a: MaskDistribution, b: MaskDistribution) -> Iterator[tuple[MaskDistribution, MaskDistribution, Any]]:
    """Both, and where both count, in the same bands of pixels: what is made of all pixels would not fit."""
    if a is b:
        return ((x, x, x.valid) for x in a.bands(PIXELS))
    return ((x, y, common_valid(x, y)) for x, y in zip(a.bands(PIXELS), b.bands(PIXELS), strict=True))


def _by_pixel(a: MaskDistribution, b: MaskDistribution, ids: list[int], valid: Tensor | None) -> Iterator[Tensor]:
    """Pixels that every pair of the N + M masks shares, ``[B, N + M, N + M]``, for each class."""
    for c in ids:
        masks = torch.cat([encode(a, c, valid), encode(b, c, valid)], 1)
        yield intersections(masks, masks)


def _by_region(
    a: MaskDistribution, b: MaskDistribution, ids: list[int], valid: Tensor | None
) -> Iterator[Tensor] | None:
    """The same from the regions of ``b``; ``None`` on an accelerator, and where regions are unknown or too many."""
    regions = b.regions if isinstance(b, RegionMasks) else None
    if regions is None or not packs(a.labels):
        return None
    sorted_ = _sort_pixels(regions, valid)
    return None if sorted_ is None else _from_regions(a, regions, sorted_, ids)


class _Sorted(NamedTuple):
    """Pixels in the order of their regions. A region begins a new word of 64 pixels."""

    pixels: np.ndarray  # [B, 64 · W] which pixel
    inside: np.ndarray  # [B, W] uint64, set bits are pixels that count; the others fill words
    first: list[tuple[np.ndarray, np.ndarray]]  # of each image: regions that have a pixel, and their first word
    size: Tensor  # [B, U] pixels that count


def _sort_pixels(regions: Regions, valid: Tensor | None) -> _Sorted | None:
    """``None`` where more words would be filled up than hold pixels."""
    (B, P), U = regions.index.shape, regions.count
    index = regions.index.numpy()
    if valid is not None:
        index = np.where(valid.flatten(1).numpy(), index, U)
    size = np.stack([np.bincount(row, minlength=U + 1)[:U] for row in index])
    words = -(-size // 64)
    W = int(words.sum(1).max(initial=1))
    if W > 2 * -(-P // 64):
        return None
    pixels, inside, first = np.zeros((B, W * 64), np.intp), np.zeros((B, W * 64), bool), []
    for b, row in enumerate(index):
        order = np.argsort(row.astype(np.uint16) if U < 2**16 else row, kind="stable")  # of few bits: in linear time
        begin = np.cumsum(words[b]) - words[b]
        shift = 64 * begin - (np.cumsum(size[b]) - size[b])  # how far filled words move the pixels of a region
        place = np.arange(size[b].sum()) + np.repeat(shift, size[b])
        pixels[b, place], inside[b, place] = order[: len(place)], True
        some = size[b].nonzero()[0]
        first.append((some, begin[some]))
    return _Sorted(pixels, np.packbits(inside, axis=-1).view(np.uint64), first, torch.from_numpy(size).double())


def _from_regions(a: MaskDistribution, regions: Regions, pixels: _Sorted, ids: list[int]) -> Iterator[Tensor]:
    labels = a.labels.flatten(2).numpy()
    labels = np.stack([row.take(some, axis=1) for row, some in zip(labels, pixels.pixels, strict=True)])  # [B, N, 64 W]
    N, U = a.count, regions.count
    for c in ids:
        words = np.packbits(labels == c, axis=-1).view(np.uint64) & pixels.inside[:, None]
        bits, found = np.bitwise_count(words), torch.zeros(len(labels), N, U, dtype=torch.float64)
        for b, (some, first) in enumerate(pixels.first):
            if len(some):
                found[b, :, some] = torch.from_numpy(np.add.reduceat(bits[b], first, axis=1, dtype=np.float64))
        said = _said(regions, c)
        joint = found.new_empty(len(found), N + said.shape[1], N + said.shape[1])
        masks = torch.from_numpy(words.view(np.int64))
        joint[:, :N, :N] = intersections(masks, masks)
        joint[:, :N, N:] = found @ said.transpose(1, 2)
        joint[:, N:, :N] = joint[:, :N, N:].transpose(1, 2)
        joint[:, N:, N:] = _shared(regions, c, pixels.size)
        yield joint


def _said(regions: Regions, cls: int) -> Tensor:
    """``[B, M, U]``: 1 where annotator m gave region u the class."""
    return exact(regions.labels == cls)


def _shared(regions: Regions, cls: int, size: Tensor) -> Tensor:
    """Pixels that every pair of annotators gave the class, ``[B, M, M]``; ``size [B, U]`` is of the regions."""
    said = _said(regions, cls)
    return (said * size[:, None]) @ said.transpose(1, 2)


def _divide(intersection: Tensor) -> Tensor:
    """|x ∩ y| / |x ∪ y| from the pixels that all pairs of some masks share; a mask shares its area with itself."""
    area = intersection.diagonal(dim1=1, dim2=2)
    return intersection / (area[:, :, None] + area[:, None, :] - intersection)


def _iou(parts: Iterable[tuple[MaskDistribution, MaskDistribution, Any]], cls: int) -> Tensor:
    """|x ∩ y| / |x ∪ y| of every pair of masks, ``[B, N, M]``; 0/0 = nan where both are empty."""
    shared = either = torch.zeros(())
    for a, b, valid in parts:
        x = encode(a, cls, valid)
        y = x if a is b else encode(b, cls, valid)
        shared, either = intersections(x, y) + shared, areas(x)[:, :, None] + areas(y)[:, None, :] + either
    return shared / (either - shared)


def _mean_over_classes(ious: list[Tensor], absent: Absent) -> Tensor:
    if absent not in get_args(Absent):
        raise ValueError(f"absent must be one of {', '.join(get_args(Absent))}, found {absent!r}")
    stacked = torch.stack(ious) if len(ious) > 1 else ious[0][None]
    return stacked.nan_to_num(nan=1.0).mean(0) if absent == "agree" else stacked.nanmean(0)


# -- soft costs ----------------------------------------------------------------------------------------------


def iou_cost(
    logits: Tensor,
    annotations: Masks,
    *,
    classes: Sequence[int] | None = None,
    smooth: float = 1.0,
    probs: bool = False,
    regions: Regions | None = None,
) -> Tensor:
    """Soft IoU cost of every sample against every annotation, differentiable in the logits:

        cost[n, m] = 1 − mean_c (I + smooth) / (U + smooth),
        I = Σ_p s_n[c, p] · [y_m[p] = c],   U = Σ_p s_n[c, p] + Σ_p [y_m[p] = c] − I,   s = softmax(logits).

    Equal to that definition to rounding, but computed through :mod:`ambiseg.regions`: its price does not grow with M.

    Args:
        logits: ``[B, N, C, *spatial]``; probabilities when ``probs`` is set.
        annotations: M masks per image. Void pixels count nowhere; an image with no valid pixel costs 0.
        classes: class ids to average over; all but 0, the background, by default.
        smooth: the released code's +1, which makes two empty masks cost 0 and keeps gradients finite.
        regions: :func:`ambiseg.regions.partition` of the annotations, when the caller has it already.

    Returns:
        ``[B, N, M]``.

    >>> certain = torch.tensor([[[[[9., -9.]], [[-9., 9.]]]]])              # class 0, then class 1
    >>> iou_cost(certain, torch.tensor([[[[0, 1]], [[1, 1]]]])).round(decimals=3)
    tensor([[[0.0000, 0.3330]]])
    """
    annotations, regions = _prepare(logits, annotations, regions)
    C = logits.shape[2]
    chosen = list(range(1, C)) if classes is None else check_classes(classes, C)
    if not chosen:
        raise ValueError("iou_cost needs at least one foreground class, found a single class")
    with full_precision(logits):
        logits = at_least_float32(logits)
        some = slice(1, C) if classes is None else chosen  # a list would be sent to the device first
        samples = (logits if probs else logits.softmax(2))[:, :, some].flatten(3)
        said = regions.one_hot(C, samples.dtype)[:, :, some]
        return iou_from_sums(regions.sum(samples), said, regions, smooth)


def ce_cost(
    logits: Tensor,
    annotations: Masks,
    *,
    probs: bool = False,
    regions: Regions | None = None,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy cost of every sample against every annotation, mean over valid pixels, differentiable:

        cost[n, m] = −mean_p log s_n[y_m[p], p],   s = softmax(logits).

    With ``class_weights [C]`` the mean is weighted by w[y_m[p]], so that rare classes are not lost among large ones.

    Equal to that definition to rounding, but computed through :mod:`ambiseg.regions`: its price does not grow with M.

    Args and returns are those of :func:`iou_cost`. With ``probs``, a probability of 0 costs −log of the smallest
    positive number of its type instead of infinity. An image with no valid pixel costs 0.

    >>> ce_cost(torch.zeros(1, 1, 4, 8, 8), torch.zeros(1, 2, 8, 8, dtype=torch.long))   # log 4, whatever is true
    tensor([[[1.3863, 1.3863]]])
    """
    annotations, regions = _prepare(logits, annotations, regions)
    with full_precision(logits):
        logits = at_least_float32(logits)
        log_probs = logits.clamp_min(torch.finfo(logits.dtype).tiny).log() if probs else logits.log_softmax(2)
        log_probs = log_probs.clamp_min(-1e30)  # a class ruled out by −∞ must not turn 0 · ∞ into nan
        said = regions.one_hot(logits.shape[2], log_probs.dtype)
        return ce_from_sums(regions.sum(log_probs.flatten(3)), said, regions, class_weights)


def iou_from_sums(sums: Tensor, said: Tensor, regions: Regions, smooth: float = 1.0) -> Tensor:
    """:func:`iou_cost` from what it needs of the samples: probabilities summed over regions.

    sums ``[B, N, c, U]``, said ``[B, M, c, U]`` (1 where annotator m gave region u class c) -> ``[B, N, M]``.
    """
    with full_precision(sums):
        intersection = torch.einsum("bncu,bmcu->bnmc", sums, said)
        area = torch.einsum("bmcu,bu->bmc", said, regions.size.to(sums.dtype))
        union = sums.sum(3)[:, :, None] + area[:, None] - intersection
        return 1 - ((intersection + smooth) / (union + smooth)).mean(3)


def ce_from_sums(sums: Tensor, said: Tensor, regions: Regions, class_weights: Tensor | None = None) -> Tensor:
    """:func:`ce_cost` from what it needs of the samples: log-probabilities summed over regions, as above."""
    with full_precision(sums):
        if class_weights is None:
            pixels = regions.size.sum(1).clamp_min(1).to(sums.dtype)[:, None]
        else:
            said = said * class_weights.to(said)[:, None]
            pixels = torch.einsum("bmcu,bu->bm", said, regions.size.to(sums.dtype))
            pixels = torch.where(pixels > 0, pixels, 1)  # an image without a valid pixel, or with none that weighs
        return -torch.einsum("bncu,bmcu->bnm", sums, said) / pixels[:, None]


COSTS: dict[str, Cost] = {"iou": iou_cost, "ce": ce_cost}
"""The costs that have a name."""


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast: sums over thousands of pixels overflow half precision and lose the digits that couplings compare."""
    kind = x.device.type
    if torch.compiler.is_exporting():  # a graph has no autocast
        return nullcontext()
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _prepare(logits: Tensor, annotations: Masks, regions: Regions | None) -> tuple[MaskDistribution, Regions]:
    annotations = as_masks(annotations)
    if logits.ndim != annotations.labels.ndim + 1:
        raise ValueError(
            f"logits must be [B, N, C, *spatial] with {len(annotations.spatial)} spatial dimensions like the "
            f"annotations, found shape {list(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, found {logits.dtype}")
    if 0 in logits.shape:
        raise ValueError(f"logits must hold at least one sample, class and pixel, found shape {list(logits.shape)}")
    _same(len(annotations), logits.shape[0], "images", "annotations", "logits")
    _same(tuple(annotations.spatial), tuple(logits.shape[3:]), "size", "annotations", "logits")
    return annotations, regions_of(annotations, logits.shape[2], regions)


# -- checks shared with the metrics and methods --------------------------------------------------------------


def regions_of(annotations: MaskDistribution, classes: int, regions: Regions | None = None) -> Regions:
    """The annotations' regions: those given or those they are made of, if there are any, or newly made."""
    if regions is None and isinstance(annotations, RegionMasks):
        regions = annotations.regions
    if regions is None:
        return partition(annotations, classes)
    found = (regions.labels.shape[1], regions.index.shape[1])
    if found != (annotations.count, annotations.spatial.numel()) or len(regions.index) != len(annotations):
        expected = f"{annotations.count} annotations of {annotations.spatial.numel()} pixels"
        raise ValueError(f"regions must be those of the {expected}, found {found[0]} of {found[1]}")
    return regions


def compatible(a: Masks, b: Masks) -> tuple[MaskDistribution, MaskDistribution]:
    """Both as distributions of the same images, or a ``ValueError`` that says how they differ."""
    a, b = as_masks(a), as_masks(b)
    _same(len(a), len(b), "images", "the first", "the second")
    _same(tuple(a.spatial), tuple(b.spatial), "size", "the first", "the second")
    _same(str(a.device), str(b.device), "device", "the first", "the second")
    return a, b


def check_classes(classes: Iterable[int], count: int | None = None) -> list[int]:
    """The class ids as a list, or a ``ValueError``: at least one, no negative ones, none from ``count`` up."""
    try:
        ids = [operator.index(c) for c in classes]
    except TypeError:
        raise ValueError(f"classes must be a sequence of integer class ids, found {classes!r}") from None
    if not ids:
        raise ValueError("classes must name at least one class id, found none")
    if len(set(ids)) < len(ids):
        raise ValueError(f"classes must be distinct, found {ids}")
    if min(ids) < 0 or (count is not None and max(ids) >= count):
        limit = "" if count is None else f" and below {count}"
        raise ValueError(f"class ids must be at least 0{limit}, found {ids}")
    return ids


def occurring(a: Masks, b: Masks | None = None) -> list[int]:
    """The foreground classes, ids above 0, that any mask of any image holds; ``[1]`` where there is none.

    Masks of weight 0 and void pixels hold nothing. On a GPU this waits for the device: name the classes in a loop.

    >>> occurring(torch.tensor([[[[0, 3]]], [[[1, 0]]]])), occurring(torch.zeros(1, 1, 2, 2, dtype=torch.long))
    ([1, 3], [1])
    """
    a = as_masks(a)
    b = a if b is None else as_masks(b)
    found = set[int]()
    for *both, valid in _parts(a, b):
        for masks in both[: 1 + (b is not a)]:
            found |= _occurring(masks, valid, found)
    return sorted(found - {0}) or [1]


def _occurring(masks: MaskDistribution, valid: Tensor | None, known: set[int]) -> set[int]:
    """The classes of masks at pixels that count, or some that are not known; perhaps with 0."""
    labels = masks.labels
    top = int((labels.long() if labels.dtype in (torch.uint16, torch.uint32) else labels).max())
    counts = (masks.mass > 0)[(...,) + (None,) * len(masks.spatial)]
    if top < _FEW:
        counts = counts if valid is None else counts & valid[:, None]
        every = bool(counts.all())
        known = known | {0, top} if every else known
        at = ((c, labels == c) for c in range(1, top + 1) if c not in known)
        return (known & {top}) | {c for c, there in at if bool((there if every else there & counts).any())}
    found = set[int]()
    for n in range(masks.count):  # one mask of each image at a time: little memory
        ids = labels[:, n].long() * (counts[:, n] if valid is None else counts[:, n] & valid)
        few = int(ids.max()) < 2**16  # a sort would take longer
        found.update((torch.bincount(ids.flatten()).nonzero() if few else ids.unique()).flatten().tolist())
    return found


def _same(a: object, b: object, what: str, first: str, second: str) -> None:
    if a != b:
        raise ValueError(f"expected the same {what}, found {a} in {first} and {b} in {second}")
