"""LIDC-IDRI in every form it circulates in, to one store: see docs/lidc.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from ambiseg._util.errors import DataError
from ambiseg._util.files import Lock, contents, made
from ambiseg._util.reading import Unreadable, open_regular
from ambiseg._util.text import did_you_mean, some
from ambiseg._util.walking import walk
from ambiseg.data.case import Progress
from ambiseg.data.sets.lidc import released
from ambiseg.data.sets.lidc.crops import Crops, Options
from ambiseg.data.sets.lidc.dicom import Dicom, has_dicom_name
from ambiseg.data.sets.lidc.folders import Npy, Png, part_folders
from ambiseg.data.sets.lidc.hdf5 import Hdf5
from ambiseg.data.sets.lidc.single_file import Archive, Pickle
from ambiseg.data.store import FILES, Store, state_of

__all__ = ["FORMS", "Crops", "Options", "detect", "open_form", "prepare"]

FORMS: dict[str, type[Crops]] = {"pickle": Pickle, "hdf5": Hdf5, "npy": Npy, "png": Png, "npz": Archive, "dicom": Dicom}
"""The forms of LIDC, by the name that ``form`` takes."""
_ANY = f"LIDC as {', '.join(FORMS)}"
_SUFFIXES = {suffix: name for name, form in FORMS.items() for suffix in form.suffixes}
_WRONG = {  # first bytes of files that are not LIDC -> what is wrong
    (b"SQLite format 3",): "expected images, found a database: give it as outlines, and the DICOM folder as source",
    (b"\x1f\x8b", b"BZh", b"\xfd7zXZ"): "expected what an archive holds, found the archive: unpack it first",
    (b"<!doctype", b"<html", b"<?xml"): f"expected {_ANY}, found a web page or XML: was the download refused?",
}

Reporting = Callable[[str], AbstractContextManager[Progress | None]]


def detect(source: Path) -> tuple[str, Path]:
    """The form of the data at ``source``, a key of :data:`FORMS`, and the file or folder that it is in.

    A file is known by its first bytes, a folder by the files in it. Two forms in one folder are an error that names
    both.
    """
    if not source.exists():
        raise DataError(f"{source}: expected a file or folder of LIDC, found nothing there")
    if source.is_file():
        return _file_form(source), source
    found = _folder_forms(source)
    if not found:
        raise DataError(f"{source}: expected {_ANY}, found none of them")
    if len(found) > 1:
        listed = " and ".join(f"{form} ({path.relative_to(source)})" for form, path in sorted(found.items()))
        raise DataError(f"{source}: expected one form of LIDC, found {listed}: give one of them, or name the form")
    return next(iter(found.items()))


def _file_form(path: Path) -> str:
    head, suffix = _head(path), path.suffix.lower()
    if not head:
        raise DataError(f"{path}: expected {_ANY}, found an empty file")
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if head.startswith(b"PK\x03\x04"):
        return "npz"
    if head[128:] == b"DICM":
        raise DataError(f"{path}: expected the folder of all DICOM slices, found one of them")
    for starts, problem in _WRONG.items():
        packed = suffix == ".tar" and "unpack" in problem
        if packed or head.startswith(starts) or head.lstrip().lower().startswith(starts):
            raise DataError(f"{path}: {problem}")
    if head.startswith((b"\x80", b"(d", b"}q", b"(l")) or _SUFFIXES.get(suffix) == "pickle":
        return "pickle"
    raise DataError(f"{path}: expected {_ANY}, found a file that starts with {head[:8]!r}")


def _folder_forms(source: Path) -> dict[str, Path]:
    """Every form that has a file in the folder, with the place to read it from."""
    found: dict[str, Path] = {}
    parts = set(part_folders(source).values())
    for folder, files in walk(source, lambda name: name.startswith(".")):
        for path in (folder / name for name in files):
            suffix = path.suffix.lower()
            if form := _SUFFIXES.get(suffix):
                if form in found:
                    raise DataError(f"{source}: expected one {form} file, found {found[form].name} and {path.name}")
                found[form] = path
            elif suffix in (".npy", ".png") and not parts.isdisjoint(path.parents):
                found[suffix[1:]] = source
            elif "dicom" not in found and has_dicom_name(path) and (suffix == ".dcm" or _is_dicom(path)):
                found["dicom"] = source
        if len(found) > 1:
            break
    return found


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(132) or b""


def _is_dicom(path: Path) -> bool:
    with suppress(OSError, Unreadable):  # what may not be read, or is a pipe, is none
        return _head(path)[128:] == b"DICM"
    return False


def open_form(form: str, source: Path, options: Options, progress: Progress | None = None) -> Crops:
    """The cases of ``source``, each read when it is asked for."""
    if form not in FORMS:
        raise DataError(f"form: expected one of {', '.join(FORMS)}, found {form!r}{did_you_mean(form, FORMS)}")
    if not source.is_file() and not source.is_dir():  # a pipe would be waited for
        found = "none" if source.exists() else "nothing there"
        raise DataError(f"{source}: expected a file or folder of LIDC, found {found}")
    if options.crop is not None and options.crop < 1:
        raise DataError(f"crop: expected at least 1 pixel, found {options.crop}")
    if options.align and not FORMS[form].from_v1:
        aligned = ", ".join(name for name, each in FORMS.items() if each.from_v1)
        raise DataError(f"align: expected a form that was made from the v1 pickle ({aligned}), found {form}")
    if options.outlines is not None and form != "dicom":
        raise DataError(f"outlines: expected the form dicom, found {form}")
    if source.is_dir() and FORMS[form].suffixes:
        files = sorted(path for path in source.rglob("*") if _SUFFIXES.get(path.suffix.lower()) == form)
        if len(files) != 1:
            found = some([path.name for path in files], 2, " and ") or "none"
            raise DataError(f"{source}: expected one {form} file, found {found}")
        source = files[0]
    return FORMS[form](source, options, progress)


def prepare(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: Options | None = None,
    form: str | None = None,
    reporting: Reporting = lambda what: nullcontext(),
) -> tuple[Store, Crops]:
    """Convert LIDC at ``source`` to a store at ``folder``; returns the store and the cases it was made from.

    One case is in memory at a time. A call that was interrupted is continued where it stopped; a store of other data,
    or of the same data with other options, is not changed. Cases of the whole v1 pickle, which has no parts, are given
    those of the paper.

    Args:
        form: a key of :data:`FORMS`; ``None``: detected.
        reporting: called with the name of a step, a context that gives a callback of (done, total).
    """
    options, place, folder = options or Options(), Path(source), Path(folder)
    if foreign := sorted({*contents(folder)} - FILES):  # before the source is read, which may take long
        raise DataError(f"{folder}: expected a store or an empty folder to write one, found {foreign[0]}")
    if form is None:
        form, place = detect(place)
    with reporting("indexing") as progress:
        cases = open_form(form, place, options, progress)
    if form == "pickle" and options.split is None and len({crop.series for crop in cases.crops}) == released.SERIES:
        cases.options = replace(options, split="mose")
        cases.declare_mose_parts()
    if state_of(folder) not in (None, cases.state()):
        raise DataError(
            f"{folder}: expected an empty folder, or an interrupted conversion of this data; found another store"
        )
    with made(folder), Lock(folder, "preparing"), reporting("converting") as progress:
        store = Store.build(cases, folder, progress)
    return store, cases
