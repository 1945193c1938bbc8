"""The head of the authors' released code, so that their checkpoints load and predict the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ambiseg.nn.pixelhead import Folded


class ReleasedHead(nn.Module):
    """(u + shift(z)) · (scale(z) + 1e-5), a 1×1 convolution to F + L, 3 × (1×1 convolution, BN, ReLU), 1×1 to C.

    In training its batch statistics run over all samples of all images, so every pixel of every sample has to exist
    at once. In evaluation they are constants, and the head folds into three layers and an output like any other.

    The arguments are those of :class:`ambiseg.nn.head.PixelHead`; hidden layers are as wide as the features.
    """

    def __init__(self, channels: int, latent: int, classes: int, features: int | None = None) -> None:
        super().__init__()
        width = channels if features is None else features
        self.shift = nn.Linear(latent, channels)
        self.scale = nn.Linear(latent, channels)
        self.project = nn.Linear(width, width + latent)
        self.layers = nn.ModuleList(nn.Linear(width + latent if i == 0 else width, width) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, eps=1e-3, momentum=0.01) for _ in range(3))
        self.last = nn.Linear(width, classes)
        for noise in (self.shift, self.scale):
            nn.init.xavier_uniform_(noise.weight)
            nn.init.zeros_(noise.bias)

    @property
    def foldable(self) -> bool:
        """Only in evaluation: in training the batch statistics tie all samples together."""
        return not self.training

    def modulate(self, dense: Tensor, latents: Tensor) -> Tensor:
        """``[B, F, h, w], [B, N, L] -> [B, N, F, h, w]``."""
        shift, scale = (noise(latents)[..., None, None] for noise in (self.shift, self.scale))
        return (dense[:, None] + shift) * (scale + 1e-5)

    def classify(self, maps: Tensor) -> Tensor:
        """``[B, N, F, h, w] -> [B, N, C, h, w]``."""
        x = maps.movedim(2, -1)
        shape = x.shape[:-1]
        x = self.project(x).flatten(0, -2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.last(x).unflatten(0, shape).movedim(-1, 2)

    def forward(self, dense: Tensor, latents: Tensor) -> Tensor:
        """Logits ``[B, N, C, h, w]``."""
        return self.classify(self.modulate(dense, latents))

    def fold(self, latents: Tensor) -> Folded:
        """The head with running statistics and the noise of ``latents [B, N, L]`` folded into its layers."""
        if self.training:
            raise RuntimeError("the released head folds in evaluation only: its batch statistics are not constants")
        folded = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            assert isinstance(layer, nn.Linear)
            assert isinstance(norm, nn.BatchNorm1d)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            folded.append((layer.weight * gain[:, None], (layer.bias - norm.running_mean) * gain + norm.bias))
        (weight, bias), *rest = folded
        weight, bias = weight @ self.project.weight, weight @ self.project.bias + bias  # no activation in between
        shift, scale = self.shift(latents), self.scale(latents) + 1e-5
        first = weight * scale[:, :, None]
        return Folded(first, (shift * scale) @ weight.t() + bias, (*rest, (self.last.weight, self.last.bias)))
