"""MoSE at the paper's two settings: step time and memory against the backbone alone and against a plain version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ambiseg import MaskDistribution, MoSE, overlap, transport
from ambiseg.config import Config
from ambiseg.methods.schedules import final
from ambiseg.runs import build_model
from ambiseg.training.precision import fast_bf16
from benchmarks.harness import cpu_seconds, publish, table
from benchmarks.mathematics import disks, street

Key = TypeVar("Key", bound=Hashable)


def interleaved(runs: Mapping[Key, Callable[[], object]], repeats: int = 5) -> dict[Key, float]:
    """CPU milliseconds of each: minimum over rounds in which every one has its turn."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], cpu_seconds(run) * 1e3)
    return best


def lidc() -> tuple[MoSE, Tensor, MaskDistribution]:
    """K=4, S=4, L=1, M=4, C=2, 128², batch 4, 7-level U-Net."""
    return (
        MoSE(1, 2, experts=4, samples=4, latent=1),
        torch.randn(4, 1, 128, 128),
        MaskDistribution(disks(4, 4, 128, 0)),
    )


def cityscapes() -> tuple[MoSE, Tensor, MaskDistribution]:
    """K=35, S=2, L=5, M=32 modes, C=25, 128², batch 1, 7-level U-Net."""
    model = MoSE(3, 25, experts=35, samples=2, latent=5, cost="ce")
    return model, torch.randn(1, 3, 128, 128), MaskDistribution(street((128, 128), 32, seed=0))


def demo() -> tuple[MoSE, Tensor, MaskDistribution]:
    """What the recipe `demo` trains: K=4, S=4, L=1, M=4, C=2, 64², batch 16, 5 levels."""
    model = build_model(Config.from_recipe("demo"), 1, 2)
    return model, torch.randn(16, 1, 64, 64), MaskDistribution(disks(16, 4, 64, 0))  # type: ignore[return-value]


def backbone_step(model: MoSE, images: Tensor) -> None:
    model.zero_grad()
    features = model.backbone(images)
    (features.dense.mean() + features.gate.mean()).backward()


def step(model: MoSE, images: Tensor, annotations: MaskDistribution, **settings: float) -> None:
    model.zero_grad()
    model.loss(images, annotations, **settings)["total"].backward()  # type: ignore[arg-type]


def plain_step(model: MoSE, images: Tensor, annotations: MaskDistribution) -> None:
    """The same loss as one would write it: every sample's maps, its logits, and a cost for each annotation."""
    model.zero_grad()
    features = model.backbone(images)
    samples = round(final(model.config.samples))
    latents = model.experts.each(len(images), samples)
    logits = model.head(features.dense, latents)
    columns = []
    for m in range(annotations.count):
        one = annotations.labels[:, m : m + 1]
        if model.cost == "ce":
            target = one[:, :, None].expand(-1, logits.shape[1], 1, -1, -1)
            columns.append(-logits.log_softmax(2).gather(2, target).mean((2, 3, 4))[..., None])
        else:
            columns.append(overlap.iou_cost(logits, one))
    cost = torch.cat(columns, 2)
    u = (model.gate(features.gate) / samples).repeat_interleave(samples, 1)
    plan = transport.couple(cost, annotations.mass)
    transport.relaxed_objective(cost, plan, u).total.mean().backward()


def runs(model: MoSE, images: Tensor, annotations: MaskDistribution) -> dict[str, Callable[[], object]]:
    """What a setting compares. With γ = 1/N a coupling reaches every sample, with γ = 1 no more than M of them."""
    everyone = 1 / (model.experts.count * round(final(model.config.samples)))
    return {
        "backbone": lambda: backbone_step(model, images),
        "MoSE, γ = 1": lambda: step(model, images, annotations),
        "MoSE, γ = 1/N": lambda: step(model, images, annotations, capacity=everyone),
        "MoSE, γ = 1, soft gradients": lambda: step(model, images, annotations, group_threshold=0.9),
        **_energy(model, images, annotations),
        "plain MoSE": lambda: plain_step(model, images, annotations),
    }


def _energy(model: MoSE, images: Tensor, annotations: MaskDistribution) -> dict[str, Callable[[], object]]:
    """The energy score with two numbers of samples, fused and as any method has it; it has no cross-entropy."""
    if model.cost != "iou":
        return {}
    changed = {S: model.config.changed(objective="energy", samples=S) for S in (2, 4)}
    made = {S: MoSE(1, model.classes, model.backbone, config=config) for S, config in changed.items()}

    def unfused() -> None:
        made[4].zero_grad()
        made[4](images).energy(annotations, 4).total.mean().backward()

    steps = {f"MoSE, energy score, S = {S}": lambda one=one: step(one, images, annotations) for S, one in made.items()}
    return {**steps, "MoSE, energy score, S = 4, not fused": unfused}


SETTINGS = {"LIDC": lidc, "Cityscapes": cityscapes}


def steps() -> None:
    rows, data = [], []
    for setting in SETTINGS:
        cases = runs(*SETTINGS[setting]())
        plain = cases.pop("plain MoSE")
        times = interleaved(cases)
        times["plain MoSE"] = min(cpu_seconds(plain) * 1e3 for _ in range(2))
        for case, value in times.items():
            ratio, memory = value / times["backbone"], process_mb(setting, case)
            rows.append([setting, case, f"{ratio:.2f}×", f"{value:.0f}", f"{memory:.0f}"])
            data.append({"setting": setting, "step": case, "ratio": ratio, "cpu_ms": value, "process_mb": memory})
    headers = ["setting", "training step", "of the backbone's", "CPU ms", "whole process, peak MB"]
    publish(
        "mose_steps", "MoSE: a training step against its backbone, forward and backward", table(headers, rows), data
    )


def process_mb(setting: str, case: str) -> float:
    """Peak memory of a fresh process that takes two such steps, Python and PyTorch included."""
    command = [sys.executable, "-m", "benchmarks.mose", setting, case]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def sampling() -> None:
    model, images, _ = lidc()
    images = images[:1]
    model.eval()
    predictive = model.predict(images)
    runs: dict[str, Callable[[], object]] = {"backbone forward": lambda: model.predict(images)}
    for n in (1, 16, 100):
        runs[f"{n} masks"] = lambda n=n: predictive.sample(n)
    times = interleaved(runs)
    base = times["backbone forward"]
    rows = [[key, f"{value / base:.2f}×", f"{value:.0f}"] for key, value in times.items()]
    headers = ["drawing, 128²", "of one backbone forward", "CPU ms"]
    publish("mose_sampling", "MoSE: drawing masks", table(headers, rows), {k: v / base for k, v in times.items()})


def precision() -> None:
    """Steps in 32 bits and under autocast to bfloat16, channels last, as they are trained."""
    rows, data = [], []
    for setting, make in {"demo": demo, **SETTINGS}.items():
        model, images, annotations = make()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        cases = runs(model, images, annotations)
        cases = {name: cases[name] for name in ("backbone", "MoSE, γ = 1", "MoSE, γ = 1/N")}
        both = {(name, mixed): _in_precision(run, mixed) for name, run in cases.items() for mixed in (False, True)}
        times = interleaved(both)
        for name in cases:
            full, mixed = times[name, False], times[name, True]
            rows.append([setting, name, f"{full:.0f}", f"{mixed:.0f}", f"{full / mixed:.2f}×"])
            data.append({"setting": setting, "step": name, "cpu_ms_32": full, "cpu_ms_bf16": mixed})
    hardware = "has" if fast_bf16("cpu") else "has no"
    title = f"MoSE: 32 bits and bfloat16, forward and backward (this CPU {hardware} instructions for bfloat16)"
    headers = ["setting", "training step", "32 bits, CPU ms", "bfloat16, CPU ms", "32 bits / bfloat16"]
    publish("mose_precision", title, table(headers, rows), data)


def _in_precision(run: Callable[[], object], mixed: bool) -> Callable[[], object]:
    def wrapped() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            run()

    return wrapped


def growth() -> None:
    """One image, 64²: how the step grows with samples, annotations and experts."""
    images = torch.randn(1, 3, 64, 64)
    runs: dict[str, Callable[[], object]] = {}
    for name, K, S, M in (
        ("K=8, S=2, M=8", 8, 2, 8),
        ("twice the samples: S=4", 8, 4, 8),
        ("four times the annotations: M=32", 8, 2, 32),
        ("twice the experts: K=16", 16, 2, 8),
    ):
        model = MoSE(3, 25, experts=K, samples=S, latent=5, cost="ce", backbone="unet-light")
        annotations = MaskDistribution(street((64, 64), M, seed=0))
        runs[name] = lambda m=model, a=annotations: step(m, images, a)
    times = interleaved(runs)
    base = next(iter(times.values()))
    rows = [[key, f"{value / base:.2f}×", f"{value:.0f}"] for key, value in times.items()]
    publish("mose_growth", "MoSE: growth of a step (light U-Net, 25 classes, 64²)",
            table(["step", "of the first", "CPU ms"], rows), {k: v / base for k, v in times.items()})  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    steps()
    precision()
    sampling()
    growth()


if __name__ == "__main__":  # python -m benchmarks.mose SETTING CASE: what process_mb asks for
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = runs(*SETTINGS[sys.argv[1]]())[sys.argv[2]]
    chosen()
    chosen()
    # Not ru_maxrss: a process keeps there what its parent had when it was forked.
    with open("/proc/self/status") as status:
        print(next(float(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
