"""Random geometry and intensity for whole batches: the same for an image and all its masks."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg._util.text import shape_text
from ambiseg.settings import FORBID, SettingError

_SCALE = 10.0  # times larger or smaller, at most


@dataclass(frozen=True, config=FORBID)
class Augment:
    """Random operations on training images. All are off by default, except flips.

    Geometry is applied to the image (bilinear) and to its map of regions (nearest neighbour) at the same coordinates,
    so annotations that agree in a pixel still do, and no class id appears that was not there.

    >>> images, regions = torch.arange(4.0).view(1, 1, 2, 2), torch.arange(4).view(1, 2, 2)
    >>> g = torch.Generator().manual_seed(0)
    >>> turned, same = Augment(quarter_turns=True)(images, regions, g)
    >>> torch.equal(turned[:, 0].long(), same)
    True
    """

    flip: Literal["none", "horizontal", "vertical", "both"] = Field(
        default="both", description="mirror along these axes, each with probability 1/2"
    )
    quarter_turns: bool = Field(
        default=False, description="rotate by 0, 90, 180 or 270 degrees, equally likely; the window must be square"
    )
    rotate: float = Field(
        default=0.0, ge=0, le=360, description="rotate by up to this many degrees in either direction, uniformly"
    )
    scale: tuple[float, float] = Field(
        default=(1.0, 1.0),
        description="magnify by a factor in this range, log-uniformly; 2 shows half as much at twice the size (at "
        "least 0.1 and at most 10)",
    )
    brightness: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="add up to this much in either direction, in units of the network's input",
    )
    contrast: float = Field(default=0.0, ge=0, le=10, description="multiply by exp(±contrast) about 0")
    noise: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="add Gaussian noise whose standard deviation is drawn from [0, noise], one per image",
    )

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high:
            raise SettingError("scale", f"expected 0 < smallest ≤ largest, found {low:g} and {high:g}")
        if low < 1 / _SCALE or high > _SCALE:
            raise SettingError("scale", f"expected from {1 / _SCALE:g} to {_SCALE:g}, found {low:g} and {high:g}")

    @property
    def warps(self) -> bool:
        """Whether pixels leave their grid, so that images are interpolated."""
        return self.rotate > 0 or self.scale != (1.0, 1.0)

    def source(self, size: tuple[int, int]) -> tuple[int, int]:
        """The window of the source that a result of ``size`` may need, corners of turned images included."""
        if not self.warps:
            return size
        angle = math.radians(min(self.rotate, 90.0))
        zoom = 1 / self.scale[0]
        height, width = (zoom * x for x in size)

        def extent(along: float, across: float) -> int:
            # along·cos a + across·sin a over [0, angle]: its peak is at atan(across / along) or at the end.
            # Bilinear interpolation reads one pixel further on either side.
            peak = min(angle, math.atan2(across, along))
            return math.ceil(along * math.cos(peak) + across * math.sin(peak) - 1e-9) + 2

        return extent(height, width), extent(width, height)

    def __call__(
        self,
        images: Tensor,
        regions: Tensor,
        generator: torch.Generator | None = None,
        size: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Images ``[B, C, H, W]`` (prepared, float) and regions ``[B, H, W]`` (integers) -> both at ``size``.

        The window in the middle is what is kept: give ``source(size)`` pixels so that nothing comes from outside.
        """
        size = (images.shape[2], images.shape[3]) if size is None else size
        if self.warps:
            images, regions = self._warp(images, regions, size, generator)
        elif size != (images.shape[2], images.shape[3]):
            top, left = ((have - want) // 2 for have, want in zip(images.shape[2:], size, strict=True))
            if min(top, left) < 0:
                raise ValueError(f"augment: expected images of at least {size}, found {tuple(images.shape[2:])}")
            middle = (..., slice(top, top + size[0]), slice(left, left + size[1]))
            images, regions = images[middle], regions[middle]
        images, regions = self._mirror(images, regions, generator)
        return self._shade(images, generator), regions

    def _warp(
        self, images: Tensor, regions: Tensor, size: tuple[int, int], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        B, (H, W) = len(images), images.shape[2:]
        turn, zoom = torch.rand(2, B, generator=generator)
        angle = (2 * turn - 1) * math.radians(self.rotate)
        low, high = (math.log(s) for s in self.scale)
        shrink = torch.exp(-(low + (high - low) * zoom))
        cos, sin = torch.cos(angle) * shrink, torch.sin(angle) * shrink
        # affine_grid works in units of half the side: the ratios bring output pixels to source pixels, no stretching.
        (h, w), zero = size, torch.zeros_like(cos)
        rows = [cos * (w / W), -sin * (h / W), zero, sin * (w / H), cos * (h / H), zero]
        grid = F.affine_grid(torch.stack(rows, 1).view(B, 2, 3).to(images), [B, 1, h, w], align_corners=False)
        warped = F.grid_sample(images, grid, "bilinear", "reflection", align_corners=False)
        # A float32 holds every region number below 2²⁴ exactly, and nearest neighbour copies numbers.
        codes = F.grid_sample(regions[:, None].to(grid.dtype), grid, "nearest", "reflection", align_corners=False)
        return warped, codes[:, 0].to(regions.dtype)

    def _mirror(self, images: Tensor, regions: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        def where(chosen: Tensor, changed: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
            chosen = chosen.to(images.device).view(-1, 1, 1)
            return torch.where(chosen[:, None], changed, images), torch.where(chosen, codes, regions)

        for axis, name in ((-1, "horizontal"), (-2, "vertical")):
            if self.flip in (name, "both"):
                chosen = torch.rand(len(images), generator=generator) < 0.5
                images, regions = where(chosen, images.flip(axis), regions.flip(axis))
        if self.quarter_turns:
            if images.shape[2] != images.shape[3]:
                raise DataError(
                    f"data.augment.quarter_turns: expected square windows, found {shape_text(images.shape[2:])}"
                )
            turns = torch.randint(4, (len(images),), generator=generator)
            for quarters in (1, 2):  # 3 quarters are 1 and 2
                turned = images.rot90(quarters, (2, 3)), regions.rot90(quarters, (1, 2))
                images, regions = where((turns & quarters) > 0, *turned)
        return images, regions

    def _shade(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        if not (self.brightness or self.contrast or self.noise):
            return images
        contrast, brightness, noise = torch.rand(3, len(images), 1, 1, 1, generator=generator).to(images)
        images = images * torch.exp((2 * contrast - 1) * self.contrast) + (2 * brightness - 1) * self.brightness
        if self.noise:
            grain = torch.randn(images.shape, generator=generator, dtype=torch.float32).to(images)
            images = images + grain * noise * self.noise
        return images
