"""What is predicted for one image: weighted masks, the draws they came from, and strata where the method has them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.data.sets.folder.settings import AXES
from ambiseg.decisions.calibration import Guaranteed
from ambiseg.decisions.consensus import check_rules
from ambiseg.io.source import Source
from ambiseg.masks import MaskDistribution
from ambiseg.nn.windows import spacing
from ambiseg.prediction.decisions import Decisions


@dataclass(frozen=True)
class Options:
    """How many masks are drawn, and how images are read.

    Args:
        per_stratum: the compact form, the default of methods with strata: 4 masks of every stratum unless given, each
            of weight ``weights / per_stratum``.
        samples: the standard form: this many equally likely masks; 16 for methods without strata unless given.
        seed: of the noise. Every image starts from it, so the masks of one image do not depend on other images.
        window: side of the windows of a large image; 0 takes every image whole; None cuts images of more than 1024²
            pixels into windows of 512.
        overlap: of neighbouring windows; None is a quarter of the window.
        merge: merge equal masks into one and add their weights.
        convert: read a grey image as colour for a model of three channels, and three equal channels as grey for a
            model of one; always done for a model whose training data were read so.
        axes: of ``.npy`` and ``.npz`` arrays: HW, HWC, CHW, DHW, DHWC or DCHW; None is as in training.
        axis: of a NIfTI volume that slices are cut along; None is as in training, or the last.
        assume_window: ``(low, high)``: an image of 8 or 16 bits is one for a screen, whose 0 and largest number were
            these two in the units of the training data, and is mapped back.
        extra: for a model that was trained with another model's predictions as channels, the folder with those of the
            images, in files of the same stem.
        symmetries: 2, 4 or 8: average over as many flips and quarter turns of the image, each of which takes as long
            as the image itself; 1 is the image alone.
        keep: at most so many masks, of the weights that stand best for all that are drawn, by energy distance: see
            :func:`ambiseg.decisions.compaction.compact`. About 100 are drawn unless ``per_stratum`` or ``samples`` says
            how many.
        consensus: rules of :data:`~ambiseg.decisions.consensus.CONSENSUS` whose single masks are written too.
        measure: write all measurements of every mask, see :mod:`ambiseg.prediction.deciding`; presence and size are
            in ``weights.json`` in any case.
    """

    per_stratum: int | None = None
    samples: int | None = None
    seed: int = 0
    window: int | None = None
    overlap: int | None = None
    merge: bool = True
    convert: bool = False
    axes: str | None = None
    axis: int | None = None
    assume_window: tuple[float, float] | None = None
    extra: str | os.PathLike[str] | None = None
    symmetries: int = 1
    keep: int | None = None
    consensus: Sequence[str] | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        for name, least in (("per_stratum", 1), ("samples", 1), ("window", 0), ("overlap", 0), ("keep", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name}: expected {least} or more, found {value}")
        if self.per_stratum is not None and self.samples is not None:
            raise DataError(f"samples: expected None beside per_stratum={self.per_stratum}, found {self.samples}")
        if self.axes is not None and self.axes not in AXES:
            raise DataError(f"axes: expected one of {', '.join(AXES)}, found {self.axes!r}")
        if self.assume_window is not None:
            low, high = self.assume_window
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise DataError(f"assume_window: expected two numbers, low < high, found {low:g} and {high:g}")
        check_rules(self.consensus or ())
        spacing(self.window, self.overlap)


class Draw(NamedTuple):
    """One draw: its stratum (None for methods without), its weight, and which of the masks it is."""

    stratum: int | None
    weight: float
    mask: int


class Look(NamedTuple):
    """Whether a person must look. What is ``None`` needs ``look.npz`` in the run, which ``ambiseg look`` writes."""

    score: float  #: expected disagreement of two masks, E[1 − IoU]
    unsure: float | None = None  #: share of the validation images of which less disagreement is expected
    unlike: float | None = None  #: share of the validation images that are nearer to the training images
    is_unlike: bool | None = None  #: farther than 99 % of them: a warning
    needed: bool | None = None  #: unlike, or more disagreement than in 80 % of the validation images


class Kept(NamedTuple):
    """What the masks stand for, where fewer were kept than drawn: a draw counts for the nearest."""

    asked: int  #: at most so many
    of: int  #: draws
    loss: float  #: energy distance between the masks and all draws (GED, d = 1 − IoU)


@dataclass(frozen=True, eq=False)
class Strata:
    """The K strata that draws fall into, such as components of a mixture or members of an ensemble."""

    name: str  #: what the method calls a stratum
    weights: Tensor  #: ``[K]``; of a volume the mean over its slices
    centres: Tensor  #: ``[K, *spatial]`` the most typical mask of each stratum
    slice_weights: Tensor  #: ``[D, K]`` of every slice


@dataclass(frozen=True, eq=False)
class Prediction:
    """The masks of one image or one volume.

    ``masks`` is one image of N masks ``[1, N, H, W]`` (``[1, N, D, H, W]``), in descending order of weight, with the
    soft ``marginal``; ``draws`` are what they came from, stratum by stratum: a merged mask came from several.
    """

    name: str  #: of the image, and of the folder for its files
    masks: MaskDistribution
    draws: tuple[Draw, ...]
    strata: Strata | None  #: None for methods without
    entropy: Tensor  #: ``[*spatial]`` in nats, of the marginal
    classes: tuple[str, ...]  #: names of the class ids
    source: Source  #: the file, with its size and its position in space
    run: str  #: that the model is from, as it was named
    which: str  #: of its weights
    options: Options
    windows: int = 1  #: how many a slice was cut into; 1 is whole
    notes: tuple[str, ...] = ()  #: warnings: what is odd about the image for this model
    kept: Kept | None = None  #: None: masks are all that were drawn
    look: Look | None = None  #: whether a person must look
    guaranteed: Guaranteed | None = None  #: of the run's calibration; None without one, and of volumes

    @cached_property
    def decisions(self) -> Decisions:
        """Single masks, measurements and fewer masks."""
        return Decisions(self.masks, len(self.classes), self.source.spacing)

    @property
    def form(self) -> str:
        """``compact`` (the same number of draws of every stratum) or ``standard`` (equally likely draws)."""
        return "standard" if self.strata is None or self.options.samples is not None else "compact"

    def strata_of(self, mask: int) -> list[int]:
        """The strata that drew a mask, in descending order of weight; empty for methods without strata."""
        mass: dict[int, float] = {}
        for draw in self.draws:
            if draw.mask == mask and draw.stratum is not None:
                mass[draw.stratum] = mass.get(draw.stratum, 0.0) + draw.weight
        return sorted(mass, key=lambda stratum: -mass[stratum])

    def __repr__(self) -> str:
        text = f"Prediction({self.name!r}: {self.source.form}, {self.masks.count} masks"
        if self.strata is not None:
            text += f", {self.strata.name} weights " + ", ".join(f"{weight:.2f}" for weight in self.strata.weights)
        return f"{text})"
