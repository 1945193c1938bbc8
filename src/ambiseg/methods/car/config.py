"""Settings of CAR."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ambiseg.methods.base import PublishedConfig
from ambiseg.nn.config import BackboneConfig
from ambiseg.settings import SettingError

_WIDEST = 4096
_WIDTH = 32  # of the authors
_MOST = 512
_WEIGHT = 1e6

Length = Annotated[int, Field(ge=24, le=4096)]


class CARConfig(PublishedConfig):
    """Settings of calibrated adversarial refinement."""

    method: Literal["car"] = "car"
    latent: int = Field(
        default=8, ge=1, le=256, description="L, dimension of the code z; the authors' 32 on Cityscapes"
    )
    samples: int = Field(default=5, ge=1, le=256, description="M, draws per image in training")
    calibration: float = Field(
        default=5.0,
        ge=0,
        le=_WEIGHT,
        description="weight of the KL of the mean of the draws from the calibration network",
    )
    adversarial: float = Field(default=10.0, ge=0, le=_WEIGHT, description="weight of what the discriminator says")
    r1: float = Field(default=10.0, ge=0, le=_WEIGHT, description="weight of the discriminator's gradient penalty")
    width: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="features of the refinement network's first level; null: as many as the first level of a U-Net "
        "has, with published and other networks 32",
    )
    levels: int = Field(default=4, ge=2, le=8, description="how often the refinement network halves the image")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="rate of dropout in the refinement network")
    disc_width: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="features of the discriminator's first layers; null: twice as many as the first level of a U-Net "
        "has, with published and other networks 64",
    )
    disc_size: list[Length] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="height and width of training images; the discriminator's last layer then reads every place of its "
        "last map, as published; null: the mean over places, with published 128 by 128",
    )
    disc_steps: int = Field(default=50, ge=1, le=10**9, description="steps of every cycle in which it is trained")
    disc_cycle: int = Field(default=250, ge=1, le=10**9, description="steps of a cycle")
    disc_accuracy: float = Field(
        default=0.85, ge=0, le=2, description="the discriminator is trained while its last accuracy is below this"
    )
    network: Literal["lidc", "cityscapes"] = Field(
        default="lidc",
        description="the calibration network with published: VGG19 and a decoder (lidc), or five convolutions",
    )
    guides: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="last channels of images that only the calibration network reads: what another network predicts",
    )

    @model_validator(mode="after")
    def _widths(self) -> CARConfig:
        self.checked(self.width or _WIDTH)
        return self

    def checked(self, width: int) -> int:
        """A width of the refinement network whose last level is not too wide."""
        if (widest := width * 2 ** (self.levels - 1)) > _WIDEST:
            found = f"{widest} for {self.levels} levels from {width}"
            raise SettingError("width", f"expected at most {_WIDEST} features in the last level, found {found}")
        return width

    def widths(self, backbone: BackboneConfig) -> tuple[int, int]:
        """``width`` and ``disc_width``, decided."""
        first = _WIDTH if self.published or not backbone.levels else backbone.levels[0]
        return self.checked(self.width or min(first, _MOST)), self.disc_width or min(2 * first, _MOST)

    @property
    def judged(self) -> tuple[int, int] | None:
        """``disc_size``, decided."""
        if self.disc_size is None:
            return (128, 128) if self.published else None
        return self.disc_size[0], self.disc_size[1]
