"""How much memory and time does a large image take, and how much of it is the network's?

Large images each in a process of their own, from the first import on. Small ones against the forward passes of the
backbone alone, which nothing can do without: prediction without files is to take at most 1.5 times as long.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from ambiseg import MoSE, load
from ambiseg.prediction import Options, Predictor
from ambiseg.prediction.inputs import array_source
from ambiseg.runs import TrainedModel
from benchmarks.harness import compare, publish, table

CASES = {  # backbone, side of the image, window (0: whole)
    "U-Net, 512², whole": ("unet", 512, 0),
    "U-Net, 1024², whole": ("unet", 1024, 0),
    "U-Net, 1024², windows": ("unet", 1024, 512),
    "U-Net, 2048², windows": ("unet", 2048, 512),
    "DeepLabv3+, 2048², windows": ("deeplabv3plus", 2048, 512),
    "the shipped network, 4096², windows": ("demo", 4096, 512),
    "the shipped network, 8192², windows": ("demo", 8192, 512),
}

CODE = """
import json, resource, sys, tempfile, time
import torch
from pathlib import Path
from ambiseg import MoSE, load
from ambiseg.data.intensity import Intensity
from ambiseg.prediction import Options, Predictor, write
from ambiseg.prediction.inputs import array_source
from ambiseg.runs import Card, TrainedModel

backbone, side, window = json.loads(sys.argv[1])
torch.set_num_threads(1)
card = Card(("ground", "shape"), (1,), 1, Intensity(0, 255, 127.5, 127.5), "noise", MoSE.stratum)
model = load("demo") if backbone == "demo" else TrainedModel(MoSE(1, 2, experts=4, backbone=backbone).eval(), card)
image = torch.randint(256, (1, side, side), dtype=torch.uint8)
before = time.process_time()
prediction = Predictor(model, Options(per_stratum=4, window=window))(array_source(image, "large"))
predicted = time.process_time()
with tempfile.TemporaryDirectory() as folder:
    write(prediction, Path(folder))
written = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([peak, predicted - before, written - predicted, prediction.windows]))
"""


SIDES = (64, 256)


def overhead() -> None:
    """Masks of one image, 4 of each of 4 experts, without files; and the backbone's forward pass on it."""
    print("prediction: against the backbone's forward pass, one thread")
    torch.set_num_threads(1)
    rows, data = [], {}
    for name, model in {"U-Net": _fresh(), "the shipped network": load("demo")}.items():
        predictor, method = Predictor(model, Options(per_stratum=4)), model.method
        assert isinstance(method, MoSE)
        backbone = method.backbone
        for side in SIDES:
            image = torch.randint(-1000, 400, (1, side, side), generator=torch.Generator().manual_seed(0))
            source, prepared = array_source(image, "image"), model.card.prepare(image[None])
            prepared = prepared.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                found = compare(f"{name}, {side}²", lambda: predictor(source), lambda: backbone(prepared))  # noqa: B023
            ratio = found.ours_ms / found.plain_ms
            rows.append([found.case, f"{found.ours_ms:.0f}", f"{found.plain_ms:.0f}", f"{ratio:.2f}"])
            data[found.case] = {"predict_ms": found.ours_ms, "backbone_ms": found.plain_ms, "ratio": ratio}
    headers = ["image", "prediction without files, CPU ms", "backbone alone, CPU ms", "ratio"]
    publish("prediction_overhead", "Prediction against the backbone's forward pass", table(headers, rows), data)


def _fresh() -> TrainedModel:
    """The default network with fresh weights, and the card of the shipped model."""
    method = MoSE(1, 2, experts=4, backbone="unet").eval()
    method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return TrainedModel(method, load("demo").card)


def main() -> None:
    overhead()
    print("prediction: large images, MoSE with fresh weights, 4 experts, 4 masks each")
    rows, data = [], {}
    for case, settings in CASES.items():
        command = [sys.executable, "-c", CODE, json.dumps(settings)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, predicting, writing, windows = json.loads(run.stdout)
        rows.append([case, str(windows), f"{peak / 1024:.2f}", f"{predicting:.0f}", f"{writing:.1f}"])
        data[case] = {"windows": windows, "peak_mb": peak, "predict_s": predicting, "write_s": writing}
        print(f"  {case}: {peak / 1024:.2f} GB, {predicting:.0f} s")
    headers = ["image", "windows", "peak of the process, GB", "predicting, CPU s", "writing, CPU s"]
    publish("prediction", "Memory and time of a prediction, files included", table(headers, rows), data)


if __name__ == "__main__":
    main()
