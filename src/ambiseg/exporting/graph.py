"""A trained model as one function of tensors, which other programs can run: raw image and numbers in, masks out."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ambiseg import __version__
from ambiseg._util.errors import ConfigError
from ambiseg.methods.base import Method, Stratified
from ambiseg.methods.predictive import Numbers
from ambiseg.runs import TrainedModel

FORMAT = "ambiseg.Graph/1"
OUTPUTS = ("weights", "probs")
_FIRST = 2  # images, and draws: what a dimension of one would say is not asked of the graph


class Inputs(NamedTuple):
    """What a graph takes beside the image.

    Attributes:
        normals: L, standard normal numbers per draw; 0: none are taken.
        seeds: whether it takes an int32 per draw.
        strata: K; 0 for methods without, whose draws are of no stratum.
    """

    normals: int
    seeds: bool
    strata: int

    @classmethod
    def of(cls, method: Method, channels: int) -> Inputs:
        """Those of a method, from its prediction of a small image; one line why if it cannot be exported."""
        side = max(2, method.multiple)
        predictive = method.predict(torch.zeros(1, channels, side, side, device=_device(method)))
        strata = predictive.weights.shape[1] if isinstance(predictive, Stratified) else 0
        found = cls(predictive.normals, predictive.seeded, strata)
        predictive.noise_of_numbers(Numbers(**found.numbers(1, 1)))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the graph, without the image."""
        there = {"normals": self.normals > 0, "seeds": self.seeds, "strata": self.strata > 0}
        return tuple(name for name, is_there in there.items() if is_there)

    def numbers(self, images: int, draws: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Random ones, by name.

        >>> Inputs(normals=2, seeds=False, strata=4).numbers(1, 3)["normals"].shape
        torch.Size([1, 3, 2])
        """
        shape, found = (images, draws), dict[str, Tensor]()
        if self.normals:
            found["normals"] = torch.randn(*shape, self.normals, generator=generator)
        if self.seeds:
            found["seeds"] = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        if self.strata:
            found["strata"] = torch.randint(self.strata, shape, generator=generator)
        return found


class Graph(nn.Module):
    """Raw images and numbers -> weights of strata and masks:

        weights, probs = π(prepare(image)), softmax(F(prepare(image), noise(normals, seeds, strata)))

    It holds a copy of the networks in 32 bits on the CPU, in evaluation mode. ``torch.export`` can follow it, for any
    number of images and draws and any height and width.

    Args:
        model: a trained model.

    >>> from ambiseg.runs import load
    >>> graph = Graph(load("demo"))
    >>> graph.inputs.names
    ('normals', 'strata')
    >>> weights, probs = graph(torch.zeros(1, 1, 32, 48), torch.zeros(1, 4, 1), strata=torch.arange(4)[None])
    >>> weights.shape, probs.shape
    (torch.Size([1, 4]), torch.Size([1, 4, 2, 32, 48]))
    """

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        method = copy.deepcopy(model.method).to("cpu", torch.float32).eval()
        method.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.method, self.intensity = method.requires_grad_(False), model.card.intensity
        self.channels = model.card.channels
        self.inputs = Inputs.of(method, self.channels)

    def forward(
        self, image: Tensor, normals: Tensor | None = None, seeds: Tensor | None = None, strata: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            image: ``[B, channels, H, W]`` float32, in the units of the training data.
            normals, seeds, strata: of N draws per image, see :class:`~ambiseg.methods.predictive.Numbers`.

        Returns:
            ``[B, K]`` the probability of each stratum, K = 1 for methods without; ``[B, N, C, H, W]`` the class
            probabilities of each draw.
        """
        predictive = self.method(self.intensity(image))
        probs = predictive.soft(predictive.noise_of_numbers(Numbers(normals, seeds, strata)))
        weights = predictive.weights if isinstance(predictive, Stratified) else torch.ones_like(image[:, :1, 0, 0])
        return weights, probs

    def example(self, images: int = _FIRST, draws: int = 3, size: tuple[int, int] = (37, 50), seed: int = 0):
        """A random image in raw units, and random numbers by name."""
        generator = torch.Generator().manual_seed(seed)
        prepared = torch.randn(images, self.channels, *size, generator=generator)
        return self.intensity.undo(prepared), self.inputs.numbers(images, draws, generator)

    def exported(self) -> torch.export.ExportedProgram:
        """What ``torch.export`` makes of it; one line if it cannot follow the networks."""
        # Larger than what networks pad to: a map of one place is a case of its own.
        side = 2 * max(self.method.multiple, 8)
        image, numbers = self.example(size=(side + 5, side + 7))
        axis = torch.export.Dim.DYNAMIC
        shapes = {"image": {0: axis, 2: axis, 3: axis}, **{name: {0: axis, 1: axis} for name in numbers}}
        try:
            with torch.no_grad(), _any_size():
                program = torch.export.export(self, (image,), numbers, dynamic_shapes=shapes)
        except Exception as error:  # of a network that is not ours: what may go wrong cannot be listed
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            expected = "a network that torch.export can follow for any size"
            raise ConfigError(f"model: expected {expected}, found {type(self.method).__name__}: {first:.300}") from None
        for module in program.graph_module.modules():
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                node.meta.pop("stack_trace", None)  # lines of the source on this machine
        # Sizes of one are refused for the strides that they would have, on which no operation of ours depends: `export`
        # compares them too. PyTorch has no public way to say so.
        guards = getattr(program, "_guards_code", None)
        if guards is not None:
            guards[:] = [guard for guard in guards if not guard.endswith(" != 1")]
        return program


def _any_size():
    """Sizes of 1 are no case of their own while a graph is made."""
    from torch.fx.experimental import _config

    return _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def _device(method: Method) -> torch.device:
    return next(method.parameters()).device


def described(model: TrainedModel, inputs: Inputs, precision: str) -> dict[str, str]:
    """What a program without ambiseg has to know of a graph: texts by key, JSON where they are no words."""
    card = model.card
    about = {
        "format": FORMAT,
        "version": __version__,
        "run": model.run if "/" not in model.run else model.run.rstrip("/").rpartition("/")[2],
        "weights_of": model.which,
        "title": card.title,
        "classes": json.dumps(card.classes, ensure_ascii=False),
        "evaluated": json.dumps(card.evaluated),
        "channels": str(card.channels),
        "units": card.units,
        "intensity": json.dumps({"inside": True, **asdict(card.intensity)}),
        "stratum": card.stratum,
        "strata": str(inputs.strata),
        "normals": str(inputs.normals),
        "seeds": "int32" if inputs.seeds else "",
        "multiple": "1",
        "precision": precision,
        "draw": _how_to_draw(inputs),
    }
    if card.extra is not None:
        about["extra"] = json.dumps(asdict(card.extra))
    return about


def _how_to_draw(inputs: Inputs) -> str:
    texts = []
    if inputs.normals:
        texts.append(f"normals [B, N, {inputs.normals}]: independent standard normal numbers.")
    if inputs.seeds:
        texts.append("seeds [B, N]: independent uniform int32; the same seed makes the same draw.")
    if inputs.strata:
        K = inputs.strata
        texts.append(f"strata [B, N]: int64 from 0 to {K - 1}.")
        texts.append(f"Compact form: S draws of each of the {K} strata, each of weight weights[k] / S.")
        texts.append(
            "Standard form: draw strata by weights, which one run with any strata gives; draws weigh the same."
        )
    elif inputs.names:
        texts.append("All draws weigh the same.")
    else:
        texts.append("Nothing is random: N is 1.")
    texts.append("The mask of a draw is the argmax of probs [B, N, C, H, W] over C.")
    return " ".join(texts)
