"""Methods whose prediction at a pixel is a function of the backbone's features at that pixel."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ambiseg.methods.base import Method
from ambiseg.methods.dense import pixel_by_pixel
from ambiseg.methods.predictive import PointPredictive
from ambiseg.nn.features import Backbone
from ambiseg.nn.windows import Step, Windows

__all__ = ["Pixelwise", "PointPredictive"]


class Pixelwise(Method):
    """Features of the backbone, and a distribution of masks that they decide pixel by pixel."""

    backbone: Backbone

    @abstractmethod
    def predictive(self, dense: Tensor) -> PointPredictive:
        """Features ``[B, F, H, W]`` -> the distribution of masks."""

    def forward(self, images: Tensor) -> PointPredictive:
        return self.predictive(self.backbone(images).dense)

    def predict(self, images: Tensor) -> PointPredictive:
        """:meth:`forward` in evaluation mode and without gradient; the module's mode is left as it was."""
        return super().predict(images)  # type: ignore[return-value]

    def predict_windows(self, image: Tensor, windows: Windows, step: Step | None = None) -> PointPredictive:
        """Features by windows, stitched to one map, or made again for every rendering where they do not fit."""
        return pixel_by_pixel(self, self.predictive, self.backbone, image, windows, step)
