"""What the files of a store hold: ``store.json``, and the lines of ``cases.jsonl`` and ``draft.jsonl``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator, with_config
from typing_extensions import NotRequired, TypedDict  # pydantic needs it before Python 3.12

from ambiseg.data.case import Cases, Extra, Flip, Reading
from ambiseg.data.intensity import Intensity

ALIGN = 64  # bytes: where the pixels of a case start

_Length = Annotated[int, Field(ge=1, le=1 << 40)]


class Pixels(TypedDict):
    """Where the pixels of a case are in one of the two files."""

    dtype: Annotated[str, Field(pattern=r"^([|<>][bui]1|[<>][uif][248])$")]
    shape: Annotated[list[_Length], Field(min_length=2, max_length=3)]
    at: Annotated[int, Field(ge=0, le=1 << 50, multiple_of=ALIGN)]


class _Regions(Pixels):
    dtype: Annotated[str, Field(pattern=r"^([|<>]u1|[<>]u[248])$")]  # type: ignore[misc]
    shape: Annotated[list[_Length], Field(min_length=2, max_length=2)]


class _Image(Pixels):
    shape: Annotated[list[_Length], Field(min_length=3, max_length=3)]


@with_config(ConfigDict(extra="forbid"))
class Line(TypedDict):
    """One case in ``cases.jsonl`` and ``draft.jsonl``; the latter's lines are signed."""

    name: str
    patient: str
    declared: str | None
    readers: Annotated[list[str], Field(min_length=1)]
    weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None
    void: list[bool] | None
    ids: Annotated[str, Field(pattern=r"^([|<>][bui]1|[<>][ui][248])$")]
    table: Annotated[list[int], Field(min_length=1)]
    image: _Image
    regions: _Regions
    image_digest: str
    digest: str
    origin: NotRequired[dict[str, Any]]
    observed: NotRequired[Any]  # until the cases are settled
    signature: NotRequired[str]


class Header(BaseModel):
    """``store.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["ambiseg.Store/1"]
    state: str
    title: str
    classes: Annotated[tuple[str, ...], Field(min_length=1, max_length=1 << 16)]
    evaluated: tuple[Annotated[int, Field(ge=0)], ...]
    channels: Annotated[int, Field(ge=1, le=1 << 16)]
    intensity: Intensity
    units: str = ""
    reading: Reading = Reading()
    count: Annotated[int, Field(ge=0)]
    patients_known: bool = True
    patients_assumed: str = ""
    group: str = Cases.group
    annotator: str = Cases.annotator
    fingerprint: str | None = None
    about: dict[str, Any] = {}
    extra: Extra | None = None
    flips: tuple[Flip, ...] = ()

    @model_validator(mode="after")
    def _known_classes(self) -> Header:
        flipped = (id for flip in self.flips for id in (flip.source, flip.target))
        for id in (*self.evaluated, *flipped):
            if not 0 <= id < len(self.classes):
                raise ValueError(f"expected class ids below {len(self.classes)}, found {id}")
        return self
