"""Damage that a reader's first checks do not see: containers stay valid, what is in them does not."""

from __future__ import annotations

import ast
import gzip
import io
import json
import sqlite3
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random

from faults.judge import CANARY
from faults.lidc import CALLS, hdf5, pickled, sqlite, xml
from faults.mutate import INTEGERS, as_csv, as_json, as_lines, as_yaml, damaged, splice


def damage(rng: Random, path: Path, second: Path | None = None) -> None:
    """Change a file in its place, as its format asks or byte by byte.

    Args:
        second: another file, to splice with.
    """
    content, name = path.read_bytes(), path.name
    if second is not None and rng.random() < 0.1:
        path.write_bytes(splice(rng, content, second.read_bytes()))
        return
    if rng.random() < 0.75:
        if name.endswith((".hdf5", ".h5")):
            with suppress(Exception):  # h5py refuses some of it
                return hdf5(rng, path)
        elif name.endswith(".sqlite"):
            with suppress(sqlite3.Error, OverflowError, UnicodeError):
                return sqlite(rng, path)
        elif name.endswith(".dcm"):
            with suppress(Exception):  # pydicom refuses some of it
                return _dicom(rng, path)
        for suffix, mutation in _BY_SUFFIX.items():
            if name.endswith(suffix):
                path.write_bytes(mutation(rng, content))
                return
    path.write_bytes(damaged(rng, content))


# -- pictures ---------------------------------------------------------------------------------------------------------


def png(rng: Random, content: bytes) -> bytes:
    """Chunks with other content and right sums."""
    chunks, at = [], 8
    while at + 8 <= len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += size + 12
    if not chunks:
        return damaged(rng, content)
    at = rng.randrange(len(chunks))
    kind, body = chunks[at]
    what = rng.randrange(7)
    if what < 2 and chunks[0][0] == b"IHDR":
        at, (kind, body) = 0, chunks[0]
        size = struct.pack(">II", *(rng.choice([0, 1, 31, 2**16, 20_000, 2**31 - 1, 2**32 - 1]) for _ in range(2)))
        body = rng.choice([size + body[8:], body[:8] + bytes(rng.randrange(20) for _ in range(5))])
        chunks[at] = kind, body
    elif what == 2:
        chunks[at] = kind, damaged(rng, body)
    elif what == 3:
        chunks[at : at + 1] = rng.choice([[], [chunks[at]] * 2])
    elif what == 4 and kind == b"IDAT":
        with suppress(zlib.error):
            chunks[at] = kind, zlib.compress(damaged(rng, zlib.decompress(body)))
    else:
        bomb = zlib.compress(b"\0" * 10**6)
        extra = [(b"zTXt", b"x\0\0" + bomb), (b"iCCP", b"x\0\0" + bomb), (b"tEXt", b"a\0b" * 99), (b"PLTE",
                 rng.randbytes(30)),
                 (b"tRNS", rng.randbytes(5)), (b"acTL", b"\0\0\xff\xff\0\0\0\0"), (b"eXIf", rng.randbytes(60)),
                 (b"XXXX", b"")]  # fmt: skip
        chunks.insert(rng.randrange(len(chunks) + 1), rng.choice(extra))
    made = (struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return content[:8] + b"".join(made)


def tiff(rng: Random, content: bytes) -> bytes:
    """An entry of a directory with another type, count or value."""
    order = {b"II": "<", b"MM": ">"}.get(content[:2])
    if order is None or len(content) < 16:
        return damaged(rng, content)
    entries, at, seen = [], struct.unpack_from(f"{order}I", content, 4)[0], set[int]()
    while 8 <= at <= len(content) - 6 and at not in seen:
        seen.add(at)
        (count,) = struct.unpack_from(f"{order}H", content, at)
        entries += [at + 2 + 12 * i for i in range(count) if at + 14 + 12 * i <= len(content)]
        end = at + 2 + 12 * count
        at = struct.unpack_from(f"{order}I", content, end)[0] if end + 4 <= len(content) else 0
    if not entries:
        return damaged(rng, content)
    made, at = bytearray(content), rng.choice(entries)
    code, shift = rng.choice([("H", 0), ("H", 2), ("I", 4), ("I", 4), ("I", 8), ("I", 8), ("H", 8)])
    number = rng.choice([*INTEGERS, rng.randrange(70000), struct.unpack_from(f"{order}I", content, at + 8)[0] + 1])
    if shift == 0:
        number = rng.choice([256, 257, 258, 259, 262, 273, 277, 278, 279, 284, 317, 320, 322, 323, 330, 338, 339, 347])
    struct.pack_into(f"{order}{code}", made, at + shift, number % (65536 if code == "H" else 2**32))
    if rng.random() < 0.1:  # the next directory is this one
        struct.pack_into(f"{order}I", made, 4, rng.randrange(len(made)))
    return bytes(made)


def nifti(rng: Random, content: bytes) -> bytes:
    """Fields of the header."""
    if len(content) < 348:
        return damaged(rng, content)
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 2])):
        at, code = rng.choice(
            [(0, "i"), *((40 + 2 * i, "h") for i in range(8)), (70, "h"), (72, "h"), *((76 + 4 * i,
            "f") for i in range(8)), (108, "f"),
             (112, "f"), (116, "f"), (252, "h"), (254, "h"), *((256 + 4 * i, "f") for i in range(18)), (344, "i")]
        )  # fmt: skip
        if code == "f":
            struct.pack_into(
                "<f", made, at, rng.choice([0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"), 352.0, 1e6])
            )
        else:
            size = {"h": 16, "i": 32}[code]
            number = rng.choice([*INTEGERS, 2, 4, 16, 64, 128, 512, 1792, 2304]) % 2**size
            made[at : at + size // 8] = number.to_bytes(size // 8, "little")
    return bytes(made)


def _dicom(rng: Random, path: Path) -> None:
    """An element with another value, or none, or one more."""
    import warnings

    import pydicom
    from pydicom.uid import UID

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = pydicom.dcmread(path, force=True)
        elements = [element for element in data if element.keyword]
        for _ in range(rng.choice([1, 1, 2])):
            element = rng.choice(elements)
            what = rng.randrange(5)
            if what == 0:
                del data[element.tag]
                elements.remove(element)
            elif element.keyword == "PixelData":
                data.PixelData = damaged(rng, data.PixelData)[:65536] + b"\0" * rng.choice([0, 1, 1000])
            elif element.VR in ("US", "SS", "UL", "SL"):
                element.value = rng.choice([0, 1, 2, 3, 7, 8, 12, 16, 32, 64, 255, 65535, [1, 2]])
            elif element.VR in ("DS", "IS"):
                element._value = rng.choice(
                    ["", "nan", "1e300", "-1", "0", "x", "1\\2\\3", "99999999999", "1e-300", "inf"]
                )
            elif element.VR == "UI":
                element._value = rng.choice(["", "1.2.3", "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.5", "x" * 200])
            else:
                element._value = rng.choice(
                    ["", "RGB", "MONOCHROME1", "PALETTE COLOR", "YBR_FULL", "x" * 300, "\\" * 50, "ä"]
                )
        if rng.random() < 0.15:
            data.NumberOfFrames = rng.choice(["0", "-1", "2", "100000", "2147483648", "x"])
        if rng.random() < 0.1:
            syntaxes = [
                "1.2.840.10008.1.2",
                "1.2.840.10008.1.2.2",
                "1.2.840.10008.1.2.5",
                "1.2.840.10008.1.2.1.99",
                "1.2.840.10008.1.2.4.90",
            ]
            data.file_meta.TransferSyntaxUID = UID(rng.choice(syntaxes))
        made = io.BytesIO()
        data.save_as(made, enforce_file_format=False)
    path.write_bytes(made.getvalue())


# -- arrays and containers --------------------------------------------------------------------------------------------

DTYPES = [
    "|O",
    "<U1",
    "<c16",
    "|V8",
    ">i8",
    "<f2",
    "<m8[s]",
    "<M8[ns]",
    "|b1",
    "|S0",
    "<f16",
    "x",
    "<i3",
    "|u1",
    "<U1000000",
]


def npy(rng: Random, content: bytes) -> bytes:
    """A header that says another type, order or shape."""
    if content[:6] != b"\x93NUMPY":
        return damaged(rng, content)
    size = int.from_bytes(content[8:10], "little")
    try:
        header = ast.literal_eval(content[10 : 10 + size].decode("latin-1"))
    except (ValueError, SyntaxError):
        return damaged(rng, content)
    what, body = rng.randrange(8), content[10 + size :]
    if what < 3:
        shape = list(header["shape"]) or [1]
        shape[rng.randrange(len(shape))] = rng.choice([*INTEGERS, 3, 4, 10**6, "x", None, 2.5])
        header["shape"] = tuple(rng.choice([shape, shape, [*shape, 1], shape[:-1], [0, *shape], [1] * 40]))
    elif what < 5:
        header["descr"] = rng.choice([*DTYPES, [("a", "<f8"), ("b", "|O")], [("a", "<f8", (10**6,))], "f8,f8", ""])
    elif what == 5:
        header["fortran_order"] = rng.choice([True, None, "x"])
    elif what == 6:
        header = rng.choice(
            [{}, {"shape": ()}, {**header, "more": 1}, [], {"descr": "<f8", "fortran_order": False, "shape": ()}]
        )
    if isinstance(header, dict) and header.get("descr") == "|O" and rng.random() < 0.7:
        body = CALLS[rng.randrange(len(CALLS))]
    text = repr(header).encode("latin-1") if rng.random() < 0.95 else b"(" * 5000
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return content[:8] + (len(text) % 65536).to_bytes(2, "little") + text + body


def zipped(rng: Random, content: bytes) -> bytes:
    """An archive with one member changed, left out, doubled or renamed."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(info, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, ValueError, OSError):
        return damaged(rng, content)
    if not members or rng.random() < 0.1:
        return damaged(rng, content)
    at = rng.choice(
        [i for i, (info, _) in enumerate(members) if info.filename.endswith(".pkl")] * 3 + [*range(len(members))]
    )
    info, body = members[at]
    what = rng.randrange(8)
    if what < 6:
        name = info.filename
        mutation = npy if name.endswith(".npy") else pickled if name.endswith(".pkl") else _numbers
        members[at] = info, mutation(rng, body)
    elif what == 6:
        del members[at]
    else:
        info.filename = rng.choice(
            ["../../" + CANARY, "/tmp/" + CANARY, "x.npy", "image.npy", "", "a" * 300, "archive/data.pkl"]
        )
    made = io.BytesIO()
    with zipfile.ZipFile(
        made, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    ) as archive:
        for info, body in members:
            archive.writestr(info.filename or "x", body)
    return made.getvalue()


def _numbers(rng: Random, content: bytes) -> bytes:
    """Raw numbers: not a number, infinite, or too few."""
    if rng.random() < 0.4:
        return damaged(rng, content)
    at = 4 * rng.randrange(max(1, len(content) // 4))
    number = struct.pack("<f", rng.choice([float("nan"), float("inf"), 1e38, -1e38]))
    return rng.choice([content[:at] + number + content[at + 4 :], number * (len(content) // 4), content[:at], b""])


def gzipped(rng: Random, content: bytes) -> bytes:
    """What is in it, changed, in a stream that is whole."""
    if rng.random() < 0.3:
        return damaged(rng, content)
    with suppress(OSError, EOFError, zlib.error):
        return gzip.compress(nifti(rng, gzip.decompress(content)), mtime=0) + rng.choice(
            [b"", b"", b"more", b"\0" * 1000]
        )
    return damaged(rng, content)


# -- weights -----------------------------------------------------------------------------------------


def safetensors(rng: Random, content: bytes) -> bytes:
    """A header that says something else, or weights that are no numbers."""
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], content[8 + size :]
    if rng.random() < 0.3:
        return content[: 8 + size] + _numbers(rng, body)
    with suppress(ValueError):
        if rng.random() < 0.5:  # what a reader cannot see: another shape of as many, names exchanged
            parsed = json.loads(header)
            first, second = rng.choice(list(parsed)), rng.choice(list(parsed))
            parsed[first], parsed[second] = parsed[second], parsed[first]
            header = json.dumps(parsed).encode()
        else:
            header = as_json(rng, header)
    length = len(header) if rng.random() < 0.8 else rng.choice(INTEGERS) % 2**64
    return length.to_bytes(8, "little") + header + body


_BY_SUFFIX = {
    ".png": png, ".tif": tiff, ".tiff": tiff, ".nii.gz": gzipped, ".nii": nifti, ".npy": npy, ".npz": zipped,
    ".ckpt": zipped,
    ".safetensors": safetensors, ".pickle": pickled, ".pkl": pickled, ".json": as_json, ".jsonl": as_lines,
    ".yaml": as_yaml,
    ".yml": as_yaml, ".csv": as_csv, ".xml": xml,
}  # fmt: skip
