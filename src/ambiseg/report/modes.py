"""The section of known modes: how often each is predicted, and each expert beside the mode that it draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch

from ambiseg.data.case import Flip
from ambiseg.data.loader import Batch
from ambiseg.evaluation.modes import iou_with_modes
from ambiseg.methods.base import Method
from ambiseg.methods.mose.model import MoSEPredictive
from ambiseg.report import figures, pictures
from ambiseg.report.figures import Made, make
from ambiseg.report.results import Modes, Results

_SHOWN = 16  # pairs of a mode and an expert, the most likely modes first


@dataclass(frozen=True, eq=False)
class Pair:
    """A mode of one image and the expert that is matched with it."""

    flips: str  # one character a flip: 1 happened, 0 did not, - makes no difference here
    probability: float
    truth: np.ndarray  # [H, W]
    expert: int  # from 1
    weight: float
    mask: np.ndarray  # [H, W]
    iou: float


@dataclass(frozen=True, eq=False)
class Paired:
    """One image's modes beside its experts, and what is left over."""

    pairs: Sequence[Pair]
    modes: int
    spare: tuple[int, float]  # experts without a mode of their own, and their weight
    valid: np.ndarray | None


@torch.no_grad()
def pair_up(
    model: Method, batch: Batch, flips: Sequence[Flip], evaluated: Sequence[int], protocol: str, seed: int
) -> Paired | None:
    """One sample of every expert, matched one to one with the modes of the image so that their IoU is largest."""
    from scipy.optimize import linear_sum_assignment

    predicted = model.predict(batch.images)
    if not isinstance(predicted, MoSEPredictive) or not flips:
        return None
    drawn = predicted.compact(1, torch.Generator().manual_seed(seed))
    modes, iou = iou_with_modes(drawn, batch.annotations.regions, flips, evaluated, protocol)
    weights = predicted.expert_weights[0].double().numpy()
    size = batch.annotations.spatial
    valid = None if batch.annotations.valid is None else batch.annotations.valid[0].numpy()
    index = np.minimum(batch.annotations.regions.index[0].numpy(), len(modes.table) - 1).reshape(tuple(size))
    experts, columns = linear_sum_assignment(iou, maximize=True)
    pairs = [
        Pair(
            modes.names[d],
            float(modes.weights[d]),
            modes.table[index, d],
            int(k) + 1,
            float(weights[k]),
            drawn.labels[0, k].numpy(),
            float(iou[k, d]),
        )
        for k, d in zip(experts, columns, strict=True)
    ]
    pairs.sort(key=lambda pair: -pair.probability)
    left = max(0.0, 1 - sum(pair.weight for pair in pairs))
    return Paired(pairs, len(modes.names), (len(weights) - len(pairs), left), valid)


# -- the section ------------------------------------------------------------------------------------------------------


def figures_of(modes: Modes, folder: Path | None) -> list[Made]:
    """The figures that a page has of known modes."""
    text = "Share of predictions of each mode (dots) against its probability in the annotations (bars)."
    if all(flip.to for flip in modes.flips) and modes.flips:
        text += f" One digit a class: {', '.join(flip.name for flip in modes.flips)}; 1 is flipped."
    plots = [make("modes", "Probabilities of the modes", text, figures.mode_ratio(modes), folder, figures.THIRD)]
    if modes.flips:
        text = "How often the pixels of each class are flipped: in the annotations (rings) and predicted (dots)."
        plots.append(make("flips", "Class flips", text, figures.class_flips(modes), folder, figures.THIRD))
    if modes.experts:
        text = (
            "Mean IoU of each expert's masks with each mode: an expert that has found a mode is bright in one column."
        )
        if modes.matching:
            text += " Modes are in the order of their probability, and each expert is in the row of its mode."
        plots.append(
            make("mode-experts", "Experts and modes", text, figures.mode_experts(modes), folder, figures.THIRD)
        )
    return plots


def in_words(modes: Modes) -> str:
    """What was found, as one paragraph."""
    if modes.found is None:
        return ""
    text = f"{modes.found} of {len(modes.names)} modes are what some expert draws most often."
    if math.isfinite(modes.correlation):
        text += f" Weights of the experts follow the probabilities of their modes with r = {modes.correlation:.2f}"
        text += f", and {100 * modes.distance:.0f} % of the predicted probability is with the wrong modes."
    return f'<p class="soft">{escape(text.replace("-", "−"))}</p>'


def pairs(paired: Mapping[str, Paired], results: Results) -> str:
    """Each image's most likely modes, each beside the expert that is matched with it."""
    colours = pictures.class_colours(results.classes, results.evaluated, results.flipped)
    flips = results.modes.flips if results.modes else ()
    parts = []
    for name, found in paired.items():
        tiles = "".join(
            _pair(pair, name, found.valid, colours, [flip.to for flip in flips]) for pair in found.pairs[:_SHOWN]
        )
        hidden = len(found.pairs) - min(len(found.pairs), _SHOWN)
        rest = f"; {hidden} less likely pairs are not shown" if hidden > 0 else ""
        spare, weight = found.spare
        over = f"; {spare} experts have no mode of their own and {100 * weight:.1f} % of the weight" if spare else ""
        parts.append(
            f'<h3>Experts beside their modes: {escape(name)}</h3><p class="soft">Left the mode with its probability, '
            f"right one sample of the expert that is matched with it and the expert's weight, "
            f'{found.modes} modes{rest}{over}.</p><div class="modepairs">{tiles}</div>'
        )
    return "".join(parts)


def _pair(pair: Pair, case: str, valid: np.ndarray | None, colours: Sequence[str], names: Sequence[str]) -> str:
    happened = [name for name, bit in zip(names, pair.flips, strict=False) if bit == "1"]
    said = ", ".join(happened) or "nothing flipped"
    tiles = "".join(
        f'<figure class="tile"><img src="{pictures.data_uri(picture)}" alt="{escape(alt)}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for picture, alt, caption in (
            (
                pictures.mask(pair.truth, colours, valid),
                f"{case}: mode {pair.flips}, probability {100 * pair.probability:.1f} %",
                f"<b>{100 * pair.probability:.1f} %</b> mode",
            ),
            (
                pictures.mask(pair.mask, colours),
                f"{case}: expert {pair.expert}, weight {100 * pair.weight:.1f} %, matched with mode {pair.flips}",
                f"<b>{100 * pair.weight:.1f} %</b> expert {pair.expert}",
            ),
        )
    )
    return f'<div class="modepair"><p>{escape(said)} <span>IoU {pair.iou:.2f}</span></p><div>{tiles}</div></div>'
