"""Conditional categorical diffusion (Zbinden et al., ICCV 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ambiseg._util.bands import bands
from ambiseg._util.errors import ConfigError
from ambiseg.masks import Masks, at_least_float32
from ambiseg.methods.base import Method, Noise, Predictive, PublishedConfig
from ambiseg.methods.predictive import Canvas, Chunked, InParts, Numbers, mean_of, placed_noise
from ambiseg.methods.targets import one_each
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.diffusion import CategoricalDiffusion, cosine, drawn, visited
from ambiseg.nn.diffusion_unet import EACH, DiffusionUNet
from ambiseg.nn.features import repeated
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.places import new_seeds
from ambiseg.nn.windows import Block, Step, Tile, Windows, blended, tiles
from ambiseg.overlap import full_precision
from ambiseg.settings import SettingError

PUBLISHED = (1, 1, 2, 3, 4)
"""Features of each level of the published network, in multiples of 32: what the released settings make."""
WIDE = (1, 2, 2, 4, 5)
"""Those that the 9 million weights of the paper need."""

_WIDTH = 32
_AT_ONCE = {"cpu": 1 << 16}  # pixels of all draws that the network runs for at a time, by device
_ELSEWHERE = 1 << 20
_START = 0  # key of the noise at t = T; that of a step to s < t is t

Guess = Callable[[Tensor, int], Iterator[Block]]
"""Labels ``[B, N, H, W]`` at t, and t -> what x_0 is taken for, blocks ``[B, N, C, h, w]`` that cover the image."""


class CCDMConfig(PublishedConfig):
    """Settings of conditional categorical diffusion."""

    method: Literal["ccdm"] = "ccdm"
    steps: int = Field(
        default=25, ge=1, le=1000, description="passes of the network per mask, at most as many as timesteps"
    )
    timesteps: int = Field(default=250, ge=1, le=1000, description="T, steps in which a mask becomes noise in training")
    multipliers: list[Annotated[int, Field(ge=1, le=16)]] = Field(
        default=list(PUBLISHED),
        min_length=1,
        max_length=8,
        description="with published: features of each level, in multiples of 32; [1, 2, 2, 4, 5] is the network of 9 "
        "million weights",
    )

    @model_validator(mode="after")
    def _as_many_as_there_are(self) -> CCDMConfig:
        if self.steps > self.timesteps:
            raise SettingError("steps", f"expected at most timesteps={self.timesteps}, found {self.steps}")
        return self

    def levels(self, backbone: BackboneConfig) -> tuple[int, ...]:
        """Features of each level of the network."""
        if self.published:
            return tuple(_WIDTH * times for times in self.multipliers)
        if not backbone.levels:
            needs = "unet or unet-light, whose levels the network of the diffusion takes over"
            raise ConfigError(f"backbone.name: expected {needs}, found {backbone.name}")
        return backbone.levels


class CCDM(Method):
    """Masks that start as noise and are cleaned step by step, by a network that sees the image beside them.

        q(x_t | x_0) = Cat(ᾱ_t x_0 + (1 − ᾱ_t) / C),     p̂_0 = softmax(U-Net(x_t, image, t)),
        p(x_s | x_t) = Σ_c q(x_s | x_t, x_0 = c) p̂_0(c),     s < t,     x_T uniform,     mask = argmax p̂_0 at the last t

    The network runs as a whole in every step of every mask: the image enters at its first layer, so that nothing of it
    can be kept from step to step.

    Args:
        config: its settings.
        backbone: of which it takes the features of each level, and the scale.
        in_channels: of the images.
        classes: C, background included.

    >>> model = CCDM(CCDMConfig(steps=4), BackboneConfig(channels=[4, 8]), in_channels=1, classes=2)
    >>> model.predict(torch.rand(1, 1, 32, 32)).sample(8)
    MaskDistribution(1 image of 32×32, 8 masks, equal weights, soft marginal)
    """

    Config: ClassVar = CCDMConfig
    idea = "a network that cleans label maps of noise, step by step, beside the image; every mask starts at other noise"
    reference = (
        "Zbinden et al., Stochastic Segmentation with Conditional Categorical Diffusion Models, ICCV 2023; "
        "the network of Dhariwal and Nichol, Diffusion Models Beat GANs on Image Synthesis, NeurIPS 2021"
    )
    year = 2023
    annotations = ("random", "once", "all")
    defaults: ClassVar = {"optimizer.average": 0.9999}
    terms: ClassVar = {"pixel": "how far a step back is from the one that knows the annotation, per pixel"}

    def __init__(self, config: CCDMConfig, backbone: BackboneConfig, in_channels: int, classes: int) -> None:
        super().__init__()
        self.config, self.classes = config, classes
        scale, each = (1, 1) if config.published else (backbone.scale, EACH)
        self.network = DiffusionUNet(classes + in_channels, classes, config.levels(backbone), scale, each)
        self.diffusion = CategoricalDiffusion(classes, cosine(config.timesteps))
        self.visits = visited(config.timesteps, config.steps)

    @property
    def multiple(self) -> int:
        return self.network.multiple

    def forward(self, images: Tensor) -> CCDMPredictive:
        """Images ``[B, in_channels, H, W]`` -> their predictive distribution; nothing is computed yet."""
        return CCDMPredictive(self, images)

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> Predictive:
        """One diffusion of the whole image: in each step p̂_0 of all windows is blended, before classes are drawn."""
        return _Joint(self, image, windows, step)

    def guess(self, images: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        """p̂_0, what the mask is taken for, ``[B, C, H, W]`` in float32 at least.

        Args:
            images: ``[B, in_channels, H, W]``.
            xt: labels ``[B, H, W]`` at t.
            t: of each image, ``[B]``.
        """
        maps = torch.cat([self.diffusion.one_hot(xt).to(images.dtype), images], 1)
        return at_least_float32(self.network(maps, t)).softmax(1)

    def loss(
        self, images: Tensor, annotations: Masks, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """For one annotation x_0 per image, drawn by its weights, a step t ~ U{1 … T} and x_t ~ q(x_t | x_0):

            mean over images of  Σ_pixels KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t))

        Void pixels are noise at every t, and count nothing.

        Args:
            images: ``[B, in_channels, H, W]``.
            annotations: M masks per image with their weights.
            generator: of all random draws.

        Returns:
            ``total`` and ``pixel``, the mean over pixels, scalars.
        """
        target = one_each(annotations, self.classes, generator)
        (B, _, H, W), device = images.shape, images.device
        t = torch.randint(1, self.config.timesteps + 1, (B,), generator=generator, device=device)
        uniform = torch.rand(B, 1, H, W, generator=generator, device=device)
        probs = self.diffusion.forward_probs(target.labels, t)
        if target.valid is not None:
            probs = torch.where(target.valid[:, None], probs, 1 / self.classes)
        xt = drawn(probs, uniform)
        p0 = self.guess(images, xt, t)
        with full_precision(p0):
            cost = self.diffusion.divergence(target.labels, xt, p0, t)
        pixels = cost.numel()
        if target.valid is not None:
            cost, pixels = cost * target.valid, target.valid.sum().clamp_min(1)
        return {"total": target.mean(cost.sum((1, 2))), "pixel": cost.detach().sum() / pixels}

    def chain(self, noise: Noise, size: tuple[int, int], guess: Guess) -> Iterator[Block]:
        """From noise to masks:  x_T uniform, then x_s ~ p(x_s | x_t) at all visited t, by the noise of places.

        Args:
            noise: of B · N draws.
            size: (H, W) of the image.
            guess: the network.

        Returns:
            p̂_0 of the last step, blocks ``[B, N, C, h, w]``, whose most likely classes are the masks.
        """
        dtype = label_dtype(self.classes)
        x = (noise.uniform(_START, 1, size)[:, :, 0] * self.classes).floor().to(dtype)
        for t, s in pairwise([*self.visits, 0]):
            if s == 0:
                yield from guess(x, t)
                return
            jump, new = self.diffusion.jump(t, s), torch.empty_like(x)
            for block in guess(x, t):
                p0, here = block.maps.flatten(0, 1), noise.at(block.y, block.x)
                probs = self.diffusion.reverse(x[block.place].flatten(0, 1), p0, jump)
                uniform = here.uniform(t, 1, (p0.shape[2], p0.shape[3])).flatten(0, 1)
                new[block.place] = drawn(probs, uniform).to(dtype).unflatten(0, x.shape[:2])
            x = new


@dataclass(frozen=True, eq=False)
class CCDMPredictive(Chunked):
    """What a diffusion predicts for a batch of images: all that is known before a draw is the images themselves.

    Attributes:
        images: ``[B, in_channels, H, W]``.
    """

    model: CCDM
    images: Tensor

    @property
    def classes(self) -> int:  # type: ignore[override]
        return self.model.classes

    @property
    def size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.images.shape[2], self.images.shape[3]

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """A seed for each draw, which decides the class of every pixel in every step."""
        return _noise(self.images, n, generator)

    @property
    def at_once(self) -> int:
        return _at_once(self.images[:, 0].numel(), self.images.device)

    seeded = True

    def noise_of_numbers(self, numbers: Numbers) -> Noise:
        return placed_noise(numbers)

    @torch.no_grad()
    def soft(self, noise: Noise) -> Tensor:
        """p̂_0 of the last step. It has no gradient: classes were drawn on the way."""
        (block,) = self.model.chain(noise, self.size, self._guess)
        return block.maps

    def _guess(self, x: Tensor, t: int) -> Iterator[Block]:
        yield Block(0, 0, _guessed(self.model, self.images, x, t))


class _Joint(InParts):
    """One large image. A step goes over all windows, and what they take x_0 for is blended:

        p̂_0(pixel) = Σ_i w_i(pixel) p̂_0,i(pixel),     Σ_i w_i = 1

    Then the classes of the whole image are drawn, so that windows go on from the same x_s where they overlap.
    """

    def __init__(self, model: CCDM, image: Tensor, windows: Windows, step: Step | None) -> None:
        self.model, self.image, self.windows, self.step = model, image, windows, step
        self.classes, self.size = model.classes, (image.shape[2], image.shape[3])

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return _noise(self.image, n, generator)

    @torch.no_grad()
    def probs(self, noise: Noise) -> Tensor:
        canvas = torch.empty(1, noise.count, self.classes, *self.size, device=self.image.device)
        for _, some, block in self._blocks([noise]):
            canvas[:, some][block.place] = block.maps
        return canvas

    def fill(self, canvas: Canvas, noises: Sequence[Noise]) -> None:
        canvas.marginal.zero_()
        for which, some, block in self._blocks(noises):
            canvas.labels[which][:, some][block.place] = block.maps.argmax(2).to(canvas.labels[which].dtype)
            if which == 0:
                canvas.marginal[block.place] += mean_of(block.maps, noises[0].mass[:, some])

    def _blocks(self, noises: Sequence[Noise]) -> Iterator[tuple[int, slice, Block]]:
        """Number of the noise, some of its draws, and soft masks of a part of the image."""
        window = len(self.windows[0][0].weights) * len(self.windows[1][0].weights)
        at_once = _at_once(window, self.image.device)
        chunks = [(which, some) for which, noise in enumerate(noises) for some in bands(noise.count, at_once)]
        passes, done = len(chunks) * self.model.config.steps, 0  # of the network over all windows

        def guess(x: Tensor, t: int) -> Iterator[Block]:
            def parts() -> Iterator[tuple[Tile, Tensor]]:
                nonlocal done
                for tile in tiles(self.image, self.windows, self.model.multiple):
                    p0 = self._guess(tile, x, t)
                    done += 1
                    if self.step is not None and done % passes == 0:  # as often as there are windows
                        self.step()
                    yield tile, p0

            return blended(parts(), self.windows, self.size)

        for which, some in chunks:
            for block in self.model.chain(noises[which][some], self.size, guess):
                yield which, some, block

    def _guess(self, tile: Tile, x: Tensor, t: int) -> Tensor:
        """p̂_0 of a window, which may stand out over the border of the image."""
        rows, columns = tile.weights.shape
        here = x[..., tile.y : tile.y + rows, tile.x : tile.x + columns]
        image = tile.image[..., :rows, :columns]
        return _guessed(self.model, image, here, t)


def _guessed(model: CCDM, images: Tensor, x: Tensor, t: int) -> Tensor:
    """p̂_0 ``[B, N, C, H, W]`` of labels ``[B, N, H, W]`` at t."""
    N = x.shape[1]
    steps = torch.full((images.shape[0] * N,), t, device=images.device)
    return model.guess(repeated(images, N), x.flatten(0, 1), steps).unflatten(0, (-1, N))


def _noise(images: Tensor, n: int, generator: torch.Generator | None) -> Noise:
    codes = torch.zeros(len(images), n, 1, device=images.device)
    return Noise(codes, seeds=new_seeds(len(images), n, generator, images.device))


def _at_once(pixels: int, device: torch.device) -> int:
    """How many draws the network takes together, of images of so many pixels."""
    return max(1, _AT_ONCE.get(device.type, _ELSEWHERE) // pixels)
