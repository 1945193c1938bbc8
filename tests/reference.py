"""Slow and obvious: each definition as written, one pair of masks and one pixel at a time. No code of ambiseg."""

from __future__ import annotations

import itertools
import math

import numpy as np
import ot
from scipy.optimize import linear_sum_assignment


def class_iou(a, b, cls, valid=None):
    """IoU of one class of two masks; nan when neither has it."""
    shared = either = 0
    for p in np.ndindex(a.shape):
        if valid is None or valid[p]:
            shared += a[p] == cls and b[p] == cls
            either += a[p] == cls or b[p] == cls
    return shared / either if either else math.nan


def iou(a, b, classes, absent, valid=None):
    values = [class_iou(a, b, c, valid) for c in classes]
    if absent == "agree":
        values = [1.0 if math.isnan(x) else x for x in values]
    values = [x for x in values if not math.isnan(x)]
    return sum(values) / len(values) if values else math.nan


def ged(samples, annotations, u, v, classes, absent, valid=None):
    def expect(xs, ws, ys, vs):
        return sum(
            w * t * (1 - iou(x, y, classes, absent, valid))
            for (x, w), (y, t) in itertools.product(zip(xs, ws, strict=True), zip(ys, vs, strict=True))
            if w * t > 0
        )

    return (
        2 * expect(samples, u, annotations, v) - expect(samples, u, samples, u) - expect(annotations, v, annotations, v)
    )


def hungarian_iou(samples, annotations, classes, absent):
    """Both sides repeated to the least common multiple, then matched one to one."""
    n, m = len(samples), len(annotations)
    lcm = math.lcm(n, m)
    table = np.array([[iou(s, a, classes, absent) for a in annotations] for s in samples])
    table = table.repeat(lcm // n, 0).repeat(lcm // m, 1)
    return table[linear_sum_assignment(-table)].mean()


def ece(pred, truth, classes, bins, valid=None):
    """[C, P] marginals, pixel by pixel."""
    sums = [[0.0, 0.0] for _ in range(bins)]
    total = 0
    for p in range(pred.shape[1]):
        if valid is not None and not valid[p]:
            continue
        total += 1
        top = classes[0] if len(classes) == 1 else int(pred[:, p].argmax())
        confidence = pred[top, p] if top in classes else -1.0
        for b in range(bins):
            if np.float32(b / bins) < confidence <= np.float32((b + 1) / bins):
                sums[b][0] += confidence
                sums[b][1] += truth[top, p]
    return sum(abs(c - a) for c, a in sums) / total


def softmax(x):
    e = np.exp(x - x.max(0, keepdims=True))
    return e / e.sum(0, keepdims=True)


def iou_cost(logits, annotation, valid, smooth=1.0):
    """[C, H, W] logits against one mask."""
    s, costs = softmax(logits), []
    for c in range(1, len(s)):
        i = sum(s[c][p] * (annotation[p] == c) for p in np.ndindex(annotation.shape) if valid[p])
        total = sum(s[c][p] + (annotation[p] == c) for p in np.ndindex(annotation.shape) if valid[p])
        costs.append((i + smooth) / (total - i + smooth))
    return 1 - sum(costs) / len(costs)


def ce_cost(logits, annotation, valid):
    s = softmax(logits)
    terms = [-np.log(s[annotation[p]][p]) for p in np.ndindex(annotation.shape) if valid[p]]
    return sum(terms) / len(terms) if terms else 0.0


def transport_value(cost, u, v) -> float:
    """Least cost of moving u onto v, by POT."""
    return float(np.asarray(ot.emd2(np.asarray(u), np.asarray(v), np.asarray(cost))))


def greedy(cost, weights, capacity):
    """The paper's appendix A.1, one image, as its three nested sentences."""
    n, m = cost.shape
    plan = np.zeros((n, m))
    for j in np.argsort(cost.min(0), kind="stable"):
        left = weights[j]
        for i in np.argsort(cost[:, j], kind="stable"):
            plan[i, j] = min(left, capacity - plan[i].sum())
            left -= plan[i, j]
    return plan
