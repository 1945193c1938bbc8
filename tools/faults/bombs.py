"""Small files that ask for much: headers of huge sizes, streams that inflate, texts that unfold."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from faults.mutate import LAUGHS

_MEGABYTE = 1 << 20


def _zeros(megabytes: int) -> bytes:
    """A raw deflate stream of zeros: a block that is flushed can be repeated, so that nothing is compressed twice."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(b"\0" * _MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + packer.flush()


def _zlib(megabytes: int) -> bytes:
    return b"\x78\x9c" + _zeros(megabytes) + b"\0\0\0\1"


def _gzip(start: bytes, megabytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first + _zeros(megabytes) + b"\0" * 8


def _png(width: int, height: int, bits: int, colour: int, megabytes: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", _zlib(megabytes)) + chunk(b"IEND", b"")


def _tiff(width: int, height: int, strips: int = 1, pages: int = 1) -> bytes:
    """A directory of one picture; ``strips`` and ``pages`` are all of the same bytes."""
    made = bytearray(b"II*\0" + struct.pack("<I", 8))
    for page in range(pages):
        tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 4)]
        tags += [(277, 3, 1, 1), (278, 4, 1, -(-height // strips)), (279, 4, 1, 16)]
        end = 8 + (page + 1) * (2 + 12 * len(tags) + 4)
        if strips > 1:
            tags = [
                (tag, kind, strips if tag in (273, 279) else n, end if tag in (273, 279) else v)
                for tag, kind, n, v in tags
            ]
        made += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        made += struct.pack("<I", end if page + 1 < pages else 0)
    return bytes(made) + struct.pack("<I", 8) * (strips if strips > 1 else 4)


def _npy(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head


def _npz(name: str, content: bytes, megabytes: int = 0) -> bytes:
    """An archive whose one member inflates to ``content`` and zeros; its size is said truly, its sum is wrong."""
    made = io.BytesIO()
    if not megabytes:
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr(name, content)
        return made.getvalue()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH) + _zeros(megabytes)
    size, raw = len(content) + megabytes * _MEGABYTE, name.encode()
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(packed), min(size, 2**32 - 1), len(raw), 0)
    local = b"PK\3\4" + common + raw + packed
    entry = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + raw
    return local + entry + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(local), 0)


def _nifti(dims: tuple[int, ...], kind: int = 4) -> bytes:
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, len(dims), *dims, *([1] * (7 - len(dims))))
    struct.pack_into("<hh", head, 70, kind, {2: 8, 4: 16, 64: 64}[kind])
    struct.pack_into("<8f", head, 76, *([1.0] * 8))
    struct.pack_into("<f", head, 108, 352.0)
    head[344:348] = b"n+1\0"
    return bytes(head)


def _jpeg(width: int, height: int, scans: int = 1) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(made, "JPEG", progressive=scans > 1)
    content = made.getvalue()
    at = next(i for i in range(len(content)) if content[i : i + 2] in (b"\xff\xc0", b"\xff\xc2"))
    content = content[: at + 5] + struct.pack(">HH", height, width) + content[at + 9 :]
    first = content.index(b"\xff\xda")
    return content[:first] + content[first:-2] * scans + content[-2:]


def _dicom(folder: Path, **tags: Any) -> bytes:
    from tests import files

    path = files.save_dicom(folder / "made.dcm", np.zeros((8, 8), np.uint16), **tags)
    content = path.read_bytes()
    path.unlink()
    return content


PICTURES: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "png header": (".png", lambda _: _png(2**31 - 1, 2**31 - 1, 8, 6, 1)),
    "png 13000²": (".png", lambda _: _png(13_000, 13_000, 8, 0, 170)),
    "png 30000² of bits": (".png", lambda _: _png(30_000, 30_000, 1, 0, 120)),
    "png 20000² in colour": (".png", lambda _: _png(20_000, 20_000, 16, 2, 30)),
    "png one row": (".png", lambda _: _png(2**31 - 1, 1, 8, 0, 4)),
    "tiff 200000²": (".tif", lambda _: _tiff(200_000, 200_000)),
    "tiff strips": (".tif", lambda _: _tiff(60_000, 60_000, strips=50_000)),
    "tiff pages": (".tif", lambda _: _tiff(2000, 2000, pages=20_000)),
    "jpeg 65000²": (".jpg", lambda _: _jpeg(65_000, 65_000)),
    "jpeg scans": (".jpg", lambda _: _jpeg(8000, 8000, 3000)),
    "bmp": (
        ".bmp",
        lambda _: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 10**6, 10**6, 1, 24, 0, 0, 0, 0, 0, 0),
    ),
    "gif": (".gif", lambda _: b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0\0;"),
    "ppm": (".ppm", lambda _: b"P6 1000000 1000000 65535\n"),
    "pgm comment": (".pgm", lambda _: b"P5 # " + b"x" * 5_000_000),
    "npy 10⁶×10⁶": (".npy", lambda _: _npy((10**6, 10**6), "<f8")),
    "npy 2⁶³": (".npy", lambda _: _npy((2**62, 4))),
    "npz 10⁶×10⁶": (".npz", lambda _: _npz("image.npy", _npy((10**6, 10**6)))),
    "npz that inflates": (".npz", lambda _: _npz("image.npy", _npy((6000, _MEGABYTE)), 3900)),
    "npz names": (
        ".npz",
        lambda _: _npz("image.npy", b"\x93NUMPY\x02\0" + struct.pack("<I", 2**31) + b"(" * 1000, 2000),
    ),
    "nii 32000²×100": (".nii", lambda _: _nifti((32_000, 32_000, 100))),
    "nii.gz 32000²×100": (".nii.gz", lambda _: _gzip(_nifti((32_000, 32_000, 100)), 100)),
    "nii.gz of 4 GB": (".nii.gz", lambda _: _gzip(_nifti((1024, 1024, 2048)), 4096)),
    "nii.gz without end": (".nii.gz", lambda _: _gzip(b"", 4096)),
    "gzip comment": (".nii.gz", lambda _: b"\x1f\x8b\x08\x10\0\0\0\0\0\xff" + b"x" * 5_000_000),
    "dicom frames": (".dcm", lambda folder: _dicom(folder, NumberOfFrames=100_000)),
    "dicom 65535²": (".dcm", lambda folder: _dicom(folder, Rows=65_535, Columns=65_535)),
    "dicom all": (".dcm", lambda folder: _dicom(folder, Rows=65_535, Columns=65_535, NumberOfFrames=2**31 - 1)),
}

LIDC: dict[str, tuple[str, Callable[[], bytes]]] = {
    "tuples": ("data.pickle", lambda: b"})" + b"\x85" * 300_000 + b"K\x01s."),
    "nested name": ("data.pickle", lambda: b"(" + b"K\x01\x85" * 0 + b"cos\n" + b"K\x01" + b"\x86" * 40 + b"."),
    "doubled tuples": ("data.pickle", lambda: b"K\x012" + b"\x862" * 60 + b"\x86\x93."),
    "doubled keys": ("data.pickle", lambda: b"}K\x01" + b"2\x86" * 60 + b"K\x01s."),
    "long4": ("data.pickle", lambda: b"\x80\x02\x8b\xff\xff\xff\xff" + b"\1" * 100_000),
    "frame": ("data.pickle", lambda: b"\x80\x04\x95" + b"\xff" * 8 + b"." * 1000),
    "binbytes8": ("data.pickle", lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x" * 1000),
    "memo": ("data.pickle", lambda: b"}r\xff\xff\xff\xff" + b"."),
    "int": ("data.pickle", lambda: b"I" + b"9" * 3_000_000 + b"\n."),
    "lists": ("data.pickle", lambda: b"]" + b"2a" * 1_000_000 + b"."),
    "marks": ("data.pickle", lambda: b"(" * 5_000_000 + b"."),
    "npz that inflates": ("crops.npz", lambda: _npz("image.npy", _npy((3900, _MEGABYTE)), 3900)),
    "npz of 10⁶": ("crops.npz", lambda: _npz("masks.npy", _npy((10**6, 4, 10**6, 10**6)))),
    "npz of objects": ("crops.npz", lambda: _npz("image.npy", _npy((4,), "|O") + b"cos\nmkdir\n(VCANARY\ntR.")),
}


def hdf5(path: Path) -> None:
    """Groups of a million million pixels that were never written."""
    import h5py

    with h5py.File(path, "w") as file:
        for part in ("train", "val", "test"):
            file.create_dataset(f"{part}/images", (10**6, 10**4, 10**4), "f8", chunks=(1, 64, 64))
            file.create_dataset(f"{part}/labels", (10**6, 10**4, 10**4, 4), "u1", chunks=(1, 64, 64, 4))


def sparse(path: Path, start: bytes, size: int) -> None:
    """A file of many bytes that takes none on disk."""
    path.write_bytes(start)
    os.truncate(path, size)


TEXTS: dict[str, Callable[[Random], bytes]] = {
    "depth": lambda rng: rng.choice([b"[", b'{"a":', b"- ", b"{a: "]) * 100_000,
    "aliases": lambda _: LAUGHS.encode(),
    "digits": lambda _: b'{"format": ' + b"9" * 1_000_000 + b"}",
    "names": lambda _: b"{" + b",".join(b'"k%d": 0' % i for i in range(200_000)) + b"}",
    "one line": lambda _: b"image,mask\n" + b"x" * 20_000_000,
    "quotes": lambda _: b"image,mask\n" + b'"' * 3_000_001,
    "columns": lambda _: b"image,mask" + b",x" * 100_000 + b"\n" + b"a,b" * 100_000,
}
