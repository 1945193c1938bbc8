"""What is known of the training data when a run is planned: plain numbers, from which methods plan their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """A setting's value and, in one line, why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Facts:
    """The training part of a data set in numbers. Pixels are looked at in a part of the images where there are many.

    Attributes:
        images, patients: how many there are.
        val_images, val_patients: the same of the validation part.
        smallest, median, largest: height and width, each axis by itself.
        channels: of every image.
        dtype: of the pixels.
        low, high: the 0.5th and the 99.5th percentile of the pixels.
        mean, std: of each channel, within these percentiles unless the pixels are bytes.
        own_mean, own_std: the same when every image is measured in its own range, see
            :class:`~ambiseg.data.intensity.Intensity`.
        recommended: whether the data say themselves how raw values become input.
        gain: how many times larger the spread of values is in some images than in others (90th to 10th percentile).
        upright: how much of the difference between an image and its upside-down copy all images have in common, from 0
            (they lie in any direction) to 1.
        classes: their names, background included.
        evaluated: ids of the classes that metrics look at.
        shares: of each class in the pixels of all masks.
        fewest, readers: annotators per image, the fewest and the most.
        identical: whether all annotators agree on every pixel of every image.
        iou: mean IoU of pairs of annotators; 1 where an image has only one.
        modes: in how many ways an image is read, groups of annotators whose masks overlap: the upper quartile.
        marked: share of the pixels that some annotator marked, in the mean image.
        thickness: twice the area of what is marked over its perimeter, in pixels: the width of a line, the radius of a
            disc.
        empty: share of the masks in which nothing is marked.
    """

    images: int
    patients: int
    val_images: int
    val_patients: int
    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    channels: int
    dtype: str
    low: float
    high: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    own_mean: tuple[float, ...]
    own_std: tuple[float, ...]
    recommended: bool
    gain: float
    upright: float
    classes: tuple[str, ...]
    evaluated: tuple[int, ...]
    shares: tuple[float, ...]
    fewest: int
    readers: int
    identical: bool
    iou: float
    modes: int
    marked: float
    thickness: float
    empty: float

    @property
    def unmarked(self) -> tuple[str, ...]:
        """Names of the evaluated classes that no annotator marked anywhere."""
        return tuple(self.classes[c] for c in self.evaluated if not self.shares[c])
