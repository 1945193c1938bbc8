"""Costs, couplings and metrics against their textbook versions, and how far the greedy coupling is from exact."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

import ambiseg
from ambiseg import MaskDistribution, overlap, transport
from benchmarks import textbook
from benchmarks.harness import compare, publish, publish_rows, table


def disks(images: int, masks: int, size: int, seed: int) -> Tensor:
    """Masks of one blurred nodule an image: disks around one centre, radii that vary, some readers see nothing."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-1, 1, size)
    centre = torch.rand(images, 1, 2, generator=g) - 0.5
    centre = centre + 0.03 * torch.randn(images, masks, 2, generator=g)
    radius = torch.rand(images, 1, generator=g) * 0.3 + 0.1
    radius = radius * (1 + 0.2 * torch.randn(images, masks, generator=g))
    radius = radius * (torch.rand(images, masks, generator=g) > 0.2)
    y, x = (grid - centre[..., k, None] for k in (0, 1))
    return ((y.square()[..., :, None] + x.square()[..., None, :]).sqrt() < radius[..., None, None]).long()


def street(size: tuple[int, int], modes: int, seed: int) -> Tensor:
    """19 classes in blocks, and the flips of five of them to five new ones: up to 32 modes, [1, modes, H, W]."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(19, (size[0] // 8, size[1] // 8), generator=g)
    base = blocks.repeat_interleave(8, 0).repeat_interleave(8, 1)
    flips = torch.tensor(list(itertools.product([0, 1], repeat=5)))[torch.linspace(0, 31, modes).long()]
    labels = base.repeat(modes, 1, 1)
    for k in range(5):
        labels = torch.where((base == k) & (flips[:, k, None, None] == 1), 19 + k, labels)
    return labels[None]


def with_backward(cost, logits: Tensor, annotations) -> None:
    logits.grad = None
    cost(logits, annotations).sum().backward()


def costs() -> None:
    rows = []
    logits = torch.randn(4, 16, 2, 128, 128, requires_grad=True)
    readers = disks(4, 4, 128, seed=0)
    rows.append(
        compare(
            "IoU cost + backward: 4 images, N=16, M=4, C=2, 128²",
            lambda: with_backward(overlap.iou_cost, logits, readers),
            lambda: with_backward(textbook.iou_cost, logits, readers),
        )
    )
    many = torch.randn(1, 70, 25, 128, 128, requires_grad=True)
    for modes in (2, 8, 32):
        annotations = street((128, 128), modes, seed=0)
        rows.append(
            compare(
                f"CE cost + backward: 1 image, N=70, M={modes}, C=25, 128²",
                lambda a=annotations: with_backward(overlap.ce_cost, many, a),
                lambda a=annotations: with_backward(textbook.ce_cost, many, a),
                repeats=3,
            )
        )
    publish_rows("costs", "Soft costs, forward and backward", rows)
    two, all_modes = (street((128, 128), modes, seed=0) for modes in (2, 32))
    growth = compare(
        "growth of the CE cost from M=2 to M=32",
        lambda: with_backward(overlap.ce_cost, many, two),
        lambda: with_backward(overlap.ce_cost, many, all_modes),
    )
    publish("growth", "Growth of the CE cost with annotations", f"M=32 costs {growth.ratio:.2f}× M=2.", growth.ratio)


def couplings() -> None:
    rows = []
    for B, N, M, capacity in ((16, 16, 4, 1 / 2), (12, 70, 32, 1 / 32)):
        cost, weights = torch.rand(B, N, M), torch.full((B, M), 1 / M)
        rows.append(
            compare(
                f"greedy coupling: {B} images, N={N}, M={M}, γ={capacity:.3g}",
                lambda c=cost, w=weights, g=capacity: transport.couple(c, w, g),
                lambda c=cost, w=weights, g=capacity: textbook.greedy(c, w, g),
            )
        )
    publish_rows("couplings", "Couplings", rows)
    cost, weights = torch.rand(12, 70, 32), torch.full((12, 32), 1 / 32)
    solvers = compare(
        "exact against greedy coupling: 12 images, N=70, M=32, γ=1/32",
        lambda: transport.couple(cost, weights, 1 / 32, "greedy"),
        lambda: transport.couple(cost, weights, 1 / 32, "exact"),
    )
    publish("solvers", "Solvers", f"The exact coupling costs {solvers.ratio:.1f}× the greedy one.", solvers.ratio)


def metrics() -> None:
    rows = []

    def ours(samples: Tensor, annotations: Tensor, classes: tuple[int, ...] = (1,)) -> None:
        pred, truth = MaskDistribution(samples), MaskDistribution(annotations)
        ambiseg.ged(pred, truth, classes)
        ambiseg.matched_iou(pred, truth, classes)

    def plain(samples: Tensor, annotations: Tensor, classes: tuple[int, ...] = (1,)) -> None:
        for s, a in zip(samples, annotations, strict=True):
            textbook.ged_and_matched_iou(s, a, classes)

    nodule, readers = disks(1, 100, 128, seed=1), disks(1, 4, 128, seed=2)
    noise = torch.randint(2, (1, 100, 128, 128))
    switched = tuple(range(5)) + tuple(range(19, 24))
    modes = street((128, 256), 32, seed=0)
    street_samples = modes[:, [*range(32), 0, 1, 2]]
    cases = [
        ("nodules, 100 × 4, 128²", nodule, readers, (1,)),
        ("noise, 100 × 4, 128²", noise, readers, (1,)),
        ("16 images of 16 × 4, 128²", disks(16, 16, 128, seed=3), disks(16, 4, 128, seed=4), (1,)),
        ("street, 35 × 32, 10 of 24 classes, 128×256", street_samples, modes, switched),
    ]
    for name, pred, truth, classes in cases:
        rows.append(
            compare(
                f"GED + matched IoU: {name}",
                lambda p=pred, t=truth, c=classes: ours(p, t, c),
                lambda p=pred, t=truth, c=classes: plain(p, t, c),
                repeats=3,
            )
        )
    publish_rows("metrics", "Metrics against loops over pairs", rows)


def greedy_gap(problems: int = 2000) -> None:
    """⟨P, C⟩ of the greedy plan relative to the exact one, over many random problems of each kind."""
    rows, data = [], []
    kinds = {"random costs": _random_costs, "soft IoU of nodules": _nodule_costs}
    for (kind, make), (N, M, capacity) in itertools.product(
        kinds.items(), [(16, 4, 1 / 2), (16, 4, 1 / 4), (16, 4, 1 / 16), (35, 32, 1 / 32), (70, 32, 1 / 32)]
    ):
        cost = make(problems, N, M)
        weights = torch.full((problems, M), 1 / M, dtype=cost.dtype)
        value = {s: (transport.couple(cost, weights, capacity, s) * cost).sum((1, 2)) for s in ("greedy", "exact")}
        excess = (value["greedy"] / value["exact"] - 1).clamp_min(0).numpy()
        optimal = float((excess < 1e-9).mean())
        mean, high, worst = float(excess.mean()), float(np.quantile(excess, 0.99)), float(excess.max())
        data.append(
            {"kind": kind, "N": N, "M": M, "capacity": capacity, "optimal": optimal, "mean": mean, "worst": worst}
        )
        cells = [kind, f"{N} × {M}", f"1/{1 / capacity:.0f}", f"{optimal:.1%}"]
        rows.append([*cells, f"{mean:.2%}", f"{high:.2%}", f"{worst:.2%}"])
    headers = ["costs", "N × M", "γ", "greedy is optimal", "mean excess", "99th percentile", "worst"]
    publish("greedy_gap", f"Excess cost of the greedy coupling over the exact one, {problems} problems a row",
            table(headers, rows), data)  # fmt: skip


def _random_costs(problems: int, N: int, M: int) -> Tensor:
    return torch.rand(problems, N, M, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _nodule_costs(problems: int, N: int, M: int) -> Tensor:
    """What training sees: soft samples of a nodule against readers of the same one."""
    masks = disks(problems, N + M, 24, seed=5)
    soft = (masks[:, :N].double() * 4 - 2)[:, :, None]
    return overlap.iou_cost(torch.cat([-soft, soft], 2), masks[:, N:])


def main() -> None:
    torch.manual_seed(0)
    costs()
    couplings()
    metrics()
    greedy_gap()
