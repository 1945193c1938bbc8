"""What every method costs on the same backbone: a training step, and 100 masks, against the backbone alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ambiseg import MaskDistribution
from ambiseg.methods import METHODS, Method
from ambiseg.nn.config import BackboneConfig
from benchmarks.harness import cpu_seconds, publish, table
from benchmarks.mathematics import disks
from benchmarks.mose import interleaved

_LONG = 10.0  # seconds of 100 masks above which fewer are drawn and their time is multiplied
_FEW = 4


def step(model: Method, phases: tuple[str, ...], images: Tensor, annotations: MaskDistribution) -> None:
    """Loss and gradients of the phases of one training step."""
    model.zero_grad()
    for phase in phases:
        extra = {"phase": phase} if len(model.parameter_groups()) > 1 else {}
        model.loss(images, annotations, **extra)["total"].backward()


def step_ms(model: Method, images: Tensor, annotations: MaskDistribution) -> float:
    """CPU time of an average step: phases that not every step has count by their share."""
    kinds: dict[tuple[str, ...], int] = {}
    for number in range(1000):
        phases = tuple(model.phases(number))
        kinds[phases] = kinds.get(phases, 0) + 1
    runs: dict[tuple[str, ...], Callable[[], object]] = {
        phases: lambda phases=phases: step(model, phases, images, annotations) for phases in kinds
    }
    return sum(ms * kinds[phases] / 1000 for phases, ms in interleaved(runs, 3).items())


def masks_ms(model: Method, image: Tensor) -> tuple[float, bool]:
    """CPU time of 100 masks of one image, its features included; and whether it was estimated from fewer."""
    features = min(cpu_seconds(lambda: model.predict(image)) for _ in range(3))
    predictive = model.predict(image)
    few = min(cpu_seconds(lambda: predictive.sample(_FEW)) for _ in range(2))
    if few * 100 / _FEW > _LONG:
        return 1e3 * (features + few * 100 / _FEW), True
    return 1e3 * (features + min(cpu_seconds(lambda: predictive.sample(100)) for _ in range(3))), False


def main(methods: list[str] | None = None) -> None:
    images, annotations, many = torch.randn(4, 1, 128, 128), disks(4, 4, 128, 0), disks(4, 16, 128, 0)
    trunk = BackboneConfig().build(1)

    def backbone_step() -> None:
        trunk.zero_grad()
        features = trunk(images)
        (features.dense.mean() + features.gate.mean()).backward()

    def backbone_forward() -> None:
        with torch.no_grad():
            trunk(images[:1])

    rows, data = [], []
    for name in methods or METHODS:
        torch.manual_seed(0)
        model = METHODS[name].build(METHODS[name].Config(method=name), BackboneConfig(), 1, 2)
        # In one run with the backbone, because the machine is shared.
        alone = interleaved({"step": backbone_step, "forward": backbone_forward}, 3)
        four, sixteen = (step_ms(model, images, MaskDistribution(labels)) for labels in (annotations, many))
        masks, estimated = masks_ms(model.eval(), images[:1])
        found = {
            "step": four / alone["step"],
            "annotators": sixteen / four,
            "masks": masks / alone["forward"],
        }
        data.append({"method": name, **found, "estimated": estimated, "backbone_ms": alone, "step_ms": four})
        about = "≈ " if estimated else ""
        cells = [f"{found['step']:.2f}×", f"{found['annotators']:.2f}×", f"{about}{found['masks']:.1f}×"]
        rows.append([name, *cells])
        print(*rows[-1], flush=True)
    headers = ["method", "a step / the backbone's", "16 annotators / 4", "100 masks / one forward pass"]
    title = "Methods: cost on the 7-level U-Net, 128², batch 4, 32 bits; 100 masks of one image with its features"
    publish("methods", title, table(headers, rows), data)


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    main(sys.argv[1:])
