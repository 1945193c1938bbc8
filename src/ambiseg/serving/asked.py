"""What a request asks for: its fields, checked, and its image."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import ClientDisconnect, Request

from ambiseg._util.errors import DataError
from ambiseg._util.npz import read_header
from ambiseg._util.parsing import Mistake, decoded, parse_json
from ambiseg._util.reading import explained
from ambiseg.io.source import Source, judge
from ambiseg.methods.symmetries import COUNTS
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.result import Options
from ambiseg.serving.settings import Limits, Served
from ambiseg.serving.uploads import BadRequest, Meter, Multipart, Upload, shown_name

FileFormat = Literal["npz", "files", "png", "nifti"]
Format = Literal["json", "npz", "files", "png", "nifti"]
MULTIPART, JSON = "multipart/form-data", "application/json"
LARGEST = 1e30


class Asked(BaseModel):
    """Fields of a request, in a form or in JSON."""

    model_config = ConfigDict(extra="forbid", str_max_length=4096)

    model: int | str = Field(0, description="which of the models: its index or its name, see `/v1/models`")
    name: str | None = Field(None, max_length=200, description="of the image; otherwise that of its file")
    per_stratum: int | None = Field(None, ge=1, le=1024, description="weighted masks of each stratum; 4 unless given")
    samples: int | None = Field(None, ge=1, le=1024, description="equally likely masks instead; without strata 16")
    keep: int | None = Field(None, ge=1, le=1024, description="at most so many masks, which stand best for all")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="other masks of the same distribution")
    symmetries: int = Field(
        1,
        description="average over so many flips and quarter turns of the image",
        json_schema_extra={"enum": [*COUNTS]},
    )
    window: int | None = Field(None, ge=0, le=8192, description="side of the windows of a large image; 0: whole")
    overlap: int | None = Field(None, ge=0, le=8192, description="of windows; a quarter of one unless given")
    merge: bool = Field(True, description="merge equal masks and add their weights")
    convert: bool = Field(False, description="read grey as colour, and colour that is grey as grey")
    axes: str | None = Field(None, max_length=5, description="of NumPy files: HW, HWC, CHW, DHW, DHWC or DCHW")
    axis: int | None = Field(None, ge=0, le=2, description="of NIfTI volumes, along which slices are cut")
    assume_low: float | None = Field(None, ge=-LARGEST, le=LARGEST, description="what 0 means in an image for a screen")
    assume_high: float | None = Field(None, ge=-LARGEST, le=LARGEST, description="what its largest number means")
    format: Format = Field(
        "json",
        description="of the answer: JSON, masks.npz, or a zip of files in the format of the image, in PNG or NIfTI",
    )
    masks: Literal["runs", "npy", "none"] = Field("runs", description="how JSON has the masks: runs, npy or none")

    @field_validator("symmetries")
    @classmethod
    def _is_group(cls, found: int) -> int:
        if found not in COUNTS:
            raise ValueError(f"expected one of {', '.join(map(str, COUNTS))}, found {found}")
        return found

    def options(self) -> Options:
        """Those of the prediction."""
        if (self.assume_low is None) != (self.assume_high is None):
            raise BadRequest(422, "assume_low: expected both assume_low and assume_high, found one of them")
        window = None
        if self.assume_low is not None and self.assume_high is not None:
            window = self.assume_low, self.assume_high
        names = ("per_stratum", "samples", "keep", "seed", "window", "overlap", "merge", "convert", "axes", "axis")
        try:
            return Options(
                **{name: getattr(self, name) for name in names}, assume_window=window, symmetries=self.symmetries
            )
        except DataError as error:
            raise BadRequest(422, str(error)) from None

    def index(self, models: Sequence[Served]) -> int:
        """Which model is meant."""
        known = [one.name for one in models]
        given = (
            int(self.model) if isinstance(self.model, str) and self.model.isascii() and self.model.isdigit() else None
        )
        given = self.model if isinstance(self.model, int) else given
        if self.model in known:
            return known.index(str(self.model))
        if given is None or not 0 <= given < len(known):
            found = shown_name(str(self.model))
            raise BadRequest(422, f"model: expected one of {', '.join(known)} or its index, found {found}")
        return given


class Read(NamedTuple):
    """A request that was read."""

    asked: Asked
    image: Source | Upload
    name: str


async def read_request(request: Request, root: Path, limits: Limits, count: Callable[[int], None]) -> Read:
    """Read the body of a request to the end, or to the first thing that is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON:
        return await _read_json(request, limits, count)
    if kind != MULTIPART:
        raise BadRequest(415, f"expected a body of {MULTIPART} or {JSON}, found {shown_name(kind) if kind else 'none'}")
    upload = Upload(root, limits.upload)
    try:
        from python_multipart.multipart import parse_options_header

        _, about = parse_options_header(request.headers["content-type"])
        if not (boundary := about.get(b"boundary")):
            raise BadRequest(400, f"expected a boundary in the type {MULTIPART}, found none")
        body = Multipart(boundary, upload)
        await _stream(request, limits, Meter(limits.upload, count), body.feed)
        body.finish()
        asked = _asked(body.fields)
        _ = upload.files
        return Read(asked, upload, shown_name(asked.name) if asked.name else upload.name)
    except BaseException:
        upload.close()
        raise


async def _read_json(request: Request, limits: Limits, count: Callable[[int], None]) -> Read:
    content = bytearray()
    most = min(limits.text, limits.upload)
    await _stream(request, limits, Meter(most, count), content.extend)
    return await asyncio.to_thread(_from_json, bytes(content))


def _from_json(content: bytes) -> Read:
    try:
        found = parse_json(decoded(content, "JSON"))
    except Mistake as mistake:
        raise BadRequest(400, str(mistake)) from None
    if not isinstance(found, dict):
        raise BadRequest(422, 'expected an object such as {"array": [[0, 1], [1, 0]]}, found something else')
    if "array" not in found:
        raise BadRequest(422, 'array: expected a nested list, or {"npy": base64 of a .npy file}, found none')
    array = found.pop("array")
    asked = _asked(found)
    name = shown_name(asked.name) if asked.name else "image"
    try:
        return Read(asked, array_source(_array(array), name), name)
    except DataError as error:
        raise BadRequest(422, str(error)) from None


def _array(given: Any) -> np.ndarray:
    """The pixels of a request in JSON."""
    if isinstance(given, dict):
        if set(given) != {"npy"} or not isinstance(given["npy"], str):
            raise DataError('array: expected {"npy": base64 of a .npy file}, found another object')
        try:
            file = io.BytesIO(base64.b64decode(given["npy"], validate=True))
            header = read_header(file)
            _judge(header.shape, header.dtype)
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, binascii.Error, EOFError, SyntaxError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"array: expected base64 of a .npy file, found: {' '.join(str(error).split())[:160]}"
            ) from None
    try:
        array = np.array(given)
    except (ValueError, OverflowError, MemoryError):
        raise DataError("array: expected a list of rows of equal length, found one that is none") from None
    _judge(array.shape, array.dtype)
    return array


def _judge(shape: tuple[int, ...], dtype: np.dtype) -> None:
    if len(shape) not in (2, 3, 4) or dtype.kind not in "buif" or 0 in shape:
        found = f"{dtype} {list(shape)}"[:200]
        raise DataError(f"array: expected numbers [H, W], [C, H, W] or [D, C, H, W], found {found}")
    slices, channels, height, width = (1, 1, *shape)[-4:]
    judge(Path("array"), (height, width), slices, channels, dtype)


def _asked(fields: dict[str, Any]) -> Asked:
    try:
        return Asked.model_validate(fields)
    except ValidationError as error:
        raise BadRequest(422, explained(error, "a request")) from None


async def _stream(request: Request, limits: Limits, meter: Meter, take: Callable[[bytes], None]) -> None:
    """Hand on a body piece by piece, as long as it is neither too long nor too slow."""
    deadline = time.monotonic() + limits.seconds
    pieces = request.stream()
    try:
        meter.check_length(request.headers.get("content-length"))
        while True:
            left = min(limits.idle, deadline - time.monotonic())
            try:
                piece = await asyncio.wait_for(anext(pieces), max(left, 0.001))
            except StopAsyncIteration:
                return
            except (asyncio.TimeoutError, TimeoutError):
                raise BadRequest(408, "expected a body that arrives, found a pause that is too long") from None
            except ClientDisconnect:
                raise BadRequest(400, "expected a whole body, found that the client is gone") from None
            meter.add(len(piece))
            take(piece)
    except BadRequest as bad:
        bad.unread = True
        raise
