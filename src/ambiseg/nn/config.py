"""Which backbone a method is built on, as settings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ambiseg.nn.deeplab import DeepLabV3Plus
from ambiseg.nn.features import Backbone
from ambiseg.nn.unet import FULL, LIGHT, Scaled, UNet
from ambiseg.settings import SettingError, Settings


class BackboneConfig(Settings):
    """The network that gives features.

    >>> BackboneConfig(name="unet", channels=[4, 8]).build(in_channels=1).dense_channels
    4
    """

    name: Literal["unet", "unet-light", "deeplabv3plus"] = Field(
        default="unet", description="unet (7 levels), unet-light (4 levels) or deeplabv3plus"
    )
    channels: list[int] | None = Field(
        default=None, description="features of each level of a U-Net; null: those of its name"
    )
    convs: int = Field(default=3, ge=1, description="convolutions per level of a U-Net")
    momentum: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="how fast batch statistics follow; 0.01 as published, 0.1 suits short runs",
    )
    scale: int = Field(
        default=1, ge=1, description="work on images this many times coarser, for large ones; masks keep their size"
    )

    @field_validator("channels")
    @classmethod
    def _levels(cls, channels: list[int] | None) -> list[int] | None:
        if channels is not None and (len(channels) < 2 or min(channels) < 1):
            raise ValueError(f"expected two levels or more of at least 1, found {channels}")
        return channels

    @model_validator(mode="after")
    def _levels_of_unets(self) -> BackboneConfig:
        if self.name == "deeplabv3plus" and self.channels is not None:
            raise SettingError("channels", "expected null with deeplabv3plus, found levels of a U-Net")
        return self

    def build(self, in_channels: int, **levels: Any) -> Backbone:
        """The network with fresh weights. ``levels`` are further arguments of a U-Net."""
        network = self._network(in_channels, **levels)
        return network if self.scale == 1 else Scaled(network, self.scale)

    def _network(self, in_channels: int, **levels: Any) -> Backbone:
        if self.name == "deeplabv3plus":
            if levels:
                raise ValueError(f"{', '.join(levels)}: expected a U-Net, found deeplabv3plus")
            return DeepLabV3Plus(in_channels)
        channels = self.channels or (LIGHT if self.name == "unet-light" else FULL)
        return UNet(in_channels, tuple(channels), convs=self.convs, momentum=self.momentum, **levels)
