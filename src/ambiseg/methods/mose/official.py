"""Checkpoints of the authors' released MoSE code."""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

from ambiseg.methods.mose.model import MoSE
from ambiseg.nn import unet


def load_official(path: str | os.PathLike[str]) -> MoSE:
    """A model of the authors' release, in evaluation mode, that predicts the numbers theirs does.

    Everything is read off the shapes: channels, levels, experts, latent dimensions, classes. Keys may carry the
    ``module.`` prefix of the parallel wrapper they were saved from. Nothing in the file is executed.

    Args:
        path: a ``.pth`` state dict with the released key names.
    """
    name = os.fspath(path)
    try:
        with warnings.catch_warnings():  # about pickle protocols, which is no news to whoever reads the error below
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # a file that is no checkpoint fails in more ways than can be listed
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name}: cannot be read as a checkpoint: {first}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{name}: expected a state dict of tensors, found {type(state).__name__} of something else")
    state = {str(key).removeprefix("module."): value for key, value in state.items()}
    try:
        return _build(state)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{name}: not a checkpoint of the released MoSE: {error}") from None


def _build(state: dict[str, Tensor]) -> MoSE:
    missing = [key for key in ("mu", "log_sigma", "gating.fc_layer.0.weight", "last_layer.weight") if key not in state]
    if missing:
        found = ", ".join(sorted({key.split(".")[0] for key in state})[:8]) or "nothing"
        raise ValueError(f"expected {', '.join(missing)}, found parts {found}")
    for key, rank in (("mu", 2), ("log_sigma", 2), ("last_layer.weight", 4)):
        if state[key].ndim != rank or not state[key].is_floating_point():
            raise ValueError(
                f"{key} must be {rank}-dimensional floats, found {state[key].dtype} {list(state[key].shape)}"
            )
    K, L = state["mu"].shape
    backbone = unet.from_official({k: v for k, v in state.items() if k.startswith("backbone.")})
    model = MoSE(
        in_channels=0,  # the backbone is built already
        classes=state["last_layer.weight"].shape[0],
        experts=K,
        latent=L,
        backbone=backbone,
        head="released",
        diagonal=True,
    )
    names = {"mu": "experts.mean", "log_sigma": "experts.log_sigma"}
    parts = {"weight": "weight", "bias": "bias"}
    norm_parts = {**parts, "running_mean": "running_mean", "running_var": "running_var"}
    layers = [
        *((f"gating.fc_layer.{i}", f"gate.layers.{i}", parts) for i in (0, 2)),
        ("gating.fc_layer.4", "gate.layers.4", {"weight": "weight"}),
        ("fuse.residual", "head.shift", parts),
        ("fuse.scale", "head.scale", parts),
        ("fuse.last_layer", "head.project", parts),
        ("last_layer", "head.last", parts),
    ]
    for i in range(3):
        layers.append((f"layers.convolution.{i}.convolution.0", f"head.layers.{i}", parts))
        layers.append((f"layers.convolution.{i}.convolution.1", f"head.norms.{i}", norm_parts))
    for theirs, ours, suffixes in layers:
        names.update({f"{theirs}.{a}": f"{ours}.{b}" for a, b in suffixes.items()})

    rest = {k: v for k, v in state.items() if not k.startswith("backbone.") and not k.endswith("num_batches_tracked")}
    if unknown := sorted(rest.keys() - names.keys()):
        raise ValueError(f"unexpected {', '.join(unknown[:4])}")
    own = model.state_dict()
    for theirs, value in rest.items():
        target = own[names[theirs]]
        if tuple(value.shape) not in (tuple(target.shape), (*target.shape, 1, 1)) or not value.is_floating_point():
            raise ValueError(f"{theirs} is {value.dtype} {list(value.shape)}, expected floats {list(target.shape)}")
        own[names[theirs]] = value.reshape(target.shape)  # their 1×1 convolutions are our linear layers
    absent = sorted(k for k, ours in names.items() if k not in rest and ours in own)
    if absent:
        raise ValueError(f"missing {', '.join(absent[:4])}")
    model.load_state_dict(own)
    return model.eval()
