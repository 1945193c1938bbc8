"""A prediction as JSON, as ``masks.npz``, or as a zip of the files that ``ambiseg predict`` writes."""

from __future__ import annotations

import base64
import io
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from ambiseg.io.source import Source
from ambiseg.prediction.result import Prediction
from ambiseg.prediction.writing import write
from ambiseg.serving.tasks import with_header


class File(NamedTuple):
    """A file to be sent."""

    content: bytes
    kind: str
    name: str

    @property
    def headers(self) -> dict[str, str]:
        """What makes a browser save it under its name."""
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "._- ") else "_" for c in self.name)
        return {
            "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(self.name, safe='')}"
        }


def runs(labels: np.ndarray) -> list[int]:
    """Class ids row by row as pairs of class and length.

    >>> runs(np.array([[0, 0, 1], [1, 1, 0]], np.uint8))
    [0, 2, 1, 3, 0, 1]
    """
    flat = np.ascontiguousarray(labels).reshape(-1)
    ends = np.append(np.flatnonzero(flat[1:] != flat[:-1]), flat.size - 1)
    lengths = np.diff(ends, prepend=-1)
    return np.stack([flat[ends].astype(np.int64), lengths], 1).reshape(-1).tolist()


def npy(array: np.ndarray) -> str:
    """An array as base64 of a ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def with_masks(summary: dict[str, Any], prediction: Prediction, form: str) -> dict[str, Any]:
    """A summary with the masks as well: ``runs`` of each, or one array ``npy [N, (D,) H, W]``."""
    labels = prediction.masks.labels[0].numpy()
    if form == "runs":
        masks = [mask | {"runs": runs(one)} for mask, one in zip(summary["masks"], labels, strict=True)]
        return summary | {"masks": masks}
    return summary | {"npy": npy(labels)} if form == "npy" else summary


def file_of(prediction: Prediction, form: str, root: Path) -> File:
    """The files of a prediction.

    Args:
        form: ``npz``: masks.npz; or a zip of what ``ambiseg predict`` writes: ``files`` in the format of the image,
            ``png`` (TIFF of a volume), ``nifti``.
        root: where a temporary folder is made, which is gone when this returns.
    """
    name = prediction.name
    with tempfile.TemporaryDirectory(dir=root) as folder:
        place = Path(folder)
        if form == "npz":
            prediction.masks.save(place / "masks.npz")
            return File((place / "masks.npz").read_bytes(), "application/octet-stream", f"{name}_masks.npz")
        source = prediction.source
        if form == "png":
            source = replace(source, format="PNG", header=b"")
        elif form == "nifti" and source.format != "NIfTI":
            source = replace(source, **as_nifti(source))
        source = with_header(source, place)
        written = write(replace(prediction, name="files", source=source), place / "out")
        return File(_zipped(written), "application/zip", f"{name}.zip")


def as_nifti(source: Source) -> dict[str, Any]:
    """What makes an image of another format one of NIfTI; without a place in space, its pixels are cubes of 1 mm."""
    import nibabel

    affine = source.affine
    if affine is None:  # rows go to the back, columns to the left, slices up
        affine = np.array([[0.0, 0, -1, 0], [0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    header = nibabel.Nifti1Header()
    header.set_data_shape((source.size[1], source.size[0], source.slices))
    header.set_sform(affine[:, [2, 1, 0, 3]], code=1)
    header.set_xyzt_units("mm")
    header["vox_offset"], header["magic"] = header.single_vox_offset, header.single_magic
    return {"format": "NIfTI", "affine": affine, "header": bytes(header.binaryblock) + bytes(4)}


def _zipped(folder: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # its files are compressed already
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return file.getvalue()
