"""What ``/openapi.json`` says about bodies and answers that are not read by FastAPI itself."""

from __future__ import annotations

from typing import Any

from ambiseg.serving.asked import JSON, MULTIPART, Asked

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "what was expected and what was found, in one line"}},
}
_MEANINGS = {
    400: "a body that is not what it says it is",
    401: "no token, or another",
    404: "no such thing",
    408: "a body that stopped arriving",
    409: "not done yet, or cancelled",
    413: "too many bytes or files",
    415: "a type or a format that is not read",
    422: "a field or an image that cannot be used",
    500: "a fault of the service's own",
    503: "the queue is full, or the worker was lost: try again after `Retry-After` seconds",
    504: "it took too long",
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a path, for its description."""
    content = {JSON: {"schema": _ERROR}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in sorted({401, *statuses})}


def _fields() -> dict[str, Any]:
    return Asked.model_json_schema()["properties"]


_IMAGE = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "string", "format": "binary"},
    "description": "an image file, or all DICOM files of one series; the end of its name says the format",
}
_ARRAY = {
    "description": "pixels in the units of the training data, [H, W], [C, H, W] or [D, C, H, W]",
    "oneOf": [
        {"type": "array", "items": {}, "minItems": 1},
        {
            "type": "object",
            "required": ["npy"],
            "additionalProperties": False,
            "properties": {"npy": {"type": "string", "format": "byte", "description": "base64 of a .npy file"}},
        },
    ],
}
_PIXELS = [[-800, -750, -700, -760], [-790, 20, 40, -740], [-810, 35, 30, -770], [-805, -780, -765, -790]]
EXAMPLES: dict[str, Any] = {"pixels": {"summary": "4 × 4 Hounsfield units", "value": {"array": _PIXELS, "samples": 4}}}
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        MULTIPART: {
            "schema": {
                "type": "object",
                "required": ["image"],
                "additionalProperties": False,
                "properties": {"image": _IMAGE, **_fields()},
            }
        },
        JSON: {
            "schema": {
                "type": "object",
                "required": ["array"],
                "additionalProperties": False,
                "properties": {"array": _ARRAY, **_fields()},
            },
            "examples": EXAMPLES,
        },
    },
}
PREDICTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the masks, in the format that was asked for",
        "content": {
            JSON: {"schema": {"type": "object"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    **failures(400, 408, 409, 413, 415, 422, 500, 503, 504),
}
