"""Images whose distribution of masks is known exactly: what a perfect model would score can be computed."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases, byte_units, digest
from ambiseg.data.intensity import Intensity
from ambiseg.masks import MaskDistribution, Masks, as_masks, exact
from ambiseg.metrics import PROTOCOLS, ged, matched_iou, sample_diversity
from ambiseg.overlap import pairwise_iou
from ambiseg.transport import optimal_plan

_VERSION = "1"  # of the drawing: raise it when the same numbers give another picture
_PIXELS_OF_MASKS = 1 << 28  # of a case, at most
# Streams of random numbers: more readers must not change the picture.
_SCENE, _PIXELS, _READERS, _BODY, _GROUND = range(5)


class Estimate(NamedTuple):
    """A mean and its standard error, 0 where the mean is exact."""

    mean: float
    error: float


class Single(NamedTuple):
    """The scores of one mask as the whole prediction; ``mask`` is its number in the distribution."""

    mask: int
    ged: float
    matched_iou: float


class Outcome(NamedTuple):
    """One possible mask of a reader. ``label`` is the class that is given to the body, ``offset`` in pixels."""

    mode: str
    label: int
    offset: int
    probability: float


@dataclass(frozen=True)
class Scene:
    """What an image shows: a body inside a halo, and a companion that touches the halo. Lengths are in pixels.

    Attributes:
        corners: 0 is an ellipse, else a regular polygon of that many corners.
        centre: of the body, (y, x).
        radius: of the body, to its farthest point.
        angle: that the body is turned by, in radians.
        aspect: short by long axis of an ellipse.
        width: of the halo.
        towards: direction of the companion, in radians.
        size: radius of the companion.
        halo: in [0, 1], brightness of the halo relative to the body; more readers include a brighter one.
        companion: the same of the companion.
        paleness: in [0, 1], how low the contrast of all three is; more readers miss a paler scene.
        body_class, mix: the body's hue is ``mix`` in [0, 1] of the way from this class to the next.
        companion_class: the class of the companion.
    """

    corners: int
    centre: tuple[float, float]
    radius: float
    angle: float
    aspect: float
    width: float
    towards: float
    size: float
    halo: float
    companion: float
    paleness: float
    body_class: int
    mix: float
    companion_class: int

    def distances(self, pixels: int) -> tuple[np.ndarray, np.ndarray]:
        """How far each pixel is outside the body and the companion, along the ray from their centre; two ``[H, W]``."""
        y, x = (grid - centre for grid, centre in zip(np.mgrid[:pixels, :pixels], self.centre, strict=True))
        away = float(self._reach(np.array(self.towards))) + self.width + self.size
        beside = np.hypot(y - away * np.sin(self.towards), x - away * np.cos(self.towards)) - self.size
        return np.hypot(y, x) - self._reach(np.arctan2(y, x)), beside

    def _reach(self, direction: np.ndarray) -> np.ndarray:
        """From the body's centre to its edge."""
        theta = direction - self.angle
        if self.corners:
            half = np.pi / self.corners
            return self.radius * np.cos(half) / np.cos(theta % (2 * half) - half)
        return self.radius * self.aspect / np.hypot(self.aspect * np.cos(theta), np.sin(theta))


class Shapes(Cases):
    """A body, its halo and its companion. Readers disagree on what belongs to it, with known probabilities.

    A reader draws one of four modes, and shifts all boundaries by the same whole number of pixels:

        P(mode k) = a_k / Σ a,    a = (1, 2·halo, 2·companion, 2·paleness);   P(shift = j − J) = C(2J, j) / 4ᴶ.

    ``body``: the body alone. ``halo``: the body and its halo. ``companion``: the body and the companion. ``missed``:
    an empty mask, or with more than two classes the companion alone. More readers draw the halo and the companion the
    brighter these are; more miss the body the paler the scene is. All three can be seen in the image and are uniform
    in [0, 1]. With more than two classes the body's hue is ``mix`` of the way
    from one class to the next: a reader gives it the next class with probability ``mix``.

    The distribution is finite, and :meth:`distribution` is all of it. Case ``i`` depends on ``seed`` and ``i`` only.

    Args:
        count: number of images.
        size: their height and width in pixels.
        classes: 2 draws grey images; up to 12 draws colours.
        modes: how many of the four modes there are, the first ones.
        readers: masks per case, drawn independently. ``None``: all masks, weighted with their probabilities.
        jitter: J, the largest shift of a boundary in pixels.
        noise: standard deviation of a pixel's noise, of 255 grey levels.
        per_patient: images that share a patient: ground, texture and kind of body.
        seed: of all random numbers.

    >>> shapes = Shapes(count=8, modes=2, jitter=0, readers=None)
    >>> shapes[3].readers, shapes[3].weights.round(4).tolist()
    (('body-1+0', 'halo-1+0'), [0.3597, 0.6403])
    >>> shapes.distribution(3)
    MaskDistribution(1 image of 64×64, 2 masks, weighted)
    >>> round(shapes.true_ged(3, samples=16), 4)
    0.0126
    """

    def __init__(
        self,
        count: int = 512,
        size: int = 64,
        classes: int = 2,
        modes: int = 4,
        readers: int | None = 4,
        jitter: int = 1,
        noise: float = 8.0,
        per_patient: int = 2,
        seed: int = 0,
    ) -> None:
        limits = {
            "count": (count, 1, 100_000),
            "size": (size, 16, 4096),
            "classes": (classes, 2, 12),
            "modes": (modes, 1, 4),
            "readers": (1 if readers is None else readers, 1, 10_000),
            "jitter": (jitter, 0, int(0.11 * size - 0.75)),  # the companion, the smallest object, must keep a pixel
            "noise": (noise, 0, 255),
            "per_patient": (per_patient, 1, 100_000),
            "seed": (seed, 0, 2**63),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise DataError(f"shapes: {name} must be from {low} to {high}, found {value}")
        masks = max(readers or 0, modes * (2 if classes > 2 else 1) * (2 * jitter + 1))
        if masks * size**2 > _PIXELS_OF_MASKS:
            found = f"{masks:,} masks of {size}×{size}"
            raise DataError(f"shapes: a case must have at most {_PIXELS_OF_MASKS:,} pixels of masks, found {found}")
        self.size, self.modes, self.readers, self.jitter, self.noise = size, modes, readers, jitter, float(noise)
        self.per_patient, self.seed = per_patient, seed
        self.title = "shapes"
        self.classes = ("ground", "shape") if classes == 2 else ("ground", *(f"hue {c}" for c in range(1, classes)))
        self.evaluated = tuple(range(1, classes))
        self.channels = 1 if classes == 2 else 3
        self.units = byte_units(np.dtype(np.uint8), self.channels)
        self.intensity = Intensity.for_dtype(np.dtype(np.uint8))
        self.names = [f"shape-{i:05d}" for i in range(count)]
        self.patients = [f"patient-{i // per_patient:03d}" for i in range(count)]

    def __getitem__(self, index: int) -> Case:
        index = range(len(self))[index]
        scene, outcomes = self.scene(index), self.outcomes(index)
        masks, weights = self._masks(scene, outcomes), np.array([outcome.probability for outcome in outcomes])
        names = [f"{o.mode}-{o.label}{o.offset:+d}" for o in outcomes]
        if self.readers is not None:
            drawn = self._random(_READERS, index).random(self.readers)  # one number each: 4 readers are the first of 8
            masks = masks[np.searchsorted(weights[:-1].cumsum(), drawn, side="right")]
            names = weights = None
        image = self._draw(scene, index)
        return Case.of(
            image, masks, name=self.names[index], patient=self.patients[index], readers=names, weights=weights
        )

    # -- the distribution of an image -------------------------------------------------------------------------------

    def scene(self, index: int) -> Scene:
        """What image ``index`` shows, without its texture and noise."""
        index = range(len(self))[index]
        rng, S, C = self._random(_SCENE, index), float(self.size), len(self.classes)
        radius, width, size = (S * rng.uniform([0.15, 0.05, 0.11], [0.21, 0.07, 0.13])).tolist()
        towards, angle = rng.uniform(0, 2 * np.pi, 2).tolist()
        y, x = ((S - 1) / 2 + S * rng.uniform(-0.05, 0.05, 2)).tolist()  # the middle of all three together
        halo, companion, paleness, mix = rng.random(4).tolist()
        return Scene(
            corners=int(self._random(_BODY, index // self.per_patient).choice([0, 0, 4, 5, 6])),
            centre=(y - size * math.sin(towards), x - size * math.cos(towards)),
            radius=radius,
            angle=angle,
            aspect=float(rng.uniform(0.75, 1)),
            width=width,
            towards=towards,
            size=size,
            halo=halo,
            companion=companion,
            paleness=paleness,
            body_class=int(rng.integers(1, C - 1)) if C > 2 else 1,
            mix=mix if C > 2 else 0.0,
            companion_class=int(rng.integers(1, C)),
        )

    def outcomes(self, index: int) -> list[Outcome]:
        """All possible masks of image ``index`` with exact probabilities, in the order of the distribution.

        >>> Shapes(modes=1).outcomes(0)[0]
        Outcome(mode='body', label=1, offset=-1, probability=0.25)
        """
        scene, many = self.scene(index), len(self.classes) > 2
        propensity = dict(body=1.0, halo=2 * scene.halo, companion=2 * scene.companion, missed=2 * scene.paleness)
        propensity = dict(list(propensity.items())[: self.modes])
        J = self.jitter
        shifts = {j - J: math.comb(2 * J, j) / 4**J for j in range(2 * J + 1)}
        flips = {scene.body_class: 1 - scene.mix, scene.body_class + 1: scene.mix} if many else {1: 1.0}
        return [
            Outcome(mode, label, offset, a / math.fsum(propensity.values()) * flip * shift)
            for mode, a in propensity.items()
            for label, flip in (flips if mode != "missed" else {0: 1.0}).items()
            for offset, shift in (shifts if mode != "missed" or many else {0: 1.0}).items()
        ]

    def distribution(self, index: int) -> MaskDistribution:
        """The exact distribution of masks of image ``index``: every outcome, weighted; ``[1, K, H, W]``.

        In images of few pixels two outcomes may be the same mask; its probability is then the sum.
        """
        outcomes = self.outcomes(index)
        weights = torch.tensor([[outcome.probability for outcome in outcomes]], dtype=torch.float64)
        return MaskDistribution(torch.from_numpy(self._masks(self.scene(index), outcomes))[None], weights)

    # -- what a perfect model scores -----------------------------------------------------------------------------

    def true_ged(
        self, index: int, samples: int | None = None, annotations: Masks | None = None, protocol: str = "mose"
    ) -> float:
        """GED that independent draws from the exact distribution μ score on average against ``annotations`` ν:

            E[GED] = GED(μ, ν) + E[d(S, S′)] / samples,     S, S′ ~ μ.

        Args:
            samples: how many draws; ``None`` is infinitely many, which is also what the unbiased GED of any number is
                on average.
            annotations: ``None`` is μ itself, and GED(μ, μ) = 0.
        """
        truth, annotations = self._pair(index, annotations)
        limit = float(ged(truth, annotations, self.evaluated, protocol))
        if samples is None:
            return limit
        return limit + float(sample_diversity(truth, self.evaluated, protocol)) / _positive("samples", samples)

    def true_matched_iou(
        self,
        index: int,
        samples: int | None = None,
        annotations: Masks | None = None,
        protocol: str = "mose",
        draws: int = 256,
        seed: int = 0,
    ) -> Estimate:
        """Matched IoU that ``samples`` independent draws from the exact distribution score on average.

        There are C(samples + K − 1, samples) ways to draw from K masks. If these are at most ``draws``, all are
        evaluated and the value is exact; otherwise that many are drawn at random, and the value has an error.

        Args:
            samples: ``None`` is infinitely many.
            annotations: ``None`` is the exact distribution.
        """
        truth, annotations = self._pair(index, annotations)
        iou = self._iou(truth, annotations, protocol)
        limit = float(matched_iou(truth, annotations, self.evaluated, protocol))
        if samples is None or math.isnan(limit):  # nan: a pair of masks has no IoU in this protocol
            return Estimate(limit, 0.0)
        weights, K = truth.mass[0].numpy(), truth.count
        if whole := math.comb(_positive("samples", samples) + K - 1, samples) <= _positive("draws", draws):
            chances, counts = zip(*_every_draw(weights.tolist(), samples), strict=True)
        else:
            counts = np.random.default_rng(seed).multinomial(samples, weights / weights.sum(), draws)
            chances = np.full(draws, 1 / draws)
        u = torch.tensor(np.array(counts)) / samples
        iou = iou.expand(len(u), -1, -1)
        plan = optimal_plan(1 - iou, u, exact(annotations.mass).expand(len(u), -1))
        values = torch.where(plan > 0, plan * iou, 0).sum((1, 2)).numpy()
        return Estimate(float(values @ np.array(chances)), 0.0 if whole else float(values.std() / math.sqrt(draws - 1)))

    def best_single(self, index: int, annotations: Masks | None = None, protocol: str = "mose") -> Single:
        """The mask of the distribution that scores best alone: the limit of a model that predicts one mask.

            GED(δ_S, ν) = 2 E[d(S, Y)] − E[d(Y, Y′)],     matched IoU = 1 − E[d(S, Y)],     Y, Y′ ~ ν,

        so that the same mask is best at both.
        """
        truth, annotations = self._pair(index, annotations)
        iou = self._iou(truth, annotations, protocol)[0]
        mass = exact(annotations.mass)[0]
        expected = torch.where(mass > 0, mass * iou, 0).sum(1)  # IoU of each mask with an annotation
        best = int(expected.argmax())
        spread = float(sample_diversity(annotations, self.evaluated, protocol))
        return Single(best, 2 * (1 - float(expected[best])) - spread, float(expected[best]))

    def _pair(self, index: int, annotations: Masks | None) -> tuple[MaskDistribution, MaskDistribution]:
        truth = self.distribution(index)
        return truth, truth if annotations is None else as_masks(annotations)

    def _iou(self, truth: MaskDistribution, annotations: MaskDistribution, protocol: str) -> torch.Tensor:
        known = [name for name, rule in PROTOCOLS.items() if rule.matching == "transport"]  # the others have no weights
        if protocol not in known:
            raise ValueError(f"protocol must be one of {', '.join(known)}, found {protocol!r}")
        return pairwise_iou(truth, annotations, self.evaluated, PROTOCOLS[protocol].absent(self.evaluated))

    # -- drawing -------------------------------------------------------------------------------------------------

    def _random(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream, number])

    def _masks(self, scene: Scene, outcomes: list[Outcome]) -> np.ndarray:
        body, beside = scene.distances(self.size)
        masks = np.zeros((len(outcomes), *body.shape), np.uint8)
        for k, (mode, label, offset, _) in enumerate(outcomes):
            if mode == "companion" or (mode == "missed" and len(self.classes) > 2):
                masks[k, beside <= offset] = scene.companion_class
            if mode != "missed":
                masks[k, body <= offset + scene.width * (mode == "halo")] = label
        return masks

    def _draw(self, scene: Scene, index: int) -> np.ndarray:
        body, beside = scene.distances(self.size)
        layers = (
            (body - scene.width, 0.15 + 0.55 * scene.halo, self._colour(scene.body_class + scene.mix)),
            (beside, 0.3 + 0.7 * scene.companion, self._colour(scene.companion_class)),
            (body, 1.0, self._colour(scene.body_class + scene.mix)),
        )
        paint = np.zeros((self.channels, self.size, self.size))
        for distance, brightness, colour in layers:
            cover = np.clip(0.5 - distance, 0, 1)  # a pixel that the edge runs through is covered in part
            paint = paint * (1 - cover) + cover * brightness * colour[:, None, None]
        noise = self.noise * self._random(_PIXELS, index).standard_normal(paint.shape)
        values = self._ground(index) + 130 * (1 - 0.6 * scene.paleness) * paint + noise
        return values.round().clip(0, 255).astype(np.uint8)

    def _ground(self, index: int) -> np.ndarray:
        """A grey level and a few slow waves, the same in all images of a patient."""
        rng = self._random(_GROUND, index // self.per_patient)
        level, waves = rng.uniform(40, 70), rng.uniform(-3, 3, (3, 2, 1, 1))
        phases = rng.uniform(0, 2 * np.pi, (3, 1, 1))
        places = np.mgrid[: self.size, : self.size] / self.size
        return level + 5 * np.cos(2 * np.pi * (waves * places).sum(1) + phases).sum(0)

    def _colour(self, label: float) -> np.ndarray:
        """``[channels]``: white in grey images; else class 1 is red, the last one blue, the others evenly between."""
        if self.channels == 1:
            return np.ones(1)
        return np.array(colorsys.hsv_to_rgb((label - 1) / (len(self.classes) - 2) * 2 / 3, 0.85, 1))

    # -- digests: of the settings that make a picture, so that none has to be drawn ------------------------------------

    def image_digest(self, index: int, case: Case | None = None) -> str:
        """A hash of what makes the image; readers, modes and jitter do not."""
        made = (len(self.classes), self.size, self.noise, self.per_patient, self.seed, range(len(self))[index])
        return digest("shapes", _VERSION, *map(str, made))

    def digest(self, index: int, case: Case | None = None) -> str:
        """A hash of what makes the case."""
        return digest(self.image_digest(index), *map(str, (self.modes, self.readers, self.jitter)))

    def state(self) -> str:
        """A hash of all settings."""
        return digest(self.digest(0), str(len(self)))


def _every_draw(weights: list[float], samples: int) -> Iterator[tuple[float, np.ndarray]]:
    """Each way to draw ``samples`` times, as its probability and how often each mask was drawn: the multinomial."""
    for drawn in combinations_with_replacement(range(len(weights)), samples):
        counts = np.bincount(drawn, minlength=len(weights))
        orders = math.factorial(samples) // math.prod(math.factorial(int(n)) for n in counts)
        yield orders * math.prod(weights[k] for k in drawn), counts


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{name} must be at least 1, found {number}")
    return number
