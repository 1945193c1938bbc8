"""Graphs as files: ONNX, and PyTorch's ``.pt2``; how each is run again."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ambiseg.exporting.graph import OUTPUTS, Graph

OPSET = 20
ABOUT = "ambiseg.json"  # of a .pt2, the file in it that says what ONNX has in metadata_props

Runner = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, ...]]
"""Image and numbers by name -> weights and probabilities."""


def as_onnx(graph: Graph, about: Mapping[str, str]) -> Any:
    """An ``onnx.ModelProto`` of a graph, with ``about`` in its ``metadata_props``."""
    with _quiet():
        program = torch.onnx.export(
            graph.exported(),
            (),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            output_names=list(OUTPUTS),
        )
    assert program is not None
    proto = program.model_proto
    names: dict[str, tuple[str | None, ...]] = {"image": ("batch", None, "height", "width")}
    names |= {name: ("batch", "draws", None) for name in graph.inputs.names}
    names |= {"weights": ("batch", None)}
    names["probs"] = ("batch", "draws" if graph.inputs.names else None, None, "height", "width")
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, name in zip(value.type.tensor_type.shape.dim, names[value.name], strict=False):
            if name is not None:
                axis.dim_param = name
    del proto.graph.value_info[:]  # shapes between, whose names were others
    for part in (proto.graph, *proto.functions):
        for node in part.node:  # where it came from in the source of this machine
            node.doc_string = ""
            del node.metadata_props[:]
    for part in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer, proto.graph, proto):
        del part.metadata_props[:]
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name, proto.producer_version = "ambiseg", about["version"]
    return proto


def as_pt2(graph: Graph, about: Mapping[str, str]) -> bytes:
    """What ``torch.export.load`` reads, with ``about`` as an extra file."""
    file = io.BytesIO()
    with _quiet():
        torch.export.save(graph.exported(), file, extra_files={ABOUT: json.dumps(about, indent=1, ensure_ascii=False)})
    return file.getvalue()


def run_onnx(content: bytes) -> Runner:
    """With onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # its advice on the graph is for whoever wrote the exporter
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(image: Tensor, numbers: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        fed = {"image": image.numpy(), **{name: value.numpy() for name, value in numbers.items()}}
        return tuple(torch.from_numpy(np.asarray(found)) for found in session.run(list(OUTPUTS), fed))

    return run


def run_pt2(content: bytes) -> Runner:
    """With PyTorch."""
    with _quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def run(image: Tensor, numbers: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return module(image, **numbers)

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch says of parts of its own that are old, and of packages that no graph of ours needs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
