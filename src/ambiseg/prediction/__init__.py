"""``ambiseg.predict``: weighted masks of new images from a trained model, in the images' own geometry."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg.io.source import Source
from ambiseg.methods.base import Method
from ambiseg.prediction.exchange import Exchange
from ambiseg.prediction.inputs import array_source, find_inputs
from ambiseg.prediction.loop import predict_each
from ambiseg.prediction.predictor import Predictor
from ambiseg.prediction.result import Draw, Kept, Options, Prediction, Strata
from ambiseg.prediction.writing import Existing, target, write
from ambiseg.runs import Card, Run, TrainedModel, Which

__all__ = ["Draw", "Kept", "Options", "Prediction", "Predictor", "Strata", "predict", "write"]

Image: TypeAlias = str | os.PathLike[str] | np.ndarray | Tensor


def predict(
    run: str | os.PathLike[str] | Run | TrainedModel | Method,
    images: Image | Sequence[Image],
    out: str | os.PathLike[str] | None = None,
    *,
    per_stratum: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    window: int | None = None,
    overlap: int | None = None,
    merge: bool = True,
    convert: bool = False,
    axes: str | None = None,
    axis: int | None = None,
    assume_window: tuple[float, float] | None = None,
    extra: str | os.PathLike[str] | None = None,
    symmetries: int = 1,
    keep: int | None = None,
    consensus: Sequence[str] | None = None,
    measure: bool = False,
    dicom: str = "series",
    existing: Existing = "refuse",
    overview: bool = True,
    dicom_seg: bool | str = False,
    nifti_4d: bool = False,
    page: bool = False,
    which: Which = "best",
    device: torch.device | str | None = None,
    card: Card | None = None,
    calibration: str | os.PathLike[str] | Literal[False] | None = None,
) -> list[Prediction]:
    """Weighted masks of new images, and their files if ``out`` is given.

    Args:
        run: the folder of a run, ``"demo"``, an opened :class:`~ambiseg.runs.Run`, or the model that ``ambiseg.load``
            returns; or a method from memory, with its ``card``.
        images: files, folders (all images below; DICOM files of one folder are one series), ``"sample"``, which comes
            with the package; or arrays ``[H, W]`` or ``[C, H, W]`` and volumes ``[D, C, H, W]`` in the units of the
            training data, with all channels of the model. One of them, or a list.
        out: a folder; every image gets a folder of its name in it, which appears when all its files are written.
        per_stratum, samples, seed, window, overlap, merge, convert, axes, axis, assume_window: see :class:`Options`.
        extra, symmetries, keep, consensus, measure: see :class:`Options` as well.
        dicom: DICOM files of one folder are the slices of one ``"series"``, or separate ``"files"``.
        existing: what to do with earlier results in ``out``: ``"refuse"``, ``"skip"`` their images, ``"overwrite"``.
        overview: also draw ``overview.png``.
        dicom_seg: also write DICOM SEG that refer to the image, which must be DICOM: a segment for each of the
            ``"masks"`` (True), or of the ``"strata"``; and the probability of each class.
        nifti_4d: also write probabilities of classes and strata as NIfTI with four axes, and a label map with names.
        page: also write ``page.html``: one outline, sizes, the readings that matter and whether a person must look.
        which: weights of the ``best`` epoch or of the ``last``; a model has its own.
        device: to compute on; None is the CPU for a run, and the device of the weights for a model.
        calibration: a file that ``ambiseg calibrate`` wrote; None: that of the run, if there is one; False: none.
        card: of a method from memory; None: images are its input as they are, and classes have plain names.

    Returns:
        One prediction per image, in order; images that ``existing`` skips are left out. What is odd about an image for
        this model, such as values of other units, is in its ``notes``, and a ``UserWarning``. Each holds its masks: for
        thousands of images call a :class:`Predictor` on one after the other, as the command does.

    >>> from ambiseg import load
    >>> image = np.random.default_rng(0).integers(-1000, 400, (1, 32, 48))
    >>> [one] = predict(load("demo"), image, per_stratum=3)
    >>> one.masks.spatial, len(one.draws), one.strata.centres.shape
    (torch.Size([32, 48]), 12, torch.Size([4, 32, 48]))
    >>> bare = load("demo").method  # a network from memory, whose input is prepared already
    >>> predict(bare, torch.rand(1, 32, 32), samples=2)[0].classes
    ('background', 'foreground')
    """
    reading = {"convert": convert, "axes": axes, "axis": axis, "assume_window": assume_window, "extra": extra}
    exchange = Exchange.of(dicom_seg, nifti_4d, page)
    reading |= {"symmetries": symmetries, "keep": keep, "consensus": consensus, "measure": measure}
    options = Options(per_stratum, samples, seed, window, overlap, merge, **reading)
    given = [images] if isinstance(images, str | os.PathLike | np.ndarray | Tensor) else list(images)
    arrays = [image for image in given if isinstance(image, np.ndarray | Tensor)]
    paths = [image for image in given if not isinstance(image, np.ndarray | Tensor)]
    if arrays and paths:
        raise DataError(f"images: expected paths or arrays, found {len(paths)} and {len(arrays)} in one list")
    digits = len(str(len(arrays) - 1))
    todo: list[tuple[str, Path | Source]] = [*find_inputs(paths, dicom, out)]
    todo += [(name := f"image_{i:0{digits}}", array_source(array, name)) for i, array in enumerate(arrays)]
    if out is not None:
        todo = [(name, image) for name, image in todo if target(Path(out), name, existing) is not None]
    predictor = Predictor(run, options, which, device, card, calibration)
    results = []
    folder = None if out is None else Path(out)
    for found in predict_each(predictor, todo, folder, existing, overview, exchange=exchange):
        if found.prediction is None:
            raise found.error or RuntimeError(found.name)
        for note in found.prediction.notes:
            warnings.warn(f"{found.name}: {note}", stacklevel=2)
        results.append(found.prediction)
    return results
