"""What do fewer bits in an exported file cost? Size, largest difference, GED on real readers and CPU time of the file.

Beside the widths that ``ambiseg export`` offers: bfloat16, and the dynamic quantisation of onnxruntime, which computes
in 8 bits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ambiseg import MaskDistribution, ged, load
from ambiseg.data import Nodules
from ambiseg.exporting import compared
from ambiseg.exporting.files import Runner, as_onnx, run_onnx
from ambiseg.exporting.graph import Graph, described
from ambiseg.exporting.weights import kept_in
from ambiseg.runs import open_run
from benchmarks.harness import cpu_seconds, publish, table

EACH = 5  # of the cases of the test part, one in so many


def in_bfloat16(proto: Any) -> Any:
    """Weights rounded to bfloat16."""
    from onnx import numpy_helper

    for kept in proto.graph.initializer:
        values = numpy_helper.to_array(kept)
        if values.dtype == np.float32 and values.ndim > 1:
            rounded = torch.from_numpy(values.copy()).bfloat16().float().numpy()
            kept.CopyFrom(numpy_helper.from_array(rounded, kept.name))
    return proto


def quantised(content: bytes) -> bytes:
    """onnxruntime's dynamic quantisation."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "source.onnx"), Path(place, "target.onnx")
        source.write_bytes(content)
        quantize_dynamic(source, target, weight_type=QuantType.QUInt8)
        return target.read_bytes()


def main() -> None:
    """The shipped model on every fifth nodule of its test part, 16 masks each."""
    import onnx

    model, data = load("demo"), Nodules()
    graph = Graph(model)
    whole = as_onnx(graph, described(model, graph.inputs, "32")).SerializeToString()
    parse: Callable[[bytes], Any] = onnx.load_from_string
    files = {
        "32 bits": whole,
        "float16": kept_in(parse(whole), "16").SerializeToString(),
        "bfloat16": in_bfloat16(parse(whole)).SerializeToString(),  # not narrow in the file
        "int8": kept_in(parse(whole), "8").SerializeToString(),
        "dynamic": quantised(whole),
    }
    test = set(json.loads((open_run("demo").folder / "split.json").read_text())["parts"]["test"])
    cases = [data[i] for i in [i for i, name in enumerate(data.names) if name in test][::EACH]]
    normals = torch.randn(1, 16, 1, generator=torch.Generator().manual_seed(0))
    numbers = {"normals": normals, "strata": torch.arange(4).repeat_interleave(4)[None]}

    def scored(run: Runner) -> tuple[float, float]:
        found: list[tuple[Tensor, ...]] = []
        images = [torch.from_numpy(case.image[None].astype(np.float32)) for case in cases]
        seconds = cpu_seconds(lambda: found.extend(run(image, numbers) for image in images))
        scores = []
        for case, (weights, probs) in zip(cases, found, strict=False):
            masks = MaskDistribution(probs.argmax(2).to(torch.uint8), weights.repeat_interleave(4, 1) / 4)
            scores.append(float(ged(masks, torch.from_numpy(case.labels)[None])))
        return float(np.mean(scores)), seconds

    def plain(image: Tensor, given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return graph(image, **given)

    expected, torch_seconds = scored(plain)
    rows, record = [], {"cases": len(cases), "ged": expected}
    for name, content in files.items():
        runner = run_onnx(content)
        score, seconds = scored(runner)
        size = len(files["float16"]) if name == "bfloat16" else len(content)
        largest, ratio = compared(graph, runner), seconds / torch_seconds
        rows.append([name, f"{size / 1e6:.2f}", f"{largest:.1g}", f"{score - expected:+.5f}", f"{ratio:.2f}"])
        record[name] = {"bytes": size, "difference": largest, "ged": score, "cpu": ratio}
    head = ("weights", "MB", "largest difference", "GED − that of PyTorch", "CPU / PyTorch")
    title = f"Exported files of the demo, {len(cases)} nodules, GED {expected:.4f}"
    publish("exporting", title, table(head, rows), record)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
