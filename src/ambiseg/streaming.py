"""The metrics as ``torchmetrics.Metric`` classes, which add up over batches and over processes.

Needs ``pip install "ambiseg[train]"``. Each wraps the function of the same name in :mod:`ambiseg.metrics`: the
mean is over all images of the data set, and images whose value is undefined (nan) are left out, so any division into
batches or processes gives the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ambiseg import metrics
from ambiseg.masks import Masks, exact
from ambiseg.overlap import common_valid, compatible


class _Sums(Metric):
    """A metric made of sums, which stay in float64 when the surrounding model is cast."""

    full_state_update = False

    def __init__(self, sums: dict[str, Tensor], settings: Sequence[object], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A MetricCollection merges metrics whose states have equal names and values. Class and settings in the names
        # keep two metrics apart whose first batches happen to give equal values.
        label = re.sub(r"\W+", "_", "_".join(map(str, (type(self).__name__, *settings))))
        self._names = {name: f"{label}_{name}" for name in sums}
        for name, start in sums.items():
            self.add_state(self._names[name], start, dist_reduce_fx="sum")

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            state = getattr(self, self._names[name])
            setattr(self, self._names[name], state + value.to(state.dtype))

    def _sum(self, name: str) -> Tensor:
        return getattr(self, self._names[name])

    def set_dtype(self, dst_type: str | torch.dtype) -> _Sums:
        """Ignored: sums stay in float64 when the surrounding model is cast."""
        return self


class _MeanOverImages(_Sums):
    """Mean of a value per image."""

    def __init__(self, score: Callable[..., Tensor], settings: dict[str, object], **kwargs: Any) -> None:
        sums = {"total": torch.zeros((), dtype=torch.float64), "images": torch.zeros((), dtype=torch.int64)}
        super().__init__(sums, tuple(settings.values()), **kwargs)
        self.score = partial(score, **settings)

    def update(self, *distributions: Masks) -> None:
        """Add the images of a batch."""
        values = self.score(*distributions)
        self._add(total=exact(values).nansum(), images=(~values.isnan()).sum())

    def compute(self) -> Tensor:
        """The mean over all images with a value, in all processes."""
        return self._sum("total") / self._sum("images")


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
        super().__init__(metrics.ged, {"classes": classes, "protocol": protocol, "unbiased": unbiased}, **kwargs)


class MatchedIoU(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.matched_iou`;  ``update(pred, truth)``."""

    higher_is_better = True

    def __init__(self, classes: Sequence[int] = (1,), protocol: str = "mose", **kwargs: Any) -> None:
        super().__init__(metrics.matched_iou, {"classes": classes, "protocol": protocol}, **kwargs)


class SampleDiversity(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.sample_diversity`;  ``update(masks)``."""

    higher_is_better = None

    def __init__(
        self, classes: Sequence[int] = (1,), protocol: str = "mose", unbiased: bool = False, **kwargs: Any
    ) -> None:
        settings: dict[str, object] = {"classes": classes, "protocol": protocol, "unbiased": unbiased}
        super().__init__(metrics.sample_diversity, settings, **kwargs)


class PixelEntropy(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.pixel_entropy`;  ``update(masks)``."""

    higher_is_better = None

    def __init__(self, classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(metrics.pixel_entropy, {"classes": classes}, **kwargs)


class ECE(_Sums):
    """:func:`ambiseg.metrics.ece` with pixels pooled over all images;  ``update(pred, truth)`` of distributions.

    Args:
        num_classes: C, number of classes of the marginals.
        classes, bins: as in :func:`ambiseg.metrics.ece`.
    """

    higher_is_better = False

    def __init__(
        self, num_classes: int = 2, classes: Sequence[int] | None = (1,), bins: int = 10, **kwargs: Any
    ) -> None:
        sums = {
            "count": torch.zeros(bins, dtype=torch.int64),
            "confidence_sum": torch.zeros(bins, dtype=torch.float64),
            "accuracy_sum": torch.zeros(bins, dtype=torch.float64),
            "total": torch.zeros((), dtype=torch.int64),
        }
        super().__init__(sums, (num_classes, classes, bins), **kwargs)
        self.num_classes, self.classes, self.bins = num_classes, classes, bins

    def update(self, pred: Masks, truth: Masks) -> None:
        """Add the pixels of a batch."""
        pred, truth = compatible(pred, truth)
        p, t = pred.marginal_probs(self.num_classes), truth.marginal_probs(self.num_classes)
        curve = metrics.reliability_curve(p, t, self.classes, self.bins, common_valid(pred, truth))
        self._add(**{name: getattr(curve, name) for name in self._names})

    @property
    def curve(self) -> metrics.ReliabilityCurve:
        """The reliability curve of all images that this process has been given."""
        return metrics.ReliabilityCurve(**{name: self._sum(name) for name in self._names})

    def compute(self) -> Tensor:
        """The error over all pixels, in all processes."""
        return torch.tensor(self.curve.ece, dtype=torch.float64)
