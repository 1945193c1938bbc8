"""The metrics as ``torchmetrics.Metric`` classes, which add up over batches and over processes.

Needs ``pip install "ambiseg[torchmetrics]"``. Each is a thin shell over the function of the same name in
:mod:`ambiseg.metrics`: images are averaged once, over the whole data set, and images whose value is undefined (nan)
are left out, so any split into batches or processes gives the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ambiseg import metrics
from ambiseg.masks import Masks

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError('ambiseg.streaming needs torchmetrics: pip install "ambiseg[torchmetrics]"') from error


class _MeanOverImages(Metric):
    """Mean of a per-image value. Sums are kept in float64, so that the order of the images does not matter."""

    full_state_update = False
    total: Tensor
    images: Tensor

    def __init__(self, score: Callable[..., Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.score = score
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, *distributions: Masks) -> None:
        """Add the images of a batch."""
        values = self.score(*distributions)
        self.total += values.nansum()
        self.images += (~values.isnan()).sum()

    def compute(self) -> Tensor:
        """The mean over all images with a value, of all processes."""
        return self.total / self.images

    def set_dtype(self, dst_type: str | torch.dtype) -> _MeanOverImages:
        """Ignored: sums stay in float64 when the surrounding model is cast."""
        return self


class GED(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.ged`;  ``update(pred, truth)``.

    >>> metric = GED()
    >>> metric.update(torch.ones(2, 3, 4, 4, dtype=torch.long), torch.ones(2, 1, 4, 4, dtype=torch.long))
    >>> metric.compute().item()
    0.0
    """

    higher_is_better = False

    def __init__(
        self, classes: Sequence[int] = (1,), protocol: str = "mose", unbiased: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(lambda p, t: metrics.ged(p, t, classes, protocol, unbiased), **kwargs)


class MatchedIoU(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.matched_iou`;  ``update(pred, truth)``."""

    higher_is_better = True

    def __init__(self, classes: Sequence[int] = (1,), protocol: str = "mose", **kwargs: Any) -> None:
        super().__init__(lambda p, t: metrics.matched_iou(p, t, classes, protocol), **kwargs)


class SampleDiversity(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.sample_diversity`;  ``update(masks)``."""

    higher_is_better = None

    def __init__(
        self, classes: Sequence[int] = (1,), protocol: str = "mose", unbiased: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(lambda m: metrics.sample_diversity(m, classes, protocol, unbiased), **kwargs)


class PixelEntropy(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.pixel_entropy`;  ``update(masks)``."""

    higher_is_better = None

    def __init__(self, classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(lambda m: metrics.pixel_entropy(m, classes), **kwargs)


class ECE(Metric):
    """:func:`ambiseg.metrics.ece` with pixels pooled over all images;  ``update(pred, truth)`` of distributions.

    Args:
        num_classes: C, how many classes the marginals have.
        classes, bins: as in :func:`ambiseg.metrics.ece`.
    """

    full_state_update = False
    higher_is_better = False
    count: Tensor
    confidence_sum: Tensor
    accuracy_sum: Tensor
    pixels: Tensor

    def __init__(
        self, num_classes: int = 2, classes: Sequence[int] | None = (1,), bins: int = 10, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes, self.classes, self.bins = num_classes, classes, bins
        self.add_state("count", torch.zeros(bins, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("confidence_sum", torch.zeros(bins, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("accuracy_sum", torch.zeros(bins, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("pixels", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, pred: Masks, truth: Masks) -> None:
        """Add the pixels of a batch."""
        pred, truth = metrics.compatible(pred, truth)
        p, t = pred.marginal_probs(self.num_classes), truth.marginal_probs(self.num_classes)
        valid = metrics.common_valid(pred, truth)
        curve = metrics.reliability_curve(p, t, self.classes, self.bins, valid)
        self.count += curve.count
        self.confidence_sum += curve.confidence_sum
        self.accuracy_sum += curve.accuracy_sum
        self.pixels += curve.total

    @property
    def curve(self) -> metrics.ReliabilityCurve:
        """The reliability curve of everything seen so far by this process."""
        return metrics.ReliabilityCurve(self.count, self.confidence_sum, self.accuracy_sum, self.pixels)

    def compute(self) -> Tensor:
        """The error over all pixels, of all processes."""
        return torch.tensor(self.curve.ece, dtype=torch.float64)

    def set_dtype(self, dst_type: str | torch.dtype) -> ECE:
        """Ignored: sums stay in float64 when the surrounding model is cast."""
        return self
