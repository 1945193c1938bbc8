"""What cannot be trained at all, however long: windows that do not fit the images or the network, too little memory."""

from __future__ import annotations

from collections.abc import Sequence

from ambiseg._util.errors import ConfigError
from ambiseg._util.memory import total
from ambiseg._util.text import shape_text
from ambiseg.config import Config
from ambiseg.methods import method_named
from ambiseg.methods.facts import Facts
from ambiseg.nn.unet import unet_kept, unet_weights

LARGER = 4  # times the side of the largest image that a window may have, the rest of it mirrored
REAL = 4  # times more pixels that padding for the network may make of a window


def check_fit(config: Config, facts: Facts) -> None:
    """A :class:`ConfigError` where a training cannot work, before anything is allocated for it."""
    data, backbone = config.data, config.backbone
    multiple = backbone.multiple if method_named(config.model.method).uses_backbone else 1
    for key, size in (("size", data.size), ("eval_size", data.eval_size)):
        if size is None:
            continue
        window = (size, size) if isinstance(size, int) else size
        most = max(LARGER * max(facts.largest), multiple)
        if max(window) > most:
            expected = f"at most {most}, {LARGER} times the side of the largest image"
            raise ConfigError(f"data.{key}: expected {expected}, found {shape_text(window)}")
        padded = _padded(window, multiple)
        if padded[0] * padded[1] > REAL * window[0] * window[1]:
            expected = f"windows that fill at least 1/{REAL} of what the network pads them to, {shape_text(padded)}"
            raise ConfigError(f"data.{key}: expected {expected}, found {shape_text(window)}")
    _check_memory(config, facts, multiple)


def _check_memory(config: Config, facts: Facts, multiple: int) -> None:
    """Of a U-Net on CPUs, the least that a step takes; other networks, and GPUs, say it themselves."""
    data, backbone = config.data, config.backbone
    if multiple == 1 or not backbone.levels or not _on_cpu(config.trainer.accelerator):
        return
    batch = min(data.batch_size, facts.images * data.windows)
    if data.size is None:  # images of a batch are padded to its largest: how many that are is not known
        window, batch = facts.largest, batch if facts.smallest == facts.largest else 1
    else:
        window = (data.size, data.size) if isinstance(data.size, int) else data.size
    height, width = _padded(window, multiple)
    numbers = batch * (height * width / backbone.scale**2) * unet_kept(backbone.levels, backbone.convs)
    weights = unet_weights(backbone.levels, backbone.convs, facts.channels)
    width_of = 4 if config.trainer.precision.startswith("32") else 2
    needed, there = width_of * numbers + 16 * weights, total()  # weights, gradients and the two averages of Adam
    if needed > there:
        found = f"at least {needed / 1e9:,.0f} GB for {batch} × {shape_text((height, width))} pixels"
        remedy = "smaller data.batch_size, data.size or backbone.channels take less"
        raise ConfigError(f"data.batch_size: expected a step within {there / 1e9:,.0f} GB, found {found}; {remedy}")


def _padded(size: Sequence[int], multiple: int) -> tuple[int, int]:
    height, width = (-(-side // multiple) * multiple for side in size)
    return height, width


def _on_cpu(accelerator: str) -> bool:
    import torch

    others = torch.cuda.is_available() or torch.backends.mps.is_available()
    return accelerator == "cpu" or (accelerator == "auto" and not others)
