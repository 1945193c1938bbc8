"""From one image or one volume to its weighted masks, with any method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.settings import plain_names
from ambiseg.decisions.calibration import Calibration
from ambiseg.decisions.compaction import compact
from ambiseg.io.formats import stem_of
from ambiseg.io.source import Source
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Method, Noise, Predictive, Stratified, evaluation
from ambiseg.methods.predictive import part_of
from ambiseg.nn.windows import plan
from ambiseg.prediction.drawing import draw, noise_of
from ambiseg.prediction.guarantees import calibration_of, guaranteed, not_guaranteed
from ambiseg.prediction.looking import unlike_note
from ambiseg.prediction.memory import check_memory, fits
from ambiseg.prediction.merging import heaviest_first, ordered
from ambiseg.prediction.network import Network
from ambiseg.prediction.result import Draw, Kept, Options, Prediction, Strata
from ambiseg.prediction.slices import Progress, Slices
from ambiseg.runs import Card, Run, TrainedModel, Which, open_run

_AT_ONCE = 1 << 24  # numbers that are computed with at a time


class Predictor(Network):
    """A trained model, ready for images.

    Args:
        run, which, device, card: see :func:`ambiseg.predict`.
        options: see :class:`Options`.
        calibration: what ``ambiseg calibrate`` made of these weights, or its file; None: that of the run, if it has
            one; False: none.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Run | TrainedModel | Method,
        options: Options | None = None,
        which: Which = "best",
        device: torch.device | str | None = None,
        card: Card | None = None,
        calibration: Calibration | str | os.PathLike[str] | Literal[False] | None = None,
    ) -> None:
        options = options or Options()
        if card is not None and not isinstance(run, Method):
            raise ConfigError("card: expected None beside a run or a trained model, which have their own, found one")
        if isinstance(run, Method):
            run = TrainedModel(run, card or _plain_card(run))
        self.calibration, opened = None, None
        if isinstance(run, TrainedModel):
            if calibration is not None and calibration is not False:
                raise ConfigError("calibration: expected None beside a model from memory, found one; give its run")
            model, self.run = run if device is None else run.to(_device(device)), run.run
        else:
            opened = run if isinstance(run, Run) else open_run(run)
            if calibration is not False:
                self.calibration = calibration_of(opened, which, calibration)
            model = opened.model(which, _device("cpu" if device is None else device))
            self.run = str(opened.folder) if isinstance(run, Run) else os.fspath(run)
        super().__init__(model, options, opened)

    @torch.no_grad()
    def __call__(
        self, image: str | os.PathLike[str] | Source, name: str | None = None, progress: Progress | None = None
    ) -> Prediction:
        """The masks of an image, or of a volume slice by slice.

            weights = 1/D Σ_d weights(slice d),     noise ~ predictive(weights),     mask(slice d) = render(noise)

        The noise is drawn once, so all slices of a mask belong to the same draw.

        Args:
            image: a file, a folder of DICOM slices, or what :func:`~ambiseg.prediction.inputs.array_source` makes.
            name: None is that of the file.
            progress: called with the number of images or windows that went through the network, and how many will.
        """
        source = image if isinstance(image, Source) else self.open(Path(image))
        windows = plan(source.size, self.method.multiple, self.options.window, self.options.overlap)
        if self.method.incoherent and (windows or source.slices > 1):
            found = f"{source.form} in windows (window=0 takes it whole)" if windows else source.form
            raise DataError(f"{source.path}: expected one image taken whole, found {found}: {self.method.incoherent}")
        with evaluation(self.method), fits(source):
            check_memory(self, source)
            return self._predict(Slices(self, source, windows, progress), name or stem_of(source.path))

    @torch.no_grad()
    def together(self, sources: Sequence[Source], names: Sequence[str]) -> list[Prediction]:
        """The masks of several images of one size and one slice, which go through the network as one batch.

        Each is what a call for it alone gives, up to rounding: the noise of every image starts from the same seed.

        >>> import numpy as np
        >>> from ambiseg.prediction.inputs import array_source
        >>> images = [array_source(np.full((1, 32, 32), value), "a") for value in (-500, 40)]
        >>> [found.name for found in Predictor("demo").together(images, ["a", "b"])]
        ['a', 'b']
        """
        first = sources[0]
        for source in sources:
            if source.slices != 1 or source.size != first.size:
                raise DataError(f"{source.path}: expected one image of {first.form} as the others, found {source.form}")
        if plan(first.size, self.method.multiple, self.options.window, self.options.overlap):
            raise DataError(f"{first.path}: expected images that are taken whole, found {first.form} in windows")
        with evaluation(self.method), fits(first):
            for source in sources:
                check_memory(self, source)
            slices = [Slices(self, source, None, None) for source in sources]
            images = torch.cat([one.image(0) for one in slices])
            batch, away = self.lookout.predict(images, lambda: self.method.predict(images))
            for index, one in enumerate(slices):
                one.ready, one.away[0] = part_of(batch, index, len(slices)), away[index]
            return [self._predict(one, name) for one, name in zip(slices, names, strict=True)]

    def draw(self, predictive: Predictive) -> tuple[MaskDistribution, Noise]:
        """The masks of an image as the options ask, with their soft marginal, and the noise that they come from."""
        return draw(predictive, self.options, self.device)

    def _predict(self, slices: Slices, name: str) -> Prediction:
        first, weights = slices.weighted()
        noise = noise_of(first, self.options, self.device)
        centre = first.centre_noise() if isinstance(first, Stratified) else None
        slices.expect(first.passes)
        del first  # of a large volume, its features are computed again
        labels = marginal = centres = entropy = torch.empty(0)
        bounds = None
        for k in range(slices.source.slices):
            predictive = slices.take(k)
            if centre is None:
                drawn = predictive.render(noise)
            else:
                drawn, typical = predictive.render_with(noise, centre)
                centres = slices.put(centres, k, typical[0])
                del typical
            if slices.source.slices == 1:
                bounds = guaranteed(self.calibration, predictive, drawn, self.options, self.device)
            del predictive
            soft = (drawn.marginal_probs(self.method.classes) if drawn.marginal is None else drawn.marginal)[0]
            labels, marginal = slices.put(labels, k, drawn.labels[0]), slices.put(marginal, k, soft)
            entropy = slices.put(entropy, k, _entropy(soft))
            del drawn, soft
        mass = noise.mass[0].tolist()
        look = self.lookout.look(labels, noise, marginal, weights, slices.away)
        order, merged, groups = heaviest_first(labels, mass, self.options.merge)
        labels = ordered(labels, order)
        masks = MaskDistribution(labels[None], torch.tensor([merged], dtype=torch.float32))
        masks, groups, kept = self._kept(masks, groups)
        masks = replace(masks, marginal=marginal[None])
        drawn_from = [None] * noise.count if noise.strata is None else noise.strata[0].tolist()
        draws = tuple(map(Draw, drawn_from, mass, groups))
        word = self.method.stratum or "stratum"
        strata = None if weights is None else Strata(word, weights.mean(0), centres, weights)
        made_with = self.card.classes, slices.source, self.run, self.which, self.options
        notes = (
            *self.notes(slices.source, list(slices.seen.values())),
            *not_guaranteed(self.calibration, slices.source, self.options),
            *unlike_note(look),
        )
        return Prediction(name, masks, draws, strata, entropy, *made_with, slices.tiles, notes, kept, look, bounds)

    def _kept(self, masks: MaskDistribution, groups: list[int]) -> tuple[MaskDistribution, list[int], Kept | None]:
        """The masks that ``keep`` leaves, and for each draw which of them it is or is nearest to."""
        keep = self.options.keep
        if keep is None:
            return masks, groups, None
        found = compact(masks, keep, classes=self.card.evaluated)
        some = found.masks.mass[0] > 0
        left = MaskDistribution(found.masks.labels[:, some], found.masks.mass[:, some])
        nearest = found.nearest[0].tolist()
        return left, [nearest[group] for group in groups], Kept(keep, len(groups), float(found.loss))


def _plain_card(method: Method) -> Card:
    """Of a method from memory, whose input is prepared already: any number of channels, until the first image."""
    names = plain_names(method.classes)
    return Card(names, tuple(range(1, len(names))), 0, Intensity(), "memory", method.stratum)


def _entropy(soft: Tensor) -> Tensor:
    """Of class probabilities ``[C, H, W]``, in nats: ``[H, W]``, some rows at a time."""
    rows = max(1, _AT_ONCE // soft[:, 0].numel())
    return torch.cat([torch.special.entr(part.clamp_min(0)).sum(0) for part in soft.split(rows, 1)])


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
        raise ConfigError(f"device: expected a device of this machine, such as cpu, found {device!s:.40}") from None
    return found
