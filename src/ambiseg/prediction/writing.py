"""The files of a prediction: one folder per image, which appears when it is complete.

====================  =============================================================================================
``mask_00.png`` …      class ids, in descending order of weight; in the format of the image, see :mod:`ambiseg.io.write`
``NAME_1.png`` …       the most typical mask of each stratum, if there are any; NAME is the method's word for one
``weights.json``       the weight of each mask, and the strata it came from
``masks.npz``          all masks as a :class:`~ambiseg.masks.MaskDistribution`
``entropy.tif``        entropy of each pixel's class, float32 in nats (``.nii.gz`` where the masks are)
``entropy.png``        the same as a picture, from 0 to log(classes); not of volumes
``overview.png``       image, masks and entropy in one picture
====================  =============================================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ambiseg import __version__
from ambiseg._util.bands import counted
from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_folder, atomic_write, write_text
from ambiseg.io.write import suffix_for, write_heat, write_map
from ambiseg.prediction.exchange import Exchange, write_exchange
from ambiseg.prediction.overview import draw_overview
from ambiseg.prediction.result import Kept, Prediction

Existing = Literal["refuse", "skip", "overwrite"]
FORMAT = "ambiseg.Prediction/2"


def target(out: Path, name: str, existing: Existing) -> Path | None:
    """The folder for the files of an image; ``None`` if it exists already and is to be skipped."""
    folder = out / name
    if not folder.exists():
        return folder
    if not (folder / "weights.json").is_file():  # not written by this module: never replaced
        raise DataError(f"{folder}: expected a new folder or an earlier prediction, found something else")
    if existing == "refuse":
        hint = 'existing="skip" leaves it as it is, existing="overwrite" replaces it'
        raise DataError(f"{folder}: expected no earlier prediction, found one; {hint}")
    return folder if existing == "overwrite" else None


def write(
    prediction: Prediction,
    out: str | os.PathLike[str],
    existing: Existing = "refuse",
    overview: bool = True,
    exchange: Exchange | None = None,
) -> Path:
    """Write all files of a prediction to ``out/<its name>`` and return that folder."""
    folder = Path(out) / prediction.name
    if target(Path(out), prediction.name, existing) is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as draft:
            _fill(prediction, draft, overview, exchange or Exchange())
    return folder


def _fill(prediction: Prediction, folder: Path, overview: bool, exchange: Exchange) -> None:
    source, classes, strata = prediction.source, len(prediction.classes), prediction.strata
    labels, suffix = prediction.masks.labels[0].numpy(), suffix_for(source)
    digits = max(2, len(str(len(labels) - 1)))
    masks = {f"mask_{i:0{digits}}{suffix}": ids for i, ids in enumerate(labels)}
    centres = {f"{strata.name}_{k}{suffix}": ids for k, ids in enumerate(strata.centres.numpy(), 1)} if strata else {}
    for file, ids in {**masks, **centres}.items():
        write_map(folder / file, ids.astype(np.uint8 if classes <= 256 else np.uint16, copy=False), source)
    prediction.masks.save(folder / "masks.npz")
    entropy = "entropy.nii.gz" if suffix == ".nii.gz" else "entropy.tif"
    values = prediction.entropy.numpy().astype(np.float32, copy=False)
    write_map(folder / entropy, values, source)
    if source.slices == 1:
        write_heat(folder / "entropy.png", values, float(np.log(classes)))
    about = _about(prediction, list(masks), list(centres), entropy) | write_exchange(prediction, folder, exchange)
    write_text(folder / "weights.json", json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if overview:
        with atomic_write(folder / "overview.png") as file:
            draw_overview(prediction, file)


def _about(prediction: Prediction, masks: list[str], centres: list[str], entropy: str) -> dict[str, Any]:
    source, strata, draws = prediction.source, prediction.strata, prediction.draws
    compact, described, listed = prediction.form == "compact", None, []
    if strata is not None:
        described = {"name": strata.name, "weights": strata.weights.tolist(), "files": centres}
        if source.slices > 1:
            described["slice_weights"] = strata.slice_weights.tolist()
    for i, (file, weight) in enumerate(zip(masks, prediction.masks.mass[0].tolist(), strict=True)):
        mask: dict[str, Any] = {"file": file, "weight": weight}
        if by := [k + 1 for k in prediction.strata_of(i)]:  # counted from 1, as in file names and reports
            mask |= {"stratum": by[0], "strata": by}
        mask["draws"] = sum(draw.mask == i for draw in draws)
        pixels = counted(prediction.masks.labels[0, i].numpy(), len(prediction.classes))
        listed.append(mask | {"pixels": dict(zip(prediction.classes, pixels.tolist(), strict=True))})
    return {
        "format": FORMAT,
        "name": prediction.name,
        "image": str(source.path),
        "size": list(source.size),
        "slices": source.slices,
        "run": prediction.run,
        "weights_of": prediction.which,
        "form": prediction.form,
        "per_stratum": len(draws) // len(centres) if compact else None,
        "samples": None if compact else len(draws),
        "seed": prediction.options.seed,
        "symmetries": prediction.options.symmetries,
        "windows": prediction.windows,
        "classes": list(prediction.classes),
        "strata": described,
        "masks": listed,
        **({} if prediction.kept is None else {"kept": _kept(prediction.kept)}),
        "entropy": {"file": entropy, "mean": float(prediction.entropy.mean()), "max": float(prediction.entropy.max())},
        "notes": list(prediction.notes),
        "version": __version__,
    }


def _kept(kept: Kept) -> dict[str, Any]:
    return {**kept._asdict(), "distance": "GED, d = 1 - IoU"}
