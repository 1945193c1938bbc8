"""Networks: backbones that give features, and the parts that make masks of them."""

from ambiseg.nn.deeplab import DeepLabV3Plus
from ambiseg.nn.experts import Experts
from ambiseg.nn.features import Adapter, Backbone, Features
from ambiseg.nn.gating import Gate
from ambiseg.nn.head import PixelHead
from ambiseg.nn.released import ReleasedHead
from ambiseg.nn.smp import smp_backbone
from ambiseg.nn.unet import UNet

__all__ = [
    "Adapter",
    "Backbone",
    "DeepLabV3Plus",
    "Experts",
    "Features",
    "Gate",
    "PixelHead",
    "ReleasedHead",
    "UNet",
    "smp_backbone",
]
