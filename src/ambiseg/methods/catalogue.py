"""What is known of every method without training it: its idea, its paper, its size."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ambiseg.methods.base import METHODS, method_named
from ambiseg.nn.config import BackboneConfig


class Entry(NamedTuple):
    """One method.

    Attributes:
        name: its key in ``METHODS``.
        year: of its paper.
        idea: what it does, in one sentence.
        reference: authors, title and place of its paper.
        stratum: what it calls a stratum; empty for methods without.
        megabytes: of its weights in 32 bits, on the backbone named ``unet``.
        published: the same of the network of its paper; ``None`` where ``unet`` is that network.
    """

    name: str
    year: int | None
    idea: str
    reference: str
    stratum: str
    megabytes: float
    published: float | None


def megabytes(name: str, published: bool = False, in_channels: int = 1, classes: int = 2) -> float:
    """Size of a method's weights with default settings, in papers' unit: 10⁶ bytes of float32. Nothing is computed.

    Args:
        published: the network of the paper instead of the common one.

    >>> megabytes("unet", published=True)
    41.279368
    """
    method = method_named(name)
    settings = {"published": True} if published else {}
    with torch.device("meta"):
        built = method.build(method.Config(method=name, **settings), BackboneConfig(), in_channels, classes)
    return sum(weight.numel() for weight in built.parameters()) * 4 / 1e6


def catalogue(only: str | None = None) -> list[Entry]:
    """Every method of ``METHODS``, in its order, or only one of them."""
    found = []
    for name in METHODS if only is None else [only]:
        method = method_named(name)
        published = megabytes(name, published=True) if "published" in method.Config.model_fields else None
        about = method.year, method.idea, method.reference, method.stratum
        found.append(Entry(name, *about, megabytes(name), published))
    return found
