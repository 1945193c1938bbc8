"""IoU of one image's masks on its regions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ambiseg.overlap import Absent, check_classes


def region_iou(
    counts: np.ndarray, labels: np.ndarray, size: np.ndarray, classes: Sequence[int], absent: Absent = "agree"
) -> np.ndarray:
    """IoU of one image's masks with masks that are constant on regions: as ``pairwise_iou``, but no pixel is read.

    Args:
        counts: ``[N, C, U]`` pixels that each mask gives each class in each region.
        labels: ``[U, D]`` the class of each region in each of the other masks.
        size: ``[U]`` pixels of each region.

    Returns:
        ``[N, D]``.

    >>> region_iou(np.array([[[0.0, 1.0], [2.0, 3.0]]]), np.array([[1, 0], [0, 1]]), np.array([2.0, 4.0]), (1,))
    array([[0.4, 0.5]])
    """
    total, found = np.zeros((2, len(counts), labels.shape[1]))
    for c in check_classes(classes):
        drawn = (labels == c).astype(float)
        intersection = counts[:, c] @ drawn  # of whole numbers: exact in any order
        union = counts[:, c].sum(1)[:, None] + size @ drawn - intersection
        total += np.divide(intersection, union, out=np.full_like(union, float(absent == "agree")), where=union > 0)
        found += (union > 0) | (absent == "agree")
    return np.divide(total, found, out=np.full_like(total, np.nan), where=found > 0)
