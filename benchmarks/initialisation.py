"""Which start trains fastest?  ``python -m benchmarks.initialisation path/to/lidc71.npz``

MoSE in a bare PyTorch loop on real nodules (an npz with image [N, H, W] in Hounsfield units, masks [N, 4, H, W] and
split), 64×64 centres, a four-level U-Net of 0.59 M parameters. Prints validation GED(16), standard form, by epoch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from ambiseg import MaskDistribution, MoSE, ged
from ambiseg.nn import UNet

ARMS = {
    "scale bias 1": {"scale_bias": 1.0},
    "scale bias 0": {"scale_bias": 0.0},
    "scale bias 1, running statistics 0.1": {"scale_bias": 1.0, "momentum": 0.1},
    "scale bias 0, running statistics 0.1": {"scale_bias": 0.0, "momentum": 0.1},
}


def load(path: str, split: str, size: int = 64) -> tuple[Tensor, MaskDistribution]:
    with np.load(path, allow_pickle=False) as file:
        chosen = file["split"] == split
        images, masks = file["image"][chosen].astype(np.float32), file["masks"][chosen]
    top = (images.shape[1] - size) // 2
    window = slice(top, top + size)
    pictures = torch.from_numpy(images[:, None, window, window])
    pictures = (pictures.clamp(-1000, 400) + 300) / 700
    return pictures, MaskDistribution(np.ascontiguousarray(masks[:, :, window, window]))  # type: ignore[arg-type]


def validate(model: MoSE, images: Tensor, truth: MaskDistribution) -> float:
    generator = torch.Generator().manual_seed(0)
    scores = []
    for start in range(0, len(images), 32):
        some = slice(start, start + 32)
        scores.append(ged(model.predict(images[some]).sample(16, generator), truth[some]))
    return torch.cat(scores).mean().item()


def train(path: str, seed: int, epochs: int, momentum: float = 0.01, **settings: float) -> list[float]:
    torch.manual_seed(seed)
    images, truth = load(path, "train")
    held_out = load(path, "val")
    model = MoSE(1, 2, backbone=UNet(1, (16, 32, 64, 96), momentum=momentum), **settings)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    curve = []
    for epoch in range(epochs):
        capacity = 0.5 if epoch < epochs // 2 else 1.0
        for batch in torch.randperm(len(images)).split(16):
            flip = [d for d in (2, 3) if torch.rand(()) < 0.5]
            labels = truth.labels[batch].flip(flip)
            terms = model.train().loss(images[batch].flip(flip), MaskDistribution(labels), capacity=capacity)
            optimiser.zero_grad()
            terms["total"].backward()
            optimiser.step()
        curve.append(validate(model, *held_out))
        print(f"  {curve[-1]:.3f}", end="", flush=True)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Which start trains fastest?")
    parser.add_argument("data", help="npz of nodules: image, masks, split")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        for name, arm in ARMS.items():
            print(f"{name}, seed {seed}:", end="", flush=True)
            train(arguments.data, seed, arguments.epochs, **arm)
            print()
