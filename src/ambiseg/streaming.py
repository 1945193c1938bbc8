"""The metrics as ``torchmetrics.Metric`` classes, which add up over batches and over processes.

Needs ``pip install "ambiseg[train]"``. Each wraps the function of the same name in :mod:`ambiseg.metrics`: the
mean is over all images of the data set, and images whose value is undefined (nan) are left out, so any division into
batches or processes gives the same number.

For the same reason the classes are fixed when a metric is made, and not by what occurs in a batch: ``classes``, or all
foreground classes 1 … ``num_classes`` - 1. With neither, masks are of two classes, and any other id is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from ambiseg import metrics
from ambiseg.masks import Masks, exact
from ambiseg.overlap import common_valid, compatible, occurring


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


def _foreground(num_classes: int) -> tuple[int, ...]:
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, found {num_classes}")
    return tuple(range(1, num_classes))


class _MeanOverImages(_Sums):
    """Mean of a value per image. ``num_classes`` is for ``classes=None``, see the module."""

    def __init__(
        self,
        score: Callable[..., Tensor],
        settings: dict[str, object],
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        chosen = "protocol" not in settings or settings["classes"] is not None
        if not chosen:
            settings = {**settings, "classes": _foreground(2 if num_classes is None else num_classes)}
        sums = {"total": torch.zeros((), dtype=torch.float64), "images": torch.zeros((), dtype=torch.int64)}
        super().__init__(sums, tuple(settings.values()), **kwargs)
        self.score = partial(score, **settings)
        self.binary = not chosen and num_classes is None

    def update(self, *distributions: Masks) -> None:
        """Add the images of a batch."""
        if self.binary and (beyond := max(occurring(*distributions))) > 1:
            message = "expected classes or num_classes for masks of more than two classes"
            raise ValueError(f"{type(self).__name__}: {message}, found class {beyond} and neither of them")
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
        self,
        classes: Sequence[int] | None = None,
        protocol: str = "mose",
        unbiased: bool | Literal["both"] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(metrics.ged, {"classes": classes, "protocol": protocol, "unbiased": unbiased}, **kwargs)


class MatchedIoU(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.matched_iou`;  ``update(pred, truth)``."""

    higher_is_better = True

    def __init__(self, classes: Sequence[int] | None = None, protocol: str = "mose", **kwargs: Any) -> None:
        super().__init__(metrics.matched_iou, {"classes": classes, "protocol": protocol}, **kwargs)


class SampleDiversity(_MeanOverImages):
    """Mean of :func:`ambiseg.metrics.sample_diversity`;  ``update(masks)``."""

    higher_is_better = None

    def __init__(
        self, classes: Sequence[int] | None = None, protocol: str = "mose", unbiased: bool = False, **kwargs: Any
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
        classes: ``None``: all foreground classes 1 … C - 1.
        bins: as in :func:`ambiseg.metrics.ece`.
    """

    higher_is_better = False

    def __init__(
        self, num_classes: int = 2, classes: Sequence[int] | None = None, bins: int = 10, **kwargs: Any
    ) -> None:
        classes = _foreground(num_classes) if classes is None else classes
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
