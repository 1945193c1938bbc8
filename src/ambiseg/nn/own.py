"""Networks that are named in settings: ``module:Class`` of the user's own, ``smp:Architecture`` of that package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg._util.own import imported, made, parameters, told
from ambiseg._util.text import did_you_mean
from ambiseg.nn.features import Adapter, Backbone, Features
from ambiseg.nn.smp import smp_backbone

SMP = "smp:"
_SIZES = {1: (37, 53), 8: (24, 40), 16: (48, 80), 32: (96, 160), 64: (192, 320)}  # of images that test a multiple


def own_backbone(name: str, in_channels: int, options: Mapping[str, Any]) -> Backbone:
    """A network by its name, checked with one small image.

    Args:
        name: ``module:Name`` of a class or function that takes ``in_channels`` and returns a
            :class:`~ambiseg.nn.features.Backbone`, or any module that maps images ``[B, in_channels, H, W]`` to
            features ``[B, F, h, w]``, or to a pair of dense features and features for the gate. Or ``smp:Unet`` and
            other architectures of segmentation-models-pytorch.
        options: its other arguments.

    A network that does not take images of every size gets them padded to the smallest multiple of 8, 16, 32 or 64
    pixels that it takes, and its features are cropped again.
    """
    given = {"in_channels": in_channels, **options}
    if name.startswith(SMP):
        given = {"encoder" if key == "encoder_name" else key: value for key, value in given.items()}
        return made(smp_backbone, {"architecture": name[len(SMP) :], **given}, name, "backbone.options")
    factory = imported(name, "backbone.name")
    known = parameters(factory, without="in_channels")
    for key in options:
        if known is not None and key not in known:
            takes = ", ".join(known) or "none"
            hint = did_you_mean(key, known)
            raise ConfigError(f"backbone.options: expected options of {name} ({takes}), found {key!r}{hint}")
    network = made(factory, given, name, "backbone.options")
    if not isinstance(network, nn.Module):
        raise ConfigError(f"backbone.name: expected {name} to return an nn.Module, found {type(network).__name__}")
    return _checked(network, in_channels, name)


def untrained(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without weights that would be downloaded, for a network whose weights are read from a run."""
    return {**options, "encoder_weights": None} if name.startswith(SMP) else dict(options)


def _checked(network: nn.Module, in_channels: int, name: str) -> Backbone:
    """The network as a backbone; how many features it returns is what it returns of an image."""
    failure: Exception | None = None
    for multiple, size in _SIZES.items():
        try:
            output = _forward(network, in_channels, size)
        except Exception as error:  # of the user's own code; sizes that are not multiples of 32 are a usual cause
            failure = error
            continue
        if isinstance(network, Backbone):
            return _own_backbone(network, output, name)
        return _adapted(network, output, multiple, name)
    assert failure is not None
    shape = [2, in_channels, *_SIZES[64]]
    raise ConfigError(f"backbone.name: expected {name} to take images {shape}, found {told(failure)}") from failure


def _forward(network: nn.Module, in_channels: int, size: tuple[int, int]) -> Any:
    modes = {part: part.training for part in network.modules()}
    parameter = next(network.parameters(), torch.empty(0))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return network.eval()(torch.zeros(2, in_channels, *size, device=parameter.device))
    finally:
        for part, training in modes.items():
            part.training = training


def _own_backbone(network: Backbone, output: Any, name: str) -> Backbone:
    if not isinstance(output, Features):
        raise ConfigError(f"backbone.name: expected {name} to return ambiseg.nn.Features, found {_kind(output)}")
    for part in ("dense", "gate"):
        declared, found = getattr(network, f"{part}_channels", None), getattr(output, part)
        if found.ndim != 4 or found.shape[1] != declared:
            expected = f"{part} features [B, {part}_channels = {declared}, h, w] of {name}"
            raise ConfigError(f"backbone.name: expected {expected}, found {list(found.shape)}")
    return network


def _adapted(network: nn.Module, output: Any, multiple: int, name: str) -> Adapter:
    dense: Any
    gate: Any
    dense, gate = output if isinstance(output, tuple | list) and len(output) == 2 else (output, None)
    for found in (dense, dense if gate is None else gate):
        if not isinstance(found, Tensor) or found.ndim != 4 or len(found) != 2:
            raise ConfigError(f"backbone.name: expected features [B, F, H, W] of {name}, found {_kind(found)}")
    return Adapter(network, dense.shape[1], None if gate is None else gate.shape[1], multiple=multiple)


def _kind(output: Any) -> str:
    return str(list(output.shape)) if isinstance(output, Tensor) else type(output).__name__
