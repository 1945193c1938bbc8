# ---
# MoSE in a bare PyTorch loop: no Lightning, no configuration, no command line.
#
#     python examples/bare_loop.py                # under a minute on one core; writes bare_loop.png
#
# Editors that know `# %%` (VS Code, PyCharm, Spyder, Jupytext) run it cell by cell, as a notebook.
# ---

# %% Settings
import argparse
from pathlib import Path

import numpy as np
import torch

import ambiseg
from ambiseg.data import Shapes
from ambiseg.nn import UNet

settings = argparse.ArgumentParser(description="MoSE in a bare PyTorch loop")
settings.add_argument("--steps", type=int, default=400, help="of the optimiser (default: 400)")
settings.add_argument("--images", type=int, default=512, help="to train on (default: 512)")
settings.add_argument("--out", type=Path, default=Path("bare_loop.png"), help="the picture (default: bare_loop.png)")
options, _ = settings.parse_known_args()  # a notebook has arguments of its own
torch.manual_seed(0)

# %% Data: pictures of which every reader's mask is known, and how likely it is
TEST = 64
shapes = Shapes(count=options.images + TEST, size=32, readers=4, jitter=0)  # four modes per image, no jitter
images = torch.stack([torch.from_numpy(case.image) for case in shapes]) / 127.5 - 1  # [N, 1, 32, 32], -1 to 1
readers = torch.stack([torch.from_numpy(case.labels) for case in shapes])  # [N, 4, 32, 32], 0 or 1
train = torch.utils.data.TensorDataset(images[:-TEST], readers[:-TEST])  # two images in a row are of one patient
loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
print(f"{len(train)} images to train on, {TEST} to test on, {readers.shape[1]} readers each")

# %% Model: a small U-Net of your own, four experts on it, and Adam
backbone = UNet(in_channels=1, channels=(12, 24, 48), convs=2, momentum=0.1)  # or any network, see docs/backbones.md
model = ambiseg.MoSE(in_channels=1, classes=2, experts=4, samples=2, backbone=backbone)
model = model.to(memory_format=torch.channels_last)  # faster on CPUs  # type: ignore[call-overload]
optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=options.steps)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% The loop
model.train()
step = 0
while step < options.steps:
    for batch, annotations in loader:
        capacity = 0.25 if step < options.steps // 2 else 1.0  # γ: at first every sample must explain something
        terms = model.loss(batch, annotations, capacity=capacity)
        optimiser.zero_grad()
        terms["total"].backward()
        optimiser.step()
        rate.step()
        step += 1
        if step % max(options.steps // 6, 1) == 0:
            print(f"step {step:4d}  " + "  ".join(f"{name} {value.item():.3f}" for name, value in terms.items()))
        if step == options.steps:
            break

# %% Predict: features once, then as many masks as you like
predicted = model.predict(images[-TEST:])
masks = predicted.sample(16, generator=torch.Generator().manual_seed(0))  # 16 equally likely masks per image
print(masks)

# %% Score, against the four readers and against everything that readers might have drawn
truth = ambiseg.MaskDistribution.concat([shapes.distribution(i) for i in range(len(shapes) - TEST, len(shapes))])
best = np.mean([shapes.true_ged(i, samples=16) for i in range(len(shapes) - TEST, len(shapes))])
print(f"GED(16) to the readers   {ambiseg.ged(masks, readers[-TEST:]).mean():.3f}")
print(f"GED(16) to the truth     {ambiseg.ged(masks, truth).mean():.3f}; a perfect model scores {best:.3f}")
print(f"matched IoU to the truth {ambiseg.matched_iou(masks, truth).mean():.3f}")

# %% A picture: what readers drew, and what each expert says with which probability
import matplotlib.pyplot as plt  # noqa: E402 - where it is used, as in a notebook

chosen = slice(-TEST, None, TEST // 4)
experts = model.predict(images[chosen]).compact(per_stratum=1, generator=torch.Generator().manual_seed(0))
titles = ["image", *(f"reader {m + 1}" for m in range(4)), *(f"expert {k + 1}" for k in range(4))]
figure, axes = plt.subplots(len(experts), 9, figsize=(9, 4.6), layout="constrained")
for row, line in enumerate(axes):
    line[0].imshow(images[chosen][row, 0].numpy(), cmap="gray", vmin=-1, vmax=1)
    for axis, mask in zip(line[1:], [*readers[chosen][row], *experts.labels[row]], strict=True):
        axis.imshow(mask.numpy(), cmap="gray", vmin=0, vmax=1)
    for axis, weight in zip(line[5:], experts.mass[row], strict=True):
        axis.set_xlabel(f"{weight:.0%}", fontsize=8, labelpad=2)
    for axis in line:
        axis.set(xticks=[], yticks=[])
for axis, title in zip(axes[0], titles, strict=True):
    axis.set_title(title, fontsize=9)
figure.savefig(options.out, dpi=150)
plt.close(figure)
print(f"look at {options.out}")
