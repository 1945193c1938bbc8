"""How much memory and time does a large image take? Each case in a process of its own, from the first import on."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.harness import publish, table

CASES = {  # backbone, side of the image, window (0: whole)
    "U-Net, 512², whole": ("unet", 512, 0),
    "U-Net, 1024², whole": ("unet", 1024, 0),
    "U-Net, 1024², windows": ("unet", 1024, 512),
    "U-Net, 2048², windows": ("unet", 2048, 512),
    "DeepLabv3+, 2048², windows": ("deeplabv3plus", 2048, 512),
}

CODE = """
import json, resource, sys, tempfile, time
import torch
from pathlib import Path
from ambiseg import MoSE
from ambiseg.data.intensity import Intensity
from ambiseg.prediction import Options, Predictor, write
from ambiseg.prediction.inputs import array_source
from ambiseg.runs import Card, TrainedModel

backbone, side, window = json.loads(sys.argv[1])
torch.set_num_threads(1)
card = Card(("ground", "shape"), (1,), 1, Intensity(0, 255, 127.5, 127.5), "noise", MoSE.stratum)
model = TrainedModel(MoSE(1, 2, experts=4, backbone=backbone).eval(), card)
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


def main() -> None:
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
