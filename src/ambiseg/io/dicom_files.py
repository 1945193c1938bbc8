"""What all readers of DICOM share: headers within limits, kinds of objects, codestreams that decoders survive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ambiseg.io.errors import FileError
from ambiseg.io.source import Frugal, WholeRead, guard

HEADER = 16 << 20  # bytes of a header that may be read; what is not asked for is skipped
DECODE = "pip install pylibjpeg[all], or decompress the files, for example with `dcmdjpeg` or `gdcmconv --raw`"
_MODALITY = 0x00080060


def read_header(file: Path, tags: Sequence[Any], allowance: int = HEADER) -> Any:
    """Some attributes of a file, without its pixels; damage is not turned into a ``DataError`` yet."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    try:
        with Frugal(file, allowance) as content:
            header: Any = dcmread(content, stop_before_pixels=True, specific_tags=list(tags))
    except InvalidDicomError:
        raise ValueError("no DICOM header") from None
    except WholeRead:  # pydicom inflates such a file at once, whatever it becomes, and does not decode it
        found = "expected a DICOM that can be decoded, found a deflated one"
        raise FileError.of("E202", file, found, DECODE) from None
    header.filename = str(file)
    return header


def modality_of(file: Path) -> str:
    """What a DICOM file is, such as ``CT`` or ``SEG``; ``""`` for one that cannot be read this far."""
    from pydicom.filereader import read_partial

    with suppress(Exception), guard(file), Frugal(file, HEADER) as content:
        found: Any = read_partial(content, stop_when=lambda tag, *_: tag > _MODALITY)
        return str(found.get("Modality", ""))
    return ""


def judge_boxes(content: bytes) -> None:
    """JPEG 2000 in boxes, which DICOM has not but some files have: at one of no length, pydicom stays for ever."""
    place = 12 if content.startswith(b"\0\0\0\x0cjP  ") else len(content)
    while place < len(content) and content[place + 4 : place + 8] != b"jp2c":
        if (length := int.from_bytes(content[place : place + 4], "big")) < 8:
            raise ValueError(f"a box of JPEG 2000 of {length} bytes")
        place += length
