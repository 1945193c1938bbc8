"""The same prediction in further forms: for other programs DICOM SEG and NIfTI with four axes, for people a page.

====================  =============================================================================================
``masks.seg.dcm``      a segment for each mask and class that is not class 0; or ``strata.seg.dcm``, one for the most
                       typical mask of each stratum
``marginal.seg.dcm``   the probability of each class, a fractional SEG
``marginal.nii.gz``    ``[x, y, z, class]`` the probability of each class
``strata.nii.gz``      ``[x, y, z, stratum]`` how often the draws of each stratum mark a voxel; with several classes, a
                       volume for each stratum and class
``labels.nii.gz``      the most probable class of each voxel, with its names in ``labels.txt`` for ITK-SNAP
``volumes.json``       what each volume is: classes with colours, strata with weights
``page.html``          what the masks mean, in plain words: see :mod:`ambiseg.prediction.page`
====================  =============================================================================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg._util.extras import require
from ambiseg._util.files import write_text
from ambiseg._util.text import printable
from ambiseg.io.dicom_seg_writing import Segment, check_sources, write_seg
from ambiseg.io.formats import format_of
from ambiseg.io.source import Source
from ambiseg.io.write import write_map
from ambiseg.prediction.page import write_page
from ambiseg.prediction.result import Prediction
from ambiseg.viz.colours import distinct, label_colours, rgb

Segmented: TypeAlias = Literal["masks", "strata"]
FORMS: tuple[Segmented, ...] = ("masks", "strata")
_SERIES = 9100  # number of the first series that is written: viewers list them behind the scanner's


@dataclass(frozen=True)
class Exchange:
    """Which further forms of a prediction are written.

    Args:
        dicom_seg: a DICOM SEG with a segment for each of the masks, or of the strata; and one of the marginal.
        nifti_4d: NIfTI with four axes, and a label map with names.
        page: one page for whoever decides.
    """

    dicom_seg: Segmented | None = None
    nifti_4d: bool = False
    page: bool = False

    @staticmethod
    def of(dicom_seg: bool | str, nifti_4d: bool, page: bool = False) -> Exchange:
        """From the arguments of :func:`ambiseg.predict`.

        >>> Exchange.of(True, False)
        Exchange(dicom_seg='masks', nifti_4d=False, page=False)
        """
        found = "masks" if dicom_seg is True else dicom_seg or None
        if found not in (None, *FORMS):
            raise DataError(f"dicom_seg: expected True, False, 'masks' or 'strata', found {found!r}")
        return Exchange(found, bool(nifti_4d), bool(page))  # pyright: ignore[reportArgumentType]

    def check(self, image: Path | Source) -> None:
        """A ``DataError`` for an image that has no such form, before anything is predicted."""
        path = image.path if isinstance(image, Source) else image
        if self.page:
            require("report")
        if self.nifti_4d:
            require("medical")
            kind = image.format if isinstance(image, Source) else "DICOM" if path.is_dir() else format_of(path)
            if kind not in ("NIfTI", "DICOM"):
                raise _no_place(path, kind or path.suffix or "no suffix")
        if self.dicom_seg is None:
            return
        if isinstance(image, Source) and image.planes is None:
            raise DataError(f"{path}: expected a DICOM file or series for DICOM SEG, found {image.format}")
        check_sources(path)


def write_exchange(prediction: Prediction, folder: Path, forms: Exchange) -> dict[str, Any]:
    """Write the files, and return what ``weights.json`` says about them."""
    about: dict[str, Any] = {}
    if forms.dicom_seg is not None:
        about["dicom_seg"] = _write_segmentations(prediction, folder, forms.dicom_seg)
    if forms.nifti_4d:
        about["nifti_4d"] = _write_volumes(prediction, folder)
    if forms.page:
        write_page(prediction, folder / "page.html")
        about["page"] = "page.html"
    return about


# -- DICOM SEG ---------------------------------------------------------------------------------------------------------


def _write_segmentations(prediction: Prediction, folder: Path, by: Segmented) -> list[str]:
    classes, strata = prediction.classes, prediction.strata
    if by == "strata":
        if strata is None:
            message = "expected a method with strata for a segment of each, found one without"
            raise DataError(f"{prediction.source.path}: {message}; masks have segments: dicom_seg='masks'")
        labels, weights = strata.centres, strata.weights.tolist()
        named = [(f"{strata.name} {k}", f"Most typical mask of {strata.name} {k}") for k in range(1, len(weights) + 1)]
    else:
        labels, weights = prediction.masks.labels[0], prediction.masks.mass[0].tolist()
        named = [(f"mask {i}", f"Mask {i} of {len(weights)} weighted masks") for i in range(len(weights))]
    options = {"form": prediction.form, "seed": str(prediction.options.seed)}
    colours = iter(distinct(len(named) * (len(classes) - 1)))
    segments = [
        Segment(
            f"{classes[c]}, {name}, p={weight:.3f}",
            f"{what}: {classes[c]}. Probability {weight:.6g}.",
            c,
            classes[c],
            next(colours),
            {"probability": f"{weight:.6g}", by: name, **options},
        )
        for (name, what), weight in zip(named, weights, strict=True)
        for c in range(1, len(classes))
    ]
    algorithm = f"ambiseg {prediction.run}"
    pixels = _stacked(labels, len(classes))
    first = f"{by}.seg.dcm"
    title = "weighted masks" if by == "masks" else f"most typical masks of {len(named)} strata"
    place = {"number": _SERIES, "algorithm": algorithm}
    write_seg(folder / first, prediction.source, pixels, segments, "BINARY", title=f"ambiseg: {title}", **place)
    shares = [
        Segment(
            f"{name}, probability",
            f"Probability of {name} in each pixel; the largest value of a pixel stands for 1.",
            c,
            name,
            colour,
            options,
        )
        for c, (name, colour) in enumerate(zip(classes[1:], distinct(len(classes) - 1), strict=True), 1)
    ]
    marginal = np.moveaxis(_volumes(_marginal(prediction))[1:], 0, -1)
    place["number"] += 1
    title = "ambiseg: probability of each class"
    write_seg(folder / "marginal.seg.dcm", prediction.source, marginal, shares, "FRACTIONAL", title=title, **place)
    return [first, "marginal.seg.dcm"]


def _stacked(labels: Tensor, classes: int) -> np.ndarray:
    """Class ids ``[N, *spatial]`` as ``[D, H, W, N · (classes - 1)]`` of 0 and 1; of two classes without a copy."""
    volumes = labels.numpy() if labels.ndim == 4 else labels.numpy()[:, None]
    if classes == 2:
        return np.moveaxis(volumes.astype(np.uint8, copy=False), 0, -1)
    ids = np.arange(1, classes)
    parts = (volumes[:, None] == ids[:, None, None, None]).reshape(-1, *volumes.shape[1:])
    return np.moveaxis(parts, 0, -1)


def _marginal(prediction: Prediction) -> Tensor:
    """``[C, *spatial]``"""
    return prediction.masks.marginal_probs(len(prediction.classes))[0].clamp(0, 1).float()


def _volumes(values: Tensor) -> np.ndarray:
    """``[…, H, W]`` of an image, as of a volume of one slice."""
    found = values.numpy()
    return found[:, None] if found.ndim == 3 else found


# -- NIfTI with four axes ----------------------------------------------------------------------------------------------


def _write_volumes(prediction: Prediction, folder: Path) -> list[str]:
    source, classes = prediction.source, prediction.classes
    if source.affine is None:
        raise _no_place(source.path, f"{source.format} without one")
    marginal = _volumes(_marginal(prediction))  # [C, D, H, W]
    colours = label_colours(len(classes))
    about: dict[str, Any] = {
        "classes": [
            {"id": c, "name": name, "colour": colour}
            for c, (name, colour) in enumerate(zip(classes, colours, strict=True))
        ],
        "marginal.nii.gz": [{"volume": c, "class": c, "name": name} for c, name in enumerate(classes)],
    }
    write_map(folder / "marginal.nii.gz", np.moveaxis(marginal, 0, -1), source)
    ids = marginal.argmax(0).astype(np.uint8 if len(classes) <= 256 else np.uint16)
    write_map(folder / "labels.nii.gz", ids, source)
    write_text(folder / "labels.txt", _itk_snap(classes, colours))
    files = ["marginal.nii.gz", "labels.nii.gz", "labels.txt"]
    if prediction.strata is not None:
        shares, listed = _by_stratum(prediction)
        write_map(folder / "strata.nii.gz", np.moveaxis(shares, 0, -1), source)
        about["strata.nii.gz"] = listed
        files.append("strata.nii.gz")
    write_text(folder / "volumes.json", json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return [*files, "volumes.json"]


def _no_place(path: Path, found: str) -> DataError:
    return DataError(f"{path}: expected an image with a position in space for NIfTI with four axes, found {found}")


def _by_stratum(prediction: Prediction) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """``[V, D, H, W]``: the share of each stratum's draws that have a class, and what each volume is.

        share[k, c](x) = Σ_{draws i of k} w_i · 1[mask_i(x) = c] / Σ_{draws i of k} w_i

    A stratum without a draw, in the standard form, has the class of its most typical mask.
    """
    strata, labels = prediction.strata, prediction.masks.labels[0]
    assert strata is not None
    count, classes = len(strata.weights), len(prediction.classes)
    mass = torch.zeros(count, len(labels))
    for draw in prediction.draws:
        if draw.stratum is not None:
            mass[draw.stratum, draw.mask] += draw.weight
    total = mass.sum(1)
    found, listed = [], []
    for k in range(count):
        drawn = mass[k].nonzero()[:, 0]
        for c in range(1, classes):
            if total[k] > 0:
                weights = (mass[k, drawn] / total[k]).view(-1, *[1] * (labels.ndim - 1))
                share = sum((weight * (labels[i] == c) for weight, i in zip(weights, drawn.tolist(), strict=True)))
            else:
                share = (strata.centres[k] == c).float()
            volume = np.asarray(share, np.float32)
            found.append(volume if volume.ndim == 3 else volume[None])
            weight = float(strata.weights[k])
            entry = {"volume": len(listed), strata.name: k + 1, "weight": weight, "class": c}
            listed.append(entry | {"name": prediction.classes[c], "draws": bool(total[k] > 0)})
    return np.stack(found), listed


def _itk_snap(classes: tuple[str, ...], colours: list[str]) -> str:
    """Names and colours of class ids, as ITK-SNAP and 3D Slicer read them.

    >>> print(_itk_snap(("background", "nodule"), ["#000000", "#e69f00"]).splitlines()[-1])
        1   230  159    0     1.00  1  1  "nodule"
    """
    lines = ["# ITK-SNAP Label Description File", "# index, red, green, blue, opacity, visible, mesh, name"]
    for c, (name, colour) in enumerate(zip(classes, colours, strict=True)):
        red, green, blue = rgb(colour)
        seen = 1 if c else 0
        quoted = printable(name).replace('"', "'")
        lines.append(f'{c:5} {red:5}{green:5}{blue:5} {seen:8.2f}  {seen}  {seen}  "{quoted}"')
    return "\n".join(lines) + "\n"
