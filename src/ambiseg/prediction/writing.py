"""The files of a prediction: one folder an image, which appears whole or not at all.

====================  =============================================================================================
``mask_00.png`` …      class ids, the heaviest mask first; in the format of the image, see :data:`SUFFIXES`
``expert_1.png`` …     what each expert says at the mean of its Gaussian
``weights.json``       which mask is how likely, and where it came from
``masks.npz``          all of it as a :class:`~ambiseg.masks.MaskDistribution`
``entropy.tif``        how unsure the model is, pixel by pixel, float32 in nats (``.nii.gz`` where the masks are)
``entropy.png``        the same to look at, from 0 to log(classes); of a picture only
``overview.png``       image, experts, samples and entropy on one page
====================  =============================================================================================
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ambiseg import __version__
from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_folder, atomic_write, write_text
from ambiseg.io.source import Source
from ambiseg.prediction.overview import class_colours, draw_overview, heat
from ambiseg.prediction.result import Prediction

Existing = Literal["refuse", "skip", "overwrite"]

# What masks are written as; DICOM is only read, and a stack of it has no other home than NIfTI.
SUFFIXES: dict[str, tuple[str, str]] = {  # of a picture, and of a stack of slices
    "PNG": (".png", ".tif"),
    "JPEG": (".png", ".tif"),
    "BMP": (".png", ".tif"),
    "TIFF": (".tif", ".tif"),
    "NumPy": (".npy", ".npy"),
    "NIfTI": (".nii.gz", ".nii.gz"),
    "DICOM": (".png", ".nii.gz"),
    "array": (".png", ".tif"),
}
# Where a TIFF lies on the ground: pixel scale, tie points, transformation, and the three directories of GeoTIFF
_GEOGRAPHIC = (33550, 33922, 34264, 34735, 34736, 34737)


def target(out: Path, name: str, existing: Existing) -> Path | None:
    """The folder that an image's files will go to; ``None`` if it is there already and is to be skipped."""
    folder = out / name
    if not folder.exists():
        return folder
    if not (folder / "weights.json").is_file():  # somebody's own folder, which is not ours to replace
        raise DataError(f"{folder}: expected a new folder or an earlier prediction, found something else")
    if existing == "overwrite":
        return folder
    if existing == "refuse":
        hint = "--skip-existing goes on without it, --overwrite replaces it"
        raise DataError(f"{folder}: expected no earlier prediction, found one; {hint}")
    return None


def write(
    prediction: Prediction, out: str | os.PathLike[str], existing: Existing = "refuse", overview: bool = True
) -> Path:
    """Write all files of a prediction to ``out/<its name>`` and return that folder."""
    folder = target(Path(out), prediction.name, existing)
    if folder is None:
        return Path(out) / prediction.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as draft:
        _fill(prediction, draft, overview)
    return folder


def _fill(prediction: Prediction, folder: Path, overview: bool) -> None:
    source, classes = prediction.source, len(prediction.classes)
    labels = prediction.masks.labels[0].numpy()
    suffix = _suffix(source)
    digits = max(2, len(str(len(labels) - 1)))
    masks = [f"mask_{i:0{digits}}{suffix}" for i in range(len(labels))]
    experts = [f"expert_{k + 1}{suffix}" for k in range(len(prediction.expert_masks))]
    for file, ids in [*zip(masks, labels, strict=True), *zip(experts, prediction.expert_masks.numpy(), strict=True)]:
        _write_map(folder / file, ids.astype(np.uint8 if classes <= 256 else np.uint16, copy=False), source)
    prediction.masks.save(folder / "masks.npz")
    entropy = "entropy.nii.gz" if suffix == ".nii.gz" else "entropy.tif"
    values = prediction.entropy.numpy().astype(np.float32, copy=False)
    _write_map(folder / entropy, values, source)
    if source.slices == 1:
        _write_heat(folder / "entropy.png", values / np.log(classes))
    write_text(folder / "weights.json", json.dumps(_about(prediction, masks, experts, entropy), **_STYLE) + "\n")
    if overview:
        with atomic_write(folder / "overview.png") as file:
            draw_overview(prediction, file)


_STYLE: dict[str, Any] = {"indent": 1, "ensure_ascii": False, "allow_nan": False}


def _about(prediction: Prediction, masks: list[str], experts: list[str], entropy: str) -> dict[str, Any]:
    options, source = prediction.options, prediction.source
    labels, weights = prediction.masks.labels[0].numpy(), prediction.masks.mass[0].tolist()
    listed = []
    for i, file in enumerate(masks):
        by = [k + 1 for k in prediction.experts_of(i)]  # people count from one, here as in the report
        pixels = np.bincount(labels[i].reshape(-1), minlength=len(prediction.classes))
        listed.append(
            {
                "file": file,
                "weight": weights[i],
                "expert": by[0],
                "experts": by,
                "draws": sum(draw.mask == i for draw in prediction.draws),
                "pixels": dict(zip(prediction.classes, pixels.tolist(), strict=True)),
            }
        )
    about = {
        "format": "ambiseg.Prediction/1",
        "name": prediction.name,
        "image": str(source.path),
        "size": list(source.size),
        "slices": source.slices,
        "run": prediction.run,
        "weights_of": prediction.which,
        "form": options.form,
        "per_expert": options.per_expert if options.samples is None else None,
        "samples": options.samples,
        "seed": options.seed,
        "windows": prediction.windows,
        "classes": list(prediction.classes),
        "expert_weights": prediction.expert_weights.tolist(),
        "expert_files": experts,
        "masks": listed,
        "entropy": {
            "file": entropy,
            "mean": float(prediction.entropy.mean()),
            "max": float(prediction.entropy.max()),
        },
        "notes": list(prediction.notes),
        "version": __version__,
    }
    if source.slices > 1:
        about["slice_expert_weights"] = prediction.slice_weights.tolist()
    return about


# -- one map of class ids, or of numbers, as a file ----------------------------------------------------------------


def _suffix(source: Source) -> str:
    picture, stack = SUFFIXES[source.format if source.format in SUFFIXES else "PNG"]
    if source.slices == 1:
        return picture
    return ".tif" if stack == ".nii.gz" and source.affine is None else stack  # frames that lie nowhere in space


def _write_map(path: Path, values: np.ndarray, source: Source) -> None:
    """``[H, W]`` or ``[D, H, W]`` in the format that the name ends in, at the place of ``source``."""
    if path.name.endswith(".nii.gz"):
        content = _nifti(values, source)
        with atomic_write(path) as file:
            file.write(content)
        return
    with atomic_write(path) as file:
        if path.suffix == ".npy":
            np.save(file, values, allow_pickle=False)
        elif path.suffix == ".tif":
            _write_tiff(file, values, source)
        else:
            _write_png(file, values, source)


def _write_png(file: Any, ids: np.ndarray, source: Source) -> None:
    """Values are class ids; a palette makes viewers show them in colours."""
    from PIL import Image

    image = Image.fromarray(ids)
    if ids.dtype == np.uint8:
        image.putpalette(class_colours(256).tobytes())
    dpi: dict[str, Any] = {}
    if source.format in ("PNG", "JPEG", "BMP"):
        with Image.open(source.path) as original:
            dpi = {"dpi": original.info["dpi"]} if "dpi" in original.info else {}
    image.save(file, "PNG", optimize=False, **dpi)


def _write_heat(path: Path, share: np.ndarray) -> None:
    from PIL import Image

    image = Image.fromarray(np.round(255 * np.clip(share, 0, 1)).astype(np.uint8))
    image.putpalette(heat(256).tobytes())
    with atomic_write(path) as file:
        image.save(file, "PNG")


def _write_tiff(file: Any, values: np.ndarray, source: Source) -> None:
    import tifffile

    about: dict[str, Any] = {"photometric": "minisblack", "compression": "zlib"}
    about["metadata"] = {"axes": "ZYX" if values.ndim == 3 else "YX"}
    if source.format == "TIFF":
        with tifffile.TiffFile(source.path) as original:
            tags = original.pages.first.tags
            if {282, 283} <= set(tags.keys()):  # pixels per unit across and down, and the unit
                about["resolution"] = tags[282].value, tags[283].value
                about["resolutionunit"] = tags[296].value if 296 in tags else None
            found = [tags[code] for code in _GEOGRAPHIC if code in tags]
            about["extratags"] = [(tag.code, tag.dtype, tag.count, tag.value, True) for tag in found]
    tifffile.imwrite(file, values, **about)


def _nifti(values: np.ndarray, source: Source) -> bytes:
    """In the voxel order of a NIfTI source, with its affine; of DICOM, as (column, row, slice)."""
    import nibabel

    volume = values[None] if values.ndim == 2 else values
    if source.format == "NIfTI":
        original: Any = nibabel.load(source.path)
        shape = (*original.shape[:3], *[1] * (3 - len(original.shape[:3])))
        volume = _turned_back(volume, np.asarray(original.affine, float), source, shape)
        image = nibabel.Nifti1Image(volume.reshape(original.shape[:3]), original.affine, original.header)
        image.header.extensions.clear()
        for field in ("descrip", "aux_file", "db_name"):  # may name the patient, and are not about this file
            image.header[field] = b""
    else:
        assert source.affine is not None
        image = nibabel.Nifti1Image(volume.transpose(2, 1, 0), source.affine[:, [2, 1, 0, 3]])
        image.header.set_xyzt_units("mm")
    image.set_data_dtype(values.dtype)
    image.header["cal_min"] = image.header["cal_max"] = 0  # the window of the image, and these are no grey values
    image.header.set_slope_inter(1, 0)
    if values.dtype.kind == "u":
        image.header.set_intent("label", name="class ids")
    return gzip.compress(image.to_bytes(), 6, mtime=0)  # without the time, the same masks are the same file


def _turned_back(volume: np.ndarray, affine: np.ndarray, source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """``[slice, row, column]`` in the order that the file has its voxels in: readers turn slices to be looked at."""
    assert source.affine is not None
    turn = np.linalg.pinv(affine) @ source.affine  # from (slice, row, column) to the file's own (i, j, k)
    steps = np.round(turn[:3, :3])
    if not np.array_equal(np.abs(steps).sum(0), [1, 1, 1]) or not np.array_equal(np.abs(steps).sum(1), [1, 1, 1]):
        raise DataError(f"{source.path}: expected an affine that can be inverted, found {affine[:3, :3].tolist()}")
    places = np.argmax(np.abs(steps), 1)  # for each axis of the file, which of slice, row and column it is
    turned = volume.transpose(places)
    flips = tuple(slice(None, None, int(steps[axis, places[axis]])) for axis in range(3))
    turned = turned[flips]
    assert turned.shape == shape, (turned.shape, shape)
    return np.ascontiguousarray(turned)
