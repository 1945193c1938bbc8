"""What is written as JSON: frozen, with known fields only, and ``None`` for a number that has no value."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

Number: TypeAlias = Annotated[float | None, BeforeValidator(lambda value: None if value != value else value)]
"""A number, or ``None`` where there is no value; nan becomes ``None``."""


class Record(BaseModel):
    """Base of all records that ambiseg writes and reads again.

    >>> class Score(Record):
    ...     mean: Number
    >>> Score(mean=float("nan")).model_dump_json()
    '{"mean":null}'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
