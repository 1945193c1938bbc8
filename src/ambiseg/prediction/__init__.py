"""``ambiseg.predict``: weighted masks of new images from a trained model, in the images' own geometry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.io.source import Source
from ambiseg.methods.base import Method
from ambiseg.prediction.inputs import array_source, find_inputs
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Draw, Options, Prediction, Strata
from ambiseg.prediction.writing import Existing, target, write
from ambiseg.runs import Run, Which

__all__ = ["Draw", "Options", "Prediction", "Predictor", "Strata", "predict", "write"]

Images: TypeAlias = (
    str | os.PathLike[str] | np.ndarray | Tensor | Sequence[str | os.PathLike[str] | np.ndarray | Tensor]
)


def predict(
    run: str | os.PathLike[str] | Run | Method,
    images: Images,
    out: str | os.PathLike[str] | None = None,
    *,
    per_expert: int = 4,
    samples: int | None = None,
    seed: int = 0,
    window: int | None = None,
    overlap: int | None = None,
    merge: bool = True,
    convert: bool = False,
    axes: str | None = None,
    axis: int | None = None,
    dicom: str = "series",
    existing: Existing = "refuse",
    overview: bool = True,
    which: Which = "best",
    device: torch.device | str | None = None,
) -> list[Prediction]:
    """Weighted masks of new images, and their files if ``out`` is given.

    Args:
        run: the folder of a run, ``"demo"``, or a model that ``ambiseg.load`` returned.
        images: files, folders (all images below; DICOM files of one folder are one series), or arrays ``[C, H, W]``
            and volumes ``[D, C, H, W]`` in the units of the training data. One of them, or a list.
        out: a folder; every image gets one of its name in it, which appears when all its files are written.
        per_expert, samples, seed, window, overlap, merge, convert: see :class:`Options`.
        axes: how ``.npy`` and ``.npz`` arrays are stored: HW, HWC, CHW, DHW, DHWC or DCHW; as in training.
        axis: which axis of a NIfTI volume the slices are cut from; as in training, or the last.
        dicom: DICOM files of one folder are the slices of one ``"series"``, or ``"files"`` that stand alone.
        existing: of earlier results in ``out``: ``"refuse"``, ``"skip"`` images that have them, or ``"overwrite"``.
        overview: also draw ``overview.png``.
        which: weights of the ``best`` epoch or of the ``last``.
        device: to compute on; the CPU for a run, where it is for a model.

    Returns:
        One prediction an image, in order; images that ``existing`` skips are left out. Each holds its masks: for
        thousands of images call a :class:`Predictor` on one after the other, as the command does.

    >>> from ambiseg.runs import Card
    >>> from ambiseg.data.intensity import Intensity
    >>> from ambiseg.methods import MoSE
    >>> model = MoSE(1, 2, experts=2, backbone="unet-light")             # or ambiseg.load("runs/mine")
    >>> model.card = Card(("background", "nodule"), (1,), 1, Intensity(0, 255, 127.5, 127.5), "nodules")
    >>> [one] = predict(model, np.random.default_rng(0).integers(0, 256, (1, 32, 48)), per_expert=3)
    >>> one.masks.spatial, len(one.draws), one.expert_masks.shape
    (torch.Size([32, 48]), 6, torch.Size([2, 32, 48]))
    """
    options = Options(per_expert, samples, seed, window, overlap, merge, convert)
    given = [images] if isinstance(images, str | os.PathLike | np.ndarray | Tensor) else list(images)
    arrays = [image for image in given if isinstance(image, np.ndarray | Tensor)]
    paths = [image for image in given if not isinstance(image, np.ndarray | Tensor)]
    if arrays and paths:
        raise DataError(f"images: expected paths or arrays, found {len(paths)} and {len(arrays)} in one list")
    todo: list[tuple[str, Path | Source]] = [(one.name, one.path) for one in find_inputs(paths, dicom, out)]
    digits = len(str(len(arrays) - 1))
    todo += [(name := f"image_{i:0{digits}}", array_source(array, name)) for i, array in enumerate(arrays)]
    if out is not None:
        todo = [(name, image) for name, image in todo if target(Path(out), name, existing) is not None]
    predictor = Predictor(run, options, which, device)
    results = []
    for name, image in todo:
        prediction = predictor(predictor.open(image, axes, axis) if isinstance(image, Path) else image, name)
        if out is not None:
            write(prediction, out, existing, overview)
        results.append(prediction)
    return results
