"""Weighted masks from a file of `ambiseg export`, with onnxruntime, NumPy and Pillow alone: no ambiseg, no PyTorch.

    python examples/onnx_masks.py demo.onnx masks/ scans/*.tif

Writes masks/CASE/mask_00.png … and masks/weights.json: `ambiseg evaluate --predictions masks/ --truth DATA` reads them.
Images are files of one channel or three in the units of the training data, such as Hounsfield units.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

parser = argparse.ArgumentParser(description="weighted masks of images from an exported model")
parser.add_argument("model", help="the .onnx file")
parser.add_argument("out", type=Path, help="a folder for the masks")
parser.add_argument("images", type=Path, nargs="+")
parser.add_argument("--draws", type=int, default=16, help="about so many masks per image")
parser.add_argument("--numbers", type=Path, help=".npz of normals, seeds, strata to draw with in place of random ones")
given = parser.parse_args()

session = onnxruntime.InferenceSession(given.model, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map  # what the export says of itself; about["draw"] is how to draw
K, L = int(about["strata"]), int(about["normals"])
each = max(1, given.draws // max(1, K))  # the compact form: as many draws of every stratum, weighted
N, random = (each * K if K else given.draws), np.random.default_rng(0)
numbers = {
    "normals": random.standard_normal((1, N, L), np.float32),
    "seeds": random.integers(-(2**31), 2**31, (1, N), np.int32),
    "strata": np.arange(K or 1).repeat(each)[None],
}
if given.numbers:
    numbers |= np.load(given.numbers)
taken = {one.name: numbers[one.name] for one in session.get_inputs() if one.name != "image"}

weights_of = {}
for path in given.images:
    pixels = np.atleast_3d(np.asarray(Image.open(path), np.float32)).transpose(2, 0, 1)[None]  # [1, C, H, W], raw
    weights, probs = map(np.asarray, session.run(["weights", "probs"], {"image": pixels, **taken}))
    masks = probs[0].argmax(1).astype(np.uint8)
    strata = taken["strata"][0] if K else np.zeros(len(masks), int)  # those of one stratum share its weight
    mass = weights[0, strata] / np.bincount(strata)[strata]
    (given.out / path.stem).mkdir(parents=True, exist_ok=True)
    for number, mask in enumerate(masks):
        Image.fromarray(mask).save(given.out / path.stem / f"mask_{number:02}.png")
    weights_of[path.stem] = {f"mask_{number:02}": float(weight) for number, weight in enumerate(mass)}
(given.out / "weights.json").write_text(json.dumps(weights_of, indent=1))
