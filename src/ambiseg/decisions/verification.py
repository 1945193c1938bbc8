"""Whether the distribution of a measurement can be believed: compared with what the readers' masks measure.

All take the measurement of the predicted masks, weights w, and that of the readers' masks y_1 … y_M, weights v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ambiseg.decisions.measure import Measurement

_CLOSE = 1e-9  # relative; equal masks may measure differently in the last digit


def crps(predicted: Measurement, readers: Measurement) -> Tensor:
    """Continuous ranked probability score, in the unit of the measurement, ``[B]``; 0 is best:

        CRPS = Σ_j v_j [Σ_i w_i |x_i − y_j| − ½ Σ_ii′ w_i w_i′ |x_i − x_i′|]

    It is the energy score in one dimension. Of a single mask it is the absolute error.

    >>> made = lambda *values: Measurement("size", 1, "", torch.tensor([values]), torch.full((1, len(values)), 1.0))
    >>> crps(made(1.0, 3.0), made(1.0)).tolist(), crps(made(3.0), made(1.0)).tolist()
    ([0.5], [2.0])
    """
    x, w, y, v = _both(predicted, readers)
    to_readers = torch.einsum("bn,bnm,bm->b", w, (x[:, :, None] - y[:, None]).abs(), v)
    return _known(to_readers - _spread(x, w), predicted, readers)


def crps_of_readers(readers: Measurement) -> Tensor:
    """The same for a reader who is predicted by the others of the image, averaged over all, ``[B]``; nan for one.

    What a model would score that knew no more than the other readers do.
    """
    x, w = _filled(readers)
    rest = 1 - w
    others = w[:, None] * (1 - torch.eye(x.shape[1], dtype=w.dtype)) / torch.where(rest > 0, rest, 1)[:, :, None]
    apart = (x[:, :, None] - x[:, None]).abs()
    each = (others * apart).sum(2) - torch.einsum("bji,bik,bjk->bj", others, apart, others) / 2
    alone = (w > 0).sum(1) < 2
    return _known((w * each).sum(1), readers, readers).masked_fill(alone, torch.nan)


def covered(predicted: Measurement, readers: Measurement, level: float = 0.9) -> Tensor:
    """Share of the readers whose value is in the central interval of the prediction, ends included, ``[B]``."""
    low, high = predicted.interval(level).unsqueeze(2).unbind(1)
    y, v = _filled(readers)
    inside = (y >= low - _tolerance(y)) & (y <= high + _tolerance(y))
    return _known((v * inside).sum(1), predicted, readers)


def pit(predicted: Measurement, readers: Measurement, bins: int = 10) -> Tensor:
    """Histogram of the randomised probability integral transform, ``[B, bins]``; flat is best:

        u_j = F(y_j −) + V (F(y_j) − F(y_j −)),      V uniform on [0, 1]

    Given is the expectation over V, so that nothing is random: a reader's weight is spread evenly over the bins between
    F(y −) and F(y) (Czado, Gneiting and Held 2009). A hump says that the distribution is too wide, a bowl that it is
    too narrow, a slope that it is too high or too low.

    >>> made = lambda *values: Measurement("size", 1, "", torch.tensor([values]), torch.full((1, len(values)), 1.0))
    >>> pit(made(1.0, 2.0, 3.0, 4.0), made(2.0), bins=4).tolist()
    [[0.0, 1.0, 0.0, 0.0]]
    """
    x, w, y, v = _both(predicted, readers)
    tolerance = _tolerance(y)[:, None]
    apart = x[:, :, None] - y[:, None]
    low = (w[:, :, None] * (apart < -tolerance)).sum(1).clamp(0, 1)
    high = (w[:, :, None] * (apart <= tolerance)).sum(1).clamp(0, 1)
    edges = torch.linspace(0, 1, bins + 1, dtype=x.dtype)
    begins, ends = edges[:-1], edges[1:]
    shared = torch.minimum(high[..., None], ends) - torch.maximum(low[..., None], begins)
    point = torch.nn.functional.one_hot((low * bins).long().clamp(0, bins - 1), bins).to(x.dtype)
    size = (high - low)[..., None]
    spread = torch.where(size > 1e-9, shared.clamp_min(0) / size.clamp_min(1e-9), point)
    return _known((v[..., None] * spread).sum(1), predicted, readers)


def _both(predicted: Measurement, readers: Measurement) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if len(predicted) != len(readers):
        raise ValueError(f"expected measurements of the same images, found {len(predicted)} and {len(readers)}")
    return *_filled(predicted), *_filled(readers)


def _filled(one: Measurement) -> tuple[Tensor, Tensor]:
    """Values, 0 where there is no weight, and weights."""
    return torch.where(one.weights > 0, one.values, 0), one.weights


def _spread(x: Tensor, w: Tensor) -> Tensor:
    """½ Σ_ii′ w_i w_i′ |x_i − x_i′|, by sorting: Σ_k (x_(k+1) − x_(k)) W_k (1 − W_k), W the cumulated weights."""
    x, order = x.sort(1)
    below = w.gather(1, order).cumsum(1)[:, :-1]
    return (x.diff(dim=1) * below * (1 - below)).sum(1)


def _tolerance(y: Tensor) -> Tensor:
    return _CLOSE * (1 + y.abs())


def _known(values: Tensor, *of: Measurement) -> Tensor:
    """nan for images in which one of the two has no value."""
    known = torch.stack([one.weights.sum(1) > 0 for one in of]).all(0)
    return torch.where(known.view(-1, *[1] * (values.ndim - 1)), values, torch.nan)
