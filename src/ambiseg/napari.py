"""A prediction as layers of napari: the image, every mask with its weight, probabilities and entropy."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from ambiseg._util.extras import require
from ambiseg.prediction.result import Prediction
from ambiseg.viz.colours import distinct, label_colours

_SHOWN = 1  # masks that are visible at first
_OPACITY = 0.5


def show(prediction: Prediction, viewer: Any = None, *, masks: int | None = None) -> Any:
    """Add a prediction to a napari viewer, and return the viewer.

    From below: the image; the probability of each class that is not class 0; the entropy; the most typical mask of each
    stratum; the masks, the most likely one on top. Names have the weight, in percent, and say which are empty. Image
    and most likely mask are visible, the others are a click away. Each mask and stratum has a colour of its own where
    there are two classes, and the colours of the classes elsewhere. Pixels are drawn in millimetres where the image
    says how large they are. Weights, strata and classes are in the metadata of each layer. In a script,
    ``napari.run()`` keeps the window open.

    Args:
        prediction: what :func:`ambiseg.predict` returns.
        viewer: anything with ``add_image`` and ``add_labels`` as those of ``napari.Viewer``; None opens a window.
        masks: show so many of the masks, the most likely ones; None shows all.

    >>> class Viewer(list):  # of napari, as far as it is needed
    ...     def add_image(self, data, name, **options):
    ...         self.append(name)
    ...     add_labels = add_image
    >>> from ambiseg import load, predict
    >>> image = np.random.default_rng(0).integers(-1000, 400, (1, 32, 48))
    >>> [one] = predict(load("demo"), image, samples=2, merge=False)
    >>> names = show(one, Viewer(), masks=1)
    >>> names[:3], names[-1]
    (['image_0', 'probability of nodule', 'entropy'], 'mask 0, 50 %, empty')
    """
    if viewer is None:
        require("napari")
        viewer = import_module("napari").Viewer(title=f"ambiseg: {prediction.name}")
    classes = prediction.classes
    spacing, axes = prediction.source.spacing, prediction.entropy.ndim
    common: dict[str, Any] = {"scale": spacing, "units": "mm"} if spacing else {"scale": (1.0,) * axes}
    _add_image(viewer, prediction, common)
    for c, share in enumerate(prediction.masks.marginal_probs(len(classes))[0]):
        if c:
            about = {"class": c, "name": classes[c]}
            options = {"colormap": "magma", "contrast_limits": (0.0, 1.0), "metadata": about}
            viewer.add_image(_array(share), name=f"probability of {classes[c]}", **_over(common), **options)
    limits = {"colormap": "viridis", "contrast_limits": (0.0, math.log(len(classes))), "metadata": {"unit": "nats"}}
    viewer.add_image(_array(prediction.entropy), name="entropy", **_over(common), **limits)
    if (strata := prediction.strata) is not None:
        for k, colour in reversed(list(enumerate(distinct(len(strata.weights))))):
            weight = float(strata.weights[k])
            about = {strata.name: k + 1, "weight": weight, "classes": list(classes)}
            ids = _array(strata.centres[k])
            name = f"{strata.name} {k + 1}, {_percent(weight)}{_if_empty(ids)}"
            _add_mask(viewer, ids, name, colour, classes, False, {**common, "metadata": about})
    labels, weights = prediction.masks.labels[0], prediction.masks.mass[0].tolist()
    shown = len(weights) if masks is None else min(masks, len(weights))
    for i, colour in reversed(list(enumerate(distinct(shown)))):
        about = {"mask": i, "weight": weights[i], "classes": list(classes)}
        if by := [k + 1 for k in prediction.strata_of(i)]:
            about["strata"] = by
        ids = _array(labels[i])
        name = f"mask {i}, {_percent(weights[i])}{_if_empty(ids)}"
        _add_mask(viewer, ids, name, colour, classes, i < _SHOWN, {**common, "metadata": about})
    return viewer


def _add_image(viewer: Any, prediction: Prediction, common: dict[str, Any]) -> None:
    """Grey or RGB; other channels as one layer each."""
    source = prediction.source
    pixels = np.stack([source.read(k) for k in range(source.slices)])  # [D, C, H, W]
    pixels = pixels[0] if source.slices == 1 else np.moveaxis(pixels, 1, 0)  # [C, (D,) H, W]
    about = {"metadata": {"file": str(source.path), "units": source.units}}
    if len(pixels) == 3 and pixels.dtype == np.uint8:
        viewer.add_image(np.moveaxis(pixels, 0, -1), name=prediction.name, rgb=True, **common, **about)
        return
    for c, values in enumerate(pixels):
        name = prediction.name if len(pixels) == 1 else f"{prediction.name}, channel {c}"
        viewer.add_image(values, name=name, colormap="gray", visible=c == 0, **common, **about)


def _add_mask(
    viewer: Any,
    ids: np.ndarray,
    name: str,
    colour: str,
    classes: tuple[str, ...],
    visible: bool,
    common: dict[str, Any],
) -> None:
    colours = [colour] if len(classes) == 2 else label_colours(len(classes))[1:]
    table: dict[int | None, str] = {None: "transparent", 0: "transparent", **dict(enumerate(colours, 1))}
    options = {"colormap": table, "opacity": _OPACITY, "visible": visible}
    viewer.add_labels(ids, name=name, **options, **common)


def _over(common: dict[str, Any]) -> dict[str, Any]:
    """A map that lies on the image, hidden at first."""
    return {**common, "visible": False, "blending": "additive", "opacity": 0.8}


def _array(values: Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.detach().cpu().numpy())


def _if_empty(ids: np.ndarray) -> str:
    """Said in the name, because a layer without a mark looks like one that is not shown."""
    return "" if ids.any() else ", empty"


def _percent(weight: float) -> str:
    """Two digits at least, so that rare masks have a number.

    >>> _percent(0.371), _percent(0.0042), _percent(0.0)
    ('37 %', '0.42 %', '0 %')
    """
    return f"{100 * weight:.2g} %" if weight < 0.095 else f"{100 * weight:.0f} %"
