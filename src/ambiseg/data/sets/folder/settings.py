"""What the owner of a folder says about it: the file ``ambiseg.json`` beside the data, and arguments over it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import ConfigDict, Field, StrictInt, model_validator

from ambiseg._util.errors import ConfigError
from ambiseg._util.patterns import check_pattern
from ambiseg._util.reading import Unreadable, read_json
from ambiseg.data.intensity import Intensity
from ambiseg.io.errors import FileError
from ambiseg.settings import CLASSES, SettingError, Settings, shown, validate

FILE = "ambiseg.json"
VOID = "void"  # what a value or a colour is mapped to that counts nowhere

Axes: TypeAlias = Literal["HW", "HWC", "CHW", "DHW", "DHWC", "DCHW"]
AXES: tuple[str, ...] = get_args(Axes)
_Count = Annotated[StrictInt, Field(le=CLASSES)]
Target: TypeAlias = int | str  # a class id, or VOID


def _unsaid(description: str) -> Any:
    return Field(default=None, description=description)


class FolderSettings(Settings):
    """How a folder is read. ``None``: not said, and the default of docs/folder.md applies.

    >>> FolderSettings(classes=2, void=255).over(FolderSettings(void=0, title="Discs")).void
    255
    """

    model_config = ConfigDict(frozen=True)

    title: str | None = _unsaid("what the data are, for tables and reports")
    classes: Annotated[tuple[str, ...], Field(max_length=CLASSES)] | _Count | None = _unsaid(
        "names of the class ids, or their number"
    )
    evaluated: tuple[StrictInt, ...] | None = _unsaid("class ids that metrics look at; all but 0 unless given")
    void: Annotated[StrictInt, Field(ge=-(2**31), lt=2**32)] | None = _unsaid(
        "the value in a mask file that marks pixels that count nowhere"
    )
    labels: Literal["auto", "ids", "binary"] | dict[str, Any] | None = _unsaid(
        'what the numbers in a mask file mean. "ids": class ids. "binary": 0 and 255. '
        '{"0": 0, "128": 1, "255": "void"}: a class id (or void) for each value. {"threshold": 128}: that value and '
        'above is class 1. "auto": binary if all masks of the data set together hold just 0 and 255, ids otherwise'
    )
    colours: dict[str, Any] | None = _unsaid(
        'for masks in colour, a class id (or void) for each: {"#000000": 0, "#ff0000": 1}'
    )
    segments: Annotated[dict[str, Any], Field(min_length=1, max_length=4096)] | None = _unsaid(
        "for DICOM SEG and RTSTRUCT, a class id (or void) for each segment or structure by its name or number: "
        '{"PTV": 1, "GTV": 2}. Others are left out; where two overlap, the last is on top'
    )
    channels: Literal[1, 3] | None = _unsaid("3 reads grey images as colour, 1 reads colour images as grey if they are")
    intensity: Intensity | None = _unsaid("how raw values become the network's input")
    units: str | None = _unsaid("of the images' values, such as HU; those of bytes and of CT in DICOM are known")
    patient: str | None = _unsaid(
        "a regular expression on a case's name: its first group, or else the whole match, is the patient"
    )
    images: str | None = _unsaid("the images' folder")
    masks: str | None = _unsaid("the masks' folder")
    image_name: str | None = _unsaid('how an image\'s file is named after its case: "{name}_img"')
    mask_name: str | dict[str, str] | None = _unsaid(
        'how a mask\'s file is named: "{name}_seg", "{name}_{reader}", or one such for each reader'
    )
    image_path: str | None = _unsaid(
        'where images are, for other layouts than images/ and masks/: "{name}/image.nii.gz", with {patient}, {split}, *'
    )
    mask_path: str | None = _unsaid('where masks are, in the same way: "{name}/seg_{reader}.nii.gz"')
    axes: Axes | None = _unsaid("how .npy and .npz arrays are stored; HW or, with three axes, DHW unless given")
    axis: Literal[0, 1, 2] | None = _unsaid(
        "which axis of a NIfTI volume the slices are cut from; the last, 2, unless given"
    )
    slices: Literal["all", "marked"] | None = _unsaid("all slices of a volume, or only marked ones")
    missing: Literal["error", "skip"] | None = _unsaid("an image without any mask is an error, or one to skip")
    geometry: Literal["check", "ignore"] | None = _unsaid(
        "check that a mask lies on its image's grid, or ignore all but the number of voxels"
    )
    dicom: Literal["series", "files"] | None = _unsaid(
        "a folder of DICOM files is the slices of one series, or files that stand alone"
    )

    @model_validator(mode="after")
    def _check(self) -> FolderSettings:
        names, labels = self.class_names, self.labels
        if names is not None and len(names) < 2:
            found = self.classes if isinstance(self.classes, int) else list(names)
            raise SettingError("classes", f"expected names of two classes or more, or their number, found {found}")
        if names is not None and len(set(names)) < len(names):
            raise SettingError("classes", f"expected different names, found {shown(names)}")
        most = 1 << 16 if names is None else len(names)
        if self.evaluated is not None and not (self.evaluated and all(0 <= c < most for c in self.evaluated)):
            raise SettingError("evaluated", f"expected class ids below {most}, found {list(self.evaluated)}")
        if isinstance(labels, Mapping) and "threshold" in labels:
            if len(labels) > 1 or type(labels["threshold"]) is not int:
                raise SettingError("labels", f"expected a threshold alone, a whole number, found {dict(labels)}")
        elif isinstance(labels, Mapping):
            _check_targets("labels", labels, most)
            for value in labels:
                if not re.fullmatch(r"[0-9]{1,18}", value):
                    raise SettingError("labels", f'expected values of a mask, such as "255", found {shown(value)}')
        if self.segments is not None:
            _check_targets("segments", self.segments, most)
        if self.colours is not None:
            _check_targets("colours", self.colours, most)
            for colour in self.colours:
                colour_code(colour)
            if labels not in (None, "auto"):
                raise SettingError("colours", "expected either labels or colours, found both")
        self._check_names()
        return self

    def _check_names(self) -> None:
        if self.patient is not None:
            try:
                check_pattern(self.patient)
            except ValueError as error:
                raise SettingError("patient", str(error)) from None
        for name, template, also in (("image_path", self.image_path, set()), ("mask_path", self.mask_path, {"reader"})):
            fields = set(re.findall(r"\{(\w*)\}", template or "{name}"))
            if "name" not in fields or fields - {"name", "patient", "split"} - also:
                known = ", ".join(f"{{{field}}}" for field in ("patient", "split", *also))
                raise SettingError(name, f"expected a path with {{name}}, and perhaps {known}, found {shown(template)}")
            if any(len(re.findall(r"\*|\{\w+\}", part)) > 3 for part in (template or "").split("/")):
                # Each of them may end anywhere: more would take all day on a long name.
                message = f"expected at most three of {{…}} and * between two slashes, found {shown(template)}"
                raise SettingError(name, message)
        if (self.image_path is None) != (self.mask_path is None):
            given, lacking = sorted(("image_path", "mask_path"), key=lambda name: getattr(self, name) is None)
            raise SettingError(lacking, f"expected it together with {given}, found none")
        templates = self.mask_name.values() if isinstance(self.mask_name, Mapping) else [self.mask_name]
        for name, template in [("image_name", self.image_name), *(("mask_name", t) for t in templates)]:
            if template is not None and template.count("{name}") != 1:
                raise SettingError(name, f'expected {{name}} in it once, as in "{{name}}_seg", found {shown(template)}')

    def over(self, other: FolderSettings) -> FolderSettings:
        """These settings, and those of ``other`` wherever these are ``None``."""
        return other.changed(**{name: value for name, value in self if value is not None})

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The declared classes' names; a number of classes gets plain ones."""
        return plain_names(self.classes) if isinstance(self.classes, int) else self.classes

    @staticmethod
    def load(folder: Path) -> FolderSettings:
        """What the folder's ``ambiseg.json`` says; all ``None`` if there is none."""
        path = folder / FILE
        said = read_settings(path, "E006") if os.path.lexists(path) else {}
        if not isinstance(said, dict):
            found = "a list" if isinstance(said, list) else shown(said)
            raise FileError.of("E006", path, f"expected one object of settings, found {found}")
        try:
            return validate(FolderSettings, said)
        except ConfigError as error:
            raise FileError.of("E006", path, str(error)) from None


@contextmanager
def told(path: Path, code: str) -> Iterator[None]:
    """What is wrong with a settings file or manifest as a problem of the kind ``code``."""
    try:
        yield
    except Unreadable as error:
        fix = "save the file as UTF-8" if "UTF-8" in error.problem else "correct the file's syntax"
        raise FileError.of(code, path, error.problem, fix if "expected a file" not in error.problem else "") from None
    except OSError as error:
        message = f"expected a file that may be read, found: {error.strerror}"
        raise FileError.of(code, path, message, "change the file's permissions") from None


def read_settings(path: Path, code: str) -> Any:
    """The content of a JSON file."""
    with told(path, code):
        return read_json(path)


def plain_names(classes: int) -> tuple[str, ...]:
    """``background, foreground`` for two classes, ``background, class 1, class 2 …`` for more."""
    return ("background", "foreground") if classes == 2 else ("background", *(f"class {c}" for c in range(1, classes)))


def colour_code(colour: str) -> int:
    """``"#ff8000"`` -> 0xff8000."""
    if not re.fullmatch(r"#?[0-9a-fA-F]{6}", colour):
        raise SettingError("colours", f'expected six hexadecimal digits, such as "#ff8000", found {colour!r}')
    return int(colour.removeprefix("#"), 16)


def _check_targets(name: str, table: Mapping[str, Target], most: int) -> None:
    for target in table.values():
        if target != VOID and (type(target) is not int or not 0 <= target < most):
            raise SettingError(name, f'expected a class id below {most} or "void" for each, found {target!r}')
