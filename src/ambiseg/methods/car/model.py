"""Calibrated adversarial refinement: a network that knows each pixel, and one that draws masks which agree with it."""

from __future__ import annotations

import math
import weakref
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.processes import mean_of_processes
from ambiseg.masks import Masks, at_least_float32
from ambiseg.methods.base import Method, ParameterGroup, Predictive, evaluation, windowed
from ambiseg.methods.car.config import CARConfig
from ambiseg.methods.car.losses import calibration_ce, calibration_kl
from ambiseg.methods.car.networks import FiveConvolutions, Refinement, SegNet, Trunk
from ambiseg.methods.car.predictive import CARPredictive
from ambiseg.methods.targets import Target, one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.discriminator import Discriminator, accuracy, fooled, grid_of, scored_with_r1, told_apart
from ambiseg.nn.features import Backbone, Features, crop, pad_to_multiple
from ambiseg.nn.windows import Step, Windows, stitched
from ambiseg.overlap import full_precision

_BETAS = (0.5, 0.99)
_SLOWER = 0.05  # the discriminator's learning rate, 1e-5 where the others have 2e-4
_MILESTONES = {"cal": (250, 500), "gen": (100, 300, 500), "disc": (30, 300, 500)}  # epochs, of the authors' runs


class CAR(Method):
    """A calibration network F for the probabilities of each pixel, and a refinement network G that draws masks.

        q = softmax(F(x)),     ŷ_m = softmax(G(x, q, z_m)),     z_m ~ N(0, I)
        cal:   CE(y, q)
        gen:   10 BCE(D(x, ŷ_m), 1) + 5 KL(mean of ŷ_1 … ŷ_M ‖ q)      F stands still
        disc:  BCE(D(x, y), 1) + BCE(D(x, ŷ_1), 0) + 10 R1

    F is fitted as the deterministic U-Net is. G has to convince the discriminator D that its masks are an annotator's,
    and their mean has to be what F says.

    >>> model = CAR.build(CARConfig(width=4, disc_width=4), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(5)
    MaskDistribution(1 image of 32×32, 5 masks, equal weights, soft marginal)
    >>> list(model.phases(0)), list(model.phases(50))
    (['cal', 'gen', 'disc'], ['cal', 'gen'])
    """

    Config: ClassVar = CARConfig
    idea = (
        "a network predicts the class probabilities of each pixel, and a second one, trained against a discriminator, "
        "draws masks whose mean they are"
    )
    reference = "Kassapis et al., Calibrated Adversarial Refinement for Stochastic Semantic Segmentation, ICCV 2021"
    year = 2021
    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.lr": 2e-4, "optimizer.weight_decay": 5e-4}
    terms: ClassVar = {
        "calibration": "KL of the mean of the drawn masks from the calibrated probabilities, per pixel",
        "adversarial": "how far drawn masks are from passing for annotations, the cross-entropy of their scores",
        "accuracy": "how often the discriminator is right",
        "bce": "cross-entropy of the discriminator, of annotations and drawn masks",
        "r1": "squared gradient of the discriminator at annotations, its penalty",
    }
    accuracy: Tensor

    def __init__(self, config: CARConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        if config.guides >= in_channels:
            found = f"{config.guides} of {in_channels}"
            raise ConfigError(f"model.guides: expected fewer than the channels of the images, found {found}")
        self.config, self.classes = config, classes
        self.repeats = config.published and in_channels == 1  # the authors' networks read grey images as colour
        channels = 3 if self.repeats else in_channels
        self.seen = channels - config.guides  # of the networks other than F
        self.calibration = _calibration(config, backbone, channels, classes)
        width, disc_width = config.widths(backbone)
        self.refinement = Refinement(self.seen + classes, classes, config.latent, width, config.levels, config.dropout)
        grid = (1, 1) if config.judged is None else grid_of(config.judged)
        self.discriminator = Discriminator(self.seen + classes, disc_width, grid)
        self.register_buffer("accuracy", torch.zeros(()))  # of the discriminator in the last step
        self._shared: _Shared | None = None

    @property
    def multiple(self) -> int:
        return math.lcm(self.calibration.multiple, self.refinement.multiple)

    # -- prediction ------------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> CARPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution; both networks' encoders run once."""
        return self.refined(images, self.calibrated(images))

    def calibrated(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """q, the class probabilities of each pixel, ``[B, C, H, W]``."""
        return self._logits(images, generator).softmax(1)

    def refined(self, images: Tensor, calibrated: Tensor) -> CARPredictive:
        """The distribution of masks, given the calibrated probabilities."""
        prepared = self.refinement.prepare(self._beside(images, calibrated))
        return CARPredictive(self.refinement, calibrated, prepared, self.training)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """Calibrated probabilities by windows, stitched to one map; then the masks of G, blended over the windows.

        Where that map does not fit into memory both networks run window by window.
        """
        with evaluation(self), torch.no_grad():
            calibrated = stitched(_Calibrated(self), image, windows, step).dense
        if not calibrated.numel():
            return windowed(self, image, windows, step)
        return windowed(cast(Method, _Refining(self)), torch.cat([image, calibrated], 1), windows, step)

    def _logits(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Of F, in float32 at least. It pads as G does, so that windows see what the whole image sees."""
        images = images.expand(-1, 3, -1, -1) if self.repeats else images
        logits = self.calibration(pad_to_multiple(images, self.multiple), generator)
        return at_least_float32(crop(logits, images.shape[2:]))

    def _beside(self, images: Tensor, masks: Tensor) -> Tensor:
        """What G reads: images and probabilities, padded."""
        return pad_to_multiple(self._pairs(images, masks), self.multiple)

    def _pairs(self, images: Tensor, masks: Tensor) -> Tensor:
        """Images without guides and masks ``[B, C, H, W]``, side by side."""
        images = images.expand(-1, 3, -1, -1) if self.repeats else images[:, : self.seen]
        return torch.cat([images.to(masks.dtype), masks], 1)

    # -- training --------------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """F, G and D. D is slower; with ``published`` the rates are halved at the authors' epochs."""
        parts = {"cal": self.calibration, "gen": self.refinement, "disc": self.discriminator}
        return {
            name: ParameterGroup(
                list(part.parameters()),
                betas=_BETAS,
                scale=_SLOWER if name == "disc" else 1.0,
                milestones=_MILESTONES[name] if self.config.published else (),
            )
            for name, part in parts.items()
        }

    def phases(self, step: int) -> tuple[str, ...]:
        """F and G in every step, D at the beginning of a cycle, while it is not too good.

        Its accuracy is a buffer, the mean over all processes, so that all decide alike. On an accelerator it is waited
        for in those steps alone.
        """
        if step % self.config.disc_cycle >= self.config.disc_steps:
            return "cal", "gen"
        weak = self.accuracy.is_meta or float(self.accuracy) < self.config.disc_accuracy
        return ("cal", "gen", "disc") if weak else ("cal", "gen")

    def loss(
        self,
        images: Tensor,
        annotations: Masks,
        *,
        generator: torch.Generator | None = None,
        phase: str = "cal",
    ) -> dict[str, Tensor]:
        """The loss of one of the three networks, with one annotation per image, drawn by its weights.

        Phases of a step share the annotation, F's probabilities and the first mask of G; what an earlier phase did not
        leave is computed.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.
            phase: ``cal``, ``gen`` or ``disc``.
        """
        shared = self._shared
        if phase == "cal" or shared is None or not shared.of(images, annotations, self.training):
            shared = self._shared = _Shared(images, annotations, self.training)
        if shared.target is None:
            shared.target = one_each(annotations, self.classes, generator)
        if phase == "cal":
            return self._calibration_loss(images, shared, shared.target, generator)
        if phase == "gen":
            return self._refinement_loss(images, shared, shared.target, generator)
        return self._discriminator_loss(images, shared, shared.target, generator)

    def _calibration_loss(
        self, images: Tensor, shared: _Shared, target: Target, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        logits = self._logits(images, generator)
        shared.calibrated = logits.detach().softmax(1)
        return {"total": calibration_ce(logits, target)}

    def _refinement_loss(
        self, images: Tensor, shared: _Shared, target: Target, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        calibrated, shared.calibrated = self._taken(images, shared, generator), None
        drawn = self._drawn(images, calibrated, self.config.samples, generator)  # [B, M, C, H, W]
        masks = drawn if target.valid is None else drawn * target.valid[:, None, None]
        shared.fake = masks[:, 0].detach()
        pairs = self._pairs(images.repeat_interleave(drawn.shape[1], 0), masks.flatten(0, 1))
        scores = self.discriminator(pairs)
        adversarial, apart = fooled(scores), calibration_kl(drawn.mean(1), calibrated, target.valid)
        with torch.no_grad():
            real = self.discriminator(self._pairs(images, target.one_hot(self.classes)))
            right = accuracy(real, scores.unflatten(0, drawn.shape[:2])[:, 0])
            self.accuracy.copy_(mean_of_processes(right))  # DDP leaves buffers alone until the epoch ends
        return {
            "total": self.config.adversarial * adversarial + self.config.calibration * apart,
            "calibration": apart.detach(),
            "adversarial": adversarial.detach(),
            "accuracy": self.accuracy.clone(),
        }

    def _discriminator_loss(
        self, images: Tensor, shared: _Shared, target: Target, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        if (fake := shared.fake) is None:
            with torch.no_grad():
                fake = self._drawn(images, self._taken(images, shared, generator), 1, generator)[:, 0]
                fake = fake if target.valid is None else fake * target.valid[:, None]
        self._shared = None
        with full_precision(images):  # R1 is a gradient of a gradient
            real, r1 = scored_with_r1(self.discriminator, self._pairs(images, target.one_hot(self.classes)))
            bce, r1 = told_apart(real, self.discriminator(self._pairs(images, fake))), r1.mean()
        return {"total": bce + self.config.r1 * r1, "bce": bce.detach(), "r1": r1.detach()}

    def _taken(self, images: Tensor, shared: _Shared, generator: torch.Generator | None) -> Tensor:
        """F's probabilities, without gradient, of an earlier phase of the step if there was one."""
        if shared.calibrated is not None:
            return shared.calibrated
        with torch.no_grad():
            return self.calibrated(images, generator)

    def _drawn(self, images: Tensor, calibrated: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Soft masks ``[B, n, C, H, W]``, in the module's mode."""
        prepared = self.refinement.prepare(self._beside(images, calibrated), generator)
        codes = torch.randn(len(images), n, self.config.latent, generator=generator, device=images.device)
        logits = self.refinement.decode(prepared, codes, generator)
        return at_least_float32(logits[..., : images.shape[2], : images.shape[3]]).softmax(2)


class _Shared:
    """What one phase of a training step leaves for the next: values, without their graphs, of one batch alone."""

    def __init__(self, images: Tensor, annotations: Masks, training: bool) -> None:
        self.batch = weakref.ref(images), weakref.ref(annotations)
        self.training = training
        self.target: Target | None = None
        self.calibrated: Tensor | None = None
        self.fake: Tensor | None = None

    def of(self, images: Tensor, annotations: Masks, training: bool) -> bool:
        """Whether it is of this very batch."""
        return self.batch[0]() is images and self.batch[1]() is annotations and self.training == training

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model starts without


class _Calibrated(Backbone):
    """The calibrated probabilities as features, so that they can be stitched."""

    def __init__(self, model: CAR) -> None:
        super().__init__()
        self.model, self.multiple = model, model.multiple
        self.dense_channels, self.gate_channels = model.classes, 1

    def forward(self, images: Tensor) -> Features:
        calibrated = self.model.calibrated(images)
        return Features(calibrated, calibrated[:, :1])


class _Refining:
    """The refinement network as :func:`~ambiseg.methods.base.windowed` takes a method: probabilities are channels."""

    def __init__(self, model: CAR) -> None:
        self.model, self.multiple, self.classes = model, model.multiple, model.classes

    def predict(self, images: Tensor) -> CARPredictive:
        with evaluation(self.model), torch.no_grad():
            return self.model.refined(images[:, : -self.classes], images[:, -self.classes :])


def _calibration(config: CARConfig, backbone: BackboneConfig, channels: int, classes: int) -> Any:
    """F: the backbone with a pixel network, or one of the authors'."""
    if not config.published:
        return Trunk(backbone, channels, classes)
    return SegNet(channels, classes) if config.network == "lidc" else FiveConvolutions(channels, classes)
