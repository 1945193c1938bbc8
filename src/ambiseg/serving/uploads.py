"""Uploads: a body is written to a folder of the service's own while it arrives, and refused as soon as it is too long.

No name that a client sends is ever a path: of ``../../scan.NII.GZ`` only the format is used, and the last part of it in
messages.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ambiseg._util.parsing import size_text
from ambiseg._util.text import printable
from ambiseg.io.formats import FORMATS, UNREAD, stem_of, suffix_of
from ambiseg.serving.tasks import Files

_FIELDS, _FIELD = 64, 4096  # form fields, and bytes of each
_FILES = 4096  # slices of a series
_MAGIC = 132  # bytes that say whether a file is DICOM


class BadRequest(Exception):
    """A request that cannot be answered as it was meant: a status of HTTP, and one line.

    Attributes:
        unread: whether its body was not read to the end.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self.status, self.unread = status, False


class Upload:
    """The files of one request in a private folder, which :meth:`close` removes.

    Args:
        root: the folder of the service, which only its user can read.
        most: bytes of all files.
    """

    def __init__(self, root: Path, most: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=root))
        self.most, self.size = most, 0
        self._names: dict[str, str] = {}
        self._open: BinaryIO | None = None
        self._given = ""

    @property
    def files(self) -> Files:
        """What is to be read; :class:`BadRequest` if there is nothing, or several files that are no series."""
        if not self._names:
            raise BadRequest(422, "image: expected a file, found none")
        if len(self._names) > 1 and (others := [x for x in self._names if not x.endswith(".dcm")]):
            found = f"{len(self._names)} files, one of them {self._names[others[0]]}"
            raise BadRequest(422, f"image: expected one file, or the DICOM files of one series, found {found}")
        return Files(str(self.folder), dict(self._names))

    @property
    def name(self) -> str:
        """Of the image: the client's name for it without the suffix."""
        first = next(iter(self._names.values()), "")
        return stem_of(Path(first)).strip(". ") or "image" if len(self._names) == 1 else "series"

    def begin(self, given: str) -> None:
        """The next file, which the client calls so."""
        self.end()
        if len(self._names) >= _FILES:
            raise BadRequest(413, f"image: expected at most {_FILES:,} files, found more")
        self._given = shown_name(given)
        self._open = (self.folder / "incoming").open("xb")

    def write(self, content: bytes | memoryview) -> None:
        """The next bytes of the file that was begun."""
        assert self._open is not None
        self.size += len(content)
        self._open.write(content)

    def end(self) -> None:
        """The file that was begun is complete: it gets the suffix of its format, and no other part of its name."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        incoming, suffix = self.folder / "incoming", suffix_of(Path(self._given))
        if suffix not in FORMATS:
            with incoming.open("rb") as file:
                dicom = file.read(_MAGIC)[128:] == b"DICM"
            if not dicom:
                found = UNREAD.get(suffix) or repr(self._given)
                raise BadRequest(415, f"image: expected a name that ends in one of {' '.join(FORMATS)}, found {found}")
            suffix = ".dcm"
        ours = f"{len(self._names):05}{'.dcm' if suffix == '.dicom' else suffix}"
        incoming.rename(self.folder / ours)
        self._names[ours] = self._given

    def close(self) -> None:
        """Remove the folder."""
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
            self._open = None
        shutil.rmtree(self.folder, ignore_errors=True)


def shown_name(given: str) -> str:
    r"""The last part of a client's name for a file, as it may stand in messages and in answers.

    >>> shown_name("../../etc/passwd"), shown_name("C:\\scans\\a b.png"), shown_name("")
    ('passwd', 'a b.png', 'image')
    """
    last = re.split(r"[/\\]", printable(given).replace("\n", " "))[-1].strip()
    last = re.sub(r'[<>:"|?*\x00-\x1f]', "_", last)
    return ("…" + last[-120:] if len(last) > 120 else last) or "image"


class Multipart:
    """A body of ``multipart/form-data`` that is fed piece by piece.

    Args:
        boundary: of its parts.
        upload: where parts named ``image`` go.

    Attributes:
        fields: all other parts, as text.
    """

    def __init__(self, boundary: bytes, upload: Upload) -> None:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser

        self.fields: dict[str, str] = {}
        self.upload, self._wrong = upload, FormParserError
        self._headers: dict[bytes, bytes] = {}
        self._key, self._value = bytearray(), bytearray()
        self._field, self._content, self._complete = "", bytearray(), False
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        calls: Any = {f"on_{name}": getattr(self, f"_{name}") for name in (*names, "headers_finished", "end")}
        try:
            self._parser = MultipartParser(boundary, calls)
        except FormParserError as error:
            raise BadRequest(400, f"expected multipart/form-data, found a mistake: {error}") from None

    def feed(self, content: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(content)
        except self._wrong as error:
            raise BadRequest(400, f"expected multipart/form-data, found a mistake: {error}") from None

    def finish(self) -> None:
        """The body has ended."""
        if not self._complete:
            raise BadRequest(400, "expected multipart/form-data with an end, found a body that ends too early")

    def _part_begin(self) -> None:
        self._headers.clear()
        self._field = ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._key += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[bytes(self._key).lower()] = bytes(self._value)
        self._key.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise BadRequest(400, "expected parts with a name, found one without")
        self._field = name
        if name == "image":
            self.upload.begin(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif name in self.fields:
            raise BadRequest(422, f"{shown_name(name)}: expected one value, found several")
        elif len(self.fields) >= _FIELDS:
            raise BadRequest(413, f"expected at most {_FIELDS} fields, found more")
        self._content.clear()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "image":
            self.upload.write(data[start:end])
            return
        self._content += data[start:end]
        if len(self._content) > _FIELD:
            raise BadRequest(413, f"{shown_name(self._field)}: expected at most {_FIELD:,} bytes, found more")

    def _part_end(self) -> None:
        if self._field == "image":
            self.upload.end()
            return
        try:
            self.fields[self._field] = self._content.decode()
        except UnicodeDecodeError:
            raise BadRequest(422, f"{shown_name(self._field)}: expected a text in UTF-8, found other bytes") from None

    def _end(self) -> None:
        self._complete = True


class Meter:
    """Counts the bytes of a body, and those of all that are read at the moment.

    Args:
        most: of this body.
        count: told of every piece.
    """

    def __init__(self, most: int, count: Callable[[int], None] = lambda number: None) -> None:
        self.most, self.size, self._count = most, 0, count

    def check_length(self, claimed: str | None) -> None:
        """Judge what the header ``Content-Length`` claims, before a byte is read."""
        if claimed is not None and claimed.isascii() and claimed.isdigit() and int(claimed[:20]) > self.most:
            raise BadRequest(413, f"expected at most {size_text(self.most)}, found {size_text(int(claimed[:20]))}")

    def add(self, number: int) -> None:
        """So many bytes more; :class:`BadRequest` as soon as it is too many."""
        self.size += number
        self._count(number)
        if self.size > self.most:
            raise BadRequest(413, f"expected at most {size_text(self.most)}, found more")
