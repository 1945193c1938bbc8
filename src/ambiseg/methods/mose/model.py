"""MoSE, the mixture of stochastic experts (Gao et al., ICLR 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ambiseg.masks import MaskDistribution, Masks, as_masks
from ambiseg.methods.base import Method, Predictive, evaluation
from ambiseg.methods.mose.grouping import merge_alike
from ambiseg.nn import Backbone, DeepLabV3Plus, Experts, Features, Gate, PixelHead, ReleasedHead, UNet, unet
from ambiseg.nn.pixelhead import Folded, as_rows, draw_masks, label_dtype, mean_softmax, pixel_logits, region_sums
from ambiseg.overlap import COSTS, Cost, ce_from_sums, iou_from_sums, regions_of
from ambiseg.regions import Regions
from ambiseg.transport import Solver, couple, optimal_plan, relaxed_objective

BACKBONES = {
    "unet": lambda channels, **levels: UNet(channels, unet.FULL, **levels),
    "unet-light": lambda channels, **levels: UNet(channels, unet.LIGHT, **levels),
    "deeplabv3plus": lambda channels: DeepLabV3Plus(channels),
}


class _Drawn(NamedTuple):
    """Latent codes of the samples a loss is made of, and their weights."""

    latents: Tensor  # [B, N, L], those of one expert side by side
    weights: Tensor  # [B, N]


class MoSE(Method):
    """A backbone whose features meet K expert-specific Gaussians, and a gate that says how likely each expert is.

        s = F(x, z_k),     k ~ π(x),     z_k ~ N(m_k, σ_k² I)

    Args:
        in_channels: channels of the images.
        classes: C, background included.
        experts: K, how many there are.
        samples: S, samples an expert in training.
        latent: L, dimension of the latent code.
        backbone: ``unet`` (7 levels), ``unet-light`` (4 levels), ``deeplabv3plus``, or any
            :class:`ambiseg.nn.features.Backbone`; :class:`ambiseg.nn.features.Adapter` makes one of any network.
            A module brings its own ``in_channels`` and levels.
        cost: ``iou``, ``ce``, or a callable (logits ``[B, N, C, H, W]``, annotations) -> ``[B, N, M]``.
        class_weights: C weights of pixels by their class, for ``ce``; ``None`` is equal.
        beta: β, weight of the KL term.
        capacity: γ, how much annotation mass a sample may explain; 1 is no limit. Schedules pass their own to
            :meth:`loss`.
        solver: of the coupling, :func:`ambiseg.transport.couple`.
        kl: ``paper``, or ``released`` for the authors' scaling (effective β/N).
        stochastic: ``False`` for deterministic experts.
        diagonal: one σ a latent dimension instead of one an expert.
        expert_weights: ``learned``, ``uniform``, or K fixed probabilities.
        gate_level: encoder depth that the gate reads, as a fraction: 1/3, 2/3 or 1, the bottom (U-Nets).
        inject_level: decoder depth where noise enters, as a fraction: 1/3, 2/3 or 1, the last features (U-Nets).
            Below 1 the rest of the decoder runs once a sample.
        head: ``paper``, or ``released`` (with batch normalisation, for the authors' checkpoints).
        scale_bias: where the noise's scale starts; docs/mose.md says why 1.
        objective: ``transport`` is the paper's loss. ``all-pairs`` averages the cost over every pair of sample and
            annotation (its ablation: predicts one average mask).
        form: ``weighted`` trains on S samples of every expert with their weights. ``gumbel`` draws K·S samples from the
            mixture with a straight-through Gumbel-softmax, couples them exactly, and needs no KL term.
        temperature: of the Gumbel-softmax.
        group_threshold: G₀. Below 1, experts whose mean outputs overlap at least this much share one KL target (soft
            gradients, Algorithm 2).
        memory_budget: bytes that hidden layers and logits of a prediction may take at a time; chosen by device when
            ``None``. What is predicted does not depend on it.

    >>> model = MoSE(in_channels=1, classes=2, backbone="unet-light")
    >>> masks = model.predict(torch.rand(1, 1, 64, 64)).compact(per_expert=2)
    >>> masks
    MaskDistribution(1 image of 64×64, 8 masks, weighted, soft marginal)
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        experts: int = 4,
        samples: int = 4,
        latent: int = 1,
        backbone: str | Backbone = "unet",
        cost: str | Cost = "iou",
        *,
        class_weights: Sequence[float] | None = None,
        beta: float = 1.0,
        capacity: float = 1.0,
        solver: Solver = "greedy",
        kl: Literal["paper", "released"] = "paper",
        stochastic: bool = True,
        diagonal: bool = False,
        expert_weights: str | Sequence[float] = "learned",
        gate_level: float = 1.0,
        inject_level: float = 1.0,
        head: Literal["paper", "released"] = "paper",
        hidden: int = 32,
        scale_bias: float = 1.0,
        objective: Literal["transport", "all-pairs"] = "transport",
        form: Literal["weighted", "gumbel"] = "weighted",
        temperature: float = 1.0,
        group_threshold: float = 1.0,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("kl", kl, ("paper", "released")),
            ("head", head, ("paper", "released")),
            ("objective", objective, ("transport", "all-pairs")),
            ("form", form, ("weighted", "gumbel")),
            ("cost", cost if isinstance(cost, str) else "iou", tuple(COSTS)),
            ("backbone", backbone if isinstance(backbone, str) else "unet", tuple(BACKBONES)),
            ("solver", solver, get_args(Solver)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, found {value!r}")
        if classes < 2 or samples < 1:
            raise ValueError(f"expected at least 2 classes and 1 sample an expert, found {classes} and {samples}")
        if class_weights is not None and (cost != "ce" or len(class_weights) != classes or not min(class_weights) > 0):
            raise ValueError(f"class_weights: expected {classes} positive numbers and cost ce, found {class_weights}")
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)  # a setting: checkpoints do not carry it
        self.class_weights: Tensor | None
        self.classes, self.samples = classes, samples
        self.cost, self.beta, self.capacity = cost, beta, capacity
        self.solver: Solver = solver
        self.kl: Literal["paper", "released"] = kl
        self.objective, self.form, self.temperature = objective, form, temperature
        self.group_threshold, self.memory_budget = group_threshold, memory_budget
        self.backbone = _build(backbone, in_channels, gate_level, inject_level)
        self.experts = Experts(experts, latent, stochastic, diagonal)
        self.gate = Gate(self.backbone.gate_channels, experts, expert_weights)
        channels = {"channels": self.backbone.dense_channels, "features": self.backbone.head_channels}
        self.head: PixelHead | ReleasedHead
        if head == "released":
            self.head = ReleasedHead(latent=latent, classes=classes, **channels)
        else:
            self.head = PixelHead(latent=latent, classes=classes, hidden=hidden, scale_bias=scale_bias, **channels)

    def forward(self, images: Tensor) -> MoSEPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(f"expected images [B, C, H, W] of floats, found {images.dtype} {list(images.shape)}")
        features = self.backbone(images)
        size = (images.shape[2], images.shape[3])
        return MoSEPredictive(self, features, self.gate(features.gate), size, training=self.training)

    def predict(self, images: Tensor) -> MoSEPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        capacity: float | None = None,
        samples: int | None = None,
        group_threshold: float | None = None,
        annealing: float = 1.0,
        one_annotation: bool = False,
        regions: Regions | None = None,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> dict[str, Tensor]:
        """The optimal-transport calibration loss (equation 6), averaged over the images that have a valid pixel.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks an image with their weights.
            capacity, samples, group_threshold: γ, S and G₀ of this step, when a schedule moves them.
            annealing: how far annotation weights have gone from uniform (0) to their own values (1).
            one_annotation: use a single annotation an image, drawn by its weight.
            regions: :func:`ambiseg.regions.partition` of the annotations, when the loader has it already.
            generator: of all random draws.

        Returns:
            ``total``, ``transport`` and ``kl``, scalars.
        """
        if settings:
            raise TypeError(f"loss() got unexpected settings: {', '.join(settings)}")
        annotations = as_masks(annotations)
        if one_annotation:
            annotations, regions = annotations.draw(1, generator), None
        predictive = self(images)
        samples = self.samples if samples is None else samples
        if samples < 1 or not 0 <= annealing <= 1:
            raise ValueError(f"expected at least 1 sample and annealing in [0, 1], found {samples} and {annealing}")
        drawn = self._draw(predictive, samples, generator)
        threshold = self.group_threshold if group_threshold is None else group_threshold
        grouping = threshold < 1 and self.form == "weighted" and self.objective == "transport"
        cost, modes = self._cost(predictive, drawn.latents, annotations, regions, grouping)
        v = _annealed(annotations.mass, annealing).to(cost.dtype)
        if self.objective == "all-pairs":
            transport = (drawn.weights[:, :, None] * v[:, None] * cost).sum((1, 2))
            kl = torch.zeros_like(transport)
        elif self.form == "gumbel":
            plan = optimal_plan(cost, drawn.weights, v)
            transport, kl = (plan * cost).sum((1, 2)), torch.zeros_like(cost[:, 0, 0])
        else:
            plan = couple(cost, v, self.capacity if capacity is None else capacity, self.solver)
            groups = None if modes is None else merge_alike(modes, self.classes, threshold, annotations.valid)
            if groups is not None:
                groups = groups.repeat_interleave(cost.shape[1] // self.experts.count, 1)
            terms = relaxed_objective(
                cost, plan, drawn.weights, groups=groups, num_groups=self.experts.count, scaling=self.kl
            )
            transport, kl = terms.transport, terms.kl
        counted = _has_valid_pixels(annotations).to(cost.dtype)
        transport, kl = ((x * counted).sum() / counted.sum().clamp_min(1) for x in (transport, kl))
        return {"total": transport + self.beta * kl, "transport": transport.detach(), "kl": kl.detach()}

    # -- parts of the loss -----------------------------------------------------------------------------------

    def _draw(self, predictive: MoSEPredictive, samples: int, generator: torch.Generator | None) -> _Drawn:
        pi, K = predictive.expert_weights, self.experts.count
        if self.form == "weighted":
            return _Drawn(*predictive._weighted(samples, generator))
        # A straight-through one-hot choice of expert for each of K·S samples: forward a draw, backward its softmax.
        noise = torch.empty(len(pi), K * samples, K, device=pi.device, dtype=pi.dtype)
        noise = -noise.exponential_(generator=generator).clamp_min(torch.finfo(pi.dtype).tiny).log()
        soft = ((pi.clamp_min(torch.finfo(pi.dtype).tiny).log()[:, None] + noise) / self.temperature).softmax(2)
        hard = torch.zeros_like(soft).scatter_(2, soft.argmax(2, keepdim=True), 1.0)
        choice = (hard + soft - soft.detach()).to(self.experts.mean.dtype)
        latents = self.experts.noisy(choice @ self.experts.mean, choice @ self.experts.sigma, generator)
        return _Drawn(latents, torch.full_like(soft[..., 0], 1 / (K * samples)))

    def _cost(
        self,
        predictive: MoSEPredictive,
        latents: Tensor,
        annotations: MaskDistribution,
        regions: Regions | None,
        grouping: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Cost ``[B, N, M]``, and each expert's most likely labels ``[B, K, *spatial]`` where grouping needs them."""
        experts = self.experts.count if grouping else None
        if isinstance(self.cost, str) and predictive.tiled:
            if annotations.spatial != predictive.size or len(annotations) != len(latents):
                raise ValueError(
                    f"expected annotations of {len(latents)} images of {list(predictive.size)} like the images, "
                    f"found {len(annotations)} of {list(annotations.spatial)}"
                )
            regions = regions_of(annotations, self.classes, regions)
            sums, modes = region_sums(*predictive._folded(latents), regions, log=self.cost == "ce", experts=experts)
            said = regions.one_hot(self.classes, sums.dtype)
            if self.cost == "ce":
                cost = ce_from_sums(sums, said, regions, self.class_weights)
            else:
                cost = iou_from_sums(sums[:, :, 1:], said[:, :, 1:], regions)
            return cost, None if modes is None else modes.unflatten(2, predictive.size)
        logits = predictive.logits(latents)
        if isinstance(self.cost, str):
            weighted = {} if self.class_weights is None else {"class_weights": self.class_weights}
            cost = COSTS[self.cost](logits, annotations, regions=regions, **weighted)
        else:
            cost = self.cost(logits, annotations)
        if experts is None:
            return cost, None
        means = logits.detach().softmax(2).unflatten(1, (experts, -1)).mean(2)
        return cost, means.argmax(2)


@dataclass(frozen=True, eq=False)
class MoSEPredictive(Predictive):
    """What MoSE predicts for a batch of images.

    Attributes:
        expert_weights: π ``[B, K]``.
        features: of the backbone.
        size: (H, W) of the images.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards;
            made in training, what is left to compute follows the model.
    """

    model: MoSE
    features: Features
    expert_weights: Tensor
    size: tuple[int, int]
    training: bool

    @property
    def tiled(self) -> bool:
        """Whether masks can be made tile by tile, or need the rest of the decoder, or batch statistics."""
        with self._mode():
            return not self.features.skips and self.model.head.foldable

    def _mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.training else evaluation(self.model)

    def sample(self, n: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The standard form: ``n`` experts drawn from π, a latent code from each; equal weights."""
        return self._masks(self._standard(n, generator), None)

    def compact(self, per_expert: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """The weighted form (equation 3): ``per_expert`` masks of every expert, each of weight π_k / per_expert."""
        latents, weights = self._weighted(per_expert, generator)
        return self._masks(latents, weights.detach())

    def marginal(
        self, n: int | None = None, generator: torch.Generator | None = None, *, per_expert: int | None = None
    ) -> Tensor:
        """Class probabilities ``[B, C, H, W]`` from ``n`` samples, or from ``per_expert`` of every expert."""
        if (n is None) == (per_expert is None):
            raise ValueError("marginal needs either n or per_expert")
        if n is not None:
            latents, weights = self._standard(n, generator), self._equal(n)
        else:
            assert per_expert is not None
            latents, weights = self._weighted(per_expert, generator)
        if self.tiled:
            rows, head = self._folded(latents)
            return mean_softmax(rows, head, weights, self._tile(head)).unflatten(2, self.size)
        return self._one_by_one(latents, weights)[1]

    def logits(self, latents: Tensor) -> Tensor:
        """Logits of given latent codes, differentiable:  ``[B, N, L] -> [B, N, C, H, W]``."""
        if self.tiled:
            rows, head = self._folded(latents)
            return pixel_logits(rows, head, self._tile(head)).unflatten(3, self.size)
        with self._mode():
            maps = self.model.head.modulate(self.features.dense, latents)
            if self.features.skips:
                finished = self.model.backbone.finish(maps.flatten(0, 1), self.features, self.size)
                maps = finished.unflatten(0, latents.shape[:2])
            return self.model.head.classify(maps)

    def _tile(self, head: Folded) -> int | None:
        """Pixels at a time whose hidden rows and logits, of all samples and in float32, fit the model's budget."""
        if self.model.memory_budget is None:
            return None
        _, samples, hidden = head.bias.shape
        widths = hidden + sum(len(bias) for _, bias in head.rest)
        return max(1, self.model.memory_budget // (4 * samples * widths))

    def _folded(self, latents: Tensor) -> tuple[Tensor, Folded]:
        with self._mode():
            return as_rows(self.features.dense), self.model.head.fold(latents)

    def _standard(self, n: int, generator: torch.Generator | None) -> Tensor:
        if n < 1:
            raise ValueError(f"expected at least one sample, found {n}")
        ids = torch.multinomial(self.expert_weights.detach(), n, replacement=True, generator=generator)
        return self.model.experts.of(ids, generator)

    def _weighted(self, per_expert: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if per_expert < 1:
            raise ValueError(f"expected at least one sample an expert, found {per_expert}")
        latents = self.model.experts.each(len(self.expert_weights), per_expert, generator)
        return latents, (self.expert_weights / per_expert).repeat_interleave(per_expert, 1)

    def _equal(self, n: int) -> Tensor:
        return torch.full_like(self.expert_weights[:, :1], 1 / n).detach().expand(-1, n)

    def _masks(self, latents: Tensor, weights: Tensor | None) -> MaskDistribution:
        mass = self._equal(latents.shape[1]) if weights is None else weights
        if self.tiled:
            rows, head = self._folded(latents)
            labels, marginal = (x.unflatten(2, self.size) for x in draw_masks(rows, head, mass, self._tile(head)))
        else:
            labels, marginal = self._one_by_one(latents, mass)
        return MaskDistribution(labels, weights, marginal=marginal)

    @torch.no_grad()
    def _one_by_one(self, latents: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Labels and marginal where a sample needs a pass of its own: one sample's logits in memory at a time."""
        marginal, labels = torch.zeros((), device=latents.device), []
        for i in range(latents.shape[1]):
            logits = self.logits(latents[:, i : i + 1])[:, 0]
            marginal = marginal + weights[:, i, None, None, None] * logits.softmax(1)
            labels.append(logits.argmax(1))
        stacked = torch.stack(labels, 1)
        return stacked.to(label_dtype(self.model.classes)), marginal


def _build(backbone: str | Backbone, channels: int, gate_level: float, inject_level: float) -> Backbone:
    if isinstance(backbone, nn.Module):
        if not isinstance(backbone, Backbone):
            name = type(backbone).__name__
            raise ValueError(f"wrap {name} as ambiseg.nn.Adapter({name.lower()}, dense=…) to use it as a backbone")
        if not gate_level == inject_level == 1:
            raise ValueError("gate_level and inject_level go to the backbone itself when it is a module")
        return backbone
    levels = {} if gate_level == inject_level == 1 else {"gate_level": gate_level, "inject_level": inject_level}
    if levels and backbone == "deeplabv3plus":
        raise ValueError("gate_level and inject_level are settings of the U-Nets, found them with deeplabv3plus")
    return BACKBONES[backbone](channels, **levels)


def _annealed(mass: Tensor, annealing: float) -> Tensor:
    """Annotation weights between uniform over those present (0) and their own (1)."""
    if annealing == 1:
        return mass
    present = (mass > 0).to(mass.dtype)
    return annealing * mass + (1 - annealing) * present / present.sum(1, keepdim=True)


def _has_valid_pixels(annotations: MaskDistribution) -> Tensor:
    if annotations.valid is None:
        return torch.ones(len(annotations), device=annotations.device)
    return annotations.valid.flatten(1).any(1)
