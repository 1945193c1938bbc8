"""Small files that claim, or become, far more than they are."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.files import save_dicom

RNG = np.random.default_rng(0)

# -- the files ---------------------------------------------------------------------------------------------------------


def npy(shape: Any, dtype: str = "|u1", more: str = "", version: int = 1) -> bytes:
    """The header of an array, without its values."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, {more}}}".encode()
    if version == 1:
        text = text.ljust(-(-(len(text) + 11) // 64) * 64 - 11) + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text


def zipped(content: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, part in content.items():
            archive.writestr(name, part)
    return file.getvalue()


def zeros(count: int, start: bytes = b"", wbits: int = 31) -> bytes:
    """So many zeros, compressed without having them."""
    engine, made, block = zlib.compressobj(9, zlib.DEFLATED, wbits), [], bytes(1 << 20)
    made.append(engine.compress(start))
    for _ in range(count >> 20):
        made.append(engine.compress(block))
    return b"".join([*made, engine.flush()])


def many_zeros(start: bytes, gigabytes: int) -> bytes:
    """A member of a zip with a header and gigabytes of zeros: 1 MB of them, deflated, again and again."""
    engine = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = engine.compress(start) + engine.flush(zlib.Z_FULL_FLUSH)
    block = engine.compress(bytes(1 << 20)) + engine.flush(zlib.Z_FULL_FLUSH)
    return head + block * (gigabytes << 10) + engine.flush()


def claiming_zip(start: bytes, gigabytes: int) -> bytes:
    """``image.npy`` of that, with a checksum that nobody will get as far as to compare."""
    data, name, size = many_zeros(start, gigabytes), b"image.npy", len(start) + (gigabytes << 30)
    wide = struct.pack("<HHQQ", 1, 16, size, len(data))
    most = 0xFFFFFFFF
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 8, 0, 0, 0, most, most, len(name), len(wide)) + name + wide
    entry = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\1\2", 45, 45, 0, 8, 0, 0, 0, most, most, len(name), len(wide), *[0] * 5
    )
    directory = entry + name + wide
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(local) + len(data), 0)
    return local + data + directory + end


def nifti(shape: tuple[int, ...], kind: int = 2, **fields: Any) -> bytes:
    """A header; its type is uint8 unless another is given."""
    import nibabel

    header = nibabel.Nifti1Header()
    header["dim"] = [len(shape), *shape, *[1] * (7 - len(shape))]
    header["pixdim"] = 1
    header["datatype"], header["bitpix"], header["vox_offset"], header["magic"] = kind, 8, 352, b"n+1"
    for name, value in fields.items():
        header[name] = value
    return header.binaryblock + bytes(4)


def tiff(*pages: dict[int, Any], tail: int | None = None, extra: bytes = b"") -> bytes:
    """Pages by their tags: a number, or ``(type, count, offset)``; the last leads to byte ``tail``."""
    content, at = bytearray(b"II*\0" + struct.pack("<I", 8 + len(extra)) + extra), 8 + len(extra)
    for k, page in enumerate(pages):
        at += 6 + 12 * len(page)
        content += struct.pack("<H", len(page))
        for code, value in sorted(page.items()):
            content += struct.pack("<HHII", code, *(value if isinstance(value, tuple) else (4, 1, value)))
        last = k == len(pages) - 1
        content += struct.pack("<I", (tail or 0) if last else at)
    return bytes(content)


def page(width: int = 8, height: int = 8, **more: Any) -> dict[int, Any]:
    """One uncompressed strip of 8-bit grey."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: width * height % 2**32}
    return {**tags, **{int(code[1:]): value for code, value in more.items()}}


def png(width: int, height: int, *chunks: tuple[bytes, bytes], colour: int = 0) -> bytes:
    content = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    for kind, data in ((b"IHDR", head), *chunks, (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


def jpeg(width: int, height: int, scans: int = 0) -> bytes:
    """A small JPEG of another size in its header, or whose last scan is there again and again."""
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (64, 64), dtype=np.uint8)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    start = content.index(b"\xff\xc2") + 5
    content = content[:start] + struct.pack(">HH", height, width) + content[start + 4 :]
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * scans + content[-2:]


def gif(width: int, height: int, disposal: int = 0, frames: int = 1) -> bytes:
    control = b"!\xf9\x04" + bytes([disposal << 2, 0, 0, 0, 0])
    frame = control + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + frame * frames + b";"


def dicom(folder: Path, **tags: Any) -> bytes:
    return save_dicom(folder / "made.dcm", np.zeros((8, 8), np.uint16), **tags).read_bytes()


def with_element(content: bytes, element: bytes) -> bytes:
    """Before the first element of the data set."""
    at = content.index(b"\x08\x00\x16\x00UI")
    return content[:at] + element + content[at:]


def nested(depth: int) -> bytes:
    """Sequences of undefined length, each in an item of another."""
    start = struct.pack("<HH2sHI", 0x0008, 0x0006, b"SQ", 0, 0xFFFFFFFF) + struct.pack(
        "<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF
    )
    return start * depth


def deflated(folder: Path) -> bytes:
    content = dicom(folder)
    head = content[: content.index(b"\x08\x00\x16\x00UI")].replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99")
    at = head.index(b"\x02\x00\x10\x00UI") + 6
    head = head[:at] + struct.pack("<H", 22) + head[at + 2 :]
    length = struct.unpack("<I", head[140:144])[0] + 2
    return head[:140] + struct.pack("<I", length) + head[144:] + zeros(1 << 27, wbits=-15)


def boxed(folder: Path) -> bytes:
    """JPEG 2000 as a file of its own has it, which DICOM has not; its second box leads nowhere."""
    from pydicom import dcmread
    from pydicom.encaps import encapsulate
    from pydicom.uid import JPEG2000Lossless

    data = dcmread(save_dicom(folder / "made.dcm", np.zeros((8, 8), np.uint8)))
    data.PixelData = encapsulate([b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64)])
    data["PixelData"].is_undefined_length = True
    data.file_meta.TransferSyntaxUID = JPEG2000Lossless
    data.save_as(folder / "made.dcm", enforce_file_format=True)
    return (folder / "made.dcm").read_bytes()


LIMIT = r"at most 67,108,864 pixels per slice \(--max-pixels\)"
FILE = r"at most 536,870,912 pixels per file \(--max-pixels\)"

BOMBS: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    # NumPy
    "npy of 10⁶ × 10⁶": (".npy", lambda _: npy((10**6, 10**6)), LIMIT),
    "npy of 2⁶³ slices": (".npy", lambda _: npy((2**63, 64, 64)), FILE),
    "npy of negative sides": (".npy", lambda _: npy((-5, 64)), "an array of -5×64"),
    "npy of nothing": (".npy", lambda _: npy((0, 64)), "at least one pixel"),
    "npy with a long header": (".npy", lambda _: npy((8, 8), more="'x': " + "1" * 10**6, version=2), "header of 1,000"),
    "npy with a header of 4 GB": (".npy", lambda _: b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(99), "a header of 4,29"),
    "npy whose header is a call": (".npy", lambda _: npy("__import__('os').getcwd()"), "damage"),
    "npy of deep brackets": (".npy", lambda _: npy("(" * 5000 + ")" * 4000), "damage"),
    "npy of objects": (".npy", lambda _: npy((8, 8), "|O"), "pickled objects"),
    "npy of letters": (".npy", lambda _: npy((8, 8), "<U1") + bytes(256), "expected numbers, found <U1"),
    "npy of complex numbers": (".npy", lambda _: npy((8, 8), "<c16") + bytes(1024), "expected numbers, found comp"),
    "npy of records": (".npy", lambda _: npy((8, 8)).replace(b"'|u1'", b"[('a', '<f8')]"), "damage|expected numbers"),
    "npz of 10⁶ × 10⁶": (".npz", lambda _: zipped({"image.npy": npy((10**6, 10**6))}), LIMIT),
    "npz that inflates to 6 GB": (".npz", lambda _: claiming_zip(npy((6 << 10, 1 << 10, 1 << 10)), 6), FILE),
    "npz with a header of 4 GB": (".npz", lambda _: claiming_zip(b"\x93NUMPY\2\0\xff\xff\xff\xff", 4), "a header of"),
    "npz shorter than it says": (".npz", lambda _: zipped({"image.npy": npy((8000, 8000))}), "ends too early"),
    "npz of bzip2": (".npz", lambda _: zipped({"a.npy": npy((8, 8)) + bytes(64)}, zipfile.ZIP_BZIP2), "a compression"),
    "npz of many arrays": (".npz", lambda _: zipped({f"{i:050}": b"" for i in range(20000)}), "a list of arrays"),
    # NIfTI
    "nii.gz of 4 GB": (".nii.gz", lambda _: zeros(1 << 26, nifti((2048, 2048, 1024))), FILE),
    "nii.gz of 32000² × 100": (".nii.gz", lambda _: gzip.compress(nifti((32000, 32000, 100))), LIMIT),
    "nii of 32000² × 100": (".nii", lambda _: nifti((32000, 32000, 100)), LIMIT),
    "nii shorter than it says": (".nii", lambda _: nifti((8000, 8000, 4)), "ends too early"),
    "nii of seven axes": (".nii", lambda _: nifti((8,) * 7), "expected three axes"),
    "nii of negative sides": (".nii", lambda _: nifti((-8, 8, 8)), "at least one pixel"),
    "nii of complex numbers": (".nii", lambda _: nifti((8, 8, 8), 32, bitpix=64), "expected whole numbers"),
    "nii without a place": (".nii", lambda _: nifti((8, 8, 8), sform_code=1, srow_x=[np.nan] * 4), "finite"),
    "nii with voxels at 10⁹": (".nii", lambda _: nifti((8, 8, 8), vox_offset=1e9), "16,777,216 bytes of extensions"),
    "nii.gz with voxels at 10⁹": (".nii.gz", lambda _: zeros(1 << 26, nifti((8, 8, 8), vox_offset=1e9)), "extensions"),
    "nii.gz with an endless name": (
        ".nii.gz",
        lambda _: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (1 << 23),
        "begins with no content",
    ),
    "nii.gz of empty members": (
        ".nii.gz",
        lambda _: gzip.compress(nifti((64, 64, 64))) + gzip.compress(b"") * 100_000,
        "gzip members",
    ),
    # TIFF
    "TIFF of 200000²": (".tif", lambda _: tiff(page(200_000, 200_000)), LIMIT),
    "TIFF of tiles of 200000²": (".tif", lambda _: tiff(page(200_000, 200_000, _322=16, _323=16)), LIMIT),
    "TIFF of nine pages of 8192²": (".tif", lambda _: tiff(*[page(8192, 8192)] * 9), FILE),
    "TIFF of pages in a circle": (".tif", lambda _: tiff(page(), page(), tail=8), "leads back to an earlier one"),
    "TIFF of pages in a late circle": (".tif", lambda _: tiff(*[page()] * 130, tail=8 + 114 * 60), "leads back"),
    "TIFF of many pages": (".tif", lambda _: tiff(*[{256: 1, 257: 1}] * 16_400), "at most 16,384 pages"),
    "TIFF of many tags": (".tif", lambda _: b"II*\0\x08\0\0\0\xff\xff" + bytes(1 << 20), "at most 4,096 tags"),
    "TIFF of many strips": (
        ".tif",
        lambda _: tiff(page(_273=(4, 2 << 20, 8), _279=(4, 2 << 20, 8)), extra=bytes(8 << 20)),
        "at most 1,048,576 values in tag 273",
    ),
    "TIFF of one strip, 10⁵ times": (
        ".tif",
        lambda _: tiff(
            page(100, 100_000, _278=1, _259=8, _273=(4, 100_000, 8), _279=(4, 100_000, 400_008)),
            extra=struct.pack("<I", 8) * 100_000 + struct.pack("<I", 1 << 16) * 100_000,
        ),
        "lie over each other",
    ),
    "TIFF of strips that inflate": (
        ".tif",
        lambda _: tiff(page(_259=8, _273=8, _279=1 << 18), extra=zeros(1 << 26, wbits=15)),
        "",
    ),
    "TIFF with a tag of 2³²": (".tif", lambda _: tiff(page(_270=(2, 0xFFFFFFFF, 8))), "descriptions|damage"),
    "TIFF of complex numbers": (".tif", lambda _: tiff(page(_258=64, _339=6, _279=512), extra=bytes(512)), "fractions"),
    "TIFF of many channels": (".tif", lambda _: tiff(page(4096, 4096, _277=65535)), "bytes per slice"),
    # pictures
    "PNG of 13000²": (".png", lambda _: png(13_000, 13_000), LIMIT),
    "PNG of 2³¹": (".png", lambda _: png(2**31 - 1, 2**31 - 1), LIMIT),
    "PNG with a text that inflates": (
        ".png",
        lambda _: png(8, 8, *[(b"zTXt", b"a\0\0" + zeros(8 << 20, wbits=15))] * 99),
        "",
    ),
    "PNG with a profile that inflates": (
        ".png",
        lambda _: png(8, 8, (b"iCCP", b"a\0\0" + zeros(1 << 26, wbits=15))),
        "",
    ),
    "PNG with much text": (".png", lambda _: png(8, 8, *[(b"tEXt", b"a\0" + b"b" * (1 << 20))] * 20), "bytes where"),
    "JPEG of 60000²": (".jpg", lambda _: jpeg(60_000, 60_000), LIMIT),
    "JPEG of 5,000 scans": (".jpg", lambda _: jpeg(64, 64, 5_000), "at most 64 scans, found 5,0"),
    "JPEG of 8000² and 40 scans": (".jpg", lambda _: jpeg(8000, 8000, 40), "at most 16 scans, found 4"),
    "BMP of 10⁹": (
        ".bmp",
        lambda _: b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, 10**9, 10**9, 1, 24, *[0] * 6),
        LIMIT,
    ),
    "BMP of 8192² in runs": (
        ".bmp",
        lambda _: (
            b"BM" + struct.pack("<IIIIiiHHIIiiII", 2000, 0, 1078, 40, 8192, 8192, 1, 8, 1, *[0] * 5) + bytes(2000)
        ),
        "4,194,304 pixels in this encoding",
    ),
    "PPM of 10⁹": (".ppm", lambda _: b"P6 1000000000 1000000000 255\n", LIMIT),
    "PPM of a comment": (".ppm", lambda _: b"P6 #" + b"c" * (1 << 25), "no end of it in 65,536 bytes"),
    "PPM of 8000² words": (".ppm", lambda _: b"P3 8000 8000 255\n" + b"1 " * 99, "4,194,304 pixels in this encoding"),
    "GIF of 65535²": (".gif", lambda _: gif(65535, 65535), LIMIT),
    "GIF of 65535² to dispose of": (".gif", lambda _: gif(65535, 65535, disposal=2), LIMIT),
    "GIF of 100,000 frames": (".gif", lambda _: gif(8, 8, frames=100_000), "a film"),
    "PostScript called PNG": (".png", lambda _: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n\0", "no header"),
    # DICOM
    "DICOM of 100,000 frames": (".dcm", lambda at: dicom(at, NumberOfFrames=100_000, Rows=512, Columns=512), FILE),
    "DICOM of 100,000 small frames": (".dcm", lambda at: dicom(at, NumberOfFrames=100_000), "16,384 frames"),
    "DICOM of 65535²": (".dcm", lambda at: dicom(at, Rows=65535, Columns=65535), LIMIT),
    "DICOM shorter than it says": (".dcm", lambda at: dicom(at, Rows=8000, Columns=8000), "ends too early"),
    "DICOM of 24 bits": (
        ".dcm",
        lambda at: dicom(at, BitsAllocated=24),
        "BitsAllocated of 1, 8, 16, 32, 64, found '24'",
    ),
    "DICOM of 60000 bits stored": (".dcm", lambda at: dicom(at, BitsStored=60000), "BitsStored of 1 to 16"),
    "DICOM of no samples": (
        ".dcm",
        lambda at: dicom(at, SamplesPerPixel=None),
        "SamplesPerPixel of 1, 3, found 'None'",
    ),
    "DICOM of no colours": (".dcm", lambda at: dicom(at, PhotometricInterpretation=None), "PhotometricInterpretation"),
    "DICOM of 1e99 frames": (
        ".dcm",
        lambda at: dicom(at, NumberOfFrames=1234).replace(b"IS\x04\x001234", b"IS\x04\x001e99"),
        "found '1e99'",
    ),
    "DICOM of an infinite slope": (
        ".dcm",
        lambda at: (
            dicom(at, RescaleSlope="1e10", RescaleIntercept="0").replace(b"1e10", b"1e99").replace(b"1e99", b"inf ")
        ),
        "finite",
    ),
    "DICOM of deep sequences": (".dcm", lambda at: with_element(dicom(at), nested(50_000)), "damage"),
    "DICOM, deflated": (".dcm", deflated, "found a deflated one"),
    "DICOM of much text": (
        ".dcm",
        lambda at: with_element(dicom(at), struct.pack("<HH2sHI", 8, 5, b"UT", 0, 1 << 25) + bytes(1 << 25)),
        "bytes where fewer are enough|damage",
    ),
    "DICOM of JPEG 2000 in a box without length": (".dcm", boxed, "a box of JPEG 2000 of 0 bytes"),
}
