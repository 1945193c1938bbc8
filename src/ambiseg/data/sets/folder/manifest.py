"""A manifest: one file that names every image, its masks, and who drew them, wherever these files are."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ambiseg._util.parsing import shown
from ambiseg._util.reading import read_csv
from ambiseg._util.text import some
from ambiseg.data.sets.folder.layout import SPLITS, Entry, Listing, MaskFile
from ambiseg.data.sets.folder.settings import read_settings, told
from ambiseg.io.errors import FileError, known
from ambiseg.io.formats import stem_of

NAMES = ("manifest.csv", "manifest.json")
COLUMNS = ("image", "mask", "reader", "weight", "patient", "split", "name")
_LONGEST, _NAME = 4096, 500  # characters of a path, and of a case's name
KEYS = ("image", "masks", "weights", "patient", "split", "name")


def find_manifest(path: Path) -> Path | None:
    """The manifest that a path is, or that a folder has."""
    if path.is_file():
        return path
    there = [path / name for name in NAMES if (path / name).is_file()]
    if len(there) > 1:
        raise FileError.of("E007", path, f"expected one manifest, found {' and '.join(NAMES)}", "keep one of them")
    return there[0] if there else None


def list_manifest(path: Path) -> Listing:
    """The images of a manifest in the order of their first mention.

    CSV has a row for every mask, with the columns ``image`` and ``mask``, and perhaps ``reader``, ``weight``,
    ``patient``, ``split`` and ``name``. JSON has a list with an object for every image: ``image``, ``masks`` (a list,
    or an object with a path for each reader), and perhaps ``weights`` (in the same form), ``patient``, ``split`` and
    ``name``. Paths count from the manifest's folder.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "manifest.csv"
    >>> _ = path.write_text("image,mask,reader\\na.png,b.png,Ann\\na.png,c.png,Bob\\n")
    >>> for name in "abc":
    ...     (path.parent / f"{name}.png").touch()
    >>> (entry,) = list_manifest(path).entries
    >>> entry.name, [(mask.reader, mask.path.name) for mask in entry.masks]
    ('a', [('Ann', 'b.png'), ('Bob', 'c.png')])
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".json"):
        message = f"expected a folder, or a manifest .csv or .json, found {suffix or 'neither'}"
        raise FileError.of("E002", path, message, "give the folder that holds images/ and masks/, or the manifest")
    read, rows_of = (_read_json, _image_rows) if suffix == ".json" else (_read_csv, lambda row: [row])
    listing = Listing()
    entries: dict[Path, Entry] = {}
    for where, content in read(path):
        try:
            for row in rows_of(content):
                _add(row, entries, path.parent)
        except ValueError as error:
            listing.report("E007", f"{path}, {where}", str(error))
    if not entries and not listing.problems:
        raise FileError.of("E007", path, "expected at least one image, found none")
    _check_entries(entries.values(), listing, path)
    return listing


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row with its place."""
    with told(path, "E007"):
        rows = read_csv(path, _delimiter)
    if not rows or not any(rows[0]):
        raise FileError.of("E007", path, f"expected a first row of {', '.join(COLUMNS)}, found none")
    columns = [cell.lower() for cell in rows[0]]
    for column in columns:
        if column not in COLUMNS:
            found = f"{shown(column)}; {known(column[:_LONGEST], COLUMNS)}"
            raise FileError.of("E007", path, f"expected known columns, found {found}")
    for column in ("image", "mask"):
        if columns.count(column) != 1:
            raise FileError.of("E007", path, f"expected one column {column!r}, found {some(columns, 8)}")
    for number, row in enumerate(rows[1:], 2):
        if any(row) and len(row) != len(columns):
            message = f"expected {len(columns)} cells, found {len(row)}"
            fix = "put quotation marks round a path with a comma" if len(row) > len(columns) else ""
            raise FileError.of("E007", f"{path}, row {number}", message, fix)
        if any(row):
            yield f"row {number}", dict(zip(columns, row, strict=True))


def _delimiter(head: str) -> str:
    return next((mark for mark in ("\t", ";") if mark in head and "," not in head), ",")


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each image with its place."""
    cases = read_settings(path, "E007")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        found = f"an object with the keys {some(list(cases), 3)}" if isinstance(cases, dict) else _found(cases)
        raise FileError.of("E007", path, f"expected a list with an object for each image, found {found}")
    return ((f"image {number}", case) for number, case in enumerate(cases, 1))


def _image_rows(case: dict[str, Any]) -> list[dict[str, str]]:
    """The rows that a CSV would have for one image; ``ValueError`` says what is wrong with it."""
    for key in case:
        if key not in KEYS:
            raise ValueError(f"expected known keys, found {shown(key)}; {known(key[:_LONGEST], KEYS)}")
    masks, weights = case.get("masks"), case.get("weights")
    if not isinstance(masks, (list, dict)) or not isinstance(weights, (type(masks), type(None))):
        found = f"found {_found(masks)} and {_found(weights)}"
        raise ValueError(f"expected masks, and weights if any, as two lists or two objects, {found}")
    named, weighed = _by_reader(masks), _by_reader(weights or [])
    if extra := set(weighed) - set(named):
        raise ValueError(f"expected a mask for each weight, found none for {shown(min(extra))}")
    if isinstance(weights, list) and len(weights) != len(masks):
        raise ValueError(f"expected a weight for each of {len(masks)} masks, found {len(weights)}")
    for what, value in (("image", case.get("image") or ""), *((f"mask of {who}", m) for who, m in named.items())):
        if not isinstance(value, str):
            raise ValueError(f"expected the path of the {what} as text, found {_found(value)}")
    for key in ("patient", "split", "name"):
        if isinstance(case.get(key), bool | list | dict):
            raise ValueError(f"expected the {key} as text, found {_found(case[key])}")
    common = {key: str(case[key]) for key in ("image", "patient", "split", "name") if case.get(key) is not None}
    return [
        {**common, "mask": mask, "reader": reader, "weight": str(weighed.get(reader, ""))}
        for reader, mask in named.items()
    ] or [common]


def _by_reader(values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    return values if isinstance(values, dict) else {f"reader_{m}": value for m, value in enumerate(values, 1)}


def _found(value: object) -> str:
    return {list: "a list", dict: "an object", type(None): "none"}.get(type(value)) or shown(value)


def _add(row: Mapping[str, str], entries: dict[Path, Entry], folder: Path) -> None:
    """Add one row; ``ValueError`` says what is wrong with it."""
    if not row.get("image"):
        raise ValueError("expected the path of an image, found none")
    written = _slashes(row["image"], folder)
    split = row.get("split", "")
    if split and split.lower() not in SPLITS:
        raise ValueError(f"expected split train, val or test, found {split!r}")
    entry = Entry("", folder / written, (), row.get("patient") or None, SPLITS.get(split.lower()))
    before = entries.get(entry.image, entry)
    for what, one, other in (("patient", before.patient, entry.patient), ("split", before.split, entry.split)):
        if one != other:
            raise ValueError(f"expected one {what} per image, found {one!r} and {other!r} for {written}")
    masks = before.masks
    if row.get("mask"):
        reader = row.get("reader", f"reader_{len(masks) + 1}")
        if not reader:
            raise ValueError("expected the name of a reader, found an empty cell")
        if reader in {mask.reader for mask in masks}:
            raise ValueError(f"expected one mask of reader {reader!r} for {written}, found a second")
        masks += (MaskFile(reader, folder / _slashes(row["mask"], folder), _weight(row.get("weight", ""))),)
    name = row.get("name") or before.name or _name(written, entry.image)
    if len(name) > _NAME:
        raise ValueError(f"expected a name of at most {_NAME} characters, found {shown(name)}")
    entries[entry.image] = replace(entry, name=name, masks=masks)


def _slashes(written: str, folder: Path) -> str:
    """A path as this system writes it: manifests made on Windows have backslashes."""
    if len(written) > _LONGEST or any(len(os.fsencode(part)) > 255 for part in re.split(r"[/\\\\]", written)):
        raise ValueError(f"expected the path of a file, found a text of {len(written):,} characters: {shown(written)}")
    return written if "\\" not in written or (folder / written).exists() else written.replace("\\", "/")


def _name(written: str, image: Path) -> str:
    """The image's path as written, without its suffix; of a path that leaves the folder only the last part."""
    stem = image.name if image.is_dir() else stem_of(image)
    folder = Path(written).parent
    return stem if folder.is_absolute() or ".." in folder.parts else (folder / stem).as_posix()


def _weight(text: str) -> float | None:
    try:
        weight = float(text) if text else None
    except ValueError:
        raise ValueError(f"expected a number as weight, found {text!r}") from None
    if weight is not None and not 0 <= weight < math.inf:
        raise ValueError(f"expected a weight of 0 or more, found {text}")
    return weight


def _check_entries(entries: Iterable[Entry], listing: Listing, path: Path) -> None:
    """List the entries whose image is there and has a name of its own, with the masks that are there."""
    names: dict[str, Path] = {}
    for entry in entries:
        other = names.setdefault(entry.name, entry.image)
        if other != entry.image:
            message = f"expected a name of its own, found {entry.name!r} for {other} as well"
            listing.report("E104", entry.image, message, "add a column `name`")
            continue
        if not entry.image.exists():
            listing.report("E106", entry.image, f"expected the file that {path.name} names, found none")
            continue
        there = tuple(mask for mask in entry.masks if mask.path.exists())
        for mask in entry.masks:
            if mask not in there:
                message = f"expected the mask of {mask.reader} that {path.name} names, found none"
                listing.report("E106", mask.path, message)
        if not entry.masks:
            listing.report("E101", entry.image, f"expected at least one mask in {path.name}, found none")
        elif all(mask.weight == 0 for mask in entry.masks):
            message = f"expected a weight above 0 in {path.name}, found {len(entry.masks)} of 0"
            listing.report("E310", entry.image, message)
        listing.entries.append(replace(entry, masks=there))
