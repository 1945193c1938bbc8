"""Pixels that all annotators labelled alike form one region; sums over regions replace sums over pixels.

Whatever M annotators drew, a pixel matters to them only through the tuple of M labels it received. LIDC's four
readers make at most 2⁴ = 16 regions, the 32 modes of multimodal Cityscapes at most 25. A sum of some per-pixel
quantity over each region, R[…, u], therefore determines that sum over *any* annotation's class at once, and costs
no longer grow with M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ambiseg._util.bands import bands
from ambiseg.masks import MaskDistribution, Masks, as_masks, exact

# Up to this many regions a matrix product with their one-hot map adds faster on the CPU than one pixel after another.
_FEW = 64
_AT_ONCE = 1 << 24  # pixels whose regions are looked up at a time
_BLOCK = 256  # pixels that are added up before they join the total


@dataclass(frozen=True, eq=False)
class Regions:
    """The partition of each image's valid pixels, padded to the largest number of regions U in the batch.

    Attributes:
        index: ``[B, P]`` the region of each pixel, P = H·W (or D·H·W); ``U`` at void pixels. int64, or of very large
            images int32.
        labels: ``[B, M, U]`` the class that annotator m gave region u.
        size: ``[B, U]`` pixels in region u; 0 is padding.
    """

    index: Tensor
    labels: Tensor
    size: Tensor

    @property
    def count(self) -> int:
        """U, padding included."""
        return self.size.shape[1]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each region:  R[b, …, u] = Σ_{p in u} values[b, …, p].  ``[B, …, P] -> [B, …, U]``.

        Void pixels are in no region. The gradient is the exact one: each pixel receives its region's.

        >>> regions = partition(torch.tensor([[[[0, 1, 1]], [[0, 0, 1]]]]), classes=2)
        >>> regions.labels[0].T.tolist()                      # three regions: (0,0), (1,0), (1,1)
        [[0, 0], [1, 0], [1, 1]]
        >>> regions.sum(torch.tensor([[[10., 20., 30.]]]))
        tensor([[[10., 20., 30.]]])
        """
        B, P = self.index.shape
        if values.ndim < 2 or values.shape[0] != B or values.shape[-1] != P:
            raise ValueError(f"values must be [{B}, …, {P}] to fit the regions, found {list(values.shape)}")
        sums = _RegionSum.apply(values.reshape(B, -1, P), self.index.long(), self.count)
        return sums.reshape(*values.shape[:-1], self.count)  # type: ignore[union-attr]

    def one_hot(self, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B, M, C, U]``: 1 where annotator m gave region u class c."""
        return torch.nn.functional.one_hot(self.labels, classes).movedim(-1, 2).to(dtype)

    def spread(self, values: Tensor) -> Tensor:
        """What each pixel's region has,  ``[B, X, U + 1] -> [B, X, P]``; the last one is that of void pixels."""
        (B, P), X = self.index.shape, values.shape[1]
        if self.index.dtype == torch.int64 and P <= _AT_ONCE:
            return values.gather(2, self.index[:, None].expand(-1, X, -1))
        found = values.new_empty(B, X, P)
        for band in bands(P):
            found[..., band] = values.gather(2, self.index[:, band].long()[:, None].expand(-1, X, -1))
        return found


class RegionMasks(MaskDistribution):
    """Annotations that are known by their regions: M masks take the memory of one.

        labels[b, m, p] = regions.labels[b, m, regions.index[b, p]]

    Costs, losses and marginals need the regions only. Whoever asks for ``labels`` gets all M maps, written out once.

    >>> readers = partition(torch.tensor([[[[0, 1, 1]], [[0, 0, 1]]]]), classes=2)
    >>> masks = RegionMasks.of(readers, (1, 3))
    >>> masks, masks.marginal_probs(2)[0, 1].tolist(), "labels" in vars(masks)
    (MaskDistribution(1 image of 1×3, 2 masks, equal weights), [[0.0, 0.5, 1.0]], False)
    >>> masks.labels.tolist()
    [[[[0, 1, 1]], [[0, 0, 1]]]]
    """

    regions: Regions | None = None  # of masks that were made from labels
    dtype: torch.dtype  # of labels
    _size: torch.Size

    @staticmethod
    def of(
        regions: Regions,
        spatial: Sequence[int],
        weights: Tensor | None = None,
        valid: Tensor | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> RegionMasks:
        """From the regions of images of size ``spatial``; their void pixels are those that ``valid`` says are."""
        made = object.__new__(RegionMasks)
        parts = {"regions": regions, "weights": weights, "valid": valid, "marginal": None}
        vars(made).update(parts, _size=torch.Size(spatial), dtype=dtype)
        return made

    @cached_property
    def labels(self) -> Tensor:  # type: ignore[override]
        """``[B, M, *spatial]``, 0 at void pixels."""
        assert self.regions is not None
        said = torch.nn.functional.pad(self.regions.labels.to(self.dtype), (0, 1))
        return self.regions.spread(said).view(*said.shape[:2], *self._size)

    def __len__(self) -> int:
        return len(self.labels) if self.regions is None else len(self.regions.index)

    @property
    def count(self) -> int:
        return self.labels.shape[1] if self.regions is None else self.regions.labels.shape[1]

    @property
    def spatial(self) -> torch.Size:
        return self.labels.shape[2:] if self.regions is None else self._size

    @property
    def device(self) -> torch.device:
        return self.labels.device if self.regions is None else self.regions.index.device

    @property
    def mass(self) -> Tensor:
        if self.weights is not None:
            return self.weights
        return torch.full((len(self), self.count), 1 / self.count, device=self.device)

    def marginal_probs(self, classes: int) -> Tensor:
        if self.regions is None or self.marginal is not None:
            return super().marginal_probs(classes)
        mass = self.mass
        probs = (mass[:, :, None, None] * self.regions.one_hot(classes, mass.dtype)).sum(1)
        probs = torch.nn.functional.pad(probs, (0, 1))  # nothing at void pixels
        return self.regions.spread(probs).view(-1, classes, *self._size)

    def draw(self, count: int, generator: torch.Generator | None = None) -> MaskDistribution:
        if self.regions is None:
            return super().draw(count, generator)
        drawn = torch.multinomial(self.mass, count, replacement=True, generator=generator)
        said = self.regions.labels.gather(1, drawn[..., None].expand(-1, -1, self.regions.count))
        said = torch.nn.functional.pad(said.to(self.dtype), (0, 1))
        labels = self.regions.spread(said).view(len(self), count, *self._size)  # of those that were drawn alone
        return MaskDistribution(labels, valid=self.valid)

    def _band(self, band: slice) -> MaskDistribution:
        if self.regions is None or self.marginal is not None:
            return super()._band(band)
        regions = Regions(self.regions.index[:, band], self.regions.labels, self.regions.size)  # of the whole image
        valid = None if self.valid is None else self.valid.flatten(1)[:, None, band]
        return RegionMasks.of(regions, (1, regions.index.shape[1]), self.weights, valid, self.dtype)


def add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """sums[index[i]] += rows[i].  On a GPU thousands of rows would queue for the same few sums; a product does not."""
    if _scatters(rows) or len(sums) > 2**10:
        sums.index_add_(0, index, rows)
    else:
        sums.addmm_(torch.nn.functional.one_hot(index, len(sums)).t().to(rows.dtype), rows)


def _scatters(x: Tensor) -> bool:
    return x.is_cpu


def _looks(x: Tensor) -> bool:
    return x.is_cpu


class _RegionSum(torch.autograd.Function):
    """``[B, R, P] -> [B, R, U]``, block by block of pixels: a running float32 sum of a million loses four digits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        scatters = _scatters(rows) and count > _FEW
        total = exact(rows.new_zeros(*rows.shape[:2], count + 1))  # the last one takes void pixels
        for block, region in zip(rows.split(_BLOCK, 2), index.split(_BLOCK, 1), strict=True):
            if scatters:
                total += block.new_zeros(total.shape).scatter_add_(2, region[:, None].expand(block.shape), block)
            else:
                total += block @ torch.nn.functional.one_hot(region, count + 1).to(block.dtype)
        return total[..., :count].to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        padded = torch.nn.functional.pad(grads[0], (0, 1))  # no gradient at void pixels
        return padded.gather(2, index[:, None].expand(-1, padded.shape[1], -1)), None, None


def partition(annotations: Masks, classes: int) -> Regions:
    """Group the valid pixels of each image by the tuple of labels that its annotators gave them.

    Exact for any number of annotators and classes: every region is split by one annotator after another, and ids
    are made dense in between, so the table of (region, label) pairs stays small and nothing is sorted or hashed.
    Annotators of weight 0 split nothing.

    On the CPU U is the number of regions that there are. An accelerator would have to be waited for: there U is the
    number that there may be, Cᴹ, if that is small, and otherwise it is waited for once.
    """
    annotations = as_masks(annotations)
    labels = annotations.class_ids(classes).flatten(2)
    B, M, P = labels.shape
    image = torch.arange(B, device=labels.device)[:, None]
    index = dense = labels.new_zeros(B, P)
    count = 1
    for m in range(M):
        pair = (image * count + index) * classes + labels[:, m]  # numbered through the whole batch
        seen = torch.zeros(B * count * classes, dtype=torch.long, device=labels.device)
        dense = seen.index_fill_(0, pair.flatten(), 1).view(B, -1).cumsum(1) - 1
        index = dense.flatten()[pair]
        count = int(dense[:, -1].max()) + 1 if _looks(labels) else min(count * classes, P)
    if not _looks(labels) and count > _FEW:
        count = int(dense[:, -1].max()) + 1
    if annotations.valid is not None:
        index = torch.where(annotations.valid.flatten(1), index, count)
    size = labels.new_zeros(B, count + 1).scatter_add_(1, index, torch.ones_like(index))
    said = labels.new_zeros(B, M, count + 1).scatter_(2, index[:, None].expand(B, M, P), labels)
    return Regions(index=index, labels=said[..., :count], size=size[:, :count])
