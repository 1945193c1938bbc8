"""Settings of MoSE."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ambiseg.methods.base import MethodConfig
from ambiseg.methods.facts import Choice, Facts
from ambiseg.methods.schedules import Schedule, Scheduled, values_of
from ambiseg.nn.gating import Kind
from ambiseg.settings import SAMPLES, SettingError, shown
from ambiseg.transport import Solver

_FEWEST, _MOST = 2, 40  # experts that are planned: two annotators may differ in ways that none of them shows alone
_IMAGES = 10  # of training, per expert that is planned
_DRAWS = 1 << 13  # samples of all experts together in a training step, at most
_LARGEST_WEIGHT = 1e6  # of a class
_BY_IOU = 4  # classes up to which masks are compared by overlap
_RANGES = dict.fromkeys(("capacity", "group_threshold", "annealing", "energy_share"), (0.0, 1.0)) | {
    "usage_prior": (0.0, 100.0),
    "beta": (0.0, 1e6),
}


class MoSEConfig(MethodConfig):
    """MoSE, the mixture of stochastic experts."""

    method: Literal["mose"] = "mose"
    experts: int = Field(default=4, ge=1, le=SAMPLES, description="K, the number of experts")
    samples: int | Schedule = Field(
        default=4, description=f"S, samples of each expert in training; of all experts at most {_DRAWS:,}"
    )
    latent: int = Field(default=1, ge=1, le=1024, description="L, the dimension of an expert's Gaussian")
    cost: Literal["iou", "ce"] = Field(default="iou", description="of a pair of masks: iou or ce")
    class_weights: list[float] | None = Field(
        default=None,
        max_length=1 << 16,
        description="of pixels by their class, one per class, for cost ce; null: equal",
    )
    beta: Scheduled = Field(default=1.0, description="β, the weight of the KL term")
    capacity: Scheduled = Field(
        default=1.0,
        description="γ, how much annotation mass one sample may explain; 1: no limit, small values spread experts",
    )
    group_threshold: Scheduled = Field(
        default=1.0, description="G₀, experts whose mean masks overlap at least this much share one KL target; 1 is off"
    )
    annealing: Scheduled = Field(
        default=1.0, description="how far annotation weights have gone from uniform (0) to their own values (1)"
    )
    usage_prior: Scheduled = Field(
        default=0.0,
        description="λ, a prior on few experts: an annotation goes to the sample of least cost − λ log of its expert's "
        "mean weight, and the energy score is charged λ times the entropy of the mean weights; 0 is off",
    )
    solver: Solver = Field(default="greedy", description="of the coupling: greedy as in the paper, exact, or released")
    kl: Literal["paper", "released"] = Field(
        default="paper", description="scaling of the KL term: as in the paper, or as released by its authors (β / N)"
    )
    stochastic: bool = Field(default=True, description="experts are Gaussians; false: each is a single point")
    diagonal: bool = Field(
        default=False, description="one standard deviation per latent dimension instead of one per expert"
    )
    expert_weights: Literal["learned", "uniform"] | list[float] = Field(
        default="learned", description="learned by the gate, uniform, or one fixed probability per expert"
    )
    gate_level: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="where the gate of a U-Net reads, as a fraction of the way down; 1 is the bottom",
    )
    gate_scales: Annotated[int, Field(ge=1, le=10)] | Literal["all"] = Field(
        default=1, description="how many levels of a U-Net the gate reads, from gate_level towards the image, or all"
    )
    gate_pooling: Kind = Field(
        default="average",
        description="of what the gate reads: average as in the paper, attention, or both with the maximum",
    )
    inject_level: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="where noise enters a U-Net, as a fraction of the way up; 1 is the last features",
    )
    head: Literal["paper", "released"] = Field(
        default="paper",
        description="paper: three 1×1 convolutions; released: as in the authors' checkpoints, with batch norm",
    )
    hidden: int = Field(default=32, ge=1, le=4096, description="features of the head")
    scale_bias: float = Field(default=1.0, ge=-1e6, le=1e6, description="where the scale of the noise starts")
    objective: Literal["transport", "energy", "all-pairs"] = Field(
        default="transport",
        description="transport as in the paper; energy: the energy score, which is GED itself; or all-pairs: the mean "
        "cost of all pairs (the paper's ablation)",
    )
    energy_share: Scheduled = Field(
        default=1.0, description="of the energy score in objective energy; the rest is transport"
    )
    form: Literal["weighted", "gumbel"] = Field(
        default="weighted",
        description="weighted: samples of every expert; gumbel: straight-through draws from the mixture",
    )
    temperature: float = Field(default=1.0, gt=0, le=1e6, description="of the Gumbel-softmax")

    @classmethod
    def planned(cls, facts: Facts, epochs: int) -> dict[str, Choice]:
        """As many experts as an image is read in ways, which are spread by half of the training at γ = 1/2.

        The gate learns their weights from the images, so that few images allow few experts.
        """
        most = max(_FEWEST, min(facts.images // _IMAGES, _MOST))
        experts = min(max(facts.modes, _FEWEST), most)
        samples = 4 if experts <= 4 else 2 if experts <= 8 else 1
        read = f"an image is read in up to {facts.modes} way{'s' * (facts.modes > 1)}"
        spread = {"kind": "linear", "values": [0.5, 1.0], "epochs": 1, "warm_up": epochs // 2}
        read += f", by {facts.readers} annotator{'s' * (facts.readers > 1)}"
        if experts < facts.modes < _MOST:
            read += f"; {facts.images} images tell the weights of {experts}"
        plan = {
            "experts": Choice(experts, read),
            "samples": Choice(samples, "of each expert, per image and step"),
            "capacity": Choice(spread, "1/2 spreads the experts, then 1 frees their weights"),
        }
        if len(facts.classes) <= _BY_IOU:
            plan["cost"] = Choice("iou", f"{len(facts.classes)} classes: overlap, whatever their sizes")
        else:
            plan["cost"] = Choice("ce", f"{len(facts.classes)} classes, of which many are absent from an image")
            usual = sorted(facts.shares)[len(facts.shares) // 2] or 1.0
            weights = [round(min(max((usual / share) ** 0.5, 0.5), 8.0), 2) if share else 1.0 for share in facts.shares]
            plan["class_weights"] = Choice(weights, "√(share of the middle class / own share), from 1/2 to 8")
        return plan

    def _check_weights(self, weights: list[float]) -> None:
        if len(weights) != self.experts or min(weights, default=0) < 0 or abs(sum(weights) - 1) > 1e-4:
            expected = f"{self.experts} weights, one per expert, that are not negative and sum to 1"
            raise SettingError("expert_weights", f"expected {expected}, found {shown(weights)}")

    @model_validator(mode="after")
    def _fit_together(self) -> MoSEConfig:
        for name, (low, high) in _RANGES.items():
            values = values_of(getattr(self, name))
            if not all(low <= value <= high for value in values):
                raise SettingError(name, f"expected values from {low:g} to {high:g}, found {shown(values)}")
        counts = values_of(self.samples)
        if min(counts) < 1:
            raise SettingError("samples", f"expected at least 1, found {shown(min(counts))}")
        if self.experts * max(counts) > _DRAWS:
            found = f"{shown(max(counts))} of {self.experts} experts"
            raise SettingError("samples", f"expected at most {_DRAWS:,} of all experts together, found {found}")
        fewest = self.experts * round(min(counts))
        if (smallest := min(values_of(self.capacity))) * fewest < 1 - 1e-6:
            found = f"{smallest:g} with {fewest} samples"
            raise SettingError("capacity", f"expected at least 1/{fewest}, so that all annotations fit, found {found}")
        if self.class_weights is not None and (self.cost != "ce" or not min(self.class_weights, default=0) > 0):
            found = f"{shown(self.class_weights)} with cost {self.cost}"
            raise SettingError("class_weights", f"expected positive numbers and cost ce, found {found}")
        if max(self.class_weights or [1.0]) > _LARGEST_WEIGHT:
            found = shown(max(self.class_weights or ()))
            raise SettingError("class_weights", f"expected numbers of at most {_LARGEST_WEIGHT:g}, found {found}")
        if self.objective == "energy":
            if self.cost != "iou" or self.form != "weighted":
                found = f"cost {self.cost} and form {self.form}"
                raise SettingError("objective", f"expected cost iou and form weighted with energy, found {found}")
            if self.stochastic and min(counts) < 2:
                needs = "at least 2 with objective energy, which compares samples of one expert"
                raise SettingError("samples", f"expected {needs}, found {shown(min(counts))}")
        if max(values_of(self.usage_prior)) > 0:
            matched = self.objective != "all-pairs" and self.form == "weighted"
            if not matched or self.expert_weights != "learned":
                needs = "0 unless expert_weights are learned, the objective transport or energy, and the form weighted"
                raise SettingError("usage_prior", f"expected {needs}, found {shown(values_of(self.usage_prior))}")
        if isinstance(self.expert_weights, list):
            self._check_weights(self.expert_weights)
        return self
