"""Small files of every format, for the tests of what reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ambiseg._util.errors import DataError
from ambiseg.data.sets.folder.cases import Folder

RNG = np.random.default_rng(0)


def save(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    """A picture, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def save_deep_png(path: Path, pixels: np.ndarray) -> Path:
    """16-bit colour ``[H, W, 3]`` or ``[H, W, 4]``, which Pillow cannot write."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


def save_dicom(path: Path, pixels: np.ndarray, **tags: Any) -> Path:
    """``[H, W]``, ``[H, W, 3]`` or, with NumberOfFrames, ``[D, H, W]``; a tag of ``None`` is left out."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    colour = pixels.ndim == 3 and "NumberOfFrames" not in tags
    height, width = pixels.shape[:2] if colour or pixels.ndim == 2 else pixels.shape[1:]
    bits = 8 * pixels.dtype.itemsize
    defaults: dict[str, Any] = {
        "Modality": "CT",
        "SeriesInstanceUID": "1.2.3",
        "Rows": height,
        "Columns": width,
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": tags.get("BitsStored", bits) - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
    }
    if colour:
        defaults["PlanarConfiguration"] = 0
    for name, value in {**defaults, **tags}.items():
        if value is not None:
            setattr(data, name, value)
    data.PixelData = pixels.tobytes() + b"\0" * (pixels.nbytes % 2)
    data.save_as(path, enforce_file_format=True)
    return path


def save_series(folder: Path, volume: np.ndarray, spacing: float = 2.0, **tags: Any) -> Path:
    """A folder with a file for each slice of ``[D, H, W]``, named in another order than they lie."""
    for k, pixels in enumerate(volume):
        place = {
            "ImagePositionPatient": [-10.0, -20.0, 5.0 + spacing * k],
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "PixelSpacing": [0.5, 0.75],
            "SliceThickness": spacing,
            "InstanceNumber": k + 1,
        }
        save_dicom(folder / f"{(7 * k + 3) % len(volume):03}.dcm", pixels, **{**place, **tags})
    return folder


def save_nifti(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def disc(height: int, width: int, radius: float = 5, row: float = 8, column: float = 8) -> np.ndarray:
    """``[H, W]`` of 0 and 1."""
    y, x = np.mgrid[:height, :width]
    return ((y - row) ** 2 + (x - column) ** 2 < radius**2).astype(np.uint8)


def picture(height: int = 16, width: int = 20, channels: int = 1) -> np.ndarray:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def make(
    root: Path, names: Sequence[str] = ("a", "b", "c"), readers: Sequence[str] = ("Ann", "Bob"), foreground: int = 255
) -> Path:
    """A folder in which everything is right."""
    for i, name in enumerate(names):
        save(root / "images" / f"{name}.png", picture())
        for m, reader in enumerate(readers):
            save(root / "masks" / reader / f"{name}.png", disc(16, 20, 4 + m, 8, 8 + i) * foreground)
    return root


def refusal(*arguments: Any, **options: Any) -> str:
    """The one line with which a folder, or one of its cases, is refused."""
    with pytest.raises(DataError) as caught:
        for _ in Folder(*arguments, **options):
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def made(path: Path) -> Path:
    """The path, with a folder to write it into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
