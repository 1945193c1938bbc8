"""Weights of an ONNX graph in fewer bits. The graph computes in 32 bits as before: a node widens each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

_FEWEST = 256  # numbers of a tensor that is worth a node
_HALF = 65504.0  # the largest number of 16 bits


def kept_in(proto: Any, precision: str) -> Any:
    """The same ``onnx.ModelProto`` with its larger weights in 16 or 8 bits; with ``32`` as it is.

    16:  float16                    w ≈ float32(h)
     8:  int8 and a scale per row   w ≈ s_o q_o,     s_o = max |w_o| / 127
    """
    if precision == "32":
        return proto
    from onnx import TensorProto, helper, numpy_helper

    graph, widening = proto.graph, []
    for kept in [*graph.initializer]:
        values = numpy_helper.to_array(kept)
        if values.dtype != np.float32 or values.ndim < 2 or values.size < _FEWEST or not np.isfinite(values).all():
            continue
        name, narrow = kept.name, f"{kept.name}.narrow"
        if precision == "16":
            if np.abs(values).max() > _HALF:
                continue
            new = [numpy_helper.from_array(values.astype(np.float16), narrow)]
            widening.append(helper.make_node("Cast", [narrow], [name], to=TensorProto.FLOAT))
        else:
            scale = np.abs(values).reshape(len(values), -1).max(1) / 127
            scale[scale == 0] = 1.0
            rounded = np.rint(values / scale.reshape(-1, *[1] * (values.ndim - 1))).astype(np.int8)
            new = [numpy_helper.from_array(rounded, narrow), numpy_helper.from_array(scale, f"{name}.scale")]
            widening.append(helper.make_node("DequantizeLinear", [narrow, f"{name}.scale"], [name], axis=0))
        graph.initializer.remove(kept)
        graph.initializer.extend(new)
    nodes = [*widening, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return proto
