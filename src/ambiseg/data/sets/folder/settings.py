"""What the owner of a folder says about it: the file ``ambiseg.json`` beside the data, and arguments over it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeAlias

from ambiseg.data.intensity import Intensity
from ambiseg.io.errors import FileError, known

FILE = "ambiseg.json"
VOID = "void"  # what a value or a colour is mapped to that counts nowhere
AXES = ("HW", "HWC", "CHW", "DHW", "DHWC", "DCHW")

Target: TypeAlias = int | str  # a class id, or VOID
Labels: TypeAlias = str | Mapping[str, Target]
_WORDS: dict[str, tuple[str, ...]] = {
    "slices": ("all", "marked"),
    "missing": ("error", "skip"),
    "geometry": ("check", "ignore"),
    "dicom": ("series", "files"),
    "axes": AXES,
}


@dataclass(frozen=True)
class Settings:
    """How a folder is to be read. ``None`` is "not said": the default of the last column of docs/folder.md.

    Args:
        title: what the data are, for tables and reports.
        classes: names of the class ids 0 … C-1, or their number.
        evaluated: class ids that metrics look at; all but 0 unless given.
        void: the value in a mask file that marks pixels that count nowhere.
        labels: what the numbers in a mask file mean. ``"ids"``: class ids. ``"binary"``: 0 and 255.
            ``{"0": 0, "128": 1, "255": "void"}``: a class id (or void) for each value. ``{"threshold": 128}``:
            that value and above is class 1. ``"auto"``: binary if all masks of the data set together hold
            just 0 and 255, ids otherwise.
        colours: for masks in colour, a class id (or void) for each: ``{"#000000": 0, "#ff0000": 1}``.
        channels: 3 reads grey images as colour, 1 reads colour images as grey if they are.
        intensity: how raw values become the network's input.
        patient: a regular expression on a case's name; its first group, or else all that it matches, is the patient.
        images: the images' folder.
        masks: the masks' folder.
        image_name: how an image's file is named after its case: ``"{name}_img"``.
        mask_name: how a mask's file is named: ``"{name}_seg"``, ``"{name}_{reader}"``, or one such for each reader.
        axes: how ``.npy`` and ``.npz`` arrays are stored; ``"HW"`` or, with three axes, ``"DHW"`` unless given.
        axis: which axis of a NIfTI volume the slices are cut from; the last, 2, unless given.
        slices: ``"all"`` slices of a volume, or those that somebody ``"marked"``.
        missing: an image without any mask is an ``"error"``, or one to ``"skip"``.
        geometry: ``"check"`` that a mask lies on its image's grid, or ``"ignore"`` all but the number of voxels.
        dicom: a folder of DICOM files is the slices of one ``"series"``, or ``"files"`` that stand alone.

    >>> Settings(classes=2, void=255).over(Settings(void=0, title="Discs")).void
    255
    >>> Settings(slices="some")
    Traceback (most recent call last):
    ValueError: slices: expected all or marked, found 'some'
    """

    title: str | None = None
    classes: tuple[str, ...] | int | None = None
    evaluated: tuple[int, ...] | None = None
    void: int | None = None
    labels: Labels | None = None
    colours: Mapping[str, Target] | None = None
    channels: int | None = None
    intensity: Intensity | None = None
    patient: str | None = None
    images: str | None = None
    masks: str | None = None
    image_name: str | None = None
    mask_name: str | Mapping[str, str] | None = None
    axes: str | None = None
    axis: int | None = None
    slices: str | None = None
    missing: str | None = None
    geometry: str | None = None
    dicom: str | None = None

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise ValueError(f"{name}: expected {' or '.join(words)}, found {value!r}")
        for name in ("title", "patient", "images", "masks", "image_name"):
            _expect(name, getattr(self, name), str, "a text")
        for name in ("void", "channels", "axis"):
            _expect(name, getattr(self, name), int, "a whole number")
        self._check_classes()
        self._check_labels()
        self._check_names()
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels: expected 1 or 3, found {self.channels}")
        if self.axis not in (None, 0, 1, 2):
            raise ValueError(f"axis: expected 0, 1 or 2, found {self.axis}")
        if isinstance(self.intensity, Mapping):
            object.__setattr__(self, "intensity", _intensity(self.intensity))
        _expect("intensity", self.intensity, Intensity, 'an object such as {"low": 0, "high": 4095}')

    def _check_classes(self) -> None:
        classes = self.classes
        if isinstance(classes, Sequence) and not isinstance(classes, str):
            if not all(isinstance(name, str) for name in classes) or len(set(classes)) < len(classes):
                raise ValueError(f"classes: expected different names, found {list(classes)}")
            object.__setattr__(self, "classes", tuple(classes))
            classes = len(classes)
        if classes is not None and (not isinstance(classes, int) or classes < 2):
            raise ValueError(f"classes: expected names of two classes or more, or their number, found {classes!r}")
        if self.evaluated is not None:
            most = classes or 1 << 16
            if not self.evaluated or not all(isinstance(c, int) and 0 <= c < most for c in self.evaluated):
                raise ValueError(f"evaluated: expected class ids below {most}, found {self.evaluated!r}")
            object.__setattr__(self, "evaluated", tuple(self.evaluated))

    def _check_labels(self) -> None:
        labels = self.labels
        if isinstance(labels, str) and labels not in ("auto", "ids", "binary"):
            raise ValueError(f"labels: expected auto, ids, binary or a table, found {labels!r}")
        if isinstance(labels, Mapping):
            if "threshold" in labels and (len(labels) > 1 or not isinstance(labels["threshold"], int)):
                raise ValueError(f"labels: expected a threshold alone, a whole number, found {dict(labels)}")
            if "threshold" not in labels:
                self._check_targets("labels", labels)
                for value in labels:
                    if not re.fullmatch(r"\d+", str(value)):
                        raise ValueError(f'labels: expected values of a mask, such as "255", found {value!r}')
        elif labels is not None and not isinstance(labels, str):
            raise ValueError(f"labels: expected auto, ids, binary or a table, found {labels!r}")
        if self.colours is not None:
            _expect("colours", self.colours, Mapping, 'a table such as {"#ff0000": 1}')
            self._check_targets("colours", self.colours)
            for colour in self.colours:
                colour_code(colour)
            if labels not in (None, "auto"):
                raise ValueError("colours: expected either labels or colours, found both")

    def _check_targets(self, name: str, table: Mapping[str, Target]) -> None:
        most = 1 << 16 if self.class_names is None else len(self.class_names)
        for target in table.values():
            if target != VOID and (not isinstance(target, int) or not 0 <= target < most):
                raise ValueError(f'{name}: expected a class id below {most} or "void" for each, found {target!r}')

    def _check_names(self) -> None:
        if self.patient is not None:
            try:
                re.compile(self.patient)
            except re.error as error:
                raise ValueError(f"patient: expected a regular expression, found {self.patient!r} ({error})") from None
        templates = self.mask_name.values() if isinstance(self.mask_name, Mapping) else [self.mask_name]
        for name, template in [("image_name", self.image_name), *(("mask_name", t) for t in templates)]:
            _expect(name, template, str, "a text")
            if template is not None and template.count("{name}") != 1:
                raise ValueError(f'{name}: expected {{name}} in it once, as in "{{name}}_seg", found {template!r}')

    def over(self, other: Settings) -> Settings:
        """These settings, and those of ``other`` wherever these say nothing."""
        return replace(other, **{f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None})

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The declared classes' names; a number of classes gets plain ones."""
        return plain_names(self.classes) if isinstance(self.classes, int) else self.classes

    def as_dict(self) -> dict[str, object]:
        """What was said, ready for JSON."""
        said = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        if isinstance(self.intensity, Intensity):
            said["intensity"] = {name: v for name, v in asdict(self.intensity).items() if v is not None}
        return said

    @staticmethod
    def load(folder: Path) -> Settings:
        """What the folder's ``ambiseg.json`` says; nothing, if there is none."""
        path = folder / FILE
        if not path.is_file():
            return Settings()
        try:
            said = json.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            message, fix = f"expected a file that may be read, found: {error.strerror}", "change the file's permissions"
            raise FileError.of("E006", path, message, fix) from None
        except ValueError as error:  # a decoding error is one, too
            message = f"expected JSON, found a mistake: {error}"
            raise FileError.of("E006", path, message, "correct the file's syntax") from None
        if not isinstance(said, dict):
            raise FileError.of("E006", path, f"expected one object of settings, found a {type(said).__name__}")
        names = [field.name for field in fields(Settings)]
        for key in said:
            if key not in names:
                raise FileError.of("E006", path, f"expected known settings, found {key!r}; {known(key, names)}")
        try:
            return Settings(**said)
        except (ValueError, TypeError) as error:
            raise FileError.of("E006", path, str(error)) from None


def plain_names(classes: int) -> tuple[str, ...]:
    """``background, foreground`` for two classes, ``background, class 1, class 2 …`` for more."""
    return ("background", "foreground") if classes == 2 else ("background", *(f"class {c}" for c in range(1, classes)))


def colour_code(colour: str) -> int:
    """``"#ff8000"`` -> 0xff8000."""
    if not isinstance(colour, str) or not re.fullmatch(r"#?[0-9a-fA-F]{6}", colour):
        raise ValueError(f'colours: expected six hexadecimal digits, such as "#ff8000", found {colour!r}')
    return int(colour.removeprefix("#"), 16)


def _expect(name: str, value: object, kind: type, what: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{name}: expected {what}, found {value!r}")


def _intensity(said: Mapping[str, object]) -> Intensity:
    names = [field.name for field in fields(Intensity)]
    for key in said:
        if key not in names:
            raise ValueError(f"intensity: expected known keys, found {key!r}; {known(key, names)}")
    return Intensity(**said)  # type: ignore[arg-type]
