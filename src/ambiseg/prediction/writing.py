"""The files of a prediction: one folder per image, which appears when it is complete.

=======================  =============================================================================================
``mask_00.png`` …        class ids, in descending order of weight, in the image's format: see :mod:`ambiseg.io.write`
``NAME_1.png`` …         the most typical mask of each stratum, if there are any; NAME is the method's word for one
``weights.json``         the weight of each mask, and the strata it came from
``masks.npz``            all masks as a :class:`~ambiseg.masks.MaskDistribution`
``entropy.tif``          entropy of each pixel's class, float32 in nats (``.nii.gz`` where the masks are)
``entropy.png``          the same as a picture, from 0 to log(classes); not of volumes
``inner.png`` …          of a calibrated run: ``outer``, ``inner``, ``found`` and ``sure``, with the id of the class
                         (``inner_2.png`` …, where several are evaluated)
``overview.png``         image, masks and entropy in one picture
``consensus_NAME.png``   one mask by the rule NAME of :data:`~ambiseg.decisions.consensus.CONSENSUS`
``measurements.csv``     and ``.json``: see :mod:`ambiseg.prediction.deciding`
=======================  =============================================================================================
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
from ambiseg.decisions.consensus import Consensus
from ambiseg.decisions.measure import MEASURES, table
from ambiseg.io.write import suffix_for, write_heat, write_map
from ambiseg.prediction.deciding import measurements_json, summaries
from ambiseg.prediction.decisions import CHEAP
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
    made = prediction.decisions.consensus(prediction.options.consensus or ())
    single = {f"consensus_{name}{suffix}": one for name, one in made.items()}
    decided = {file: one.labels[0].numpy() for file, one in single.items()}
    for file, ids in {**masks, **centres, **decided}.items():
        write_map(folder / file, ids.astype(np.uint8 if classes <= 256 else np.uint16, copy=False), source)
    prediction.masks.save(folder / "masks.npz")
    entropy = "entropy.nii.gz" if suffix == ".nii.gz" else "entropy.tif"
    values = prediction.entropy.numpy().astype(np.float32, copy=False)
    write_map(folder / entropy, values, source)
    if source.slices == 1:
        write_heat(folder / "entropy.png", values, float(np.log(classes)))
    for file, ids in _bounds(prediction, suffix).items():
        write_map(folder / file, ids.astype(np.uint8 if classes <= 256 else np.uint16), source)
    measurements = prediction.decisions.measures(tuple(MEASURES) if prediction.options.measure else CHEAP)
    if prediction.options.measure:
        write_text(folder / "measurements.csv", table(measurements, prediction.classes))
        write_text(folder / "measurements.json", measurements_json(prediction, measurements))
    about = _about(prediction, list(masks), list(centres), entropy) | write_exchange(prediction, folder, exchange)
    about["consensus"] = [_single(file, one) for file, one in single.items()]
    about["measurements"] = summaries(measurements, prediction.classes)
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
        **({} if prediction.guaranteed is None else {"guaranteed": guaranteed(prediction)}),
        "entropy": {"file": entropy, "mean": float(prediction.entropy.mean()), "max": float(prediction.entropy.max())},
        "look": None if prediction.look is None else prediction.look._asdict(),
        "notes": list(prediction.notes),
        "version": __version__,
    }


def _single(file: str, one: Consensus) -> dict[str, Any]:
    """How one mask was made, and how well it is expected to fit: where it is one of the masks, its number."""
    limit, mask = float(one.threshold), int(one.mask)
    about = {"file": file, "how": one.how, "mask": None if mask < 0 else mask}
    about["threshold"] = limit if limit == limit else None
    return about | {"expected_iou": float(one.expected_iou), "expected_dice": float(one.expected_dice)}


def _kept(kept: Kept) -> dict[str, Any]:
    return {**kept._asdict(), "distance": "GED, d = 1 - IoU"}


_BOUNDS = ("outer", "inner", "found", "sure")


def _bounds(prediction: Prediction, suffix: str) -> dict[str, np.ndarray]:
    """The masks of a calibration by the names of their files: class ids, 0 elsewhere."""
    found = () if prediction.guaranteed is None else prediction.guaranteed.classes
    end = (lambda one: f"_{one.id}") if len(found) > 1 else lambda _: ""
    return {f"{name}{end(one)}{suffix}": getattr(one, name) * np.int64(one.id) for one in found for name in _BOUNDS}


def guaranteed(prediction: Prediction) -> dict[str, Any] | None:
    """What a calibration says of an image, as ``weights.json`` has it; ``None`` without one."""
    found = prediction.guaranteed
    if found is None:
        return None
    of, names, classes = found.calibration, list(_bounds(prediction, suffix_for(prediction.source))), {}
    each = pixel_area(prediction)
    for i, one in enumerate(found.classes):
        files = names[i * len(_BOUNDS) : (i + 1) * len(_BOUNDS)]
        masks = {
            name: {"file": file, "pixels": int(getattr(one, name).sum())}
            for name, file in zip(_BOUNDS, files, strict=True)
        }
        area = {"pixels": list(one.area)} | ({} if each is None else {"mm2": [side * each for side in one.area]})
        classes[one.name] = masks | {"area": area}
    said = {"alpha": of.alpha, "data": of.data, "part": of.part, "patients": of.patients, "classes": classes}
    if found.strata is not None:
        said["strata"] = [k + 1 for k in found.strata]
    return said | {"guarantees": of.guarantees}


def pixel_area(prediction: Prediction) -> float | None:
    """Of a pixel, in mm²; ``None`` where the image's file does not say."""
    affine = prediction.source.affine
    return None if affine is None else float(np.linalg.norm(np.cross(affine[:3, 1], affine[:3, 2])))
