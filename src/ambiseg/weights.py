"""The weights of a network as safetensors: equal weights are equal bytes, and what is read fits the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError

_FORMAT = "ambiseg.Weights/1"
_FLOATS = ("F64", "F32", "F16", "BF16")


def write_weights(model: nn.Module, file: BinaryIO, about: Mapping[str, str]) -> None:
    """Weights and statistics as safetensors, with a few texts about them."""
    write_state(model.state_dict(), file, about)


def write_state(state: Mapping[str, Tensor], file: BinaryIO, about: Mapping[str, str]) -> None:
    """The same for the tensors of a network by their names."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    content = memoryview(save(tensors, metadata={"format": _FORMAT, **about}))
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:end]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # safetensors has them in any order
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    file.write(len(text).to_bytes(8, "little") + text)
    file.write(content[end:])


def read_weights(model: nn.Module, path: Path) -> None:
    """Into a model of the same configuration; a file of another one, a damaged one, and half a file are named.

    Sizes are compared before anything is read, so that a file takes no more memory than the model. Weights in half
    precision become a model in single precision.
    """
    from safetensors import SafetensorError, safe_open

    own = model.state_dict()
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no dictionary
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            check_names(own, shapes, path)
            kinds = {name: one.get_dtype() in _FLOATS for name, one in slices.items()}
            if odd := [name for name, tensor in own.items() if tensor.is_floating_point() != kinds[name]]:
                found = f"{slices[odd[0]].get_dtype()} for {odd[0]!r}"
                raise ConfigError(f"{path}: expected numbers of the kind of this configuration, found {found}")
            state = {name: file.get_tensor(name) for name in own}
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: expected weights as safetensors, found {' '.join(str(error).split())}") from None
    check_finite(state, path)
    model.load_state_dict(state)


def check_names(own: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Names and shapes are those of a network; of a file of another one the first difference is named."""
    wanted = f"{path}: expected the weights of this configuration, found"
    if missing := sorted(own.keys() - found.keys()):
        raise ConfigError(f"{wanted} no {missing[0]!r}")
    if extra := sorted(map(str, found.keys() - own.keys())):
        raise ConfigError(f"{wanted} {extra[0][:200]!r} as well")
    for name, tensor in own.items():
        if tuple(tensor.shape) != found[name]:
            raise ConfigError(f"{wanted} {list(found[name])} for {name!r} instead of {list(tensor.shape)}")


def check_finite(state: Mapping[str, Any], path: Path) -> None:
    """Weights that are nan or infinite predict nothing, and training cannot go on from them."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{path}: expected finite weights, found nan or infinite values in {name!r}")
