"""Problems of data files: each kind has a code and a remedy, and each problem names its file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ambiseg._util.errors import DataError
from ambiseg._util.text import count, did_you_mean

SEVERITIES = {"E": "error", "W": "warning", "H": "hint"}


class Kind(NamedTuple):
    """One kind of problem: a short name, and what to do about it."""

    name: str
    remedy: str


# Data with an error cannot be loaded as they are; a warning is a likely mistake; a hint is advice.
KINDS: dict[str, Kind] = {
    # The folder, its settings and its manifest
    "E001": Kind("no-such-path", "check the spelling of the path"),
    "E002": Kind("not-a-data-set", "put pictures into images/ and masks into masks/<reader>/, or write a manifest"),
    "E003": Kind("no-images", "put the pictures into images/, or name their folder in the setting `images`"),
    "E004": Kind("no-masks", "put masks into masks/<reader>/, named as the images, or name the folder in `masks`"),
    "E005": Kind("files-beside-readers", "move the files into a reader's folder, or the folders out of masks/"),
    "E006": Kind("bad-settings", "correct the key; docs/folder.md lists them all"),
    "E007": Kind("bad-manifest", "correct the row; docs/folder.md shows both forms of a manifest"),
    "E008": Kind("split-missing", "give every case a split, or none"),
    "E009": Kind("patient-not-found", "write a pattern that finds the patient in every name"),
    # Which file belongs to which
    "E101": Kind("image-without-mask", 'add the mask, remove the image, or leave such images out: "missing": "skip"'),
    "W102": Kind("mask-without-image", "rename the mask after its image, or describe its name in `mask_name`"),
    "E103": Kind("reader-without-image", "name the reader's masks after the images, or describe them in `mask_name`"),
    "E104": Kind("name-taken-twice", "keep one of the files, or give them different names"),
    "E105": Kind("format-not-read", "convert the file to PNG, TIFF, npy, NIfTI or DICOM"),
    "E106": Kind("file-missing", "correct the path; paths in a manifest count from the manifest's own folder"),
    "H107": Kind("file-ignored", "nothing to do if these files are not data"),
    "H108": Kind("reader-incomplete", "nothing to do if this reader did not see these images"),
    # One file by itself
    "E201": Kind("unreadable", "copy or export the file again"),
    "E202": Kind("package-needed", "install the package that is named, or save the file without that compression"),
    "E203": Kind("transparent", "flatten the picture onto a background, or save it without alpha"),
    "E204": Kind("bad-series", "keep the slices of one series, and nothing else, in the folder"),
    "E205": Kind("lossy-mask", 'export masks as PNG; or cut the values with "labels": {"threshold": 128}'),
    "E206": Kind("not-finite", "replace nan and infinite values before saving the image"),
    "E207": Kind("axes-unclear", 'say how arrays are stored, such as "axes": "HWC"'),
    "W208": Kind("uneven-slices", "look for slices that are missing from the series"),
    "W209": Kind("blank-image", "export the image again if it should show something"),
    "E210": Kind("too-large", "cut it into parts, or allow more with --max-pixels N or AMBISEG_MAX_PIXELS=N"),
    # Images and masks together
    "E301": Kind("size-differs", "export the mask at the size of its image"),
    "E302": Kind("grid-differs", 'resample the mask to its image, or compare sizes alone: "geometry": "ignore"'),
    "E303": Kind("class-unknown", "declare the class in `classes`, a void value in `void`, or correct the mask"),
    "E304": Kind("colour-unknown", "add the colour to `colours`, as a class id or as void"),
    "E305": Kind("not-class-ids", "save the mask as integers"),
    "E306": Kind("labels-unclear", "declare `labels`, `classes` or `void` in ambiseg.json"),
    "E307": Kind("mask-in-colour", 'say what each colour means: "colours": {"#ff0000": 1, …}'),
    "E308": Kind("channels-differ", 'save all images alike, or declare "channels": 3 to read grey ones as colour'),
    "E309": Kind("dtype-differs", "save all images alike, or declare `intensity` for the units they share"),
    "E310": Kind("bad-weights", "give each reader a weight of 0 or more, and at least one above 0"),
    "E312": Kind("soft-edges", 'cut the values: "labels": {"threshold": 128}; or export masks without smoothing'),
    "E313": Kind("segments-unclear", 'declare the class of each segment or structure: "segments": {"GTV": 1, …}'),
    "E314": Kind("segments-overlap", 'declare which lies on top: the last of "segments": {"PTV": 1, "GTV": 2, …}'),
    "W311": Kind("all-void", "leave the image out, or look at the void value"),
    # The data set as a whole
    "E401": Kind("patient-in-two-splits", "move all images of a patient into one split"),
    "E402": Kind("picture-in-two-splits", "keep the picture in one split"),
    "W403": Kind("picture-twice", "remove one, or give both the same patient, so that no split divides them"),
    "W404": Kind("readers-identical", "remove the copy, or it counts as a second reader"),
    "W405": Kind("reader-never-marks", "check whether the reader's masks were exported"),
    "W406": Kind("class-never-marked", "check whether the class list fits the masks"),
    "W407": Kind("nothing-marked", "check whether the masks were exported"),
    "W408": Kind("reader-apart", "look at the reader's masks: another structure, a shift, or a real disagreement"),
    "W409": Kind("mask-apart", "look at the mask: it may show another structure, or belong to another image"),
    "H410": Kind("one-reader", "nothing to do if each image was given to one reader only"),
    "H411": Kind("settings-not-written", "write the lines below into ambiseg.json: opening then reads no masks"),
    "H412": Kind("intensity-not-declared", "write the lines below into ambiseg.json, with the window you want"),
    "H413": Kind("patients-not-declared", "declare `patient`, so that no split divides a patient"),
    "W415": Kind(
        "patient-likely-in-two-splits",
        'move the images of a patient into one split, or declare "patient": ".+" if they are of different patients',
    ),
    "H414": Kind(
        "patients-assumed",
        'declare "patient", a regular expression on the name, if that is wrong; ".+" keeps each image on its own',
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem of one file: its code, the file, and what was expected and found there.

    >>> Problem("E301", "masks/b/x.png", "expected 64×64 as its image, found 64×63").line
    'masks/b/x.png: expected 64×64 as its image, found 64×63'
    """

    code: str
    file: str
    message: str
    fix: str = ""  # if given, replaces the remedy of its kind

    @property
    def severity(self) -> str:
        return SEVERITIES[self.code[0]]

    @property
    def name(self) -> str:
        return KINDS[self.code].name

    @property
    def remedy(self) -> str:
        return self.fix or KINDS[self.code].remedy

    @property
    def line(self) -> str:
        said = f"{self.file}: {self.message}" if self.file else self.message
        return "".join(c if c.isprintable() else " " for c in said)  # names and headers hold whatever they hold

    def as_dict(self) -> dict[str, str]:
        return {**asdict(self), "severity": self.severity, "name": self.name, "fix": self.remedy}


class FileError(DataError):
    """A :class:`~ambiseg._util.errors.DataError` that carries its :class:`Problem`.

    >>> print(FileError.of("E201", "a.png", "expected a picture, found an empty file"))
    a.png: expected a picture, found an empty file
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.line)
        self.problem = problem
        self.__notes__ = [f"→ {problem.remedy}"]  # Python 3.11 and newer print it below the error

    @staticmethod
    def of(code: str, file: str | Path, message: str, fix: str = "") -> FileError:
        return FileError(Problem(code, str(file), message, fix))

    def __reduce__(self) -> tuple[type[FileError], tuple[Problem]]:
        return FileError, (self.problem,)  # workers of a loader hand their errors over pickled


def one_per_file(problems: Iterable[Problem]) -> list[Problem]:
    """One problem per kind and file: those of further slices of a volume are counted in the first one's message.

    >>> [found.line for found in one_per_file(Problem("E303", "a.nii", f"found {n}") for n in (7, 7, 8))]
    ['a.nii: found 7, and the like in 1 more slice']
    """
    found: dict[tuple[str, str], list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        found.setdefault((problem.code, problem.file), []).append(problem)
    return [
        replace(first, message=first.message + f", and the like in {count(len(more), 'more slice')}" * bool(more))
        for first, *more in found.values()
    ]


def known(word: str, words: Sequence[str]) -> str:
    """For an unknown word: the nearest known one, and all of them.

    >>> known("patiant", ["image", "patient"])
    'did you mean patient? Known: image, patient'
    """
    near = did_you_mean(word.lower(), words).removeprefix("; ")
    return f"{near} Known: {', '.join(words)}".lstrip()
