"""Three methods that are not in the package, as somebody would drop them in: one file, one line in ``METHODS``.

As a script this file is the ``ambiseg`` command with these methods in it: ``python -m tests.drop_ins train …``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ambiseg.masks import as_masks
from ambiseg.methods import METHODS, Method, MethodConfig, Noise, ParameterGroup, Predictive, Stratified
from ambiseg.methods.schedules import Scheduled, final
from ambiseg.overlap import ce_cost

# -- samples only ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LatentPredictive(Predictive):
    dense: Tensor
    head: nn.Module
    latent: int
    classes: int
    size: tuple[int, int]

    def noise(self, n, generator=None):
        shape = len(self.dense), n, self.latent
        return Noise(torch.randn(shape, generator=generator, device=self.dense.device))

    def probs(self, noise):
        B, N, L = noise.codes.shape
        codes = noise.codes[..., None, None].expand(B, N, L, *self.size)
        dense = self.dense[:, None].expand(B, N, *self.dense.shape[1:])
        return self.head(torch.cat([dense, codes], 2).flatten(0, 1)).float().softmax(1).unflatten(0, (B, N))


class Latent(Method):
    """A latent code beside the features, fitted to one reader at a time: samples, and nothing else."""

    class Config(MethodConfig):
        """A latent code beside the features."""

        method: Literal["latent"] = "latent"
        latent: int = Field(default=2, ge=1, description="dimension of the code")

    annotations = ("random", "once")

    def __init__(self, config, backbone, in_channels, classes):
        super().__init__()
        self.classes, self.config, self.backbone = classes, config, backbone.build(in_channels)
        self.head = nn.Conv2d(self.backbone.dense_channels + config.latent, classes, 1)

    def forward(self, images):
        dense = self.backbone(images).dense
        return LatentPredictive(dense, self.head, self.config.latent, self.classes, (images.shape[2], images.shape[3]))

    def loss(self, images, annotations, *, generator=None):
        predictive = self(images)
        cost = ce_cost(predictive.probs(predictive.noise(1, generator)), annotations, probs=True)
        return {"total": (cost * as_masks(annotations).mass[:, None]).sum((1, 2)).mean()}


# -- strata ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadsPredictive(Stratified):
    logits: Tensor  # [B, K, C, H, W]
    weights: Tensor
    classes: int
    size: tuple[int, int]

    def noise_of(self, strata, generator=None):
        return Noise(strata[..., None], strata=strata)

    def centre_noise(self):
        strata = torch.arange(self.weights.shape[1], device=self.weights.device).expand(len(self.weights), -1)
        return Noise(strata[..., None], self.weights, strata)

    def probs(self, noise):
        image = torch.arange(len(self.logits), device=self.logits.device)[:, None]
        return self.logits[image, noise.codes[..., 0]].float().softmax(2)


class TwoHeads(Method):
    """Two heads with probabilities of their own: strata without noise. One setting of it moves."""

    class Config(MethodConfig):
        """Two heads with probabilities of their own."""

        method: Literal["two-heads"] = "two-heads"
        width: int = Field(default=4, ge=1, description="features of the heads")
        sharpness: Scheduled = Field(default=1.0, description="of the weights")

    stratum = "head"

    def __init__(self, config, backbone, in_channels, classes):
        super().__init__()
        self.classes, self.config, self.backbone = classes, config, backbone.build(in_channels)
        width, dense = config.width, self.backbone.dense_channels
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Conv2d(dense, width, 1), nn.ReLU(), nn.Conv2d(width, classes, 1)) for _ in range(2)
        )
        self.gate = nn.Linear(self.backbone.gate_channels, 2)

    def forward(self, images):
        features = self.backbone(images)
        logits = torch.stack([head(features.dense) for head in self.heads], 1)
        weights = self.gate(features.gate.mean((2, 3))).softmax(1)
        return HeadsPredictive(logits, weights, self.classes, (images.shape[2], images.shape[3]))

    def loss(self, images, annotations, *, generator=None, sharpness=None):
        predictive, sharpness = self(images), final(self.config.sharpness) if sharpness is None else sharpness
        cost = (ce_cost(predictive.logits, annotations) * as_masks(annotations).mass[:, None]).sum(2)
        mixture = -torch.logsumexp(sharpness * (predictive.weights.log() - cost), 1).mean() / sharpness
        return {"total": mixture, "fit": cost.mean().detach()}


# -- two optimisers ----------------------------------------------------------------------------------------------------


class Adversarial(Latent):
    """The first method with a discriminator that is trained against it, in two steps of three."""

    class Config(Latent.Config):
        """A latent code, and a discriminator trained against it."""

        method: Literal["adversarial"] = "adversarial"  # type: ignore[assignment]

    def __init__(self, config, backbone, in_channels, classes):
        super().__init__(config, backbone, in_channels, classes)
        self.judge = nn.Conv2d(in_channels + classes, 1, 3, padding=1)
        self.register_buffer("judged", torch.zeros(()))

    def parameter_groups(self):
        own = [*self.backbone.parameters(), *self.head.parameters()]
        judge = ParameterGroup(list(self.judge.parameters()), lr=1e-4, weight_decay=0.0, betas=(0.5, 0.99))
        return {"generator": ParameterGroup(own), "judge": judge}

    def phases(self, step):
        return ("generator", "judge") if step % 3 else ("generator",)

    def loss(self, images, annotations, *, generator=None, phase="generator"):
        predictive = self(images)
        probs = predictive.probs(predictive.noise(1, generator))
        drawn = as_masks(annotations).draw(1, generator).class_ids(self.classes)[:, 0]
        real = nn.functional.one_hot(drawn, self.classes).movedim(-1, 1).to(probs)
        if phase == "judge":
            self.judged += 1
            fake, true = (self._score(images, x) for x in (probs[:, 0].detach(), real))
            return {"total": nn.functional.softplus(fake).mean() + nn.functional.softplus(-true).mean()}
        fooled = nn.functional.softplus(-self._score(images, probs[:, 0])).mean()
        fit = ce_cost(probs, annotations, probs=True).mean()
        return {"total": fit + 0.1 * fooled, "fit": fit.detach(), "fooled": fooled.detach()}

    def _score(self, images, masks):
        return self.judge(torch.cat([images, masks], 1)).mean((1, 2, 3))


DROP_INS: dict[str, type[Method]] = {"latent": Latent, "two-heads": TwoHeads, "adversarial": Adversarial}

if __name__ == "__main__":
    from ambiseg.cli import main

    METHODS.update(DROP_INS)
    sys.exit(main())
