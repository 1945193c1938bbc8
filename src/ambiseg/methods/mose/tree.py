"""MoSE's prediction as a tree of tensors, which is what ``torch.export`` takes and gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import register_pytree_node

from ambiseg.methods.mose.model import MoSEPredictive
from ambiseg.nn import Features


def _flattened(predictive: MoSEPredictive) -> tuple[list[Any], Any]:
    (dense, gate, skips), size = predictive.features, predictive.size
    return [predictive.weights, *size, dense, gate, *skips], (predictive.model, predictive.training)


def _unflattened(parts: Iterable[Any], about: Any) -> MoSEPredictive:
    weights, height, width, dense, gate, *skips = parts
    model, training = about
    return MoSEPredictive(model, Features(dense, gate, tuple(skips)), weights, (height, width), training)


def register() -> None:
    """Tell PyTorch."""
    register_pytree_node(MoSEPredictive, _flattened, _unflattened, serialized_type_name="ambiseg.MoSEPredictive")
