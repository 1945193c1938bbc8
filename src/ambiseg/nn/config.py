"""Which backbone a method is built on, as settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ambiseg._util.errors import ConfigError
from ambiseg._util.own import is_reference
from ambiseg._util.text import did_you_mean
from ambiseg.nn.deeplab import DeepLabV3Plus
from ambiseg.nn.features import Backbone
from ambiseg.nn.own import own_backbone, untrained
from ambiseg.nn.unet import FULL, LIGHT, Convolutions, Decoder, Scaled, UNet, unet_weights
from ambiseg.settings import SettingError, Settings, Text, shown

BACKBONES = ("unet", "unet-light", "deeplabv3plus")
_WEIGHTS = 2.5e8  # of a U-Net, at most: training them takes 4 GB
_COARSEST = 1024  # pixels: an image is padded to a multiple of at most so many


class BackboneConfig(Settings):
    """The network that gives features.

    >>> BackboneConfig(name="unet", channels=[4, 8]).build(in_channels=1).dense_channels
    4
    """

    name: Text = Field(
        default="unet",
        examples=list(BACKBONES),
        description="unet (7 levels), unet-light (4 levels), deeplabv3plus, smp:ARCHITECTURE of "
        "segmentation-models-pytorch, or module:Class of your own",
    )
    options: dict[str, Any] = Field(
        default={}, description="further arguments of an smp: or module:Class network, such as {width: 32}"
    )
    channels: list[Annotated[int, Field(ge=1, le=4096)]] | None = Field(
        default=None,
        min_length=2,
        max_length=10,
        description="features of each level of a U-Net, two to ten levels of 1 to 4,096; null: those of its name",
    )
    convs: int = Field(default=3, ge=1, le=32, description="convolutions per level of a U-Net")
    decoder: Decoder = Field(
        default="released",
        description="features of a U-Net's step up from level i to i − 1: as many as level i − 1, with bias in "
        "convolutions (released, as in the code of MoSE), or as many as level i, without bias (phiseg, as in papers)",
    )
    momentum: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="how fast batch statistics follow; 0.01 as published, 0.1 suits short runs",
    )
    scale: int = Field(
        default=1,
        ge=1,
        le=64,
        description="work on images this many times coarser, for large ones; masks keep their size",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKBONES and not is_reference(name):
            known = f"{', '.join(BACKBONES)}, smp:ARCHITECTURE or module:Class"
            raise ValueError(f"expected {known}, found {shown(name)}{did_you_mean(name, BACKBONES)}")
        return name

    @model_validator(mode="after")
    def _levels_of_unets(self) -> BackboneConfig:
        if self.name not in ("unet", "unet-light") and self.channels is not None:
            raise SettingError("channels", f"expected null with {self.name}, found levels of a U-Net")
        if self.name in BACKBONES and self.options:
            found = shown(next(iter(self.options)))
            raise SettingError("options", f"expected none with {self.name}, found {found}")
        if self.multiple > _COARSEST:
            found = f"{self.multiple} for {len(self.levels)} levels at scale {self.scale}"
            key = "channels" if self.scale == 1 else "scale"
            raise SettingError(key, f"expected images to be padded to a multiple of at most {_COARSEST}, found {found}")
        if (weights := unet_weights(self.levels, self.convs, decoder=self.decoder) if self.levels else 0) > _WEIGHTS:
            found = f"{weights:.2g} in {shown(self.levels)} with {self.convs} convolutions each"
            raise SettingError("channels", f"expected at most {_WEIGHTS:.2g} weights, found {found}")
        return self

    @property
    def levels(self) -> tuple[int, ...]:
        """Features of each level of a U-Net; none for other networks."""
        if self.name not in ("unet", "unet-light"):
            return ()
        return tuple(self.channels or (LIGHT if self.name == "unet-light" else FULL))

    @property
    def multiple(self) -> int:
        """What images are padded to, as far as the settings tell."""
        return self.scale * 2 ** max(len(self.levels) - 1, 0)

    @property
    def unet_levels(self) -> tuple[int, ...]:
        """Features of each level of networks beside the backbone: its own, and :data:`LIGHT` with other than U-Nets."""
        return self.levels or LIGHT

    @property
    def kind(self) -> Convolutions:
        """How a level of the U-Net is built."""
        return Convolutions(self.convs, self.decoder == "released", self.momentum)

    def build(self, in_channels: int, **levels: Any) -> Backbone:
        """The network with fresh weights. ``levels`` are further arguments of a U-Net."""
        network = self._network(in_channels, **levels)
        return network if self.scale == 1 else Scaled(network, self.scale)

    def build_dense(self, in_channels: int, **levels: Any) -> Backbone:
        """The same for methods that read its last features; a network that stops before them is refused."""
        network = self.build(in_channels, **levels)
        if network.finishes:
            found = f"{self.name}, which stops before them"
            raise ConfigError(f"backbone.name: expected a network whose last features are dense, found {found}")
        return network

    def _network(self, in_channels: int, **levels: Any) -> Backbone:
        if levels and self.name not in ("unet", "unet-light"):
            raise ValueError(f"{', '.join(levels)}: expected a U-Net, found {self.name}")
        if self.name == "deeplabv3plus":
            return DeepLabV3Plus(in_channels)
        if is_reference(self.name):
            return own_backbone(self.name, in_channels, self.options)
        return UNet(in_channels, self.levels, self.decoder, convs=self.convs, momentum=self.momentum, **levels)

    def without_weights(self) -> BackboneConfig:
        """The same network, but no pretrained weights are fetched, because others are about to replace them."""
        return self.changed(options=untrained(self.name, self.options))
