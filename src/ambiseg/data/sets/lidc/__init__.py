"""LIDC-IDRI in every form it circulates in, to one store: see docs/lidc.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc.crops import Crops, Options
from ambiseg.data.store import Progress, Store, state_of

__all__ = ["FORMS", "Crops", "Options", "detect", "open_form", "prepare"]

FORMS = {  # what --form takes -> what it is
    "pickle": "data_lidc.pickle (v1)",
    "hdf5": "an HDF5 file made from it",
    "npy": "folders of .npy files made from it",
    "png": "folders of PNG files (v2)",
    "npz": "one .npz with image and masks",
    "dicom": "DICOM slices with XML files or --outlines",
}
_SHIFTED = ("pickle", "hdf5", "npy", "npz")  # made from the v1 pickle, or possibly so: its masks lie beside the CT
_FILES = {".pickle": "pickle", ".pkl": "pickle", ".hdf5": "hdf5", ".h5": "hdf5", ".npz": "npz"}
_DICOM = (".dcm", ".dicom", ".ima", "")


def detect(source: Path) -> tuple[str, Path]:
    """The form of what is at ``source``, a key of :data:`FORMS`, and the file or folder that it is in.

    A file is known by its first bytes, a folder by the files in it. Two forms in one folder are an error that names
    both.
    """
    if not source.exists():
        raise DataError(f"{source}: expected a file or folder of LIDC, found nothing there")
    if source.is_file():
        return _file_form(source), source
    found = _folder_forms(source)
    if not found:
        raise DataError(f"{source}: expected LIDC as {', '.join(FORMS)}, found none of them")
    if len(found) > 1:
        listed = " and ".join(f"{form} ({path.relative_to(source)})" for form, path in sorted(found.items()))
        raise DataError(f"{source}: expected one form of LIDC, found {listed}: give one of them, or say --form")
    return next(iter(found.items()))


def _file_form(path: Path) -> str:
    with open(path, "rb") as file:
        head = file.read(132)
    if not head:
        raise DataError(f"{path}: expected LIDC as {', '.join(FORMS)}, found an empty file")
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if head.startswith(b"PK\x03\x04"):
        return "npz"
    if head[128:] == b"DICM":
        raise DataError(f"{path}: expected the folder of all DICOM slices, found one of them")
    if head.startswith(b"SQLite format 3"):
        raise DataError(
            f"{path}: expected images, found a database: give it with --outlines, and the DICOM folder here"
        )
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DataError(
            f"{path}: expected LIDC as {', '.join(FORMS)}, found a web page or XML: was the download refused?"
        )
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")) or path.suffix.lower() == ".tar":
        raise DataError(f"{path}: expected what an archive holds, found the archive: unpack it first")
    if head[:1] == b"\x80" or path.suffix.lower() in (".pickle", ".pkl") or head[:2] in (b"(d", b"}q", b"(l"):
        return "pickle"
    raise DataError(f"{path}: expected LIDC as {', '.join(FORMS)}, found a file that starts with {head[:8]!r}")


def _folder_forms(source: Path) -> dict[str, Path]:
    """Every form that has a file in the folder, with the place to read it from."""
    from ambiseg.data.sets.lidc.folders import part_folders

    found: dict[str, Path] = {}
    parts = set(part_folders(source).values())
    for place, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            suffix = path.suffix.lower()
            if suffix in _FILES:
                form = _FILES[suffix]
                if form in found:
                    raise DataError(f"{source}: expected one {form} file, found {found[form].name} and {name}")
                found[form] = path
            elif suffix in (".npy", ".png") and not parts.isdisjoint(path.parents):
                found[suffix[1:]] = source
            elif (suffix in _DICOM or suffix[1:].isdigit()) and "dicom" not in found and _is_dicom(path):
                found["dicom"] = source
        if len(found) > 1:
            break
    return found


def _only(folder: Path, form: str) -> Path:
    """The one file in a folder that a form is in."""
    files = sorted(path for path in folder.rglob("*") if _FILES.get(path.suffix.lower()) == form)
    if len(files) != 1:
        found = " and ".join(path.name for path in files[:2]) or "none"
        raise DataError(f"{folder}: expected one {form} file, found {found}")
    return files[0]


def _is_dicom(path: Path) -> bool:
    if path.suffix.lower() == ".dcm":
        return True
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"


def open_form(form: str, source: Path, options: Options, progress: Progress | None = None) -> Crops:
    """The cases of ``source``, each read when it is asked for."""
    if form not in FORMS:
        raise DataError(f"--form: expected one of {', '.join(FORMS)}, found {form!r}")
    if not source.exists():
        raise DataError(f"{source}: expected a file or folder of LIDC, found nothing there")
    if options.align and form not in _SHIFTED:
        raise DataError(f"--align: is for what was made of the v1 pickle ({', '.join(_SHIFTED)}), found {form}")
    if options.outlines is not None and form != "dicom":
        raise DataError(f"--outlines: is for DICOM, found {FORMS[form]}")
    if form == "pickle":
        from ambiseg.data.sets.lidc.pickles import Pickle

        return Pickle(source, options)
    if form == "hdf5":
        from ambiseg.data.sets.lidc.hdf5 import Hdf5

        return Hdf5(source, options)
    if form == "npz":
        from ambiseg.data.sets.lidc.archive import Archive

        return Archive(source, options)
    if form == "dicom":
        from ambiseg.data.sets.lidc.dicom import Dicom

        return Dicom(source, options, progress)
    from ambiseg.data.sets.lidc.folders import Npy, Png

    return Npy(source, options) if form == "npy" else Png(source, options)


Reporting = Callable[[str], AbstractContextManager[Progress | None]]


def prepare(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: Options | None = None,
    form: str | None = None,
    reporting: Reporting = lambda what: nullcontext(),
) -> tuple[Store, Crops]:
    """Convert LIDC at ``source`` to a store at ``folder``; returns the store and what it was made from.

    One case is in memory at a time. A call that was interrupted is taken up where it stopped; a store of other data, or
    of the same data with other options, is left alone.

    Args:
        form: a key of :data:`FORMS`; found out unless given.
        reporting: gives a callback of (done, total) for a step of that name.
    """
    options, place, folder = options or Options(), Path(source), Path(folder)
    if form is None:
        form, place = detect(place)
    elif place.is_dir() and form in _FILES.values():
        place = _only(place, form)
    with reporting("indexing") as progress:
        cases = open_form(form, place, options, progress)
    if form == "pickle" and options.split is None and len({entry.series for entry in cases.entries}) >= 3:
        cases = _with_parts(cases)
    found = state_of(folder)
    if found is not None and found != cases.state():
        raise DataError(f"{folder}: expected an empty folder, or what an interrupted call left; found another store")
    with reporting("converting") as progress:
        store = Store.build(cases, folder, progress)
    return store, cases


def _with_parts(cases: Crops) -> Crops:
    """The pickle has no parts of its own; the paper's are declared, so that a run without further ado is on them."""
    from ambiseg.data.sets.lidc.released import mose_parts

    cases.options = replace(cases.options, split="mose")
    cases.declared = mose_parts(cases)
    return cases
