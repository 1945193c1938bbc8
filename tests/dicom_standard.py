"""The definition of SEG for dicom-validator, from the tables of the standard that highdicom comes with.

dicom-validator downloads the standard itself, which tests must not. highdicom's tables have modules, attributes and
their types, but no conditions: attributes of type 1C and 2C may be absent here.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pydicom import dcmread
from pydicom.datadict import tag_for_keyword

SEG = "1.2.840.10008.5.1.4.1.1.66.4"
_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")


def _table(name: str) -> Any:
    return json.loads((resources.files("highdicom") / "_standard" / f"{name}.json").read_text())


def _tag(keyword: str) -> str:
    found = tag_for_keyword(keyword)
    assert found is not None, keyword
    return f"({found >> 16:04x},{found & 0xFFFF:04x})"


def _module(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """A tree of attributes by tag, from a list of paths."""
    found: dict[str, Any] = {}
    for one in sorted(attributes, key=lambda one: len(one["path"])):
        place, kind = found, one["type"]
        for part in one["path"]:
            place = place.setdefault(_tag(part), {"name": part, "type": "3"}).setdefault("items", {})
        if len(one["path"]) == 1 and one["path"][0] in _GROUPS:
            kind = "3"  # a macro is in one of the two groups
        place.setdefault(_tag(one["keyword"]), {}).update({"name": one["keyword"], "type": kind})
    return found


def seg_info() -> Any:
    from dicom_validator.validator.dicom_info import DicomInfo

    modules, attributes = _table("iod_module_map")[_table("sop_class_iod_map")[SEG]], _table("module_attribute_map")
    uses = {one["key"]: {"ref": one["key"], "use": one["usage"]} for one in modules}
    known = {one["key"]: _module(attributes[one["key"]]) for one in modules}
    iods: Any = {SEG: {"title": "Segmentation", "modules": uses, "group_macros": {}}}
    return DicomInfo({}, iods, known)


def problems(path: Path) -> list[str]:
    """What dicom-validator finds wrong with a SEG: module, attribute, error."""
    from dicom_validator.validator.error_handler import NullValidationResultHandler
    from dicom_validator.validator.iod_validator import IODValidator

    validator = IODValidator(dcmread(path), seg_info(), error_handler=NullValidationResultHandler())
    result = validator.validate()
    return [f"{m} {tag} {error.code}" for m, errors in result.module_errors.items() for tag, error in errors.items()]
