"""The networks of segmentation-models-pytorch as backbones. The package is optional and imported on demand."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ambiseg._util.extras import MissingExtra
from ambiseg.nn.features import Adapter, Features, check_images


def smp_backbone(
    architecture: str = "Unet",
    encoder: str = "resnet34",
    in_channels: int = 3,
    encoder_weights: str | None = None,
    **kwargs: Any,
) -> Adapter:
    """A network of segmentation-models-pytorch without its segmentation head, as a backbone.

    The dense features are what the head would have read; the gate reads the encoder's deepest map. Images of any size
    are padded to what the encoder needs, and the features are cropped again.

    Args:
        architecture: a class of ``segmentation_models_pytorch``: ``Unet``, ``FPN``, ``DeepLabV3Plus``, ….
        encoder: its ``encoder_name``.
        in_channels: channels of the images.
        encoder_weights: pretrained weights by name, such as ``imagenet``, which it downloads; none by default.
        kwargs: whatever else the architecture takes.

    Raises:
        ImportError: if segmentation-models-pytorch or torchvision, which it needs, cannot be imported.
    """
    try:
        import segmentation_models_pytorch as smp  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:  # a torchvision built for another PyTorch is a RuntimeError
        raise MissingExtra(
            "expected the package segmentation_models_pytorch, found none; install it with: pip install "
            "segmentation-models-pytorch, and a torchvision that fits the installed PyTorch; importing it said: "
            f"{error}"
        ) from error
    build = getattr(smp, architecture, None)
    if not (isinstance(build, type) and issubclass(build, nn.Module)):
        raise ValueError(f"segmentation_models_pytorch has no architecture {architecture!r}")
    if kwargs.get("aux_params") is not None:
        raise ValueError("aux_params adds a classifier to the network, for which a backbone has no use: leave it out")
    model: Any = build(encoder_name=encoder, encoder_weights=encoder_weights, in_channels=in_channels, **kwargs)
    head = getattr(model, "segmentation_head", None)
    convs = [module for module in head.modules() if isinstance(module, nn.Conv2d)] if head is not None else []
    if not convs:
        raise ValueError(f"{architecture} has no segmentation_head with a convolution: wrap it in an Adapter yourself")
    model.segmentation_head = nn.Identity()
    return _Network(model, convs[0].in_channels, in_channels)


class _Network(Adapter):
    """Without its head; images are padded, because these networks reject sizes that their stride does not divide."""

    def __init__(self, model: Any, dense: int, in_channels: int) -> None:
        stride = int(model.encoder.output_stride)
        super().__init__(model, dense, gate=model.encoder.out_channels[-1], gate_from="encoder", multiple=stride)
        self.in_channels = in_channels

    def forward(self, images: Tensor) -> Features:
        check_images(images, self.in_channels)
        return super().forward(images)
