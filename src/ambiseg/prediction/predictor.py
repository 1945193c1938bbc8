"""From one image or one volume to its weighted masks, with any method."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.limits import OPTION, max_pixels
from ambiseg._util.memory import out_of_memory
from ambiseg._util.text import shape_text
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.settings import plain_names
from ambiseg.data.values import thinned
from ambiseg.decisions.calibration import Calibration, Guaranteed, apply
from ambiseg.decisions.compaction import compact
from ambiseg.io.formats import stem_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.masks import MaskDistribution
from ambiseg.methods.base import Method, Noise, Predictive, Stratified, evaluation
from ambiseg.methods.drawing import draw_noise, per_stratum
from ambiseg.methods.predictive import part_of
from ambiseg.methods.symmetries import symmetric
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.nn.windows import Windows, plan
from ambiseg.prediction.guarantees import calibration_of, not_guaranteed
from ambiseg.prediction.inputs import read_pixels, with_extra
from ambiseg.prediction.looking import Lookout, unlike_note
from ambiseg.prediction.merging import heaviest_first, ordered
from ambiseg.prediction.result import Draw, Kept, Options, Prediction, Strata
from ambiseg.runs import Card, Run, TrainedModel, Which, open_run

_KEPT = 1 << 30  # bytes of features of a volume's slices that are kept between the two passes over them
_LARGER = 1.1  # sides by which an image may exceed those that the model was validated on
_BYTES = 60  # of memory for each pixel of the limit, 4 GB: what one prediction takes at most
_SMALL, _ALWAYS = 1 << 22, 600_000_000  # pixels that always fit; bytes that every prediction takes
_AT_ONCE = 1 << 24  # numbers that are computed with at a time
_PER_STRATUM, _SAMPLES, _TO_KEEP = 4, 16, 100  # masks that are drawn unless the options say how many

Progress = Callable[[int, int], None]


class Predictor:
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
        self.options = options or Options()
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
        self.method = symmetric(model.method, self.options.symmetries)
        self.card, self.which, self.device = model.card, model.which, model.device
        self.lookout = Lookout(model, opened)
        if self.options.per_stratum is not None and not self.method.stratum:
            message = f"expected None for {type(self.method).__name__}, which has no strata"
            raise ConfigError(f"per_stratum: {message}, found {self.options.per_stratum}; set samples instead")
        if self.options.extra is not None and self.card.extra is None:
            raise ConfigError("extra: expected None for a model that takes no further channels, found a folder")
        if self.options.assume_window is not None and self.card.extra is not None:
            raise ConfigError("assume_window: expected None for a model with further channels, found a window")
        # Slices are cut as in training: along another axis they look different.
        reading = self.card.reading
        axis = next((axis for axis in (self.options.axis, reading.axis) if axis is not None), 2)
        self.reading = ReadOptions(axes=self.options.axes or reading.axes, axis=axis)
        self.convert = self.options.convert or reading.convert

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
        source = image if isinstance(image, Source) else self._with_extra(open_source(Path(image), self.reading))
        windows = plan(source.size, self.method.multiple, self.options.window, self.options.overlap)
        if self.method.incoherent and (windows or source.slices > 1):
            found = f"{source.form} in windows (window=0 takes it whole)" if windows else source.form
            raise DataError(f"{source.path}: expected one image taken whole, found {found}: {self.method.incoherent}")
        with evaluation(self.method), _fits(source):
            self._check_memory(source)
            return self._predict(_Slices(self, source, windows, progress), name or stem_of(source.path))

    @torch.no_grad()
    def together(self, sources: Sequence[Source], names: Sequence[str]) -> list[Prediction]:
        """The masks of several images of one size and one slice, which go through the network as one batch.

        Each is what a call for it alone gives, up to rounding: the noise of every image starts from the same seed.

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
        with evaluation(self.method), _fits(first):
            for source in sources:
                self._check_memory(source)
            slices = [_Slices(self, source, None, None) for source in sources]
            images = torch.cat([one.image(0) for one in slices])
            batch, away = self.lookout.predict(images, lambda: self.method.predict(images))
            for index, one in enumerate(slices):
                one.ready, one.away[0] = part_of(batch, index, len(slices)), away[index]
            return [self._predict(one, name) for one, name in zip(slices, names, strict=True)]

    def _check_memory(self, source: Source) -> None:
        """A ``DataError`` for an image or a volume whose masks would take too much, before anything is computed."""
        area = math.prod(source.size)
        pixels, classes, options = source.slices * area, self.method.classes, self.options
        if pixels <= _SMALL:
            return
        channels, most = self.card.channels or source.channels, _BYTES * max_pixels()
        strata = self._strata(channels)
        by_strata = strata > 0 and options.samples is None
        asked = self._asked(strata if by_strata else None)
        each = pixels * torch.empty(0, dtype=label_dtype(classes)).element_size()  # a mask
        fixed = _ALWAYS + source.nbytes + 4 * channels * area + 4 * (classes + 1) * pixels + each * strata
        times = strata if by_strata else 1
        takes, fits = fixed + each * asked * times, (most - fixed) // each  # how many masks
        if takes <= most:
            return
        found = f"{source.form} with {asked * times} masks, which take about {takes / 1e9:.1f} GB"
        fewer = f"per_stratum={fits // times}" if by_strata and fits >= times else f"samples={fits}"
        hint = f"{fewer} fits" if fits > 0 else "cut it into parts"
        hint = f"{hint}, or allow more: {OPTION} {-(-takes // _BYTES)}"
        raise DataError(f"{source.path}: expected masks that fit into {most / 1e9:.1f} GB, found {found}; {hint}")

    def _asked(self, strata: int | None, options: Options | None = None) -> int:
        """Masks to draw: in all, or from each of so many strata."""
        options = options or self.options
        if strata is None:
            return options.samples or (_SAMPLES if options.keep is None else _TO_KEEP)
        return options.per_stratum or (_PER_STRATUM if options.keep is None else per_stratum(_TO_KEEP, strata))

    def _strata(self, channels: int) -> int:
        """K, which is known when something is predicted, however small; 0 for methods without strata."""
        if not self.method.stratum:
            return 0
        side = max(2, self.method.multiple)
        predictive = self.method.predict(torch.zeros(1, channels, side, side, device=self.device))
        return predictive.weights.shape[1] if isinstance(predictive, Stratified) else 0

    def _with_extra(self, source: Source) -> Source:
        """A file's image with the channels that the model needs beside it."""
        extra, card = self.card.extra, self.card
        if extra is None or source.channels == card.channels:
            return source
        if self.options.extra is None:
            own = card.channels - extra.classes
            needs = f"{own} of the image and {extra.classes} of another model's prediction, whose folder extra names"
            raise DataError(f"{source.path}: expected {card.channels} channels, {needs}, found {source.channels}")
        return with_extra(source, Path(self.options.extra), extra)

    def notes(self, source: Source, slices: Sequence[np.ndarray]) -> tuple[str, ...]:
        """What is odd about an image for this model: values far from those it was trained on, and its size.

        Args:
            slices: its pixels ``[C, H, W]``, as the model takes them.
        """
        card, found = self.card, []
        if card.values is None and _is_blank(card.intensity(torch.from_numpy(np.stack(slices)))):
            found.append("its values become one number under the model's intensity: it is blank, or in other units")
        if card.values is not None and (odd := card.values.problem(*slices)):
            units = f" ({card.units})" if card.units else ""
            note = f"{odd}{units}; its masks may mean nothing"
            if source.dtype in (np.uint8, np.uint16) and self.options.assume_window is None and "all" not in odd:
                note += "; if it is a picture for the screen, give its window: --assume-window LOW HIGH"
            found.append(note)
        if card.size is not None and math.prod(source.size) > _LARGER**2 * math.prod(card.size):
            size = f"it is {shape_text(source.size)}, and the largest image that the model was validated on"
            found.append(f"{size} {shape_text(card.size)}; masks and their weights may be worse than on such images")
        return tuple(found)

    def _predict(self, slices: _Slices, name: str) -> Prediction:
        first, weights = slices.weighted()
        noise = self._noise(first)
        centre = first.centre_noise() if isinstance(first, Stratified) else None
        slices.expect(first.passes)
        del first  # of a large volume, its features are computed again
        labels = marginal = centres = entropy = torch.empty(0)
        guaranteed = None
        for k in range(slices.source.slices):
            predictive = slices.take(k)
            if centre is None:
                drawn = predictive.render(noise)
            else:
                drawn, typical = predictive.render_with(noise, centre)
                centres = slices.put(centres, k, typical[0])
                del typical
            if slices.source.slices == 1:
                guaranteed = self._guaranteed(predictive, drawn)
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
        return Prediction(name, masks, draws, strata, entropy, *made_with, slices.tiles, notes, kept, look, guaranteed)

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

    def _guaranteed(self, predictive: Predictive, drawn: MaskDistribution) -> Guaranteed | None:
        """What the calibration says of an image, by masks that are drawn as they were for the calibration."""
        found = self.calibration
        if found is None or found.symmetries != self.options.symmetries:
            return None
        options = replace(
            self.options, per_stratum=found.per_stratum, samples=found.samples, seed=found.seed, keep=None
        )
        same = self._form(predictive, options) == self._form(predictive, self.options)
        draws = drawn if same else self.draw(predictive, options)[0]
        weights = predictive.weights[0].detach().cpu().numpy() if isinstance(predictive, Stratified) else None
        return apply(found, draws.to("cpu"), weights)

    def _form(self, predictive: Predictive, options: Options) -> tuple[int | None, int, int]:
        """What the draws of an image depend on: strata, how many, seed."""
        by_strata = isinstance(predictive, Stratified) and options.samples is None
        strata = predictive.weights.shape[1] if by_strata else None  # type: ignore[attr-defined]
        return strata, self._asked(strata, options), options.seed

    def draw(self, predictive: Predictive, options: Options | None = None) -> tuple[MaskDistribution, Noise]:
        """The masks of an image as ``options`` ask, with their soft marginal, and the noise that they come from."""
        noise = self._noise(predictive, options)
        return predictive.render(noise), noise

    def _noise(self, predictive: Predictive, options: Options | None = None) -> Noise:
        options = options or self.options
        generator = torch.Generator(self.device).manual_seed(options.seed)
        if isinstance(predictive, Stratified) and options.samples is None:
            strata = predictive.weights.shape[1]
            return draw_noise(predictive, "compact", self._asked(strata, options) * strata, generator)
        return draw_noise(predictive, "standard", self._asked(None, options), generator)


class _Slices:
    """The predictive distributions of an image's slices.

    Attributes:
        tiles: windows per slice; 1 is whole.
        seen: some pixels of each slice, in the units of the training data.
        ready: the distribution of an image that went through the network already.
        away: how far each slice is from the training images; None where that is not known.
    """

    def __init__(self, predictor: Predictor, source: Source, windows: Windows | None, progress: Progress | None):
        self.predictor, self.source, self.windows, self.progress = predictor, source, windows, progress
        self.tiles = len(windows[0]) * len(windows[1]) if windows else 1
        self.seen: dict[int, np.ndarray] = {}
        self.ready: Predictive | None = None
        self.away: dict[int, float | None] = {}
        self._kept: dict[int, Predictive] = {}
        self._steps = self.tiles * (predictor.method.views if windows else 1)
        self._done, self._total = 0, source.slices * self._steps

    def weighted(self) -> tuple[Predictive, Tensor | None]:
        """The first slice, with the mean weights of all of them; and the weights ``[D, K]`` of each, if any."""
        first, D = self._compute(0), self.source.slices
        self._steps = self._done
        if not isinstance(first, Stratified):
            self._kept[0] = first
            return first, None
        keeps, weights = D == 1 or D * held_bytes(first) <= _KEPT, []
        for k in range(D):
            predictive: Any = self._compute(k) if k else first
            weights.append(predictive.weights)
            if keeps:
                self._kept[k] = predictive
            del predictive  # before the next one takes its memory
        found = torch.cat(weights)
        return first.reweighted(found.mean(0, keepdim=True)), found.cpu()

    def expect(self, passes: int) -> None:
        """Count what is left to do: slices that were not kept, and passes over all windows to render each slice."""
        slices = self.source.slices
        self._total = self._done + (slices - len(self._kept)) * self._steps + slices * passes * self.tiles

    def take(self, k: int) -> Predictive:
        """A slice, computed again unless it was kept; asked for once."""
        return self._kept.pop(k) if k in self._kept else self._compute(k)

    def put(self, maps: Tensor, k: int, values: Tensor) -> Tensor:
        """The maps ``[…, D, H, W]`` with slice ``k`` set to ``[…, H, W]``; of an image, the values themselves."""
        if self.source.slices == 1:
            return values.cpu()
        if k == 0:
            maps = torch.empty(*values.shape[:-2], self.source.slices, *values.shape[-2:], dtype=values.dtype)
        maps[..., k, :, :] = values
        return maps

    def image(self, k: int) -> Tensor:
        """The network's input, ``[1, C, H, W]``."""
        predictor = self.predictor
        card = predictor.card
        if card.channels == 0:  # of a bare method, which takes what it is given
            card = predictor.card = replace(card, channels=self.source.channels)
        raw = read_pixels(self.source, k, card.channels, predictor.convert, predictor.options.assume_window)
        self.seen[k] = thinned(raw[0].numpy())
        return card.prepare(raw.to(predictor.device))

    def _compute(self, k: int) -> Predictive:
        if self.ready is not None:
            return self.ready
        image, method, windows = self.image(k), self.predictor.method, self.windows
        cut = None if windows is None else partial(method.predict_windows, image, windows, self._step)
        work = cut or partial(method.predict, image)
        predictive, (self.away[k],) = self.predictor.lookout.predict(image, work)
        if windows is None:
            self._step()
        return predictive

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)


def held_bytes(value: object) -> int:
    """Memory of the tensors that an object holds, at any depth; weights of networks are left out.

    >>> held_bytes({"dense": torch.zeros(2, 8), "skips": (torch.zeros(4),), "network": nn.Linear(9, 9)})
    80
    """
    storages, seen, todo = {}, set(), [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | nn.Parameter):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            todo.extend(item)
        else:
            todo.extend((item if isinstance(item, Mapping) else getattr(item, "__dict__", {})).values())
    return sum(storages.values())


def _is_blank(images: Tensor) -> bool:
    """Whether the middle 98 % of the network's input, whose values span a few units, lie within 0.02."""
    low, high = np.percentile(images.numpy(), (1, 99))
    return bool(high - low < 0.02)


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


@contextmanager
def _fits(source: Source) -> Iterator[None]:
    """Turns errors of memory into one line that names the image."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or out_of_memory(error) is None:
            raise
        hint = "smaller windows (window=256) and fewer masks take less"
        message = f"expected an image that fits into memory, found {source.form}; {hint}"
        raise DataError(f"{source.path}: {message}") from None
