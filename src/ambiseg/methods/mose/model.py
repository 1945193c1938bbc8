"""MoSE, the mixture of stochastic experts (Gao et al., ICLR 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ambiseg.energy import distances_from_sums, energy_from_costs, sample_distances
from ambiseg.masks import MaskDistribution, Masks, as_masks, at_least_float32
from ambiseg.methods.base import Method, Noise, Predictive, Stratified, evaluation
from ambiseg.methods.dense import BAND, DensePredictive, drawn, in_parts
from ambiseg.methods.mose.config import MoSEConfig
from ambiseg.methods.mose.grouping import merge_alike
from ambiseg.methods.mose.merging import merged
from ambiseg.methods.mose.weighting import annealed, has_valid_pixels, log_of
from ambiseg.methods.predictive import Numbers
from ambiseg.methods.schedules import final
from ambiseg.nn import Backbone, Experts, Features, Gate, PixelHead, ReleasedHead
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.pixelhead import Folded, as_rows, mean_softmax, pixel_logits, plain_logits, region_sums
from ambiseg.nn.windows import Step, Windows, stitched
from ambiseg.overlap import COSTS, Cost, ce_from_sums, full_precision, iou_from_sums, regions_of
from ambiseg.settings import validate
from ambiseg.transport import couple, optimal_plan, relaxed_objective

_LEVELS = {"gate_level": 1.0, "gate_scales": 1, "inject_level": 1.0}  # settings that go to a U-Net


class _Drawn(NamedTuple):
    """Latent codes of the samples a loss is made of, and their weights."""

    latents: Tensor  # [B, N, L], those of one expert side by side
    weights: Tensor  # [B, N]


class _Costs(NamedTuple):
    """What a loss needs of the samples."""

    cost: Tensor  # [B, N, M] against every annotation
    modes: Tensor | None  # [B, K, *spatial] each expert's most likely labels, where grouping needs them
    distances: Tensor | None  # [B, N (N - 1) / 2] between samples, where the energy score needs them


class MoSE(Method):
    """A backbone whose features meet K expert-specific Gaussians, and a gate that says how likely each expert is.

        s = F(x, z_k),     k ~ π(x),     z_k ~ N(m_k, σ_k² I)

    Args:
        in_channels: channels of the images.
        classes: C, background included.
        backbone: ``unet`` (7 levels), ``unet-light`` (4 levels), ``deeplabv3plus``, or any
            :class:`ambiseg.nn.features.Backbone`; :class:`ambiseg.nn.features.Adapter` makes one of any network.
            A module brings its own ``in_channels`` and levels.
        cost: ``iou``, ``ce``, or a callable (logits ``[B, N, C, H, W]``, annotations) -> ``[B, N, M]``.
        config: all settings; see :class:`MoSEConfig`.
        settings: single settings by name, such as ``experts=8``.

    >>> model = MoSE(in_channels=1, classes=2, backbone="unet-light", experts=4)
    >>> masks = model.predict(torch.rand(1, 1, 64, 64)).compact(per_stratum=2)
    >>> masks
    MaskDistribution(1 image of 64×64, 8 masks, weighted, soft marginal)
    """

    Config: ClassVar = MoSEConfig
    idea = "experts with Gaussians of their own and a gate, fitted to all annotations at once by optimal transport"
    reference = (
        "Gao et al., Modeling Multimodal Aleatoric Uncertainty in Segmentation with Mixture of Stochastic Experts, "
        "ICLR 2023"
    )
    year = 2023
    stratum = "expert"
    terms = {  # noqa: RUF012 - declared as a class variable in Method
        "transport": "how far the masks are from the annotations that they are matched with",
        "kl": "how far the weights of the masks are from the share of the annotations that each is matched with",
        "distance": "the mean distance between a mask and an annotation",
        "usage": "the entropy of the mean weights of the experts, which the prior on few experts makes small",
        "spread": "the mean distance between two masks; the energy score is twice the distance less the spread",
    }

    def __init__(
        self,
        in_channels: int,
        classes: int,
        backbone: str | Backbone = "unet",
        cost: str | Cost | None = None,
        *,
        config: MoSEConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if cost is not None and not callable(cost):
            settings["cost"] = cost
        self.config = config = validate(MoSEConfig, settings) if config is None else config.changed(**settings)
        if classes < 2:
            raise ValueError(f"expected at least 2 classes, found {classes}")
        if config.class_weights is not None and len(config.class_weights) != classes:
            raise ValueError(f"class_weights: expected {classes} numbers, found {len(config.class_weights)}")
        weights = None if config.class_weights is None else torch.tensor(config.class_weights, dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)  # a setting: checkpoints do not carry it
        self.class_weights: Tensor | None
        self.classes = classes
        self.cost: str | Cost = cost if callable(cost) else config.cost
        if callable(cost) and config.objective == "energy":
            raise ValueError("objective energy has a distance of its own: expected no cost function, found one")
        if isinstance(backbone, nn.Module) and _LEVELS.keys() & settings.keys():
            raise ValueError("gate_level, gate_scales and inject_level go to the backbone itself when it is a module")
        self.backbone = _backbone(backbone, in_channels, config)
        self.experts = Experts(config.experts, config.latent, config.stochastic, config.diagonal)
        read = self.backbone.gate_channels
        hidden = (self.backbone.gate_scales or (read,))[-1]
        self.gate = Gate(read, config.experts, config.expert_weights, config.gate_pooling, hidden)
        channels = {"channels": self.backbone.dense_channels, "features": self.backbone.head_channels}
        self.head: PixelHead | ReleasedHead
        if config.head == "released":
            self.head = ReleasedHead(latent=config.latent, classes=classes, **channels)
        else:
            self.head = PixelHead(
                latent=config.latent, classes=classes, hidden=config.hidden, scale_bias=config.scale_bias, **channels
            )

    @classmethod
    def build(cls, config: MoSEConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> MoSE:
        return cls(in_channels, classes, backbone.build(in_channels, **_levels(config)), config=config)

    def forward(self, images: Tensor) -> MoSEPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(f"expected images [B, C, H, W] of floats, found {images.dtype} {list(images.shape)}")
        features = self.backbone(images)
        return self._predictive(features, self.gate(features.gate), (images.shape[2], images.shape[3]))

    def _predictive(self, features: Features, weights: Tensor, size: tuple[int, int]) -> MoSEPredictive:
        return MoSEPredictive(self, features, weights, size, training=self.training)

    def predict(self, images: Tensor) -> MoSEPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """Features by windows, stitched to one map; the gate reads all of it, pooled; the head runs once."""
        if self.backbone.finishes:  # the rest of the decoder runs per sample: blend what it makes of windows
            return super().predict_windows(image, windows, step)
        with evaluation(self), torch.no_grad():
            features = stitched(self.backbone, image, windows, step, self.gate.pooling.over_windows())
            weights = self.gate.of(features.gate.flatten(1))
            predictive = self._predictive(features, weights, (image.shape[2], image.shape[3]))
            if features.dense.numel():
                return predictive
            return in_parts(self, predictive, self.backbone, image, windows, step)

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        beta: float | None = None,
        capacity: float | None = None,
        samples: float | None = None,
        group_threshold: float | None = None,
        annealing: float | None = None,
        energy_share: float | None = None,
        usage_prior: float | None = None,
    ) -> dict[str, Tensor]:
        """The optimal-transport calibration loss (equation 6), averaged over the images that have a valid pixel.

        With ``objective: energy``, the energy score of the samples (:mod:`ambiseg.energy`), or a mixture of both.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            beta, capacity, samples, group_threshold, annealing, energy_share, usage_prior: β, γ, S, G₀, the annealing,
                the share of the energy score and λ of this step, when a schedule moves them; ``None`` takes the
                setting's last value.

        Returns:
            ``total``, and the terms that it is made of: ``transport`` and ``kl``, ``distance`` and ``spread``; scalars.
        """
        config, annotations = self.config, as_masks(annotations)
        beta = final(config.beta) if beta is None else beta
        capacity = final(config.capacity) if capacity is None else capacity
        samples = round(final(config.samples) if samples is None else samples)
        threshold = final(config.group_threshold) if group_threshold is None else group_threshold
        annealing = final(config.annealing) if annealing is None else annealing
        prior = final(config.usage_prior) if usage_prior is None else usage_prior
        share = 0.0
        if config.objective == "energy":
            share = final(config.energy_share) if energy_share is None else energy_share
        if samples < 1 or not 0 <= annealing <= 1 or not 0 <= share <= 1:
            found = f"{samples}, {annealing} and {share}"
            raise ValueError(f"expected at least 1 sample, and annealing and energy_share in [0, 1], found {found}")
        predictive = self(images)
        drawn = self._draw(predictive, samples, generator)
        grouping = threshold < 1 and config.form == "weighted" and config.objective != "all-pairs" and share < 1
        costs = self._costs(predictive, drawn.latents, annotations, grouping, pairs=share > 0)
        usage = at_least_float32(predictive.weights).mean(0) if prior > 0 else None
        v = annealed(annotations.mass, annealing).to(costs.cost.dtype)
        counted = has_valid_pixels(annotations).to(costs.cost.dtype)

        def mean(of_images: Tensor) -> Tensor:
            return (of_images * counted).sum() / counted.sum().clamp_min(1)

        terms: dict[str, Tensor] = {}
        total = torch.zeros((), device=costs.cost.device)
        if share < 1:
            rare = None if usage is None else -prior * log_of(usage.detach())
            terms["transport"], terms["kl"] = map(
                mean, self._matched(costs, drawn, v, annotations, capacity, threshold, rare)
            )
            total = (1 - share) * (terms["transport"] + beta * terms["kl"])
        if costs.distances is not None:
            energy = energy_from_costs(costs.cost, costs.distances, drawn.weights, v, self.experts.count)
            terms["distance"], terms["spread"] = mean(energy.distance), mean(energy.spread)
            total = total + share * mean(energy.total)
            if usage is not None:
                terms["usage"] = -(usage * log_of(usage)).sum()
                total = total + share * prior * terms["usage"]
        return {"total": total, **{name: term.detach() for name, term in terms.items()}}

    def merged(self, groups: Sequence[Sequence[int]], usage: Sequence[float]) -> MoSE:
        """See :func:`ambiseg.methods.mose.merging.merged`."""
        return merged(self, groups, usage)

    def stratum_parameters(self) -> list[nn.Parameter]:
        """The experts' Gaussians and the gate."""
        return [*self.experts.parameters(), *self.gate.parameters()]

    # -- parts of the loss -----------------------------------------------------------------------------------

    def _draw(self, predictive: MoSEPredictive, samples: int, generator: torch.Generator | None) -> _Drawn:
        pi, K = predictive.weights, self.experts.count
        if self.config.form == "weighted":
            noise = predictive.compact_noise(samples, generator)
            return _Drawn(noise.codes, noise.mass)
        # A straight-through one-hot choice of expert for each of K·S samples: forward a draw, backward its softmax.
        noise = torch.empty(len(pi), K * samples, K, device=pi.device, dtype=pi.dtype)
        noise = -noise.exponential_(generator=generator).clamp_min(torch.finfo(pi.dtype).tiny).log()
        soft = ((pi.clamp_min(torch.finfo(pi.dtype).tiny).log()[:, None] + noise) / self.config.temperature).softmax(2)
        hard = torch.zeros_like(soft).scatter_(2, soft.argmax(2, keepdim=True), 1.0)
        choice = (hard + soft - soft.detach()).to(self.experts.mean.dtype)
        latents = self.experts.noisy(choice @ self.experts.mean, choice @ self.experts.sigma, generator)
        return _Drawn(latents, torch.full_like(soft[..., 0], 1 / (K * samples)))

    def _matched(
        self,
        costs: _Costs,
        drawn: _Drawn,
        v: Tensor,
        annotations: MaskDistribution,
        capacity: float,
        threshold: float,
        rare: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Transport and KL of every image ``[B]``, for annotations of weights ``v``.

        ``rare``, ``[K]``, is added to the costs of an expert's samples while annotations are matched.
        """
        config, cost = self.config, costs.cost
        if config.objective == "all-pairs":
            transport = (drawn.weights[:, :, None] * v[:, None] * cost).sum((1, 2))
            return transport, torch.zeros_like(transport)
        if config.form == "gumbel":
            plan = optimal_plan(cost, drawn.weights, v)
            return (plan * cost).sum((1, 2)), torch.zeros_like(cost[:, 0, 0])
        asked = cost
        if rare is not None:
            asked = cost + rare.to(cost.dtype).repeat_interleave(cost.shape[1] // self.experts.count)[:, None]
        plan = couple(asked, v, capacity, config.solver)
        groups = None
        if costs.modes is not None:
            groups = merge_alike(costs.modes, self.classes, threshold, annotations.valid)
            groups = groups.repeat_interleave(cost.shape[1] // self.experts.count, 1)
        terms = relaxed_objective(
            cost, plan, drawn.weights, groups=groups, num_groups=self.experts.count, scaling=config.kl
        )
        return terms.transport, terms.kl

    def _costs(
        self,
        predictive: MoSEPredictive,
        latents: Tensor,
        annotations: MaskDistribution,
        grouping: bool,
        pairs: bool,
    ) -> _Costs:
        """Samples against annotations, and, where they are needed, each other; and each expert's most likely labels."""
        experts = self.experts.count if grouping else None
        if isinstance(self.cost, str) and predictive.tiled:
            if annotations.spatial != predictive.size or len(annotations) != len(latents):
                raise ValueError(
                    f"expected annotations of {len(latents)} images of {list(predictive.size)} like the images, "
                    f"found {len(annotations)} of {list(annotations.spatial)}"
                )
            regions = regions_of(annotations, self.classes)
            how = {"log": self.cost == "ce", "experts": experts, "pairs": pairs}
            sums = region_sums(*predictive._folded(latents), regions, **how)
            said = regions.one_hot(self.classes, sums.regions.dtype)
            if self.cost == "ce":
                cost = ce_from_sums(sums.regions, said, regions, self.class_weights)
            else:
                cost = iou_from_sums(sums.regions[:, :, 1:], said[:, :, 1:], regions)
            modes = None if sums.modes is None else sums.modes.unflatten(2, predictive.size)
            distances = None
            if sums.apart is not None:
                distances = distances_from_sums(sums.regions[:, :, 1:].sum(3).transpose(1, 2), sums.apart)
            return _Costs(cost, modes, distances)
        logits = predictive.logits(latents)
        if isinstance(self.cost, str):
            weighted = {} if self.class_weights is None else {"class_weights": self.class_weights}
            cost = COSTS[self.cost](logits, annotations, **weighted)
        else:
            cost = self.cost(logits, annotations)
        distances = modes = None
        if pairs:
            with full_precision(logits):
                distances = sample_distances(at_least_float32(logits).softmax(2), annotations)
        if experts is not None:
            modes = logits.detach().softmax(2).unflatten(1, (experts, -1)).mean(2).argmax(2)
        return _Costs(cost, modes, distances)


@dataclass(frozen=True, eq=False)
class MoSEPredictive(DensePredictive, Stratified):
    """What MoSE predicts for a batch of images; its strata are the experts.

    Attributes:
        features: of the backbone.
        weights: π ``[B, K]``.
        size: (H, W) of the images.
        training: the mode it was made in. Made in evaluation, it stays there whatever the model does afterwards;
            made in training, what is left to compute follows the model.
    """

    model: MoSE
    features: Features
    weights: Tensor
    size: tuple[int, int]
    training: bool

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    @property
    def expert_weights(self) -> Tensor:
        """π ``[B, K]``, the weights of the strata."""
        return self.weights

    @property
    def tiled(self) -> bool:
        """Whether masks can be made tile by tile, or need the rest of the decoder, or batch statistics."""
        with self._mode():
            return not self.features.skips and self.model.head.foldable

    def _mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self.training else evaluation(self.model)

    def noise_of(self, strata: Tensor, generator: torch.Generator | None = None) -> Noise:
        """A latent code from each of the experts named."""
        return Noise(self.model.experts.of(strata, generator), strata=strata)

    @property
    def normals(self) -> int:  # type: ignore[override]
        return self.model.experts.latent if self.model.experts.stochastic else 0

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        """m_k + σ_k ε of each of the experts named."""
        experts, strata = self.model.experts, numbers.strata
        assert strata is not None
        apart = 0.0 if numbers.normals is None else experts.sigma[strata] * numbers.normals
        return Noise(experts.mean[strata] + apart, strata=strata)

    def centre_noise(self) -> Noise:
        """The mean of every expert's Gaussian."""
        experts = self.model.experts
        strata = torch.arange(experts.count, device=self.weights.device).expand(len(self.weights), -1)
        return Noise(experts.mean.detach().expand(len(strata), -1, -1), self.weights.detach(), strata)

    def logits(self, latents: Tensor) -> Tensor:
        """Logits of given latent codes, differentiable:  ``[B, N, L] -> [B, N, C, H, W]``."""
        if self.tiled:
            if torch.compiler.is_exporting():
                return plain_logits(self.features.dense, self.model.head.fold(latents))
            return pixel_logits(*self._folded(latents)).unflatten(3, self.size)
        with self._mode():
            maps = self.model.head.modulate(self.features.dense, latents)
            if self.features.skips:
                finished = self.model.backbone.finish(maps.flatten(0, 1), self.features, self.size)
                maps = finished.unflatten(0, latents.shape[:2])
            return self.model.head.classify(maps)

    def probs(self, noise: Noise) -> Tensor:
        return at_least_float32(self.logits(noise.codes)).softmax(2)

    def render(self, noise: Noise) -> MaskDistribution:
        if not self.tiled:
            return super().render(noise)
        return drawn(*self._folded(noise.codes), noise, self.size)

    def marginal(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Class probabilities ``[B, C, H, W]`` from ``n`` samples, differentiable."""
        if not self.tiled:
            return super().marginal(n, generator)
        noise = self.noise(n, generator)
        return mean_softmax(*self._folded(noise.codes), noise.mass).unflatten(2, self.size)

    def of_part(self, dense: Tensor) -> MoSEPredictive:
        """The same for a part of the image."""
        size = dense.shape[2], dense.shape[3]
        return replace(self, features=self.features._replace(dense=dense), size=size)

    def _folded(self, latents: Tensor) -> tuple[Tensor, Folded]:
        with self._mode():
            rows = self._rows if self.size[0] * self.size[1] <= BAND else as_rows(self.features.dense)
            return rows, self.model.head.fold(latents)

    @cached_property
    def _rows(self) -> Tensor:
        """The features as the head reads them, kept for all draws where they are small."""
        return as_rows(self.features.dense)


def _levels(config: MoSEConfig) -> dict[str, Any]:
    """Where gate and noise meet a U-Net, if not at its ends; other networks have no choice."""
    levels = {name: getattr(config, name) for name in _LEVELS}
    return {name: level for name, level in levels.items() if level != _LEVELS[name]}


def _backbone(backbone: str | Backbone, in_channels: int, config: MoSEConfig) -> Backbone:
    if isinstance(backbone, Backbone):
        return backbone
    if isinstance(backbone, nn.Module):
        name = type(backbone).__name__
        raise ValueError(f"wrap {name} as ambiseg.nn.Adapter({name.lower()}, dense=…) to use it as a backbone")
    return validate(BackboneConfig, {"name": backbone}, prefix="backbone.").build(in_channels, **_levels(config))
