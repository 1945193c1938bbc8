"""How close a predicted distribution of masks is to the annotators': GED, matched IoU, calibration, diversity.

Every function takes two distributions, weighted or not, of any number of masks and classes, in 2D or 3D, and
returns one value per image ``[B]`` (calibration, which pools pixels, returns one number). An image without a valid
pixel has nothing to score: its value is nan. Averages over a data set are plain means of the other values.

What papers call by one name they compute in different ways. :data:`PROTOCOLS` holds those ways as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ambiseg import transport
from ambiseg.intervals import Interval as Interval
from ambiseg.intervals import bootstrap as bootstrap
from ambiseg.masks import MaskDistribution, Masks, as_masks, exact
from ambiseg.overlap import Absent, check_classes, common_valid, compatible, joint_overlap, occurring, pairwise_iou


@dataclass(frozen=True)
class Protocol:
    """One way of computing the metrics, as a paper's evaluation code does it.

    Attributes:
        one_class: what a class in neither mask counts as when a single class is evaluated (lesions).
        many_classes: the same when several are (street scenes).
        matching: ``transport`` is exact optimal transport between all samples and annotations. For equal weights
            it equals Hungarian matching after repeating both sides to their least common multiple (the annotations
            to N, where M divides N).
            ``rectangular`` assigns each annotation its own best sample and forgets the other N − M.
        source: whose evaluation it is.
    """

    one_class: Absent
    many_classes: Absent
    matching: Literal["transport", "rectangular"]
    source: str

    def absent(self, classes: Sequence[int]) -> Absent:
        """What a class in neither mask counts as when these classes are evaluated."""
        return self.one_class if len(classes) == 1 else self.many_classes


PROTOCOLS: dict[str, Protocol] = {
    "mose": Protocol("agree", "skip", "transport", "Gao et al., ICLR 2023, released code"),
    "kohl2018": Protocol("skip", "skip", "transport", "Kohl et al., NeurIPS 2018, released Cityscapes evaluation"),
    "phiseg": Protocol("agree", "agree", "transport", "Baumgartner et al., MICCAI 2019, released code"),
    "ccdm": Protocol("agree", "agree", "transport", "Zbinden et al., ICCV 2023, released LIDC evaluation"),
    "rectangular": Protocol("agree", "skip", "rectangular", "best-M-of-N matching, as some papers report it"),
}


# -- distance between distributions --------------------------------------------------------------------------


def ged(
    pred: Masks,
    truth: Masks,
    classes: Sequence[int] | None = None,
    protocol: str = "mose",
    unbiased: bool | Literal["both"] = False,
) -> Tensor:
    """Squared generalised energy distance, with d = 1 − IoU:

        GED = 2 E[d(S, Y)] − E[d(S, S′)] − E[d(Y, Y′)],     S, S′ ~ pred,   Y, Y′ ~ truth.

    As published, the expectations run over all pairs of the masks given, a sample with itself included. With N
    samples that makes E[d(S, S′)] too small by a factor 1 − 1/N and GED too large by E[d(S, S′)]/N. Much of the fall
    from GED(16) to GED(100) in papers is this (in MoSE's tables .501/16 − .501/100 = .026 of .029).
    ``unbiased=True`` leaves those self-pairs out (a U-statistic), so that a perfect sampler scores 0 on average
    whatever N is; single images may then be slightly negative. The annotations are taken as the truth itself, not
    as a sample of it, and keep their self-pairs.

    Where M annotators are themselves a sample of all possible ones, the third term is too small by a factor 1 − 1/M
    as well, and even a perfect sampler, which draws from where the annotators come from, has

        E[GED] = E[d(Y, Y′)] (1/M + 1/N).

    ``unbiased="both"`` leaves the self-pairs out on both sides, so that it scores 0 on average.

    Args:
        pred: N masks per image.
        truth: M masks per image of the same size.
        classes: class ids over which IoU is averaged. ``None``: all foreground classes (ids above 0) that occur in
            any mask of ``pred`` or ``truth``; class 1 where none occurs.
        protocol: a name in :data:`PROTOCOLS`.
        unbiased: False, True (predictions only) or ``"both"``, see above. With weights w the correction is 1 − Σw²:
            right for independent draws. nan where one mask has all the weight.

    Returns:
        ``[B]``, nan where a pair of masks has none of the classes and the protocol does not say what that means.

    >>> readers = torch.tensor([[[[0, 0, 1, 1]], [[0, 0, 0, 0]]]])                # one sees it, one does not
    >>> ged(readers, readers).item(), ged(readers[:, :1], readers).item()
    (0.0, 0.5)
    """
    return compare(pred, truth, classes, protocol).ged(unbiased)


def matched_iou(pred: Masks, truth: Masks, classes: Sequence[int] | None = None, protocol: str = "mose") -> Tensor:
    """Mean IoU under the best matching of samples and annotations (M-IoU, Hungarian-matched IoU):

        max_P Σ_ij P_ij IoU(S_i, Y_j)     s.t.  P1 = u,  Pᵀ1 = v,  P ≥ 0.

    Args and returns are those of :func:`ged`; ``[B]`` in [0, 1].

    >>> readers = torch.tensor([[[[0, 0, 1, 1]], [[0, 0, 0, 0]]]])
    >>> matched_iou(readers.flip(1), readers).item(), matched_iou(readers[:, :1], readers).item()
    (1.0, 0.5)
    """
    pred, truth = compatible(pred, truth)
    rule, classes = _protocol(protocol), occurring(pred, truth) if classes is None else classes
    iou = pairwise_iou(pred, truth, classes, rule.absent(classes))
    return _scored(_matched(iou, _weights(pred), _weights(truth), rule), pred, truth)


def sample_diversity(
    masks: Masks, classes: Sequence[int] | None = None, protocol: str = "mose", unbiased: bool = False
) -> Tensor:
    """How much the masks of one distribution differ, E[1 − IoU(S, S′)], ``[B]``: the self-term of :func:`ged`.

    >>> sample_diversity(torch.tensor([[[[1, 1]], [[0, 1]]]])).item()
    0.25
    """
    masks = as_masks(masks)
    classes = occurring(masks) if classes is None else classes
    d = 1 - pairwise_iou(masks, masks, classes, _protocol(protocol).absent(classes))
    return _scored(_self_expectation(d, _weights(masks), unbiased), masks, masks)


@dataclass(frozen=True, eq=False)
class Compared:
    """The masks of two distributions beside each other: all metrics that are made of their IoUs, for the price of one.

    Attributes:
        pred, truth: N and M masks per image.
        iou: ``[B, N + M, N + M]`` of every pair.
        marked: ``[B, N + M]`` bool, which masks have any of the classes.
        rule: how the IoUs were averaged, and are matched.
    """

    pred: MaskDistribution
    truth: MaskDistribution
    iou: Tensor
    marked: Tensor
    rule: Protocol

    def ged(self, unbiased: bool | Literal["both"] = False) -> Tensor:
        """:func:`ged` of the two."""
        if unbiased not in (False, True, "both"):
            raise ValueError(f"unbiased must be False, True or 'both', found {unbiased!r}")
        d, N, u, v = 1 - self.iou, self.pred.count, _weights(self.pred), _weights(self.truth)
        cross = _expectation(d[:, :N, N:], u, v)
        within_pred = _self_expectation(d[:, :N, :N], u, bool(unbiased))
        within_truth = _self_expectation(d[:, N:, N:], v, unbiased == "both")
        return self._scored(2 * cross - within_pred - within_truth)

    def matched_iou(self) -> Tensor:
        """:func:`matched_iou` of the two."""
        N = self.pred.count
        return self._scored(_matched(self.iou[:, :N, N:], _weights(self.pred), _weights(self.truth), self.rule))

    def diversity(self, strata: int = 1) -> Tensor:
        """:func:`sample_diversity` of ``pred``, ``[B]``; with K > 1 ``strata`` of equally many masks, of each alone,
        taken as equally likely, ``[B, K]``."""
        B, N = len(self.pred), self.pred.count
        d = 1 - self.iou[:, :N, :N]
        if strata == 1:
            return self._scored(_expectation(d, u := _weights(self.pred), u))
        S = N // strata
        blocks = d.view(B, strata, S, strata, S).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, S, S)
        alike = torch.full_like(blocks[:, 0], 1 / S)
        return self._scored(_expectation(blocks, alike, alike).view(B, strata))

    def truth_diversity(self) -> Tensor:
        """:func:`sample_diversity` of ``truth``."""
        N = self.pred.count
        return self._scored(_expectation(1 - self.iou[:, N:, N:], v := _weights(self.truth), v))

    def _scored(self, values: Tensor) -> Tensor:
        return _scored(values, self.pred, self.truth)


def compare(pred: Masks, truth: Masks, classes: Sequence[int] | None = None, protocol: str = "mose") -> Compared:
    """Compute the IoUs of all pairs once; the arguments are those of :func:`ged`.

    >>> readers = torch.tensor([[[[0, 0, 1, 1]], [[0, 0, 0, 0]]]])
    >>> both = compare(readers[:, :1], readers)
    >>> both.ged().item(), both.matched_iou().item(), both.truth_diversity().item()
    (0.5, 0.5, 0.5)
    """
    (pred, truth), rule = compatible(pred, truth), _protocol(protocol)
    classes = occurring(pred, truth) if classes is None else classes
    return Compared(pred, truth, *joint_overlap(pred, truth, classes, rule.absent(classes)), rule)


def _weights(masks: MaskDistribution) -> Tensor:
    """``[B, N]`` in float64, rows that sum to 1 to its last digit."""
    mass = exact(masks.mass.detach())
    return mass / mass.sum(1, keepdim=True)


def _expectation(d: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """E[d] = Σ_ij u_i v_j d_ij. A pair without mass counts nowhere, not even when its distance is undefined."""
    mass = u[:, :, None] * v[:, None]
    return torch.where(mass > 0, mass * d, 0).sum((1, 2))


def _self_expectation(d: Tensor, u: Tensor, unbiased: bool = False) -> Tensor:
    if not unbiased:
        return _expectation(d, u, u)
    if d.shape[1] < 2:
        raise ValueError(f"unbiased needs at least 2 masks per image, found {d.shape[1]}")
    diagonal = torch.eye(d.shape[1], dtype=torch.bool, device=d.device)
    return _expectation(d.masked_fill(diagonal, 0), u, u) / (1 - u.square().sum(1))


def _matched(iou: Tensor, u: Tensor, v: Tensor, rule: Protocol) -> Tensor:
    undefined = (iou.isnan() & (u[:, :, None] * v[:, None] > 0)).flatten(1).any(1)
    iou = iou.nan_to_num(nan=0.0)
    match = _rectangular_plan if rule.matching == "rectangular" else transport.optimal_plan
    value = (match(1 - iou, u, v) * iou).sum((1, 2))
    return value.masked_fill(undefined, torch.nan)


def _rectangular_plan(cost: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """min(N, M) one-to-one pairs of least total cost, equally weighted. Absent and left-over masks take no part."""
    from scipy.optimize import linear_sum_assignment

    plan = torch.zeros_like(cost)
    for b in range(len(cost)):
        rows, columns = (x[b].nonzero().flatten().cpu() for x in (u, v))
        for name, mass, some in (("samples", u, rows), ("annotations", v, columns)):
            if float(mass[b, some].max() - mass[b, some].min()) > 1e-5:
                raise ValueError(f"protocol 'rectangular' has no weighted form, found unequal weights of the {name}")
        i, j = linear_sum_assignment(cost[b].cpu()[rows][:, columns].numpy())
        plan[b, rows[i], columns[j]] = 1 / len(i)
    return plan


# -- calibration of pixels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Pixels binned by confidence. Curves over the same bins add up, so a data set can be read in parts.

    Attributes:
        count: ``[bins]`` pixels in each bin.
        confidence_sum: ``[bins]`` sum of their predicted probabilities.
        accuracy_sum: ``[bins]`` sum of the share of annotators who chose the predicted class.
        total: pixels looked at, those in no bin included.
    """

    count: Tensor
    confidence_sum: Tensor
    accuracy_sum: Tensor
    total: Tensor

    @property
    def edges(self) -> Tensor:
        """``[bins + 1]``: bin i holds confidences in (edges[i], edges[i + 1]]."""
        return torch.linspace(0, 1, len(self.count) + 1)

    @property
    def confidence(self) -> Tensor:
        """``[bins]`` mean predicted probability; nan in an empty bin."""
        return self.confidence_sum / self.count

    @property
    def accuracy(self) -> Tensor:
        """``[bins]`` mean share of annotators who agree; nan in an empty bin."""
        return self.accuracy_sum / self.count

    @property
    def ece(self) -> float:
        """Expected calibration error,  Σ_bins |Σ confidence − Σ accuracy| / total;  nan where no pixel is in a bin."""
        if not self.count.any():
            return float("nan")
        return float((self.confidence_sum - self.accuracy_sum).abs().sum() / self.total)

    @property
    def share(self) -> float:
        """The share of the pixels looked at that are in a bin, on which :attr:`ece` rests; nan without a pixel."""
        return float(self.count.sum() / self.total)

    def __add__(self, other: ReliabilityCurve) -> ReliabilityCurve:
        """The curve of both sets of pixels together."""
        if len(self.count) != len(other.count):
            raise ValueError(f"expected curves of as many bins, found {len(self.count)} and {len(other.count)}")
        return ReliabilityCurve(
            self.count + other.count,
            self.confidence_sum + other.confidence_sum,
            self.accuracy_sum + other.accuracy_sum,
            self.total + other.total,
        )


def reliability_curve(
    pred_marginal: Tensor | np.ndarray,
    truth_marginal: Tensor | np.ndarray,
    classes: Sequence[int] | None = None,
    bins: int = 10,
    valid: Tensor | np.ndarray | None = None,
) -> ReliabilityCurve:
    """Bin pixels by predicted probability and compare it with the share of annotators who agree.

    One class: how its probability is calibrated. Several: each pixel's most likely class of all C, where it is one of
    ``classes`` (others fall in no bin but count in the total, as in the released code). A bin is open below and
    closed above, so probabilities of exactly 0 are in no bin.

    Args:
        pred_marginal: ``[B, C, *spatial]`` probabilities.
        truth_marginal: ``[B, C, *spatial]`` share of annotators, :meth:`MaskDistribution.marginal_probs`.
        classes: ``None``: all foreground classes (ids above 0) that have a probability anywhere in either; class 1
            where none has. ``range(C)`` takes the background too.
        valid: ``[B, *spatial]`` bool, False at void pixels.

    >>> curve = reliability_curve(torch.tensor([[[[.2]], [[.8]]]]), torch.tensor([[[[.5]], [[.5]]]]))
    >>> curve.count.tolist(), round(curve.ece, 4)
    ([0, 0, 0, 0, 0, 0, 0, 1, 0, 0], 0.3)
    """
    pred, truth = (torch.as_tensor(x).detach() for x in (pred_marginal, truth_marginal))
    if pred.ndim < 3 or pred.shape != truth.shape:
        raise ValueError(
            f"both marginals must be [B, C, *spatial] of one shape, found {list(pred.shape)} and {list(truth.shape)}"
        )
    if not (pred.is_floating_point() and truth.is_floating_point()):
        raise ValueError(f"marginals must be floating point, found {pred.dtype} and {truth.dtype}")
    if 0 in pred.shape:
        raise ValueError(f"marginals must not be empty, found shape {list(pred.shape)}")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, found {bins}")
    B, C, *spatial = pred.shape
    chosen = None if classes is None else check_classes(classes, C)
    if valid is not None:
        valid = torch.as_tensor(valid)
        if valid.dtype != torch.bool or list(valid.shape) != [B, *spatial]:
            raise ValueError(f"valid must be torch.bool {[B, *spatial]}, found {valid.dtype} {list(valid.shape)}")
    for name, marginal in (("predicted", pred), ("true", truth)):
        if marginal.is_cpu:
            counted = marginal if valid is None else marginal.movedim(1, -1)[valid]
            low, high = (float(x) for x in torch.aminmax(counted)) if counted.numel() else (0.0, 1.0)
            if not (low >= -1e-4 and high <= 1 + 1e-4):  # also catches nan
                raise ValueError(f"the {name} marginal must hold probabilities, found {low:.4g} to {high:.4g}")
    if chosen is None:
        there = torch.maximum(pred, truth.to(pred))
        there = there if valid is None else there * valid[:, None]
        chosen = [c for c in there.transpose(0, 1).flatten(1).amax(1).gt(0).nonzero().flatten().tolist() if c] or [1]
        chosen = check_classes(chosen, C)
    if len(chosen) == 1:
        confidence, accuracy = pred[:, chosen[0]], truth[:, chosen[0]]
    else:
        confidence, top = pred.max(1)
        accuracy = truth.gather(1, top[:, None]).squeeze(1)
        evaluated = torch.zeros(C, dtype=torch.bool, device=top.device)
        evaluated[chosen] = True
        confidence = torch.where(evaluated[top], confidence, -1)
    if valid is not None:
        confidence, accuracy = confidence[valid], accuracy[valid]
    confidence, accuracy = confidence.flatten(), accuracy.flatten()
    if confidence.dtype in (torch.float16, torch.bfloat16):
        confidence = confidence.float()
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    bin_of = torch.bucketize(confidence, edges).clamp_max(bins)  # 0: in no bin, i: (edges[i - 1], edges[i]]

    def per_bin(values: Tensor) -> Tensor:
        sums = exact(confidence.new_zeros(bins + 1))
        return sums.index_add_(0, bin_of, exact(values))[1:]

    count = torch.bincount(bin_of, minlength=bins + 1)[1:]
    total = torch.tensor(confidence.numel(), device=confidence.device)
    return ReliabilityCurve(count, per_bin(confidence), per_bin(accuracy), total)


def ece(
    pred_marginal: Tensor | np.ndarray,
    truth_marginal: Tensor | np.ndarray,
    classes: Sequence[int] | None = None,
    bins: int = 10,
    valid: Tensor | np.ndarray | None = None,
) -> float:
    """Expected calibration error, pixels pooled over all images:  Σ_bins share · |mean confidence − mean accuracy|.

    The arguments are those of :func:`reliability_curve`, which it summarises. nan where no pixel is in a bin,
    because none is valid or none is predicted as one of the classes: nothing was measured.

    >>> round(ece(torch.tensor([[[[.2]], [[.8]]]]), torch.tensor([[[[.5]], [[.5]]]])), 4)
    0.3
    """
    return reliability_curve(pred_marginal, truth_marginal, classes, bins, valid).ece


def pixel_entropy(masks: Masks, classes: int | None = None) -> Tensor:
    """Mean over valid pixels of the marginal's entropy, in nats, ``[B]``.

    >>> round(pixel_entropy(torch.tensor([[[[1, 1]], [[0, 1]]]])).item(), 4)       # half a pixel's worth of log 2
    0.3466
    """
    masks = as_masks(masks)
    if classes is None:
        classes = masks.classes
    sums = [exact(part.entropy(classes)).flatten(1).sum(1) for part in masks.bands()]
    pixels = masks.spatial.numel() if masks.valid is None else masks.valid.flatten(1).sum(1)
    return sum(sums[1:], start=sums[0]) / pixels


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, found {name!r}")
    return PROTOCOLS[name]


def _scored(values: Tensor, pred: MaskDistribution, truth: MaskDistribution) -> Tensor:
    """nan for images without a valid pixel, where every rule about empty masks would be about nothing."""
    valid = common_valid(pred, truth)
    if valid is None:
        return values
    nothing = ~valid.flatten(1).any(1)
    return values.masked_fill(nothing.view(-1, *[1] * (values.ndim - 1)), torch.nan)
