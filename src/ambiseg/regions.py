"""Pixels that all annotators labelled alike form one region; sums over regions replace sums over pixels.

Whatever M annotators drew, a pixel matters to them only through the tuple of M labels it received. LIDC's four
readers make at most 2⁴ = 16 regions, the 32 modes of multimodal Cityscapes at most 25. A sum of some per-pixel
quantity over each region, R[…, u], therefore determines that sum over *any* annotation's class at once, and costs
no longer grow with M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ambiseg.masks import Masks, as_masks

# Above this many regions the one-hot product of `Regions.sum` costs more than the atomics it avoids.
_ONE_HOT_LIMIT = 256


@dataclass(frozen=True, eq=False)
class Regions:
    """The partition of each image's valid pixels, padded to the largest number of regions U in the batch.

    Attributes:
        index: ``[B, P]`` the region of each pixel, P = H·W (or D·H·W); ``U`` at void pixels.
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
        rows = values.reshape(B, -1, P)
        if values.is_cpu or self.count > _ONE_HOT_LIMIT:
            sums = values.new_zeros(B, rows.shape[1], self.count + 1)
            sums = sums.scatter_add(2, self.index[:, None].expand(rows.shape), rows)
        else:  # on a GPU thousands of pixels would queue for the same few sums; a matrix product does not
            members = torch.nn.functional.one_hot(self.index, self.count + 1)
            sums = rows @ members.to(values.dtype)
        return sums[..., : self.count].reshape(*values.shape[:-1], self.count)

    def one_hot(self, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B, M, C, U]``: 1 where annotator m gave region u class c."""
        return torch.nn.functional.one_hot(self.labels, classes).movedim(-1, 2).to(dtype)


def partition(annotations: Masks, classes: int) -> Regions:
    """Group the valid pixels of each image by the tuple of labels that its annotators gave them.

    Exact for any number of annotators and classes: every region is split by one annotator after another, and ids
    are made dense in between, so the table of (region, label) pairs stays small and nothing is sorted or hashed.
    Annotators of weight 0 split nothing. On a GPU it waits for the device once an annotator, never once an image.
    """
    annotations = as_masks(annotations)
    labels = annotations.class_ids(classes).flatten(2)
    B, M, P = labels.shape
    image = torch.arange(B, device=labels.device)[:, None]
    index, count = labels.new_zeros(B, P), 1
    for m in range(M):
        pair = (image * count + index) * classes + labels[:, m]  # numbered through the whole batch
        seen = torch.zeros(B * count * classes, dtype=torch.long, device=labels.device)
        dense = seen.index_fill_(0, pair.flatten(), 1).view(B, -1).cumsum(1) - 1
        index = dense.flatten()[pair]
        count = int(dense[:, -1].max()) + 1
    if annotations.valid is not None:
        index = torch.where(annotations.valid.flatten(1), index, count)
    size = labels.new_zeros(B, count + 1).scatter_add_(1, index, torch.ones_like(index))
    said = labels.new_zeros(B, M, count + 1).scatter_(2, index[:, None].expand(B, M, P), labels)
    return Regions(index=index, labels=said[..., :count], size=size[:, :count])
