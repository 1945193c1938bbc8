"""Whether a person must look at an image: how much two of its masks are expected to differ, and how unlike it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.decisions.looking import area_disagreement, expected_disagreement
from ambiseg.familiarity import Familiarity, fits, saved_familiarity, statistics_or_none
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Noise, Predictive
from ambiseg.nn.statistics import watching
from ambiseg.prediction.result import Look
from ambiseg.runs import Run, TrainedModel, Which

P = TypeVar("P", bound=Predictive)
_MOST = 0.9  # of a volume's slices that must be unlike those of the training: some show air alone


class Lookout:
    """What a run knows of its training images, beside a model that predicts.

    Args:
        model: with the network whose maps are looked at.
        run: that it is from, with ``look.npz`` where ``ambiseg look`` has been called; ``None``: from memory.
    """

    def __init__(self, model: TrainedModel, run: Run | None) -> None:
        self.network, self.evaluated = model.method, model.card.evaluated
        which: Which = "last" if model.which == "last" else "best"
        self.familiarity = None if run is None else saved_familiarity(run, which)
        if self.familiarity is not None and not fits(self.familiarity, model.method, model.card.channels):
            raise DataError(f"{model.run}: expected look.npz of this network, found another; call ambiseg look again")

    def predict(self, images: Tensor, work: Callable[[], P]) -> tuple[P, list[float | None]]:
        """What ``work`` makes of prepared images, and how far each is from the training images, by the same maps."""
        familiarity = self.familiarity
        if familiarity is None:
            return work(), [None] * len(images)
        with watching(self.network, familiarity.layers) as seen:
            made = work()
        found = statistics_or_none(familiarity, images, seen)
        return made, [None] * len(images) if found is None else familiarity.distance(found).tolist()

    def look(
        self, labels: Tensor, noise: Noise, marginal: Tensor, weights: Tensor | None, away: Mapping[int, float | None]
    ) -> Look:
        """Whether a person must look, from all draws ``[N, *spatial]`` of an image and how far each slice is away."""
        strata = None if weights is None or noise.weights is None else weights.shape[1]
        drawn = MaskDistribution(labels[None], None if strata is None else noise.mass[:1].detach().cpu())
        known = [one for one in away.values() if one is not None]
        return looked(drawn, strata, marginal[None], self.evaluated, self.familiarity, known, len(away) == 1)


def looked(
    draws: MaskDistribution,
    strata: int | None,
    marginal: Tensor,
    evaluated: Sequence[int],
    familiarity: Familiarity | None,
    distances: Sequence[float],
    single: bool = True,
) -> Look:
    """What is said of one image or volume.

    Args:
        draws: all masks that were drawn, those of one stratum side by side.
        strata: K of the compact form; ``None`` for equally likely draws.
        marginal: ``[1, C, *spatial]``.
        familiarity: what images of the training are like, where the run knows it.
        distances: of slices from them.
        single: an image; the scores of volumes are not those of single images, and not compared with them.
    """
    if familiarity is not None and familiarity.score == "areas":
        whole = torch.zeros(1, 1, *draws.spatial, dtype=torch.uint8)
        score = float(area_disagreement(MaskDistribution(whole, marginal=marginal), evaluated))
    else:
        score = float(expected_disagreement(draws, evaluated, strata=strata))
    if familiarity is None:
        return Look(score)
    away = sorted(distances)[int((1 - _MOST) * len(distances))] if distances else None  # what nine of ten exceed
    unlike = None if away is None else familiarity.unlike(away)
    is_unlike = away is not None and familiarity.is_unlike(away)
    if not single:
        return Look(score, None, unlike, is_unlike, is_unlike)
    return Look(score, familiarity.unsure(score), unlike, is_unlike, is_unlike or familiarity.is_unsure(score))


def unlike_note(look: Look) -> tuple[str, ...]:
    """The warning of an image that is unlike those of the training."""
    if not look.is_unlike or look.unlike is None:
        return ()
    share = f"{100 * look.unlike:.0f} %" if look.unlike < 1 else "all"
    found = f"its features are farther from those of the training images than in {share} of the validation images"
    return (f"{found}; its masks may mean nothing",)


def verdict(look: Look | None) -> tuple[str, str]:
    """A word for the style of a page, and the sentence.

    >>> verdict(Look(0.4))[1]
    'Whether this image needs a second look is not known'
    """
    if look is None or look.needed is None:
        return "unknown", "Whether this image needs a second look is not known"
    if look.needed:
        return "needed", "Look at this image yourself"
    return "calm", "Nothing suggests that this image needs a second look"


def reasons(look: Look | None) -> Iterator[str]:
    """Sentences for a page: what the verdict rests on."""
    if look is None:
        return
    if look.is_unlike:
        yield "It is unlike the images that the model has learned from, so everything below may be wrong."
    if look.unsure is not None:
        compared = f"than those of {round(100 * look.unsure)} of 100 images that the model was checked on"
        yield f"Its readings are expected to differ more {compared}."
    if look.needed is None:
        yield "The model has not been prepared for this question: ambiseg look does that."
